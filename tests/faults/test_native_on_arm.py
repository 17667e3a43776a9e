"""The C++ tests on 64-bit Arm: cross-compiled, run by an emulator; skipped, aloud, where one is missing."""

from __future__ import annotations

import shutil

import pytest

from harness.native_builds import built, run

pytestmark = pytest.mark.ci

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
TOOLCHAIN = [
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
]
NEON = "instruction set 4"


def test_neon_has_the_scalar_bits_and_the_exact_sum() -> None:
    for tool in ("cmake", COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian: g++-aarch64-linux-gnu, qemu-user)")
    tests = built(COMPILER, TOOLCHAIN, ["elementwise_test", "square_sum_test"])
    assert f"{NEON}: the scalar bits" in run(EMULATOR, str(tests / "elementwise_test"))
    assert f"{NEON}: the exact sum" in run(EMULATOR, str(tests / "square_sum_test"))
