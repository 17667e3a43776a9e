"""Ctrl-C at any moment of a command: one sentence and code 75, never a traceback.

The entry point calls `listen` before it imports anything large. Half-done imports cannot be unwound by an exception (it
may be swallowed or turned into another), and nothing is under way then that would need it: the process ends at once.
Otherwise Ctrl-C is Python's own KeyboardInterrupt, which commands may catch and the entry point turns into a sentence.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from types import FrameType

PREEMPTED = 75
"""spillway.errors.ExitCode.PREEMPTED, which is not imported yet"""
SENTENCE = "stopped on request"
DOCUMENT = f'{{"error": {{"exitCode": {PREEMPTED}, "reason": "Preempted", "message": "{SENTENCE}"}}}}\n'
IMPORTING = "<frozen importlib."
"""begins the file name of a frame that imports"""


def listen(name: str) -> None:
    """From now on, where `name` (the importing module's) or sys.argv says that we are the command, not a library; a
    SIGINT that somebody ignores stays ignored."""
    is_command = name == "__main__" or os.path.basename(sys.argv[0]) == "spillway"
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)


def interrupted(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def leave() -> None:
    if wants_json(sys.argv[1:]):
        os.write(1, DOCUMENT.encode())
    else:
        os.write(2, f"spillway: {SENTENCE}\n".encode())
    os._exit(PREEMPTED)


def finish() -> None:
    """The result is said: what Python still does until it ends is no place for an exception."""
    if signal.getsignal(signal.SIGINT) in (interrupted, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def wants_json(arguments: list[str]) -> bool:
    """Whether -o json was asked for; read from the words, because a command may fail before they are parsed."""
    return any(pair in {("-o", "json"), ("--format", "json")} for pair in pairwise(arguments)) or bool(
        {"-ojson", "--format=json"} & {*arguments}
    )
