"""Activation spilling on = plain autograd, bit by bit: models x answers x lanes x micro-batches.

The part of the seam experiment's matrix (docs/adr/0001) with resident parameters, full training and micro-batch-major
order.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from cases.parity_models import PARITY_MODELS
from harness.parity_harness import ANSWERS, LANES, Outcome, Spilling, train
from spillway_trainer.tiers.spill_file import SpillFile

MICRO_BATCHES = (1, 4)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


@cache
def plain(model: str, micro_batches: int) -> Outcome:
    return train(model, None, micro_batches=micro_batches)


@pytest.mark.sweep
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("answers", ANSWERS)
@pytest.mark.parametrize("model", PARITY_MODELS)
def test_no_answer_changes_a_bit(model: str, answers: str, lanes: str, micro_batches: int) -> None:
    # A small window makes the thread lanes wait; the lazy ones would never be lazy under it.
    window_bytes = 4096 if lanes == "cpu" else 1 << 30
    attach = partial(Spilling, answers=ANSWERS[answers], make_lanes=LANES[lanes], window_bytes=window_bytes)
    outcome = train(model, attach, micro_batches=micro_batches)
    assert outcome.differing(plain(model, micro_batches)) == []
    assert outcome.left_behind == {"device": 0, "host": 0, "nvme": 0}
    if outcome.schedule is not None:
        assert outcome.schedule.races == ()
        assert outcome.schedule.makespan_seconds > 0 or not outcome.moved_bytes


def test_a_real_file_changes_no_bit(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("spill")

    def open_file(_: object, nbytes: int, *, num_threads: int) -> SpillFile:
        return SpillFile(directory, nbytes, num_threads=num_threads)

    attach = partial(Spilling, answers=ANSWERS["nvme"], make_lanes=LANES["cpu"], open_file=open_file)
    outcome = train("tied_dropout", attach, micro_batches=4)
    assert outcome.differing(plain("tied_dropout", 4)) == []
    assert outcome.moved_bytes["nvme_write"] > 0
    assert list(directory.iterdir()) == []
