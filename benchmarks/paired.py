"""The frame of every benchmark: runs ours and rivals alternately in one program and compares pairs of runs.

The speed of a shared machine changes by tens of percent within minutes, so two medians taken one after the other would
compare two states of the machine. Here each round runs every contestant once, in an order that rotates, and gives one
ratio. The figure is the median of these ratios, with an interval that contains the true median with 95 % confidence for
any distribution (order statistics). Fewer than six rounds give less confidence, and the figure says how much.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import NamedTuple, TypeVar

__all__ = ["Ratio", "alternate", "main", "median", "paired_ratio", "timed"]

CONFIDENCE = 0.95
MIN_ROUNDS = 6
"""the true median is between the least and the largest of this many ratios with 97 % confidence"""
Result = TypeVar("Result")


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Returns a contestant that calls `run` and returns the seconds that it took."""

    def seconds() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return seconds


def alternate(
    contestants: Mapping[str, Callable[[], Result]], *, seconds: float, min_rounds: int = MIN_ROUNDS
) -> dict[str, list[Result]]:
    """Runs rounds for about `seconds`, at least `min_rounds` of them, after one more round that warms up and does not
    count. Returns the results of each contestant by round."""
    names = list(contestants)
    results: dict[str, list[Result]] = {name: [] for name in names}
    for name in names:
        contestants[name]()
    begin, num_rounds = time.monotonic(), 0
    # Begin another round only if it will end in time.
    while num_rounds < min_rounds or (time.monotonic() - begin) * (num_rounds + 1) / num_rounds < seconds:
        for position in range(len(names)):
            name = names[(position + num_rounds) % len(names)]
            results[name].append(contestants[name]())
        num_rounds += 1
    return results


class Ratio(NamedTuple):
    """The median of paired ratios and its interval."""

    median: float
    low: float
    high: float
    confidence: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}; {self.confidence:.0%} of {self.num_pairs} pairs]"


def paired_ratio(ours: Sequence[float], rivals: Sequence[float]) -> Ratio:
    """Returns how many times as fast ours is: in each round the rival's seconds (or CPU seconds) over ours."""
    ratios = sorted(theirs / mine for mine, theirs in zip(ours, rivals, strict=True))
    n = len(ratios)
    # The interval from the k-th smallest to the k-th largest misses the median only if fewer than k pairs are on one
    # side of it.
    k = max((k for k in range(1, n // 2 + 1) if _confidence(n, k) >= CONFIDENCE), default=1)
    return Ratio(median(ratios), ratios[k - 1], ratios[n - k], _confidence(n, k), n)


def _confidence(n: int, k: int) -> float:
    return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / float(2**n)


def main(
    benchmark: str,
    description: str,
    measure: Callable[[bool], Mapping[str, float]],
    at_most: Mapping[str, float] = MappingProxyType({}),
    at_least: Mapping[str, float] = MappingProxyType({}),
    not_quick: Collection[str] = (),
) -> None:
    """Runs `measure(quick)`, which prints its table and returns its figures; prints the figures and writes them. Exits
    with 1 if a figure is beyond its limit, or if a figure that has a limit is missing. In a quick run the figures in
    `not_quick` have no limit, because such a run is too small for them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end in 50 s, one-time builds of rivals excepted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, commit and figures to FILE")
    given = parser.parse_args()
    print(
        f"{benchmark}: {description.strip()}\n\nmachine: {machine()}\ncommit:  {commit()}\nload:    {_load()}\n",
        flush=True,
    )
    begin = time.perf_counter()
    figures = dict(measure(given.quick))
    width = max(map(len, figures))
    print(f"\nload: {_load()}; {time.perf_counter() - begin:.0f} s\n")
    for name, value in figures.items():
        print(f"{name.ljust(width)}  {value:.3f}")
    if given.json is not None:
        document = {"benchmark": benchmark, "machine": machine(), "commit": commit(), "figures": figures}
        given.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    limits = [{name: limit for name, limit in of.items() if not (given.quick and name in not_quick)}
              for of in (at_most, at_least)]  # fmt: skip
    if missed := misses(figures, *limits):
        sys.exit("\n".join(["", *missed]))


def misses(figures: Mapping[str, float], at_most: Mapping[str, float], at_least: Mapping[str, float]) -> list[str]:
    """Returns a sentence for each figure that is beyond its limit, missing or NaN."""
    nan = math.nan
    over = [
        f"{name} is {figures.get(name, nan):.3f}: it must be at most {limit}"
        for name, limit in at_most.items() if not figures.get(name, nan) <= limit
    ]  # fmt: skip
    under = [
        f"{name} is {figures.get(name, nan):.3f}: it must be at least {limit}"
        for name, limit in at_least.items() if not figures.get(name, nan) >= limit
    ]  # fmt: skip
    return over + under


def _load() -> str:
    """Returns the load averages (runnable processes) over 1, 5 and 15 minutes."""
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def machine() -> str:
    """Returns processor, cores, memory and kernel, on which figures depend."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str:
    """Returns the commit of this checkout, with `-dirty` if files differ from it."""
    ended = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parent,
    )  # fmt: skip
    return ended.stdout.strip() or "unknown"
