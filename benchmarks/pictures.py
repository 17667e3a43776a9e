"""Draws docs/pictures/jobs.svg: peak memory and step time of one job that `spillway run` trains with three budgets.

    python benchmarks/pictures.py [--rounds N] [--steps N]        (`make pictures`)

The job is examples/demo.yaml with longer sequences, so that activations have the same weight as in larger models. The
runs alternate. The picture shows figures of each run's own summary: seconds a step (medians over rounds), and peak
bytes per tier (of the last round). If the losses of all runs are not equal bit for bit, nothing is drawn. The figures
are written to docs/pictures/jobs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import paired
from spillway.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
JOBS = {
    "everything on the device": {"device": "400Mi", "host": "512Mi"},
    "half of that": {"device": "180Mi", "host": "512Mi"},
    "a third": {"device": "120Mi", "host": "512Mi"},
}
"""name -> spec.memory.budget; spec.memory.mode is Auto, and spec.memory has nothing else"""
COLOURS = {"device": "#4269d0", "host": "#efb118", "nvme": "#3ca951"}
WIDTH, BAR, GAP, LEFT, TOP = 760, 34, 30, 190, 44


def job_file(directory: Path, budget: dict[str, str], steps: int) -> Path:
    """Writes the demo's job with `budget` to a file."""
    job = yaml.safe_load((ROOT / "examples" / "demo.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    spec["training"] |= {"steps": steps, "sequenceLength": 1024}
    spec["checkpoint"]["everySteps"] = steps
    spec["memory"] = {"mode": "Auto", "budget": budget}
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    return path


def run(budget: dict[str, str], steps: int) -> tuple[dict[str, Any], list[float]]:
    """Runs the job once. Returns the run's summary and losses."""
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as place:
        directory = Path(place)
        command = [sys.executable, "-m", "spillway_cli", "run", str(job_file(directory, budget, steps))]
        command += ["--output", str(directory / "run"), "-o", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        events = map(json.loads, (directory / "run" / "run.jsonl").read_text(encoding="utf-8").splitlines())
        return json.loads(done.stdout), [event["loss"] for event in events if event["event"] == "step"]


def measure(rounds: int, steps: int) -> dict[str, Any]:
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in JOBS}
    losses = set()
    for _ in range(rounds):
        for name, budget in JOBS.items():
            summary, curve = run(budget, steps)
            seen[name].append(summary)
            losses.add(tuple(curve))
            print(f"{name}: {summary['stepSeconds']:.3f} s a step", flush=True)
    if len(losses) != 1:
        sys.exit("pictures: the losses of the runs differ: nothing is drawn")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": paired.machine().partition(",")[0] + f", {os.cpu_count()} cores",
        "rounds": rounds,
        "steps": steps,
        "jobs": {
            name: {
                "stepSeconds": statistics.median(one["stepSeconds"] for one in summaries),
                "peakBytes": {tier: use["peakBytes"] for tier, use in summaries[-1]["tiers"].items()},
            }
            for name, summaries in seen.items()
        },
    }


def picture(figures: dict[str, Any]) -> str:
    """Draws bars of peak bytes by tier, each followed by its step time."""
    jobs = figures["jobs"]
    largest = max(sum(job["peakBytes"].values()) for job in jobs.values())
    scale = (WIDTH - LEFT - 150) / largest
    height = TOP + len(jobs) * (BAR + GAP) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    x = LEFT
    for tier, colour in COLOURS.items():
        parts += [
            f'<rect x="{x}" y="12" width="12" height="12" fill="{colour}"/>',
            text(x + 18, 23, f"peak {tier} bytes"),
        ]
        x += 150
    for index, (name, job) in enumerate(jobs.items()):
        y, x = TOP + index * (BAR + GAP), float(LEFT)
        parts.append(text(LEFT - 12, y + BAR / 2 + 5, name, "end"))
        for tier, colour in COLOURS.items():
            if nbytes := job["peakBytes"].get(tier) or 0:
                parts.append(f'<rect x="{x:.1f}" y="{y}" width="{nbytes * scale:.1f}" height="{BAR}" fill="{colour}"/>')
                x += nbytes * scale
        held = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in job["peakBytes"].items() if nbytes)
        parts += [
            text(x + 10, y + BAR / 2 + 5, f"{job['stepSeconds']:.2f} s a step"),
            text(LEFT, y + BAR + 15, held, grey=True),
        ]
    parts.append(
        text(LEFT, height - 8, f"same loss, bit for bit · {figures['machine']} · {figures['date']}", grey=True)
    )
    return "\n".join([*parts, "</svg>", ""])


def text(x: float, y: float, words: str, anchor: str = "start", *, grey: bool = False) -> str:
    fill, size = ("#666", 11) if grey else ("#111", 13)
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">{words}</text>'


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Runs the jobs of docs/pictures/jobs.svg and draws it.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args(arguments)
    (ROOT / "build").mkdir(exist_ok=True)
    figures = measure(asked.rounds, asked.steps)
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "jobs.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (PICTURES / "jobs.svg").write_text(picture(figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
