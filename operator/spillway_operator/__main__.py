"""`python -m spillway_operator`: the operator's process, configured by SPILLWAY_* (docs/operator.md)."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import sys

from spillway import __version__
from spillway.errors import UserError

from .log import start_logging
from .process import Operator
from .settings import Settings, load_settings

M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Options of mallopt, from glibc's malloc.h."""
LARGE_BLOCK_BYTES = 128 * 1024


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 stopped by SIGTERM, 1 a part died, 64 wrong settings."""
    parser = argparse.ArgumentParser("python -m spillway_operator", description="The operator of TrainingJobs.")
    parser.add_argument("--version", action="version", version=f"spillway {__version__}")
    parser.add_argument("--kubeconfig", help="for development: the cluster to serve (KUBECONFIG)")
    parser.add_argument(
        "--namespace", action="append", help="serve this namespace; may be repeated (SPILLWAY_NAMESPACES)"
    )
    given = parser.parse_args(arguments)
    changes = {"KUBECONFIG": given.kubeconfig, "namespaces": tuple(given.namespace) if given.namespace else None}
    try:
        settings = load_settings({name: value for name, value in changes.items() if value is not None})
        start_logging(settings.log_level)
        give_back_memory()
        return asyncio.run(_run(settings))
    except UserError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)


def give_back_memory() -> None:
    """Makes glibc return the memory of lists and plans to the system: large blocks are always mapped separately, and
    the planning thread has no arena of its own."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        set_option(M_ARENA_MAX, 1)


async def _run(settings: Settings) -> int:
    return await Operator(settings).run()


if __name__ == "__main__":
    sys.exit(main())
