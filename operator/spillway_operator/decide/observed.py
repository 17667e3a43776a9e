"""Observed and Desired: the whole input and output of `reconcile`, as frozen values.

API objects are reduced to the few fields that decisions need. `Desired` holds objects to create (never to change),
objects to delete, the whole status, events. observe.py and apply.py make the requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spillway.api.progress import ProgressReport
from spillway.api.status import Escalation
from spillway.metrics import Metric
from spillway.placement.cluster_view import ClusterView

Manifest = Mapping[str, Any]
"""An API object as plain data."""


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
    """Canonical JSON."""
    status: bytes
    """Canonical JSON; {} if there is none."""
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
    """Uid of the controlling TrainingJob; another one's, or empty, for a foreign object of the same name."""
    owner_name: str
    attempt: int
    creation_time: str
    suspended: bool = False
    ready: int = 0
    active: int = 0
    succeeded: int = 0
    failed: int = 0
    outcome: Literal["", "Complete", "Failed"] = ""
    """The terminal condition that is True."""
    reason: str = ""
    """Reason of that condition."""
    outcome_time: str = ""
    """When that condition became True."""
    deleting: bool = False
    deletion_time: str = ""
    """deletionTimestamp: when its deletion was requested."""


@dataclass(frozen=True, slots=True)
class ContainerEnding:
    exit_code: int
    reason: str
    """Error, Completed, OOMKilled, ContainerCannotRun, ..."""
    message: str
    """The termination message, not validated."""
    finished_at: str
    started_at: str = ""


@dataclass(frozen=True, slots=True)
class PodObject:
    """One pod of an attempt; listed only if its Job failed or is not ready in time."""

    name: str
    uid: str
    index: int
    """Node rank: the Job's completion index."""
    node: str
    phase: str
    scheduled_at: str = ""
    """When the scheduler gave it its node, RFC 3339."""
    ready: bool = False
    deleting: bool = False
    deletion_time: str = ""
    """deletionTimestamp: the end of its grace period."""
    grace_seconds: int = 0
    """Grace period of its deletion: its deletion was requested this much before `deletion_time`."""
    orphaned: bool = False
    """It has no controller: its Job was deleted and it was left behind."""
    status_reason: str = ""
    """Evicted, NodeLost, ... from the pod's status."""
    status_message: str = ""
    disruption: str = ""
    """Reason of the condition DisruptionTarget, if True."""
    unschedulable: str = ""
    """The scheduler's message while it finds no node."""
    waiting: str = ""
    """Reason and message of a container that cannot start, such as "ImagePullBackOff: ..."."""
    ending: ContainerEnding | None = None


@dataclass(frozen=True, slots=True)
class Contract:
    """An attempt's immutable ConfigMap: creating it commits the decision."""

    attempt: int
    name: str
    owner_uid: str
    job_json: str
    plan_json: str
    decision_json: str
    """PlanStatus as JSON: the attempt's status.plan, so that a new operator writes the same."""
    attempt_json: str = ""
    """manifests.Decision as JSON: status.attempts once it exists, the nodes that its pods prefer, and more."""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A PersistentVolumeClaim that the job names."""

    name: str
    exists: bool
    """Also True if the operator may not read it."""
    access_modes: tuple[str, ...] = ()
    """Empty = not known."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is known of a model that a pod builds to find its sizes (decide/inspection.py)."""

    shape: str = ""
    """The packed shape (ModelShape.packed) in ConfigMap <job>-model; empty: there is none."""
    job_uid: str = ""
    """Uid of Job <job>-inspect; empty: there is none."""
    outcome: Literal["", "Complete", "Failed"] = ""
    reason: str = ""
    """Reason of the Job's failure."""
    ending: ContainerEnding | None = None
    """How its pod ended; None: it has not ended, or is lost."""
    obstacle: str = ""
    """Why its pod does not run yet."""
    foreign: str = ""
    """One of the two, such as "Job demo-inspect", that does not belong to the job."""


@dataclass(frozen=True, slots=True)
class OperatorFacts:
    """What the operator's settings contribute to every job."""

    trainer_image: str
    image_pull_policy: str = "IfNotPresent"
    progress_url: str = ""
    """https://SERVICE.NAMESPACE.svc:PORT/progress; empty: no progress endpoint."""
    progress_ca: str = ""
    """Certificate authority of that endpoint, in PEM."""
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
    """When its condition Scheduled became False."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known of one TrainingJob at one moment."""

    job: JobObject
    attempts: tuple[AttemptObject, ...]
    """Jobs with the name or labels of one of its attempts, including foreign ones."""
    facts: OperatorFacts
    cluster: ClusterView
    contracts: tuple[Contract, ...] | None = None
    """ConfigMaps of its attempts. None = not requested, because an attempt is running or the job has ended. Otherwise
    they, `job` and `attempts` were just read from the API server, not taken from a watch: what is missing does not
    exist, and a new attempt may follow."""
    pods: tuple[PodObject, ...] | None = None
    """Pods of the newest attempt, by label, even if its Job was deleted; None = not requested."""
    pods_rejection: str = ""
    """Why the API server rejects the attempt's pods (quota, LimitRange, Pod Security, a policy), from the Job's newest
    event; read with `pods` if some are missing."""
    claims: tuple[Claim, ...] | None = None
    """Claims that the spec names; None = not requested."""
    inspection: Inspection | None = None
    """Inspection of a model without sizes in the spec; None = not requested."""
    conflict: str = ""
    """The child, such as "Job demo-1", that could not be created because a foreign object has its name."""
    rejection: str = ""
    """The API server's message when it rejected a child (Pod Security, quota, ...)."""
    progress: ProgressReport | None = None
    """Newest accepted report that is not in the status yet."""
    progress_time: str = ""
    """When it arrived, RFC 3339."""
    hearing_seconds: float | None = None
    """How long this process could receive reports without interruption; None = it has no progress endpoint. Only a
    silence within that time says something about a trainer."""
    queue_says: str | None = None
    """The queue's own message about why it has not admitted the newest attempt; None = not requested."""
    inherited: tuple[str, ...] = ()
    """Fields of the job's spec that come from the OperatorConfig."""
    capacity_is_fresh: bool = False
    """Whether nodes and their pods were listed for this look, or shortly before."""
    waiting_gangs: tuple[WaitingGang, ...] | None = None
    """Other jobs that wait for nodes, as far as the watches know; None = not requested."""
    others_silent_seconds: float | None = None
    """Seconds since a trainer of another job reported; None = no other attempt runs. If no job reports, the operator
    may be at fault."""


@dataclass(frozen=True, slots=True)
class Deletion:
    kind: Literal["Job", "ConfigMap", "Service", "TrainingJob"]
    name: str
    uid: str
    """Precondition. Deletion is in the foreground: the object exists until its children are deleted. Empty: the object
    is deleted whatever its uid is, if it is the job's own."""
    resource_version: int = 0
    """Precondition, too: the version that the decision is based on; 0 = any."""


@dataclass(frozen=True, slots=True)
class EventNote:
    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


@dataclass(frozen=True, slots=True)
class Count:
    """What a written status adds to a metric of its namespace."""

    metric: Metric
    value: float
    label: str = ""
    """Value of the metric's label after `namespace`; "" if it has none."""


@dataclass(frozen=True, slots=True)
class Desired:
    """What to do now; empty if nothing has to change."""

    creates: tuple[Manifest, ...] = ()
    """Created in this order; an object of ours that exists is left alone. If it is a ConfigMap with other content,
    creation stops: it commits another decision, which must be read first ("contracts")."""
    deletes: tuple[Deletion, ...] = ()
    status: dict[str, Any] | None = None
    """The whole status to apply; None = unchanged."""
    events: tuple[EventNote, ...] = ()
    ran_out: tuple[Escalation, ...] = ()
    """Out-of-memory ends that the status accounts for the first time: MemoryProfiles record them."""
    counts: tuple[Count, ...] = ()
    """What this status adds to the metrics for service levels."""
    look_again_seconds: float | None = None
    needs: frozenset[str] = field(default_factory=frozenset)
    """Fields of Observed needed for the decision: contracts, pods, claims, inspection, queue_says, waiting_gangs,
    and capacity."""

    @property
    def changes_nothing(self) -> bool:
        return not (self.creates or self.deletes or self.status is not None)
