"""Entry points of data as users write them, right and wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cases.chats import conversations
from spillway_trainer.corpus import documents

NUM_DOCUMENTS = 40
WORDS = ["yes", "no", "the", "quick", "brown", "fox", "don't", "日本語", "🙂", "\udfff"]


def texts() -> Iterator[object]:
    """Yields strings, and maps with a text and other fields."""
    for number in range(NUM_DOCUMENTS):
        text = " ".join(WORDS[number % 7 :] + WORDS[: number % 5]) * 30
        yield text if number % 2 else {"text": text, "id": object(), "messages": None}


class Chats:
    """A map-style dataset like torch's Dataset: it has no `__iter__`, and raises no IndexError at its end."""

    def __len__(self) -> int:
        return NUM_DOCUMENTS

    def __getitem__(self, index: int) -> object:
        return {"messages": conversations(NUM_DOCUMENTS)[index % NUM_DOCUMENTS]}


def tokens() -> list[object]:
    """Samples of different lengths; some have labels, and some are arrays."""
    made: list[object] = []
    for number in range(NUM_DOCUMENTS):
        numbers = np.arange(5 + number) % 50
        labels = np.where(numbers % 3 == 0, -100, numbers)
        made.append({"input_ids": numbers, "labels": labels} if number % 2 else {"input_ids": numbers.tolist()})
    return made


def raises() -> Iterator[str]:
    yield "one"
    raise FileNotFoundError("no such shard")


def hangs() -> Iterator[str]:
    documents.INSPECTION_DEADLINE_SECONDS = 0.1  # type: ignore[assignment] - the timer is armed with it next
    documents._REARM_SECONDS = 0.0
    yield "one"
    threading.Event().wait()


def eats() -> list[str]:
    return ["x" * (documents.ENTRY_POINT_MEMORY_BYTES + 1)]


def quits() -> Iterator[str]:
    yield "one"
    sys.exit("enough")


def dies() -> Iterator[str]:
    yield "one"
    os.kill(os.getpid(), 9)


def exits() -> Iterator[str]:
    yield "one"
    os._exit(7)


def splits() -> dict[str, list[str]]:
    return {"train": ["a"], "test": ["b"]}


def a_string() -> str:
    return "text"


def nothing() -> list[str]:
    return []


def numbers() -> list[int]:
    return [3]


def mixed() -> list[object]:
    return ["text", {"messages": conversations(1)[0]}]


def no_json() -> list[object]:
    return [{"messages": [{"role": "user", "content": Path()}]}]


def no_response() -> list[object]:
    return [{"messages": conversations(1)[0]}, {"messages": [{"role": "user", "content": "yes"}]}]


def large_token() -> list[object]:
    return [{"input_ids": [1, 2]}, {"input_ids": [1, 10**6]}]


def wrong_label() -> list[object]:
    return [{"input_ids": [1, 2], "labels": [-100, 1]}]


def short_labels() -> list[object]:
    return [{"input_ids": [1, 2], "labels": [1]}]


def no_label() -> list[object]:
    return [{"input_ids": [1, 2], "labels": [1, -100]}]


NOT_CALLABLE = 3


def leaves() -> list[str]:
    os._exit(0)


def leaves_as_an_error() -> list[str]:
    os._exit(64)


def speaks_of_a_timeout() -> list[str]:
    sys.stderr.write("requests.exceptions.Timeout (30 s)")
    sys.stderr.flush()
    os._exit(3)


def starts_others() -> list[str]:
    """Starts a process that inherits its parent's pipe, and a thread for which Python waits at its end."""
    subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
    threading.Thread(target=threading.Event().wait).start()
    return [f"text {number}" for number in range(400)]


def float_token() -> list[dict[str, object]]:
    return [{"input_ids": [1.0, 2.0]}]


def batch_of_tokens() -> list[dict[str, object]]:
    return [{"input_ids": [[1, 2, 3]]}]


def endless() -> Iterator[str]:
    while True:
        yield "words " * 100
