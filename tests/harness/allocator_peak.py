"""What torch's CPU allocator itself says of memory: a yardstick that knows nothing of plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch


def allocated_peak(run: Callable[[], None], directory: Path) -> int:
    """Highest bytes of torch's CPU allocator above the start, from its own events; its trace goes to `directory`."""
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
