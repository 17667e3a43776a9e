"""The built trainer image without a cluster: an attempt on the fake CUDA device without compiler, network and root."""

from __future__ import annotations

from pathlib import Path

import pytest

from cases import device_attempts
from harness import containers, fake_cuda
from testbed import packages
from testbed.processes import run

pytestmark = pytest.mark.full
"""because the first build takes half an hour"""


def test_the_image_starts_a_cuda_attempt_without_compiler_network_root(tmp_path: Path) -> None:
    packages.ensure(packages.IMAGES | packages.NODE)
    settings = containers.unpack(containers.built_trainer(), tmp_path / "bundle")
    assert not [*(tmp_path / "bundle" / "rootfs" / "usr" / "bin").glob("*gcc*")]
    folder = tmp_path / "folder"
    root = folder / "attempt"
    device_attempts.write_contract(root, "spread", "llama")
    given = fake_cuda.copied(folder / "fake", folder / "fake")
    run(["chown", "-R", f"{containers.USER}:{containers.USER}", folder])
    given |= {"HOME": str(folder)}
    environment = [*settings["Env"], *(f"{name}={value}" for name, value in given.items())]
    ended = containers.run_offline(tmp_path / "bundle", [*settings["Entrypoint"], str(root)], environment, folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [*(folder / ".triton").rglob("*.cubin")], "no kernel was compiled"
    code, _, _, expected = fake_cuda.run(device_attempts.attempt, tmp_path / "cpu", "spread", "llama", False)
    assert code == 0
    device_attempts.assert_same(device_attempts.outcome(root, 4), expected)
