"""The frozen encoders that samples are made with: FLUX's autoencoder, T5-XXL and CLIP-L's text half.

They are read from local safetensors files only: nothing is downloaded, no pickle is opened, no code beside the weights
is run. The package transformers is imported only when encoders are needed.

numerics: the autoencoder computes in fp32; so do the text encoders, unless bf16 is asked for. On NVIDIA torch lets
convolutions round their factors to TF32, by up to 2**-11; samples are stored in bf16, which rounds more.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flux_ref.config import ModelConfig
from flux_ref.errors import Fault, Refusal, package
from flux_ref.pictures import autoencoder
from flux_ref.pictures.autoencoder import FETCH

# B batch  H, W pixel rows and columns  C, Y, X latent  T text tokens (256)  E T5 features (4096)  V CLIP features (768)
CLIP_TOKENS = 77  # all that CLIP has positions for
KINDS = {  # by our option: transformers' class, which of its outputs, FLUX.1-schnell's folder
    "t5": ("T5EncoderModel", "last_hidden_state", "text_encoder_2"),
    "clip": ("CLIPTextModel", "pooler_output", "text_encoder"),
}


class TextEncoder:
    """A tokenizer and the transformer behind it.

    Captions are cut or padded to `tokens`, and pads are attended to like any other token: rows of the data set have
    no mask (MLPerf reference; BFL flux, HFEmbedder).
    """

    def __init__(self, option: str, folder: Path, tokens: int, device: torch.device, dtype: torch.dtype):
        """option: of KINDS. The tokenizer lies in the folder, or as diffusers has it: tokenizer_2 of text_encoder_2.

        Raises: Refusal.
        """
        kind, self.output, public = KINDS[option]
        self.tokens = tokens
        words = folder
        if not (folder / "tokenizer_config.json").exists():
            words = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
        transformers = package("transformers", "encoding captions")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        local = {"local_files_only": True, "trust_remote_code": False}
        try:
            for path in (folder / "config.json", words / "tokenizer_config.json"):
                path.stat()  # transformers would take a name that is no folder for one of its hub
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(words, **local)
            net, report = getattr(transformers, kind).from_pretrained(
                folder, use_safetensors=True, dtype=dtype, output_loading_info=True, **local
            )
            if absent := [*report["missing_keys"], *map(str, report["mismatched_keys"])]:  # random values there
                raise ValueError(f"{len(absent)} tensors are missing or misshaped, such as {min(absent)}")
        except Exception as error:  # transformers raises a dozen kinds
            why = " ".join(str(error).split())
            raise Refusal(f"--{option} {folder}: {why}; give FLUX.1-schnell's {public}; {FETCH}") from None
        self.net = net.to(device).eval().requires_grad_(False)

    def longer(self, captions: Sequence[str]) -> int:
        """How many captions have more tokens than the net reads."""
        return sum(len(ids) > self.tokens for ids in self.tokenizer(list(captions))["input_ids"])

    def __call__(self, captions: Sequence[str]) -> Tensor:
        ids_BT = self.tokenizer(
            list(captions), max_length=self.tokens, padding="max_length", truncation=True, return_tensors="pt"
        )["input_ids"]
        return getattr(self.net(input_ids=ids_BT.to(self.net.device)), self.output)


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
        for name, folder, want in (("t5", t5, model.t5_dim), ("clip", clip, model.clip_dim)):
            if (found := self.empty[name].shape[-1]) != want:
                raise Refusal(f"--{name} {folder} has {found} features, the model wants {want}; set model.{name}_dim")

    @torch.no_grad()
    def text(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """{"t5": (B, T, E), "clip": (B, V)} in dtype, on the device. Raises: Fault for one that is not finite."""
        return _finite({"t5": self.t5(captions), "clip": self.clip(captions)}, captions)

    def encode_text(self, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """`text` as bf16 bits. sync: the host waits for the device."""
        return _bits(self.text(captions))

    @torch.no_grad()
    def encode(self, pixels_B3HW: Tensor, captions: Sequence[str]) -> dict[str, np.ndarray]:
        """encode_text and {"mean", "logvar": (B, C, Y, X)} at the autoencoder's own scale; pixels are uint8.

        Raises: Fault if an encoder returns what is not finite. sync: the host waits for the device.
        """
        moments = self.autoencoder.encode(pixels_B3HW.to(self.device).float() / 127.5 - 1)
        return self.encode_text(captions) | _bits(_finite(dict(zip(("mean", "logvar"), moments)), captions))


def _finite(members: dict[str, Tensor], captions: Sequence[str]) -> dict[str, Tensor]:
    for name, values in members.items():
        finite = values.isfinite().flatten(1).all(dim=1).tolist()
        if not all(finite):
            raise Fault(f"{name} of {captions[finite.index(False)]!r} is NaN or infinite", alone=True)
    return members


def _bits(members: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Rounded to bf16, as its bits in uint16."""
    return {name: values.bfloat16().view(torch.uint16).cpu().numpy() for name, values in members.items()}
