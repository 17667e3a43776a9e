"""Settings of every test."""

import atexit
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

from spillway_trainer.volumes import memory_kind

# No example is too slow: machines that run tests are shared.
settings.register_profile("spillway", deadline=None)
settings.load_profile("spillway")

# A profile that somebody measured on this machine must not change what tests plan.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="spillway-tests-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)


# What would spill into memory is refused: where /tmp lies there, tests use a disk.
if memory_kind(Path(tempfile.gettempdir())):
    ON_DISK = Path(__file__).parents[1] / "build" / "tmp"
    ON_DISK.mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = os.environ["TMPDIR"] = str(ON_DISK)

# Hundreds of processes import torch: where bytecode is not kept, each compiles it, which costs more than the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


class OneFileInOneProcess(LoadScopeScheduling):  # type: ignore[misc]
    """And the test bed's files in one, in their order: there is one test bed. (Groups by mark need pytest < 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return "cluster" if nodeid.startswith("tests/cluster/") else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneFileInOneProcess:
    return OneFileInOneProcess(config, log)


@pytest.fixture(scope="module", autouse=True)
def memory_of_one_file() -> Iterator[None]:
    """What a file's models needed at their fullest does not stay with the worker for the files after it."""
    yield
    if native := sys.modules.get("spillway_trainer.native"):
        native.empty_tensor_pool()
