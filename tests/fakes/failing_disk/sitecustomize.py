"""A disk that fails once, for processes in which a test cannot replace anything itself: with this folder on PYTHONPATH,
the first transfer in TEST_DISK_DIRECTION after the path TEST_DISK_FAILS_AFTER exists fails with errno
TEST_DISK_ERROR."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

PATCHED = "spillway_trainer.assemble"
"""the module that makes the spill file"""


def disk(direction: Any, file: int, memory: memoryview, offset: int) -> int:
    """Replaces pread and pwrite."""
    from spillway_trainer.kernels.io_engine import system_call

    after = Path(os.environ["TEST_DISK_FAILS_AFTER"])
    failed = after.parent / "the-disk-has-failed"
    if direction.name == os.environ["TEST_DISK_DIRECTION"] and after.exists() and not failed.exists():
        failed.touch()
        return -int(os.environ["TEST_DISK_ERROR"])
    return system_call(direction, file, memory, offset)


class Patch:
    """An import hook that acts once: it makes PATCHED use spill files on the failing disk."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.SpillFile = partial(module.SpillFile, call=disk)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Patch())  # type: ignore[arg-type]
