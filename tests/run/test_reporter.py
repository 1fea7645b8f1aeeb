"""Which step and rank are blamed for a loss or norm that is not finite, and when the host reads a logged step."""

import math
from types import SimpleNamespace

import pytest
import torch
from run_files import lines

import train
from flux_ref import config_file, ranks
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.errors import Fault, Interrupted
from flux_ref.evaluate import Validation
from flux_ref.run import loss_chart, reporter
from flux_ref.run.forecast import duration
from flux_ref.run.reporter import Reporter, blame
from flux_ref.step import NEVER, Health


def test_what_went_first_is_blamed(micro):
    """By (first bad loss, first bad norm) of each rank."""

    def complaint(*flags: tuple[int, int]) -> str | None:
        return blame(list(flags), micro)

    assert complaint((NEVER, NEVER), (NEVER, NEVER)) is None
    assert "gradient norm is not finite in step 5" in complaint((5, 4), (5, 4))  # losses follow
    assert "loss is not finite in step 5 on rank 1's data (positions 54 to 59" in complaint((5, 4), (4, 4))
    assert "in step 3 on rank 0's data" in complaint((2, 3), (3, 3))


class MadeUpSteps(SimpleNamespace):
    """Steps that only set the device's loss, norm and learning rate to their number, as replays do: in place."""

    graphs = ()

    def train_on(self, feed: object) -> tuple[torch.Tensor, torch.Tensor]:
        number = self.state.step + 1
        if number == self.broken:
            raise RuntimeError("out of data")
        self.events.append(f"launch {number}")
        for tensor in (self.loss, self.norm, self.state.opt.lr):
            tensor.fill_(number)
        self.health.update(self.loss * (math.nan if number == self.bad else 1), self.norm)
        self.state.step, self.state.samples = number, number * 12
        return self.loss, self.norm


@pytest.fixture
def trained(micro, tmp_path, monkeypatch):
    """trained(kind, ...): train.Run.train of five made-up steps on a kind of device: what happened, the records."""
    world = ranks.start(micro.parallel)
    monkeypatch.setattr(reporter, "peak_memory_gb", lambda device: 1.0)

    def run(kind: str, broken: int = 0, bad: int = 0, stop: int = 0, **values: object) -> tuple[list[str], list]:
        events, folder = [], tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "metrics.jsonl").touch()
        cfg = config_file.replace(micro, run__dir=str(folder), **values)

        def note(what: str) -> None:
            events.append(what)
            if what == f"the end of step {stop}":
                raise Interrupted(15)

        zeros = torch.zeros(3).unbind()
        state = SimpleNamespace(step=0, samples=0, opt=SimpleNamespace(lr=zeros[0]))
        state.arithmetic = SimpleNamespace(begin=lambda step: None, switched=lambda step: "")
        own = {
            "loss": zeros[1],
            "norm": zeros[2],
            "warm_s": 0.0,
            "data_wait_s": 0.0,
            "health": Health(torch.device("cpu")),
        }
        steps = MadeUpSteps(state=state, events=events, broken=broken, bad=bad, **own)
        saver = SimpleNamespace(save=lambda *_: events.append(f"save {state.step}"), finish=lambda: None)
        mark = None if kind == "cpu" else SimpleNamespace(synchronize=lambda: events.append("read"))
        monkeypatch.setattr(ranks, "record_copy_event", lambda device: mark)
        found = Validation(0.5, 0.0, [0.5] * 8, [0.0] * 8, 45)
        monkeypatch.setattr(train, "validation_loss", lambda *_: events.append(f"evaluate {state.step}") or found)
        log = BenchmarkLog()
        report = Reporter(cfg, SimpleNamespace(rank=0, device=SimpleNamespace(type=kind), nodes=["one"]), log.text)
        try:
            alive = SimpleNamespace(at=note, watch=SimpleNamespace())
            train.Run(cfg, state, steps, None, None, saver, report, log, alive, None).train(iter(()))
        except (Interrupted, Fault, RuntimeError) as error:
            events.append(str(error).partition(" in")[0])
        finally:
            report.close()
        measured = ("samples_per_s", "data_wait")
        records = [{key: record[key] for key in record if key not in measured} for record in lines(folder)]
        return [event for event in events if "the end of" not in event], records

    yield run
    assert world.size == 1
    ranks.stop()


def test_a_logged_step_is_read_after_the_next_launch(trained):
    """Except before an evaluation, a checkpoint or the end. What is recorded does not change."""
    events, records = trained("gpu")
    first = "launch 1, launch 2, read, launch 3, read, read, evaluate 3"
    assert ", ".join(events) == f"{first}, launch 4, launch 5, read, read, evaluate 5"
    values = [(record["step"], record["loss"], record["grad_norm"], record["lr"]) for record in records]
    assert values == [(number,) * 4 for number in range(1, 6)]
    at_once, same = trained("cpu")
    assert [event for event in events if event != "read"] == at_once and records == same
    events, _ = trained("gpu", checkpoint__every_samples=24)  # it reads the health, too
    first = "launch 1, launch 2, read, read, read, save 2, launch 3, read, evaluate 3"
    assert ", ".join(events) == f"{first}, launch 4, read, read, save 4, launch 5, read, evaluate 5"


def test_a_run_that_ends_early_reads_its_logged_step_first(trained):
    ends = {
        "launch 1, read, read, save 1, stopped by SIGTERM": ({"stop": 1}, 1),
        "launch 1, read, out of data": ({"broken": 2}, 1),
        "launch 1, launch 2, read, loss is not finite": ({"bad": 1}, 0),
        "launch 1, read, loss is not finite": ({"bad": 1, "broken": 2}, 0),
        "launch 1, launch 2, read, launch 3, read, launch 4, read, launch 5, read, read, loss is not finite": (
            {"bad": 5, "data__val": ""},  # no evaluation reads the last step
            4,
        ),
    }
    for want, (values, count) in ends.items():
        events, records = trained("gpu", **values)
        assert (", ".join(events), len(records)) == (want, count)


def test_the_chart_tells_training_from_validation(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(loss_chart, "chart", lambda *curves: seen.append(curves[:2]))
    trained("cpu")
    train_curve, val_curve = seen[-1]
    assert train_curve[0] == (12, 1.0) and val_curve[0] == (36, 0.5)


def test_durations_are_told_in_words():
    told = ["0 s", "99 s", "2 min", "83 min", "3 h 05 min"]
    assert [duration(seconds) for seconds in (0.4, 99, 130, 5000, 11_100)] == told
