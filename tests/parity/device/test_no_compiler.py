"""A trainer where no compiler is, as in the image: Triton's library was built by the lines of the Dockerfile."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import triton

from cases import device_attempts
from harness import fake_cuda
from harness.places import ROOT

pytestmark = pytest.mark.ci
"""it compiles"""


def build_library(packages: Path, scratch: Path) -> None:
    """Of Triton, into the trainer's package below `packages`, as the image's builder does."""
    text = (ROOT / "trainer_image" / "Dockerfile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^RUN (gcc (?:.*\\\n)*.*)$", text, flags=re.MULTILINE)
    places = {"/opt/spillway/lib/python3.*/site-packages": str(packages), "/build": str(scratch)}
    for place, here in places.items():
        line = line.replace(place, here)
    line = line.replace("$(python3-config --includes)", f"-I {sysconfig.get_path('include')}")
    subprocess.run(["sh", "-ec", line], cwd=scratch, check=True)


def test_a_cuda_attempt_needs_no_compiler(tmp_path: Path) -> None:
    packages, root = tmp_path / "packages", tmp_path / "attempt"
    shutil.copytree(ROOT / "trainer_image" / "spillway_trainer", packages / "spillway_trainer")
    installed = Path(triton.__path__[0])
    for one in (installed, installed.with_name(f"triton-{triton.__version__}.dist-info")):
        (packages / one.name).symlink_to(one)
    build_library(packages, tmp_path)
    (tmp_path / "nothing").mkdir()
    path = os.pathsep.join(map(str, (packages, ROOT / "operator", installed.parent)))
    given = fake_cuda.copied(tmp_path / "fake", tmp_path / "fake", path)
    instructions = {name: value for name, value in os.environ.items() if name.startswith("ONEDNN_")}
    environment = {"HOME": str(tmp_path), "PATH": str(tmp_path / "nothing"), **given, **instructions}
    device_attempts.write_contract(root, "spread", "llama")
    interpreter = Path(sys.executable).resolve()  # not that of the environment, which finds this checkout's modules
    command = [str(interpreter), "-P", "-m", "spillway_trainer", str(root)]
    ended = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [*(tmp_path / ".triton").rglob("*.cubin")], "no kernel was compiled"
    code, _, _, expected = fake_cuda.run(device_attempts.attempt, tmp_path / "cpu", "spread", "llama", False)
    assert code == 0
    device_attempts.assert_same(device_attempts.outcome(root, 4), expected)
