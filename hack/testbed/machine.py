"""What the test bed changes on the machine: checked and recorded before the first change, put back by `down`."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from ipaddress import ip_network
from pathlib import Path

from .errors import Failed, Rejected, Unavailable
from .layout import ADDRESS, BRIDGE, POD_RANGE, SECOND_NODE, SERVICE_RANGE, State
from .processes import boot_id, kill, run, start_ticks_of, wait_until

SYSCTLS = (
    "net.ipv4.ip_forward",  # pods reach each other's node, and Services
    "net.bridge.bridge-nf-call-iptables",  # a pod reaches a pod beside it through a Service
    "net.ipv4.conf.all.route_localnet",  # kube-proxy
    "vm.overcommit_memory",  # the kubelet
    "vm.panic_on_oom",
    "kernel.panic",
    "kernel.panic_on_oops",
    "kernel.keys.root_maxkeys",
    "kernel.keys.root_maxbytes",
)
FOLDERS = (
    "/var/lib/kubelet",  # the kubelet's folder for device plugins cannot be moved
    "/run/containerd",  # nor can the sockets of containerd's shims
    "/run/netns",
    "/var/log/pods",
    "/var/log/containers",
    "/var/lib/cni",
    "/etc/cni",
    "/opt/containerd",
    "/run/xtables.lock",
)
"""removed by `down` if `up` did not find them"""
CGROUPS = Path("/sys/fs/cgroup")
PODS = ("kubepods", SECOND_NODE)
"""cgroups of the first node's pods and of the second one's, on version 1 in each hierarchy"""
NAMESPACES = Path("/run/netns")
CHAINS = "KUBE-"
FIREWALLS = ("iptables", "ip6tables")
SHIM = "containerd-shim-runc-v2"

CHANGES = f"""\
until `down`, this machine gets
  network    bridge {BRIDGE} with {ADDRESS}; for each pod a namespace and a veth pair in {POD_RANGE};
             iptables chains {CHAINS}* for {SERVICE_RANGE}
  sysctls    {", ".join(SYSCTLS[:5])},
             {", ".join(SYSCTLS[5:])}
  the rest   cgroups {", ".join(PODS)}; mounts below the state folder; {", ".join(FOLDERS[:4])}
for good     Debian packages that are missing; built programs in the user's cache folder
"""


@dataclass(frozen=True, slots=True)
class Before:
    """The machine as `up` found it."""

    boot: str
    sysctls: dict[str, str]
    folders: tuple[str, ...]
    """those of FOLDERS that existed"""
    namespaces: tuple[str, ...]
    tables: dict[str, tuple[str, ...]]
    """netfilter tables that existed, by the command that lists them"""


def check(state: State) -> None:
    """Raise Unavailable or Rejected when the test bed must not start here. A running bed of ours passes."""
    if platform.system() != "Linux":
        raise Unavailable(
            f"the test bed needs Linux; this is {platform.system()}. docs/test-bed.md tells how to use kind"
        )
    if os.geteuid() != 0:
        raise Unavailable("the test bed needs root: it makes a bridge, network namespaces and cgroups")
    if state.machine.exists():
        return
    advice = "run `make cluster-down` with its SPILLWAY_TESTBED if a test bed made it, else use another machine"
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            ended = start_ticks_of(int(path.parent.name)) is None  # and not yet reaped: ours, from a moment ago
            if path.read_text(encoding="utf-8").strip() == "kubelet" and not ended:
                raise Rejected(f"process {path.parent.name} is a kubelet that this test bed did not start: {advice}")
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        raise Rejected(f"network link {BRIDGE} exists: {advice}")
    if pod_cgroups(*PODS):
        raise Rejected(f"cgroup {pod_cgroups(*PODS)[0]} exists: {advice}")
    for words in map(str.split, run(["ip", "-4", "route", "show", "table", "all"]).splitlines()):
        with suppress(ValueError):  # a type of route, or `default`
            if any(ip_network(words[0]).overlaps(ip_network(ours)) for ours in (POD_RANGE, SERVICE_RANGE)):
                raise Rejected(f"a route to {words[0]} exists, which the test bed would take: {advice}")


def record(state: State) -> None:
    """Note what the machine is like, once; from here on `down` has something to put back."""
    if state.machine.exists():
        return
    before = Before(
        boot=boot_id(),
        sysctls={name: path.read_text(encoding="ascii").strip() for name, path in _sysctls().items()},
        folders=tuple(path for path in FOLDERS if Path(path).exists()),
        namespaces=_namespaces(),
        tables={command: tuple(_tables(command)) for command in FIREWALLS},
    )
    state.machine.write_text(json.dumps(asdict(before), indent=1), encoding="utf-8")


def restore(state: State) -> None:
    """Put everything back. Every process that was recorded has ended by now; works from any half-made state."""
    before = Before(**json.loads(state.machine.read_text(encoding="utf-8")))
    for socket, pods in zip((state.containerd_socket, state.second_containerd_socket), PODS, strict=True):
        end_containers(socket, pods)
    _unmount(state)
    _remove_network(before)
    for command in FIREWALLS:
        _restore_firewall(command, before.tables[command])
    for folder in pod_cgroups(*PODS):
        remove_cgroup(folder)
    if before.boot == boot_id():
        for name, path in _sysctls().items():
            if path.read_text(encoding="ascii").strip() != before.sysctls.get(name):
                path.write_text(before.sysctls[name], encoding="ascii")
    for name in FOLDERS:
        if name not in before.folders:
            _remove(Path(name))


def end_containers(socket: Path, pods: str) -> None:
    """Of one node: its shims, which have containerd's socket in their arguments; processes below the cgroup `pods`."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if Path(words[0]).name == SHIM and str(socket) in words:
                kill(int(path.parent.name))

    def inside() -> list[int]:
        listed = [file for folder in pod_cgroups(pods) for file in folder.rglob("cgroup.procs")]
        return sorted({int(pid) for file in listed for pid in file.read_text(encoding="ascii").split()})

    def empty() -> bool:
        for pid in inside():
            kill(pid)
        return not inside()

    wait_until("the end of all pod processes", empty, 20)


def _unmount(state: State) -> None:
    for path in [
        *_mounts_below(state.root),
        *_mounts_below(Path("/run/containerd")),
        *_mounts_below(Path("/var/lib/kubelet")),
    ]:
        run(["umount", "--lazy", path])


def _remove_network(before: Before) -> None:
    for name in set(_namespaces()) - set(before.namespaces):
        path = NAMESPACES / name
        if name.startswith("cni-"):
            with suppress(Failed):  # not mounted: the name alone was left
                run(["umount", path])
            path.unlink()
    ports = Path(f"/sys/class/net/{BRIDGE}/brif")
    for port in ports.iterdir() if ports.exists() else ():
        with suppress(Failed):  # the kernel removes it together with its namespace
            run(["ip", "link", "delete", port.name])
    if ports.exists():
        run(["ip", "link", "delete", BRIDGE])
    if not before.namespaces and NAMESPACES.is_mount():
        run(["umount", NAMESPACES])


def _restore_firewall(command: str, tables_before: tuple[str, ...]) -> None:
    """Without kube-proxy's and the kubelet's chains, and without tables that are empty now and were not there."""
    for table, lines in _tables(command).items():
        names = [line.split()[0][1:] for line in lines if line.startswith(f":{CHAINS}")]
        if names:
            jumps = [line for line in lines if f"-j {CHAINS}" in line and not line.startswith(f"-A {CHAINS}")]
            steps = [line.replace("-A", "-D", 1) for line in jumps]
            steps += [*(f"-F {name}" for name in names), *(f"-X {name}" for name in names)]
            run([f"{command}-restore", "--noflush"], stdin="\n".join([f"*{table}", *steps, "COMMIT", ""]))
        if table not in tables_before:
            _remove_table(command, table)


def _remove_table(command: str, table: str) -> None:
    """Only chains that came with the table are left, and only if they are as new."""
    lines = _tables(command).get(table, [])
    if all(line.startswith(":") and line.split()[1] == "ACCEPT" for line in lines):
        for line in lines:
            with suppress(Failed):  # the older kernel interface cannot remove a table's own chains
                run([command, "--wait", "--table", table, "-X", line.split()[0][1:]])


def _tables(command: str) -> dict[str, list[str]]:
    """Lines of chains and rules by table."""
    found: dict[str, list[str]] = {}
    if not shutil.which(f"{command}-save"):
        return found
    for line in run([f"{command}-save"]).splitlines():
        if line.startswith("*"):
            found[line[1:]] = current = []
        elif line.startswith((":", "-A")):
            current.append(line)
    return found


def pod_cgroups(*names: str) -> list[Path]:
    """On version 1 one of each name in each hierarchy, on version 2 one."""
    roots = (CGROUPS, *sorted(CGROUPS.glob("*/")))
    return [root / name for root in roots for name in names if (root / name).is_dir()]


def remove_cgroup(folder: Path) -> None:
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        inner.rmdir()
    folder.rmdir()


def _namespaces() -> tuple[str, ...]:
    return tuple(sorted(path.name for path in NAMESPACES.iterdir())) if NAMESPACES.exists() else ()


def _sysctls() -> dict[str, Path]:
    """Those of SYSCTLS that this kernel has."""
    paths = {name: Path("/proc/sys") / name.replace(".", "/") for name in SYSCTLS}
    return {name: path for name, path in paths.items() if path.exists()}


def _mounts_below(folder: Path) -> list[Path]:
    """The innermost first."""
    paths = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        path = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]))
        if path.is_relative_to(folder):
            paths.append(path)
    return paths[::-1]


def _remove(path: Path) -> None:
    """Raise Failed rather than delete through a mount."""
    if not path.exists():
        return
    if path.is_dir():
        if _mounts_below(path):
            raise Failed(f"{_mounts_below(path)[0]} is still mounted; unmount it and run `down` again")
        shutil.rmtree(path)
    else:
        path.unlink()


def remove_state(state: State) -> None:
    """The last step of `down`: after it there is no record."""
    _remove(state.root)
