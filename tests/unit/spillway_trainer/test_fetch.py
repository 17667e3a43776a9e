"""Downloads of a job: from a real S3 server (moto's) and a real web server on 127.0.0.1, killed, denied, damaged."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

from harness.s3_server import KEYS, S3Server
from spillway.errors import UserError
from spillway_trainer import fetch as module
from spillway_trainer.fetch import MODEL_FILES, RECORD, RemoteFile, fetch

FILES = {"config.json": b"{}", "a/model-1.safetensors": b"w" * 70_000, "model-2.safetensors": b"v" * 50_000}
URI, FIELD = "s3://models/tiny", "spec.model.source.fetch.uri"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with S3Server() as running:
        yield running.url


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    fsspec.config.conf["s3"] = {"skip_instance_cache": True}
    made = fsspec.filesystem("s3", skip_instance_cache=True)
    if made.exists("models"):
        made.rm("models", recursive=True)
    made.mkdir("models")
    for name, content in FILES.items():
        made.pipe_file(f"models/tiny/{name}", content)
    yield made
    del fsspec.config.conf["s3"]


def fetched(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file.name != RECORD
    }


def read(directory: Path, uri: str = URI, patterns: tuple[str, ...] = ("*",)) -> list[str]:
    said: list[str] = []
    fetch(FIELD, uri, directory, patterns, said.append)
    return said


def test_a_directory_of_a_bucket_is_there_whole(s3: Any, tmp_path: Path) -> None:
    said = read(tmp_path / "deep" / "tiny")
    assert fetched(tmp_path / "deep" / "tiny") == FILES
    assert said == [f"{FIELD} = {URI}: complete, 3 files, 117 KiB"]
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["tiny", "tiny.lock"]


def test_what_is_there_is_not_fetched_again(s3: Any, tmp_path: Path) -> None:
    read(tmp_path / "tiny")
    s3.rm("models", recursive=True)
    assert read(tmp_path / "tiny") == []


def test_of_a_model_only_what_is_read_is_fetched(s3: Any, tmp_path: Path) -> None:
    s3.pipe_file("models/tiny/pytorch_model.bin", b"pickle")
    read(tmp_path / "tiny", patterns=MODEL_FILES)
    assert fetched(tmp_path / "tiny") == FILES


def test_one_object_is_a_directory_of_one_file(s3: Any, tmp_path: Path) -> None:
    read(tmp_path / "tiny", f"{URI}/config.json")
    assert fetched(tmp_path / "tiny") == {"config.json": b"{}"}


def breaks(monkeypatch: pytest.MonkeyPatch, s3: Any, name: str, after: int) -> list[int]:
    """Reading the file ends with an error behind so many bytes; returns where each reader began."""
    began, opened = [], type(s3).open

    def open_(self: Any, path: str, *given: Any, **more: Any) -> Any:
        file = opened(self, path, *given, **more)
        if not path.endswith(name):
            return file
        begin = file.read

        def reading(length: int) -> bytes:
            if not began or began[-1] != file.tell():
                began.append(file.tell())
            if file.tell() >= after:
                raise ConnectionError("reset by peer")
            return bytes(begin(min(length, after - file.tell())))

        file.read = reading
        return file

    monkeypatch.setattr(type(s3), "open", open_)
    return began


def test_a_download_that_broke_goes_on_where_it_ended(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        breaks(broken, s3, "model-1.safetensors", 30_000)
        with pytest.raises(
            UserError, match=r"no answer in 0 s: ConnectionError: reset by peer; .*already fetched are kept"
        ):
            read(tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()
    part = tmp_path / "tiny.fetching" / "a" / "model-1.safetensors.part"
    assert part.read_bytes() == b"w" * 30_000
    began = breaks(monkeypatch, s3, "model-1.safetensors", 10**9)
    read(tmp_path / "tiny")
    assert fetched(tmp_path / "tiny") == FILES
    assert began[0] == 30_000


def test_a_file_that_changed_meanwhile_starts_again(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        breaks(broken, s3, "model-1.safetensors", 30_000)
        with pytest.raises(UserError):
            read(tmp_path / "tiny")
    s3.pipe_file("models/tiny/a/model-1.safetensors", b"n" * 70_000)
    read(tmp_path / "tiny")
    assert fetched(tmp_path / "tiny")["a/model-1.safetensors"] == b"n" * 70_000


def test_bytes_that_are_not_the_source_s_are_not_kept(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_part = module._Download._read

    def damaged(self: Any, remote: RemoteFile, part: Path) -> None:
        read_part(self, remote, part)
        if remote.name == "config.json":
            part.write_bytes(b"[]")

    monkeypatch.setattr(module._Download, "_read", damaged)
    wrong = hashlib.md5(b"[]").hexdigest()
    with pytest.raises(UserError, match=rf"config.json: its md5 is {wrong}, not .*, in two tries"):
        read(tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("s3://models/tinny", "nothing is there; correct the address"),
        ("s3://nobody/tiny", r"not found \(The specified bucket does not exist\); correct the address, or give cred"),
    ],
)
def test_an_address_with_nothing_is_an_error(s3: Any, tmp_path: Path, uri: str, problem: str) -> None:
    with pytest.raises(UserError, match=f"{FIELD} = {uri}: {problem}"):
        read(tmp_path / "tiny", uri)
    assert not (tmp_path / "tiny").exists()


def test_a_pickle_alone_is_no_model(s3: Any, tmp_path: Path) -> None:
    s3.pipe_file("models/old/pytorch_model.bin", b"pickle")
    with pytest.raises(UserError, match=r"found 1 file, but none named \*.json, \*.safetensors.*;"):
        read(tmp_path / "old", "s3://models/old", MODEL_FILES)


def test_without_credentials_access_is_denied(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(UserError, match=r"access denied \(Unable to locate credentials\); give credentials: "):
        read(tmp_path / "tiny")


def test_a_source_that_does_not_answer_is_named(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(UserError, match=r"no answer in 0 s: EndpointConnectionError: .*; check the network"):
        read(tmp_path / "tiny")


def test_what_is_in_the_way_is_not_overwritten(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(
        UserError, match="mine contains files that were not downloaded; move them away, or name another directory"
    ):
        read(tmp_path / "mine")
    read(tmp_path / "tiny")
    with pytest.raises(UserError, match=f"tiny was downloaded from {URI}; remove it"):
        read(tmp_path / "tiny", f"{URI}/a")
    assert (tmp_path / "mine" / "notes").read_text() == "mine"


def test_a_name_that_leaves_the_directory_is_rejected(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = module._Source._described
    monkeypatch.setattr(module._Source, "_described", lambda *given: replace(described(*given), name="../../evil"))
    with pytest.raises(UserError, match=r"a file may not be named '../../evil'"):
        read(tmp_path / "tiny")


def test_too_little_space_is_told_before_the_first_byte(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = module.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"117 KiB to fetch, but .* has 1000 B free; use a larger volume"):
        read(tmp_path / "tiny")


def test_two_downloads_into_one_directory_take_turns(s3: Any, tmp_path: Path) -> None:
    said: list[list[str]] = [[], []]
    threads = [
        threading.Thread(target=fetch, args=(FIELD, URI, tmp_path / "tiny", ("*",), lines.append)) for lines in said
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched(tmp_path / "tiny") == FILES
    assert sum("complete" in line for lines in said for line in lines) == 1


class _Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks a hub for, to list and read one repository."""

    damaged = b""

    def log_message(self, *_: Any) -> None:
        """No noise."""

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if "/resolve/" in place:
            whole = self.damaged or FILES[place.partition("/main/")[2]]
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            body, code = whole[int(first) : int(last) + 1], 206
        else:
            found = [self._entry(name) for name in FILES] if "/tree/" in place else {"id": "org/tiny", "sha": "c" * 40}
            body, code = json.dumps(found).encode(), 200
            if "/org/tiny" not in place:
                body, code = b'{"error": "Repository not found"}', 404
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def _entry(self, name: str) -> dict[str, Any]:
        data = FILES[name]
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        entry: dict[str, Any] = {"type": "file", "oid": blob, "size": len(data), "path": name}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 120}
        return entry


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    fsspec.config.conf["hf"] = {"endpoint": f"http://127.0.0.1:{served.server_port}", "skip_instance_cache": True}
    yield
    del fsspec.config.conf["hf"]
    served.shutdown()
    served.server_close()


@pytest.mark.usefixtures("hub")
def test_a_repository_of_a_hub_is_fetched(tmp_path: Path) -> None:
    read(tmp_path / "tiny", "hf://org/tiny", MODEL_FILES)
    assert fetched(tmp_path / "tiny") == FILES
    with pytest.raises(UserError, match=r"not found \(.*correct the address, or give credentials"):
        read(tmp_path / "other", "hf://org/other")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("name", "algorithm"), [("config.json", "git"), ("model-2.safetensors", "sha256")])
def test_a_hub_s_digests_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, algorithm: str
) -> None:
    monkeypatch.setattr(_Hub, "damaged", b"x" * len(FILES[name]))
    with pytest.raises(UserError, match=rf"{name}: its {algorithm} is \w+, not \w+, in two tries"):
        read(tmp_path / "tiny", "hf://org/tiny", (name,))


class _Plain(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """No noise."""


def test_a_file_of_a_web_server_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.0)
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "chat.jsonl").write_bytes(b"x" * 100_000)
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Plain, directory=str(tmp_path / "www")))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{served.server_port}"
    try:
        read(tmp_path / "data", f"{address}/chat.jsonl?version=2")
        assert fetched(tmp_path / "data") == {"chat.jsonl": b"x" * 100_000}
        with pytest.raises(UserError, match="not found"):
            read(tmp_path / "other", f"{address}/chut.jsonl")
    finally:
        served.shutdown()
        served.server_close()
    assert json.loads((tmp_path / "data" / RECORD).read_text())["uri"].startswith(address)
