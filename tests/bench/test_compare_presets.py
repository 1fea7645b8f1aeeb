"""The table of bench.compare_presets: its cells from planted figures, and a real one that is begun again."""

import json

import pytest
from conftest import MICRO, data_overrides, refusal
from in_process import InProcess

from bench import compare_presets
from flux_ref.compare import commands
from flux_ref.speed.policy import PRESETS


def test_every_preset_has_a_config_that_differs_in_the_preset_alone(tmp_path):
    """And the sizes of --max-samples, and the data set of 16 text tokens beside the runs."""
    args, overrides = compare_presets.parse([f"--out={tmp_path}", "--max-samples=301", "--optim.lr=1e-3"])
    found = compare_presets.configs(args, overrides)
    assert list(found) == list(PRESETS) and next(iter(found)) == "bf16"
    assert [cfg.precision.preset for cfg in found.values()] == list(PRESETS)
    assert len({repr(cfg).replace(f"preset='{name}'", "") for name, cfg in found.items()}) == 1
    cfg = found["bf16"]
    assert (cfg.train.max_samples, cfg.eval.every_samples, cfg.model.text_tokens, cfg.optim.lr) == (301, 61, 16, 1e-3)
    assert (cfg.data.train, cfg.data.val) == (f"{tmp_path}/data/train", f"{tmp_path}/data/val")


def test_cells_are_the_figures_and_the_verdicts():
    points = [10, 20]

    def cells(last: list[float]) -> list[str]:
        losses = {10: commands.paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.5]), 20: commands.paired([1.0, 2.0, 3.0], last)}
        found = {
            "validation": losses,
            "training": {20: losses[10]},
            "samples/s": {"median": commands.paired([10.0] * 3, [5.0] * 3)},
        }
        assert compare_presets.row("A", found, points, "a")[:5] == ["A", "2.0000", "0", "0", "0"]
        return compare_presets.row("B", found, points, "b")

    assert cells([1.1, 2.1, 3.11]) == [
        "B",
        "2.1033",
        "+0.5 +- 0",
        "+0.103 +- 0.0033",
        "+0.5 +- 0",
        "0.500",
        "worse, p = 0.001",
    ]
    assert cells([0.9, 1.9, 2.89])[3:] == ["-0.103 +- 0.0033", "+0.5 +- 0", "0.500", "better, p = 0.001"]
    assert cells([1.1, 1.9, 3.11])[6] == "not distinguishable; about 84 seeds would show it"
    assert cells([1.0, 2.0, 3.0])[6] == "not distinguishable"


def test_values_that_make_no_table_are_refused():
    for values in ("bf16", "bf16,bf16", "bf16,a/b", "bf16,"):
        assert "values" in refusal(compare_presets.parse, [f"--values={values}"])


@pytest.mark.slow  # runs of a second each
def test_a_table_names_what_diverged_and_goes_on_where_it_stopped(
    monkeypatch, one_thread, shapes_dir, tmp_path, capsys
):
    monkeypatch.setattr(commands, "Popen", InProcess)
    monkeypatch.setattr(InProcess, "started", ())
    monkeypatch.setattr(compare_presets, "BASE", ())
    argv = [
        f"--config={MICRO}",
        f"--out={tmp_path}",
        "--key=optim.lr",
        "--seeds=2",
        "--max-samples=60",
        "--run.hang_s=0",
    ]
    argv += data_overrides(shapes_dir)
    assert compare_presets.main([*argv, "--values=2e-3,1e6"]) == 0
    assert InProcess.started == ("2e-3_0", "2e-3_1", "1e6_0")
    assert compare_presets.main([*argv, "--values=2e-3,1e-5"]) == 0
    assert InProcess.started[3:] == ("1e-5_0", "1e-5_1")
    capsys.readouterr()
    assert compare_presets.main([*argv, "--values=2e-3,1e-5,1e6"]) == 0
    assert InProcess.started[5:] == ("1e6_0",)
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert capsys.readouterr().out.endswith("\n".join(lines) + "\n") and len(lines) == 5
    assert lines[0].startswith(
        "| optim.lr | validation loss | less 2e-3 after 12 | less 2e-3 after 36 | less 2e-3 after 60"
    )
    assert lines[3].startswith("| 1e-5 | ") and "| +0." in lines[3]
    diverged = lines[4].split(" | ")
    assert len(diverged) == len(lines[0].split(" | ")) and diverged[0] == "| 1e6" and set(diverged[1:-1]) == {"-"}
    assert diverged[-1].startswith("run ") and "not finite" in diverged[-1]
    assert list(json.loads((tmp_path / "table.json").read_text())["found"]) == ["1e-5"]
