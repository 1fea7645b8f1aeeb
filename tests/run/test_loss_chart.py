"""The range of charts, and what stands in the chart of the losses."""

import numpy as np
from PIL import Image, ImageColor

from flux_ref import loss_chart


def test_the_first_losses_do_not_set_the_range():
    early = [(0, 2.0), (3000, 0.5), (6000, 0.25)]
    low, high = loss_chart.span([early, [(0, 9.0), (60, 0.4)]])
    assert 0.22 < low < 0.25 and 0.5 < high < 0.53
    assert loss_chart.span([early], target=0.1)[0] < 0.1 and loss_chart.span([early], target=0.7)[1] > 0.7
    assert loss_chart.span([[(0, 2.0)]]) == (1.0, 3.0)  # a single loss


def test_each_loss_lies_at_its_place(tmp_path):
    val = [(0, 2.0), (20, 0.5), (40, 0.3)]
    loss_chart.chart([], [], 0.0, tmp_path / "losses.png")  # of a run without a record
    loss_chart.chart([(x, 0.4) for x in range(1, 40)], val, 0.35, tmp_path / "losses.png")
    pixels = np.asarray(Image.open(tmp_path / "losses.png"))
    low, high = loss_chart.span([val], 0.35)
    for samples, loss, colour in (
        *((20, 0.5, loss_chart.VAL), (40, 0.3, loss_chart.VAL)),
        *((10, 0.4, loss_chart.TRAIN), (10, 0.35, loss_chart.GOAL)),
    ):
        x = round(loss_chart.LEFT + samples / 40 * (loss_chart.RIGHT - loss_chart.LEFT))
        y = round(loss_chart.BOTTOM - (loss - low) / (high - low) * (loss_chart.BOTTOM - loss_chart.TOP))
        around = pixels[y - 2 : y + 3, x - 2 : x + 3]
        assert (around == ImageColor.getrgb(colour)).all(-1).any(), (samples, loss)
