"""Captured steps, with stand-ins for graphs: the order of things, what they may touch, and how they end.

What only a device can show is in test_gpu_graph.py.
"""

from pathlib import Path
from types import SimpleNamespace

import graph_ranks
import pytest
import stand_in
import torch
from conftest import MICRO, called, micro_run, refusal, script, the_line
from graph_ranks import history, require_same_history
from precision_ranks import fp8_config
from run_files import require_equal_runs
from stand_in import Log, Recorder

from flux_ref import config_file, ranks, sharding, step_runner
from flux_ref.arithmetic import arithmetic_of
from flux_ref.errors import Fault
from flux_ref.model import parameter_table
from flux_ref.precision.linear import PolicyLinear
from flux_ref.speed import graphs
from flux_ref.step import NEVER
from flux_ref.step_runner import CAPTURED, State, StepRunner, mode, require_settled

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SETTLING = ["reshard", "collect", "synchronize", "barrier"]
DROPPING = ["synchronize", "reset", "reset", "collect", "synchronize"]


@pytest.fixture
def log(monkeypatch) -> Log:
    """Steps are captured by stand-ins from here on; tells what happens."""
    log = Log()
    monkeypatch.setattr(stand_in, "LOG", log)
    stand_in.install(monkeypatch.setattr)
    monkeypatch.setattr(step_runner, "gc", SimpleNamespace(collect=log("collect")))  # which takes longer than a test
    return log


@pytest.fixture
def noted(log, monkeypatch) -> Log:
    """The log, with what happens around the graphs."""
    monkeypatch.setattr(sharding, "reshard", log("reshard", sharding.reshard))
    monkeypatch.setattr(ranks, "gather_objects", log("barrier", ranks.gather_objects))
    return log


@pytest.fixture
def leaving(noted, monkeypatch) -> Log:
    """The log, with when the process group is left."""
    monkeypatch.setattr(ranks, "stop", noted("stop", ranks.stop))
    return noted


@pytest.fixture
def world():
    yield ranks.start(config_file.load(MICRO).parallel)
    ranks.stop()


@pytest.fixture
def make(micro, world):
    """Makes the steps of a fresh net, warmed up."""

    def fresh(**values: object) -> StepRunner:
        cfg = config_file.replace(micro, **({"train__global_batch": 2, "eval__batch": 2} | values))
        steps = StepRunner(State.build(cfg, world, seed=3), cfg, world)
        steps.warm_up()
        return steps

    return fresh


@pytest.fixture
def made(monkeypatch) -> list[StepRunner]:
    """The steps of the runs of a test."""
    capture, made = StepRunner.capture, []
    monkeypatch.setattr(StepRunner, "capture", lambda steps, **own: (made.append(steps), capture(steps, **own)))
    return made


def train(folder, data, *overrides: str) -> int:
    """The exit code of train.py, run inside this process."""
    return called("train.py", *micro_run(data, folder, "--eval.batch=45", "--train.micro_batch=6", *overrides))


# Whether to capture


CHOSEN = [  # version of torch for HIP, "" for NVIDIA; device; settings; the mode
    ("", CUDA, {}, CAPTURED),
    ("", CPU, {}, "eager (a device of type cpu captures no graphs)"),
    ("", CUDA, {"train__synthetic_steps": 1}, "eager (train.synthetic_steps=1 must be at least 2, the steps before"),
    ("2.13.0", CUDA, {}, "eager (on HIP graphs are captured only when asked for)"),
    ("2.13.0", CUDA, {"graph__enabled": "on"}, CAPTURED),
    ("", CUDA, {"sample__every_samples": 24, "sample__count": 2}, CAPTURED),
    ("2.11.0", CUDA, {}, "eager (torch 2.11.0 cannot capture collectives on HIP; it takes torch 2.12)"),
]


def test_auto_captures_on_nvidia_devices_alone_and_on_is_refused_where_it_cannot(monkeypatch):
    own_version = str(torch.__version__)
    for version, where, values, want in CHOSEN:
        monkeypatch.setattr(torch.version, "hip", "7.1" if version else None)
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version or own_version))
        cfg = config_file.replace(config_file.load(MICRO), **values)
        assert mode(cfg, where).startswith(want)
        assert mode(config_file.replace(cfg, graph__enabled="off"), where) == "eager (graph.enabled=off)"
        if want != CAPTURED and "asked for" not in want:
            text = refusal(mode, config_file.replace(cfg, graph__enabled="on"), where)
            reason = want.removeprefix("eager (").rstrip(")")
            assert (
                text.startswith(f"graph.enabled=on cannot be honoured: {reason}") and "graph.enabled=auto runs" in text
            )


def test_expandable_segments_keep_nccl_from_registering_graphs(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv(graphs.REGISTER, raising=False)
    graphs.guard_expandable()
    assert graphs.REGISTER not in graphs.os.environ
    cfg = config_file.load(MICRO)
    for name in graphs.ALLOCATOR:
        with monkeypatch.context() as patch:
            patch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
            patch.setenv(graphs.REGISTER, "1")
            assert mode(cfg, CUDA) == "eager (NCCL_GRAPH_REGISTER=1 does not go with expandable_segments; unset it)"
            patch.delenv(graphs.REGISTER)
            ranks.start(cfg.parallel)
            ranks.stop()
            assert graphs.os.environ[graphs.REGISTER] == "0" and mode(cfg, CUDA) == CAPTURED


# The capture


def test_before_each_capture_weights_are_sharded_and_all_ranks_at_rest(noted, make):
    steps = make(parallel__kept_regions=-1)
    steps.validate()  # leaves weights gathered; Recorder.capture would notice
    noted.clear()
    steps.capture()
    assert noted == [*SETTLING, "capture train", *SETTLING, "capture validate", "reshard"]
    require_settled(steps.state.net)  # an eager forward that comes next gathers the weights anew


def test_a_capture_that_fails_or_executes_its_step_leaves_no_graph(log, make, monkeypatch):
    record = Recorder.capture

    def failing(recorder: Recorder, work):
        if work == steps._validate:
            raise Fault("a step cannot be captured")
        return record(recorder, work)

    def executing(recorder: Recorder, work):
        graph = record(recorder, work)
        work()
        return graph

    for capture, words, resets in ((failing, "cannot be captured", 1), (executing, "has executed it", 2)):
        steps = make()
        log.clear()
        monkeypatch.setattr(Recorder, "capture", capture)
        with pytest.raises(Fault, match=words):
            steps.capture()
        assert log[-3 - resets :] == ["synchronize", *["reset"] * resets, "collect", "synchronize"]
        assert not steps.graphs and steps.recorder is None


# Replays


def test_replays_are_bit_identical_to_eager_steps(log, micro, world):
    cfg = config_file.replace(micro, train__micro_batch=6, eval__batch=24, optim__ema=60)
    found = history(cfg, world)
    want = history(config_file.replace(cfg, graph__enabled="off"), world)
    require_same_history(found, want)
    assert log.count("replay train") == graph_ranks.STEPS
    assert sum("ema" in key for key in found["state"]) == len(parameter_table(cfg.model))
    assert len({tuple(losses) for losses in found["validations"]}) == 4, "an evaluation has used stale weights"
    assert found["validations"][-1] == found["afterwards"], "eager weights differ from those of the graphs"


@pytest.mark.slow
def test_replays_are_bit_identical_to_eager_steps_at_two_ranks(shapes_dir, tmp_path):
    process = script(
        "tests/helpers/graph_ranks.py", shapes_dir, tmp_path, ranks=2, timeout=100, CUDA_VISIBLE_DEVICES=""
    )
    assert process.returncode == 0, process.stderr[-4000:]
    for rank in range(2):
        found = torch.load(tmp_path / f"rank_{rank}.pt")
        require_same_history(found["captured"], found["eager"])
        assert len({tuple(losses) for losses in found["captured"]["validations"]}) == 4


@pytest.fixture(scope="module")
def eager(shapes_dir, tmp_path_factory):
    """The folder of an eager run."""
    folder = tmp_path_factory.mktemp("eager")
    assert train(folder, shapes_dir, "--graph.enabled=off") == 0
    return folder


def test_a_run_by_graphs_is_the_eager_run(eager, leaving, tmp_path, shapes_dir, monkeypatch, capsys):
    """Batch and rate are in place before each replay. All ranks drop the graphs before they leave the group."""
    log, filled, rates = leaving, [], []
    copy_next, replay = step_runner.copy_next, stand_in.Graph.replay
    monkeypatch.setattr(step_runner, "copy_next", lambda *args: (log.append("fill"), copy_next(*args))[1])

    def looking(captured: stand_in.Graph) -> None:
        if captured.kind == "train":
            filled.append(log[-1])
            rates.append(float(captured.work.__self__.state.opt.lr))
        replay(captured)

    monkeypatch.setattr(stand_in.Graph, "replay", looking)
    assert train(tmp_path / "captured", shapes_dir) == 0
    assert "  steps   captured\n" in capsys.readouterr().out
    assert filled == ["fill"] * 5 and rates == pytest.approx([1e-3, 2e-3, 2e-3, 2e-3, 2e-3])
    assert log.count("replay train") == 5 and log.count("replay validate") == 2
    assert log[-7:] == [*DROPPING, "barrier", "stop"] and log.count("reset") == 2
    require_equal_runs(tmp_path / "captured", eager)


def test_a_run_by_graphs_goes_on_from_its_checkpoint_as_if_nothing_had_been(eager, log, made, tmp_path, shapes_dir):
    log.broken_at = 3
    assert train(tmp_path / "run", shapes_dir, "--checkpoint.every_samples=24") == 3
    log.broken_at = None
    assert train(tmp_path / "run", shapes_dir) == 0
    assert log.count("replay train") == 3 + 3, "steps 0 to 2, and from the checkpoint of step 2 on 2 to 4"
    assert [float(steps.health.step) for steps in made] == [3, 5]
    assert all(steps.health.first_bad.tolist() == [NEVER, NEVER] for steps in made)
    require_equal_runs(tmp_path / "run", eager)


# Pictures between replays

PICTURES = ["--sample.count=4", "--sample.steps=2", "--sample.guidance=2", "--sample.every_samples=20"]
FP8 = ["--precision.preset=fp8", '--precision.switch=[[40, "fp8_delayed"]]', "--precision.dynamic_steps=1"]
FP8 += ["--parallel.dtype=bf16", "--model.hidden=48", "--model.rope_axes=[8, 4, 4]", "--eval.batch=16"]
FP8 += ["--train.global_batch=32", "--train.micro_batch=16", "--train.max_samples=96"]
FP8 += ["--parallel.kept_regions=-1"]


def sheets(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "samples").iterdir()}


@pytest.mark.parametrize("settings", [[], pytest.param(FP8, marks=pytest.mark.slow)])
def test_pictures_between_replays_are_those_of_an_eager_run_and_change_nothing(settings, log, tmp_path, shapes_dir):
    """Also with weights that stay gathered in FP8, and with delayed scales in a second stage."""
    runs = {"plain": [], "captured": PICTURES, "eager": [*PICTURES, "--graph.enabled=off"]}
    for name, own in runs.items():
        assert train(tmp_path / name, shapes_dir, *settings, *own) == 0
    assert log.count("replay train") == 2 * (3 if settings else 5)
    assert sheets(tmp_path / "captured") == sheets(tmp_path / "eager") and len(sheets(tmp_path / "eager")) == 4
    for name in ("captured", "eager"):
        require_equal_runs(tmp_path / name, tmp_path / "plain")


def test_drawing_is_rehearsed_in_each_phase_before_the_capture_and_after_it(noted, world):
    cfg = fp8_config(precision__dynamic_steps=0, precision__switch=((24, "bf16"),), sample__count=1)
    steps = StepRunner(State.build(cfg, world, 3, arithmetic_of(cfg)), cfg, world)
    steps.warm_up()
    noted.clear()
    linear = steps.state.arithmetic.linears[0]
    steps.capture(beside=lambda: noted.append(f"draw {linear.way}"))
    kept = [what for what in noted if what.startswith(("draw", "capture"))]
    drawn = ["draw tensor", "draw plain"]
    assert kept == [*drawn, *["capture train"] * 2, *["capture validate"] * 2, *drawn] and linear.way == "tensor"


def test_graphs_that_leave_no_memory_for_pictures_are_refused_with_figures(
    log, tmp_path, shapes_dir, monkeypatch, capsys
):
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**9, 80 * 10**9))
    assert train(tmp_path / "run", shapes_dir, *PICTURES) == 2
    takes = "draws pictures between captured steps, which takes 3 GB beside the graphs; the device has 2 GB left; lower"
    assert f"sample.every_samples=20 {takes} train.micro_batch" in the_line(capsys.readouterr().err)
    assert log.count("reset") == 2 and not (tmp_path / "run").exists()
    assert train(tmp_path / "run", shapes_dir, *PICTURES[:-1]) == 0, "pictures at the end take the graphs' memory"


# The end


@pytest.mark.parametrize("is_gone", [False, True])
def test_when_a_step_breaks_graphs_are_dropped_without_waiting_for_others(
    leaving, made, tmp_path, shapes_dir, monkeypatch, capsys, is_gone
):
    """A device that is gone does not hide what broke the run."""

    def fail(recorder: Recorder) -> None:
        if leaving.broken_at == leaving.count("replay train"):
            raise RuntimeError("an illegal memory access")

    leaving.broken_at = 2
    if is_gone:
        monkeypatch.setattr(Recorder, "synchronize", fail)
    assert train(tmp_path / "run", shapes_dir) == 3
    assert capsys.readouterr().err.rstrip().endswith("RuntimeError: an error of the device")
    assert [steps.graphs for steps in made] == [{}]
    assert is_gone or (leaving[-6:] == [*DROPPING, "stop"] and leaving.count("reset") == 2)


def test_graphs_stay_if_a_rank_may_be_lost(leaving, make, monkeypatch):
    """Waiting for the device would be for ever if it waits for that rank. The process is about to end anyway."""
    steps = make()
    steps.capture()
    leaving.clear()
    monkeypatch.setattr(ranks, "is_single", lambda: False)
    steps.close()
    assert leaving == [] and steps.graphs


def test_closing_twice_or_without_graphs_does_nothing(leaving, make):
    steps = make()
    steps.capture()
    steps.close(agreed=True)
    leaving.clear()
    steps.close(agreed=True)
    assert leaving == [] and steps.recorder is None
    steps.train()


def test_each_way_of_scaling_has_a_step_of_its_own_that_its_steps_replay(log, world, monkeypatch):
    cfg = fp8_config(precision__dynamic_steps=2)
    steps = StepRunner(State.build(cfg, world, 3, arithmetic_of(cfg)), cfg, world)
    steps.warm_up()
    scaling, capture = [], Recorder.capture
    linear = next(module for module in steps.state.net.modules() if isinstance(module, PolicyLinear))

    def noted(self, work):
        scaling.append(linear.is_delayed)
        return capture(self, work)

    monkeypatch.setattr(Recorder, "capture", noted)
    steps.capture()
    assert list(steps.graphs) == ["train 0", "train 2", "validate 0", "validate 2"]
    assert scaling == [False, True] * 2
    replayed = []
    for name in steps.graphs:
        steps.graphs[name] = SimpleNamespace(replay=lambda name=name: replayed.append(name), reset=lambda: None)
    for _ in range(5):
        steps.train()
        steps.state.advance(1)
    assert replayed == ["train 0"] * 2 + ["train 2"] * 3
    steps.close()


def test_once_steps_are_closed_other_code_may_be_compiled(make):
    steps = make()
    steps.cfg = config_file.replace(steps.cfg, parallel__compile=True)
    try:
        sharding.forbid_recompilation()
        assert torch._dynamo.eval_frame._stance.stance != "default"
        steps.close()
        assert torch._dynamo.eval_frame._stance.stance == "default"
    finally:
        torch.compiler.set_stance("default")
