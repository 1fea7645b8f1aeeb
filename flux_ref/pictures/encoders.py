"""The frozen encoders that samples are made with: FLUX's autoencoder, T5-XXL and CLIP-L's text half.

They are read from local safetensors files only: nothing is downloaded, no pickle is opened, no code beside the weights
is run. Only this file imports transformers, and only when encoders are needed.

numerics: the autoencoder computes in fp32; so do the text encoders, unless bf16 is asked for. On NVIDIA torch lets
convolutions round their factors to TF32, by up to 2**-11; samples are stored in bf16, which rounds more.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flux_ref.config import ModelConfig
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import outside
from flux_ref.pictures import autoencoder
from flux_ref.pictures.autoencoder import FETCH
from flux_ref.run.options import package

# B batch  H, W pixel rows and columns  C, Y, X latent  T text tokens (256)  E T5 features (4096)  V CLIP features (768)
CLIP_TOKENS = 77  # all that CLIP has positions for
KINDS = {  # by our option: transformers' class, which of its outputs, its model_type in config.json, schnell's folder
    "t5": ("T5EncoderModel", "last_hidden_state", ("t5",), "text_encoder_2"),
    "clip": ("CLIPTextModel", "pooler_output", ("clip_text_model", "clip"), "text_encoder"),
}


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a text encoder lies: with it, or as diffusers has it, in tokenizer_2 of text_encoder_2."""
    if (folder / "tokenizer_config.json").is_file():
        return folder
    return folder.parent / folder.name.replace("text_encoder", "tokenizer")


class TextEncoder:
    """A tokenizer and the transformer behind it.

    Captions are cut or padded to `tokens`, and pads are attended to like any other token: rows of the data set have
    no mask (MLPerf reference; BFL flux, HFEmbedder).
    """

    def __init__(self, option: str, folder: Path, tokens: int, device: torch.device, dtype: torch.dtype):
        """option: of KINDS. Raises: Refusal."""
        kind, self.output, types, public = KINDS[option]
        words = tokenizer_folder(folder)
        self.tokens = tokens
        self.device = device
        for path in (folder / "config.json", words / "tokenizer_config.json"):
            if not path.is_file():
                raise Refusal(f"--{option} {folder}: {path} is missing; give FLUX.1-schnell's {public}; {FETCH}")
        if (found := outside.read_json(folder / "config.json", "text encoder").get("model_type")) not in types:
            raise Refusal(f"--{option} {folder} holds a {outside.shown(found)}; give FLUX.1-schnell's {public}")
        transformers = package("transformers", "encoding captions")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(words, **local)
            net, report = getattr(transformers, kind).from_pretrained(
                folder, use_safetensors=True, dtype=dtype, output_loading_info=True, **local
            )
        except Exception as error:  # transformers raises a dozen kinds
            raise Refusal(f"{kind} in {folder}: {' '.join(str(error).split())}") from None
        absent = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
        if absent:  # transformers would go on with random values
            raise Refusal(f"{kind} in {folder}: {len(absent)} tensors are missing or misshaped, such as {absent[0]}")
        self.net = net.to(device).eval().requires_grad_(False)

    def longer(self, captions: Sequence[str]) -> int:
        """How many captions have more tokens than the net reads."""
        return sum(len(ids) > self.tokens for ids in self.tokenizer(list(captions))["input_ids"])

    def __call__(self, captions: Sequence[str]) -> Tensor:
        ids_BT = self.tokenizer(
            list(captions), max_length=self.tokens, padding="max_length", truncation=True, return_tensors="pt"
        )["input_ids"]
        return getattr(self.net(input_ids=ids_BT.to(self.device)), self.output)


class Encoders:
    """From pixels and captions to the four members of samples.

    empty: {"t5", "clip"}, the encodings of the empty caption as bf16 bits.
    """

    def __init__(
        self, vae_file: Path | None, t5: Path, clip: Path, model: ModelConfig, device: torch.device, dtype: torch.dtype
    ):
        """vae_file: None for captions only. Raises: Refusal for files that do not fit the model or are no encoders."""
        if model.latent_channels != autoencoder.FLUX["latent_channels"]:
            raise Refusal(f"model.latent_channels={model.latent_channels}; FLUX's autoencoder has 16")
        self.device = device
        self.autoencoder = vae_file and autoencoder.load(vae_file, device)
        self.t5 = TextEncoder("t5", t5, model.text_tokens, device, dtype)
        self.clip = TextEncoder("clip", clip, CLIP_TOKENS, device, dtype)
        self.empty = {name: bits[0] for name, bits in self.encode_text([""]).items()}
        wants = {"t5": (t5, (model.text_tokens, model.t5_dim)), "clip": (clip, (model.clip_dim,))}
        for name, (folder, shape) in wants.items():
            if (encoded := self.empty[name].shape) != shape:
                raise Refusal(f"{folder} encodes captions as {encoded}, the model wants {shape}; set model.{name}_dim")

    @torch.no_grad()
    def text(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """{"t5": (B, T, E), "clip": (B, V)} in dtype, on the device. Raises: Fault for one that is not finite."""
        return {name: _finite(name, net(captions), captions) for name, net in (("t5", self.t5), ("clip", self.clip))}

    def encode_text(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """`text` as bf16 bits. sync: the host waits for the device."""
        return {name: _bits(values) for name, values in self.text(captions).items()}

    @torch.no_grad()
    def encode(self, pixels_B3HW: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """encode_text and {"mean", "logvar": (B, C, Y, X)} at the autoencoder's own scale; pixels are uint8.

        Raises: Fault if an encoder returns what is not finite. sync: the host waits for the device.
        """
        moments = self.autoencoder.encode(pixels_B3HW.to(self.device).float() / 127.5 - 1)
        members = zip(("mean", "logvar"), moments)
        return self.encode_text(captions) | {name: _bits(_finite(name, part, captions)) for name, part in members}


def _finite(name: str, values: Tensor, captions: Sequence[str]) -> Tensor:
    finite = values.isfinite().flatten(1).all(dim=1).tolist()
    if not all(finite):
        raise Fault(f"{name} of {captions[finite.index(False)]!r} is NaN or infinite", alone=True)
    return values


def _bits(values: Tensor) -> np.ndarray:
    """Rounded to bf16, as its bits in uint16."""
    return values.bfloat16().view(torch.uint16).cpu().numpy()
