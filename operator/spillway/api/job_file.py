"""JobFile: job.json. Together with plan.json it is the whole contract with the trainer.

Written by `spillway run` (or, in a cluster, by the operator into the attempt's ConfigMap); read by `spillway_trainer`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from spillway.api.earlier import as_today
from spillway.api.job_spec import JobSpec
from spillway.api.script import ScriptSpec
from spillway.api.training_job import TrainingJobSpec
from spillway.plan import Frozen

JOB_VERSION: Literal[2] = 2


class AttemptFile(Frozen):
    """What both kinds of job.json have."""

    version: Literal[2] = JOB_VERSION
    name: str
    namespace: str = "default"
    uid: str
    """Distinguishes jobs of the same name: a checkpoint of another uid is never resumed."""
    in_cluster: bool = False
    """Whether a TrainingJob of a cluster owns the checkpoint directory."""
    epoch: int = Field(ge=1)
    """Attempt number; it rises with every attempt and fences the writers of earlier ones."""
    spec: JobSpec
    output_directory: str
    """Directory of run.jsonl."""
    corpus_directory: str
    """Tokenizer and token shards: built here once, reused afterwards."""
    checkpoint_directory: str
    spill_directory: str
    """Directory of the NVMe slab; nothing in it outlives the process."""
    further_spill_directories: tuple[str, ...] = ()
    """Directories on other volumes: the slab is striped over all."""
    spill_is_listed: bool = False
    """Whether the slab keeps its name, so that the kubelet sees it: on an emptyDir, which ends with the pod."""
    claims: dict[str, str] = Field(default_factory=dict)
    """Claim name -> directory, as the trainer sees it."""
    termination_message_path: str
    compute_threads: int = Field(ge=1)
    """torch's intra-op threads: fixed, because a matrix product's rounding depends on them."""
    metrics_port: int | None = None
    """Port of /metrics; None: no exporter."""
    num_nodes: int = Field(default=1, ge=1)
    ranks_per_node: int = Field(default=1, ge=1)
    """World size = num_nodes x ranks_per_node; `spillway_trainer.launch` starts several ranks. Of a sweep: its devices,
    each with a process that the sweep's own one starts."""
    master_address: str = "127.0.0.1"
    """Host name of node 0, where the ranks connect."""
    master_port: int = Field(default=0, ge=0, le=65535)
    """0 = a free port, for one node only"""

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, found: Any) -> Any:
        """Version 1 had the spec's fields at other places, and both had data.huggingFace: null."""
        if not isinstance(found, dict) or not isinstance(spec := found.get("spec"), dict):
            return found
        if found.get("version") == 1:
            found, spec = found | {"version": JOB_VERSION}, as_today(spec)
        if isinstance(data := spec.get("data"), dict) and data.get("huggingFace", ...) is None:
            spec = spec | {"data": {name: value for name, value in data.items() if name != "huggingFace"}}
        return found | {"spec": spec}

    @property
    def spill_directories(self) -> tuple[str, ...]:
        """One a volume, each with the same share of the slab."""
        return (self.spill_directory, *self.further_spill_directories)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


class JobFile(AttemptFile):
    spec: TrainingJobSpec

    @property
    def world_size(self) -> int:
        return 1 if self.spec.members else super().world_size


class ScriptFile(AttemptFile):
    """Of a job with command; the launcher alone reads it."""

    spec: ScriptSpec
