"""The frozen encoders that samples are made with: FLUX's autoencoder, T5-XXL and CLIP-L's text half.

They are read from local safetensors files only: nothing is downloaded, no pickle is opened, no code beside the weights
is run. The packages diffusers and transformers are imported only when encoders are needed.

numerics: the autoencoder computes in fp32; so do the text encoders, unless bf16 is asked for. On NVIDIA torch lets
convolutions round their factors to TF32, by up to 2**-11; samples are stored in bf16, which rounds more.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flux_ref import flow, safetensors_io
from flux_ref.cli import Refusal, one_line
from flux_ref.config import ModelConfig

# B batch  T text tokens (256)  E T5 features (4096)  V CLIP features (768)
FILES = 'ae.safetensors "text_encoder*/*" "tokenizer*/*"'
FETCH = f"fetch it: hf download black-forest-labs/FLUX.1-schnell {FILES} --local-dir DIR"
VAE_FILES = ("ae.safetensors", "vae/diffusion_pytorch_model.safetensors")
VAE = {  # source: vae/config.json of black-forest-labs/FLUX.1-schnell
    "scaling_factor": flow.SCALE,
    "shift_factor": flow.SHIFT,
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIP_TOKENS = 77  # all that CLIP has positions for


def new_autoencoder() -> Any:
    """diffusers' AutoencoderKL with random weights: 244 tensors, 83,819,683 parameters.

    Its latents are on the autoencoder's scale; flow.py brings them to the transformer's.
    Raises: ModuleNotFoundError if diffusers is not installed.
    """
    import diffusers

    return diffusers.AutoencoderKL(**VAE)


def load_autoencoder(given: Path, device: torch.device) -> Any:
    """The autoencoder in fp32 and without gradients, by the names of Black Forest Labs or diffusers.

    given: the file, or a folder such as FLUX.1-schnell's repository.
    Raises: Refusal if there is no such file, or it does not fit or is damaged.
    """
    path = next((file for file in (given, *(given / name for name in VAE_FILES)) if file.is_file()), None)
    if not path:
        raise Refusal(f"autoencoder {given} is no file and has no ae.safetensors; {FETCH}, and give --pictures.vae=DIR")
    with torch.device("meta"):
        net = new_autoencoder()
    with safetensors_io.opened(path) as file:
        found = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    if any(".down." in name for name in found):
        from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

        found = convert_ldm_vae_checkpoint(found, VAE)
    try:
        net.load_state_dict(found, assign=True)
    except RuntimeError as error:
        raise Refusal(f"autoencoder {path} does not fit: {one_line(error, 400)}; {FETCH}") from None
    return net.to(device).eval().requires_grad_(False)


class TextEncoder:
    """A tokenizer and the transformer behind it.

    Captions are cut or padded to `tokens`, and pads are attended to like any other token: rows of the data set have
    no mask (MLPerf reference; BFL flux, HFEmbedder).
    """

    def __init__(self, folder: Path, kind: str, tokens: int, features: int, device: torch.device, dtype: torch.dtype):
        """folder: text_encoder or text_encoder_2; the tokenizer lies beside it. kind: transformers' class.

        Raises: Refusal.
        """
        import transformers

        self.tokens = tokens
        transformers.logging.set_verbosity_error()
        local = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = folder.with_name(folder.name.replace("text_encoder", "tokenizer"))
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer, **local)
            net, report = getattr(transformers, kind).from_pretrained(
                folder, use_safetensors=True, dtype=dtype, output_loading_info=True, **local
            )
            if absent := report["missing_keys"]:  # random values there
                raise ValueError(f"{len(absent)} tensors are missing, such as {min(absent)}")
            if net.config.hidden_size != features:
                raise ValueError(f"it has {net.config.hidden_size} features, the model wants {features}")
        except Exception as error:  # transformers raises a dozen kinds
            raise Refusal(f"encoder {folder}: {one_line(error)}; {FETCH}") from None
        self.net = net.to(device).eval().requires_grad_(False)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """T5's states, (B, T, E); CLIP's pooled vectors, (B, V)."""
        ids_BT = self.tokenizer(
            list(captions), max_length=self.tokens, padding="max_length", truncation=True, return_tensors="pt"
        )["input_ids"]
        found = self.net(input_ids=ids_BT.to(self.net.device))
        return found.get("pooler_output", found.last_hidden_state)


def text_encoders(
    home: Path, model: ModelConfig, device: torch.device, dtype: torch.dtype
) -> tuple[TextEncoder, TextEncoder]:
    """T5 and CLIP of a folder as FLUX.1-schnell's repository. Raises: Refusal for files that do not fit the model."""
    t5 = TextEncoder(home / "text_encoder_2", "T5EncoderModel", model.text_tokens, model.t5_dim, device, dtype)
    clip = TextEncoder(home / "text_encoder", "CLIPTextModel", CLIP_TOKENS, model.clip_dim, device, dtype)
    return t5, clip
