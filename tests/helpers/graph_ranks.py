"""Trains with evaluations in between, eagerly and by graphs, for test_step_runner and test_gpu_graph.

    torchrun --nproc-per-node 2 tests/helpers/graph_ranks.py DATA OUT [--section.key=value ...]

On the CPU stand-ins take the place of graphs: they run the captured work anew, under the limits of a graph.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from conftest import MICRO, data_overrides, require_identical
from torch import Tensor

from flux_ref import config_file, ranks, sharding, step_runner
from flux_ref.config import Config
from flux_ref.data import TrainSet, ValSet
from flux_ref.evaluate import validation_loss
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.step import State
from flux_ref.step_runner import StepRunner, require_settled

STEPS, EVALUATE_EVERY = 20, 5


class Log(list):
    """What happened, in order; and the graphs of stand-in recorders."""

    broken_at = None  # of the training replay that raises, counted from 0

    def __call__(self, what: str, then: Callable = lambda *args: None) -> Callable:
        """A function that first writes down `what`."""

        def noted(*args, **kwargs):
            self.append(what)
            return then(*args, **kwargs)

        return noted


class StandInGraph:
    """Runs the captured work anew at each replay, and insists that all it uses lies where it lay at the capture."""

    def __init__(self, work: Callable[[], None], log: Log):
        self.work, self.log, self.kind = work, log, work.__name__.strip("_")
        self.steps = getattr(work, "__self__", None)  # None: any work, not a step's
        self.places = places(self.steps) if self.steps else []

    def replay(self) -> None:
        if self.log.broken_at == self.log.count("replay train") and self.kind == "train":
            raise RuntimeError("an error of the device")
        self.log.append(f"replay {self.kind}")
        if self.steps is None:
            self.work()
            return
        assert places(self.steps) == self.places, "a graph would still use the former tensors"
        sharding.reshard(self.steps.state.net)  # a graph gathers the weights, whatever the net believes
        self.work()
        sharding.reshard(self.steps.state.net)

    def reset(self) -> None:
        self.log.append("reset")


class StandInRecorder:
    """Takes the place of device.Recorder; nothing is executed by a capture."""

    log = Log()

    def __init__(self, device: torch.device):
        self.log.append("stream")

    def capture(self, work: Callable[[], None]) -> StandInGraph:
        require_settled(work.__self__.state.net)
        self.log.append(f"capture {work.__name__.strip('_')}")
        return StandInGraph(work, self.log)

    def synchronize(self) -> None:
        self.log.append("synchronize")


def places(steps: StepRunner) -> list[int]:
    """The addresses of all that a step reads and writes."""
    opt, precision = steps.state.opt, steps.state.precision
    own = (*steps.train_batch.values(), *steps.val_batch.values(), steps.loss, steps.grad_norm, steps.sums)
    kept = (steps.health.step, steps.health.first_bad, opt.lr, *opt.shards, *(p.to_local() for p in opt.parameters))
    moments = [tensor for state in opt.adamw.state.values() for tensor in state.values()]
    remembered = (precision.history, *precision.amaxes, *precision.scales, *precision.inverses)
    return [tensor.data_ptr() for tensor in (*own, *kept, *moments, *remembered)]


def everything(state: State) -> dict[str, Tensor]:
    """A copy of this rank's weights, moments and step counts."""
    opt, kept = state.opt, {}
    for name, shard in zip(opt.names, opt.shards):
        kept[name] = shard.detach().clone()
        kept |= {f"{name} {part}": tensor.clone() for part, tensor in opt.adamw.state[shard].items()}
    return kept


def history(cfg: Config, world: World) -> dict:
    """STEPS steps from fresh weights with evaluations in between; one more evaluation after the graphs are gone.

    Nothing is read from the device before the end, so that the host runs ahead as far as it can.
    """
    train_set, val_set = (kind(cfg, world.rank, world.size, world.pin) for kind in (TrainSet, ValSet))
    train_set.open()
    val_set.open()
    net = sharding.build(cfg, world, seed=3)
    state = State.of(net, cfg, world)
    steps = StepRunner(state, cfg, world)
    steps.warm_up()
    warm = everything(state)
    steps.capture()
    captured = everything(state)

    def evaluate() -> list[float]:
        return validation_loss(steps, val_set, state.samples).losses

    steps.health.restart(0)
    feed, results, validations = train_set.feed(0), [], []
    try:
        for _ in range(STEPS):
            results.append(torch.stack(steps.train_on(feed)))
            if state.step % EVALUATE_EVERY == 0:
                validations.append(evaluate())
    finally:
        feed.close()
        used = bool(steps.graphs)
        steps.close(agreed=True)
    return {
        "results": torch.stack(results).tolist(),
        "validations": validations,
        "afterwards": evaluate(),
        "flags": [float(steps.health.step), *steps.health.first_bad.tolist()],
        "state": everything(state),
        "before the capture": warm,
        "after the capture": captured,
        "captured": used,
    }


def require_same_history(found: dict, want: dict) -> None:
    """Of a captured and an eager one: the same bits."""
    assert found["captured"] and not want["captured"]
    for key in ("results", "validations", "afterwards", "flags"):
        assert found[key] == want[key], key
    require_identical(found["state"], want["state"])
    require_identical(found["after the capture"], found["before the capture"])


def main(data: str, out: str, *overrides: str) -> int:
    cfg = config_file.load(MICRO, [*data_overrides(Path(data)), *overrides])
    cfg = config_file.replace(cfg, eval__batch=24, graph__enabled="off")
    world = ranks.start(cfg.parallel)
    cfg = config_file.replace(cfg, train__micro_batch=cfg.train.global_batch // world.size // 2 or 1)
    if world.device.type == "cpu":
        step_runner.Recorder, step_runner.obstacle = StandInRecorder, lambda device, asked: ""
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    found = {"eager": history(cfg, world), "captured": history(config_file.replace(cfg, graph__enabled="on"), world)}
    torch.save(found, Path(out) / f"rank_{world.rank}.pt")
    ranks.stop()
    return 0


if __name__ == "__main__":
    cli.leave(main(*sys.argv[1:]))
