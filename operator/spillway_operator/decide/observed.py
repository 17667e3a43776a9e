"""What the operator saw, as frozen projections: everything that `reconcile` may look at, and nothing else.

An API object is kept as the few fields that decisions need. `Desired` is the answer: objects to create (never to
change), objects to delete, the whole status, events. Effects live in observe.py and apply.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spillway.api.progress import ProgressReport
from spillway.api.status import Escalation
from spillway.placement.cluster_view import ClusterView

Manifest = Mapping[str, Any]
"""an API object as plain data"""


@dataclass(frozen=True, slots=True)
class JobObject:
    """A TrainingJob."""

    uid: str
    name: str
    namespace: str
    generation: int
    resource_version: int
    creation_time: str
    spec: bytes
    """canonical JSON"""
    status: bytes
    """canonical JSON; {} when there is none"""
    deleting: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class AttemptObject:
    """The batch/v1 Job of one attempt."""

    uid: str
    name: str
    namespace: str
    resource_version: int
    owner_uid: str
    """uid of the controlling TrainingJob; another one's, or empty, for a foreign namesake"""
    owner_name: str
    attempt: int
    creation_time: str
    suspended: bool = False
    ready: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    outcome: Literal["", "Complete", "Failed"] = ""
    """the terminal condition that is True"""
    reason: str = ""
    """its reason"""
    outcome_time: str = ""
    """when that condition became True"""
    deleting: bool = False
    deletion_time: str = ""
    """deletionTimestamp: when its deletion was asked for"""


@dataclass(frozen=True, slots=True)
class ContainerEnding:
    exit_code: int
    reason: str
    """Error, Completed, OOMKilled, ContainerCannotRun, ..."""
    message: str
    """the termination message, as found"""
    finished_at: str
    started_at: str = ""


@dataclass(frozen=True, slots=True)
class PodObject:
    """One pod of an attempt; listed only when its Job failed or is not ready in time."""

    name: str
    uid: str
    index: int
    """node rank: completion index of the Job"""
    node: str
    phase: str
    ready: bool = False
    deleting: bool = False
    deletion_time: str = ""
    """deletionTimestamp: when it should be gone, its grace period included"""
    grace_seconds: int = 0
    """of its deletion: that much earlier it was asked for"""
    orphaned: bool = False
    """nobody controls it: its Job was deleted and it was left behind"""
    status_reason: str = ""
    """Evicted, NodeLost, ... of the pod's status"""
    status_message: str = ""
    disruption: str = ""
    """reason of the condition DisruptionTarget, when True"""
    unschedulable: str = ""
    """the scheduler's message while it finds no node"""
    waiting: str = ""
    """reason and message of a container that cannot start: "ImagePullBackOff: ..." """
    ending: ContainerEnding | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """An attempt's immutable ConfigMap: the commit point of the decision."""

    attempt: int
    name: str
    owner_uid: str
    job_json: str
    plan_json: str
    decision_json: str
    """what status.plan says of it (PlanStatus as JSON), so that a new operator repeats it"""
    attempt_json: str = ""
    """manifests.Decision as JSON: what status.attempts says once it exists, and which nodes its pods prefer"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim that the job names."""

    name: str
    exists: bool
    """True also when the operator may not look"""
    access_modes: tuple[str, ...] = ()
    """empty = not known"""


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What the operator's settings add to every job."""

    trainer_image: str
    image_pull_policy: str = "IfNotPresent"
    progress_url: str = ""
    """https://SERVICE.NAMESPACE.svc:PORT/progress; empty = no progress endpoint"""
    progress_ca: str = ""
    """PEM"""
    metrics_port: int = 9400
    master_port: int = 29500


@dataclass(frozen=True, slots=True)
class WaitingGang:
    """Another job with several pods, for which the scheduler finds no nodes."""

    namespace: str
    name: str
    uid: str
    creation_time: str
    since: str
    """when its condition Scheduled became False"""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known of one TrainingJob at one moment."""

    job: JobObject
    attempts: tuple[AttemptObject, ...]
    """Jobs that carry one of its attempts' names or labels, foreign ones included"""
    facts: OperatorFacts
    cluster: ClusterView
    contracts: tuple[Contract, ...] | None = None
    """ConfigMaps of its attempts. None = not asked for, because an attempt lives or the job has ended. When they are
    given, they, `job` and `attempts` were read from the API server after the question, not taken from a watch: what is
    missing then is gone, and a new attempt may follow."""
    pods: tuple[PodObject, ...] | None = None
    """of the newest attempt, by label, also when its Job is gone; None = not asked for"""
    pods_refusal: str = ""
    """why the API server let the Job controller create no pod (quota, LimitRange, Pod Security, a policy): the newest
    event of the Job that says so; asked for with `pods`, where some are missing"""
    claims: tuple[Claim, ...] | None = None
    """None = not asked for"""
    conflict: str = ""
    """a child could not be created because a foreign object has its name: "Job demo-1" """
    refusal: str = ""
    """the API server's sentence when it refused a child (Pod Security, quota, ...)"""
    progress: ProgressReport | None = None
    """newest accepted report that is not in the status yet"""
    progress_time: str = ""
    """when it came, RFC 3339"""
    hearing_seconds: float | None = None
    """how long this process could hear trainers without a break; None = it has no progress endpoint. Only a silence
    within that time says something about a trainer."""
    queue_says: str | None = None
    """why the queue has not admitted the newest attempt, in its own words; None = not asked for"""
    waiting_gangs: tuple[WaitingGang, ...] | None = None
    """all that the watches know of; None = not asked for"""
    others_silent_seconds: float | None = None
    """since a trainer of another job was heard; None = no other attempt runs. When nobody is heard, the fault may be
    ours."""


@dataclass(frozen=True, slots=True)
class Deletion:
    kind: Literal["Job", "TrainingJob"]
    name: str
    uid: str
    """precondition. In the foreground: the object is seen until its children are gone."""
    resource_version: int = 0
    """precondition, too: what was decided on; 0 = any"""


@dataclass(frozen=True, slots=True)
class EventNote:
    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


@dataclass(frozen=True, slots=True)
class Desired:
    """What to do now; empty when everything is as it should be."""

    creates: tuple[Manifest, ...] = ()
    """in this order; each is created or, when it exists and is ours, left alone. A ConfigMap of ours with other
    content ends the application: it is the commit point of another decision, to be read first ("contracts")."""
    deletes: tuple[Deletion, ...] = ()
    status: dict[str, Any] | None = None
    """the whole status to apply; None = as it is"""
    events: tuple[EventNote, ...] = ()
    ran_out: tuple[Escalation, ...] = ()
    """ends for want of memory that the status accounts for the first time: what MemoryProfiles remember"""
    look_again_seconds: float | None = None
    needs: frozenset[str] = field(default_factory=frozenset)
    """what must be observed before the next decision: "contracts", "pods", "claims", "queue_says",
    "waiting_gangs" """

    @property
    def changes_nothing(self) -> bool:
        return not (self.creates or self.deletes or self.status is not None)
