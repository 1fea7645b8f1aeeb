"""The band of public runs, and the warning above it."""

from conftest import ROOT

from flux_ref import config_file, mlperf_closed

BATCHES = (512, 1024, 2048, 2304, 4096)


def benchmark(batch, **values):
    cfg = config_file.load(ROOT / "configs/schnell_gbs512.toml", [])
    return config_file.replace(cfg, train__global_batch=batch, **values)


def warned(cfg, curve):
    """The evaluations at which the run is warned of."""
    return [i for i in range(len(curve)) if mlperf_closed.convergence_warning(cfg, curve[: i + 1])]


def test_a_run_above_all_public_ones_is_warned_of():
    """From its second loss above the band in a row."""
    for batch in BATCHES:
        cfg, band = benchmark(batch), mlperf_closed.load_public_curve(batch)
        curve = [(point.samples, point.high) for point in band]
        assert warned(cfg, curve) == warned(cfg, [(point.samples, point.low) for point in band]) == []
        for i in (3, 8, 9, 10, 20, 21):
            curve[i] = curve[i][0], 1.011 * curve[i][1]
        assert warned(cfg, curve) == [9, 10, 21], "one loss alone is chance"
        text = mlperf_closed.convergence_warning(cfg, curve[:10])
        assert f"{curve[9][1]:.4f}" in text and f"at most {band[9].high:.4f}" in text and "\n" not in text


def test_where_there_is_no_band_nothing_is_judged():
    high = [(262_144, 9.0), (524_288, 9.0)]
    assert warned(benchmark(512), high) == [1]
    without = benchmark(500), benchmark(512, eval__warn_above_public_runs=False), benchmark(512, eval__target=0.5)
    for cfg in (*without, benchmark(512, model__single_blocks=2)):
        assert warned(cfg, high) == []
    assert warned(benchmark(512), [(1, 9.0), (2, 9.0)]) == []
    assert warned(benchmark(512), [(10**8, 9.0), (10**9, 9.0)]) == [1], "one that converges late"
