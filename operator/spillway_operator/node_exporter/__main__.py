"""`python -m spillway_operator.node_exporter`: serves one node's figures, read at each scrape."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from spillway.errors import ExitCode
from spillway.metrics import NODE_LABEL

from .gpus import GpuReader, started_nvml
from .host import Drive, Sample, drive_samples, memory_samples


class NodeExporter(Collector):
    """Collects the series of spillway.metrics.NODE for one node."""

    def __init__(
        self,
        node: str,
        drives: Sequence[Drive] = (),
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        start_nvml: Callable[[], object] = started_nvml,
    ) -> None:
        self._node, self._drives, self._proc, self._sys = node, drives, proc, sys
        self._gpus = GpuReader(sys, start_nvml)

    def collect(self) -> Iterator[Family]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        of_drives = (_unless_it_fails(drive_samples(drive, self._sys)) for drive in self._drives)
        for metric, labels, value in chain(memory_samples(self._proc, self._sys), *of_drives, self._gpus.samples()):
            if metric.name not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric.name] = kind(metric.name, metric.help, labels=(NODE_LABEL, *metric.labels))
            families[metric.name].add_metric((self._node, *labels), value)
        yield from families.values()


def _unless_it_fails(samples: Iterable[Sample]) -> list[Sample]:
    """The samples; none if the drive does not answer, because the others still count."""
    try:
        return list(samples)
    except OSError as error:
        print(f"a spill drive cannot be read: {error}", file=sys.stderr)
        return []


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m spillway_operator.node_exporter",
        description="Serves memory, drive and GPU figures of one node as Prometheus metrics.",
    )
    parser.add_argument("--node", required=True, help="name of the node; the label node of every series")
    parser.add_argument("--address", default="0.0.0.0", help="address to listen on")  # noqa: S104 - asked from outside the pod
    parser.add_argument("--port", type=int, default=9402)
    parser.add_argument(
        "--proc", type=Path, default=Path("/proc"), help="directory to read instead of /proc, for tests"
    )
    parser.add_argument("--sys", type=Path, default=Path("/sys"), help="directory to read instead of /sys, for tests")
    parser.add_argument(
        "--drive", nargs=3, action="append", default=[], metavar=("MOUNTPOINT", "PATH", "CLASS"),
        help="spill drive: mount point on the node, its path here, its StorageClass; empty: emptyDirs lie on it",
    )  # fmt: skip
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 stopped by SIGTERM, 64 the address is not available."""
    given = parsed(arguments)
    registry = CollectorRegistry()
    drives = [Drive(mountpoint, Path(path), storage_class) for mountpoint, path, storage_class in given.drive]
    registry.register(NodeExporter(given.node, drives, given.proc, given.sys))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        start_http_server(given.port, given.address, registry)
    except (OSError, OverflowError) as error:
        print(f"--address {given.address} --port {given.port}: {error}; give others", file=sys.stderr)
        return int(ExitCode.USER_ERROR)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    return 0


if __name__ == "__main__":
    sys.exit(main())
