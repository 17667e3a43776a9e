"""Caches make_plan: jobs with the same question share one answer.

Finding a plan takes a fraction of a second or up to seconds, and many jobs differ only in name, seed and learning rate.
make_plan is pure, so an answer stays valid; the MOST_KNOWN answers that were used last are kept.

A program that must not block finds plans elsewhere: inside `only_known`, asking for an unknown plan raises PlanMissing
with the question, and `remember` stores the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from spillway.api.training_job import TrainingJob
from spillway.errors import UserError
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning.hardware import NodeSpec
from spillway.planning.planner import NO_OVERRIDES, NOT_PLANNED_FOR, Overrides, make_plan

MOST_KNOWN = 512
"""Number of plans; a plan with its alternatives takes some tens of KiB."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanQuestion:
    """One question to make_plan; equal for all jobs that get the same plan."""

    spec: str
    name: str
    """Name of a sweep, because its plan contains the name in several places; empty for one model."""
    node: NodeSpec
    overrides: Overrides
    explained: bool
    job: TrainingJob = field(compare=False)

    def answer(self) -> PlanAnswer:
        """The plan, or the UserError of a job that cannot be planned. Takes up to seconds."""
        try:
            return make_plan(self.job, self.node, self.overrides, explained=self.explained)
        except UserError as error:
            return error


PlanAnswer = MemoryPlan | Infeasible | Exception


class PlanMissing(BaseException):
    """Raised inside `only_known`. Not an Exception, because code that handles errors of planning must not handle it."""

    def __init__(self, questions: tuple[PlanQuestion, ...]) -> None:
        super().__init__(f"{len(questions)} plans are not computed yet")
        self.questions = questions


_answers: OrderedDict[PlanQuestion, PlanAnswer] = OrderedDict()
_only_known: ContextVar[bool] = ContextVar("only_known", default=False)


def known_plan(
    job: TrainingJob, node: NodeSpec, overrides: Overrides = NO_OVERRIDES, *, explained: bool = True
) -> MemoryPlan | Infeasible:
    """The result of make_plan, from the cache if it is there, with the name of `job`. Raises UserError like
    make_plan."""
    name = job.metadata.name
    is_sweep = bool(job.spec.members)
    spec = job.spec.model_dump_json(exclude=NOT_PLANNED_FOR)
    question = PlanQuestion(spec, name if is_sweep else "", node, overrides, explained, job)
    found = _answers.get(question)
    if found is None:
        if _only_known.get():
            raise PlanMissing((question,))
        found = question.answer()
        remember(question, found)
    else:
        _answers.move_to_end(question)
    if isinstance(found, Exception):
        raise found.with_traceback(None)
    return found if is_sweep else found.model_copy(update={"job": name})


def remember(question: PlanQuestion, answer: PlanAnswer) -> None:
    _answers[question] = answer
    _answers.move_to_end(question)
    while len(_answers) > MOST_KNOWN:
        _answers.popitem(last=False)


def forget(question: PlanQuestion) -> None:
    _answers.pop(question, None)


def forget_plans() -> None:
    _answers.clear()


@contextmanager
def only_known() -> Iterator[None]:
    token = _only_known.set(True)
    try:
        yield
    finally:
        _only_known.reset(token)


def gathered(calls: Iterable[Callable[[], T]]) -> list[T]:
    """The results of all calls. If some raise PlanMissing, raises one PlanMissing with the questions of all of them."""
    found, missing = list[T](), list[PlanQuestion]()
    for call in calls:
        try:
            found.append(call())
        except PlanMissing as error:
            missing += error.questions
    if missing:
        raise PlanMissing(tuple(missing))
    return found
