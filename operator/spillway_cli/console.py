"""What the commands print: text for people, one JSON document for machines.

Results go to stdout, everything that is said on the way to stderr. Without a terminal there is no colour, no bar and no
wrapping at the width of one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import IO, TextIO

from rich.console import Console
from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 160


class Format(StrEnum):
    """`-o`: how a command's result is printed."""

    TEXT = "text"
    JSON = "json"


class HouseConsole(Console):
    """A reader that has seen enough (`| head -1`) is no error: what follows goes to nobody. One that `watches` ends the
    command: without it there would be no end."""

    watches = False

    def on_broken_pipe(self) -> None:
        if self.watches:
            raise BrokenPipeError
        leave_reader(self.file)


def leave_reader(stream: IO[str]) -> None:
    """What `stream` still holds, and all that comes, goes to /dev/null: also when Python ends and flushes it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def console_on(stream: TextIO) -> HouseConsole:
    """A console that prints text as it is: square brackets in a name are no markup. NO_COLOR is respected by rich."""
    terminal = stream.isatty()
    return HouseConsole(
        file=stream,
        force_terminal=terminal,
        width=None if terminal else WIDTH_WITHOUT_TERMINAL,
        markup=False,
        highlight=False,
        emoji=False,
        soft_wrap=True,
    )


def result_console(watches: bool = False) -> HouseConsole:
    console = console_on(sys.stdout)
    console.watches = watches
    return console


def message_console() -> Console:
    return console_on(sys.stderr)


@contextmanager
def said_if_slow(doing: str) -> Iterator[None]:
    """Says on a terminal's stderr what is being done inside, once that has taken a second."""
    console = message_console()
    timer = threading.Timer(1.0, console.print, (f"{doing} ...",))
    timer.daemon = True
    if console.is_terminal:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def print_json(document: Mapping[str, object] | Sequence[object]) -> None:
    """The one document of `-o json`; not-finite numbers do not exist in JSON and must be None by now."""
    print_result(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_result(text: str) -> None:
    """`text` on stdout as it is, for as long as somebody reads."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        leave_reader(sys.stdout)


def table(*headings: str, title: str | None = None) -> Table:
    """The one table style of the house: first column left, figures right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    return made


def printable(text: str) -> str:
    """One line without what a terminal would obey: parts of a status were written by others."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
