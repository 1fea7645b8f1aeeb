"""Whole training steps of 8 to 512 ranks on a device that does not exist: waits, copies, memory and collectives."""

import inspect
import json
import re
from collections import defaultdict
from itertools import groupby

import fake_step
import pytest
from conftest import ROOT, script
from fake_step import NODE

from flux_ref.config import DTYPE_NAMES, Config
from flux_ref.precision import policy
from tools.plan import footprint
from tools.shared import communication
from tools.shared.communication import ITEM_BYTES, Unit

SMALL = {  # blocks of full width, few tokens
    **{"train__micro_batch": 1, "train__synthetic_steps": 1, "eval__batch": 2},
    **{"model__double_blocks": 1, "model__single_blocks": 2, "model__text_tokens": 16},
    **{"model__latent_height": 8, "model__latent_width": 8},
}
RENAMED = {"allgather_base": "all_gather", "reduce_scatter_base": "reduce_scatter", "allreduce": "all_reduce"}
CAPTURING = ["device.synchronize at step_runner.py _capture", "gather_objects at step_runner.py _capture"]
BEFORE = [  # where the host waits or copies before the clock starts
    "_to_copy from cpu to nodev at sharding.py build",  # RoPE
    "_local_scalar_dense at optim.py __init__",  # AdamW checks its learning rate
    "copy_ from cpu to nodev at step_runner.py warm_up",  # synthetic batches
    "_local_scalar_dense at step_runner.py warm_up",  # the health
]
OF_DELAYED = "_to_copy from cpu to nodev at hooks.py find"
AFTER = ["equal at step_runner.py capture"]  # the health
READ = "event.synchronize at ranks.py synchronize"
LOOP = [  # the first step is read after the second launch; the last one is read before the evaluation
    *(("replay _train", 2), (READ, 1), ("replay _train", 1), (READ, 2), ("replay _validate", 2)),
    ("_local_scalar_dense at evaluate.py validation_loss", 24),  # the sums
]


def case(gpus: int, micros: int, delayed: bool, config: str = "schnell_gbs512", **values: object) -> dict:
    """Of `fake_step.py`. One micro-batch goes with weights that are gathered again for backward."""
    own = {
        "precision__preset": "fp8_delayed" if delayed else "bf16",
        "parallel__kept_regions": 0 if micros == 1 else -1,
    }
    return {"gpus": gpus, "micros": micros, "config": f"{ROOT}/configs/{config}.toml", "values": values | own}


def run(*cases: dict) -> list[dict]:
    """What fake_step.py finds in a process of its own, which sees no real accelerator."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    process = script("tests/helpers/fake_step.py", json.dumps(cases), ranks=0, timeout=600, **hidden)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout)


def runs(events: list[str]) -> list[tuple[str, int]]:
    """Events without numbers of lines, and how many of a kind follow each other."""
    return [(event, len(list(same))) for event, same in groupby(re.sub(r":\d+", "", event) for event in events)]


# Collectives: operation, group, ranks, dtype, bytes


def gathered(unit: Unit, cfg: Config) -> tuple[str, int]:
    """The dtype and the bytes in which a unit's weights are gathered."""
    has_codes = unit.gathered < ITEM_BYTES[cfg.parallel.dtype] * unit.padded
    return "uint8" if has_codes else DTYPE_NAMES[cfg.parallel.dtype], unit.gathered


def of_a_step(cfg: Config, gpus: int) -> tuple[list[list], list[list]]:
    """The collectives of a training step and of a validation step in order, with the sizes that the plan counts."""
    layout = footprint.layout(cfg, gpus, NODE)
    (*regions, root), n = layout.units, layout.shards
    inside, across = ("mesh_shard", "mesh_replicate") if layout.replicas > 1 else ("default_pg", "")
    reduced, size = DTYPE_NAMES[cfg.parallel.reduce_dtype], ITEM_BYTES[cfg.parallel.reduce_dtype]

    def gathers(*units: Unit) -> list[list]:
        return [["allgather_base", inside, n, *gathered(unit, cfg)] for unit in units]

    def reductions(unit: Unit, last: bool) -> list[list]:
        scatter = [["reduce_scatter_base", inside, n, reduced, size * unit.padded]]
        over_replicas = [["allreduce", across, layout.replicas, reduced, size * unit.padded // n]]
        return scatter + over_replicas if last and across else scatter

    def over_all(scalars: int) -> list[list]:
        return [["allreduce", "default_pg", gpus, "float32", 4 * scalars]]

    micros = cfg.train.global_batch // (gpus * cfg.train.micro_batch)
    coded = policy.layers_gathered_in_fp8(cfg)
    of_weights = [["allreduce", inside, n, "float32", 4 * len(coded)]] if coded else []
    forward, step = of_weights + gathers(root, *regions), []
    for micro in range(micros):
        step += forward
        again = gathers(*reversed(regions)) if not cfg.parallel.kept_regions else []
        step += again[:1]
        for i, unit in enumerate(reversed(regions)):
            step += again[i + 1 : i + 2] + reductions(unit, micro == micros - 1)
        step += reductions(root, micro == micros - 1)
    delayed = policy.layers_with_delayed_scales(cfg)
    magnitudes = over_all(2 * len(delayed)) if delayed else []
    return step + over_all(1) + magnitudes, forward


def sent(collectives: list[list]) -> dict[str, float]:
    """Bytes that a rank sends in rings, by the plan's names."""
    found = defaultdict(float)
    for operation, group, n, _, size in collectives:
        is_scalar = operation == "allreduce" and group != "mesh_replicate"
        name = "scalars" if is_scalar else RENAMED[operation]
        found[name] += (2 if operation == "allreduce" else 1) * size * (n - 1) / n
    return found


def require_sound(case: dict, found: dict) -> None:
    """No wait, no copy, no foreign memory and no uncounted collective in what is captured."""
    gpus, cfg = case["gpus"], fake_step.configured(**case)
    step, validation = of_a_step(cfg, gpus)
    planned = communication.sent(cfg, footprint.layout(cfg, gpus, NODE), case["micros"])
    phases = 1 + bool(policy.layers_with_delayed_scales(cfg))
    training, validating = found["captures"][:phases], found["captures"][phases:]
    assert len(validating) == phases, case
    for capture in training:
        assert (capture["work"], capture["waits"], capture["left"]) == ("_train", [], []), case
        assert capture["collectives"] == step, case
        assert sent(capture["collectives"]) == pytest.approx({name: size for name, size in planned.items() if size})
    for capture in validating:
        assert (capture["work"], capture["waits"], capture["left"]) == ("_validate", [], []), case
        assert capture["collectives"] == validation, case


def require_waits_in_their_places(found: dict) -> None:
    """Outside of the captures the host waits in the places above only."""
    before = [event for event, _ in runs(found["before the loop"])]
    if len(found["captures"]) > 2:
        assert before.pop(1) == OF_DELAYED
    assert before == BEFORE + CAPTURING * len(found["captures"]) + AFTER
    assert runs(found["loop"]) == LOOP
    operations = [operation for operation, *_ in found["collectives"]]
    assert operations == ["allgather"] * fake_step.STEPS + ["allreduce", "broadcast"]


def test_a_step_of_8_ranks_waits_for_nothing_and_sends_what_the_plan_counts():
    """And planted faults are found with file, line and function. A process of its own: 10 s."""
    sound, faulty = case(8, 2, False, **SMALL), case(8, 1, False, **SMALL)
    found, faults = run(sound, faulty | {"planted": True})
    require_sound(sound, found)
    require_waits_in_their_places(found)
    _, line = inspect.getsourcelines(fake_step.planted)
    wants = "_local_scalar_dense", "_to_copy from nodev to cpu", "copy_ from cpu to nodev"
    planted = [f"{what} at fake_step.py:{line + i} planted" for i, what in enumerate(wants, start=1)]
    assert [capture["waits"] for capture in faults["captures"]] == [planted, []]
    assert set(planted) < set(faults["before the loop"])


@pytest.mark.nightly
def test_steps_of_more_ranks_and_of_fp8():
    kinds = [(gpus, micros, delayed) for gpus in (8, 64, 512) for micros in (1, 2) for delayed in (False, True)]
    cases = [case(*kind, **SMALL) for kind in kinds if kind != (8, 2, False)]  # which the default suite has
    for one, found in zip(cases, run(*cases)):
        require_sound(one, found)
        require_waits_in_their_places(found)


@pytest.mark.nightly
def test_the_whole_model_on_512_ranks():
    one = case(512, 1, False, "mi300x_64x8", train__micro_batch=8)
    (found,) = run(one)
    require_sound(one, found)
