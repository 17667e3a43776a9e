"""Processes that see CUDA devices without hardware: torch's own CUDA build over tests/fakes/cuda.

`run(function, ...)` calls a function of a module below tests/ in a process of its own: forked from a server that has
imported torch over the fake, before CUDA starts. What it returns comes back; what it raises ends the test.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib
import os
import pickle
import shutil
import struct
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from harness.native_builds import CACHE
from harness.native_builds import run as run_command
from harness.places import TESTS
from spillway_trainer.launch.rank import die_with_parent

SOURCES = TESTS / "fakes" / "cuda"
MODES = ("eager", "delayed", "reordered")


@cache
def library(packages: Path | None = None) -> Path:
    """The folder of the built libcuda.so.1: one for each state of the sources and of CUDA's headers, which lie beside
    torch in `packages` (none: this Python's)."""
    packages = packages or Path(sysconfig.get_path("purelib"))
    headers = next(packages.glob("nvidia/cu*/include/cuda_runtime_api.h")).parent
    sources = sorted(SOURCES.iterdir())
    text = [headers.joinpath("cuda_runtime_api.h").read_bytes(), *(path.read_bytes() for path in sources)]
    build = CACHE / f"cuda-{hashlib.sha256(b''.join(text)).hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "cuda-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "libcuda.so.1").exists():
            build.mkdir(exist_ok=True)
            found = build / "building.so"
            # The wheel of CUDA's headers lacks crt/, which Triton's has.
            include = ["-I", str(headers), "-idirafter", str(packages / "triton/backends/nvidia/include")]
            flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
            code = [str(path) for path in sources if path.suffix == ".cpp"]
            run_command("g++", *flags, *include, *code, "-o", str(found), "-ldl", "-lpthread")
            (build / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
            found.rename(build / "libcuda.so.1")
    return build


def environment() -> dict[str, str]:
    """Of a process that is to see the fake."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **preloading(library())}


def preloading(build: Path) -> dict[str, str]:
    return {"LD_PRELOAD": f"{build}/libcuda.so.1", "LD_LIBRARY_PATH": str(build)}


def copied(folder: Path, seen_as: Path, packages: str = "") -> dict[str, str]:
    """The fake and its numbers in `folder`; the environment of a trainer in a container that sees it at `seen_as`.
    `packages`: where the image has the trainer's modules, if not in its interpreter."""
    shutil.copytree(library(), folder, symlinks=True)
    (folder / "fakes").mkdir()
    shutil.copy(TESTS / "fakes" / "cuda_kernels.py", folder / "fakes")
    shutil.copy(TESTS / "fakes" / "cuda_trainer" / "sitecustomize.py", folder)
    path = os.pathsep.join(filter(None, (str(seen_as), packages)))
    return {"LD_PRELOAD": f"{seen_as}/libcuda.so.1", "LD_LIBRARY_PATH": str(seen_as), "PYTHONPATH": path}


def run(function: Callable[..., Any], *arguments: Any, **settings: object) -> Any:
    """`settings`: devices, mib, mode, seed, delay_us, virtual (fakes/cuda/device.h)."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    names = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    _send(server.stdin, (function.__module__, function.__qualname__, arguments, names))
    found, error = _receive(server.stdout)
    assert error is None, error
    return found


@cache
def _server() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "harness.fake_cuda", str(os.getpid())]
    made = subprocess.Popen(command, env=environment(), cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(made.kill)
    return made


def _send(file: BinaryIO | Any, message: object) -> None:
    data = pickle.dumps(message)
    file.write(struct.pack("<Q", len(data)) + data)
    file.flush()


def _receive(file: BinaryIO | Any) -> Any:
    size = file.read(8)
    if len(size) < 8:
        raise EOFError("the process over the fake CUDA has ended: see its output above")
    return pickle.loads(file.read(*struct.unpack("<Q", size)))


def _serve() -> None:
    """A child for every request, until standard input ends. What children print goes to standard error."""
    die_with_parent(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            module, name, arguments, names = _receive(requests)
        except EOFError:
            return
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.environ.update(names)
            with os.fdopen(writer, "wb") as file:
                _send(file, _called(module, name, arguments))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            try:
                answer = _receive(file)
            except EOFError:
                answer = None, f"{module}.{name}: its process died"
        os.wait()
        _send(answers, answer)


def _called(module: str, name: str, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return getattr(importlib.import_module(module), name)(*arguments), None
    except BaseException:
        return None, traceback.format_exc()


if __name__ == "__main__":
    for name in ("spillway_trainer.environment", "spillway_trainer.__main__", "fakes.cuda_kernels"):
        importlib.import_module(name)
    _serve()
