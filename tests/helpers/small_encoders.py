"""A small FLUX.1 of random weights in the layout of FLUX.1-schnell's repository."""

import re

import torch
from conftest import MICRO
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline
from lively_nets import plain_net
from peer_net import diffusers_twin
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from flux_ref import config_file
from flux_ref.pictures import encoders

CHANNELS = (32, 64, 128, 128)  # of the autoencoder
WORDS = re.findall(r"\S+", "<pad> </s> <start> <unk> a red green cat dog sits on the grass photo of two dogs")
# Parts of the autoencoder's names: diffusers', Black Forest Labs'.
PARTS = {
    "conv_shortcut": "nin_shortcut",
    "conv_norm_out": "norm_out",
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
    "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
    "mid_block.attentions.0.to_": "mid.attn_1.",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    ".resnets.": ".block.",
    "down_blocks": "down",
    "up_blocks": "up",
}


def bfl_tensors(net):
    """Weights as ae.safetensors has them: the decoder's levels from the pixels, attention as 1 x 1 convolutions."""
    tensors = {}
    for name, tensor in net.state_dict().items():
        for theirs, ours in PARTS.items():
            name = name.replace(theirs, ours)
        name = re.sub(r"\.up\.(\d)", lambda match: f".up.{3 - int(match[1])}", name)
        is_linear = ".attn_1." in name and tensor.ndim == 2
        tensors[name] = tensor[:, :, None, None] if is_linear else tensor
    return tensors


def tokenizer(template, tokens):
    """One word, one token. template: where the caption, $A, stands between the special tokens."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    specials = [(word, WORDS.index(word)) for word in ("</s>", "<start>")]
    words.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=tokens, **special)


def save_repository(folder):
    """For the micro model. encoders.VAE has CHANNELS meanwhile."""
    cfg = config_file.load(MICRO)
    torch.manual_seed(0)
    t5 = T5Config(d_model=cfg.model.t5_dim, d_kv=7, num_heads=4, d_ff=40, num_layers=2, vocab_size=len(WORDS))
    clip = CLIPTextConfig(
        hidden_size=cfg.model.clip_dim,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=len(WORDS),
        bos_token_id=WORDS.index("<start>"),
        eos_token_id=WORDS.index("</s>"),
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=encoders.new_autoencoder(),
        text_encoder=CLIPTextModel(clip),
        tokenizer=tokenizer("<start> $A </s>", encoders.CLIP_TOKENS),
        text_encoder_2=T5EncoderModel(t5),
        tokenizer_2=tokenizer("$A </s>", cfg.model.text_tokens),
        transformer=diffusers_twin(plain_net(cfg))[0],
    )
    pipeline.save_pretrained(folder)
    save_file(bfl_tensors(pipeline.vae), folder / "ae.safetensors")
    return folder
