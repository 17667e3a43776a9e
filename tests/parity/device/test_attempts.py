"""Whole attempts on a CUDA device have the bits of the CPU, in whatever order its streams run.

The device is a fake (`fakes/cuda`): torch's real allocator, streams, events and autograd threads, with the CPU's
kernels run late. Speed, and the bits of CUDA's own kernels, need a real one (tests/gpu).
"""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cases import device_attempts
from harness import fake_cuda
from harness.depth import FULL

pytestmark = pytest.mark.ci


@cache
def expected(root: Path, technique: str, model: str) -> Any:
    directory = root / f"cpu-{technique}-{model}"
    code, _, _, found = fake_cuda.run(device_attempts.attempt, directory, technique, model, False)
    assert code == 0
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device")


MODELS, MODES = list(device_attempts.MODELS), fake_cuda.MODES
CELLS = (
    [*product(MODELS, device_attempts.TECHNIQUES, MODES)]
    if FULL
    else [(MODELS[i + 1], technique, MODES[i % 3]) for i, technique in enumerate(device_attempts.TECHNIQUES)]
)
"""every technique, order of the streams and model (llama is in other tests, too); at depth all, their product"""


@pytest.mark.parametrize(("model", "technique", "mode"), CELLS)
def test_an_attempt_has_the_cpus_bits_and_no_race(model: str, technique: str, mode: str, root: Path) -> None:
    code, counts, races, found = fake_cuda.run(
        device_attempts.attempt, root / f"{technique}-{model}-{mode}", technique, model, True, mode=mode, seed=1
    )
    assert code == 0
    assert races == []
    assert counts["contexts"] == 1
    assert "kernels that did nothing" not in counts
    device_attempts.assert_same(found, expected(root, technique, model))


@pytest.mark.parametrize("model", MODELS if FULL else ["gpt2"])
def test_what_is_rebuilt_on_the_device_has_the_cpus_bits(model: str, root: Path) -> None:
    _, _, _, then, on_cpu = fake_cuda.run(device_attempts.lean_attempt, root / f"cpu-lean-{model}", model, False)
    code, _, races, found, on_device = fake_cuda.run(
        device_attempts.lean_attempt, root / f"lean-{model}", model, True, mode="delayed", seed=6
    )
    assert (code, races) == (0, [])
    assert on_device == on_cpu > 0
    device_attempts.assert_same(found, then)


@pytest.mark.parametrize("technique", ["disabled", "spread", "states on nvme"] if FULL else ["disabled", "spread"])
def test_int8_moments_have_the_cpus_bits_and_no_race(technique: str, root: Path) -> None:
    options = (1, 4, "int8")
    code, _, _, then = fake_cuda.run(
        device_attempts.attempt, root / f"cpu-int8-{technique}", technique, "llama", False, *options
    )
    assert code == 0
    code, _, races, found = fake_cuda.run(
        device_attempts.attempt, root / f"int8-{technique}", technique, "llama", True, *options, mode="delayed", seed=5
    )
    assert (code, races) == (0, [])
    device_attempts.assert_same(found, then)
    assert any(tensor.dtype.itemsize == 1 and name.startswith("exp_avg.") for name, tensor in found[1].items())


@pytest.mark.parametrize("kind", device_attempts.SWEEPS if FULL else ["one base"])
def test_every_member_of_a_sweep_has_the_cpus_bits_and_no_race(kind: str, root: Path) -> None:
    code, _, _, then = fake_cuda.run(device_attempts.sweep_attempt, root / f"cpu-{kind}", kind, False)
    assert code == 0
    code, counts, races, found = fake_cuda.run(
        device_attempts.sweep_attempt, root / f"sweep-{kind}", kind, True, mode="delayed", seed=4
    )
    assert (code, races, counts["contexts"]) == (0, [], 1)
    for name, member in found.items():
        device_attempts.assert_same(member, then[name])


@pytest.mark.parametrize("technique", ["spread", "weight-stationary"])
def test_a_killed_attempt_resumes_with_the_bits_of_the_whole(technique: str, root: Path) -> None:
    killed = root / f"killed-{technique}"
    made = fake_cuda.run(device_attempts.killed_attempt, killed, technique, "llama", mode="delayed", seed=2)
    assert made >= 2
    code, _, races, found = fake_cuda.run(
        device_attempts.attempt, killed, technique, "llama", True, 2, mode="delayed", seed=3
    )
    assert (code, races) == (0, [])
    device_attempts.assert_same(found, expected(root, technique, "llama"))


def test_a_process_is_kept_near_its_device_before_cuda_has_a_context(tmp_path: Path) -> None:
    assert fake_cuda.run(device_attempts.contexts_before_placement, tmp_path / "run") == [0]
