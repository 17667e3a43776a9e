"""Rows of Parquet files and of `datasets`' Arrow files are read as the same lines of .jsonl."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
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


def test_dates_and_decimals_beside_the_text_are_no_error_and_bytes_are(tmp_path: Path) -> None:
    message = {"role": "user", "content": "a", "at": datetime(2026, 11, 28), "score": Decimal("0.5")}
    ((_, line),) = text_source(write(tmp_path / "a.parquet", [{"messages": [message]}]), "spec.data.chat").lines()
    assert json.loads(line)["messages"] == [message | {"at": "2026-11-28 00:00:00", "score": "0.5"}]
    source = text_source(write(tmp_path / "b.parquet", [{"messages": [message | {"content": b"a"}]}]), "spec.data.chat")
    with pytest.raises(UserError, match=r"b\.parquet: row 1: has a value of type bytes; convert it to a string"):
        list(source.lines())


def test_strings_that_are_not_utf8_and_two_columns_of_one_name_are_errors(tmp_path: Path) -> None:
    bad = pyarrow.array([b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "bytes.parquet")
    twice = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    with pyarrow.ipc.new_stream(tmp_path / "twice.arrow", twice.schema) as writer:
        writer.write_table(twice)
    for name, sentence in (("bytes.parquet", "is not valid UTF-8"), ("twice.arrow", 'Field "text" exists 2 times')):
        with pytest.raises(UserError, match=rf"{name}: .*{sentence}"):
            list(text_source(tmp_path / name).pieces(Tally()))


def test_arrow_with_an_index_at_its_end_is_read_as_the_stream_is(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["one", "two", "three"]})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    assert [piece.text for piece in text_source(tmp_path / "a.arrow").pieces(Tally())] == ["one", "two", "three"]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_a_data_set_with_a_missing_part_is_an_error(tmp_path: Path, suffix: str) -> None:
    for number in (0, 1, 2):
        write(tmp_path / f"data-{number:05}-of-00003.{suffix}", [{"text": "a"}])
    assert len(text_source(tmp_path).files) == 3
    (tmp_path / f"data-00001-of-00003.{suffix}").unlink()
    with pytest.raises(UserError, match=rf"lacks data-00001-of-00003\.{suffix}, a part of the same data set"):
        text_source(tmp_path)


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
