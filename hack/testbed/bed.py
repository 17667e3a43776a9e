"""The whole test bed: start what does not run, end everything, say what there is."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import (
    api,
    binaries,
    certificates,
    control_plane,
    fake_gpus,
    fake_nodes,
    host_mount,
    images,
    kueue,
    machine,
    network,
    node,
    packages,
    prometheus,
    second_node,
)
from .errors import Failed
from .layout import REPOSITORY, State
from .processes import end, recorded


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the bed is to have besides control plane and real node; a running bed is only added to."""

    fake_nodes: int = 0
    fake_gpus: int = 0
    prometheus: bool = False
    second_node: bool = False
    kueue: bool = False


def up(state: State, wanted: Wanted) -> None:
    """From nothing, or from a bed of which a part has died, to one that has all that is wanted."""
    machine.check(state)
    if not state.machine.exists():
        print(machine.CHANGES, end="", flush=True)
    packages.ensure(packages.NODE | (packages.NODE_EXPORTER if wanted.prometheus else {}))
    programs = binaries.ensure()
    with _alone(state):
        _end_remains(state, programs)
        machine.check(state)  # again: another one may have come up meanwhile
        _make_folders(state)
        machine.record(state)
        _link(state.checkout, REPOSITORY)
        _link(state.bin, programs)
        _start(state, wanted)


def _start(state: State, wanted: Wanted) -> None:
    network.make_bridge()
    certificates.make(state)
    server = control_plane.start_servers(state)
    python = host_mount.python()  # all this while the API server starts
    containerd = node.start_containerd(state, host_mount.write_specification(state, python))
    node.wait_for_containerd(state, containerd)
    images.ensure(state, [images.pause(state.bin / "pause"), host_mount.image(python)])
    control_plane.wait_ready(state, server)
    control_plane.start_controllers(state)
    kubelet = node.start_kubelet(state)
    api.apply(state, [*network.manifests(), *host_mount.manifests()])
    network.start_services(state)
    node.wait_ready(state, kubelet)
    if wanted.second_node:
        second_node.ensure(state)
    if wanted.prometheus:
        prometheus.ensure(state)
    if wanted.fake_nodes:
        fake_nodes.ensure(state, wanted.fake_nodes)
    if wanted.fake_gpus:
        fake_gpus.ensure(state, wanted.fake_gpus)
    if wanted.kueue:
        kueue.ensure(state)


def down(state: State) -> bool:
    """End every process, put the machine back, remove the state; False when there was no bed."""
    with _alone(state):
        if not state.machine.exists():
            return False
        _end(state)
    return True


def runs(state: State) -> bool:
    """Whether any process of it lives. A bed that was killed leaves its folder, links and mounts."""
    return any(process.alive for process in recorded(state).values())


def _end(state: State) -> None:
    for process in recorded(state).values():
        end(state, process)
    machine.restore(state)
    machine.remove_state(state)


def _make_folders(state: State) -> None:
    for folder in (
        *(state.root, state.logs, state.processes, state.settings, state.certificates, state.sockets, state.data),
        *(state.images, state.volumes),
    ):
        folder.mkdir(parents=True, exist_ok=True)
    state.root.chmod(0o755)
    state.certificates.chmod(0o700)


def _end_remains(state: State, programs: Path) -> None:
    """Of a bed of another checkout, or of older programs, that was killed: no part of it can be used, or is in use."""
    links = ((state.checkout, REPOSITORY), (state.bin, programs))
    foreign = any(link.is_symlink() and link.resolve() != target.resolve() for link, target in links)
    if foreign and not runs(state):
        if state.machine.exists():
            _end(state)
        else:  # only its folder is left: its end was interrupted
            machine.remove_state(state)


def _link(link: Path, target: Path) -> None:
    """Raise Failed when a bed of another checkout, or of older programs, runs here."""
    if not link.is_symlink():
        link.symlink_to(target)
    elif link.resolve() != target.resolve():
        raise Failed(
            f"the running test bed has {link.resolve()}, this checkout {target}: run `make cluster-down` first"
        )


@contextmanager
def _alone(state: State) -> Iterator[None]:
    """One `up` or `down` of a state at a time. The lock lies beside the folder, which `down` removes."""
    state.root.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(state.root.with_name(f".{state.root.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
