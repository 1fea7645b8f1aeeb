"""A drawing of lines, areas, dots and text, written as SVG for a page and as PNG for everything else.

Colours are names: a page resolves them by its style, light or dark; a PNG is light. Lengths are SVG's pixels, y down.
"""

import html
import itertools
from dataclasses import dataclass, field
from pathlib import Path

# name: (light, dark). 0 to 7 tell systems apart.
COLOURS = {
    "paper": ("#ffffff", "#16181d"),
    "ink": ("#1b1f27", "#e8eaee"),
    "soft": ("#667080", "#98a1b0"),
    "grid": ("#e4e7ec", "#2b303a"),
    "band": ("#8a94a6", "#7c8698"),
    "good": ("#1a7f4b", "#46c585"),
    "bad": ("#c0362c", "#ff7b6e"),
    "0": ("#2563c9", "#6ea8ff"),
    "1": ("#d9720b", "#ffa94d"),
    "2": ("#1f8a5b", "#4ecb92"),
    "3": ("#a23bb5", "#d98bea"),
    "4": ("#c2334d", "#ff8095"),
    "5": ("#0c8599", "#4dd0e1"),
    "6": ("#7a5c1e", "#d8b45a"),
    "7": ("#5b5fc7", "#a5a8ff"),
}
SERIES = 8
SCALE, SMOOTH = 2, 2  # of a PNG: pixels per unit, and how much finer it is drawn first
FONT = 13


@dataclass
class Drawing:
    """What is drawn later lies above. tip: what a pointer shows."""

    width: float
    height: float
    title: str
    caption: str = ""  # for a page to put below it
    marks: list[tuple] = field(default_factory=list)

    def line(self, points: list[tuple[float, float]], colour: str, width: float = 1.5, dashed: bool = False) -> None:
        if len(points) > 1:
            self.marks.append(("line", points, colour, width, dashed))

    def area(self, points: list[tuple[float, float]], colour: str, opacity: float = 1.0, tip: str = "") -> None:
        self.marks.append(("area", points, colour, opacity, tip))

    def box(self, x: float, y: float, width: float, height: float, colour: str, tip: str = "", opacity=1.0) -> None:
        self.area([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], colour, opacity, tip)

    def dot(self, x: float, y: float, colour: str, radius: float = 4, hollow: bool = False, tip: str = "") -> None:
        self.marks.append(("dot", x, y, colour, radius, hollow, tip))

    def text(self, x: float, y: float, text: str, colour: str = "soft", anchor: str = "start", bold=False) -> None:
        """anchor: start, middle or end of the text at x; y is its middle."""
        self.marks.append(("text", x, y, text, colour, anchor, bold))


def style() -> str:
    """The style sheet that the colours of SVGs need: custom properties, light, and dark where that is preferred."""
    light = "".join(f"--c-{name}:{pair[0]};" for name, pair in COLOURS.items())
    dark = "".join(f"--c-{name}:{pair[1]};" for name, pair in COLOURS.items())
    return f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def svg(drawing: Drawing) -> str:
    """One svg element; every text in it is escaped."""
    parts = [_SVG[mark[0]](*mark[1:]) for mark in drawing.marks]
    return (
        f'<svg viewBox="0 0 {drawing.width:g} {drawing.height:g}" role="img" aria-label="{html.escape(drawing.title)}"'
        f' font-size="{FONT}">{"".join(parts)}</svg>'
    )


def _places(points: list[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _tip(text: str) -> str:
    return f"<title>{html.escape(text)}</title>" if text else ""


def _svg_line(points, colour, width, dashed) -> str:
    dash = ' stroke-dasharray="6 5"' if dashed else ""
    return (
        f'<polyline points="{_places(points)}" fill="none" stroke="var(--c-{colour})" stroke-width="{width:g}"'
        f' stroke-linejoin="round"{dash}/>'
    )


def _svg_area(points, colour, opacity, tip) -> str:
    return f'<polygon points="{_places(points)}" fill="var(--c-{colour})" opacity="{opacity:g}">{_tip(tip)}</polygon>'


def _svg_dot(x, y, colour, radius, hollow, tip) -> str:
    fill = "paper" if hollow else colour
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="var(--c-{fill})" stroke="var(--c-{colour})"'
        f' stroke-width="1.5">{_tip(tip)}</circle>'
    )


def _svg_text(x, y, text, colour, anchor, bold) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" dy=".35em" text-anchor="{anchor}" fill="var(--c-{colour})"{weight}>'
        f"{html.escape(text)}</text>"
    )


_SVG = {"line": _svg_line, "area": _svg_area, "dot": _svg_dot, "text": _svg_text}


def png(drawing: Drawing, path: Path) -> None:
    """Write the same as a PNG, its title at the top, with Pillow."""
    from PIL import Image, ImageDraw, ImageFont  # comes with torchvision; a report in numbers does without

    head, scale = 34, SCALE * SMOOTH
    size = (round(drawing.width * scale), round((drawing.height + head) * scale))
    image = Image.new("RGB", size, COLOURS["paper"][0])
    pen = ImageDraw.Draw(image, "RGBA")
    plain = ImageFont.load_default(size=FONT * scale)

    def at(x: float, y: float) -> tuple[float, float]:
        return x * scale, (y + head) * scale

    def write(x, y, text, colour, anchor, bold) -> None:
        anchor = {"start": "lm", "middle": "mm", "end": "rm"}[anchor]
        pen.text(at(x, y), text, fill=_light(colour), font=plain, anchor=anchor, stroke_width=scale // 4 if bold else 0)

    write(12, 18 - head, drawing.title, "ink", "start", True)
    for kind, *values in drawing.marks:
        if kind == "line":
            points, colour, width, dashed = values
            for piece in _dashes(points) if dashed else [points]:
                pen.line([at(*point) for point in piece], _light(colour), round(width * scale), joint="curve")
        elif kind == "area":
            points, colour, opacity, _ = values
            pen.polygon([at(*point) for point in points], _light(colour, opacity))
        elif kind == "dot":
            x, y, colour, radius, hollow, _ = values
            box = [value for corner in (at(x - radius, y - radius), at(x + radius, y + radius)) for value in corner]
            pen.ellipse(box, _light("paper" if hollow else colour), _light(colour), round(1.5 * scale))
        else:
            write(*values)
    image = image.resize((size[0] // SMOOTH, size[1] // SMOOTH), Image.Resampling.LANCZOS)
    partial = path.with_name(f".{path.name}")
    image.save(partial, format="PNG", optimize=True)
    partial.replace(path)


def _light(colour: str, opacity: float = 1.0) -> tuple[int, ...]:
    code = COLOURS[colour][0]
    return (*(int(code[i : i + 2], 16) for i in (1, 3, 5)), round(255 * opacity))


def _dashes(points: list[tuple[float, float]], on: float = 6, off: float = 5):
    """Pieces of a polyline, drawn and left out by turns; each piece within one of its segments."""
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        length = max(1e-9, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
        done = 0.0
        while done < length:
            a, b = done / length, min(1.0, (done + on) / length)
            yield [(x0 + (x1 - x0) * a, y0 + (y1 - y0) * a), (x0 + (x1 - x0) * b, y0 + (y1 - y0) * b)]
            done += on + off
