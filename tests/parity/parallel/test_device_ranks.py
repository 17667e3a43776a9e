"""Ranks with a CUDA device each have the bits of ranks on CPUs. The devices and NCCL are fakes, as in
parity/device/test_attempts.py."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cases import device_attempts, device_ranks
from harness import fake_cuda, rank_runs
from harness.depth import FULL
from spillway_trainer.launch.launcher import free_ports

pytestmark = pytest.mark.ci

STEPS = 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def run(root: Path, world_size: int, strategy: str, placement: str | None, *, on_device: bool, **given: Any) -> Any:
    """Returns what each rank returned, and the outcome."""
    settings = {name: given.pop(name) for name in ("mode", "seed", "may_die") if name in given}
    root.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    found = fake_cuda.run_ranks(
        device_ranks.attempt_with, world_size, world_size, port, root, strategy, placement,
        {"on_device": on_device, **given}, **settings,
    )  # fmt: skip
    return found, device_attempts.outcome(root, STEPS)


@cache
def on_cpus(root: Path, world_size: int, strategy: str) -> Any:
    found, outcome = run(root / f"cpu-{world_size}-{strategy}", world_size, strategy, None, on_device=False)
    assert [code for code, *_ in found] == [0] * world_size
    return outcome


RESIDENT = [None, *(name for name in rank_runs.PLACEMENTS if name not in rank_runs.STREAMED)]
PLACEMENTS = {
    "Fsdp": RESIDENT,
    "Zero2": RESIDENT,
    "Ddp": [None, *rank_runs.PLACEMENTS],
}
FEWER = {
    "Fsdp": [None, "half and half, NVMe", "interleaved, mixed"],
    "Zero2": ["interleaved, mixed"],
    "Ddp": [None, "interleaved, mixed"],
}
CELLS = [
    (strategy, world, placement, fake_cuda.MODES[number % 3], ("None", "Forward")[strategy != "Zero2" and number % 2])
    for strategy, placements in (PLACEMENTS if FULL else FEWER).items()
    for world in ((2, 4) if FULL else (2,))
    for number, placement in enumerate(placements)
]


@pytest.mark.parametrize(("strategy", "world_size", "placement", "mode", "overlap"), CELLS)
def test_ranks_on_devices_have_the_bits_of_ranks_on_cpus_and_no_race(
    strategy: str, world_size: int, placement: str | None, mode: str, overlap: str, root: Path
) -> None:
    where = root / f"{strategy}-{world_size}-{placement}-{mode}-{overlap}"
    found, outcome = run(where, world_size, strategy, placement, on_device=True, mode=mode, seed=1, overlap=overlap)
    for code, counts, races in found:
        assert (code, races) == (0, [])
        assert counts["contexts"] == 1
        assert "kernels that did nothing" not in counts
        assert "launches on a stream of another device" not in counts
    device_attempts.assert_same(outcome, on_cpus(root, world_size, strategy))


def changed_ranks(root: Path, strategy: str, ranks: tuple[int, int], *, on_device: bool) -> Any:
    """Trains two steps with ranks[0] ranks and two more with ranks[1]; returns the races and the outcome."""
    races, given = [], {"on_device": on_device, "mode": "delayed", "seed": 3}
    for epoch, world_size in enumerate(ranks, start=1):
        changes = {"steps: 4": f"steps: {2 * epoch}", "name: Cosine, warmupSteps: 1": "name: Constant"}
        found, outcome = run(root, world_size, strategy, "interleaved, mixed", epoch=epoch, changes=changes, **given)
        assert [code for code, *_ in found] == [0] * world_size
        races += [race for *_, of_rank in found for race in of_rank]
    return races, outcome


@pytest.mark.parametrize("ranks", [(2, 4), (4, 2)] if FULL else [(2, 4)])
@pytest.mark.parametrize("strategy", ["Fsdp", "Zero2"] if FULL else ["Fsdp"])
def test_a_run_resumes_with_another_number_of_devices(strategy: str, ranks: tuple[int, int], root: Path) -> None:
    races, found = changed_ranks(root / f"{strategy} {ranks} devices", strategy, ranks, on_device=True)
    _, then = changed_ranks(root / f"{strategy} {ranks} cpus", strategy, ranks, on_device=False)
    assert races == []
    device_attempts.assert_same(found, then)


@pytest.mark.parametrize("strategy", PLACEMENTS)
@pytest.mark.parametrize("dies_at", [3, 30, 61] if FULL else [30])
def test_a_rank_that_dies_ends_the_others_which_say_whom_they_waited_for(
    dies_at: int, strategy: str, root: Path
) -> None:
    where = root / f"{strategy} dies at {dies_at}"
    # Where Ddp waits for the dead rank in NCCL, torch ends this one (local/test_launch.py).
    may_die = (0, 1) if (strategy, dies_at) == ("Ddp", 61) else (1,)
    (survivor, died), _ = run(
        where, 2, strategy, "interleaved, mixed", on_device=True, dies_at=dies_at, may_die=may_die
    )
    assert died is None
    if survivor is None:
        return
    assert survivor[0] == 1
    ended = json.loads((where / "termination-1.json").read_text())
    assert ended["follower"] and "another rank ended" in ended["message"], ended


MODELS = {
    "float32": {"compute: bfloat16": "compute: float32"},
    "adapters": {'tieWordEmbeddings: true, dropout: "0.1"}': "tieWordEmbeddings: false}\n    lora: {rank: 2}"},
    "float32 wire": {"gradientReduce: bfloat16": "gradientReduce: float32"},
    "uneven": {"hiddenSize: 32": "hiddenSize: 40", "intermediateSize: 80": "intermediateSize: 83"}
    | {"vocabSize: 300": "vocabSize: 301"},
}


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(strategy, name) for strategy in PLACEMENTS for name in MODELS if (strategy, name) != ("Zero2", "adapters")]
    if FULL
    else [("Fsdp", "adapters"), ("Zero2", "uneven")],
)
def test_every_kind_of_model_has_the_bits_of_ranks_on_cpus(strategy: str, name: str, root: Path) -> None:
    outcomes = []
    for on_device in (True, False):
        where = root / strategy / name / str(on_device)
        found, outcome = run(where, 2, strategy, "interleaved, mixed", on_device=on_device, changes=MODELS[name])
        assert [(code, races) for code, _, races in found] == [(0, [])] * 2
        outcomes.append(outcome)
    device_attempts.assert_same(*outcomes)


@pytest.mark.parametrize(
    "defect", device_ranks.DEFECTS if FULL else ["gather early", "collect early", "exchange early"]
)
def test_the_judge_finds_missing_waits_between_ranks(defect: str, root: Path) -> None:
    where = root / f"defect-{defect}"
    others = {"exchange early": "Ddp", "update early": "Ddp", "complete early": "Zero2"}
    strategy = others.get(defect, "Fsdp")
    found, _ = run(
        where, 2, strategy, "interleaved, mixed", on_device=True, mode="delayed", seed=2, defect=defect,
        overlap="None" if strategy == "Zero2" else "Forward",
    )  # fmt: skip
    assert any(races for *_, races in found), defect
