"""What given weights predict from drawn inputs: for those who have FLUX.1-schnell's public weights.

Nobody who wrote these lines had the public weights, so no golden value exists. Two programs each write a dump, and the
dumps are compared. The network computes in fp32 and holds one block at a time, so 4 GB of memory are enough.
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor, nn

from flux_ref import model
from flux_ref.errors import Refusal
from flux_ref.formats.files import whole
from flux_ref.run import weight_files
from flux_ref.run.weight_files import Source
from tools.golden.compare import report
from tools.golden.files import Value
from tools.golden.inputs import drawn
from tools.golden.tensor_file import TensorFile

TIMES = (0.25, 0.875)  # t of the two samples
STRIDE = 37  # every so many elements of the prediction are shown
TOLERANCE = 1e-4  # of the largest magnitude


def predict(weights: Path, out: Path, config: str | None, other: Path | None) -> int:
    """Write the dump of some weights. other: a dump to compare it with. Returns the exit code. Raises: Refusal."""
    if out.exists():
        raise Refusal(f"--out {out} exists already; give a new name")
    theirs = TensorFile(other) if other else None
    path = weight_files.find(weights)
    cfg = weight_files.config_of(path, config)
    values = prediction(weight_files.open_source(path, cfg.model), cfg.model)
    with whole(out) as partial_file:
        partial_file.write_bytes(save(values))
    print(f"{out}: {len(values)} values of {path}")
    return int(any(report(as_golden(theirs, list(values)), TensorFile(out)))) if theirs else 0


def as_golden(file: TensorFile, order: list[str]) -> SimpleNamespace:
    """Another program's dump, as `report` takes golden values. order: of the names in computation."""
    names = [name for name in dict.fromkeys([*order, *file.entries]) if name in file.entries]
    values = []
    for name in names:
        array = file.read(name)
        atol = TOLERANCE * float(np.abs(array).max(initial=0))
        why = f"{TOLERANCE} of the largest magnitude"
        values.append(Value(name, list(array.shape), "fp32", False, "of the other dump", atol, 0.0, why))
    return SimpleNamespace(file=file, values=values)


def prediction(source: Source, cfg: model.ModelConfig) -> dict[str, np.ndarray]:
    """The values of a dump: norms of each block's output per sample, and a part of the prediction.

    The inputs are drawn as golden/inputs.py draws: img and txt with width 1, clip with width 2.
    """
    rows = len(TIMES)
    values = {}
    with torch.device("meta"):
        net = model.Flux(cfg)
    net.rope = net.make_rope()

    def fill(prefix: str, module: nn.Module, _: tuple) -> None:
        module.to_empty(device="cpu")
        for name, parameter in module.named_parameters():
            parameter.data.copy_(source.read(f"{prefix}.{name}", 0, len(parameter)))

    def note(prefix: str, module: nn.Module, _: tuple, result: Tensor | tuple[Tensor, ...]) -> None:
        for part, tensor in enumerate(result if isinstance(result, tuple) else (result,)):
            values[f"predict.{prefix}.{part}"] = tensor.flatten(1).norm(dim=1).numpy()
        module.to("meta")  # frees the memory

    for name, module in net.named_modules():
        if re.fullmatch(r"\w+_(in|layer)|\w+_blocks\.\d+", name):
            module.register_forward_pre_hook(partial(fill, name))
            module.register_forward_hook(partial(note, name))
    img = drawn("predict.img", (rows, cfg.image_tokens, cfg.packed_channels), 1.0)
    txt = drawn("predict.txt", (rows, cfg.text_tokens, cfg.t5_dim), 1.0)
    clip = drawn("predict.clip", (rows, cfg.clip_dim), 2.0)
    with torch.no_grad():
        result = net(*map(torch.from_numpy, (img, txt, clip)), torch.tensor(TIMES))
    values["predict.prediction"] = np.ascontiguousarray(result.flatten()[::STRIDE])
    return values
