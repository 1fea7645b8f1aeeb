"""The page of a report in headless Chromium: light and dark, as wide as a laptop and as a phone.

Chromium is driven by the messages of its DevTools over a pipe, so that no package is needed. pytest's temporary folder
keeps a picture of each view.
"""

import base64
import json
import re
import shutil
from subprocess import PIPE, Popen

import made_logs
import numpy as np
import pytest
from matplotlib.image import imread

from tools.report import commands as report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not shutil.which("chromium"), reason="needs chromium: apt-get install --no-install-recommends chromium"
    ),
]
CHROMIUM = """exec chromium --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync \
--disable-background-networking --disable-component-update --remote-debugging-pipe --user-data-dir="$PWD/chromium" \
3<&0 4>&1 >&2"""
REPORTED = "Network.requestWillBeSent", "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
EVALUATIONS = """{"samples": 1e6, "val_loss_per_timestep": [0.90, 0.81, 0.72, 0.64, 0.55, 0.53, 0.61, 0.79]}
{"samples": 2e6, "val_loss_per_timestep": [0.80, 0.71, 0.62, 0.54, 0.45, 0.43, 0.51, 0.69]}"""
# Run in the page. Returns the page's flaws, and the boxes in which a picture of the page must have something to read.
MEASURE = """(async () => {
  if (document.readyState != "complete") await new Promise(done => addEventListener("load", done))
  const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom].map(Math.round) }
  const inside = ([l, t, r, b], [left, top, right, bottom]) => l >= left && t >= top && r <= right && b <= bottom
  const width = document.documentElement.scrollWidth, flaws = [], boxes = []
  const titles = [...document.querySelectorAll("figure:has(svg) h3")].map(e => e.textContent.split(":")[0])
  const charts = ["Validation loss at global batch 1,024", "Validation loss per timestep", "Time to train",
    "Samples to the target"].join()
  if (titles != charts) flaws.push(`the charts are ${titles}`)
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches, ink = getComputedStyle(document.body).color
  if (ink != (isDark ? "rgb(255, 255, 255)" : "rgb(0, 0, 0)")) flaws.push(`the page is ${isDark ? "not" : "too"} dark`)
  if (width > WIDTH) flaws.push(`the page is ${width} pixels wide`)
  for (const e of document.querySelectorAll("h1, h2, h3, p, table, figcaption, pre, svg, svg text")) {
    const isText = e.localName == "text", own = box(e), scrolled = e.closest("div") || e, outer = box(scrolled)
    const what = `${e.localName} ${isText ? e.textContent : ""} at ${own}`
    const cut = isText ? !inside(own, box(e.closest("svg")))
      : !inside(own, outer) && getComputedStyle(scrolled).overflowX != "auto"
    if (own[0] >= own[2] || own[1] >= own[3]) flaws.push(`${what} has no size`)
    else if (isText && own[3] - own[1] < 9) flaws.push(`${what} is too small`)
    else if (cut) flaws.push(`${what} is cut off`)
    else if (outer[0] < 0 || outer[2] > WIDTH) flaws.push(`${what} lies outside the page`)
    else if (inside(own, outer)) boxes.push([what, ...own])
    else if (!isText) boxes.push([what, ...outer])
  }
  return [flaws, boxes]
})()"""
# What is replaced in the page, by what, and the flaws that must then be found. The last row leaves the page as it is.
CASES = [
    ("(?s)<figure>.*?</figure>", "", "the charts are Validation loss per timestep,Time"),
    ("<h2>", "<img src='http://127.0.0.1:9/'><h2>", "requestWillBeSent.*http://127.0.0.1:9/.*\n.*entryAdded"),
    ('(?s)<meta name="viewport".*?>', "", "the page is 980 pixels wide"),
    ("overflow-x:auto", "", "table .* is cut off"),
    ("min-width:600px", "", "text .* is too small"),
    ("color-scheme:light dark", "", "the page is not dark"),
    ("fill: #ffffff", "fill: none", "text .* cannot be read"),
    ("", "", "^$"),
]


@pytest.fixture
def ask(tmp_path):
    """ask(method, parameters...): what a tab of Chromium answers. ask.events: what it reported."""

    def read():
        rest = b""
        while part := process.stdout.read(1 << 16):
            *whole, rest = (rest + part).split(b"\0")
            yield from map(json.loads, whole)

    def ask(method, **params):
        process.stdin.write(json.dumps({"id": 1, "method": method, "params": params} | tab).encode() + b"\0")
        while "id" not in (message := next(messages)):
            ask.events.append(message)
        return message["result"]

    with Popen(CHROMIUM, shell=True, cwd=tmp_path, bufsize=0, stdin=PIPE, stdout=PIPE) as process:
        messages, tab, ask.events = read(), {}, []
        target = ask("Target.createTarget", url="about:blank")
        tab = ask("Target.attachToTarget", flatten=True, **target)
        for domain in ("Network", "Runtime", "Log"):
            ask(f"{domain}.enable")
        yield ask
        process.kill()


def flaws(ask, page, width, scheme):
    """What is wrong with a page in one view, a line for each flaw."""
    ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 1000)
    ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    ask.events = []
    ask("Page.navigate", url=page.as_uri())
    lines, boxes = ask(
        "Runtime.evaluate", expression=MEASURE.replace("WIDTH", str(width)), awaitPromise=True, returnByValue=True
    )["result"]["value"]
    picture = page.with_name(f"{scheme}_{width}.png")
    picture.write_bytes(base64.b64decode(ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
    light = imread(picture)[..., 1]  # its green, from 0 to 1
    lines += [f"{what} cannot be read" for what, x, y, end, low in boxes if np.ptp(light[y:low, x:end]) < 0.6]
    # The first request is for the page.
    return lines + [str(event) for event in ask.events if event["method"] in REPORTED][1:]


def test_page_is_seen(ask, tmp_path):
    """One system has a long name, a long value, and losses per timestep."""
    long = tmp_path / "results" / "a_long_name_a_long_name_a_long_name_a_long_name_a_long_name_a_long_name_a_long_name"
    made_logs.system(long, 2, submission_platform="a_long_value_a_long_value_a_long_value_a_long_value_a_long_value")
    made_logs.system(long.with_name("short"), 1)
    (long / "eval.jsonl").write_text(EVALUATIONS)
    report.main([str(long.parent), f"--out={tmp_path}"])
    page = tmp_path / "report.html"
    text = page.read_text()
    wrong = []
    for old, new, flaw in CASES:
        page.write_text(re.sub(old, new, text, count=1))
        found = []
        for width in (1280, 390):
            found += flaws(ask, page, width, "light") + flaws(ask, page, width, "dark")
        if not re.search(flaw, "\n".join(found)):
            wrong.append((flaw, found))
    assert not wrong, wrong
