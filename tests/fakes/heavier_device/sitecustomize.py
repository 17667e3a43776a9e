"""A model that takes TEST_DEVICE_TIMES as many bytes of the device as predicted, for processes in which a test cannot
replace anything itself: with this folder on PYTHONPATH, a trainer's ledger has a budget that is smaller by that
factor."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import Any

PATCHED = "spillway_trainer.assemble"
"""the module that makes the ledger"""


class Patch:
    """An import hook that acts once: it makes PATCHED use ledgers of a smaller device, which has the same effect."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            ledger, times = module.DeviceLedger, float(os.environ["TEST_DEVICE_TIMES"])
            module.DeviceLedger = lambda budget, planned: ledger(int(budget / times), planned)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Patch())  # type: ignore[arg-type]
