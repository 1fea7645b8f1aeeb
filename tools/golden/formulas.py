"""What each known mistake would give at a place, computed from the golden values before it.

formulas.toml holds the table and says how its rows are read. The functions below are the words of its expressions.
"""

import functools
import hashlib
import math
import re
import tomllib
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np

from flux_ref import config_file, rng
from flux_ref.config import Config
from flux_ref.speed import number_formats
from tools.golden import places
from tools.golden.files import CONFIG, Golden

RIGHT = "right"
TABLE = tomllib.loads(Path(__file__).with_name("formulas.toml").read_text(encoding="utf-8"))
EPS = 1e-6
# B batch  H heads  S tokens  K head dim  D hidden  P packed features


def formulas(golden: Golden, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """(cause, what a port with this mistake has) for each mistake that is known of a place.

    A row is left out where its inputs are not among these golden values, or have no such shapes.
    """
    matches = ((re.fullmatch(pattern, name), table) for pattern, table in TABLE["formulas"].items())
    match, table = next(((match, table) for match, table in matches if match), (None, ""))

    def g(of: str) -> np.ndarray:
        array = golden.file.read(of)
        return array.astype(np.float64) if array.dtype.kind == "f" else array

    cfg = config_file.load(golden.folder / CONFIG)
    scope = WORDS | {"g": g, "golden": golden, "cfg": cfg, "m": match, "seed": cfg.train.seed}
    scope |= {"text": cfg.model.text_tokens, "parameters": golden.parameters}
    with np.errstate(all="ignore"):
        for row in rows(table):
            cause, *expressions = row.split(" | ")
            try:
                if not expressions:
                    exec(row, scope)  # the table is this package's own
                    continue
                for i in eval(expressions[1], scope) if len(expressions) > 1 else (None,):
                    scope["i"], text = i, f"{i:.6g}" if isinstance(i, float) else str(i)
                    yield cause.replace("{i}", text), np.asarray(eval(expressions[0], scope))
            except (KeyError, ValueError, IndexError, NameError, TypeError):
                continue


def rows(text: str) -> Iterator[str]:
    for row in text.strip().replace("\n  ", " ").splitlines():
        yield from rows(TABLE["shared"][row[1:]]) if row.startswith("@") else [row]


# Arithmetic


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """To `bits` bits after the leading one, ties to even: 10 is TF32, 7 is bf16."""
    drop = np.uint32(23 - bits)
    words = np.array(x, np.float32, order="C").view(np.uint32)
    half = (np.uint32(1) << (drop - np.uint32(1))) - np.uint32(1) + (words >> drop & np.uint32(1))
    return ((words + half) >> drop << drop).view(np.float32).astype(np.float64)


def cut(x: np.ndarray, bits: int) -> np.ndarray:
    """To `bits` bits after the leading one, the others cut off."""
    drop = np.uint32(23 - bits)
    return (np.array(x, np.float32, order="C").view(np.uint32) >> drop << drop).view(np.float32).astype(np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


ACTIVATIONS = {
    "GELU by erf": lambda x: x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "GELU by its tanh formula": gelu,
    "GELU by sigmoid(1.702 x)": lambda x: x * sigmoid(1.702 * x),
    "SiLU": lambda x: x * sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "no activation": lambda x: x,
}


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(-1, keepdims=True)


def layer_norm(x: np.ndarray, eps: float = EPS) -> np.ndarray:
    return centred(x) / np.sqrt(x.var(-1, keepdims=True) + eps)


def bf16_sum(x: np.ndarray) -> np.ndarray:
    """Over features, rounded to bf16 after each of them: (..., 1)."""
    return functools.reduce(lambda total, i: rounded(total + x[..., [i]], 7), range(x.shape[-1]), 0.0)


def bf16_layer_norm(x: np.ndarray) -> np.ndarray:
    """With mean and variance summed in bf16."""
    off = rounded(x - rounded(bf16_sum(x) / x.shape[-1], 7), 7)
    return rounded(off / np.sqrt(bf16_sum(off**2) / x.shape[-1] + EPS), 7)


def rms_norm(x: np.ndarray, eps: float = EPS, axes: int | tuple[int, ...] = -1) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + eps)


# Draws and batches


def block_words(key: tuple[int, int], *counter: int) -> np.ndarray:
    """Eight words of Philox from the counter given."""
    whole = sum(word << 64 * place for place, word in enumerate(counter)) - 1  # numpy counts up before its first block
    return np.random.Philox(key=key[0] | key[1] << 64, counter=whole % 2**256).random_raw(8)


def batch_rows(g, cfg: Config, field: str, samples, epoch: int = 0, draws=None, drop=None, empty=None) -> np.ndarray:
    """A field of some samples. draws: the numbers to draw by, the samples' own if None. drop, empty: of captions."""
    scalars = samples if draws is None else draws
    how = (cfg.model.latent_shape, cfg.train.caption_drop)
    drawn = [rng.train_draw(cfg.train.seed, epoch, int(i), *how) for i in scalars]
    if field in ("t", "latent_eps", "noise"):
        return np.stack([getattr(draw, field) for draw in drawn])
    values = g(f"data.train.{field}")[samples]
    if field in ("t5", "clip"):
        drop = np.array([draw.drop_caption for draw in drawn]) if drop is None else drop
        values[drop] = g(f"data.empty.{field}") if empty is None else empty
    return values


def row_draw(cfg: Config, field: str, p: np.ndarray, epoch=None, sample=None, order=rng.order) -> np.ndarray:
    """A field of the rows at positions p of the run, or of the epoch and the samples given."""
    count = cfg.data.train_count
    seed = cfg.train.seed
    rate = cfg.train.caption_drop
    epoch = np.maximum(p // count if epoch is None else epoch, 0)
    orders = {int(e): order(seed, int(e), count) for e in np.unique(epoch)}
    own = np.array([orders[int(e)][q % count] for e, q in zip(epoch.flat, p.flat)]).reshape(p.shape)
    sample = own if sample is None else sample
    if field in ("position", "epoch", "sample"):
        return {"position": p, "epoch": epoch, "sample": sample}[field]
    drawn = [rng.train_draw(seed, int(e), int(s), (2,), rate) for e, s in zip(epoch.flat, sample.flat)]
    values = [draw.t if field == "t" else draw.drop_caption for draw in drawn]
    return np.array(values, np.float32 if field == "t" else bool).reshape(p.shape)


# Objective


OTHER_LATENTS = {"Stable Diffusion": (0.18215, 0.0), "SDXL": (0.13025, 0.0), "Stable Diffusion 3": (1.5305, 0.0609)}


def pack(x: np.ndarray, features=(0, 1, 2), by_column: bool = False) -> np.ndarray:
    """(B, C, Y, X) -> (B, N, P). features: the order of C, dy, dx within a token."""
    batch, channels, height, width = x.shape
    order = (4, 2) if by_column else (2, 4)
    split = x.reshape(batch, channels, height // 2, 2, width // 2, 2)
    split = split.transpose(0, *order, *(2 * axis + 1 for axis in features))
    return split.reshape(batch, height * width // 4, 4 * channels)


def rope_table(model, axes=None, order=(0, 1, 2), start=0, step=1, theta=None, exponent=None, text=0, bits=0):
    """(S, R, 2) cosines and sines of a model's tokens; the changes are mistakes."""
    row, column = np.divmod(np.arange(model.latent_height * model.latent_width // 4), model.latent_width // 2)
    grid = step * np.stack((0 * row, row, column), 1) + start * np.array((0, 1, 1))
    words = text * np.repeat(np.arange(model.text_tokens)[:, None], 3, 1)
    positions = np.concatenate((words, grid))[:, list(order)]
    theta = theta or model.rope_theta
    exponent = exponent or (lambda n: np.arange(0, n, 2) / n)
    powers = [float(theta) ** -exponent(n) for n in axes or model.rope_axes]
    angles = np.concatenate([positions[:, [axis]] * power for axis, power in enumerate(powers)], 1)
    angles = rounded(angles, bits) if bits else angles
    return np.stack((np.cos(angles), np.sin(angles)), -1)


# Blocks


def parts(g, cfg: Config, name: str) -> list[np.ndarray]:
    """The parts of a modulation, each (B, 1, D)."""
    return np.split(g(name)[:, None], g(name).shape[-1] // cfg.model.hidden, -1)


LAYOUTS = {  # of the 3 D features of qkv; how they become (q|k|v, head, dim)
    "": lambda x, h: x.reshape(*x.shape[:2], 3, h, -1),
    "qkv order (head, q, k, v, dim)": lambda x, h: np.moveaxis(x.reshape(*x.shape[:2], h, 3, -1), 3, 2),
    "head order (q, k, v, dim, head)": lambda x, h: np.swapaxes(x.reshape(*x.shape[:2], 3, -1, h), 3, 4),
    "qkv order (head, dim, q, k, v)": lambda x, h: np.moveaxis(x.reshape(*x.shape[:2], h, -1, 3), 4, 2),
}


def heads(cfg: Config, qkv: np.ndarray, layout: str = "") -> np.ndarray:
    """(q|k|v, B, H, S, K) of (B, S, 3 D)."""
    return LAYOUTS[layout](qkv, cfg.model.heads).transpose(2, 0, 3, 1, 4)


def raw_qkv(g, cfg: Config, path: str) -> np.ndarray:
    """The linear's 3 D features before the norms at a path."""
    if path.startswith("single"):
        return g("single_blocks.0.linear1")[..., : 3 * cfg.model.hidden]
    return g(path.replace(".norm", ".qkv"))


def joint(g, block: str, part: str, order=("txt", "img")) -> np.ndarray:
    """Normed queries or keys of the joint sequence: (B, H, S, K)."""
    if block.startswith("single"):
        return g(f"{block}.norm.{part}_norm")
    return np.concatenate([g(f"{block}.{stream}_attn.norm.{part}_norm") for stream in order], 2)


def turned(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """(B, H, S, K) with each pair of neighbours rotated."""
    a = x[..., 0::2]
    b = x[..., 1::2]
    cos = table[..., 0]
    sin = table[..., 1]
    return from_halves(np.concatenate((cos * a - sin * b, sin * a + cos * b), -1))


def to_halves(x: np.ndarray) -> np.ndarray:
    """Even features before odd ones."""
    return np.concatenate((x[..., 0::2], x[..., 1::2]), -1)


def from_halves(x: np.ndarray) -> np.ndarray:
    return np.stack(np.split(x, 2, -1), -1).reshape(x.shape)


def merged(x: np.ndarray, axes: tuple[int, ...] = (0, 2, 1, 3)) -> np.ndarray:
    """(B, H, S, K) with its axes in this order, read as (B, S, D)."""
    return x.transpose(axes).reshape(x.shape[0], x.shape[2], -1)


# Number formats


class Format:
    """A format by its values that are not negative, in the order of their codes.

    sign: the code of the sign alone. has_zero: this code is -0. normal: the least normal value.
    """

    def __init__(self, form: number_formats.Format):
        self.sign = form.sign
        self.has_zero = form.has_negative_zero
        self.top = form.largest
        self.normal = 2.0 ** (1 - form.bias)
        self.values = np.array([value for value in form.table()[: form.sign] if np.isfinite(value)])

    def encode(self, x: np.ndarray, zero: bool | None = None, down: bool = False, chance=None) -> np.ndarray:
        """Codes of x, rounded to nearest even and clamped. zero: -0 has a code. down: towards zero.

        chance: the result is the value at or below x + chance * (distance of the values around x); zero is +0.
        """
        size = np.minimum(np.abs(x), self.top)
        middles = (self.values[1:] + self.values[:-1]) / 2
        below, above = (np.searchsorted(middles, size, side) for side in ("left", "right"))  # they differ in a tie
        low = np.searchsorted(self.values, size, "right") - 1
        code = low if down else np.where(below % 2 == 0, below, above)
        if chance is not None:
            way = (size - self.values[low]) / np.diff(self.values, append=np.inf)[low]
            code = low + np.where(x < 0, chance < way, chance >= 1 - way)
        zero = self.has_zero and chance is None if zero is None else zero
        return (code + self.sign * (np.signbit(x) & ((code > 0) | zero))).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        known = np.concatenate((self.values, np.full(self.sign - len(self.values), np.nan)))
        return np.where(codes >= self.sign, -1.0, 1.0) * known[codes % self.sign]


FORMATS = {name: Format(form) for name, form in number_formats.FORMATS.items()}
PRODUCTS = {  # operands, product
    "y": ("x", "weight", lambda x, w: x @ w.T),
    "grad_x": ("grad", "weight", lambda grad, w: grad @ w),
    "grad_weight": ("grad", "x", lambda grad, x: grad.T @ x),
}


def delayed_scales(amax, history=3, margin=1, cap=44, keeps=True, late=False, pick=max, tops=(448, 57344)):
    """The scale after each step. keeps: a 0 changes nothing. late: a step's own magnitude does not count yet."""
    columns = []
    for column, top in zip(amax.T, tops):
        seen = []
        scales = []
        for magnitude in column:
            before = seen
            seen = [*seen, magnitude] if magnitude or not keeps else seen
            window = (before if late else seen)[-history:]
            used = pick(window) if window else 0
            scales.append(min(top / 2**margin / used, 2.0**cap) if used else 2.0**cap if window else 1.0)
        columns.append(scales)
    return np.array(columns).T


WORDS = dict(globals()) | {"hashlib": hashlib, "places": places, "permutations": permutations}
