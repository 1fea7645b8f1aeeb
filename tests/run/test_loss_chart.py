"""Axes of charts, and what stands in the chart of the losses."""

import numpy as np
from PIL import Image, ImageDraw

from flux_ref.run import loss_chart


def test_ticks_are_round_and_cover_the_axis():
    cases = {
        (0, 54_000, 8): "0 10,000 20,000 30,000 40,000 50,000",
        (0.23, 0.52, 8): "0.25 0.30 0.35 0.40 0.45 0.50",
        (0.5858, 0.61, 5): "0.590 0.595 0.600 0.605 0.610",
        (0, 8_247_827.5, 5): "0 2,000,000 4,000,000 6,000,000 8,000,000",
        (0, 36, 8): "0 5 10 15 20 25 30 35",
        (-1, 1, 4): "-1.0 -0.5 0.0 0.5 1.0",
    }
    found = {case: " ".join(loss_chart.ticks(*case).values()) for case in cases}
    assert found == cases


def test_the_first_losses_do_not_set_the_range():
    early = [(0, 2.0), (3000, 0.5), (6000, 0.25)]
    low, high = loss_chart.span([early, [(0, 9.0), (60, 0.4)]])
    assert 0.22 < low < 0.25 and 0.5 < high < 0.53
    assert loss_chart.span([early], target=0.1)[0] < 0.1 and loss_chart.span([early], target=0.7)[1] > 0.7
    assert loss_chart.span([[(0, 2.0)]]) == (1.92, 2.08)  # a single loss
    rising = [(0, 0.3), (50, 0.5), (60, 0.6)]  # the first losses are not always the highest
    low, high = loss_chart.span([rising])
    assert low < 0.3 and high > 0.6


def test_the_chart_names_what_is_there_and_holds_every_loss(tmp_path, monkeypatch):
    """The first loss is above the chart: an arrow on the upper edge and the loss mark it."""
    written, real = [], ImageDraw.ImageDraw.text

    def text(self, place, words, *args, **kwargs):
        written.append(words)
        return real(self, place, words, *args, **kwargs)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    curve, training, said = [(0, 2.0), (20, 0.5), (40, 0.3)], [(x, 0.6) for x in range(1, 40)], {}
    for name, lines in {"all": (training, curve, 0.2), "losses": ([], curve, 0.0)}.items():
        written.clear()
        loss_chart.chart(*lines, tmp_path / f"{name}.png")
        said[name] = [words for words in written if not words.split()[0].replace(".", "").isdigit()]
        assert {"0", "10", "20", "30", "40", "2"} <= {*written}
    axis = "training samples"
    assert said == {
        "all": [axis, "target 0.2", "training loss", "validation loss"],
        "losses": [axis, "validation loss"],
    }
    pixels = np.asarray(Image.open(tmp_path / "losses.png"))
    for x, y in ((loss_chart.LEFT, loss_chart.TOP), (loss_chart.RIGHT, 445)):
        around = pixels[y - 4 : y + 5, x - 4 : x + 5]
        assert (around == loss_chart.VAL).all(-1).sum() > 40, (x, y)
    loss_chart.chart([(0, 5.0), (3, 5.0), (20, 0.4), (40, 0.3)], curve, 0.0, tmp_path / "high.png")
    edge = np.asarray(Image.open(tmp_path / "high.png"))[loss_chart.TOP - 1 : loss_chart.TOP + 2, loss_chart.LEFT : 120]
    assert not (edge == loss_chart.TRAIN).all(-1).any()  # losses above the chart are no line along its edge
