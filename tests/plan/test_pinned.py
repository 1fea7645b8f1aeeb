"""The bound of the host memory that captured graphs pin, against a closed form of FSDP2's tables."""

from collections import defaultdict
from math import ceil, prod, sqrt

from conftest import MICRO, ROOT

from flux_ref import config, config_file
from flux_ref.model import parameter_table
from tools.plan import footprint, making, memory
from tools.shared import communication, hardware


def tables(cfg: config.Config, shards: int, multiprocessors: int) -> tuple[int, int]:
    """Bytes of the tables of all units for (reducing, gathering) once, line by line as in pytorch's TensorShape.cu."""
    units, reduced, gathered = defaultdict(list), 0, 0
    for name, shape in parameter_table(cfg.model).items():
        block = communication.BLOCK.match(name)
        place = (block[1], int(block[2]) // cfg.parallel.region_blocks) if block else None
        units[place].append(ceil(shape[0] / shards) * prod(shape[1:]))
    for counts in units.values():
        blocks = sum(ceil(4 * count / 2048) for count in counts)
        reduced += power(8 * (blocks + 6 * len(counts) + 2))
        factor = ceil(sum(ceil(2 * count / 2048) for count in counts) * shards / (multiprocessors * 2048 // 128 * 2))
        rounds = ceil(factor / min(ceil(sqrt(factor)), shards))
        gathered += power(8 * (sum(ceil(2 * count / (2048 * rounds)) for count in counts) + 4 * len(counts) + 1))
    return reduced, gathered


def power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def test_pinned_memory_of_graphs_is_bounded():
    """schnell on 8 ranks, 8 micro-batches: FSDP2's tables by the source of its kernels."""
    for blocks, shards, multiprocessors in ((1, 8, 132), (2, 8, 148), (4, 16, 148), (1, 8, 304)):
        values = {"train__global_batch": 64 * shards, "train__micro_batch": 8, "parallel__region_blocks": blocks}
        cfg = config_file.replace(config_file.load(ROOT / "configs" / "schnell_gbs512.toml"), **values)
        reduced, gathered = tables(cfg, shards, multiprocessors)
        real = 8 * (reduced + gathered) + gathered
        bound = memory.pinned(cfg, footprint.layout(cfg, shards, shards), shards, 8)
        assert real <= bound <= 1.3 * real, (blocks, shards)
    twice = config_file.replace(cfg, precision__preset="fp8_delayed", precision__dynamic_steps=5)
    assert memory.pinned(twice, footprint.layout(twice, 8, 8), 8, 8) > 1.9 * bound


def test_graphs_that_are_not_captured_pin_nothing():
    nvidia, amd = (hardware.load(name)[0] for name in ("h200", "mi355x"))
    for enabled, on_nvidia, on_amd in (("auto", True, False), ("on", True, True), ("off", False, False)):
        cfg = config_file.load(MICRO, [f"--graph.enabled={enabled}"])
        assert (making.captures(cfg, nvidia), making.captures(cfg, amd)) == (on_nvidia, on_amd)
