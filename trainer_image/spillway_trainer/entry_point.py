"""Entry points: functions of the user's own code, which only the trainer imports. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from spillway.errors import UserError


def function_of(entrypoint: str, where: str) -> Callable[[], object]:
    """The function `package.module:function`. Raises UserError, with `where`."""
    module_name, colon, name = entrypoint.partition(":")
    if not colon or not module_name or not name:
        raise UserError(f"{where}: write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{where}: cannot import {module_name}: {type(error).__name__}: {error}; install it next to "
            "the trainer, or add its directory to PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{where}: {module_name} has no function {name}")
    return function  # type: ignore[no-any-return]
