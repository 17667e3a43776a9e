"""The C++ tests of csrc/tests, plain in Release and under the address, undefined-behaviour and thread sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.depth import FULL
from harness.native_builds import built
from harness.places import ROOT

pytestmark = pytest.mark.ci

COMPILER = os.environ.get("CXX", "c++")


IO_OPERATIONS = "1000000" if FULL else "10000"
"""with random faults, in io_test"""


def run(*command: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in ended.stderr:
        pytest.skip("this kernel's address layout is not one that the thread sanitizer knows")
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    if "silent errors" in ended.stdout:
        print(f"\n{ended.stdout}", end="")


def check_that_it_links(directory: Path, sanitizers: str) -> None:
    source = directory / "probe.cpp"
    source.write_text("int main() {}\n")
    command = [COMPILER, f"-fsanitize={sanitizers}", str(source), "-o", str(directory / "probe")]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{COMPILER} has no runtime library for -fsanitize={sanitizers}")


@pytest.mark.parametrize(
    "sanitizers",
    [pytest.param("", marks=pytest.mark.full), "address,undefined", "thread"],
    ids=["plain", "address,undefined", "thread"],
)
def test_native_tests_pass_without_a_warning(tmp_path: Path, sanitizers: str) -> None:
    for tool in ("cmake", COMPILER):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: the C++ tests cannot be built")
    if sanitizers:
        check_that_it_links(tmp_path, sanitizers)
    folder = built(COMPILER, [f"-DSPILLWAY_SANITIZE={sanitizers}"])
    tests = sorted(folder.glob("*_test"))
    assert [test.name for test in tests] == sorted(path.stem for path in (ROOT / "csrc/tests").glob("*_test.cpp"))
    for test in tests:
        run(str(test), *([IO_OPERATIONS] if test.name == "io_test" else []))


def test_without_a_compiler_nothing_is_built_and_nothing_fails(tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    make = tmp_path / "bin"
    make.mkdir()
    for tool in ("make", "ninja"):
        if (path := shutil.which(tool)) is not None:
            (make / tool).symlink_to(path)
    environment = {"PATH": str(make), "HOME": str(tmp_path)}
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path / "build")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert "no C++ compiler; the native library is left out" in ended.stdout
    subprocess.run([cmake, "--build", str(tmp_path / "build")], check=True, capture_output=True, env=environment)
    subprocess.run(
        [cmake, "--install", str(tmp_path / "build"), "--prefix", str(tmp_path / "to")], check=True, env=environment
    )
    assert list(tmp_path.glob("to/**/*.so")) == []
