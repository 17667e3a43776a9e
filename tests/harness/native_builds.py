"""Builds the C++ tests once for each state of csrc/, the options and the compiler, in a cache outside the tree."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

from harness.places import ROOT
from testbed.layout import cache

CACHE = cache().with_name("native-tests")
MOST_BUILDS = 12
"""The newest builds are kept, up to so many; a build has about 40 MB."""


def run(*command: str) -> str:
    """Runs a command that must succeed; returns its standard output."""
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def built(compiler: str, options: list[str], targets: list[str] | None = None) -> Path:
    """Builds the tests (only `targets`, if given) unless they are in the cache; returns their folder."""
    sources = [ROOT / "CMakeLists.txt", *sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    parts = [run(compiler, "--version"), *options, *(targets or ())]
    parts += [f"{path.relative_to(ROOT)}\n{path.read_text(encoding='utf-8')}" for path in sources]
    build = CACHE / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    done = build / "done"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(build, ignore_errors=True)
            flags = ["-DSPILLWAY_TESTS=ON", "-DSPILLWAY_WERROR=ON", f"-DCMAKE_CXX_COMPILER={compiler}", *options]
            run("cmake", "-S", str(ROOT), "-B", str(build), *flags)
            chosen = ["--target", *targets] if targets else []
            run("cmake", "--build", str(build), "--parallel", "2", *chosen)
            done.touch()
            older = sorted(CACHE.glob("*/done"), key=lambda path: path.stat().st_mtime, reverse=True)[MOST_BUILDS:]
            for path in older:
                shutil.rmtree(path.parent)
    return build / "csrc" / "tests"
