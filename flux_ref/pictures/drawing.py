"""What is drawn: a run's stored captions while it trains, and what eval.py is asked for."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from flux_ref import config, config_file, errors, ranks, shards, toy
from flux_ref.config import Config, ModelConfig
from flux_ref.data import Rows, TrainSet, ValSet
from flux_ref.errors import Refusal
from flux_ref.pictures import sheet
from flux_ref.pictures.artist import Artist, stored_captions
from flux_ref.pictures.encoders import KINDS, Encoders
from flux_ref.ranks import World
from flux_ref.report import Reporter
from flux_ref.step_runner import State


class Gallery:
    """The folder samples/ of a run: a sheet of pictures at each interval and at the end, and a strip of all sheets."""

    def __init__(self, cfg: Config, world: World, report: Reporter, captions: ValSet | TrainSet, train_set: TrainSet):
        """captions: the data set whose first captions are drawn. Collective. Raises: Refusal for a bad autoencoder."""
        self.cfg = cfg
        self.world = world
        self.report = report
        self.artist = Artist(cfg, world)
        self.captions = captions
        self.train_set = train_set
        self.newest = -1  # training samples at the newest sheet

    def paint(self, state: State, at: Callable[[str], None]) -> None:
        """Draw the first cfg.sample.count captions from the same noise as ever, unless they are drawn. Collective.

        Training goes on as without pictures: drawing changes no weight and no number of training, and takes dynamic
        FP8 scales. A file that cannot be written does not end the run. at: as for `Artist.paint`.
        """
        samples = state.samples
        if self.newest == samples:
            return
        self.newest = samples
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize()  # sync: the training steps under way do not count as drawing
        begin = time.perf_counter()
        texts = stored_captions(self.captions.shards, self.cfg.sample.count)
        pictures = self.artist.paint(state.net, texts, self.train_set.empty, at)
        path = self.report.folder / "samples" / f"{samples:09d}.png"
        with self.report.spare(path.name):
            if pictures:
                sheet.save(pictures, [caption for caption, _ in texts], path)
                self.report.picture(path, samples)
                if self.cfg.sample.every_samples:
                    sheet.strip(path.parent, pictures[0].shape[1], samples)
            seconds = time.perf_counter() - begin
            self.report.say(f"samples {samples:>10,}  {len(texts)} pictures in {seconds:.1f} s: {path}")
        self.report.pause(time.perf_counter() - begin)


# eval.py


class Drawing:
    """The prompts, or else the first cfg.sample.count captions of val_set, drawn by one net after another."""

    def __init__(
        self, cfg: Config, world: World, options: argparse.Namespace, val_set: ValSet | None, at: Callable[[str], None]
    ):
        """val_set: open; None if there are prompts. at: called with the name of what this rank does. Collective.

        What is not given is looked for in the folder of the autoencoder, or else of the model, by its name in
        FLUX.1-schnell's repository. Raises: Refusal for files that are missing or no such encoders.
        """
        home = Path(cfg.sample.vae or options.path)
        home = home if home.is_dir() else home.parent
        if cfg.data.kind != "shapes" and not cfg.sample.vae and (home / "ae.safetensors").exists():
            cfg = config_file.replace(cfg, sample__vae=str(home))
        self.artist = Artist(cfg, world)
        if options.prompts:
            *rows, self.empty = _encoded([*options.prompts, ""], cfg, world, options, home, at)
            self.texts = list(zip(options.prompts, rows))
            return
        with ranks.agreed():
            if not cfg.sample.count:
                raise Refusal("--draw-only has nothing to draw; give --prompt=TEXT or set sample.count above 0")
            is_guided = cfg.sample.guidance != 1.0
            self.empty = shards.read_empty(config.empty_dir(cfg), val_set.shards.layout) if is_guided else None
        self.texts = stored_captions(val_set.shards, cfg.sample.count)

    def draw(self, net: nn.Module, folder: Path, stem: str, at: Callable[[str], None]) -> str:
        """Save a sheet in a new file of the folder. Returns its path on rank 0, "" on other ranks. Collective."""
        pictures = self.artist.paint(net, self.texts, self.empty, at)
        return str(sheet.save_new(pictures, [caption for caption, _ in self.texts], folder, stem)) if pictures else ""


def _encoded(
    captions: list[str],
    cfg: Config,
    world: World,
    options: argparse.Namespace,
    home: Path,
    at: Callable[[str], None],
) -> list[Rows]:
    """{"t5", "clip"} of each caption as fp32. Rank 0 has the encoders, and drops them before a net is built.

    home: the folder of encoders that are not given. Collective. Raises: Refusal.
    """
    sizes = shards.layout(cfg.model).shapes
    rows = [{name: torch.zeros(sizes[name]) for name in ("t5", "clip")} for _ in captions]
    with ranks.agreed():
        if world.rank == 0:
            encode = _encoder(cfg, options, home, world.device)
            for caption, row in zip(captions, rows):
                at(f"encoding {caption!r}")
                row.update(encode(caption))
    return [{name: ranks.all_reduce(part.to(world.device)).cpu().numpy() for name, part in row.items()} for row in rows]


def _encoder(
    cfg: Config, options: argparse.Namespace, home: Path, device: torch.device
) -> Callable[[str], dict[str, Tensor]]:
    """A function from a caption to its encodings in fp32. Raises: Refusal."""
    model = cfg.model
    if cfg.data.kind == "shapes":
        if options.t5 or options.clip:
            raise Refusal("--t5 and --clip encode for real models; data.kind=shapes has its own encoders")
        if unknown := set(" ".join(options.prompts).lower().split()) - toy.words():
            words = errors.printable(", ".join(sorted(unknown)))
            print(f"the prompts are drawn, but no caption of data.kind=shapes has the words {words}", file=sys.stderr)
        return lambda caption: toy_encodings(caption, model)
    t5, clip = (getattr(options, name) or home / folder for name, (*_, folder) in KINDS.items())
    # fp32 as `prepare images` by default. The net then rounds encodings to parallel.dtype, where a data set has bf16.
    nets = Encoders(None, t5, clip, model, device, torch.float32)

    def encode(caption: str) -> dict[str, Tensor]:
        if nets.t5.longer([caption]):
            raise Refusal(f"prompt {caption[:40]!r}... has more than {model.text_tokens} tokens of T5; shorten it")
        return {name: values[0] for name, values in nets.text([caption]).items()}

    return encode


def toy_encodings(caption: str, model: ModelConfig) -> dict[str, Tensor]:
    """What the stand-in encoders of data.kind=shapes make of a caption, rounded to bf16 as in the data set."""
    values = toy.encode_caption(caption, model.text_tokens, model.t5_dim, model.clip_dim)
    return {name: torch.from_numpy(part).bfloat16().float() for name, part in zip(("t5", "clip"), values)}
