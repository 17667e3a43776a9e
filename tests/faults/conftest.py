"""A fixture for the engines that move bytes between memory and the spill file."""

from __future__ import annotations

import pytest

from spillway_trainer.kernels import native


@pytest.fixture(params=["threads", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the engine that the test's spill files use; the test runs with each engine in turn."""
    if request.param == "python":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("no native library here")
    return str(request.param)
