"""The page of a report in headless Chromium, as wide as a laptop: all of it can be seen."""

import re
import shutil
import subprocess

import made_logs
import pytest

from tools.report import __main__ as report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("chromium"), reason="needs chromium: apt-get install --no-install-recommends chromium"
    ),
]
CHROMIUM = "chromium --headless --no-sandbox --disable-gpu --window-size=1280,800 --user-data-dir=chromium --dump-dom"
# Writes what cannot be seen into the page's title.
PROBE = """<script>addEventListener("load", () => {
  const flaws = [], root = document.documentElement;
  if (root.scrollWidth > innerWidth) flaws.push("the page is too wide");
  if (getComputedStyle(document.body).color != "rgb(0, 0, 0)") flaws.push("the text is not dark");
  for (const e of document.querySelectorAll("h1, p, table, pre, svg, svg text")) {
    const box = e.getBoundingClientRect(), around = (e.closest("svg") || root).getBoundingClientRect();
    if (box.width < 1 || box.height < 9) flaws.push(e.localName + " is too small");
    if (box.left < around.left - 1 || box.right > around.right + 1) flaws.push(e.localName + " is cut off");
  }
  document.title = `${document.querySelectorAll("svg").length} svg; ${flaws}`;
})</script>"""
CASES = [  # what is replaced in the page, by what, and what is then found; the first leaves the page as it is
    ("", "", "1 svg; "),
    ("overflow-wrap:anywhere", "white-space:pre", "1 svg; the page is too wide"),
    ("<svg ", "<svg style='width:90px;min-width:0' ", "1 svg; .*text is too small"),
    ("sans-serif", "sans-serif;color:white", "1 svg; the text is not dark"),
]


def test_page_is_seen(tmp_path):
    """One system has a long name and a long value."""
    long = made_logs.system(tmp_path / "results" / "_".join(["a_long_name"] * 8), 2, submission_platform="v" * 200)
    made_logs.system(long.with_name("short"), 1, rate=1500.0)
    report.main([str(long.parent), f"--out={tmp_path}"])
    path = tmp_path / "report.html"
    page = path.read_text()
    for old, new, title in CASES:
        path.write_text(page.replace(old, new, 1) + PROBE)
        seen = subprocess.run(
            [*CHROMIUM.split(), path.as_uri()], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert re.search(f"<title>{title}", seen.stdout), (
            title,
            re.findall("<title>.*", seen.stdout),
            seen.stderr[-500:],
        )
