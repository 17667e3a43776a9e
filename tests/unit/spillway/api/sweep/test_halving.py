"""Successive halving: who trains until when, who is stopped, who is the best; a function of recorded values."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from spillway.api.pod import Objective
from spillway.api.progress import MemberProgress, MemberState
from spillway.api.sweep.halving import Contender, Standing, Stop, Value, round_steps, standing, steps_ahead

NAN = math.nan
NUM_SWEEPS = 400


def contenders(num: int, num_steps: int = 80) -> list[Contender]:
    return [Contender(f"m{index}", num_steps) for index in range(num)]


def reports(step: int, *values: float) -> list[Value]:
    """One of each of m0, m1, ..."""
    return [Value(f"m{index}", step, value) for index, value in enumerate(values)]


def halving(steps: int | None, direction: str = "Minimize", metric: str = "EvaluationLoss") -> Objective:
    return Objective.model_validate({"metric": metric, "direction": direction, "halving": steps})


@dataclass
class Sweep:
    """A sweep as a trainer runs it: members train in any order, each step reports its curve's value, some fail."""

    members: list[Contender]
    curves: Mapping[str, Sequence[float]]
    """by step, from 0"""
    fails_after: Mapping[str, int]
    objective: Objective
    values: list[Value] = field(default_factory=list)
    seen: list[Standing] = field(default_factory=list)

    def run(self, rng: random.Random, most: int = 10**9) -> Standing:
        """Until nobody trains, or for `most` steps of all."""
        for _ in range(most):
            now = standing(self.members, self.values, self.objective)
            self.seen.append(now)
            ready = [name for name, until in now.until.items() if self.step_of(name) < until]
            if not ready:
                break
            self.train(rng.choice(ready))
        return standing(self.members, self.values, self.objective)

    def train(self, name: str) -> None:
        step = self.step_of(name) + 1
        if self.fails_after.get(name, 10**9) < step:
            self.members = [replace(one, failed=True) if one.name == name else one for one in self.members]
        else:
            self.values.append(Value(name, step, self.curves[name][step]))

    def step_of(self, name: str) -> int:
        return max((one.step for one in self.values if one.member == name), default=0)


def random_sweep(seed: int) -> Sweep:
    rng = random.Random(seed)
    same = rng.random() < 0.5
    members = [Contender(f"m{index}", 24 if same else rng.randrange(1, 30)) for index in range(rng.randrange(1, 13))]
    values = (0.0, 1.0, 1.0, 2.0, 3.0, NAN, math.inf, -math.inf)  # ties and what is not finite, often
    curves = {one.name: [rng.choice(values) for _ in range(40)] for one in members}
    fails = {one.name: rng.randrange(0, one.num_steps) for one in members if rng.random() < 0.2}
    objective = halving(rng.choice((None, 1, 2, 3, 5, 50)), rng.choice(("Minimize", "Maximize")))
    return Sweep(members, curves, fails, objective)


def test_rounds_come_at_doubling_steps_and_never_at_the_last_step() -> None:
    assert round_steps(10, 80) == (10, 20, 40)
    assert round_steps(10, 81) == (10, 20, 40, 80)
    assert round_steps(80, 80) == ()
    assert round_steps(None, 80) == ()


def test_twelve_members_become_six_then_three_then_one() -> None:
    members, objective = contenders(12), halving(10)
    values, left = [], []
    for step in (10, 20, 40):
        values += reports(step, *(float(index) for index in range(12)))
        left.append(standing(members, values, objective).until)
    assert [list(until) for until in left] == [[f"m{index}" for index in range(num)] for num in (6, 3, 1)]
    assert [set(until.values()) for until in left] == [{20}, {40}, {80}]


@pytest.mark.parametrize(("num", "kept"), [(1, 1), (2, 1), (3, 1), (5, 2), (7, 3), (64, 32)])
def test_a_round_keeps_half_rounded_down_and_at_least_one(num: int, kept: int) -> None:
    assert len(standing(contenders(num), reports(10, *range(num)), halving(10)).until) == kept


def test_a_stopped_member_has_a_sentence_with_both_figures() -> None:
    found = standing(contenders(2), reports(20, 5.31, 4.9), halving(20))
    assert found.stops == (Stop("m0", 20, "stopped after 20 steps: evaluation loss 5.3100, best 4.9000"),)
    assert found.best == "m1"
    loss = standing(contenders(2), reports(20, NAN, 4.9), halving(20, metric="Loss"))
    assert loss.stops[0].reason == "stopped after 20 steps: loss not finite, best 4.9000"


def test_maximize_keeps_the_larger_values() -> None:
    found = standing(contenders(4), reports(10, 1.0, 4.0, 2.0, 3.0), halving(10, "Maximize"))
    assert (list(found.until), found.best) == (["m1", "m3"], "m1")


def test_of_equals_the_earlier_in_the_list_stays() -> None:
    found = standing(contenders(4), reports(10, 2.0, 1.0, 2.0, 2.0), halving(10))
    assert (list(found.until), found.best) == (["m0", "m1"], "m1")
    assert standing(contenders(3), reports(10, 2.0, 2.0, 2.0), halving(10)).best == "m0"


@pytest.mark.parametrize("direction", ["Minimize", "Maximize"])
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_non_finite_values_rank_last_but_ahead_of_failed_members(direction: str, bad: float) -> None:
    members = contenders(4)
    members[0] = replace(members[0], failed=True)
    found = standing(members, reports(10, 0, bad, 1.0, 2.0)[1:], halving(10, direction))
    assert set(found.until) == {"m2", "m3"}
    members[3] = replace(members[3], failed=True)
    found = standing(members, reports(10, 0, bad, 1.0)[1:], halving(10, direction))
    assert set(found.until) == {"m1", "m2"}
    assert found.best == "m2"


def test_round_waits_until_every_running_member_has_reported_its_step() -> None:
    members, objective = contenders(3), halving(10)
    some = [*reports(9, 1.0, 2.0, 3.0), *reports(10, 1.0, 2.0)]
    waiting = standing(members, some, objective)
    assert (dict(waiting.until), waiting.stops) == ({"m0": 10, "m1": 10, "m2": 10}, ())
    failed = [*members[:2], replace(members[2], failed=True)]
    assert list(standing(failed, some, objective).until) == ["m0"]


def test_shorter_member_is_compared_by_its_last_value_and_never_stopped() -> None:
    short = [Contender("m0", 5), *contenders(3)[1:]]
    assert set(standing(short, reports(10, 0.0, 2.0, 1.0)[1:], halving(10)).until.values()) == {5, 10}
    values = [Value("m0", 5, 9.0), *reports(10, 0.0, 2.0, 1.0)[1:]]
    found = standing(short, values, halving(10))
    assert (dict(found.until), [stop.member for stop in found.stops]) == ({"m0": 5, "m2": 80}, ["m1"])
    assert standing(short, [Value("m0", 5, 0.5), *values[1:]], halving(10)).until == {"m0": 5}


def test_without_halving_everybody_trains_to_the_end() -> None:
    found = standing(contenders(3), reports(10, 3.0, 1.0, 2.0), halving(None))
    assert (dict(found.until), found.stops, found.best) == ({"m0": 80, "m1": 80, "m2": 80}, (), "m1")


def test_the_last_one_alive_trains_to_the_end() -> None:
    members = [replace(one, failed=one.name != "m1") for one in contenders(3)]
    assert standing(members, [], halving(10)).until == {"m1": 80}


def test_best_member_survived_the_most_rounds_and_never_failed() -> None:
    members, values = contenders(2), [*reports(10, 2.0, 1.0), Value("m1", 20, 5.0)]
    assert standing(members, values, halving(10)).best == "m1"
    assert standing([members[0], replace(members[1], failed=True)], values, halving(10)).best == "m0"
    assert standing([replace(one, failed=True) for one in members], values, halving(10)).best == ""
    assert standing(members, reports(10, NAN, math.inf), halving(None)).best == ""


def test_newest_value_of_a_member_counts_and_the_last_for_a_repeated_step() -> None:
    members = contenders(2)
    later = [*reports(5, 1.0, 2.0), *reports(6, 3.0, 2.5)]
    assert standing(members, later, halving(None)).best == "m1"
    again = [*later, Value("m1", 6, 3.5)]
    assert standing(members, again, halving(None)).best == "m0"


def test_nobody_is_best_before_a_value_is_known() -> None:
    assert standing(contenders(2), [], halving(10)) == Standing({"m0": 10, "m1": 10}, (), "")
    assert standing([], [], halving(10)) == Standing({}, (), "")


def test_a_value_of_somebody_else_changes_nothing() -> None:
    values = reports(10, 1.0, 2.0)
    stranger = [Value("other", 10, 0.0), *values]
    assert standing(contenders(2), stranger, halving(10)) == standing(contenders(2), values, halving(10))


def rows(*members: tuple[int, int, str]) -> list[MemberProgress]:
    """(step, steps, state) of m0, m1, ..."""
    return [
        MemberProgress(name=f"m{index}", step=step, num_steps=steps, state=MemberState(state))
        for index, (step, steps, state) in enumerate(members)
    ]


def test_without_rounds_all_steps_are_ahead_of_those_who_go_on() -> None:
    known = rows((3, 10, "Running"), (0, 5, "Parked"), (5, 10, "Stopped"), (2, 9, "Failed"), (7, 7, "Complete"))
    assert steps_ahead(known, 0) == {"m0": 7.0, "m1": 5.0}
    assert steps_ahead([], 10) == {}


def test_steps_behind_a_round_count_by_the_part_that_it_lets_go_on() -> None:
    """12 -> 6 -> 3 -> 1 at 10, 20 and 40 of 80 steps: 12 x 10 + 6 x 10 + 3 x 20 + 1 x 40 in all."""
    ahead = steps_ahead(rows(*[(0, 80, "Parked")] * 12), 10)
    assert sum(ahead.values()) == pytest.approx(280)
    assert len(set(ahead.values())) == 1


def test_a_round_is_decided_once_nobody_is_before_it() -> None:
    decided = rows(*[(10, 80, "Parked")] * 6, *[(10, 80, "Stopped")] * 6)
    assert sum(steps_ahead(decided, 10).values()) == pytest.approx(160)
    waits = steps_ahead(rows((10, 80, "Parked"), (9, 80, "Running")), 10)
    assert waits == {"m0": pytest.approx(35), "m1": pytest.approx(36)}


def test_the_last_one_has_all_its_steps_ahead_whatever_rounds_there_are() -> None:
    assert steps_ahead(rows((12, 80, "Running"), (10, 80, "Stopped")), 10) == {"m0": 68.0}


def test_random_sweeps_never_have_more_steps_ahead_than_without_rounds() -> None:
    for seed in range(NUM_SWEEPS):
        sweep = random_sweep(seed)
        sweep.run(random.Random(seed), most=seed % 30)
        known = [
            MemberProgress(name=one.name, step=sweep.step_of(one.name), num_steps=one.num_steps)
            for one in sweep.members
        ]
        most = sum(one.num_steps - one.step for one in known)
        ahead = steps_ahead(known, sweep.objective.halving)
        assert all(0.0 <= ahead[one.name] <= one.num_steps - one.step for one in known), seed
        assert sum(ahead.values()) <= most, seed


def test_random_sweeps_end_the_same_in_whatever_order_members_train() -> None:
    for seed in range(NUM_SWEEPS):
        ends = [random_sweep(seed).run(random.Random(order)) for order in range(3)]
        assert ends[0] == ends[1] == ends[2], seed


def test_random_sweeps_never_take_a_decision_back() -> None:
    """Stops are only added, and nobody's limit is lowered, but for those who are stopped or fail."""
    for seed in range(NUM_SWEEPS):
        sweep = random_sweep(seed)
        sweep.run(random.Random(seed))
        for before, after in zip(sweep.seen, sweep.seen[1:], strict=False):
            assert set(before.stops) <= set(after.stops), seed
            assert all(until <= after.until.get(name, until) for name, until in before.until.items()), seed
            assert set(after.until) <= set(before.until), seed


def test_random_sweeps_end_with_every_member_complete_stopped_or_failed() -> None:
    for seed in range(NUM_SWEEPS):
        sweep = random_sweep(seed)
        end = sweep.run(random.Random(seed))
        failed = {one.name for one in sweep.members if one.failed}
        assert all(sweep.step_of(name) == until for name, until in end.until.items()), seed
        steps = {one.name: one.num_steps for one in sweep.members}
        assert all(steps[name] == until for name, until in end.until.items()), seed
        stopped = {stop.member for stop in end.stops}
        assert len(stopped) + len(end.until) + len(failed) == len(sweep.members), seed
        assert end.until or failed, seed


def test_sweep_killed_anywhere_repeats_steps_and_decides_the_same() -> None:
    for seed in range(NUM_SWEEPS):
        plain = random_sweep(seed).run(random.Random(seed))
        rng = random.Random(seed + 1)
        killed = random_sweep(seed)
        killed.run(rng, most=rng.randrange(1, 40))
        # Members go back to their last checkpoints and report the same again; the log keeps what it had.
        again = [one for one in killed.values if rng.random() < 0.5]
        killed.values += sorted(again, key=lambda one: one.step)
        assert killed.run(rng) == plain, seed


def test_stopped_members_are_no_better_than_any_that_their_round_kept() -> None:
    for seed in range(NUM_SWEEPS):
        sweep = random_sweep(seed)
        end = sweep.run(random.Random(seed))
        values = {(one.member, one.step): one.value for one in sweep.values}
        sign = 1.0 if sweep.objective.direction == "Minimize" else -1.0

        def rank(name: str, step: int, values: dict[tuple[str, int], float] = values, sign: float = sign) -> float:
            value = values.get((name, step), NAN)
            return sign * value if math.isfinite(value) else math.inf

        for step in {stop.step for stop in end.stops}:
            out = {stop.member for stop in end.stops if stop.step <= step}
            # Failed and complete ones may have left in an earlier round; those who trained beyond it were kept.
            kept = {one.member for one in sweep.values if one.step > step and one.member not in out}
            full = {one.name for one in sweep.members if one.num_steps > step}
            worst = max((rank(name, step) for name in kept & full), default=-math.inf)
            stopped_here = [stop.member for stop in end.stops if stop.step == step]
            assert all(rank(name, step) >= worst for name in stopped_here), (seed, step)
