"""Pictures from captions: Euler steps from noise to data, with classifier-free guidance; and the pictures of a run."""

import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torchvision.transforms.v2 import functional as transforms
from torchvision.utils import make_grid

from flux_ref import config, dataset, flow, ranks, rng, sharding, toy
from flux_ref.cli import Say, printable
from flux_ref.config import Config
from flux_ref.dataset import Arrays, ShardSet
from flux_ref.files import matching, write_png
from flux_ref.pictures import encoders
from flux_ref.precision.recipe import DTYPES
from flux_ref.ranks import World
from flux_ref.report import Reporter
from flux_ref.trainer import TrainState

Encoding = list[Tensor]  # [t5, clip] of a caption, or of several
LOOKED_AT = 16  # samples for each different caption that is wanted


class Artist:
    """Draws the same captions by one net after another.

    captions: what is drawn. encoded: [t5_TE, clip_V] of each in bf16. empty: of the empty caption, for guidance.
    originals: the latents of the data set's own pictures, where captions are from a data set.
    """

    def __init__(self, cfg: Config, world: World, vae: Path):
        """vae: of load_autoencoder; data.kind=toy needs none. Collective. Raises: Refusal."""
        self.cfg = cfg
        self.world = world
        self.dtype = DTYPES[cfg.compute.dtype]
        self.captions: list[str] = []
        self.encoded: list[Encoding] = []
        self.autoencoder: Any = None
        with ranks.agreed():
            if world.rank == 0 and cfg.data.kind != "toy":
                self.autoencoder = encoders.load_autoencoder(vae, world.device)

    def take_stored(self, samples: ShardSet) -> None:
        """Draw pictures.count different captions from all over an open data set, always the same.

        At most LOOKED_AT samples for each caption are looked at, so there may be fewer. Raises: Refusal, Fault.
        """
        count = self.cfg.pictures.count
        found: dict[str, Arrays] = {}
        # A set may be sorted.
        for meta, arrays in map(samples.sample, rng.order(0, 0, len(samples))[: LOOKED_AT * count].tolist()):
            found.setdefault(meta.caption or meta.key, arrays)
            if len(found) == count:
                break
        self.captions = list(found)
        self.encoded = [_texts(arrays) for arrays in found.values()]
        self.originals = [torch.from_numpy(dataset.from_bf16_bits(arrays["mean"])) for arrays in found.values()]
        if self.cfg.pictures.guidance != 1.0:
            self.empty = _texts(dataset.read_empty(config.empty_dir(self.cfg), samples.layout))

    def take_prompts(self, prompts: list[str], home: Path, at: Say) -> None:
        """Draw prompts, encoded as a data set has them. home: the folder of the encoders. Raises: Refusal.

        The encoders are gone before a net is built. at: called before each prompt with what this rank does.
        """
        model = self.cfg.model
        self.captions = prompts
        if self.cfg.data.kind == "toy":
            for text in (*prompts, ""):
                values = toy.encode_caption(text, model, own=bool(self.cfg.data.pictures)).values()
                self.encoded.append([torch.from_numpy(part).bfloat16() for part in values])
        else:
            nets = encoders.text_encoders(home, model, self.world.device, torch.float32)
            for text in (*prompts, ""):
                at(f"encoding {text!r}")
                self.encoded.append([net([text])[0].bfloat16() for net in nets])
        self.empty = self.encoded.pop()

    def paint(self, net: nn.Module, at: Say) -> list[Tensor]:
        """The latent of a picture of each caption, (C, Y, X); none on ranks other than 0. Collective.

        at: called before each sampling step with its name. It may raise, on all ranks alike.
        """
        painted: list[Tensor] = []
        with torch.compiler.set_stance("force_eager"):  # batches of pictures have shapes of their own
            for first in range(0, len(self.captions), self.cfg.eval.batch):
                z_BCYX = self.generate_latents(net, first, at)
                if self.world.rank == 0:
                    painted += z_BCYX
        return painted

    @torch.no_grad()
    def generate_latents(self, net: nn.Module, first: int, at: Say) -> Tensor:
        """A latent for each of eval.batch captions: (B, C, Y, X) fp32, on the autoencoder's scale. Collective.

        first: number of the first caption. Caption i starts from noise i of pictures.seed. at: as for `paint`.
        """
        model = self.cfg.model
        pictures = self.cfg.pictures
        texts = self.encoded[first : first + self.cfg.eval.batch]
        encodings = [self._stacked(texts)]
        if pictures.guidance != 1.0:
            encodings.append(self._stacked([self.empty] * len(texts)))
        noise = [
            rng.normals(pictures.seed, rng.SAMPLING, model.latent_shape, sample=first + i) for i in range(len(texts))
        ]
        x_BNP = flow.pack(torch.from_numpy(np.stack(noise)).to(self.world.device))
        try:
            for step in range(pictures.steps):  # from 1, noise, to 0, data: BFL flux, get_schedule of schnell
                at(f"sampling step {step}")
                t_B = x_BNP.new_full((len(texts),), 1 - step / pictures.steps)
                velocities = [net(x_BNP.to(self.dtype), *encoding, t_B).float() for encoding in encodings]
                unguided_BNP = velocities[-1]  # at guidance 1 that of the captions themselves
                velocity_BNP = unguided_BNP + pictures.guidance * (velocities[0] - unguided_BNP)
                x_BNP = x_BNP - velocity_BNP / pictures.steps
        finally:
            sharding.reshard(net)  # also after an interruption: training or a checkpoint may follow
        return flow.unscale(flow.unpack(x_BNP, model.latent_height, model.latent_width))

    def _stacked(self, texts: list[Encoding]) -> Encoding:
        """[t5_BTE, clip_BV] in compute.dtype."""
        return [torch.stack(parts).to(self.world.device, self.dtype) for parts in zip(*texts)]

    @torch.no_grad()
    def _decoded(self, z_CYX: Tensor) -> np.ndarray:
        if not self.autoencoder:
            return toy.decode(z_CYX.cpu().numpy())
        with sdpa_kernel(SDPBackend.MATH):  # the net's kernels may not support fp32
            return self.autoencoder.decode(z_CYX[None]).sample[0].cpu().numpy()

    def save(self, painted: list[Tensor], path: Path) -> list[np.ndarray]:
        """Decode latents and save the pictures above their captions as one PNG.

        Returns the pictures: (3, H, W) about in [-1, 1].
        """
        pictures = [self._decoded(z_CYX.to(self.world.device)) for z_CYX in painted]
        save(pictures, self.captions, path)
        return pictures


def _texts(arrays: Arrays) -> Encoding:
    return [torch.from_numpy(arrays[name]).view(torch.bfloat16) for name in ("t5", "clip")]


class Gallery(Artist):
    """The folder samples/ of a run: a sheet of pictures at each interval and at the end, a strip of all sheets, and a
    sheet of the data set's own pictures for the same captions.
    """

    def __init__(self, cfg: Config, world: World, report: Reporter, samples: ShardSet):
        """samples: the data set whose captions are drawn. Collective. Raises: Refusal for a bad autoencoder."""
        super().__init__(cfg, world, Path(cfg.pictures.vae))
        self.report = report
        self.samples = samples
        self.newest = -1  # training samples at the newest sheet

    def draw(self, state: TrainState, at: Say) -> None:
        """Draw the same captions from the same noise as ever, unless they are drawn. Collective.

        Training goes on as without pictures: drawing changes no weight and no number of training, and takes dynamic
        FP8 scales. What cannot be decoded or written does not end the run. at: as for `paint`.
        """
        samples = state.samples
        if self.newest == samples:
            return
        begin = time.perf_counter()
        self.take_stored(self.samples)
        if painted := self.paint(state.net, at):
            with self.report.spare(f"{samples:09d}.png"):
                self._show(painted, samples)
        self.newest = samples
        self.report.since_s += time.perf_counter() - begin  # pictures are no part of the rate of training

    def _show(self, painted: list[Tensor], samples: int) -> None:
        """Save what was drawn after so many training samples."""
        path = self.report.folder / "samples" / f"{samples:09d}.png"
        pictures = self.save(painted, path)
        if self.newest < 0:
            self.save(self.originals, path.with_stem("originals"))
        strip(path.parent, pictures[0].shape[1])
        self.report.say(f"samples {samples:>10,}  {len(pictures)} pictures: {path}")


# Pixels
GAP = 6
CAPTION_HEIGHT = 36
HEIGHT = 160  # pictures of fewer rows are enlarged
STRIP_LEFT = 90  # beside the pictures of a strip

COLUMNS = 6


def save(pictures: list[np.ndarray], captions: list[str], path: Path) -> None:
    """Save (3, H, W) pictures in [-1, 1] as one PNG, each above its caption."""
    tiles = [_tile(picture, caption) for picture, caption in zip(pictures, captions)]
    sheet = make_grid(tiles, nrow=COLUMNS, padding=GAP, pad_value=255)
    path.parent.mkdir(exist_ok=True)
    write_png(path, transforms.to_pil_image(sheet))


def strip(folder: Path, rows: int) -> None:
    """Rewrite strip.png from the sheets in a folder: the first row of each, the newest at the bottom.

    rows: of pixels of a picture.
    """
    paths = [path for path in matching(folder, "*.png") if path.stem.isdecimal()]  # people put others there
    step = max(rows, HEIGHT) + GAP
    width = STRIP_LEFT + Image.open(paths[-1]).width
    image = Image.new("RGB", (width, len(paths) * step + CAPTION_HEIGHT + GAP), "white")
    pen = ImageDraw.Draw(image)
    for row, path in enumerate(paths):
        image.paste(Image.open(path), (STRIP_LEFT, row * step))  # the next row covers all but its first
        pen.text((GAP, row * step + GAP), f"{int(path.stem):,}", "black")
    write_png(folder / "strip.png", image)


def _tile(picture: np.ndarray, caption: str) -> torch.Tensor:
    """A picture above at most two lines of its caption, (3, rows, columns) uint8."""
    pixels = ((picture.transpose(1, 2, 0) + 1) * 127.5).round().clip(0, 255)
    image = Image.fromarray(pixels.astype(np.uint8))
    image = ImageOps.scale(image, max(1.0, HEIGHT / image.height))
    tile = ImageOps.expand(image, (0, 0, 0, CAPTION_HEIGHT), "white")
    text = textwrap.fill(printable(caption), image.width // 6, max_lines=2)
    ImageDraw.Draw(tile).text((4, image.height + 3), text, "black")
    return transforms.pil_to_tensor(tile)
