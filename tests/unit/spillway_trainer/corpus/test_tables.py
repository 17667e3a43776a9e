"""Rows of Parquet files and of `datasets`' Arrow files are read as the same lines of .jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from cases.chats import conversations
from spillway.errors import UserError
from spillway_trainer.corpus.text_source import Tally, text_source

TEXTS = ["one", "", "two\nlines", "naïve 日本語", None, "three"]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """In the form that the suffix names; parts of two rows, so that several are read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_the_texts_of_rows_are_those_of_lines(tmp_path: Path, suffix: str) -> None:
    rows = [{"text": text, "label": number} for number, text in enumerate(TEXTS)]
    read = []
    for kind in ("jsonl", suffix):
        tally = Tally()
        source = text_source(write(tmp_path / kind / f"data.{kind}", rows).parent)
        read.append([piece.text for piece in source.pieces(tally)])
        assert (tally.documents, tally.malformed, tally.binary) == (4, 2, 0)
    assert read[0] == read[1] == [text for text in TEXTS if text]


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_the_chats_of_rows_are_those_of_lines(tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": chat, "source": "somewhere"} for chat in conversations(150)]
    sources = [
        text_source(write(tmp_path / kind / f"data.{kind}", rows).parent, "spec.data.chat")
        for kind in ("jsonl", suffix)
    ]
    lines, of_rows = ([(where, json.loads(line)) for where, line in source.lines()] for source in sources)
    assert [line["messages"] for _, line in lines] == [row["messages"] for _, row in of_rows]
    assert of_rows[-1][0].endswith(f"data.{suffix}: row 150")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_table_without_the_column_and_a_damaged_one_are_errors(tmp_path: Path, suffix: str) -> None:
    other = write(tmp_path / f"other.{suffix}", [{"content": "a", "id": 1}])
    with pytest.raises(UserError, match=rf"other.{suffix}: has the columns content, id, but none named text"):
        list(text_source(other).pieces(Tally()))
    with pytest.raises(UserError, match="messages or prompt or completion or"):
        list(text_source(other, "spec.data.chat").lines())
    whole = write(tmp_path / f"cut.{suffix}", [{"text": "a" * 1000}] * 20)
    whole.write_bytes(whole.read_bytes()[:-700])
    with pytest.raises(UserError, match=rf"cut.{suffix}: cannot be read as {suffix}: .*; copy it again"):
        list(text_source(whole).pieces(Tally()))
