"""The engines that move bytes between memory and the spill file."""

from __future__ import annotations

import pytest

from spillway_trainer.kernels import native


@pytest.fixture(params=["io_uring", "threads", "python"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that spill files of the test use; each in turn."""
    if request.param == "python":
        monkeypatch.setattr(native, "available", lambda: False)
    elif request.param not in native.io_engines():
        pytest.skip(f"the engine {request.param} does not work here (no native library, or the system refuses it)")
    monkeypatch.setenv(native.IO_ENGINE, request.param)
    return str(request.param)
