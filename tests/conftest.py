"""Settings of every test."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from harness.depth import DEPTH, Depth, at, covering, examples
from harness.places import ROOT, TESTS
from spillway_trainer.tiers.volumes import memory_kind

# No example is too slow: machines that run tests are shared.
settings.register_profile(
    "spillway", deadline=None, max_examples=examples(100), derandomize=DEPTH is not Depth.ALL, print_blob=True
)
settings.load_profile("spillway")

# A profile that somebody measured on this machine must not change what tests plan.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="spillway-tests-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)


# Nor must a GPU of this machine, which device Auto would take; tests/gpu and the fake see theirs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

# What would spill into memory is refused: where /tmp lies there, tests use a disk.
if memory_kind(Path(tempfile.gettempdir())):
    ON_DISK = ROOT / "build" / "tmp"
    ON_DISK.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(ON_DISK)

# There is a worker a core: more threads would wait for each other, and spin while they do.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Hundreds of processes import torch: where bytecode is not kept, each compiles it, which costs more than the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A command of a test writes to its pipe as it does for a user: what Python holds back may fail at its end.
os.environ.pop("PYTHONUNBUFFERED", None)


LEAST = {"ci": Depth.CI, "full": Depth.ALL}
ALONE = "tests/cluster/alone/"
HANG_SECONDS = at(900, 900, 4 * 3600)
"""the longest test takes a minute or two: one that takes this long waits for something that never comes"""
FOLDERS = ("cluster", "local", "faults", "parity", "contract", "unit")
"""in this order: the many short files of the last ones fill what the long ones of the first leave of a worker"""


def pytest_report_header() -> str:
    return f"depth {DEPTH.name.lower()}: SPILLWAY_DEPTH=quick, ci or all; harness/depth.py says what that means"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for a greater depth, thin out marked products, put long files first, and end what hangs."""
    later = {item for item in items for mark, least in LEAST.items() if item.get_closest_marker(mark) and least > DEPTH}
    products: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sweep"):
            assert isinstance(item, pytest.Function)
            products.setdefault(item.nodeid.split("[")[0], []).append(item)
    for cells in products.values():
        # A value is the same object in every cell that has it.
        numbers: dict[tuple[str, int], int] = {}
        named = [[(name, id(value)) for name, value in cell.callspec.params.items()] for cell in cells]
        indices = [tuple(numbers.setdefault(key, len(numbers)) for key in keys) for keys in named]
        kept = set(covering(indices, at(1, 2, 0)))
        later |= {cell for cell, index in zip(cells, indices, strict=True) if index not in kept}
    config.hook.pytest_deselected(items=[item for item in items if item in later])
    items[:] = sorted((item for item in items if item not in later), key=place)
    for item in items:
        on_the_cluster = item.path.is_relative_to(TESTS / "cluster")  # whose fixture may build Kubernetes first
        item.add_marker(pytest.mark.timeout(HANG_SECONDS, func_only=on_the_cluster))


def place(item: pytest.Item) -> tuple[int, bool]:
    """Of its folder below tests/ in FOLDERS; on the cluster what needs it alone comes last."""
    folder = item.path.relative_to(TESTS).parts[0]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS), item.nodeid.startswith(ALONE)


class OneFileInOneProcess(LoadScopeScheduling):  # type: ignore[misc]
    """Its fixtures are made once. (Groups by mark need pytest < 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return ALONE if nodeid.startswith(ALONE) else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneFileInOneProcess:
    return OneFileInOneProcess(config, log)


@pytest.fixture(scope="module", autouse=True)
def memory_of_one_file() -> Iterator[None]:
    """What a file's models needed at their fullest does not stay with the worker for the files after it."""
    yield
    gc.collect()
    if native := sys.modules.get("spillway_trainer.kernels.native"):
        native.empty_tensor_pool()
