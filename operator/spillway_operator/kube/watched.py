"""The two kinds that the operator watches: TrainingJobs and their Jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .api_client import JOBS, TRAINING_JOBS, Answer, ApiResource
from .store import MANAGED_BY, Key, Named, Store, Table, project_attempt, project_job

T = TypeVar("T", bound=Named)


@dataclass(frozen=True, slots=True)
class Watched(Generic[T]):
    """How objects of one kind are found, projected and kept."""

    group: str
    version: str
    resource: ApiResource
    label_selector: str
    """Applied by the API server; empty = all."""
    project: Callable[[Answer], T]
    table: Table[T]
    put: Callable[[T], set[Key]]
    remove: Callable[[T], set[Key]]

    @property
    def plural(self) -> str:
        return self.resource.plural


def watched_kinds(store: Store) -> tuple[Watched[Any], ...]:
    return (
        Watched(
            "spillway.dev", "v1alpha1", TRAINING_JOBS, "", project_job, store.jobs, store.put_job, store.remove_job
        ),
        Watched(
            "batch", "v1", JOBS, MANAGED_BY, project_attempt, store.attempts, store.put_attempt, store.remove_attempt
        ),
    )
