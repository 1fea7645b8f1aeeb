"""Making the drawable data set."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flux_ref import rng, schedule
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.formats import files, shard_writer, shards
from flux_ref.formats.claim import hold
from flux_ref.formats.shard_writer import Sample
from flux_ref.run.progress import progress
from flux_ref.toy import shapes
from flux_ref.toy.shapes import Drawing

WAIT_S = 600.0  # for another process that makes the same data set


def make_shapes(folder: Path, model: ModelConfig, train: int, val: int) -> None:
    """Write folder/train, folder/val and folder/empty_encodings. The folder appears once it is whole.

    Validation shows the drawings that training never shows, at the eight timesteps in turn.
    Raises: Refusal if the folder exists.
    """
    if model.latent_channels != shapes.CHANNELS or model.text_tokens < 8:
        raise Refusal(f"shapes need model.latent_channels={shapes.CHANNELS} and model.text_tokens of at least 8")
    held_out = shapes.held_out()
    shown = [drawing for drawing in shapes.all_drawings() if drawing not in held_out]
    t5, clip = shapes.encode_caption("", model.text_tokens, model.t5_dim, model.clip_dim)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(folder, is_new=True) as partial:
        shard_writer.write(partial / "train", _samples(shown, train, model, "train"), "train")
        shard_writer.write(partial / "val", _samples(held_out, val, model, "val"), "val")
        # In float16 with a batch axis, as the public encodings are.
        empty = {"t5": t5[None].astype(np.float16), "clip": clip[None].astype(np.float16)}
        shard_writer.write_empty(partial / "empty_encodings", empty)


def _samples(drawings: list[Drawing], count: int, model: ModelConfig, split: str) -> Iterator[Sample]:
    is_val = split == "val"
    for i in progress(range(count), desc=f"making {split} shapes", unit=" samples", leave=False):
        round_, timestep = divmod(i, schedule.TIMESTEPS)
        drawing = drawings[round_ % len(drawings)]
        words = rng.words(0, rng.JITTER, 2, sample=i, epoch=int(is_val))
        dx, dy = shapes.JITTER * (2 * rng.uniform(words) - 1)
        picture = shapes.render(drawing, model.latent_height * 8, model.latent_width * 8, float(dx), float(dy))
        t5, clip = shapes.encode_caption(drawing.caption, model.text_tokens, model.t5_dim, model.clip_dim)
        mean, logvar = shapes.encode(picture)
        members = {"t5": t5, "clip": clip, "mean": mean, "logvar": logvar}
        bits = {name: shards.to_bf16_bits(array) for name, array in members.items()}
        yield Sample(bits, timestep if is_val else None, drawing.caption)


def ensure(cfg: Config) -> None:
    """Make the data set of a config with data.kind=shapes, if neither FOLDER/train nor FOLDER/val nor FOLDER is there.

    The reader refuses any other missing folder. Of several first starts one makes the data set and the others wait.
    Raises: Refusal.
    """
    folder = Path(cfg.data.train).parent
    is_ours = Path(cfg.data.train) == folder / "train" and Path(cfg.data.val) in (Path(), folder / "val")
    if cfg.data.kind != "shapes" or not is_ours or folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder.with_name(f".{folder.name}.making")
    with hold(place, f"{folder} is being made", "wait for it", WAIT_S):
        if not folder.exists():
            make_shapes(folder, cfg.model, cfg.data.train_count, cfg.data.val_count)
