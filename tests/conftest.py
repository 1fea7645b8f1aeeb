"""What the tests share: a micro model, a data set for it, and ways to start train.py and eval.py."""

import atexit
import contextlib
import fcntl
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch

from flux_ref import checkpoint, cli, config_file, ranks, toy
from flux_ref.checkpoint import Checkpoint
from flux_ref.cli import Refusal
from flux_ref.dataloader import TrainSet, ValSet

# A job in the background begins with Ctrl-C ignored, and all that the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
# Several threads may round a sum otherwise than the one thread of a rank under torchrun.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

if "PYTEST_XDIST_WORKER" not in os.environ:  # workers share the compiled code of a session
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="flux_ref_tests_")
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

pytest_plugins = ["gpu_marks"]
ROOT = Path(__file__).parent.parent
MICRO = ROOT / "tests" / "micro.toml"
HELPERS = ROOT / "tests" / "helpers"
PYTHONPATH = os.pathsep.join(
    [str(ROOT), str(HELPERS.parent), str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name, fill): a folder that `fill` fills once for all worker processes of pytest. Tests must not change it.

    `fill` is given the folder's path and makes the folder.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder(name, fill):
        path, filled = base / name, base / f"{name}.filled"
        with (base / f"{name}.lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            if not filled.exists():
                shutil.rmtree(path, ignore_errors=True)  # another worker has failed
                fill(path)
                filled.touch()
        return path

    return folder


@pytest.fixture(scope="session")
def shapes_dir(shared):
    """A folder of train/, val/ and empty_encodings/ for the micro model."""
    cfg = config_file.load(MICRO)
    return shared("shapes", lambda path: toy.make_shapes(path, cfg))


@pytest.fixture(scope="session")
def measured(shared, shapes_dir):
    """measured[ranks]: what rank_runs.py measures on so many ranks."""
    import rank_runs

    return rank_runs.Measured(shapes_dir, shared)


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """A small FLUX.1-schnell for the micro model; tests must not change it. Meanwhile an autoencoder is as small."""
    import small_encoders

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(small_encoders.encoders.VAE, "block_out_channels", small_encoders.CHANNELS)
        yield small_encoders.save_repository(tmp_path_factory.mktemp("nets"))


def data_overrides(folder):
    """Command-line overrides that point a config at a data set."""
    return [f"--data.train={folder}/train", f"--data.val={folder}/val"]


def micro_config(data=None, **values):
    """The micro config, pointing at a data set, with values such as model__hidden=12."""
    return config_file.replace(config_file.load(MICRO, data_overrides(data) if data else []), **values)


@pytest.fixture(scope="session")
def micro(shapes_dir):
    """The micro config, pointing at its data set."""
    return micro_config(shapes_dir)


def open_sets(cfg, world):
    """Both data sets of a config."""
    sets = TrainSet(cfg, world.rank, world.size, world.pin), ValSet(cfg, world.rank, world.size, world.pin)
    for data_set in sets:
        data_set.open()
    return sets


def script(name, *args, ranks=1, cwd=ROOT, timeout=120, **env):
    """Run train.py or eval.py with torchrun (ranks=0: plain python), or a program of tests/ by fork_ranks.py.

    Returns the finished process. With torchrun the exit code is torchrun's own; `rank_exit_code` finds the script's.
    """
    launcher = [sys.executable]
    if ranks and name.startswith("tests/") and not torch.accelerator.is_available():  # no fork shares a GPU
        launcher += [str(HELPERS / "fork_ranks.py"), str(ranks)]
    elif ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launcher, str(ROOT / name), *map(str, args)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:  # also when the test's own time is up
        process.terminate()  # torchrun then ends its ranks, which a kill would leave behind
        process.communicate(timeout=30)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def trained(run, prefix="model."):
    """The tensors of a run's newest checkpoint, by name."""
    saved = Checkpoint(checkpoint.list_checkpoints(run)[-1])
    return {key.removeprefix(prefix): saved.read(key) for key in saved.shapes if key.startswith(prefix)}


def require_identical(found, want):
    """The same names with the same bits."""
    assert found.keys() == want.keys()
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


def refusal(call, *args, kind=Refusal):
    """The one line with which a call is refused."""
    with pytest.raises(kind) as caught:
        call(*args)
    assert "\n" not in str(caught.value), caught.value
    return str(caught.value)


def rank_exit_code(process):
    """The exit code of the first rank that failed, from torchrun's summary."""
    summary = process.stderr.rpartition("Root Cause")[2]
    return int(re.search(r"exitcode\s*:\s*(-?\d+)", summary).group(1))


def micro_run(data, run, *overrides):
    """The arguments of train.py for a run of the micro model."""
    return [str(MICRO), *data_overrides(data), f"--run.dir={run}", *map(str, overrides)]


@contextlib.contextmanager
def own_settings():
    """What a process sets for itself, such as the folder of its compiler, ends with this block."""
    with mock.patch.dict(os.environ), mock.patch.object(tempfile, "tempdir", tempfile.tempdir):
        yield
    torch.compiler.set_stance("default")


def called(name, *argv):
    """The exit code of train.py or eval.py, run inside this process to save the start of torch."""
    main = importlib.import_module(name.removesuffix(".py")).main
    with own_settings():
        code = cli.run(name, main, [str(arg) for arg in argv])
    ranks.stop()  # a refusal leaves the group to the end of the process
    return code


def the_line(stderr, name="train.py"):
    """The one line that says what is wrong; a progress bar may stand before it."""
    complaints = re.findall(rf"{re.escape(name)}: ([^\r\n]*)", stderr)
    assert len(complaints) == 1, stderr
    assert not re.search(r'File ".*(flux_ref/|train\.py|eval\.py)', stderr), stderr
    return complaints[0]


@pytest.fixture
def attempt(capsys):
    """attempt(*argv, name="train.py") runs a script here, on one rank; returns (exit code, stdout, its complaint)."""

    def run(*argv, name="train.py"):
        capsys.readouterr()
        code = called(name, *argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in err, err
        return code, out, the_line(err, name) if code else ""

    return run
