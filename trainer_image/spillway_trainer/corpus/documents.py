"""spec.data.entrypoint: the documents that a user's function returns -> a file of lines, which is read like data.text
or data.chat. Torch-free.

The function is called once, when the corpus is built: in a child process, with a limit on its memory and on the time
that it takes for each document.
"""

from __future__ import annotations

import faulthandler
import json
import re
import resource
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spillway.api.limits import ENTRY_POINT_MEMORY_BYTES, INSPECTION_DEADLINE_SECONDS
from spillway.errors import UserError
from spillway.units import counted, format_bytes

from ..entry_point import function_of
from .text_source import CHAT_COLUMNS, TextSource

FILE = "documents.jsonl"
FORMS = 'a string, {"text": ...}, {"messages": ...}, {"prompt": ..., "completion": ...} or {"input_ids": ...}'
SAY_SECONDS = 5.0
"""Time between two lines that report how far the corpus is."""
_REARM_SECONDS = 1.0
"""Time between two settings of the timer. Each one starts a thread, which takes too long to be done for every
document."""


def written_documents(source: TextSource, directory: Path, report: Callable[[str], None]) -> TextSource:
    """Calls the entry point `source` and writes its documents to a file in `directory`, one per line. Returns the
    source that is read instead. Raises UserError."""
    where, kinds, number = f"spec.data.entrypoint = {source.description}", set[str](), 0
    with (directory / FILE).open("w", encoding="ascii") as file, _bounded() as more:
        function, said = function_of(source.description, where), time.monotonic()
        for number, document in enumerate(_documents(function, where, report), 1):
            if time.monotonic() - said >= SAY_SECONDS:
                said, written = time.monotonic(), file.tell()
                so_far = f"{counted(number, 'document')} so far, {format_bytes(written)}"
                report(f"corpus: {so_far}")
                if (free := shutil.disk_usage(directory).free) < written:  # the tokens need some of it
                    raise UserError(
                        f"{where}: {so_far}, but {directory.parent} has only {format_bytes(free)} free for more "
                        "documents and their tokens; return fewer documents, or use a larger disk"
                    )
            kind, line = _line(document, f"{where}: document {number}")
            kinds.add(kind)
            if len(kinds) > 1:
                raise UserError(
                    f"{where}: document {number} is {kind}, but the documents before it are not; return either only "
                    "text or only chat"
                )
            file.write(line + "\n")
            more()
    if not kinds:
        raise UserError(f"{where}: returned no document; return at least one")
    return replace(source, option=(f"--{kinds.pop()}", ""), root=directory, files=(FILE,), place=f"{where}: document ")


def ended_early(code: int, log: str) -> str:
    """Returns why the process that called an entry point ended without an error message."""
    if re.search(r"^Timeout \(\d+:\d\d:\d\d", log, re.MULTILINE):  # by faulthandler
        return f"no document in {INSPECTION_DEADLINE_SECONDS} s; the log says where it hangs"
    if code == -9:
        return (
            "killed, most likely because it used too much memory; yield documents one by one instead of returning a "
            "list"
        )
    return f"ended the process with code {code}; the log has its output"


def _documents(function: Callable[[], object], where: str, report: Callable[[str], None]) -> Iterator[object]:
    """Yields the documents that `function` returns. Turns its errors into UserErrors."""
    number = 0
    try:
        for document in _iterable(function(), where):
            number += 1
            yield document
    except UserError:
        raise
    except MemoryError as error:
        limit = format_bytes(ENTRY_POINT_MEMORY_BYTES)
        raise UserError(
            f"{where}: used more than {limit} of memory; yield documents one by one instead of returning a list"
        ) from error
    except (Exception, SystemExit) as error:
        report(traceback.format_exc().rstrip())
        raise UserError(
            f"{where}: raised {type(error).__name__} after {counted(number, 'document')}: {error}"
        ) from error


def _iterable(made: Any, where: str) -> Iterable[object]:
    if not isinstance(made, str | bytes | Mapping):
        if hasattr(made, "__iter__"):
            return made  # type: ignore[no-any-return]
        if hasattr(made, "__getitem__") and hasattr(made, "__len__"):
            return (made[index] for index in range(len(made)))
    several = f" of {', '.join(map(str, made))}: return one of them" if isinstance(made, Mapping) else ""
    raise UserError(
        f"{where}: returned {type(made).__name__}{several}; the function must return an iterable or a sequence, each "
        f"item {FORMS}"
    )


def _line(document: Any, where: str) -> tuple[str, str]:
    """Returns the kind, text or chat, and the line of JSON that a source of this kind holds."""
    fields = document if isinstance(document, Mapping) else {"text": document}
    given = {key: fields[key] for key in CHAT_COLUMNS if fields.get(key) is not None}
    kind = "chat" if {"messages", "prompt", "input_ids"} & given.keys() else "text"
    if kind == "text":
        given = {"text": fields.get("text")}
        if not isinstance(given["text"], str):
            found = f"{type(document).__name__} {str(document)[:60]}"
            raise UserError(f"{where}: must be {FORMS}; found {found}")
    try:
        return kind, json.dumps(given, default=lambda value: value.tolist())  # for arrays and tensors
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}: cannot be written as JSON: {error}; use strings, numbers, lists, dictionaries, arrays or tensors"
        ) from error


@contextmanager
def _bounded() -> Iterator[Callable[[], None]]:
    """Limits this process's memory, and the time until the yielded function is called again: after that time the
    process exits, and its log shows the stacks of its threads."""
    before, armed = resource.getrlimit(resource.RLIMIT_DATA), time.monotonic()

    def more() -> None:
        nonlocal armed
        if time.monotonic() - armed >= _REARM_SECONDS:
            faulthandler.dump_traceback_later(INSPECTION_DEADLINE_SECONDS, exit=True)
            armed = time.monotonic()

    faulthandler.dump_traceback_later(INSPECTION_DEADLINE_SECONDS, exit=True)
    given = [ENTRY_POINT_MEMORY_BYTES, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(given), before[1]))
    try:
        yield more
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
        faulthandler.cancel_dump_traceback_later()
