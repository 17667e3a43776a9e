"""Processes that see CUDA devices without hardware: torch's own CUDA build over tests/fakes/cuda.

`run(function, ...)` calls a function of a module below tests/ in a process of its own, which is forked, before CUDA is
initialized, from a server that has imported torch over the fake. It returns what the function returns; if the function
raises, the test fails. `run_ranks(function, 4, ...)` does the same in four processes at once.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import hashlib
import importlib
import os
import pickle
import select
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from harness.local_runs import PRELOADED
from harness.native_builds import CACHE
from harness.native_builds import run as run_command
from harness.places import TESTS
from spillway_trainer.launch.rank import die_with_parent

SOURCES = TESTS / "fakes" / "cuda"
MODES = ("eager", "delayed", "reordered")
RANKS_SECONDS = 100.0
Call = tuple[str, str, tuple[Any, ...]]
"""module, name and arguments of a function"""


@cache
def library(packages: Path | None = None) -> Path:
    """The folder of the built libcuda.so.1; each state of the sources and of the headers of CUDA and NCCL has its own.
    The headers are installed with torch in `packages` (None: this Python's packages)."""
    packages = packages or Path(sysconfig.get_path("purelib"))
    headers = next(packages.glob("nvidia/cu*/include/cuda_runtime_api.h"))
    nccl = packages / "nvidia" / "nccl" / "include" / "nccl.h"
    sources = sorted(SOURCES.iterdir())
    text = [path.read_bytes() for path in (headers, nccl, *sources)]
    build = CACHE / f"cuda-{hashlib.sha256(b''.join(text)).hexdigest()[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "cuda-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (build / "libcuda.so.1").exists():
            build.mkdir(exist_ok=True)
            found = build / "building.so"
            # The wheel of CUDA's headers lacks crt/; Triton's wheel has it.
            include = ["-I", str(headers.parent), "-I", str(nccl.parent)]
            include += ["-idirafter", str(packages / "triton/backends/nvidia/include")]
            flags = ["-std=c++17", "-O1", "-g", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
            code = [str(path) for path in sources if path.suffix == ".cpp"]
            run_command("g++", *flags, *include, *code, "-o", str(found), "-ldl", "-lpthread")
            (build / "libnvidia-ml.so.1").symlink_to("libcuda.so.1")
            found.rename(build / "libcuda.so.1")
    return build


def environment() -> dict[str, str]:
    """Environment of a process that is to see the fake."""
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **preloading(library())}


def preloading(build: Path) -> dict[str, str]:
    return {"LD_PRELOAD": f"{build}/libcuda.so.1", "LD_LIBRARY_PATH": str(build)}


def copied(folder: Path, seen_as: Path, packages: str = "") -> dict[str, str]:
    """Copies the fake and its kernels into `folder`; returns the environment of a trainer in a container that sees the
    folder at `seen_as`. `packages`: the image's folder of the trainer's modules, if they are not installed in its
    interpreter."""
    shutil.copytree(library(), folder, symlinks=True)
    (folder / "fakes").mkdir()
    shutil.copy(TESTS / "fakes" / "cuda_kernels.py", folder / "fakes")
    shutil.copy(TESTS / "fakes" / "cuda_trainer" / "sitecustomize.py", folder)
    path = os.pathsep.join(filter(None, (str(seen_as), packages)))
    return {"LD_PRELOAD": f"{seen_as}/libcuda.so.1", "LD_LIBRARY_PATH": str(seen_as), "PYTHONPATH": path}


def run(function: Callable[..., Any], *arguments: Any, **settings: object) -> Any:
    """Calls `function` in a process over the fake. `settings`: devices, mib, mode, seed, delay_us, virtual
    (fakes/cuda/device.h)."""
    return _run([(function.__module__, function.__qualname__, arguments)], settings)[0]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    seconds: float = RANKS_SECONDS,
    may_die: Collection[int] = (),
    **settings: object,
) -> list[Any]:
    """Calls `function(rank, *arguments)` for each rank, in processes that run at the same time; returns their results.
    There are as many devices as ranks, unless `settings` says otherwise.

    If a rank raises or dies, or if `seconds` have passed, the others are killed and the test fails. The result of a
    rank that dies and is in `may_die` is None.
    """
    calls = [(function.__module__, function.__qualname__, (rank, *arguments)) for rank in range(world_size)]
    return _run(calls, {"devices": world_size, **settings}, seconds, may_die)


def _run(
    calls: list[Call], settings: dict[str, object], seconds: float | None = None, may_die: Collection[int] = ()
) -> list[Any]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    names = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    _send(server.stdin, (calls, names, seconds, may_die))
    found, error = _receive(server.stdout)
    assert error is None, error
    return list(found)


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
    header = file.read(8)
    (size,) = struct.unpack("<Q", header) if len(header) == 8 else (1,)
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the process over the fake CUDA has ended: see its output above")
    return pickle.loads(data)


def _serve() -> None:
    """Forks a child for every call of a request, until standard input ends. What children print goes to standard
    error."""
    die_with_parent(int(sys.argv[1]))
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            calls, names, seconds, may_die = _receive(requests)
        except EOFError:
            return
        _send(answers, _answer(calls, names, seconds, may_die))


def _answer(
    calls: list[Call], names: dict[str, str], seconds: float | None, may_die: Collection[int]
) -> tuple[list[Any], str | None]:
    """The results of the calls, and the first error."""
    answers, pids = dict[BinaryIO, int](), list[int]()
    for number, call in enumerate(calls):
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.environ.update(names)
            with os.fdopen(writer, "wb") as file:
                _send(file, _called(*call))
            os._exit(0)
        os.close(writer)
        answers[os.fdopen(reader, "rb")] = number
        pids.append(pid)
    found, error = [None] * len(calls), None
    deadline = None if seconds is None else time.monotonic() + seconds
    while answers and error is None:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = select.select(list(answers), [], [], left)[0]
        if not ready:
            error = f"not done in {seconds} s: {', '.join(_described(calls[number]) for number in answers.values())}"
        for answer in ready:
            number = answers.pop(answer)
            with answer:
                try:
                    found[number], error = _receive(answer)
                except EOFError:
                    error = None if number in may_die else f"{_described(calls[number])}: its process died"
            if error is not None:
                break
    for answer, number in answers.items():
        os.kill(pids[number], signal.SIGKILL)
        answer.close()
    for pid in pids:
        os.waitpid(pid, 0)
    return found, error


def _described(call: Call) -> str:
    module, name, arguments = call
    return f"{module}.{name}{arguments}"


def _called(module: str, name: str, arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    try:
        return getattr(importlib.import_module(module), name)(*arguments), None
    except BaseException:
        return None, traceback.format_exc()


if __name__ == "__main__":
    for name in ("spillway_trainer.environment", *PRELOADED, "cases.device_attempts"):
        importlib.import_module(name)
    gc.freeze()
    _serve()
