"""Small random encoders with the files of the real ones: T5, CLIP and the autoencoder."""

import re
from pathlib import Path

import torch
from peer_vae import SMALL, bfl_tensors, lively_net
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

WORDS = re.findall(r"\w+", "a red green blue small large cat dog sits stands on in the grass water at night photo of")


def save_tokenizer(folder: Path, start: str | None, end: str, pad: str) -> dict[str, int]:
    """One word, one token."""
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys([pad, end, "<unk>", start or pad, *WORDS]))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    template = f"{start} $A {end}" if start else f"$A {end}"
    specials = [(token, vocabulary[token]) for token in (start, end) if token]
    words.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token=pad, eos_token=end, unk_token="<unk>")
    fast.save_pretrained(folder)
    return vocabulary


def save_t5(folder: Path, features: int = 28, seed: int = 0) -> Path:
    """Weights and tokenizer in one folder."""
    vocabulary = save_tokenizer(folder, None, "</s>", "<pad>")
    torch.manual_seed(seed)
    sizes = {"d_model": features, "d_kv": 7, "num_heads": 4, "d_ff": 40, "num_layers": 2, "vocab_size": len(vocabulary)}
    T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu")).save_pretrained(folder)
    return folder


def save_clip(folder: Path, features: int = 14, seed: int = 1) -> Path:
    """Weights in text_encoder, tokenizer in tokenizer."""
    vocabulary = save_tokenizer(folder / "tokenizer", "<start>", "<end>", "<end>")
    torch.manual_seed(seed)
    sizes = {"hidden_size": features, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": vocabulary["<start>"], "eos_token_id": vocabulary["<end>"], "vocab_size": len(vocabulary)}
    CLIPTextModel(CLIPTextConfig(**sizes, **ids)).save_pretrained(folder / "text_encoder")
    return folder / "text_encoder"


def save_ae(path: Path, config: dict = SMALL) -> Path:
    save_file({name: tensor.bfloat16() for name, tensor in bfl_tensors(lively_net(config)).items()}, path)
    return path
