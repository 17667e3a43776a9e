"""Images into containerd: our own small ones, and files that somebody built."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from . import docker_archive
from .docker_archive import Image
from .errors import Failed
from .layout import State
from .processes import recorded, run

PAUSE = "local/pause:1"


def pause(program: Path) -> Image:
    return Image(PAUSE, programs={"/pause": program}, command=("/pause",))


def ensure(state: State, images: Iterable[Image], containerd: str = "containerd") -> None:
    """Write and import those that a node's containerd has not."""
    known = _ctr(state, containerd, "images", "ls", "-q").split()
    for image in images:
        if f"docker.io/{image.name}" not in known:
            archive = state.images / (image.name.replace("/", "-").replace(":", "-") + ".tar")
            docker_archive.write(image, archive)
            import_files(state, [archive], containerd)


def import_files(state: State, files: Iterable[Path], containerd: str = "containerd") -> list[str]:
    """Import docker-archive or OCI archive files into a node; the names that pods use them by."""
    process = recorded(state).get(containerd)
    if not process or not process.alive:
        raise Failed(f"{containerd} does not run: start the test bed first (make cluster-up)")
    names = []
    for file in files:
        if not file.exists():
            raise Failed(f"{file}: no such file")
        said = _ctr(state, containerd, "images", "import", file)
        names += [line.split()[1] for line in said.splitlines() if line.startswith("unpacking ")]
    return names


def _ctr(state: State, containerd: str, *arguments: str | Path) -> str:
    return run(["ctr", "--address", state.sockets / f"{containerd}.sock", "--namespace", "k8s.io", *arguments])
