"""Figures for TensorBoard, read back by TensorBoard."""

import json
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flux_ref import config, config_file
from flux_ref.watch import tensorboard


def test_all_figures_come_back(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(config_file.dump(config.Config()))
    step = {"step": 2, "samples": 24, "loss": 0.5, "lr": 1e-3}
    evaluation = {"samples": 36, "val_loss": 0.25, "val_loss_per_timestep": [0.125, 0.375]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n" + json.dumps(step | {"samples": 48}) + "\n")
    (tmp_path / "eval.jsonl").write_text(json.dumps(evaluation) + "\n")
    for _ in range(2):  # a second time replaces the first
        assert tensorboard.main([str(tmp_path)]) == 0
        assert "3 records" in capsys.readouterr().out
        found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        for tag, want in (
            ("train/loss", [(24, 0.5), (48, 0.5)]),
            ("validation/val_loss_per_timestep/1", [(36, 0.375)]),
        ):
            assert [(event.step, event.value) for event in found.Scalars(tag)] == want
        assert len(found.Tags()["scalars"]) == 6


def test_what_is_missing_is_said(tmp_path, capsys, monkeypatch):
    assert tensorboard.main([str(tmp_path)]) == 2 and "holds no run" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert tensorboard.main([str(tmp_path)]) == 2 and "pip install tensorboard" in capsys.readouterr().err
