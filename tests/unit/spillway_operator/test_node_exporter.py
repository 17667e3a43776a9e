"""The node exporter says what /proc, /sys, statvfs and NVML say, of its own node, and nothing that they do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fakes.node_readings import FakeGpu, FakeNvml, write_proc
from spillway import metrics
from spillway.units import GIB, MIB
from spillway_operator.measured.metrics_source import node_page
from spillway_operator.node_exporter.__main__ import NodeExporter, main
from spillway_operator.node_exporter.host import Drive

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]
NO_SYS = Path("/nonexistent")


def series(exporter: NodeExporter) -> Series:
    """Of its page, without the label node, which every one has."""
    registry = CollectorRegistry()
    registry.register(exporter)
    found: Series = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("node") == "node-a"
            found[sample.name, frozenset(sample.labels.items())] = sample.value
    return found


def value(found: Series, metric: metrics.Metric, **labels: str) -> float | None:
    values = [one for (name, own), one in found.items() if name == metric.name and labels.items() <= dict(own).items()]
    assert len(values) < 2, "labels of more than one series"
    return values[0] if values else None


def exporter(proc: Path, *gpus: FakeGpu, sys: Path = NO_SYS, drives: tuple[Drive, ...] = ()) -> NodeExporter:
    return NodeExporter("node-a", drives, proc, sys, lambda: FakeNvml(*gpus) if gpus else None)


def test_memory_and_stalls_are_those_of_proc_in_bytes_and_seconds(tmp_path: Path) -> None:
    found = series(exporter(write_proc(tmp_path, 7 * GIB, 12.25, total_bytes=16 * GIB)))
    assert value(found, metrics.NODE_MEMORY_AVAILABLE) == 7 * GIB
    assert value(found, metrics.NODE_MEMORY_TOTAL) == 16 * GIB
    assert value(found, metrics.NODE_MEMORY_STALLED) == 12.25
    assert value(found, metrics.NODE_MEMORY_WAITING) == 24.5
    assert value(found, metrics.NODE_IO_STALLED) == 12.25
    assert len(found) == 5


def test_what_a_kernel_without_psi_does_not_tell_has_no_series(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\n", encoding="ascii")
    assert list(series(exporter(tmp_path)).values()) == [8192]


def test_free_memory_of_numa_nodes_is_told(tmp_path: Path) -> None:
    for number in (0, 1):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        text = f"Node {number} MemTotal:       99 kB\nNode {number} MemFree:        {5 + number} kB\n"
        (folder / "meminfo").write_text(text, encoding="ascii")
    found = series(exporter(tmp_path, sys=tmp_path))
    assert value(found, metrics.NODE_NUMA_FREE, numa_node="0") == 5 * 1024
    assert value(found, metrics.NODE_NUMA_FREE, numa_node="1") == 6 * 1024


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    """A mounted file system on the first partition of sda, whose /sys is the test's folder."""
    statistics = SimpleNamespace(f_bavail=3 * MIB, f_bfree=4 * MIB, f_blocks=9 * MIB, f_frsize=4096, f_bsize=1)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: statistics)
    number = os.stat(tmp_path).st_dev
    partition = tmp_path / "block/sda/sda1"
    partition.mkdir(parents=True)
    (partition / "partition").touch()
    (partition.parent / "stat").write_text("1 2 3 4 5 6 1000 8 9 10 11\n", encoding="ascii")
    (tmp_path / "dev/block").mkdir(parents=True)
    (tmp_path / f"dev/block/{os.major(number)}:{os.minor(number)}").symlink_to(partition)
    return Drive("/mnt/fast", tmp_path, "fast")


def test_a_drive_is_told_by_mount_point_class_and_device(drive: Drive) -> None:
    found = series(exporter(NO_SYS, sys=drive.path, drives=(drive,)))
    labels = {"mountpoint": "/mnt/fast", "storage_class": "fast", "drive": "sda"}
    assert value(found, metrics.NODE_DISK_FREE, **labels) == 3 * MIB * 4096, "of what root keeps, pods get nothing"
    assert value(found, metrics.NODE_DISK_TOTAL, **labels) == 9 * MIB * 4096
    assert value(found, metrics.NODE_DISK_WRITTEN, **labels) == 1000 * 512
    assert value(found, metrics.NODE_DISK_WEAR) is None


@pytest.mark.parametrize(("told", "wear"), [("0x01 0x02\n", 0.1), ("0x0b\n", 1.1)])
def test_a_drive_that_tells_its_wear_has_it(drive: Drive, told: str, wear: float) -> None:
    (drive.path / "block/sda/device").mkdir()
    (drive.path / "block/sda/device/life_time").write_text(told, encoding="ascii")
    assert value(series(exporter(NO_SYS, sys=drive.path, drives=(drive,))), metrics.NODE_DISK_WEAR) == wear


def test_a_drive_that_is_not_mounted_or_fails_hides_no_other(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> object:
        raise OSError(5, "Input/output error", str(path))

    absent = Drive("/mnt/absent", drive.path / "block", "fast")
    found = series(exporter(NO_SYS, sys=drive.path, drives=(absent, drive)))
    assert {dict(labels)["mountpoint"] for _, labels in found} == {"/mnt/fast"}
    monkeypatch.setattr(os, "statvfs", fails)
    assert series(exporter(write_proc(drive.path, GIB), drives=(drive,)))


def test_each_gpu_and_each_mig_instance_is_told_apart(tmp_path: Path) -> None:
    numa = tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node"
    numa.parent.mkdir(parents=True)
    numa.write_text("1\n", encoding="ascii")
    whole = FakeGpu("GPU-0", 70 * GIB, processes=2, links={0, 1, 2})
    found = series(exporter(NO_SYS, whole, FakeGpu("GPU-1", GIB, instances=((1, 5 * MIB), (2, 6 * MIB))), sys=tmp_path))
    assert value(found, metrics.NODE_DEVICE_FREE, gpu="0", UUID="GPU-0", GPU_I_ID="") == 70 * GIB
    assert value(found, metrics.NODE_DEVICE_TOTAL, gpu="0") == 80 * GIB
    assert value(found, metrics.NODE_DEVICE_PROCESSES, gpu="0") == 2
    assert value(found, metrics.NODE_DEVICE_FREE, gpu="1", UUID="GPU-1", GPU_I_ID="1") == 5 * MIB
    assert value(found, metrics.NODE_DEVICE_FREE, gpu="1", UUID="GPU-1", GPU_I_ID="2") == 6 * MIB
    assert value(found, metrics.NODE_DEVICE_FREE, gpu="1", GPU_I_ID="") is None
    assert value(found, metrics.NODE_DEVICE_PROCESSES, gpu="1") is None, "the driver does not say"
    described = {"name": "NVIDIA H100", "numa_node": "1", "pcie_generation": "5", "pcie_lanes": "16", "nvlinks": "3"}
    assert value(found, metrics.NODE_DEVICE_INFO, gpu="0", **described) == 1


def test_a_lost_gpu_hides_no_other_and_a_failed_driver_is_connected_again() -> None:
    drivers = [FakeNvml(FakeGpu("GPU-0", GIB, is_lost=True), FakeGpu("GPU-1", GIB)), FakeNvml(FakeGpu("GPU-2", GIB))]
    started = iter(drivers)
    exporter = NodeExporter("node-a", (), NO_SYS, NO_SYS, lambda: next(started))
    assert {dict(labels)["UUID"] for _, labels in series(exporter)} == {"GPU-1"}
    drivers[0].fails = True
    assert series(exporter) == {}
    assert drivers[0].num_shutdowns == 1
    assert {dict(labels)["UUID"] for _, labels in series(exporter)} == {"GPU-2"}


def test_the_operator_reads_the_same_figures_from_the_page_as_its_target_names_them(drive: Drive) -> None:
    gpus = FakeNvml(FakeGpu("GPU-0", 70 * GIB))
    drives = (drive, replace(drive, mountpoint="/var/lib/kubelet", storage_class=""))
    registry = CollectorRegistry()
    proc = write_proc(drive.path / "proc", 7 * GIB, 12.5)
    registry.register(NodeExporter("node-a", drives, proc, drive.path, lambda: gpus))
    page = node_page(generate_latest(registry), "node-b")
    assert [[figure for _, figure in samples] for samples in page.free] == [[7 * GIB], [70 * GIB], [12 * GIB] * 2]
    assert {labels["node"] for samples in page.free for labels, _ in samples} == {"node-b"}
    assert page.stalled_seconds == 12.5


def test_every_series_is_a_declared_one_and_no_other_exporters() -> None:
    assert len({metric.name for metric in metrics.NODE}) == len(metrics.NODE)
    assert all(metric.name.startswith("spillway_node_") for metric in metrics.NODE)
    assert not set(metrics.NODE) & {*metrics.ALL, *metrics.SWEEP, *metrics.OPERATOR}


def test_figures_of_this_machine_are_within_2_percent_of_proc_and_statvfs() -> None:
    def read(name: str) -> int:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    found = series(NodeExporter("node-a", (Drive("/var/lib/kubelet", Path("/")),), start_nvml=lambda: None))
    disk = os.statvfs("/")
    assert value(found, metrics.NODE_MEMORY_TOTAL) == read("MemTotal:")
    assert value(found, metrics.NODE_MEMORY_AVAILABLE) == pytest.approx(read("MemAvailable:"), rel=0.02)
    assert value(found, metrics.NODE_DISK_TOTAL) == disk.f_blocks * disk.f_frsize
    assert value(found, metrics.NODE_DISK_FREE) == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.02)


def test_it_loads_nothing_large() -> None:
    code = (
        "import sys; from spillway_operator.node_exporter import __main__ as m; list(m.NodeExporter('a').collect());"
        "print(*sorted({'kopf', 'aiohttp', 'kubernetes', 'pydantic', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_port_that_is_taken_is_an_error_that_says_what_to_do(
    capsys: pytest.CaptureFixture[str], unblocked: Callable[[], None]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--node", "a", "--address", "127.0.0.1", "--port", port]) == 64
    assert f"--address 127.0.0.1 --port {port}: " in capsys.readouterr().err


@pytest.fixture
def unblocked() -> object:
    """`main` blocks signals that this process wants."""
    import signal

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield None
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
