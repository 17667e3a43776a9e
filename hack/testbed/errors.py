"""How a command of the test bed ends."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    FAILED = 1
    """something did not start, or did not end"""
    USAGE = 2
    UNAVAILABLE = 3
    """this machine cannot run the test bed: not Linux, not root, a package or a binary cannot be had"""
    REJECTED = 4
    """this machine runs a kubelet, a bridge or an address range that the test bed did not make"""


class BedError(Exception):
    """One sentence: what was found where, and what to do."""

    exit_code = ExitCode.FAILED


class Failed(BedError):
    exit_code = ExitCode.FAILED


class Unavailable(BedError):
    exit_code = ExitCode.UNAVAILABLE


class Rejected(BedError):
    exit_code = ExitCode.REJECTED
