"""Making data sets and looking after them.   python -m flux_ref.prepare COMMAND --help"""

import argparse
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from flux_ref import config, draws, schedule, shapes, shard_writer, shards, tar_index
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal, attempt
from flux_ref.progress import progress
from flux_ref.shard_writer import Sample


def make_shapes(folder: Path, model: ModelConfig, train: int, val: int) -> None:
    """Write folder/train, folder/val and folder/empty_encodings; the folder appears once it is whole.

    Validation shows the drawings that training never does, and walks the eight timesteps.
    Raises: Refusal if the folder exists.
    """
    if folder.exists():
        raise Refusal(f"{folder} exists; remove it or choose another folder")
    if model.latent_channels != shapes.CHANNELS or model.text_tokens < 8:
        raise Refusal(f"shapes need model.latent_channels={shapes.CHANNELS} and model.text_tokens of at least 8")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    held_out = shapes.held_out()
    shown = [drawing for drawing in shapes.all_drawings() if drawing not in set(held_out)]
    shard_writer.write(partial / "train", _samples(shown, train, 0, model, "train"), "train")
    shard_writer.write(partial / "val", _samples(held_out, val, 1, model, "val"), "val")
    empty = partial / "empty_encodings"
    empty.mkdir()
    for name, array in zip(("t5", "clip"), shapes.encode_caption("", model.text_tokens, model.t5_dim, model.clip_dim)):
        np.save(empty / f"{name}_empty.npy", array[None].astype(np.float16))  # as the public ones are
    partial.rename(folder)


def _samples(drawings: list, count: int, split: int, model: ModelConfig, name: str) -> Iterator[Sample]:
    encoded = {d: shapes.encode_caption(d.caption, model.text_tokens, model.t5_dim, model.clip_dim) for d in drawings}
    for i in progress(range(count), desc=f"making {name} shapes", unit=" samples", leave=False):
        drawing = drawings[i // schedule.TIMESTEPS % len(drawings)]
        dx, dy = shapes.JITTER * (2 * draws.uniform(draws.words(0, draws.JITTER, 2, sample=i, epoch=split)) - 1)
        picture = shapes.draw(drawing, model.latent_height * 8, model.latent_width * 8, float(dx), float(dy))
        members = dict(zip(shards.MEMBERS, (*encoded[drawing], *shapes.encode(picture))))
        bits = {member: shards.to_bf16_bits(array) for member, array in members.items()}
        timestep = i % schedule.TIMESTEPS if split else None
        yield Sample(bits, timestep, drawing.caption)


def ensure(cfg: Config) -> None:
    """Make the data set of a config with data.kind=shapes on first use: when FOLDER/train, FOLDER/val and FOLDER
    are all missing. Any other missing folder is left for the reader to refuse."""
    train, val = Path(cfg.data.train), Path(cfg.data.val)
    folder = train.parent
    if cfg.data.kind == "shapes" and (train, val) == (folder / "train", folder / "val") and not folder.exists():
        make_shapes(folder, cfg.model, cfg.data.train_count, cfg.data.val_count)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--config", default="configs/tiny.toml", help="whose model's sizes to use")
    parser.add_argument("--train", type=int, help="training samples (default: the config's)")
    parser.add_argument("--val", type=int, help="validation samples (default: the config's)")


def run(args: argparse.Namespace) -> int:
    cfg = config.load(args.config)
    train = cfg.data.train_count if args.train is None else args.train
    val = cfg.data.val_count if args.val is None else args.val
    if min(train, val) < 1:
        raise Refusal(f"--train={train} and --val={val} must both be at least 1")
    make_shapes(args.out, cfg.model, train, val)
    print(f"{args.out}: {train} training and {val} validation samples")
    return 0


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of *.tar shards")
    parser.add_argument("--config", help="whose model's sizes the samples have (default: FLUX.1-schnell's)")


def run_index(args: argparse.Namespace) -> int:
    """Walk every shard of a folder and keep what was found. Raises: Refusal."""
    layout = shards.layout((config.load(args.config) if args.config else Config()).model)
    paths = sorted(args.folder.glob("*.tar"))
    if not paths:
        raise Refusal(f"{args.folder} holds no *.tar shard")
    samples = 0
    for path in progress(paths, unit=" shards", leave=False):
        try:
            places = tar_index.walk(path, layout.payload_bytes)
        except tar_index.NotOurs as error:
            raise Refusal(f"shard {path}: {error}") from None
        tar_index.save(path, places)
        samples += len(places)
    print(f"{args.folder / tar_index.FOLDER}: {samples} samples in {len(paths)} shards")
    return 0


def _module(name: str) -> tuple[Callable, Callable]:
    module = importlib.import_module(f"flux_ref.{name}")
    return module.add_arguments, module.run


COMMANDS = {  # name: (what it does, its arguments and itself); imported when called, as their packages may be missing
    "shapes": ("captioned drawings with stand-in encoders, for the CPU", lambda: (add_arguments, run)),
    "mlcommons": ("the benchmark's preprocessed arrow folders to shards", lambda: _module("mlcommons")),
    "images": ("pictures and captions to shards, through the real encoders", lambda: _module("images")),
    "verify": ("check a data set before a job relies on it", lambda: _module("verify")),
    "stage": ("copy a data set to every node's own disk", lambda: _module("stage")),
    "index": ("keep where samples lie in shards that other tools wrote", lambda: (add_index_arguments, run_index)),
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m flux_ref.prepare", description="Make and look after data sets.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (text, find) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if argv[:1] == [name]:
            arguments, task = find()
            arguments(command)
    args = parser.parse_args(argv)
    return attempt("prepare", lambda: task(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
