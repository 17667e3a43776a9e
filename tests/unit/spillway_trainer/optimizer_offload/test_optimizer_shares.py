"""Chunks cover the parameters, and the assignment meets the shares within one chunk, evenly."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_trainer.optimizer_offload.assign import (
    STRIDES,
    Path,
    Shares,
    assign,
    assign_by_size,
    assign_chunks,
    cut,
    stride,
)


@st.composite
def splits(draw: st.DrawFn) -> Shares:
    weights = draw(st.lists(st.floats(0, 1), min_size=3, max_size=3).filter(lambda w: sum(w) > 1e-3))
    cpu, streamed = weights[0] / sum(weights), weights[1] / sum(weights)
    return Shares(cpu, streamed, max(0.0, 1.0 - cpu - streamed))


SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=200)


@given(st.integers(1, 10_000), st.integers(1, 3000))
def test_chunks_cover_a_parameter_once_and_in_order(num_parameters: int, chunk_parameters: int) -> None:
    covered = [
        index for offset, size in cut(num_parameters, chunk_parameters) for index in range(offset, offset + size)
    ]
    assert covered == list(range(num_parameters))


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 5000), min_size=1, max_size=9), splits())
def test_a_small_parameter_is_one_chunk_of_its_own(num_parameters: dict[str, int], shares: Shares) -> None:
    chunks = assign_chunks(num_parameters, 1000, shares)
    small = [chunk for chunk in chunks if num_parameters[chunk.parameter] <= 1000]
    assert {chunk.parameter: chunk.size for chunk in small} == {k: n for k, n in num_parameters.items() if n <= 1000}


@given(SIZES, splits())
def test_every_share_is_met_within_one_chunk_at_every_prefix(sizes: list[int], shares: Shares) -> None:
    taken, total = dict.fromkeys(Path, 0), 0
    for size, path in zip(sizes, assign(sizes, shares), strict=True):
        taken[path] += size
        total += size
        assert all(abs(shares.of(p) * total - taken[p]) <= max(sizes) * (1 + 1e-9) for p in Path)


@given(SIZES, splits())
def test_a_share_of_zero_gets_nothing(sizes: list[int], shares: Shares) -> None:
    paths = set(assign(sizes, Shares(shares.cpu, 1.0 - shares.cpu, 0.0)))
    assert Path.RESIDENT not in paths


def test_equal_shares_alternate_in_update_order() -> None:
    paths = assign([1] * 100, Shares(0.5, 0.5, 0.0))
    assert all(first is not second for first, second in itertools.pairwise(paths))


def test_two_thirds_and_one_third_interleave_with_period_three() -> None:
    paths = assign([10] * 99, Shares(2 / 3, 1 / 3, 0.0))
    assert {paths[i : i + 3].count(Path.CPU) for i in range(0, 99, 3)} == {2}


@pytest.mark.parametrize("shares", [(0.5, 0.6, 0.0), (1.2, -0.2, 0.0), (0.0, 0.0, 0.0)])
def test_shares_that_are_no_split_are_rejected(shares: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="sum to 1"):
        Shares(*shares)


@given(SIZES, splits())
def test_small_chunks_are_the_cpus_where_its_share_has_room(sizes: list[int], shares: Shares) -> None:
    paths = assign_by_size(sizes, shares)
    small = [path for size, path in zip(sizes, paths, strict=True) if 2 * size < max(sizes)]
    if sum(size for size in sizes if 2 * size < max(sizes)) <= shares.cpu * sum(sizes) and shares.streamed:
        assert set(small) <= {Path.CPU}
    else:
        assert paths == assign(sizes, shares)


@given(SIZES, splits())
def test_shares_are_met_within_one_chunk_whatever_the_chunk_sizes(sizes: list[int], shares: Shares) -> None:
    taken = dict.fromkeys(Path, 0)
    for size, path in zip(sizes, assign_by_size(sizes, shares), strict=True):
        taken[path] += size
    assert all(abs(shares.of(p) * sum(sizes) - taken[p]) <= max(sizes) * (1 + 1e-9) for p in Path)


@pytest.mark.parametrize("every", STRIDES)
def test_a_stride_streams_every_kth_chunk_and_the_cpu_updates_the_others(every: int) -> None:
    paths = stride(every)([1, 2, 3] * 20, Shares(1.0 - 1.0 / every, 1.0 / every, 0.0))
    assert [index for index, path in enumerate(paths, 1) if path is Path.STREAMED] == list(range(every, 61, every))
    assert set(paths) == {Path.CPU, Path.STREAMED}


@pytest.mark.parametrize("every", [-2, 0, 1, 11])
def test_a_stride_that_nobody_ran_is_rejected(every: int) -> None:
    with pytest.raises(ValueError, match=f"stride {every}: must be from 2 to 10"):
        stride(every)


def test_chunks_by_stride_cover_the_same_parameters() -> None:
    sizes, shares = {"a": 10_000, "b": 300}, Shares(0.5, 0.5, 0.0)
    ours, theirs = assign_chunks(sizes, 1000, shares), assign_chunks(sizes, 1000, shares, by=stride(2))
    assert [(c.parameter, c.offset, c.size) for c in ours] == [(c.parameter, c.offset, c.size) for c in theirs]
    assert [c.path for c in theirs] == [Path.CPU, Path.STREAMED] * 5 + [Path.CPU]
