"""The C++ tests on 64-bit Arm: cross-compiled, run by an emulator; skipped, aloud, where one is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.places import ROOT

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOOLCHAIN = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    f"-DCMAKE_CXX_COMPILER={COMPILER}",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
]
NEON = "instruction set 4"


def run(*command: str) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


def test_neon_has_the_scalar_bits_and_the_exact_sum(tmp_path: Path) -> None:
    for tool in ("cmake", COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    build = str(tmp_path)
    run("cmake", "-S", str(ROOT), "-B", build, "-DSPILLWAY_TESTS=ON", "-DSPILLWAY_WERROR=ON", *TOOLCHAIN)
    run("cmake", "--build", build, "--parallel", "2", "--target", "elementwise_test", "square_sum_test")
    tests = Path(build, "csrc", "tests")
    assert f"{NEON}: the scalar bits" in run(EMULATOR, str(tests / "elementwise_test"))
    assert f"{NEON}: the exact sum" in run(EMULATOR, str(tests / "square_sum_test"))
