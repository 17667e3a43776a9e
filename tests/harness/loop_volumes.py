"""File systems of their own on loop devices, to spill to: what fills one changes nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.client import POD_USER, Bed
from testbed.processes import wait_until


@dataclass(frozen=True)
class LoopVolume:
    """Where it is mounted."""

    folder: Path

    def persistent(self, bed: Bed, name: str, storage_class: str) -> None:
        """A volume for one pod, by its storage class."""
        folder = self.folder / name
        folder.mkdir()
        os.chown(folder, POD_USER, POD_USER)
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
            "storageClassName": storage_class,
            "persistentVolumeReclaimPolicy": "Retain",
        }
        bed.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})


@contextmanager
def loop_volume(directory: Path, nbytes: int) -> Iterator[LoopVolume]:
    """Skips the test where none can be made."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4 for a file system of its own")
    image, mounted = directory / "image", directory / "volume"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(nbytes)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    try:
        device = _run("losetup", "--find", "--show", str(image)).strip()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be made here: {error.stderr.strip()}")
    try:
        _run("mount", device, str(mounted))
        try:
            yield LoopVolume(mounted)
        finally:
            wait_until("unmounting the volume", lambda: _unmounted(mounted), 60)
    finally:
        _run("losetup", "--detach", device)


def _unmounted(folder: Path) -> bool:
    """Rejected while a pod that ends holds a file."""
    return subprocess.run(["umount", str(folder)], capture_output=True, check=False).returncode == 0


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
