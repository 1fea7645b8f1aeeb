"""Captured steps, with stand-ins for graphs: the order of things, what they may touch, and how they end.

What only a device can show is in test_gpu_graph.py.
"""

import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import graph_ranks
import pytest
import stand_in
import torch
from conftest import MICRO, called, micro_run, refusal, require_identical, script
from graph_ranks import history, require_same_history
from precision_ranks import fp8_config
from run_files import require_equal_runs
from stand_in import Log, Recorder

from flux_ref import config_file, graphs, ranks, sharding, step_runner
from flux_ref.arithmetic import arithmetic_of
from flux_ref.errors import Fault
from flux_ref.graphs import CAPTURED, CapturedRunner, mode
from flux_ref.model import parameter_table
from flux_ref.precision.linear import PolicyLinear
from flux_ref.step import NEVER
from flux_ref.step_runner import State

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SETTLING = ["reshard", "collect", "synchronize", "barrier"]
PROOF = 2  # replays of a training step that prove a capture, in each phase
DROPPING = ["synchronize", "reset", "reset", "collect", "synchronize"]


@pytest.fixture
def log(monkeypatch) -> Log:
    """Steps are captured by stand-ins from here on; tells what happens."""
    log = Log()
    monkeypatch.setattr(stand_in, "LOG", log)
    stand_in.install(monkeypatch.setattr)
    monkeypatch.setattr(graphs, "gc", SimpleNamespace(collect=log("collect")))  # which takes longer than a test
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

    def fresh(**values: object) -> CapturedRunner:
        cfg = config_file.replace(micro, **({"train__global_batch": 2, "eval__batch": 2} | values))
        steps = CapturedRunner(State.build(cfg, world, 3, arithmetic_of(cfg)), cfg, world)
        steps.warm_up()
        return steps

    return fresh


@pytest.fixture
def made(monkeypatch) -> list[CapturedRunner]:
    """The steps of the runs of a test."""
    capture, made = CapturedRunner.capture, []
    monkeypatch.setattr(CapturedRunner, "capture", lambda steps: (made.append(steps), capture(steps)))
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
    cfg = config_file.load(MICRO)
    for name in ranks.ALLOCATOR:
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
    noted.clear()
    steps.capture()
    kept = [what for what in noted if what.startswith(("capture", "replay"))]
    assert kept == ["capture train", "capture validate", "replay train", "replay train", "replay validate"]
    for kind in ("train", "validate"):
        at = noted.index(f"capture {kind}")
        assert noted[at - 4 : at] == SETTLING


def test_a_gradient_that_is_left_and_a_capture_that_fails_leave_no_graph(log, make, monkeypatch):
    steps = make()
    next(steps.state.net.parameters()).grad = torch.zeros_like(next(steps.state.net.parameters()))
    with pytest.raises(Fault, match="a gradient is left before a capture"):
        steps._captured(steps.train)

    def failing(recorder: Recorder, work):
        raise Fault("a step cannot be captured")

    steps = make()
    monkeypatch.setattr(Recorder, "capture", failing)
    with pytest.raises(Fault, match="cannot be captured"):
        steps.capture()
    assert not steps.graphs


REAL_CAPTURE = inspect.signature(torch.cuda.graph)


class FailingCapture:
    """torch's context of a capture, whose end fails as it does when something went wrong inside."""

    def __init__(self, *args, **kwargs):
        self.bound = REAL_CAPTURE.bind(*args, **kwargs).arguments

    def __enter__(self) -> None:
        assert self.bound.pop("cuda_graph") == "a graph"
        assert self.bound == {"pool": "a pool", "stream": "a stream", "capture_error_mode": "thread_local"}

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_the_recorder_works_on_a_stream_of_its_own_and_tells_why_a_capture_failed(monkeypatch):
    log = Log()
    stand_ins = {
        "synchronize": log("synchronize"),
        "Stream": log("a new stream", lambda device: "a stream"),
        "set_stream": log.append,
        "graph_pool_handle": lambda: "a pool",
        "CUDAGraph": lambda: "a graph",
        "graph": FailingCapture,
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, function)
    recorder = graphs.Recorder(CUDA)
    assert log == ["synchronize", "a new stream", "a stream"]
    assert recorder.capture(log("the work")) == "a graph" and log[-1] == "the work"

    def work(error: Exception) -> None:
        raise error

    with pytest.raises(Fault, match=r"^a step cannot be captured: no\.item\(\) here; set graph\.enabled=off$"):
        recorder.capture(partial(work, RuntimeError("no.item() here\nand a stack of C++")))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):  # train.py names the remedy
        recorder.capture(partial(work, torch.OutOfMemoryError("CUDA out of memory")))


# The proof on the device


REPLAY = stand_in.Graph.replay


class Wrong(stand_in.Graph):
    """A graph whose replay is wrong in one way."""

    def __init__(self, work):
        super().__init__(work)
        self.weights = dict(zip(self.steps.state.opt.names, self.steps.state.opt.shards))
        self.kept = {name: shard.clone() for name, shard in self.weights.items()}
        self.batches = {id(t): t for b in (self.steps.train_batch, self.steps.val_batch) for t in b.values()}
        self.copies = {key: tensor.clone() for key, tensor in self.batches.items()}
        self.left: list[torch.Tensor] = []


@torch.no_grad()
def swapped(graph: Wrong, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Replay with the contents of other tensors."""
    now = [tensor.clone() for tensor, _ in pairs]
    for tensor, old in pairs:
        tensor.copy_(old)
    with torch.enable_grad():
        REPLAY(graph)
    for (tensor, _), own in zip(pairs, now):
        tensor.copy_(own)


def stale(prefix: str, graph: Wrong) -> None:
    """It uses weights that were gathered while it was captured."""
    swapped(graph, [(graph.weights[name], graph.kept[name]) for name in graph.weights if name.startswith(prefix)])


def another_batch(graph: Wrong) -> None:
    """It reads the batch of its capture."""
    swapped(graph, [(graph.batches[key], graph.copies[key]) for key in graph.batches])


def left_gradients(graph: Wrong) -> None:
    """It adds to the gradients of the last replay."""
    opt = graph.steps.state.opt
    step = opt.step

    def dirty() -> torch.Tensor:
        for parameter, old in zip(opt.parameters, graph.left):
            parameter.grad = parameter.grad + old
        graph.left = [parameter.grad.clone() for parameter in opt.parameters]
        return step()

    opt.step = dirty
    REPLAY(graph)
    del opt.step


def changing(graph: Wrong) -> None:
    """It trains."""
    graph.steps.state.opt.lr.fill_(1e-3)
    REPLAY(graph)


def test_a_right_capture_is_proved_and_leaves_the_run_as_it_was(log, make):
    for values in ({}, {"parallel__region_blocks": 2}, {"train__micro_batch": 1}):
        steps = make(**values)
        names = sharding.named_parameters(steps.state.net)
        before = {name: parameter.to_local().clone() for name, parameter in names.items()}
        steps.capture()
        require_identical({name: parameter.to_local() for name, parameter in names.items()}, before)
        assert steps.graphs and float(steps.health.step) == 0
        assert all(not part.any() for kind in ("exp_avg", "exp_avg_sq") for part in steps.state.opt.moments()[kind])


def test_stale_weights_of_any_unit_left_gradients_an_old_batch_and_a_step_that_trains_are_told(log, make, monkeypatch):
    units = [f"double_blocks.{i}." for i in range(2)] + [f"single_blocks.{i}." for i in range(3)] + ["final_layer."]
    faults = {prefix: partial(stale, prefix) for prefix in units}
    faults |= {"batch": another_batch, "gradients": left_gradients, "trains": changing}
    told = {}
    for name, replay in faults.items():
        steps = make()
        with monkeypatch.context() as patch, pytest.raises(Fault, match=r"set graph\.enabled=off") as caught:
            patch.setattr(Wrong, "replay", lambda graph, replay=replay: replay(graph))
            patch.setattr(stand_in, "Graph", Wrong)
            steps.capture()
        told[name] = str(caught.value)
    assert "loss of step 1" in told["batch"] and "norm of step 2" in told["gradients"]
    assert "has changed weights" in told["trains"]


# Replays


def test_replays_are_bit_identical_to_eager_steps(log, micro, world):
    cfg = config_file.replace(micro, train__micro_batch=6, eval__batch=24, optim__ema=60)
    found = history(cfg, world)
    want = history(config_file.replace(cfg, graph__enabled="off"), world)
    require_same_history(found, want)
    assert log.count("replay train") == PROOF + graph_ranks.STEPS
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
    assert filled[PROOF:] == ["fill"] * 5 and rates == pytest.approx([0, 0, 1e-3, 2e-3, 2e-3, 2e-3, 2e-3])
    assert log.count("replay train") == PROOF + 5 and log.count("replay validate") == 1 + 2
    assert log[-8:-1] == [*DROPPING, "barrier", "stop"] and log.count("reset") == 2
    require_equal_runs(tmp_path / "captured", eager)


def test_a_run_by_graphs_goes_on_from_its_checkpoint_as_if_nothing_had_been(eager, log, made, tmp_path, shapes_dir):
    log.broken_at = PROOF + 3
    assert train(tmp_path / "run", shapes_dir, "--checkpoint.every_samples=24") == 3
    log.broken_at = None
    assert train(tmp_path / "run", shapes_dir) == 0
    assert log.count("replay train") == PROOF + 3 + PROOF + 3, "steps 0 to 2, then from step 2 on"
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
    assert log.count("replay train") == 2 * (3 + 3 * PROOF if settings else 5 + PROOF)
    assert sheets(tmp_path / "captured") == sheets(tmp_path / "eager") and len(sheets(tmp_path / "eager")) == 4
    for name in ("captured", "eager"):
        require_equal_runs(tmp_path / name, tmp_path / "plain")


def test_where_graphs_leave_no_memory_for_pictures_a_line_says_so_and_training_goes_on(
    log, tmp_path, shapes_dir, monkeypatch, capsys
):
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * 10**9, 80 * 10**9))
    assert train(tmp_path / "run", shapes_dir, *PICTURES) == 0
    out = capsys.readouterr().out
    line = "samples         24  no pictures: a drawing takes about 3 GB beside the graphs, a rank has 2 GB; lower"
    assert line in out
    assert sorted(sheets(tmp_path / "run")) == ["000000060.png", "strip.png"], (
        "those at the end have the graphs' memory"
    )


# The end


@pytest.mark.parametrize("is_gone", [False, True])
def test_when_a_step_breaks_graphs_are_dropped_without_waiting_for_others(
    leaving, made, tmp_path, shapes_dir, monkeypatch, capsys, is_gone
):
    """A device that is gone does not hide what broke the run."""

    def fail(recorder: Recorder) -> None:
        if leaving.broken_at == leaving.count("replay train"):
            raise RuntimeError("an illegal memory access")

    leaving.broken_at = PROOF + 2
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
    assert leaving == [] and graphs.KEPT.pop()


def test_closing_twice_or_without_graphs_does_nothing(leaving, make):
    steps = make()
    steps.capture()
    steps.close(agreed=True)
    leaving.clear()
    steps.close(agreed=True)
    assert leaving == [] and not steps.graphs
    steps.train()


def test_each_way_of_scaling_has_a_step_of_its_own_that_its_steps_replay(log, world, monkeypatch):
    cfg = fp8_config(precision__dynamic_steps=2)
    steps = CapturedRunner(State.build(cfg, world, 3, arithmetic_of(cfg)), cfg, world)
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


def test_once_steps_are_closed_other_code_may_be_compiled(log, make):
    steps = make()
    steps.cfg = config_file.replace(steps.cfg, parallel__compile=True)
    try:
        sharding.forbid_recompilation()
        assert torch._dynamo.eval_frame._stance.stance != "default"
        steps.close()
        assert torch._dynamo.eval_frame._stance.stance == "default"
    finally:
        torch.compiler.set_stance("default")
