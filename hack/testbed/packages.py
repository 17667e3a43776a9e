"""What comes from Debian packages: installed only where missing, without starting any service. They stay on `down`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import Failed, Unavailable
from .processes import run

NODE = {
    "/usr/bin/containerd": "containerd",
    "/usr/sbin/runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/conntrack": "conntrack",
    "/usr/bin/openssl": "openssl",
    "/usr/sbin/ip": "iproute2",
}
"""a file of each package, and its name"""
NODE_EXPORTER = {"/usr/bin/prometheus-node-exporter": "prometheus-node-exporter"}
IMAGES = {"/usr/bin/buildah": "buildah", "/usr/sbin/debootstrap": "debootstrap"}
"""what hack/images.py builds with; only whoever calls it needs them"""

POLICY = Path("/usr/sbin/policy-rc.d")
"""asked by package scripts before they start a service"""


def missing(packages: dict[str, str]) -> list[str]:
    return [name for file, name in packages.items() if not Path(file).exists()]


def ensure(packages: dict[str, str]) -> None:
    """Install what is missing; raises Unavailable when that cannot be done."""
    wanted = missing(packages)
    if not wanted:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Unavailable(f"missing: {' '.join(wanted)}; install these packages (Debian's names) first")
    print(f"installing {' '.join(wanted)} (they stay installed)", flush=True)
    with _no_service_starts():
        try:
            _install(wanted)
        except Failed:  # the list of packages may be old, or empty as in a fresh image
            try:
                run(["apt-get", "update"])
                _install(wanted)
            except Failed as error:
                raise Unavailable(f"cannot install {' '.join(wanted)}: {error}") from error


def _install(names: Iterable[str]) -> None:
    run(
        ["apt-get", "install", "--yes", "--no-install-recommends", *names],
        environment={"DEBIAN_FRONTEND": "noninteractive"},
    )


@contextmanager
def _no_service_starts() -> Iterator[None]:
    if POLICY.exists():
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="ascii")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
