"""Captured steps, with stand-ins for graphs: the order of things, what they may touch, and how they end.

What only a device can show is in test_gpu_graph.py.
"""

import inspect
import json
from functools import partial
from types import SimpleNamespace

import pytest
import stand_in
import torch
from conftest import called, micro_config, micro_run, refusal, require_identical, script
from graph_ranks import everything, require_same_history
from precision_ranks import FP8_RUN, fp8_config
from run_files import contents, require_equal_runs
from stand_in import Log, Recorder
from torch.torch_version import TorchVersion

from flux_ref import cli, graphs, ranks, sharding, trainer
from flux_ref.cli import Fault
from flux_ref.graphs import CAPTURED, CapturedTrainer, mode
from flux_ref.precision.linear import PolicyLinear
from flux_ref.trainer import TrainState

CUDA = torch.device("cuda", 0)
SETTLING = ["reshard", "collect", "synchronize", "barrier"]
PROOF = 3  # replays of a training step that prove a capture, in each phase


@pytest.fixture
def log(monkeypatch):
    """Steps are captured by stand-ins from here on; tells what happens."""
    log = Log()
    monkeypatch.setattr(stand_in, "LOG", log)
    stand_in.install(monkeypatch.setattr)
    monkeypatch.setattr(graphs, "gc", SimpleNamespace(collect=log("collect")))  # which takes longer than a test
    monkeypatch.setattr(graphs, "KEPT", [])
    monkeypatch.setattr(sharding, "reshard", log("reshard", sharding.reshard))
    monkeypatch.setattr(ranks, "gather_objects", log("barrier", ranks.gather_objects))
    monkeypatch.setattr(ranks, "stop", log("stop", ranks.stop))
    return log


@pytest.fixture
def make(world):
    """Makes the steps of a fresh net, warmed up."""

    def fresh(cfg):
        steps = CapturedTrainer(TrainState(sharding.build(cfg, world, 3), cfg, world), cfg, world)
        steps.warm_up()
        return steps

    return fresh


def small(**values):
    return micro_config(**({"train__global_batch": 2, "eval__batch": 2} | values))


def train(folder, data, *overrides):
    """The exit code of train.py, run inside this process."""
    return called("train.py", *micro_run(data, folder, "--eval.batch=45", "--train.micro_batch=6", *overrides))


OLD_HIP = "RCCL's watchdog invalidates captures in torch 2.11.0; 2.12 and later capture on HIP"
CHOSEN = [  # torch's HIP, its version, device, compute.cuda_graphs, the mode
    (None, "2.11.0", CUDA, "auto", CAPTURED),
    (None, "2.14.1", CUDA, "off", "eager (compute.cuda_graphs=off)"),
    (None, "2.14.1", torch.device("cpu"), "auto", "eager (a device of type cpu captures no graphs)"),
    ("7.1", "2.12.0", CUDA, "auto", "eager (on HIP graphs are captured only when asked for)"),
    ("7.1", "2.12.0", CUDA, "on", CAPTURED),
    ("7.1", "2.11.0", CUDA, "auto", f"eager ({OLD_HIP})"),
]


def test_auto_captures_on_nvidia_devices_alone_and_on_is_refused_where_it_cannot(monkeypatch):
    for hip, version, device, enabled, want in CHOSEN:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert mode(micro_config(compute__cuda_graphs=enabled), device) == want
    assert OLD_HIP in refusal(mode, micro_config(compute__cuda_graphs="on"), CUDA)
    monkeypatch.setattr(torch.version, "hip", None)
    text = refusal(mode, micro_config(compute__cuda_graphs="on"), torch.device("cpu"))
    assert text.startswith(
        "compute.cuda_graphs=on cannot be honoured: a device of type cpu captures no graphs; set it to auto"
    )


# The capture


def test_before_each_capture_weights_are_sharded_and_all_ranks_at_rest(log, make):
    steps = make(small(parallel__kept_regions=-1))
    log.clear()
    steps.capture()
    kept = [what for what in log if what.startswith(("capture", "replay"))]
    assert kept == ["capture train", "capture validate", *["replay train"] * PROOF, "replay validate"]
    for kind in ("train", "validate"):
        at = log.index(f"capture {kind}")
        assert log[at - 4 : at] == SETTLING


REAL_CAPTURE = inspect.signature(torch.cuda.graph)


class FailingCapture:
    """torch's context of a capture, whose end fails as it does when something went wrong inside."""

    def __init__(self, *args, **kwargs):
        bound = REAL_CAPTURE.bind(*args, **kwargs).arguments
        assert bound.pop("cuda_graph") == "a graph"
        assert bound == {"pool": "a pool", "stream": "a stream", "capture_error_mode": "thread_local"}

    def __enter__(self):
        pass

    def __exit__(self, kind, *_):
        if kind:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_the_recorder_works_on_a_stream_of_its_own_and_tells_why_a_capture_failed(log, monkeypatch):
    stand_ins = {
        "Stream": log("a new stream", lambda device: "a stream"),
        "set_stream": log.append,
        "graph_pool_handle": lambda: "a pool",
        "CUDAGraph": lambda: "a graph",
        "graph": FailingCapture,
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, function)
    recorder = Recorder.__base__(CUDA)
    assert log == ["synchronize", "a new stream", "a stream"]
    assert recorder.capture(log("the work")) == "a graph" and log[-1] == "the work"

    def work(error):
        raise error

    with pytest.raises(Fault, match=r"^a step cannot be captured: no\.item\(\) here; set compute\.cuda_graphs=off$"):
        recorder.capture(partial(work, RuntimeError("no.item() here\nand a stack of C++")))
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):  # train.py names the remedy
        recorder.capture(partial(work, torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(RuntimeError, match=r"^CUDA error: out of memory$") as short:
        recorder.capture(partial(work, RuntimeError("CUDA error: out of memory")))
    assert "lower train.micro_batch" in str(cli.in_words(short.value))


# The proof on the device


REPLAY = stand_in.Graph.replay


class Wrong(stand_in.Graph):
    """A graph whose replay is wrong in one way."""

    def __init__(self, *of):
        super().__init__(*of)
        self.weights = dict(zip(self.steps.state.opt.names, self.steps.state.opt.shards))
        self.kept = {name: shard.clone() for name, shard in self.weights.items()}
        self.batches = {id(t): t for b in (self.steps.train_batch, self.steps.val_batch) for t in b.values()}
        self.copies = {key: tensor.clone() for key, tensor in self.batches.items()}
        self.left = []
        self.moments = [(moment, moment.clone()) for kept in self.steps.state.opt.states().values() for moment in kept]


@torch.no_grad()
def swapped(graph, pairs):
    """Replay with the contents of other tensors."""
    now = [tensor.clone() for tensor, _ in pairs]
    for tensor, old in pairs:
        tensor.copy_(old)
    with torch.enable_grad():
        REPLAY(graph)
    for (tensor, _), own in zip(pairs, now):
        tensor.copy_(own)


def stale(prefix, graph):
    """It uses weights that were gathered while it was captured."""
    swapped(graph, [(graph.weights[name], graph.kept[name]) for name in graph.weights if name.startswith(prefix)])


def another_batch(graph):
    """It reads the batch of its capture."""
    swapped(graph, [(graph.batches[key], graph.copies[key]) for key in graph.batches])


def left_gradients(graph):
    """It adds to the gradients of the last replay."""
    opt = graph.steps.state.opt
    step = opt.step

    def dirty():
        for parameter, old in zip(opt.parameters, graph.left):
            parameter.grad = parameter.grad + old
        graph.left = [parameter.grad.clone() for parameter in opt.parameters]
        return step()

    opt.step = dirty
    REPLAY(graph)
    del opt.step


def at_rate(rate, graph):
    """Its learning rate is that of its capture."""
    graph.steps.state.opt.lr.fill_(rate)
    REPLAY(graph)


def early_update(graph):
    """It updates the weights before the new gradients are there."""
    opt = graph.steps.state.opt
    step = opt.step

    def early():
        grads = [parameter.grad.clone() for parameter in opt.parameters]
        for parameter, old in zip(opt.parameters, graph.left or map(torch.zeros_like, grads)):
            parameter.grad.copy_(old)
        graph.left = grads
        step()
        return torch.nn.utils.get_total_norm(graph.left).full_tensor()

    opt.step = early
    REPLAY(graph)
    del opt.step


def clipped(graph):
    """It divides gradients by the factor of its capture."""
    opt = graph.steps.state.opt
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opt, "clip_norm", opt.clip_norm / 2)
        REPLAY(graph)


def stale_moments(graph):
    """Its update reads the moments of its capture."""
    swapped(graph, [pair for pair in graph.moments if graph.kind == "train"])


def test_a_right_capture_is_proved_and_leaves_the_run_as_it_was(log, make):
    for values in ({}, {"parallel__region_blocks": 2}, {"train__micro_batch": 1, "train__synthetic_steps": 0}):
        steps = make(small(**values))
        before = everything(steps.state)
        steps.capture()
        require_identical(everything(steps.state), before)
        assert steps.graphs and float(steps.health.step) == 0


def test_whatever_a_graph_keeps_of_its_capture_is_told(log, make, monkeypatch):
    units = ("double_blocks.0.", "single_blocks.0.", "final_layer.")
    faults = {prefix: partial(stale, prefix) for prefix in units}
    faults |= {"batch": another_batch, "gradients": left_gradients, "trains": partial(at_rate, 1e-3)}
    faults |= {"rate 0": partial(at_rate, 0.0), "early": early_update, "clip": clipped, "moments": stale_moments}
    told = {}
    for name, replay in faults.items():
        steps = make(small())
        with monkeypatch.context() as patch, pytest.raises(Fault, match=r"set compute\.cuda_graphs=off") as caught:
            patch.setattr(Wrong, "replay", lambda graph, replay=replay: replay(graph))
            patch.setattr(stand_in, "Graph", Wrong)
            steps.capture()
        told[name] = str(caught.value)
    assert "loss of step 1" in told["batch"] and "norm of step 2" in told["gradients"]
    assert "another sum of changes of weights after step 1 in phase 0 than the eager step" in told["trains"]
    assert "another sum of changes of weights after step 3" in told["rate 0"] and "norm of step 1" not in told["early"]
    for name in ("early", "clip", "moments"):
        assert "another sum of exp_avg after step " in told[name], told


# Replays


@pytest.mark.slow
def test_replays_are_bit_identical_to_eager_steps_at_two_ranks(shapes_dir, tmp_path):
    process = script(
        "tests/helpers/graph_ranks.py", shapes_dir, tmp_path, ranks=2, timeout=100, CUDA_VISIBLE_DEVICES=""
    )
    assert process.returncode == 0, process.stderr[-4000:]
    for rank in range(2):
        both = torch.load(tmp_path / f"rank_{rank}.pt")
        found = both["captured"]
        require_same_history(found, both["eager"])
        assert len({tuple(losses) for losses in found["validations"]}) == 4, "an evaluation has used stale weights"
        assert found["validations"][-1] == found["afterwards"], "eager weights differ from those of the graphs"


@pytest.fixture(scope="module")
def eager(shapes_dir, tmp_path_factory):
    """The folder of an eager run."""
    folder = tmp_path_factory.mktemp("eager")
    assert train(folder, shapes_dir, "--compute.cuda_graphs=off") == 0
    return folder


def test_a_run_by_graphs_is_the_eager_run_bit_for_bit(eager, log, tmp_path, shapes_dir, monkeypatch, capsys):
    """Batch and rate are in place before each replay. All ranks drop the graphs before they leave the group."""
    filled, rates = [], []
    copy_next, replay = trainer.copy_next, stand_in.Graph.replay
    monkeypatch.setattr(trainer, "copy_next", lambda *args: (log.append("fill"), copy_next(*args))[1])

    def looking(captured):
        if captured.kind == "train":
            filled.append(log[-1])
            rates.append(float(captured.steps.state.opt.lr))
        replay(captured)

    monkeypatch.setattr(stand_in.Graph, "replay", looking)
    rarely = "--checkpoint.every_samples=9999"  # a thread that saves would be in the log, too
    assert train(tmp_path / "captured", shapes_dir, rarely) == 0
    said = capsys.readouterr().out
    assert "  steps   captured\n" in said and "  graphs  take 0.00 GB outside torch's allocator\n" in said
    assert json.loads((tmp_path / "captured" / "environment.json").read_text())["graph_bytes"] == 2, "of two graphs"
    assert filled[PROOF:] == ["fill"] * 5 and rates == pytest.approx([0, 0, 1e-5, 1e-3, 2e-3, 2e-3, 2e-3, 2e-3])
    assert log.count("replay train") == PROOF + 5 and log.count("replay validate") == 1 + 2
    assert log[log.index("reset") - 1 : log.index("stop")] == ["synchronize", "reset", "reset", "barrier"]
    require_equal_runs(tmp_path / "captured", eager)


def test_a_run_whose_step_breaks_waits_for_nothing_and_goes_on_from_its_checkpoint(
    eager, log, tmp_path, shapes_dir, capsys
):
    """A rank may be lost: the device would wait for it for ever. The graphs stay until the process ends."""
    log.broken_at = PROOF + 3
    assert train(tmp_path / "run", shapes_dir, "--checkpoint.every_samples=24") == 3
    assert capsys.readouterr().err.rstrip().endswith("RuntimeError: an error of the device")
    assert "reset" not in log and len(graphs.KEPT) == 1
    after = len(log) - log[::-1].index("replay train")
    assert "synchronize" not in log[after:]
    log.broken_at = None
    assert train(tmp_path / "run", shapes_dir) == 0
    assert log.count("replay train") == PROOF + 3 + PROOF + 3, "steps 0 to 2, then from step 2 on"
    require_equal_runs(tmp_path / "run", eager)


# Pictures between replays

PICTURES = ["--pictures.count=2", "--pictures.steps=2", "--pictures.guidance=2", "--pictures.every_samples=20"]
FP8 = ["--precision.preset=fp8", '--precision.switch=[[40, "fp8_delayed"]]', *FP8_RUN, "--train.micro_batch=16"]


@pytest.mark.parametrize("settings", [[], pytest.param(FP8, marks=pytest.mark.slow)])
def test_pictures_between_replays_are_those_of_an_eager_run_and_change_nothing(settings, log, tmp_path, shapes_dir):
    """Also with weights that stay gathered in FP8, and with delayed scales in a second stage.

    test_artist.py proves that the eager run does not notice its pictures.
    """
    runs = [tmp_path / mode for mode in ("on", "off")]
    for run in runs:
        assert train(run, shapes_dir, *settings, *PICTURES, f"--compute.cuda_graphs={run.name}") == 0
    assert log.count("replay train") == (3 + 3 * PROOF if settings else 5 + PROOF)
    sheets = [contents(run / "samples") for run in runs]
    assert sheets[0] == sheets[1] and len(sheets[1]) == 5
    require_equal_runs(*runs)


def test_where_graphs_leave_no_memory_for_pictures_a_line_says_so_and_training_goes_on(
    log, tmp_path, shapes_dir, monkeypatch, capsys
):
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda: 3 * 10**9)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * 10**9, 80 * 10**9))
    assert train(tmp_path / "run", shapes_dir, *PICTURES) == 0
    line = "samples         24  no pictures: a drawing takes about 3 GB beside the graphs, a rank has 2 GB; lower"
    assert line in capsys.readouterr().out
    drawn = sorted(contents(tmp_path / "run" / "samples"))
    assert drawn == ["000000060.png", "originals.png", "strip.png"], "those at the end have the graphs' memory"


# Phases


def test_each_way_of_scaling_has_a_step_of_its_own_that_its_steps_replay(log, make, monkeypatch):
    steps = make(fp8_config(precision__dynamic_steps=2))
    scaling, capture = [], Recorder.capture
    linear = next(module for module in steps.state.net.modules() if isinstance(module, PolicyLinear))
    monkeypatch.setattr(
        Recorder, "capture", lambda *args: (scaling.append(bool(linear.of_input.scales)), capture(*args))[1]
    )
    steps.capture()
    assert list(steps.graphs) == ["train 0", "train 2", "validate 0", "validate 2"]
    assert scaling == [False, True] * 2
    replayed = []
    for name in steps.graphs:
        steps.graphs[name] = SimpleNamespace(replay=lambda name=name: replayed.append(name))
    for _ in range(5):
        steps.train()
        steps.state.advance(1)
    assert replayed == ["train 0"] * 2 + ["train 2"] * 3
