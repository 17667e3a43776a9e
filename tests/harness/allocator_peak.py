"""The peak memory that torch's CPU allocator itself reports: a measure that does not depend on plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch


def allocated_peak(run: Callable[[], None], directory: Path) -> int:
    """Peak bytes of torch's CPU allocator above those at the start of `run`, from its own events. Writes its trace to
    `directory`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    trace = directory / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
