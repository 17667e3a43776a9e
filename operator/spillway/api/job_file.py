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
    """The fields that both kinds of job.json have."""

    version: Literal[2] = JOB_VERSION
    name: str
    namespace: str = "default"
    uid: str
    """Distinguishes jobs of the same name: a checkpoint of another uid is never resumed."""
    in_cluster: bool = False
    """Whether a TrainingJob of a cluster owns the checkpoint directory."""
    epoch: int = Field(ge=1)
    """Attempt number. It rises with every attempt, and fences off the writers of earlier attempts."""
    spec: JobSpec
    output_directory: str
    """Directory of run.jsonl."""
    corpus_directory: str
    """Directory of the tokenizer and the token shards, which are built once and reused afterwards."""
    checkpoint_directory: str
    spill_directory: str
    """Directory of the NVMe slab; nothing in it outlives the process."""
    further_spill_directories: tuple[str, ...] = ()
    """Directories on further volumes; the slab is striped over all volumes."""
    spill_is_listed: bool = False
    """Whether the slab's file keeps its name, so that the kubelet counts its bytes. True on an emptyDir, which is
    deleted with the pod."""
    claims: dict[str, str] = Field(default_factory=dict)
    """Claim name -> directory at which the trainer sees the claim."""
    termination_message_path: str
    compute_threads: int = Field(ge=1)
    """Number of torch's intra-op threads. It is fixed, because the rounding of a matrix product depends on it."""
    metrics_port: int | None = None
    """Port of /metrics; None: no exporter."""
    num_nodes: int = Field(default=1, ge=1)
    ranks_per_node: int = Field(default=1, ge=1)
    """World size = num_nodes x ranks_per_node; `spillway_trainer.launch` starts several ranks. For a sweep: number of
    its devices, for each of which the sweep's own process starts one process."""
    master_address: str = "127.0.0.1"
    """Host name of node 0, to which all ranks connect."""
    master_port: int = Field(default=0, ge=0, le=65535)
    """0: a free port, which works on one node only."""

    @model_validator(mode="before")
    @classmethod
    def _of_an_earlier_version(cls, found: Any) -> Any:
        """Converts files of earlier versions: version 1 had some fields of the spec at other places, and files of both
        versions may have data.huggingFace: null."""
        if not isinstance(found, dict) or not isinstance(spec := found.get("spec"), dict):
            return found
        if found.get("version") == 1:
            found, spec = found | {"version": JOB_VERSION}, as_today(spec)
        if isinstance(data := spec.get("data"), dict) and data.get("huggingFace", ...) is None:
            spec = spec | {"data": {name: value for name, value in data.items() if name != "huggingFace"}}
        return found | {"spec": spec}

    @property
    def spill_directories(self) -> tuple[str, ...]:
        """One directory per volume; each holds the same share of the slab."""
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
    """job.json of a job with command. Only the launcher reads it."""

    spec: ScriptSpec
