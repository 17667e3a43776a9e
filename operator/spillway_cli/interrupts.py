"""Ctrl-C at any moment of a command: one sentence and code 75, never a traceback.

The entry point calls `listen` before it imports anything large. During an import the process exits at once: an
exception could be swallowed or replaced there, and there is nothing to clean up yet. Otherwise Ctrl-C raises
KeyboardInterrupt, which commands may catch and the entry point turns into the sentence.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from types import FrameType

PREEMPTED = 75
"""The value of spillway.errors.ExitCode.PREEMPTED, which is not imported yet."""
SENTENCE = "stopped on request"
DOCUMENT = f'{{"error": {{"exitCode": {PREEMPTED}, "reason": "Preempted", "message": "{SENTENCE}"}}}}\n'
IMPORTING = "<frozen importlib."
"""File name prefix of a frame that is importing."""


def listen(name: str) -> None:
    """Installs the SIGINT handler if `name` (the importing module's) or sys.argv shows that this is the command, not a
    library. An ignored SIGINT stays ignored."""
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
    """Restores the default handler: after the result is printed, Ctrl-C must not raise during interpreter shutdown."""
    if signal.getsignal(signal.SIGINT) in (interrupted, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def wants_json(arguments: list[str]) -> bool:
    """Whether -o json was given; read from the raw arguments, because a command may fail before they are parsed."""
    return any(pair in {("-o", "json"), ("--format", "json")} for pair in pairwise(arguments)) or bool(
        {"-ojson", "--format=json"} & {*arguments}
    )
