"""The step loop's own decisions, with a model of one parameter."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.no_techniques import NoTechniques
from spillway.errors import Fenced, NonFinite, Preempted
from spillway.metrics import Phase
from spillway_trainer.checkpoints.directory import CheckpointNotWritten
from spillway_trainer.corpus.data import Batch
from spillway_trainer.optimizer.loss_scale import LossScaler, ScaleRule
from spillway_trainer.optimizer.schedule import LearningRate
from spillway_trainer.ranks import ONE_RANK, World
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.segments import Position
from spillway_trainer.trainer import (
    LoopSettings,
    Run,
    RunProgress,
    StopRequest,
    Stopwatch,
    Written,
    clip_factor_of,
    train,
)


class OneWeight(nn.Module):
    """loss = weight x number of tokens / num_tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return self.weight * tokens_BT.numel() / num_tokens


class CountingOptimizer:
    """Reports the norms it is given, and what the loop asked for."""

    def __init__(self, norms: list[float]) -> None:
        self.norms, self.calls, self.begun = norms, list[tuple[Any, ...]](), list[float]()

    def arrived(self) -> Collection[str]:
        return ()

    def gradients(self) -> Iterator[Tensor]:
        return iter(())

    def norm(self) -> float:
        return self.norms.pop(0) if self.norms else 1.0

    def begin(self, learning_rate: float, gradient_scale: float = 1.0) -> None:
        self.begun.append(gradient_scale)

    def step(self, learning_rate: float, gradient_scale: float) -> None:
        self.calls.append(("step", learning_rate, gradient_scale))

    def skip(self) -> None:
        self.calls.append(("skip",))

    def flush(self) -> None:
        self.calls.append(("flush",))


class NumberedBatches:
    """Sample i is a sequence of four tokens i; remembers which were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def batch(self, samples: range) -> Batch:
        self.asked += samples
        tokens = torch.tensor([[sample] * 4 for sample in samples])
        return Batch(tokens, tokens, tokens.numel())

    def num_unmasked(self, samples: range) -> int:
        return 4 * len(samples)

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        yield Batch(torch.zeros(1, 4), torch.zeros(1, 4), 4)


class ListedCheckpoints:
    def __init__(self, reject: bool = False) -> None:
        self.steps: list[int] = []
        self.reject = reject

    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        if self.reject:
            return Written(progress.step, missed=CheckpointNotWritten("the disk is full"))
        self.steps.append(progress.step)
        return Written(progress.step, 1, 0.5, 0.5)

    def written(self, *, wait: bool) -> Written | None:
        return None


class Loop:
    """A run whose parts can be looked at."""

    def __init__(
        self,
        path: Path,
        norms: list[float] | None = None,
        reject: bool = False,
        loss_scale: LossScaler | None = None,
        loss: float | None = None,
        **settings: Any,
    ) -> None:
        self.optimizer = CountingOptimizer(norms or [])
        self.batches = NumberedBatches()
        self.checkpoints = ListedCheckpoints(reject)
        self.progress, self.stop = RunProgress(), StopRequest()
        defaults: dict[str, Any] = {
            "num_steps": 5, "micro_batch_size": 2, "num_micro_batches": 3, "gradient_clipping": None,
            "skip_non_finite": True, "checkpoint_every": 2, "evaluate_every": 0,
        }  # fmt: skip
        self.settings = LoopSettings(**{**defaults, **settings})
        self.run = Run(
            model=OneWeight() if loss is None else Loss(loss),
            loss_scale=loss_scale or LossScaler(),
            optimizer=self.optimizer,  # type: ignore[arg-type]
            techniques=NoTechniques(),
            position=Position(0),
            batches=self.batches,  # type: ignore[arg-type]
            learning_rate=LearningRate("Constant", 0.5, 5),
            checkpoints=self.checkpoints,
            recorder=Recorder(path / "run.jsonl"),
        )

    def train(self) -> None:
        train(self.run, self.settings, self.progress, self.stop)


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "run.jsonl").read_text().splitlines()]


def test_every_sample_is_consumed_once_and_in_order(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train()
    assert loop.batches.asked == list(range(5 * 2 * 3))
    assert loop.progress == RunProgress(step=5, samples=30)


def test_checkpoints_come_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train()
    assert loop.checkpoints.steps == [2, 4, 5]


def test_a_step_that_is_not_finite_is_skipped_by_default(tmp_path: Path) -> None:
    loop = Loop(tmp_path, norms=[1.0, math.inf], num_steps=2)
    loop.train()
    assert loop.optimizer.calls == [("step", 0.5, 1.0), ("skip",), ("flush",)]


@pytest.mark.parametrize(
    ("evaluate_every", "expected"),
    [(0, ["step", "step", "flush", "step", "flush"]), (3, ["step", "step", "flush", "step", "flush", "flush"])],
)
def test_only_checkpoints_and_evaluations_wait_for_the_update(
    evaluate_every: int, expected: list[str], tmp_path: Path
) -> None:
    loop = Loop(tmp_path, num_steps=3, checkpoint_every=2, evaluate_every=evaluate_every)
    loop.train()
    assert [name for name, *_ in loop.optimizer.calls] == expected


def test_a_step_that_is_not_finite_ends_the_run_when_asked(tmp_path: Path) -> None:
    loop = Loop(tmp_path, norms=[1.0, math.nan], skip_non_finite=False)
    with pytest.raises(NonFinite, match="step 2"):
        loop.train()
    assert loop.progress.step == 1


SCALED = ScaleRule(1024.0, growth_interval=1, minimum=256.0)


class Loss(OneWeight):
    """Whose losses are told."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, *inputs: Any) -> Tensor:
        return self.weight.sum() * 0.0 + self.loss


def test_the_update_takes_the_loss_scale_out_and_the_norm_has_none(tmp_path: Path) -> None:
    loop = Loop(tmp_path, [1024.0, 8192.0], num_steps=2, gradient_clipping=2.0, loss_scale=LossScaler(SCALED))
    loop.train()
    assert loop.optimizer.begun == [1 / 1024, 1 / 2048]
    assert loop.optimizer.calls[:2] == [("step", 0.5, 1 / 1024), ("step", 0.5, 2.0 / (4.0 + 1e-6) / 2048)]


@pytest.mark.parametrize("skip_non_finite", [True, False])
def test_float16_overflow_skips_the_step_whatever_the_non_finite_policy(skip_non_finite: bool, tmp_path: Path) -> None:
    scale = LossScaler(SCALED)
    loop = Loop(tmp_path, [math.inf, 1.0], num_steps=2, skip_non_finite=skip_non_finite, loss_scale=scale)
    loop.train()
    assert loop.optimizer.calls == [("skip",), ("step", 0.5, 1 / 512), ("flush",)]
    assert scale.value == 1024.0, "halved, and doubled again"


@pytest.mark.parametrize("skip_non_finite", [True, False])
def test_the_policy_decides_about_a_loss_that_is_not_finite_in_float16_too(
    skip_non_finite: bool, tmp_path: Path
) -> None:
    scale = LossScaler(SCALED)
    loop = Loop(tmp_path, [math.nan], num_steps=1, skip_non_finite=skip_non_finite, loss_scale=scale, loss=math.nan)
    if skip_non_finite:
        loop.train()
        assert (loop.optimizer.calls[0], scale.value) == (("skip",), 512.0)
    else:
        with pytest.raises(NonFinite, match=r"step 1: loss nan.* start a new job with .*nonFinite: SkipStep"):
            loop.train()


@pytest.mark.parametrize("skip_non_finite", [True, False])
def test_gradients_that_overflow_at_the_least_scale_end_the_run(skip_non_finite: bool, tmp_path: Path) -> None:
    norms, scale = [math.inf] * 3, LossScaler(SCALED)
    loop = Loop(tmp_path, norms, skip_non_finite=skip_non_finite, loss_scale=scale, checkpoint_every=100)
    with pytest.raises(NonFinite, match=r"step 3: .*at the smallest loss scale, 256: .*compute: bfloat16") as ended:
        loop.train()
    assert "lossScale.minimum" in str(ended.value)
    assert "learning rate" not in str(ended.value), "nobody knows that it is at fault"
    assert loop.optimizer.calls == [("skip",), ("skip",)]


@pytest.mark.parametrize(("loss", "said"), [(math.nan, "the loss itself is not finite"), (1.0, "no smaller scale is")])
def test_failure_at_scale_1_names_its_cause_and_offers_no_smaller_scale(loss: float, said: str, tmp_path: Path) -> None:
    scale = LossScaler(ScaleRule(1.0, 2000, 1.0))
    with pytest.raises(NonFinite, match=f"at the smallest loss scale, 1: {said}.*compute: bfloat16") as ended:
        Loop(tmp_path, [math.inf], loss_scale=scale, loss=loss).train()
    assert "lossScale.minimum" not in str(ended.value) and "in a new job" in str(ended.value)


def test_the_clip_factor_reaches_the_optimizer(tmp_path: Path) -> None:
    loop = Loop(tmp_path, norms=[8.0], num_steps=1, gradient_clipping=2.0)
    loop.train()
    assert loop.optimizer.calls[0] == ("step", 0.5, 2.0 / (8.0 + 1e-6))


@pytest.mark.parametrize(("norm", "limit", "factor"), [(0.5, 1.0, 1.0), (4.0, None, 1.0), (4.0, 1.0, 1 / 4.000001)])
def test_clip_factor_never_grows_gradients(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor_of(norm, limit) == factor


def test_a_step_records_what_all_threads_of_the_process_took_of_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100, 3))
    monkeypatch.setattr(time, "process_time", lambda: float(next(clock)))
    Loop(tmp_path, num_steps=2).train()
    assert [event["cpu_seconds"] for event in events_of(tmp_path) if event["event"] == "step"] == [3.0, 3.0]


def test_a_stop_request_commits_the_step_under_way_and_ends_as_preempted(tmp_path: Path) -> None:
    loop = Loop(tmp_path, checkpoint_every=100)
    loop.stop.requested = True
    with pytest.raises(Preempted) as stopped:
        loop.train()
    assert loop.checkpoints.steps == [1]
    assert stopped.value.details == {"savedStep": 1}


def test_a_stop_request_in_the_last_step_is_completion(tmp_path: Path) -> None:
    loop = Loop(tmp_path, num_steps=1)
    loop.stop.requested = True
    loop.train()
    assert loop.checkpoints.steps == [1]


class TwoRanks:
    """The other rank always says the same as this one."""

    world = World(rank=0, size=2)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return [list(values), list(values)]


class StoppingBatches(NumberedBatches):
    """SIGTERM comes in the middle of an evaluation."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        self.stop.requested = True
        return super().evaluation_batches(micro_batch_size)


class StoppingCheckpoints(ListedCheckpoints):
    """SIGTERM comes while a checkpoint is written."""

    def __init__(self, stop: StopRequest, reject: bool = False) -> None:
        super().__init__(reject)
        self.stop = stop

    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        self.stop.requested = True
        return super().commit(progress, behind=behind)


@pytest.mark.parametrize("ranks", [ONE_RANK, TwoRanks()], ids=["one rank", "two ranks"])
def test_a_stop_request_in_an_evaluation_costs_no_further_step(tmp_path: Path, ranks: Any) -> None:
    loop = Loop(tmp_path, evaluate_every=2, checkpoint_every=100)
    loop.run = replace(loop.run, batches=StoppingBatches(loop.stop), ranks=ranks)  # type: ignore[arg-type]
    with pytest.raises(Preempted):
        loop.train()
    assert loop.checkpoints.steps == [2]


@pytest.mark.parametrize("ranks", [ONE_RANK, TwoRanks()], ids=["one rank", "two ranks"])
def test_stop_request_during_a_checkpoint_ends_with_that_checkpoint(tmp_path: Path, ranks: Any) -> None:
    loop = Loop(tmp_path, checkpoint_every=2)
    checkpoints = StoppingCheckpoints(loop.stop)
    loop.run = replace(loop.run, checkpoints=checkpoints, ranks=ranks)
    with pytest.raises(Preempted) as stopped:
        loop.train()
    assert (checkpoints.steps, stopped.value.details) == ([2], {"savedStep": 2})


def test_a_stop_request_while_a_checkpoint_is_rejected_takes_the_next_one(tmp_path: Path) -> None:
    loop = Loop(tmp_path, checkpoint_every=2)
    loop.run = replace(loop.run, checkpoints=StoppingCheckpoints(loop.stop, reject=True))
    with pytest.raises(CheckpointNotWritten):  # that of step 3: a stop without a checkpoint is none
        loop.train()
    assert loop.progress.step == 3


@pytest.fixture
def listening() -> Iterator[StopRequest]:
    stop, before = StopRequest(), signal.getsignal(signal.SIGTERM)
    stop.listen()
    yield stop
    signal.signal(signal.SIGTERM, before)


def test_sigterm_in_training_waits_for_the_end_of_the_step(listening: StopRequest) -> None:
    listening.wait_for_step()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert listening.requested


def test_sigterm_before_training_ends_the_attempt_at_once(listening: StopRequest) -> None:
    with pytest.raises(Preempted, match="before training resumed"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_rejected_checkpoint_in_mid_run_is_recorded_and_training_goes_on(tmp_path: Path) -> None:
    loop = Loop(tmp_path, num_steps=3, reject=True)
    with pytest.raises(CheckpointNotWritten):  # the last one is not optional
        loop.train()
    assert loop.progress.step == 3
    assert "checkpoint_missed" in (tmp_path / "run.jsonl").read_text()


class BehindCheckpoints(ListedCheckpoints):
    """Each takes until the `polls`-th step after it, unless somebody waits; then it ends as `ends` says."""

    def __init__(
        self, polls: int = 1, ends: dict[int, Exception] | None = None, stop: StopRequest | None = None
    ) -> None:
        super().__init__()
        self.polls, self.ends, self.stop = polls, ends or {}, stop
        self.writing: int | None = None
        self.asked = 0

    def commit(self, progress: RunProgress, *, behind: bool) -> Written | None:
        assert self.writing is None, "one at a time"
        if not behind:
            return super().commit(progress, behind=behind)
        if self.stop is not None:
            self.stop.requested = True
        self.writing, self.asked = progress.step, 0
        return None

    def written(self, *, wait: bool) -> Written | None:
        self.asked += 1
        if self.writing is None or (self.asked < self.polls and not wait):
            return None
        step, self.writing = self.writing, None
        error = self.ends.get(step)
        if isinstance(error, CheckpointNotWritten):
            return Written(step, missed=error)
        if error is not None:
            raise error
        self.steps.append(step)
        return Written(step, 1, 2.0, 0.25)


def behind(loop: Loop, checkpoints: BehindCheckpoints) -> list[str]:
    """Trains, and says what run.jsonl has, in its order."""
    loop.run = replace(loop.run, checkpoints=checkpoints)
    path = Path(loop.run.recorder._file.name).parent
    try:
        loop.train()
    finally:
        assert checkpoints.writing is None, "nothing is left behind"
    return order_of(path)


def order_of(path: Path) -> list[str]:
    return [f"{event['event']} {event['step']}" for event in events_of(path)]


def test_a_checkpoint_that_is_written_behind_is_told_when_it_is_committed(tmp_path: Path) -> None:
    order = behind(Loop(tmp_path, num_steps=6, checkpoint_every=4), BehindCheckpoints())
    assert order == [*(f"step {n}" for n in range(1, 6)), "checkpoint 4", "step 6", "checkpoint 6"]
    told = [event for event in events_of(tmp_path) if event["event"] == "checkpoint"]
    assert [(one["seconds"], one["stalled_seconds"]) for one in told] == [(2.0, 0.25), (0.5, 0.5)]


def test_the_next_checkpoint_waits_for_the_one_before(tmp_path: Path) -> None:
    order = behind(Loop(tmp_path), BehindCheckpoints(polls=100))
    assert order == [
        "step 1", "step 2", "step 3", "step 4", "checkpoint 2", "step 5", "checkpoint 4", "checkpoint 5"
    ]  # fmt: skip


def test_one_that_the_disk_rejected_behind_training_is_missed_with_its_own_step(tmp_path: Path) -> None:
    rejected = {2: CheckpointNotWritten("the disk is full")}
    loop = Loop(tmp_path)
    order = behind(loop, BehindCheckpoints(ends=rejected))
    assert loop.run.recorder.num_missed == 1, "which /metrics shows"
    assert order[2:4] == ["step 3", "checkpoint_missed 2"] and order[-1] == "checkpoint 5"


def test_a_writer_that_is_fenced_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(Fenced):
        behind(loop, BehindCheckpoints(ends={2: Fenced("epoch 2 owns the run")}))
    assert order_of(tmp_path) == ["step 1", "step 2", "step 3"]


def test_a_step_that_ends_the_run_does_not_cost_the_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    loop = Loop(tmp_path, norms=[1.0, 1.0, math.nan], skip_non_finite=False)
    with pytest.raises(NonFinite, match="step 3"):
        behind(loop, BehindCheckpoints(polls=100))
    assert order_of(tmp_path) == ["step 1", "step 2", "checkpoint 2"]


def test_a_stop_request_while_a_checkpoint_is_copied_ends_with_that_checkpoint(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(Preempted) as stopped:
        behind(loop, BehindCheckpoints(polls=100, stop=loop.stop))
    assert (order_of(tmp_path)[-1], stopped.value.details) == ("checkpoint 2", {"savedStep": 2})


def test_a_stop_request_while_one_is_written_behind_commits_both(tmp_path: Path) -> None:
    class Stopping(CountingOptimizer):
        def step(self, learning_rate: float, gradient_scale: float) -> None:
            super().step(learning_rate, gradient_scale)
            loop.stop.requested = len(self.calls) == 5  # three steps, a flush, a step

    loop = Loop(tmp_path, num_steps=9, checkpoint_every=3)
    loop.run = replace(loop.run, optimizer=Stopping([]))  # type: ignore[arg-type]
    with pytest.raises(Preempted) as stopped:
        behind(loop, BehindCheckpoints(polls=100))
    assert order_of(tmp_path)[-3:] == ["step 5", "checkpoint 3", "checkpoint 5"]
    assert stopped.value.details == {"savedStep": 5}


def test_a_stop_request_whose_own_checkpoint_is_rejected_takes_the_next_step(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    rejected = {2: CheckpointNotWritten("the disk is full")}
    with pytest.raises(Preempted) as stopped:
        behind(loop, BehindCheckpoints(polls=100, ends=rejected, stop=loop.stop))
    assert order_of(tmp_path)[-3:] == ["checkpoint_missed 2", "step 3", "checkpoint 3"]
    assert stopped.value.details == {"savedStep": 3}


class UnevenBatches(NumberedBatches):
    """Of evaluations: batches with other numbers of labels, and losses that a sum in their order would round."""

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        for size, loss in ((3, 2.0**56), (1, 1.0), (4, 1.25), (1, 1.0), (5, 3.5)):
            tokens = torch.full((size, 7), loss)
            yield Batch(tokens, tokens, 7 * size - 1)


class SumOfTokens(OneWeight):
    def forward(self, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return self.weight * tokens_BT.sum() / num_tokens


def test_evaluation_loss_is_the_mean_over_all_labels_of_a_plain_loop(tmp_path: Path) -> None:
    loop = Loop(tmp_path, evaluate_every=1, num_steps=1)
    loop.run = replace(loop.run, batches=UnevenBatches(), model=SumOfTokens())  # type: ignore[arg-type]
    loop.train()
    losses, labels = Fraction(0), 0
    for batch in UnevenBatches().evaluation_batches(1):
        losses += Fraction(SumOfTokens()(batch.tokens_BT, batch.labels_BT, 1).item())
        labels += batch.num_unmasked
    (event,) = [each for each in events_of(tmp_path) if each["event"] == "evaluation"]
    assert (event["loss"], event["tokens"]) == (float(losses) / labels, labels)


class RisingBatches(NumberedBatches):
    """Of evaluations: these losses, one after the other."""

    def __init__(self, losses: Sequence[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def evaluation_batches(self, micro_batch_size: int) -> Iterator[Batch]:
        yield Batch(torch.full((1, 1), next(self.losses)), torch.zeros(1, 1), 1)


@pytest.mark.parametrize(
    ("losses", "settings", "last", "best"),
    [
        ((3, 2, 1, 4, 4), {"patience": 2}, 5, 3),
        ((3, 4, 2, 4, 1), {"patience": 2}, 5, 5),
        ((3, 3, 3), {"patience": 2}, 3, 1),
        ((3, math.nan, math.nan), {"patience": 2}, 3, 1),
        ((4, 3.75, 3.5), {"patience": 2, "min_delta": 0.5}, 3, 3),
        ((4, 3.75, 3.25, 3.25), {"patience": 1, "min_delta": 0.125}, 4, 3),
        ((3, 4, 5, 6, 7), {"keeps_best": True}, 5, 1),
    ],
)
def test_training_ends_once_evaluations_no_longer_improve(
    tmp_path: Path, losses: Sequence[float], settings: dict[str, Any], last: int, best: int
) -> None:
    loop = Loop(tmp_path, evaluate_every=1, checkpoint_every=100, **settings)
    loop.run = replace(loop.run, batches=RisingBatches(losses), model=SumOfTokens())  # type: ignore[arg-type]
    loop.train()
    assert (loop.progress.step, loop.progress.best.step) == (last, best)
    kept = [step for step in range(1, last) if settings.get("keeps_best") and losses[step - 1] == min(losses[:step])]
    assert loop.checkpoints.steps == [*kept, last]
    train(loop.run, loop.settings, loop.progress, loop.stop)  # as after a crash
    assert loop.progress.step == last


def test_evaluation_leaves_the_model_in_training_mode(tmp_path: Path) -> None:
    loop = Loop(tmp_path, num_steps=1, evaluate_every=1)
    loop.train()
    assert loop.run.model.training
    assert '"event": "evaluation"' in (tmp_path / "run.jsonl").read_text()


def test_waiting_is_taken_out_of_the_phase_it_fell_into() -> None:
    waited = iter([0.0, 0.0, 1e6])
    watch = Stopwatch(lambda: next(waited))
    next(waited)
    with watch.phase(Phase.FORWARD):
        pass
    assert watch.seconds[Phase.WAIT] == 1e6
    assert watch.seconds[Phase.FORWARD] < 0
