"""spec.command of a TrainingJob: the launcher runs the user's own script, with volumes, restarts and progress reports.

The script has its own model, data and training; its memory is not planned.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from spillway.api.field_types import Fields, reject
from spillway.api.job_spec import JobSpec, Metadata
from spillway.api.memory import Advanced, Endurance
from spillway.api.pod import Checkpoint

SCRIPT_IN_CLUSTER = (
    "a job with command runs only in a cluster (spillway submit, kubectl apply), and it has no plan; to run it here, "
    "start the script yourself"
)
SCRIPT_TRAINS = "not allowed with command, because the script has its own; leave it out"
SCRIPT_NEEDS_MEMORY = "required with command, because Spillway cannot compute a script's memory; for example 16Gi"
SCRIPT_PLANS = (
    "not allowed with command, because a script is not planned; leave it out (only memory.budget.nvme is "
    "used: it is the size of the spill volume)"
)
SCRIPT_SAVES = "not allowed with command, because the script decides when it saves and what it keeps; leave it out"
SCRIPT_SHARDS = "not allowed with command, because the script decides what is sharded; leave it out"
SCRIPT_ENCRYPTS = "not allowed with command, because the script itself writes to its spill volume; leave it out"
COMMAND_IS_EMPTY = "the first entry is the program to run, and it is empty; name the program"
TRAINED_FIELDS = ("model", "data", "training", "search", "members", "objective", "tracking")
"""Fields of spec that a job with command does not have."""


def is_script(spec: object) -> bool:
    """Whether an unvalidated spec has a command."""
    return isinstance(spec, dict) and bool(spec.get("command"))


class ScriptSpec(JobSpec):
    command: tuple[Annotated[str, Field(max_length=4096)], ...] = Field(
        default=(), max_length=64,
        description=(
"Program and arguments of your own script. It replaces model, data and training, which must then be "
"left out. One process per device runs it, with torchrun's environment variables. $(NAME) is replaced "
"by the value of the environment variable NAME."
),
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _has_no_model(cls, given: Any) -> Any:
        reject([(name, SCRIPT_TRAINS) for name in TRAINED_FIELDS if isinstance(given, dict) and name in given])
        return given

    @model_validator(mode="after")
    def _nothing_is_planned(self) -> Self:
        checkpoint, memory = self.checkpoint, self.memory
        own = Checkpoint.model_construct(claim=checkpoint.claim, sub_path=checkpoint.sub_path)
        wrong = [
            (not self.command[0], "command", COMMAND_IS_EMPTY),
            (self.pod.resources.memory is None, "pod.resources.memory", SCRIPT_NEEDS_MEMORY),
            (memory.mode != "Auto", "memory.mode", SCRIPT_PLANS),
            (memory.budget.device is not None, "memory.budget.device", SCRIPT_PLANS),
            (memory.budget.host is not None, "memory.budget.host", SCRIPT_PLANS),
            (memory.advanced != Advanced(), "memory.advanced", SCRIPT_PLANS),
            (memory.endurance != Endurance(), "memory.endurance", SCRIPT_PLANS),
            *((getattr(checkpoint, name) != getattr(own, name), f"checkpoint.{field.alias}", SCRIPT_SAVES)
              for name, field in Checkpoint.model_fields.items()),
            (self.parallelism.strategy != "Auto", "parallelism.strategy", SCRIPT_SHARDS),
            (self.spill.encryption != "None", "spill.encryption", SCRIPT_ENCRYPTS),
        ]  # fmt: skip
        reject([(field, problem) for is_wrong, field, problem in wrong if is_wrong])
        return self


class ScriptJob(Fields):
    """A TrainingJob that runs a script."""

    api_version: Literal["spillway.dev/v1alpha1"]
    kind: Literal["TrainingJob"]
    metadata: Metadata
    spec: ScriptSpec
