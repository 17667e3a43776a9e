"""The profile of this machine: a NodeProfile that `spillway calibrate` wrote and plans for this machine use.

It is in $XDG_STATE_HOME/spillway (~/.local/state/spillway). One that is damaged, or measured with another number of
cores, is not used: if named on the command line it is rejected, else a message says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import yaml

from spillway.api.load import SET_BY_THE_SERVER
from spillway.api.manifest import parse, read_text
from spillway.api.profiles import NodeProfileSpec
from spillway.errors import UserError
from spillway.feedback.profiles import NodeProfile, has_rates, measured, rates_sentence
from spillway.plan import DeviceKind
from spillway.planning.hardware import NodeSpec, gpu_node, resolve_node

from ..record.directory import write_atomic

FILE_NAMES = {"Cpu": "node-profile.yaml", "Cuda": "node-profile-cuda.yaml"}
"""Measured device kind -> file name."""
SERVER_FIELDS = (*SET_BY_THE_SERVER, ("metadata", "labels"))
"""Fields set by the API server, ignored so that the output of `kubectl get nprof -o yaml` can be read."""


@dataclass(frozen=True, slots=True)
class OwnProfile:
    """The rates that plans for this machine use."""

    spec: NodeProfileSpec | None
    """None: the catalog's rates."""
    sentence: str
    """Where the rates come from, for people."""


def default_path(device: DeviceKind = "Cpu") -> Path:
    """The profile's path. Raises UserError if there is neither $XDG_STATE_HOME nor a home directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "spillway" / FILE_NAMES[device]
    try:
        return Path.home() / ".local" / "state" / "spillway" / FILE_NAMES[device]
    except RuntimeError as error:
        raise UserError("no home directory for the profile; name a file with --output") from error


def read_profile(path: Path) -> NodeProfile:
    """Reads a NodeProfile. Raises UserError, or InvalidJob with every wrong field."""
    return parse(NodeProfile, read_text(path, "NodeProfile"), str(path), SERVER_FIELDS)


def write_profile(path: Path, document: dict[str, object], comment: str) -> None:
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    text = lines + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=120)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise unwritable(path, error) from error


def check_writable(path: Path) -> None:
    """Raises UserError if the profile could not be written, before anything is measured. Only creates the directory."""
    probe = path.with_name(f".{path.name}.probe")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(21, "is a directory")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot write the profile ({error.strerror}); name another file with --output")


Profiles = Callable[[DeviceKind], OwnProfile]
"""Returns the profile of this machine for a device kind."""


def no_profile(device: DeviceKind) -> OwnProfile:
    return OwnProfile(None, "")


def own_profile(cores: int, device: DeviceKind = "Cpu", *, given: Path | None = None) -> OwnProfile:
    """The profile `given` (--node FILE), or the one that `spillway calibrate` wrote. Raises UserError if `given` is not
    usable; if the other one is not, `sentence` says why."""
    path = given or default_path_or_none(device)
    if path is None or (given is None and not os.path.exists(path)):
        return OwnProfile(None, "catalog rates; measure this machine with `spillway calibrate`")
    try:
        profile = read_profile(path)
        reject_another_machine(path, profile.spec, cores, device)
    except UserError as error:
        if given is not None:
            raise
        reason = "; ".join(line.strip() for line in str(error).splitlines())
        return OwnProfile(None, f"profile not used: {reason}; run `spillway calibrate` again. Using catalog rates")
    when = f"on {profile.spec.measured_time[:10]} " if profile.spec.measured_time else ""
    return OwnProfile(profile.spec, rates_sentence(profile.spec, f"{when}({path})"))


def default_path_or_none(device: DeviceKind = "Cpu") -> Path | None:
    try:
        return default_path(device)
    except UserError:
        return None


def reject_another_machine(path: Path, spec: NodeProfileSpec, cores: int, device: DeviceKind) -> None:
    if spec.device_kind != device:
        raise UserError(
            f"{path}: spec.deviceKind = {spec.device_kind}, but this run uses device kind {device}; name another "
            "profile"
        )
    if not has_rates(spec):
        raise UserError(f"{path}: contains no measured rate")
    if spec.num_cores not in (None, cores):
        raise UserError(f"{path}: measured with {spec.num_cores} cores, but {cores} are usable now")


@dataclass(frozen=True, slots=True)
class NamedNode:
    """The node that `--node` names."""

    node: NodeSpec
    rates: str
    """Where the rates come from, for people."""


def named_node(name: str) -> NamedNode:
    """The node of `--node NAME`: a catalog class, or a NodeProfile file, completed from the catalog's generic CPU node
    or the GPU class with as much memory. Raises UserError for a GPU profile without device memory."""
    path = Path(name)
    if os.sep not in name and path.suffix not in {".yaml", ".yml", ".json"}:
        return NamedNode(resolve_node(name), "catalog rates")
    spec = read_profile(path).spec
    rates = rates_sentence(spec)
    if spec.device_kind == "Cpu":
        return NamedNode(measured(spec, resolve_node("cpu")), rates)
    if spec.device_memory is None:
        raise UserError(
            f"{path}: spec.deviceMemory: missing; set it to the memory of one GPU, because plans must fit in it"
        )
    return NamedNode(measured(spec, gpu_node("", spec.device_memory, spec.num_devices or 1)), rates)
