"""A second real node on this machine: containerd and kubelet in a mount namespace of their own.

What two kubelets cannot share (the folder of device plugins, the mounts of pods, the names of network namespaces) is a
folder of its own there; its pods lie in a cgroup of its own and hang on the same bridge. Nothing else tells the nodes
apart, so that a pod that moves finds its claims, its Services and the operator. `end` takes the node away again.
"""

from __future__ import annotations

import os
from pathlib import Path

from . import host_mount, images, node
from .certificates import SECOND_KUBELET
from .layout import BRIDGE, SECOND_ADDRESS, SECOND_NODE, SECOND_POD_ADDRESSES, State
from .machine import CGROUPS, end_containers, pod_cgroups, remove_cgroup
from .node import RealNode
from .processes import Process, recorded, run, start, wait_until
from .processes import end as end_process

OWN_FOLDERS = ("/var/lib/kubelet", "/run/containerd", "/run/netns", "/var/lib/cni")
HOLDER = "node-1"
"""the process that keeps the namespace when containerd and kubelet have ended"""
SECOND = RealNode(SECOND_NODE, "-1", SECOND_ADDRESS, SECOND_POD_ADDRESSES, SECOND_KUBELET, cgroup=f"/{SECOND_NODE}")


def ensure(state: State) -> None:
    """Start it, or what is missing of it."""
    _make_cgroups()
    addresses = run(["ip", "-4", "-o", "address", "show", "dev", BRIDGE])
    if f" {SECOND_ADDRESS}/" not in addresses:
        run(["ip", "address", "add", f"{SECOND_ADDRESS}/24", "dev", BRIDGE])
    within = ("nsenter", f"--mount=/proc/{_hold(state).pid}/ns/mnt", "--")
    python = host_mount.python()
    specification = host_mount.write_specification(state, python)
    containerd = node.start_containerd(state, specification, SECOND, within)
    node.wait_for_containerd(state, containerd, SECOND)
    images.ensure(state, [images.pause(state.bin / "pause"), host_mount.image(python)], containerd.name)
    node.wait_ready(state, node.start_kubelet(state, SECOND, within), SECOND)


def end(state: State) -> None:
    """Its processes, its pods, and what the API server knows of it."""
    known = recorded(state)
    for name in (f"kubelet{SECOND.suffix}", f"containerd{SECOND.suffix}"):
        if name in known:
            end_process(state, known[name])
    end_containers(SECOND.socket(state), SECOND_NODE)
    if HOLDER in known:
        end_process(state, known[HOLDER])  # the last one in the namespace: its mounts go with it
    for folder in pod_cgroups(SECOND_NODE):
        remove_cgroup(folder)
    kubectl: list[str | Path] = [state.bin / "kubectl", "--kubeconfig", state.kubeconfig]
    run([*kubectl, "delete", "node", SECOND_NODE, "--ignore-not-found"])
    run(["ip", "address", "delete", f"{SECOND_ADDRESS}/24", "dev", BRIDGE])


def _hold(state: State) -> Process:
    for folder in OWN_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)
    mounts = "; ".join(f"mount -t tmpfs tmpfs {folder}" for folder in OWN_FOLDERS)
    ready = state.settings / "node-1-mounts"
    command = f"set -e; {mounts}; touch {ready}; exec sleep infinity"
    known = recorded(state).get(HOLDER)
    if not (known and known.alive):
        ready.unlink(missing_ok=True)
    process = start(state, HOLDER, ["unshare", "--mount", "--propagation", "private", "sh", "-c", command])
    wait_until("the mounts of the second node", ready.exists, node.START_SECONDS, process)
    return process


def _make_cgroups() -> None:
    """The kubelet wants its root cgroup to be there in every hierarchy; a cpuset without CPUs takes no process. Its
    share is that of the whole machine, which the kubelet gives the first node's pods, too."""
    roots = sorted(CGROUPS.glob("*/")) if not (CGROUPS / "cgroup.controllers").exists() else [CGROUPS]
    for root in roots:
        folder = root / SECOND_NODE
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists() and not (folder / name).read_text(encoding="ascii").strip():
                (folder / name).write_text((root / name).read_text(encoding="ascii"), encoding="ascii")
        if (folder / "cpu.shares").exists():
            (folder / "cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)), encoding="ascii")
