"""Settings of every test."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# No example is too slow: machines that run tests are shared.
settings.register_profile("spillway", deadline=None)
settings.load_profile("spillway")

# A profile that somebody measured on this machine must not change what tests plan.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="spillway-tests-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)

CLUSTER = Path(__file__).parent / "cluster"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What two processes may take from each other: a file at a time, and the one test bed as a whole, in order."""
    for item in items:
        group = "cluster" if item.path.is_relative_to(CLUSTER) else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
