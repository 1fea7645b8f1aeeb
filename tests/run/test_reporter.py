"""Which step and rank are blamed for a loss or norm that is not finite, and when the host reads a logged step."""

import errno
import math
from types import SimpleNamespace

import pytest
import torch
from run_files import lines

from flux_ref import config_file, ranks
from flux_ref import report as report_module
from flux_ref.errors import Fault, Refusal
from flux_ref.forecast import duration
from flux_ref.report import Reporter, blame
from flux_ref.step import NEVER, Health


def test_what_went_first_is_blamed(micro):
    """By (first bad loss, first bad norm) of each rank."""

    def complaint(*flags: tuple[int, int]) -> str | None:
        return blame(list(flags), micro)

    assert complaint((NEVER, NEVER), (NEVER, NEVER)) is None
    assert "gradient norm is not finite in step 5" in complaint((5, 4), (5, 4))  # losses follow
    assert "loss is not finite in step 5 on rank 1's data (positions 54 to 59" in complaint((5, 4), (4, 4))
    assert "in step 3 on rank 0's data" in complaint((2, 3), (3, 3))


@pytest.fixture
def reporting(micro, tmp_path, monkeypatch):
    """reporting(kind): a Reporter on a kind of device, and a list of what it reads."""
    world = ranks.start(micro.parallel)
    monkeypatch.setattr(report_module, "peak_memory_gb", lambda device: 1.0)
    read: list[str] = []
    made: list[Reporter] = []

    def make(kind: str) -> tuple[Reporter, list[str]]:
        folder = tmp_path / kind
        folder.mkdir()
        mark = None if kind == "cpu" else SimpleNamespace(synchronize=lambda: read.append("read"))
        monkeypatch.setattr(ranks, "record_copy_event", lambda device: mark)
        cfg = config_file.replace(micro, run__dir=str(folder))
        own = SimpleNamespace(rank=0, size=1, device=SimpleNamespace(type=kind), nodes=["one"])
        made.append(Reporter(cfg, own, lambda line: None))
        made[-1].begin(0, warm_s=0.0)
        return made[-1], read

    yield make
    for report in made:
        report.close()
    assert world.size == 1
    ranks.stop()


def step(report: Reporter, number: int, health: Health, loss: float = 1.0) -> None:
    """The report of a made-up step, whose values the next step overwrites."""
    value = torch.tensor(loss * number)
    state = SimpleNamespace(step=number, samples=12 * number, opt=SimpleNamespace(lr=value.clone()))
    report.step(state, value, value.clone(), health, 0.0)
    value.fill_(99.0)


def test_a_logged_step_is_read_after_the_next_launch_or_at_once_before_an_evaluation_and_on_the_cpu(reporting):
    report, read = reporting("gpu")
    health = Health(torch.device("cpu"))
    counts = []
    for number in range(1, 4):  # an evaluation follows the third
        step(report, number, health)
        counts.append(len(read))
        report.tick()
        counts.append(len(read))
    assert counts == [0, 1, 1, 2, 3, 3]
    report, read = reporting("cpu")
    step(report, 1, health)
    assert lines(report.folder)[0]["loss"] == 1.0
    values = [
        (record["step"], record["loss"], record["grad_norm"], record["lr"])
        for record in lines(report.folder.parent / "gpu")
    ]
    assert values == [(number,) * 4 for number in range(1, 4)]


def test_a_bad_step_ends_the_run_when_it_is_read_also_if_it_was_not_logged(reporting):
    report, _ = reporting("gpu")
    health = Health(torch.device("cpu"))
    health.update(torch.tensor(math.nan), torch.tensor(1.0))
    step(report, 1, health)
    with pytest.raises(Fault, match="loss is not finite in step 1"):
        report.tick()
    with pytest.raises(Fault, match="loss is not finite in step 1"):
        report.require_healthy(health)


def test_what_a_picture_raises_becomes_one_line_and_no_more_is_forgiven(reporting, capsys):
    report, _ = reporting("cpu")
    for error in (Refusal("no place; mend it"), OSError(errno.ENOSPC, "No space left on device", "loss.png")):
        with report.spare("loss.png"):
            raise error
        assert capsys.readouterr().out == f"loss.png NOT drawn: {error}; the run goes on without\n"
    with pytest.raises(ValueError), report.spare("loss.png"):
        raise ValueError


def test_durations_are_told_in_words():
    told = ["0 s", "99 s", "2 min", "83 min", "3 h 05 min"]
    assert [duration(seconds) for seconds in (0.4, 99, 130, 5000, 11_100)] == told
