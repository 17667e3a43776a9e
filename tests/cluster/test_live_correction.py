"""A neighbour takes the free space of a spill volume: while a job of two ranks runs, its activations move to host
memory, and its losses and its last checkpoint are those of a run without a neighbour.

The volume is a separate ext4 file system on a loop device, which two jobs use one after the other through a storage
class. The neighbour is a file next to their folders.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.installed import Document, Installed, example, named
from harness.witness import files_of, watched
from spillway.feedback.live_correction import LEAST_DEFICIT, MARGIN
from spillway.plan import MemoryPlan, Tier
from spillway.units import MIB, parse_quantity
from spillway_trainer.checkpoints.manifest import CheckpointName
from testbed.client import POD_USER

NUM_RANKS = 2
VOLUME_BYTES = 256 * MIB
LEFT_BYTES = 22 * MIB
"""bytes that the neighbour leaves free: below the margin, so that about two thirds of the activations must move"""
STEPS = 800
"""enough for a report, its answer and some time after it: 25 s on an idle machine"""
FILLED_AFTER_STEP = 20
RUN_SECONDS = 540
STORAGE_CLASS = "loop"
CLAIM = "checkpoints"


@pytest.fixture
def volume(tmp_path: Path, eventually: Callable[..., None]) -> Iterator[Path]:
    """The folder at which the file system is mounted."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4 for a file system of its own")
    image, mounted = tmp_path / "image", tmp_path / "volume"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(VOLUME_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    ended = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mounted)], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        pytest.skip(f"no loop device can be mounted here: {ended.stderr.strip()}")

    def is_gone() -> bool:  # umount is rejected while a pod that is ending has a file open
        return subprocess.run(["umount", str(mounted)], capture_output=True, check=False).returncode == 0

    yield mounted
    eventually("unmounting the spill volume", is_gone, 60)


@pytest.fixture
def volumes(spillway: Installed, namespace: str, volume: Path) -> Iterator[None]:
    """A PersistentVolume for each job, because a volume that was bound once is not bound again."""
    names = [f"{namespace}-{name}" for name in ("plain", "corrected")]
    for name in names:
        folder = volume / name
        folder.mkdir()
        os.chown(folder, POD_USER, POD_USER)
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": str(folder)},
            "storageClassName": STORAGE_CLASS,
            "persistentVolumeReclaimPolicy": "Retain",
        }
        spillway.bed.apply({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": spec})
    yield
    jobs = ("trainingjobs.spillway.dev", "--all", "-n", namespace)
    spillway.bed.kubectl("delete", *jobs, "--cascade=foreground", "--timeout=60s")
    spillway.bed.kubectl("delete", "persistentvolume", *names, "--wait=false")


@pytest.mark.full
@pytest.mark.usefixtures("volumes")
def test_activations_move_to_host_when_a_neighbour_fills_the_spill_volume(
    spillway: Installed, namespace: str, volume: Path, eventually: Callable[..., None]
) -> None:
    checkpoints = spillway.bed.claim(CLAIM, namespace)
    job = a_job(namespace)
    spillway.create(named(job, "plain"))
    with watched(spillway, namespace, "plain") as plain:
        spillway.wait(namespace, "plain", "Complete", RUN_SECONDS)
    (expected,) = plain.losses()
    assert [*expected] == [*range(1, STEPS + 1)]
    assert not plain.corrections()
    assert "Corrected" not in reasons(spillway, namespace)
    spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", "plain", "-n", namespace, "--cascade=foreground")

    spillway.create(named(job, "corrected"))
    with watched(spillway, namespace, "corrected") as witness:
        eventually("the first steps", lambda: FILLED_AFTER_STEP in (witness.losses() or [()])[0], 180)
        contract = spillway.children("configmap", namespace, "corrected")[0]["data"]
        plan = MemoryPlan.model_validate_json(contract["plan.json"])
        planned = plan.bytes[Tier.NVME].activations
        assert plan.bytes[Tier.HOST].reserve == planned

        neighbour = take_all_but(volume, LEFT_BYTES)
        assert free_bytes(volume) == pytest.approx(LEFT_BYTES, abs=MIB)
        after = spillway.until(is_corrected, namespace, "corrected", 60)["status"]
        left = parse_quantity(after["memory"]["activations"])
        wanted = (MARGIN - LEAST_DEFICIT) * VOLUME_BYTES
        eventually("giving the neighbour room", lambda: free_bytes(volume) >= wanted, 60)
        given_back = free_bytes(volume) - LEFT_BYTES
        done = spillway.wait(namespace, "corrected", "Complete", RUN_SECONDS)["status"]
    neighbour.unlink()

    (correction,) = witness.corrections()
    print(f"\n{after['memory']['correction']}\n{correction['reason']}")
    print(f"free: {LEFT_BYTES / MIB:.1f} MiB -> {(LEFT_BYTES + given_back) / MIB:.1f} MiB of {VOLUME_BYTES / MIB:.0f}")
    print(spillway.bed.kubectl("describe", "trainingjobs.spillway.dev", "corrected", "-n", namespace))
    assert correction["activations"] == left < planned
    assert correction["step"] < STEPS
    assert correction["spill_file_bytes"] < plan.slab_bytes(Tier.NVME)
    assert given_back >= NUM_RANKS * (planned - left) - MIB
    assert done["attempts"]["total"] == 1 and done["attempts"].get("disruptions", 0) == 0
    assert len(witness.journals) == 1, "one pod, from beginning to end"
    found = reasons(spillway, namespace)
    assert found.count("Corrected") == 1
    assert not {"Evicted", "Evicting", "Restart", "SpillVolumeLow"} & {*found}
    assert witness.losses() == [expected]
    assert files_of(checkpoints, "corrected", STEPS) == files_of(checkpoints, "plain", STEPS)
    assert CheckpointName.parse(Path(done["checkpoint"]["path"]).name) is not None


def a_job(namespace: str) -> Document:
    return example(
        "two-pod", namespace, training__steps=STEPS, data__evaluation=None,
        parallelism={"nodes": 1, "devicesPerNode": NUM_RANKS, "device": "Cpu"},
        memory__budget={"device": "34Mi", "host": "256Mi", "nvme": "512Mi"},
        memory__advanced={"activations": {"policy": "Nvme", "hostReserve": "64Mi"}},
        spill={"storageClassName": STORAGE_CLASS},
        checkpoint={"everySteps": STEPS, "keep": 2, "claim": CLAIM},
    )  # fmt: skip


def is_corrected(job: Document) -> bool:
    return bool(job["status"].get("memory", {}).get("correction"))


def free_bytes(volume: Path) -> int:
    found = os.statvfs(volume)
    return found.f_bavail * found.f_frsize


def take_all_but(volume: Path, left_bytes: int) -> Path:
    """Makes a file that leaves `left_bytes` of the volume free; returns its path."""
    file = volume / "neighbour"
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, free_bytes(volume) - left_bytes)
    return file


def reasons(spillway: Installed, namespace: str) -> list[str]:
    """The reasons of all events in the namespace."""
    return [str(event.get("reason")) for event in spillway.bed.get("events.events.k8s.io", "-n", namespace)["items"]]
