"""GPUs that do not exist on the real node: a device plugin that the kubelet takes for a real one."""

from __future__ import annotations

from . import api
from .layout import NODE, State
from .processes import end, recorded, start, wait_until

START_SECONDS = 30
PLUGIN = "fake-device-plugin"
RESOURCE = "nvidia.com/gpu"


def ensure(state: State, count: int) -> None:
    """Exactly `count`; those named in `state.unhealthy_gpus` are not allocatable."""
    argv = [str(state.bin / PLUGIN), RESOURCE, str(count), str(state.unhealthy_gpus)]
    running = recorded(state).get(PLUGIN)
    if running and list(running.argv) != argv:
        end(state, running)
    plugin = start(state, PLUGIN, argv)
    if not state.unhealthy_gpus.exists():
        wait_until(f"{count} {RESOURCE} on {NODE}", lambda: allocatable(state) == count, START_SECONDS, plugin)


def allocatable(state: State) -> int:
    node = api.read(state, f"/api/v1/nodes/{NODE}") or {}
    return int(node.get("status", {}).get("allocatable", {}).get(RESOURCE, 0))
