"""Random encoders and a folder of captioned drawings, for a trial of own pictures without a download.

The files are those of FLUX.1-schnell: vae/, text_encoder/ (CLIP), text_encoder_2/ (T5) and both tokenizers.
The autoencoder has FLUX's size. T5 and CLIP have two thin layers; a token is a byte of the caption. All weights are
random, so a run with these encoders shows that the chain works, and its drawings show noise or blotches.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from flux_ref import files, toy
from flux_ref.pictures.encoders import new_autoencoder
from tools.prepare import job

PIXELS = 64  # rows and columns of a drawing
TOKENS: dict[str, Any] = {
    "vocab_size": 384,
    "bos_token_id": 2,
    "eos_token_id": 1,
}  # of ByT5's tokenizer, which needs no vocabulary


def save_encoders(folder: Path, t5_dim: int, clip_dim: int) -> None:
    """Raises: ModuleNotFoundError without transformers."""
    import transformers

    transformers.logging.disable_progress_bar()
    t5 = transformers.T5Config(d_model=t5_dim, d_ff=64, num_layers=2, num_heads=1, **TOKENS)
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    clip = transformers.CLIPTextConfig(hidden_size=clip_dim, **layers, **TOKENS)
    torch.manual_seed(0)
    new_autoencoder().save_pretrained(folder / "vae")
    transformers.T5EncoderModel(t5).save_pretrained(folder / "text_encoder_2")
    transformers.CLIPTextModel(clip).save_pretrained(folder / "text_encoder")
    for name in ("tokenizer", "tokenizer_2"):
        transformers.ByT5Tokenizer().save_pretrained(folder / name)


def save_pictures(folder: Path) -> int:
    """Each drawing of the toy data set with its caption, as a folder of own pictures. Returns their number."""
    folder.mkdir()
    lines = []
    for number, drawing in enumerate(toy.all_drawings()):
        pixels = (toy.render(drawing, PIXELS, PIXELS) + 1) * 127.5
        name = f"{number:03}.png"
        Image.fromarray(np.rint(pixels).astype(np.uint8).transpose(1, 2, 0)).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": drawing.caption}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    return len(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make, with DIR/pictures")
    parser.add_argument("--config", metavar="FILE", help="use the widths of this config's model (FLUX.1-schnell's)")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal."""
    model = job.config(args.config).model
    with files.whole(args.out, is_new=True) as part:
        part.mkdir()
        save_encoders(part, model.t5_dim, model.clip_dim)
        count = save_pictures(part / "pictures")
    print(f"{args.out}: an autoencoder, T5 and CLIP of random weights; {args.out}/pictures: {count} captioned drawings")
    print("they show that the chain works; a model that is trained with them draws noise or blotches")
    return 0
