"""The fake NCCL: torch's own process groups over it give exact results, and what they get wrong is reported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cases import nccl_ranks
from harness import fake_cuda
from harness.depth import FULL

pytestmark = pytest.mark.ci

CELLS = [(2, "delayed", "nccl"), (4, "eager", "nccl"), (2, "eager", "nccl-legacy")]
if FULL:
    CELLS += [(3, "reordered", "nccl"), (4, "delayed", "nccl"), (3, "delayed", "nccl-legacy")]


@pytest.mark.parametrize(("world_size", "mode", "backend"), CELLS)
def test_every_operation_has_the_exact_result(world_size: int, mode: str, backend: str, tmp_path: Path) -> None:
    ranks = fake_cuda.run_ranks(nccl_ranks.collectives, world_size, world_size, tmp_path, backend, mode=mode, seed=1)
    for rank, (found, counts, races) in enumerate(ranks):
        expected = nccl_ranks.expected(rank, world_size)
        assert found.keys() == expected.keys()
        assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
        assert races == []
        assert counts["contexts"] == 1


@pytest.mark.parametrize("mode", fake_cuda.MODES if FULL else ["eager"])
def test_a_result_that_is_read_without_a_wait_is_a_race(mode: str, tmp_path: Path) -> None:
    (tmp_path / "waits").mkdir()
    for _, races in fake_cuda.run_ranks(nccl_ranks.asynchronous, 2, 2, tmp_path, False, mode=mode):
        assert len(races) == 1
        assert "read after write: mul " in races[0]
        assert "is not ordered after nccl all-gather of 6 float32" in races[0]
    for doubled, races in fake_cuda.run_ranks(nccl_ranks.asynchronous, 2, 2, tmp_path / "waits", True, mode=mode):
        assert races == []
        assert torch.equal(doubled, 2 * torch.cat([nccl_ranks.numbers(rank, 6) for rank in range(2)]))


@pytest.mark.parametrize(("policy", "mode"), [("float32", "delayed"), ("kept", "reordered")])
def test_fsdp2_has_the_parameters_of_one_process_and_no_race(policy: str, mode: str, tmp_path: Path) -> None:
    expected = nccl_ranks.undivided(2)
    for found, counts, races in fake_cuda.run_ranks(nccl_ranks.divided, 2, 2, tmp_path, policy, mode=mode, seed=4):
        assert races == []
        assert "kernels that did nothing" not in counts
        assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
        gathers_of_backward = 0 if policy == "kept" else 2 * 3
        assert counts["nccl reduce-scatter"] == 2 * 3
        assert counts["nccl all-gather"] == 2 * 3 + gathers_of_backward + 6  # 6: of the state_dict


def test_fsdp2_without_the_waits_of_its_streams_is_a_race(tmp_path: Path) -> None:
    for _, _, races in fake_cuda.run_ranks(nccl_ranks.divided, 2, 2, tmp_path, "bfloat16, without waits"):
        assert any("read after write: split_with_sizes_copy" in race and "nccl all-gather" in race for race in races)


def test_groups_on_two_streams_do_not_mix(tmp_path: Path) -> None:
    offsets = torch.arange(20.0)[:, None]
    for found, counts, races in fake_cuda.run_ranks(nccl_ranks.two_groups, 2, 2, tmp_path, mode="delayed", seed=3):
        for number, sums in enumerate(found):
            expected = nccl_ranks.added([nccl_ranks.numbers(rank + 10 * number, 4096) + offsets for rank in range(2)])
            assert torch.equal(sums, expected)
        assert (races, counts["nccl all-reduce"], counts["nccl all-reduce bytes"]) == ([], 40, 40 * 4 * 4096)


def test_a_group_of_some_ranks_is_split_off(tmp_path: Path) -> None:
    for rank, (found, counts) in enumerate(fake_cuda.run_ranks(nccl_ranks.subgroups, 4, 4, tmp_path)):
        assert torch.equal(found, nccl_ranks.added([nccl_ranks.numbers(peer, 10) for peer in range(rank % 2, 4, 2)]))
        assert (counts["nccl split"], counts["nccl communicators"]) == (2, 2)


def test_one_group_on_two_streams_keeps_the_order_of_its_calls(tmp_path: Path) -> None:
    ranks = fake_cuda.run_ranks(nccl_ranks.one_group_on_two_streams, 2, 2, tmp_path, mode="reordered", seed=2)
    values = [torch.stack([nccl_ranks.numbers(rank + 10 * i, 512) for i in range(20)]) for rank in range(2)]
    for found, races in ranks:
        assert races == []
        assert torch.equal(found, values[0] + values[1])


def test_work_is_retired_and_its_memory_is_used_again_without_a_race(tmp_path: Path) -> None:
    assert fake_cuda.run_ranks(nccl_ranks.retired, 2, 2, tmp_path, mode="delayed") == [(True, [])] * 2


def test_operations_of_unequal_sizes_are_an_error_that_names_both(tmp_path: Path) -> None:
    for error in fake_cuda.run_ranks(nccl_ranks.mismatched, 2, 2, tmp_path):
        assert "invalid usage" in error
        assert "rank 0 all-gather of 512 float32 met rank 1 all-gather of 256 float32" in error


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    *found, dead = fake_cuda.run_ranks(nccl_ranks.left_alone, 3, 3, tmp_path, False, may_die=[2])
    assert dead is None
    for error, seconds in found:
        assert "NCCL" in error
        assert seconds < 10


def test_a_peer_that_is_silent_is_an_error_after_the_time_limit(tmp_path: Path) -> None:
    (error, seconds), dead = fake_cuda.run_ranks(nccl_ranks.left_alone, 2, 2, tmp_path, True, may_die=[1])
    assert dead is None
    assert "timed out" in error or "aborted" in error
    assert 3 <= seconds < 20


def test_a_rank_gives_up_if_the_others_never_come(tmp_path: Path) -> None:
    (error,) = fake_cuda.run_ranks(nccl_ranks.alone, 1, tmp_path)
    assert "returned 6: rank 0 of 2: not all ranks have come within 1 s" in error


def test_an_abort_ends_pending_operations(tmp_path: Path) -> None:
    seconds, _ = fake_cuda.run_ranks(nccl_ranks.aborted, 2, 2, tmp_path, mode="delayed")
    assert seconds < 5


def test_one_process_can_be_one_rank_of_many_where_memory_is_counted() -> None:
    counts = fake_cuda.run(nccl_ranks.one_of_many, 64, virtual=1, mib=4096)
    assert counts["nccl launches"] == 3
    for name, blocks in (("all-gather", 63), ("reduce-scatter", 63), ("all-reduce", 2 * 63 / 64)):
        assert counts[f"nccl {name}"] == 1
        assert counts[f"nccl {name} bytes"] == blocks * (4 << 20)


def test_fsdp2_runs_at_full_size_as_one_rank_of_many() -> None:
    peak, counts = fake_cuda.run(nccl_ranks.divided_among_many, 64, virtual=1, mib=65536)
    layer = 128 << 20
    assert 2 * layer < peak < 6 * layer
    for name, number in (("all-gather", 2 * 2 * 6), ("reduce-scatter", 2 * 6)):
        assert counts[f"nccl {name}"] == number
        assert counts[f"nccl {name} bytes"] == number * layer // 64 * 63


def test_ranks_meet_on_the_interface_that_is_named() -> None:
    found = fake_cuda.run(nccl_ranks.on_interfaces, ["lo", "=lo", "eth9,lo", "nothing", "=l"])
    assert found == [None, None, None, *["the interface for the ranks to meet has no address"] * 2]


def test_a_rank_that_raises_or_takes_too_long_ends_the_others() -> None:
    with pytest.raises(AssertionError, match="one rank has failed"):
        fake_cuda.run_ranks(nccl_ranks.raising, 2)
    with pytest.raises(AssertionError, match=r"not done in 0.5 s: cases.nccl_ranks.raising\(0,\)"):
        fake_cuda.run_ranks(nccl_ranks.raising, 1, seconds=0.5)
