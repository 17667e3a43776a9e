"""Settings of every test."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from harness.depth import DEPTH, Depth, at, covering, examples
from harness.places import ROOT, TESTS
from spillway_trainer.tiers.volumes import memory_kind

# There is no deadline for an example, because machines that run tests are shared.
settings.register_profile(
    "spillway", deadline=None, max_examples=examples(100), derandomize=DEPTH is not Depth.ALL, print_blob=True
)
settings.load_profile("spillway")

# A profile that was measured on this machine must not change the plans of tests.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="spillway-tests-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)


# Neither must a GPU of this machine, which `device: Auto` would choose; tests/gpu and the fake make theirs visible.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# Spilling to a file system in memory is rejected, so tests use a disk if /tmp is in memory.
if memory_kind(Path(tempfile.gettempdir())):
    ON_DISK = ROOT / "build" / "tmp"
    ON_DISK.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(ON_DISK)

# There is one worker per core; with more threads, they would wait for each other, and spin meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Hundreds of processes import torch. Without kept bytecode, each would compile it, which takes longer than the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Commands of tests buffer their output like those of a user, because writing the buffer at the end may fail.
os.environ.pop("PYTHONUNBUFFERED", None)


LEAST = {"ci": Depth.CI, "full": Depth.ALL}
ALONE = "tests/cluster/alone/"
HANG_SECONDS = at(900, 1800, 4 * 3600)
"""time after which a test is taken to wait for something that never comes; the longest test takes a minute or two, and
several times as long on a busy machine"""
FOLDERS = ("cluster", "local", "faults", "parity", "contract", "unit")
"""in the order in which they run: the many short files of the last ones fill workers that have finished the long
files"""


def pytest_report_header() -> str:
    return f"depth {DEPTH.name.lower()}: SPILLWAY_DEPTH=quick, ci or all; harness/depth.py says what that means"


def pytest_collection_finish() -> None:
    """Lets tests that train in this process multiply as the trainer does."""
    if "torch" in sys.modules:
        from spillway_trainer.kernels import half_products

        half_products.install()


def pytest_sessionfinish() -> None:
    """Waits for the end of the fork server (harness/local_runs.py), which otherwise ends some time after this process:
    hack/supervised.py would report it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests of greater depths, thins out marked products, puts long files first, and sets time limits."""
    later = {item for item in items for mark, least in LEAST.items() if item.get_closest_marker(mark) and least > DEPTH}
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            assert isinstance(item, pytest.Function)
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cells in products.values():
        # Cells that have the same value share one object, so its id identifies it.
        numbers: dict[tuple[str, int], int] = {}
        named = [[(name, id(value)) for name, value in cell.callspec.params.items()] for cell in cells]
        indices = [tuple(numbers.setdefault(key, len(numbers)) for key in keys) for keys in named]
        kept = set(covering(indices, at(1, 2, 0)))
        later |= {cell for cell, index in zip(cells, indices, strict=True) if index not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in later])
    items[:] = sorted((item for item in items if item not in later), key=place)
    for item in items:
        on_the_cluster = item.path.is_relative_to(TESTS / "cluster")  # its fixture may first build Kubernetes
        item.add_marker(pytest.mark.timeout(HANG_SECONDS, func_only=on_the_cluster))


def place(item: pytest.Item) -> tuple[int, bool]:
    """The sort key of a test: the position of its folder in FOLDERS, and whether it needs the cluster alone (these are
    last)."""
    folder = item.path.relative_to(TESTS).parts[0]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), item.nodeid.startswith(ALONE)


class OneFileInOneProcess(LoadScopeScheduling):  # type: ignore[misc]
    """Runs each file in one process, so that its fixtures are made once. (Groups by mark need pytest < 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return ALONE if nodeid.startswith(ALONE) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneFileInOneProcess:
    return OneFileInOneProcess(config, log)


@pytest.fixture(scope="module", autouse=True)
def memory_of_one_file() -> Iterator[None]:
    """Frees a file's memory at its end, so that the worker does not keep its peak for the files after it."""
    yield
    gc.collect()
    if native := sys.modules.get("spillway_trainer.kernels.native"):
        native.empty_tensor_pool()
