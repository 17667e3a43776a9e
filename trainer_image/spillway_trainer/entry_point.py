"""Entry points: functions of the user's own code, which only the trainer imports. Torch-free."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable

from spillway.errors import UserError


def function_of(entrypoint: str, where: str) -> Callable[[], object]:
    """Imports the function `package.module:function`. Raises UserError, which begins with `where`."""
    module_name, _, name = entrypoint.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        what = f"{where}: cannot import {module_name}: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{what}; install the module where the trainer runs (its image), or add its directory to PYTHONPATH"
            ) from error
        *_, last = traceback.extract_tb(error.__traceback__)
        raise UserError(f"{what} ({last.filename}, line {last.lineno})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{where}: {module_name} has no function {name}; correct the name after the colon")
    return function  # type: ignore[no-any-return]
