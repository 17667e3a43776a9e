"""Draws docs/pictures/dashboard-*.svg: the chart's dashboards, from a Prometheus server's answers to their queries.

    python benchmarks/dashboard_pictures.py http://HOST:PORT NAMESPACE JOB [--sweep JOB] [--end TIME] [--minutes N]

Works without Grafana: places the panels of a dashboard as Grafana does and draws them as plain lines, figures and rows,
with marks for the dashboard's events. A panel whose queries return nothing says "no data".
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "charts"))

import dashboards  # noqa: E402
import grafana  # noqa: E402
from spillway.units import format_bytes, format_count, format_seconds  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
CELL, LINE, TOP = 50, 30, 34
"""pixels per column and per row of Grafana's grid, and height of the title above it"""
SAMPLES = 120
WINDOW = "20s"
"""over which rates are taken: ten scrapes of the test bed's Prometheus"""
LEGEND_LINES = 4
COLOURS = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#6cc5b0", "#97bbf5", "#9c6b4e")
MARKS = {"green": "#3ca951", "red": "#d62728", "orange": "#e08214", "purple": "#7b3294"}
FORMATS: dict[str, Callable[[float], str]] = {
    "bytes": format_bytes,
    "Bps": lambda value: format_bytes(value) + "/s",
    "s": lambda value: format_seconds(value) if value > 0 else "0 s",
    "percentunit": lambda value: f"{value:.1%}",
    "short": lambda value: format_count(value) if value >= 1000 else f"{value:.4g}",
}


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    labels: dict[str, str]
    samples: list[tuple[float, float]]
    """Unix time, value"""


@dataclass(frozen=True, slots=True)
class Shown:
    """A Prometheus and the time that a dashboard shows."""

    url: str
    start: float
    end: float

    def ask(self, expression: str, legend: str, *, at_the_end: bool = False) -> list[Curve]:
        step = (self.end - self.start) / SAMPLES
        start = self.end if at_the_end else self.start
        asked = urlencode({"query": expression, "start": start, "end": self.end, "step": f"{step:.3f}"})
        with urlopen(f"{self.url}/api/v1/query_range?{asked}") as answer:
            found = json.load(answer)["data"]["result"]
        curves = []
        for series in found:
            labels = series["metric"]
            name = re.sub(r"{{(\w+)}}", lambda label, of=labels: of.get(label[1], ""), legend)
            named = ", ".join(labels.values()) if legend == "__auto" else name
            samples = [(at, float(value)) for at, value in series["values"] if math.isfinite(float(value))]
            curves.append(Curve(named, labels, samples))
        return [curve for curve in curves if curve.samples]


def text(x: float, y: float, words: str, size: int = 11, anchor: str = "start", colour: str = "#333") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">'
        f"{escape(words)}</text>"
    )


def panel(model: dict[str, Any], shown: Shown, marks: list[tuple[float, str]], chosen: grafana.Chosen) -> list[str]:
    place = model["gridPos"]
    left, top = place["x"] * CELL + 3, TOP + place["y"] * LINE + 3
    width, height = place["w"] * CELL - 6, place["h"] * LINE - 6
    if model["type"] == "row":
        return [text(left + 4, top + 17, model["title"], 13)]
    curves = [
        curve
        for target in model["targets"]
        for curve in shown.ask(chosen.filled(target["expr"]), target["legendFormat"], at_the_end=target["instant"])
    ]
    parts = [
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="3" fill="#fff" stroke="#ddd"/>',
        text(left + 8, top + 17, model["title"], 12),
    ]
    defaults = model["fieldConfig"]["defaults"]
    limit = next((step for step in defaults["thresholds"]["steps"] if step["value"] is not None), None)
    inside = (left + 8, top + 24, width - 16, height - 32)
    if not curves:
        parts.append(text(left + width / 2, top + height / 2 + 8, "no data", 12, "middle", "#999"))
    elif model["type"] == "stat":
        parts += _stat(curves, inside, FORMATS[defaults["unit"]], limit, model["options"]["textMode"] == "name")
    elif model["type"] == "table":
        parts += _table(curves, inside, FORMATS[defaults["unit"]])
    else:
        stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        parts += _graph(_stacked(curves) if stacked else curves, inside, FORMATS[defaults["unit"]], limit, shown, marks)
    return parts


def _stat(
    curves: list[Curve],
    place: tuple[int, int, int, int],
    form: Callable[[float], str],
    limit: dict[str, Any] | None,
    by_name: bool,
) -> list[str]:
    left, top, width, height = place
    parts, each = [], width / len(curves)
    for index, curve in enumerate(curves):
        value = curve.samples[-1][1]
        words = curve.name if by_name else form(value)
        bad = limit is not None and (value >= limit["value"]) is (limit["color"] == "red")
        middle, size = left + each * (index + 0.5), min(26, int(1.6 * each / max(4, len(words))))
        parts.append(text(middle, top + height / 2 + 12, words, size, "middle", "#d62728" if bad else "#2a7d38"))
        if len(curves) > 1 and not by_name:
            parts.append(text(middle, top + height / 2 + 28, curve.name, 10, "middle", "#777"))
    return parts


def _table(curves: list[Curve], place: tuple[int, int, int, int], form: Callable[[float], str]) -> list[str]:
    left, top, width, height = place
    heads = [*curves[0].labels, "Value"]
    longest_first = sorted(curves, key=lambda curve: -curve.samples[-1][1])
    rows = [[*curve.labels.values(), form(curve.samples[-1][1])] for curve in longest_first]
    parts = []
    for number, row in enumerate([heads, *rows][: height // 18]):
        for column, words in enumerate(row):
            colour = "#333" if number else "#777"
            parts.append(text(left + width * column / len(heads), top + 14 + 18 * number, words, 11, colour=colour))
    return parts


def _stacked(curves: list[Curve]) -> list[Curve]:
    below: dict[float, float] = {}
    made = []
    for curve in curves:
        below |= {at: below.get(at, 0.0) + value for at, value in curve.samples}
        made.append(Curve(curve.name, curve.labels, [(at, below[at]) for at, _ in curve.samples]))
    return made


def _graph(
    curves: list[Curve],
    place: tuple[int, int, int, int],
    form: Callable[[float], str],
    limit: dict[str, Any] | None,
    shown: Shown,
    marks: list[tuple[float, str]],
) -> list[str]:
    left, top, width, height = place
    legend = 14 * min(len(curves), LEGEND_LINES)
    values = [value for curve in curves for _, value in curve.samples]
    lowest, highest = min(0.0, *values), max(values) * 1.05 or 1.0
    bottom, wide, tall = top + height - legend - 4, width - 62, height - legend - 10

    def at(moment: float, value: float) -> str:
        x = left + 58 + (moment - shown.start) / (shown.end - shown.start) * wide
        return f"{x:.1f},{bottom - (value - lowest) / (highest - lowest) * tall:.1f}"

    parts = []
    for share in (0.0, 0.5, 1.0):
        value, y = lowest + share * (highest - lowest), bottom - share * tall
        parts.append(f'<path d="M{left + 58} {y:.1f}h{wide}" stroke="#eee"/>')
        parts.append(text(left + 52, y + 4, form(value), 9, "end", "#777"))
    if limit is not None and lowest <= limit["value"] <= highest:
        y = float(at(shown.start, limit["value"]).split(",")[1])
        parts.append(f'<path d="M{left + 58} {y:.1f}h{wide}" stroke="#d62728" stroke-dasharray="5 3"/>')
    for moment, colour in marks:
        x = at(moment, lowest).split(",")[0]
        parts.append(f'<path d="M{x} {bottom}v-{tall}" stroke="{MARKS[colour]}" stroke-dasharray="2 2" opacity="0.7"/>')
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        points = " ".join(at(*sample) for sample in curve.samples)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if index < LEGEND_LINES:
            more = f" (and {len(curves) - LEGEND_LINES} more)" if index == LEGEND_LINES - 1 < len(curves) - 1 else ""
            y = bottom + 14 * (index + 1)
            parts.append(f'<path d="M{left + 58} {y - 4}h12" stroke="{colour}" stroke-width="3"/>')
            parts.append(text(left + 75, y, curve.name + more, 10))
    return parts


def _marks(model: dict[str, Any], shown: Shown, chosen: grafana.Chosen) -> list[tuple[float, str]]:
    """Returns the time and colour of each event; consecutive samples are one event."""
    found: list[tuple[float, str]] = []
    for annotation in model["annotations"]["list"]:
        for curve in shown.ask(chosen.filled(annotation["expr"]), ""):
            if annotation["useValueForTime"]:
                times = sorted({value / 1000 for _, value in curve.samples})
            else:
                step = (shown.end - shown.start) / SAMPLES
                moments = [moment for moment, _ in curve.samples]
                times = [m for before, m in zip([0.0, *moments], moments, strict=False) if m - before > 1.5 * step]
            found += [(moment, annotation["iconColor"]) for moment in times if shown.start <= moment <= shown.end]
    return found


def picture(model: dict[str, Any], shown: Shown, namespace: str, job: str) -> str:
    chosen = grafana.Chosen(namespace, job, ".*", WINDOW, f"{shown.end - shown.start:.0f}s")
    width = grafana.COLUMNS * CELL
    height = TOP + LINE * max(one["gridPos"]["y"] + one["gridPos"]["h"] for one in model["panels"])
    marks = _marks(model, shown, chosen)
    whose = f"{namespace} / {job}" if model["annotations"]["list"] else ""
    when = time.strftime("%Y-%m-%d", time.gmtime(shown.end))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
        text(8, 23, f"{model['title']}   {whose}", 16),
        text(width - 8, 22, f"drawn from Prometheus, without Grafana · {when}", 10, "end", "#777"),
        *(part for one in model["panels"] for part in panel(one, shown, marks, chosen)),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws docs/pictures/dashboard-*.svg from a Prometheus.")
    parser.add_argument("url", help="of the Prometheus that scrapes operator and jobs")
    parser.add_argument("namespace")
    parser.add_argument("job")
    parser.add_argument("--sweep", help="job for the dashboard of sweeps; without it, that one is not drawn")
    parser.add_argument("--end", type=float, default=time.time(), help="Unix time; default: now")
    parser.add_argument("--minutes", type=float, default=5.0)
    asked = parser.parse_args(arguments)
    shown = Shown(asked.url.rstrip("/"), asked.end - 60 * asked.minutes, asked.end)
    PICTURES.mkdir(exist_ok=True)
    for one in dashboards.ALL:
        job = asked.sweep if one.name == dashboards.SWEEP.name else asked.job
        if job is not None:
            drawn = picture(grafana.as_json(one), shown, asked.namespace, job)
            (PICTURES / f"dashboard-{one.name}.svg").write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
