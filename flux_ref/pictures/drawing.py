"""What is drawn: a run's stored captions while it trains, and what eval.py is asked for."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from flux_ref import config, config_file, ranks, toy
from flux_ref.config import Config, ModelConfig
from flux_ref.data import Rows, TrainSet, ValSet
from flux_ref.errors import Refusal
from flux_ref.formats import outside, shards
from flux_ref.pictures import sheet
from flux_ref.pictures.artist import Artist, stored_captions
from flux_ref.pictures.autoencoder import FETCH
from flux_ref.pictures.encoders import KINDS, Encoders
from flux_ref.ranks import World
from flux_ref.run.reporter import Reporter
from flux_ref.step_runner import State

SHORT = ("vae", "steps", "guidance", "seed")  # --NAME is --sample.NAME


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
        FP8 scales. A file that cannot be written does not end the run. at: as `report_place` of `Artist.paint`.
        """
        samples = state.samples
        cfg = self.cfg.sample
        if self.newest == samples:
            return
        if self.world.device.type != "cpu":
            torch.accelerator.synchronize()  # sync: the training steps under way do not count as drawing
        self.newest = samples
        begin = time.perf_counter()
        texts = stored_captions(self.captions.shards, cfg.count)
        pictures = self.artist.paint(state.net, texts, self.train_set.empty, at)
        path = self.report.folder / "samples" / f"{samples:09d}.png"
        names = [caption for caption, _ in texts]
        with self.report.spare(path.name):
            if pictures:
                sheet.save(pictures, names, path)
                self.report.picture(path, samples)
                if cfg.every_samples:
                    sheet.strip(path.parent, pictures[0].shape[1], samples)
            seconds = time.perf_counter() - begin
            self.report.say(f"samples {samples:>10,}  {len(names)} pictures in {seconds:.1f} s: {path}")
        self.report.pause(time.perf_counter() - begin)


# eval.py


def add_options(parser: argparse.ArgumentParser) -> None:
    """Prompts go to options.prompts, short forms of the config's keys to options.overrides."""
    parser.add_argument("--prompt", action="append", type=_utf8, dest="prompts", default=[], metavar="TEXT")
    parser.add_argument("--prompts", action="extend", type=_listed, default=[], metavar="FILE")
    parser.add_argument("--draw-only", action="store_true")
    for name in ("t5", "clip"):
        parser.add_argument(f"--{name}")
    for name in SHORT:
        form = f"--sample.{name}={{}}".format
        parser.add_argument(f"--{name}", action="append", dest="overrides", type=form, default=[])


def _utf8(prompt: str) -> str:
    """A prompt as it was typed. A terminal in another encoding gives bytes that are no UTF-8."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{prompt!r} is not UTF-8; give it in a file of --prompts") from None
    return prompt


def _listed(path: str) -> list[str]:
    """The lines of a file that hold text. Raises: Refusal."""
    text = outside.read_text(Path(path), "list of prompts")
    lines = [line.strip() for line in text.replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise Refusal(f"--prompts={path} holds no prompt; write one on each line")
    return lines


class Drawing:
    """The prompts, or else the first cfg.sample.count captions of val_set, drawn by one net after another."""

    def __init__(
        self, cfg: Config, world: World, options: argparse.Namespace, val_set: ValSet | None, at: Callable[[str], None]
    ):
        """val_set: open; None if there are prompts. at: called with the name of what this rank does. Collective.

        Raises: Refusal for files that are missing or no such encoders.
        """
        if cfg.data.kind != "shapes" and (found := cfg.sample.vae or _nearby(("ae.safetensors", "vae"), cfg, options)):
            cfg = config_file.replace(cfg, sample__vae=str(found))
        self.artist = Artist(cfg, world)
        if options.prompts:
            *rows, self.empty = _encode([*options.prompts, ""], cfg, world, options, at)
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
        if not pictures:
            return ""
        captions = [caption for caption, _ in self.texts]
        return str(sheet.save_new(pictures, captions, folder, stem))


def _nearby(names: tuple[str, ...], cfg: Config, options: argparse.Namespace) -> Path | None:
    """What has one of the names in or beside the autoencoder or the model, as in FLUX.1-schnell's repository."""
    for path in (cfg.sample.vae, options.path):
        for folder in (Path(path), Path(path).parent) if path else ():
            for name in names:
                if (folder / name).exists():
                    return folder / name
    return None


def _encode(
    captions: list[str], cfg: Config, world: World, options: argparse.Namespace, at: Callable[[str], None]
) -> list[Rows]:
    """{"t5", "clip"} of each caption as fp32. Rank 0 has the encoders, and drops them before a net is built.

    Collective. Raises: Refusal.
    """
    sizes = shards.layout(cfg.model).shapes
    rows = [{name: torch.zeros(sizes[name]) for name in ("t5", "clip")} for _ in captions]
    with ranks.agreed():
        if world.rank == 0:
            encode = _encoder(cfg, options, world.device)
            for caption, row in zip(captions, rows):
                at(f"encoding {caption!r}")
                row.update(encode(caption))
    return [{name: ranks.all_reduce(part.to(world.device)).cpu().numpy() for name, part in row.items()} for row in rows]


def _encoder(cfg: Config, options: argparse.Namespace, device: torch.device) -> Callable[[str], dict[str, Tensor]]:
    """A function from a caption to its encodings in fp32. Raises: Refusal."""
    if cfg.data.kind == "shapes":
        if options.t5 or options.clip:
            raise Refusal("--t5 and --clip encode for real models; data.kind=shapes has its own encoders")
        return lambda caption: _toy_prompt(caption, cfg.model)
    folders = {}
    for name, (*_, public) in KINDS.items():
        found = getattr(options, name) or _nearby((public,), cfg, options)
        if not found:
            raise Refusal(f"--prompt needs --{name}=DIR, such as FLUX.1-schnell's {public}; {FETCH}")
        folders[name] = Path(found)
    # fp32 as `prepare images` by default. The net then rounds encodings to parallel.dtype, where a data set has bf16.
    nets = Encoders(None, **folders, model=cfg.model, device=device, dtype=torch.float32)

    def encode(caption: str) -> dict[str, Tensor]:
        if nets.t5.longer([caption]):
            most = cfg.model.text_tokens
            raise Refusal(f"prompt {caption[:40]!r}... has more than {most} tokens; T5 reads {most}; shorten it")
        return {name: values[0] for name, values in nets.text([caption]).items()}

    return encode


def _toy_prompt(caption: str, model: ModelConfig) -> dict[str, Tensor]:
    if unknown := set(caption.lower().split()) - toy.words():
        words = outside.printable(", ".join(sorted(unknown)))
        said = f"prompt {caption!r} is drawn, but captions of data.kind=shapes never have the words {words}"
        print(said, file=sys.stderr)
    return toy_encodings(caption, model)


def toy_encodings(caption: str, model: ModelConfig) -> dict[str, Tensor]:
    """What the stand-in encoders of data.kind=shapes make of a caption, rounded to bf16 as in the data set."""
    values = toy.encode_caption(caption, model.text_tokens, model.t5_dim, model.clip_dim)
    return {name: torch.from_numpy(part).bfloat16().float() for name, part in zip(("t5", "clip"), values)}
