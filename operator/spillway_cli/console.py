"""Printing for all commands: text for people, one JSON document for machines.

Results go to stdout, messages to stderr. Without a terminal there is no colour, no bar and no line wrapping.
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
    """A console that tolerates a closed pipe (`| head -1`): it discards the rest of its output."""

    watches = False
    """End the command on a closed pipe instead: a command that watches would otherwise run forever."""

    def on_broken_pipe(self) -> None:
        if self.watches:
            raise BrokenPipeError
        leave_reader(self.file)


def leave_reader(stream: IO[str]) -> None:
    """Redirects `stream` to /dev/null, including what Python flushes at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream.fileno())
    finally:
        os.close(nowhere)


def console_on(stream: TextIO) -> HouseConsole:
    """Returns a console that prints text unchanged: square brackets in a name are not markup."""
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
def status_if_slow(doing: str) -> Iterator[None]:
    """Prints `doing` on stderr, if that is a terminal, once the block has taken a second."""
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
    """Prints the document of `-o json`. The caller must have replaced non-finite numbers by None."""
    print_result(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_result(text: str) -> None:
    """Writes `text` to stdout unchanged; a closed pipe is not an error."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        leave_reader(sys.stdout)


def table(*headings: str, title: str | None = None) -> Table:
    """Returns an empty table in the common style: first column left, the others right."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    return made


def printable(text: str) -> str:
    """Replaces control characters by spaces: text from a cluster must not control the terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
