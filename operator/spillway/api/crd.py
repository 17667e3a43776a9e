"""Generates the CustomResourceDefinitions: `python -m spillway.api.crd` writes crds/, `--check` compares.

A structural schema: references inlined, bounds kept, defaults only where they are static. What a schema cannot say
(immutability, unions, divisibility) is said in CEL; `load_job` says the same with better words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

from spillway.api.earlier import HUGGING_FACE_INSTEAD, MOVED, OVERRIDES, problem_of_earlier
from spillway.api.field_types import (
    EXTENDED_RESOURCE_NEEDED,
    MAX_DOMAIN_LENGTH,
    NATIVE_RESOURCES,
    NUMBER_SCHEMA,
    QUOTA_PREFIX,
    RESOURCE_PATTERN,
    STAYS_ON_CLAIM,
    quoted,
)
from spillway.api.limits import (
    CHAT_NEEDS_SOURCE,
    GROUP,
    MANAGER,
    MAX_ENV_BYTES,
    MAX_NAME_LENGTH,
    MAX_RANKS,
    MEMBERS_HAVE_STEPS,
    MEMBERS_ON_ONE_NODE,
    MEMBERS_SHARE_FILES,
    MIN_TEXT_VOCABULARY,
    NEEDS_EVALUATION,
    NOT_MOUNTED_THERE,
    NOT_OF_MEMBERS,
    OWN_DIRECTORIES,
    QUEUE_ANNOTATIONS,
    RESERVED_KEYS,
    RESERVED_PREFIXES,
    RESERVED_VARIABLES,
    TOKENS_NEED_SOURCE,
    VERSION,
)
from spillway.api.memory import Parallelism
from spillway.api.model import CHAT_EVALUATES_CHAT, FETCHED_BELOW, FETCHED_ON_CLAIM, TEXT_EVALUATES_NO_CHAT, Data, Model
from spillway.api.operator_config import CONFIG_NAME, OperatorConfigSpec
from spillway.api.pod import ASSIGNED_BY_CLUSTER, FIXED_WITHOUT_PLAN, ONLY_CLAIMS_ARE_WRITTEN, REQUESTED_BY_PLAN
from spillway.api.profiles import MemoryProfileSpec, MemoryProfileStatus, NodeProfileSpec
from spillway.api.rejections import NOT_YET
from spillway.api.script import (
    COMMAND_IS_EMPTY,
    SCRIPT_ENCRYPTS,
    SCRIPT_NEEDS_MEMORY,
    SCRIPT_PLANS,
    SCRIPT_SAVES,
    SCRIPT_SHARDS,
    SCRIPT_TRAINS,
    TRAINED_FIELDS,
    ScriptSpec,
)
from spillway.api.search_space import BOTH_ENDS, MEMBERS_ARE_MADE, STEP_OF_RANGE, TRIALS_NEEDED
from spillway.api.status import TrainingJobStatus
from spillway.api.tracking import ONE_TRACKER
from spillway.api.training import ONE_WARM_UP, Training
from spillway.api.training_job import TrainingJobSpec
from spillway.update_rules import RULE_FIELDS, UpdateRule

Schema = dict[str, Any]

DIRECTORY = Path("crds")
MAX_INT64 = 2**63 - 1
NO_FIELD = "Not a field any more"
REQUIRED = "this field is required (or command, to run a script)"

# --- rules ------------------------------------------------------------------------------------------------------------


def _rule(rule: str, message: str, shown: str = "", values: str = "", at: str = "") -> Schema:
    """A validation rule. `message` says what is allowed; `shown` does so with the `values` found (CEL, separated by
    commas) in place of %s and %d. The API server rejects texts joined in other ways, because it cannot bound their
    cost. `at` is the wrong field below this one."""
    made = {"rule": rule, "message": message}
    if shown:
        made["messageExpression"] = f"'{shown}'.format([{values}])"
    if at:
        made["fieldPath"] = at
    return made


def _one_of(*names: str) -> Schema:
    given = ", ".join(f"has(self.{name})" for name in names)
    found = ", ".join(f"has(self.{name}) ? '{name}' : ''" for name in names)
    needed = f"exactly one of {', '.join(names)} is needed"
    rule = f"[{given}].filter(given, given).size() == 1"
    return _rule(rule, needed, f"{needed}; found %s", f"[{found}].filter(name, name != '')")


def _immutable(name: str, model: type[BaseModel]) -> Schema:
    changed = ", ".join(_if_changed(field.alias or "", field.default is None) for field in model.model_fields.values())
    never = f"{name} is immutable; create a new TrainingJob"
    return _rule("self == oldSelf", never, f"%s changed, but {never}", f"[{changed}].filter(name, name != '')")


def _if_changed(name: str, may_lack: bool = False) -> str:
    """CEL: the field's name when its value changed, else ''."""
    differs = f"self.{name} != oldSelf.{name}"
    if may_lack:
        differs = f"has(self.{name}) != has(oldSelf.{name}) || (has(self.{name}) && {differs})"
    return f"{differs} ? '{name}' : ''"


def _immutable_text(kind: str) -> Schema:
    return _rule(
        "self == oldSelf", "is immutable", f"immutable: %s cannot become %s; create a new {kind}", "oldSelf, self"
    )


def _no_reserved_keys(*allowed: str) -> Schema:
    reserved = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES)
    reserved += "".join(f" || key == '{key}'" for key in RESERVED_KEYS)
    if allowed:
        reserved = f"!(key in {list(allowed)}) && ({reserved})"
    return _rule(
        f"!self.exists(key, {reserved})",
        f"reserved keys: {', '.join((*RESERVED_PREFIXES, *RESERVED_KEYS))}",
        "%s is reserved; use another key",
        f"self.filter(key, {reserved})[0]",
    )


def _never(path: str, problem: str) -> Schema:
    """A field below spec that this operator never honours; other managers may."""
    given = {"checkpoint.resume": "self.checkpoint.resume != 'OwnOnly'"}
    rule = f"self.managedBy != '{MANAGER}' || !has(self.{path})"
    return _rule(f"{rule} || !({given[path]})" if path in given else rule, problem, at=f".{path}")


_EXTENDED = (
    f"self.indexOf('/') <= {MAX_DOMAIN_LENGTH} && !self.startsWith('{QUOTA_PREFIX}') && "
    f"!self.contains('{NATIVE_RESOURCES}')"
)
"""CEL: not a resource of Kubernetes' own, and short enough for a quota."""
_LOCATION = [
    _one_of("claim", "path"),
    _rule(
        "!has(self.path) || !has(self.subPath) || size(self.subPath) == 0",
        "only applies to a claim; leave it out, and write the whole directory into path",
        at=".subPath",
    ),
    _rule("!has(self.fetch) || has(self.claim)", FETCHED_ON_CLAIM, at=".fetch"),
    _rule(
        "!has(self.fetch) || !has(self.claim) || (has(self.subPath) && size(self.subPath) > 0)",
        FETCHED_BELOW,
        at=".subPath",
    ),
]
_EXTENDED_NAMES = [
    _rule(
        f"self.all(name, name.matches(r'{RESOURCE_PATTERN}') && {_EXTENDED.replace('self', 'name')})",
        EXTENDED_RESOURCE_NEEDED,
    )
]
_WORLD = "self.parallelism.nodes * self.parallelism.devicesPerNode"
_OTHERS = f"self.managedBy != '{MANAGER}'"
_STRATEGY = "self.parallelism.strategy"
_SIZES = "has(self.model.config) && self.model.config"
_LISTED = "has(self.members) && self.members.size() > 0"
_MEMBERS = f"(has(self.search) || ({_LISTED}))"
_BATCH_RANKS = f"({_MEMBERS} ? 1 : {_WORLD})"
"""Of a model: a member of a sweep trains on one device."""
_ADVANCED = "self.memory.advanced"
_NO_QUEUE = "!(has(self.scheduling.queueName) && size(self.scheduling.queueName) > 0)"
_DISABLED = "self.memory.mode == 'Disabled'"
_TRAINS = "has(self.model) && has(self.data) && has(self.training)"
_SCRIPT = "has(self.command) && size(self.command) > 0"
_WAS_SCRIPT = _SCRIPT.replace("self", "oldSelf")
WRONG_TOGETHER: tuple[tuple[str, str, str], ...] = (
    (f"self.model.precision.compute == 'float16' && !({_STRATEGY} in ['Auto', 'Ddp'])", ".parallelism.strategy",
     "model.precision.compute: float16 needs loss scaling, which only Ddp has; use Ddp, or bfloat16"),
    (f"self.training.optimizer.moments == 'int8' && !({_STRATEGY} in ['Auto', 'Ddp'])", ".parallelism.strategy",
     "training.optimizer.moments: int8 shares one scale among 256 values of a parameter, and only Ddp keeps these on "
     "one rank; use Ddp, or moments: bfloat16"),
    ("has(self.training.lossScale) && self.model.precision.compute != 'float16'", ".training.lossScale",
     "only applies with model.precision.compute: float16; leave it out"),
    (f"{_SIZES}.architecture in ['gpt2', 'bert'] && has(self.model.config.maxPositions) && "
     "self.training.sequenceLength > self.model.config.maxPositions", ".training.sequenceLength",
     "must be at most model.config.maxPositions"),
    (f"{_SIZES}.architecture == 'llama' && has(self.model.lora) && double(self.model.config.dropout) > 0.0",
     ".model.config.dropout",
     "with model.lora, llama is the implementation of transformers, which has no dropout; leave it out"),
    (f"{_SIZES}.architecture == 'bert' && self.model.config.vocabSize < {MIN_TEXT_VOCABULARY + 1}",
     ".model.config.vocabSize",
     f"must be at least {MIN_TEXT_VOCABULARY + 1} for text: one token for each byte, one for the end of text, and one "
     f"for the mask"),
    ("has(self.data.chat) && !has(self.model.source)", ".data.chat", CHAT_NEEDS_SOURCE),
    ("has(self.data.tokens) && !has(self.model.source)", ".data.tokens", TOKENS_NEED_SOURCE),
    ("has(self.data.evaluation) && has(self.data.evaluation.chat) && !has(self.data.chat)", ".data.evaluation.chat",
     CHAT_EVALUATES_CHAT),
    ("has(self.data.evaluation) && has(self.data.evaluation.text) && has(self.data.chat)", ".data.evaluation.text",
     TEXT_EVALUATES_NO_CHAT),
    ("has(self.training.earlyStopping) && !has(self.data.evaluation)", ".training.earlyStopping", NEEDS_EVALUATION),
    ("self.checkpoint.keepBest && !has(self.data.evaluation)", ".checkpoint.keepBest", NEEDS_EVALUATION),
    (f"{_MEMBERS} && has(self.training.epochs)", ".training.epochs", MEMBERS_HAVE_STEPS),
    (f"{_MEMBERS} && has(self.training.earlyStopping)", ".training.earlyStopping", NOT_OF_MEMBERS),
    (f"{_MEMBERS} && self.checkpoint.keepBest", ".checkpoint.keepBest", NOT_OF_MEMBERS),
    (f"{_DISABLED} && !({_ADVANCED}.optimizer.placement in ['Auto', 'Device'])",
     ".memory.advanced.optimizer.placement", "mode Disabled keeps everything on the device; use Auto or Device"),
    (f"{_DISABLED} && !({_ADVANCED}.optimizer.overlap in ['Auto', 'None'])",
     ".memory.advanced.optimizer.overlap", "mode Disabled does not overlap the update; use Auto or None"),
    (f"{_DISABLED} && !({_ADVANCED}.activations.policy in ['Auto', 'Keep'])",
     ".memory.advanced.activations.policy", "mode Disabled keeps everything on the device; use Auto or Keep"),
    (f"has({_ADVANCED}.activations.hostReserve) && ({_DISABLED} || "
     f"!({_ADVANCED}.activations.policy in ['Auto', 'Nvme']))", ".memory.advanced.activations.hostReserve",
     "only activations that are spilled to NVMe can move to this memory; leave it out, or use policy Nvme without "
     "mode Disabled"),
    ("has(self.search) && has(self.members)", ".members", MEMBERS_ARE_MADE),
    (f"has(self.objective) && !({_MEMBERS})", ".objective",
     "compares the members of a sweep, but this job has no members; leave it out"),
    (f"{_MEMBERS} && self.parallelism.nodes > 1", ".parallelism.nodes", MEMBERS_ON_ONE_NODE),
    (f"{_LISTED} && self.parallelism.devicesPerNode > self.members.size()", ".parallelism.devicesPerNode",
     "each member trains on one device, so other devices would be idle; use as many as there are members, or fewer"),
    (f"{_MEMBERS} && self.parallelism.devicesPerNode > 1 && self.spill.encryption != 'None'", ".spill.encryption",
     MEMBERS_SHARE_FILES),
    (f"{_MEMBERS} && !({_STRATEGY} in ['Auto', 'Ddp'])", ".parallelism.strategy",
     "each member trains on one device, where nothing is sharded; use Ddp, or a job for each model"),
    (f"{_MEMBERS} && has({_ADVANCED}.activations.hostReserve)", ".memory.advanced.activations.hostReserve",
     "activations of a sweep do not move while its members run, so this memory would not be used; leave it out"),
    ("has(self.objective) && self.objective.metric == 'EvaluationLoss' && !has(self.data.evaluation)",
     ".objective.metric", "needs held-out text: give data.evaluation, or use Loss"),
    (f"!({_OTHERS}) && {_STRATEGY}.startsWith('Zero') && {_ADVANCED}.optimizer.overlap == 'Forward'",
     ".memory.advanced.optimizer.overlap",
     "does not work with parallelism.strategy Zero1, Zero2 or Zero3; use None or Auto, or strategy Fsdp"),
    (f"!({_OTHERS}) && {_STRATEGY}.startsWith('Zero') && has(self.model.lora)", ".model.lora",
     "does not work with parallelism.strategy Zero1, Zero2 or Zero3, which need all parameters to be trained; use Ddp "
     "or Fsdp"),
    (f"!({_OTHERS}) && self.parallelism.device == 'Cuda' && {_WORLD} > 1 && !({_STRATEGY} in ['Auto', 'Ddp'])",
     ".parallelism.strategy",
     "runs on CPUs only so far; use Ddp on Cuda devices (`spillway plan` compares all strategies)"),
    (f"self.scheduling.gang == 'Required' && self.parallelism.nodes > 1 && {_NO_QUEUE}",
     ".scheduling.gang", "Required needs a queue; set scheduling.queueName (Kueue), or use Auto"),
    (f"has(self.scheduling.workloadPriorityClassName) && size(self.scheduling.workloadPriorityClassName) > 0 && "
     f"{_NO_QUEUE}",
     ".scheduling.workloadPriorityClassName",
     "only applies to jobs in a queue; set scheduling.queueName, or use priorityClassName"),
)  # fmt: skip
"""What a run rejects for two fields together: CEL that holds when it is wrong, the field below spec, what to do."""
WRONG_IN_SCRIPTS: tuple[tuple[str, str, str], ...] = (
    *((f"has(self.{name})", f".{name}", SCRIPT_TRAINS) for name in TRAINED_FIELDS),
    ("size(self.command[0]) == 0", ".command", COMMAND_IS_EMPTY),
    ("!has(self.pod.resources.memory)", ".pod.resources.memory", SCRIPT_NEEDS_MEMORY),
    ("self.memory.mode != 'Auto'", ".memory.mode", SCRIPT_PLANS),
    ("has(self.memory.budget.device)", ".memory.budget.device", SCRIPT_PLANS),
    ("has(self.memory.budget.host)", ".memory.budget.host", SCRIPT_PLANS),
    (f"{_ADVANCED}.optimizer.placement != 'Auto' || {_ADVANCED}.optimizer.overlap != 'Auto' || "
     f"{_ADVANCED}.activations.policy != 'Auto' || has({_ADVANCED}.activations.hostReserve) || "
     f"{_ADVANCED}.parameters.placement != 'Auto'", ".memory.advanced", SCRIPT_PLANS),
    ("double(self.memory.endurance.driveWritesPerDay) != 1.0", ".memory.endurance", SCRIPT_PLANS),
    ("self.checkpoint.everySteps != 200", ".checkpoint.everySteps", SCRIPT_SAVES),
    ("self.checkpoint.keep != 2", ".checkpoint.keep", SCRIPT_SAVES),
    ("self.checkpoint.keepBest", ".checkpoint.keepBest", SCRIPT_SAVES),
    ("has(self.checkpoint.from)", ".checkpoint.from", SCRIPT_SAVES),
    (f"{_STRATEGY} != 'Auto'", ".parallelism.strategy", SCRIPT_SHARDS),
    ("self.spill.encryption != 'None'", ".spill.encryption", SCRIPT_ENCRYPTS),
)  # fmt: skip
"""The same for a job with command: what it cannot have, and what it lacks."""


def _together(wrong: str, at: str, problem: str) -> Schema:
    of_a_model = re.search(r"self\.(model|data|training)\b", wrong)
    return _rule(f"!({_TRAINS} && ({wrong}))" if of_a_model else f"!({wrong})", problem, at=at)


_SUB_PATH = [
    _rule(
        "!self.startsWith('/') && !self.split('/').exists(part, part == '..')",
        STAYS_ON_CLAIM,
        f"%s {STAYS_ON_CLAIM}",
        "self",
    )
]
_LOCKED_UNLESS_SUSPENDED = {
    "memory": False, "scheduling": False, "spill": False, "checkpoint": False, "search": True, "members": True,
    "objective": True,
}  # fmt: skip
"""Field of a spec -> whether it may be left out."""
_CHANGED = ", ".join(_if_changed(name, may_lack) for name, may_lack in _LOCKED_UNLESS_SUSPENDED.items())


def _owners_of_rule_fields() -> dict[str, list[str]]:
    """Field of training.optimizer that not all rules have -> names of those that do."""
    owners = {to_camel(name): [rule.value for rule in UpdateRule if name in rule.defaults] for name in RULE_FIELDS}
    return {name: found for name, found in owners.items() if len(found) < len(UpdateRule)}


JOB_RULES: dict[str, list[Schema]] = {
    "": [
        _rule(
            f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
            f"metadata.name: at most {MAX_NAME_LENGTH} characters",
            f"metadata.name %s has %d characters; at most {MAX_NAME_LENGTH} are allowed, because names of pods contain "
            f"it",
            "self.metadata.name, size(self.metadata.name)",
        ),
        _rule(
            "!self.metadata.name.contains('.')",
            "metadata.name: lower-case letters, digits and hyphens, no dot",
            "metadata.name %s: use lower-case letters, digits and hyphens, but no dot, because names of Services "
            "contain it",
            "self.metadata.name",
        ),
    ],
    "spec": [
        _rule(
            f"oldSelf.suspend || [{_CHANGED}].all(name, name == '')",
            f"{', '.join(_LOCKED_UNLESS_SUSPENDED)} can change only while the job is suspended; set suspend: true "
            f"first",
            "%s cannot change while suspend is false; set suspend: true first",
            f"[{_CHANGED}].filter(name, name != '')",
        ),
        _rule(
            f"!({_TRAINS}) || "
            f"self.training.microBatchSize * {_BATCH_RANKS} < 1 || "  # refused by their minima; nothing is divided by 0
            f"self.training.globalBatchSize % (self.training.microBatchSize * {_BATCH_RANKS}) == 0",
            "must be a multiple of microBatchSize x nodes x devicesPerNode",
            "%d must be a multiple of microBatchSize x nodes x devicesPerNode (%d)",
            f"self.training.globalBatchSize, self.training.microBatchSize * {_BATCH_RANKS}",
            ".training.globalBatchSize",
        ),
        _rule(
            f"{_WORLD} <= {MAX_RANKS}",
            f"nodes x devicesPerNode must be at most {MAX_RANKS} ranks",
            f"at most {MAX_RANKS} ranks; nodes x devicesPerNode is %d x %d = %d",
            f"self.parallelism.nodes, self.parallelism.devicesPerNode, {_WORLD}",
            ".parallelism",
        ),
        _rule(
            "!(has(self.memory.mode) && self.memory.mode == 'Disabled' && has(self.pod.resources.memory))",
            FIXED_WITHOUT_PLAN,
            at=".pod.resources.memory",
        ),
        *(_together(*wrong) for wrong in WRONG_TOGETHER),
        *(_never(path, problem) for path, problem in NOT_YET.items()),
        *(_rule(f"!({_SCRIPT} && ({wrong}))", problem, at=at) for wrong, at, problem in WRONG_IN_SCRIPTS),
        *(_rule(f"({_SCRIPT}) || has(self.{name})", REQUIRED, at=f".{name}") for name in ("model", "data", "training")),
        _rule(
            f"({_SCRIPT}) == ({_WAS_SCRIPT}) && (!({_SCRIPT}) || self.command == oldSelf.command)",
            "command is immutable; create a new TrainingJob",
            at=".command",
        ),
    ],
    "spec.model": [_immutable("model", Model), _one_of("config", "source", "entrypoint")],
    "spec.model.config": [
        _rule(
            "self.numHeads < 1 || self.hiddenSize % self.numHeads == 0",
            "must divide hiddenSize",
            "%d must divide hiddenSize (%d)",
            "self.numHeads, self.hiddenSize",
            ".numHeads",
        ),
        _rule(
            "!has(self.numKeyValueHeads) || self.numKeyValueHeads < 1 || self.numHeads % self.numKeyValueHeads == 0",
            "must divide numHeads",
            "%d must divide numHeads (%d)",
            "self.numKeyValueHeads, self.numHeads",
            ".numKeyValueHeads",
        ),
        _rule(
            "self.architecture != 'llama' || self.numHeads < 1 || (self.hiddenSize / self.numHeads) % 2 == 0",
            "hiddenSize / numHeads must be even: rotary embeddings need an even number",
            at=".numHeads",
        ),
        _rule(
            "self.architecture == 'llama' || !has(self.numKeyValueHeads) || self.numKeyValueHeads == self.numHeads",
            "only llama can have fewer key and value heads than attention heads; leave it out, or write numHeads",
            "%s has one key and value head per attention head; leave it out, or write %d",
            "self.architecture, self.numHeads",
            ".numKeyValueHeads",
        ),
        _rule(
            "self.architecture != 't5' || !has(self.tieWordEmbeddings) || self.tieWordEmbeddings",
            "t5 has one matrix for all its embeddings; leave it out",
            at=".tieWordEmbeddings",
        ),
    ],
    "spec.model.source": _LOCATION,
    "spec.model.source.subPath": _SUB_PATH,
    "spec.data": [_immutable("data", Data), _one_of("text", "chat", "tokens", "entrypoint", "builtin")],
    "spec.data.text": _LOCATION,
    "spec.data.text.subPath": _SUB_PATH,
    "spec.data.chat": _LOCATION,
    "spec.data.chat.subPath": _SUB_PATH,
    "spec.data.tokens": _LOCATION,
    "spec.data.tokens.subPath": _SUB_PATH,
    "spec.data.evaluation": [
        _rule(
            "[has(self.text), has(self.chat), has(self.fraction)].filter(given, given).size() <= 1",
            "at most one of text, chat, fraction is allowed",
        )
    ],
    "spec.data.evaluation.text": _LOCATION,
    "spec.data.evaluation.text.subPath": _SUB_PATH,
    "spec.data.evaluation.chat": _LOCATION,
    "spec.data.evaluation.chat.subPath": _SUB_PATH,
    "spec.checkpoint.subPath": _SUB_PATH,
    "spec.checkpoint.from": _LOCATION,
    "spec.checkpoint.from.subPath": _SUB_PATH,
    "spec.training": [
        _immutable("training", Training),
        _rule(
            "!has(self.steps) || self.schedule.warmupSteps <= self.steps",
            "warmupSteps must be at most training.steps",
            "%d must be at most training.steps (%d)",
            "self.schedule.warmupSteps, self.steps",
            ".schedule.warmupSteps",
        ),
        _one_of("steps", "epochs"),
    ],
    "spec.training.schedule": [
        _rule("!has(self.warmupRatio) || self.warmupSteps == 0", ONE_WARM_UP, at=".warmupRatio"),
    ],
    "spec.training.lossScale": [
        _rule(
            "self.minimum <= self.initial",
            "must be at most lossScale.initial",
            "%d: must be at most lossScale.initial (%d)",
            "self.minimum, self.initial",
            ".minimum",
        ),
    ],
    "spec.training.optimizer": [
        _rule(
            f"!has(self.{name}) || !has(self.name) || self.name in {list(owners)}",
            f"only {' and '.join(owners)} {'has' if len(owners) == 1 else 'have'} {name}; leave it out",
            "%s: %s does not use it; leave it out",
            f"self.{name}, self.name",
            f".{name}",
        )
        for name, owners in _owners_of_rule_fields().items()
    ],
    "spec.parallelism": [_immutable("parallelism", Parallelism)],
    "spec.memory": [
        # The API server tries rules on the bare default, {}, too.
        _rule(
            "!has(self.mode) || self.mode != 'Disabled' || (has(self.budget) && has(self.budget.host))",
            "required with mode Disabled, because no plan computes it",
            at=".budget.host",
        ),
    ],
    "spec.spill": [
        _rule(
            "!has(self.numVolumes) || self.numVolumes <= 1 || "
            "(has(self.storageClassName) && size(self.storageClassName) > 0)",
            "without storageClassName there is only one volume, an emptyDir; set storageClassName, or leave numVolumes "
            "out",
            at=".numVolumes",
        ),
    ],
    "spec.pod.env": [
        _rule(
            f"self.map(one, has(one.value) ? size(one.value) : 0).sum() <= {MAX_ENV_BYTES}",
            f"all values together may have {MAX_ENV_BYTES} characters; move long values to a Secret",
            f"all values together have %d characters, at most {MAX_ENV_BYTES} are allowed; move long values to a "
            f"Secret",
            "self.map(one, has(one.value) ? size(one.value) : 0).sum()",
        )
    ],
    "spec.pod.mounts[]": [
        _one_of("claim", "configMap", "secret"),
        _rule(
            f"!self.path.matches(r'{OWN_DIRECTORIES}')",
            NOT_MOUNTED_THERE,
            f"%s: {NOT_MOUNTED_THERE}",
            "self.path",
            ".path",
        ),
        _rule("!has(self.writable) || !self.writable || has(self.claim)", ONLY_CLAIMS_ARE_WRITTEN, at=".writable"),
    ],
    "spec.pod.mounts[].subPath": _SUB_PATH,
    "spec.pod.env[]": [
        _one_of("value", "valueFrom"),
        _rule(
            f"!(self.name in {list(RESERVED_VARIABLES)})",
            f"the operator sets these itself: {', '.join(RESERVED_VARIABLES)}",
            "the operator sets %s itself; leave it out",
            "self.name",
            ".name",
        ),
    ],
    "spec.pod.labels": [_no_reserved_keys()],
    "spec.pod.annotations": [_no_reserved_keys(*QUEUE_ANNOTATIONS)],
    "spec.pod": [
        _rule(
            "!has(self.resources) || !has(self.resources.extended) || "
            "!has(self.resourceName) || !(self.resourceName in self.resources.extended)",
            REQUESTED_BY_PLAN,
            at=".resources.extended",
        )
    ],
    "spec.pod.resources.extended": _EXTENDED_NAMES,
    "spec.pod.securityContext": [
        _rule(
            "!has(self.assignedByCluster) || !self.assignedByCluster || "
            "!(has(self.runAsUser) || has(self.runAsGroup) || has(self.fsGroup))",
            ASSIGNED_BY_CLUSTER,
            at=".assignedByCluster",
        )
    ],
    "spec.pod.resourceName": [
        _rule(
            _EXTENDED,
            EXTENDED_RESOURCE_NEEDED,
            f"%s: {EXTENDED_RESOURCE_NEEDED}",
            "self",
        )
    ],
    "spec.tracking": [_rule("has(self.tensorBoard) || has(self.mlflow) || has(self.wandb)", ONE_TRACKER)],
    "spec.search": [
        _rule("self.algorithm == 'Grid' || has(self.trials)", TRIALS_NEEDED, at=".trials"),
    ],
    "spec.search.parameters[]": [
        _one_of("values", "min"),
        _rule("has(self.min) == has(self.max)", BOTH_ENDS, at=".max"),
        _rule("!has(self.step) || has(self.min)", STEP_OF_RANGE, at=".step"),
    ],
    "spec.managedBy": [_immutable_text("TrainingJob")],
}
"""CEL by field; transition rules see the stored object as oldSelf"""

CONFIG_RULES: dict[str, list[Schema]] = {
    "": [
        _rule(
            f"self.metadata.name == '{CONFIG_NAME}'",
            f"metadata.name: only {CONFIG_NAME} is used",
            f"metadata.name %s: only {CONFIG_NAME} is used",
            "self.metadata.name",
        )
    ],
    "spec.jobDefaults.pod.env[]": [_one_of("value", "valueFrom")],
    "spec.networkPresets[].env[]": [_one_of("value", "valueFrom")],
    "spec.networkPresets[].resources.extended": _EXTENDED_NAMES,
    "spec.networkPresets[].annotations": [_no_reserved_keys()],
}
MEMBER_SECTIONS: dict[str, type[BaseModel]] = {
    f"spec.members[].{name}": section for name, section in (("model", Model), ("data", Data), ("training", Training))
}
"""Parts of a member with the fields of these types, all optional."""
NO_MEMBERS_FIELDS = {"spec.members[].training": ("epochs", "earlyStopping")}
"""What no member has."""


PROFILE_RULES: dict[str, list[Schema]] = {"spec.fingerprint": [_immutable_text("MemoryProfile")]}

# --- kinds ------------------------------------------------------------------------------------------------------------

Column = tuple[str, str, str, int, str]
"""Name, JSON path, type, priority (1: only with -o wide), description."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One CustomResourceDefinition."""

    kind: str
    short_name: str
    scope: str
    description: str
    spec: type[BaseModel]
    columns: tuple[Column, ...]
    status: type[BaseModel] | None = None
    rules: Mapping[str, list[Schema]] = field(default_factory=dict)
    categories: tuple[str, ...] = ()
    selectable: tuple[str, ...] = ()

    @property
    def plural(self) -> str:
        return f"{self.kind.lower()}s"

    @property
    def path(self) -> Path:
        return DIRECTORY / f"{self.plural}.{GROUP}.yaml"


TRAINING_JOB = Kind(
    kind="TrainingJob",
    short_name="tjob",
    scope="Namespaced",
    description="A training job with memory budgets for device memory, host memory and NVMe.",
    spec=TrainingJobSpec,
    status=TrainingJobStatus,
    rules=JOB_RULES,
    categories=("training",),
    selectable=(".spec.scheduling.queueName", ".status.state"),
    columns=(
        ("State", ".status.state", "string", 0, "State of the job in one word."),
        ("Step", ".status.progress.step", "integer", 0, "Number of optimizer steps completed."),
        ("Progress", ".status.progress.display", "string", 0, "Share of the steps that is completed."),
        ("Loss", ".status.progress.loss", "string", 0, "Training loss of the last step."),
        ("Tok/s", ".status.progress.tokensPerSecond", "string", 0, "Tokens per second, of all ranks."),
        ("Device-Mem", ".status.memory.device", "string", 0, "Peak memory use of a device, and its budget."),
        ("Spilled", ".status.memory.spilled", "string", 0, "Peak bytes of a rank in host memory and on NVMe."),
        ("Restarts", ".status.attempts.restarts", "integer", 1, "Restarts that count against lifecycle.maxRestarts."),
        ("ETA", ".status.progress.eta", "string", 0, "Estimated time until the last step."),
        ("Best", ".status.bestMember", "string", 1, "Name of the best member so far."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since the object was created."),
    ),
)
MEMORY_PROFILE = Kind(
    kind="MemoryProfile",
    short_name="mprof",
    scope="Namespaced",
    description="Observed memory use of jobs with one model and one plan. The operator writes it and keeps it when "
    "the jobs are deleted.",
    spec=MemoryProfileSpec,
    status=MemoryProfileStatus,
    rules=PROFILE_RULES,
    selectable=(".spec.fingerprint",),
    columns=(
        ("Model", ".spec.model", "string", 0, "The model in words."),
        ("Ranks", ".spec.worldSize", "integer", 0, "Number of ranks (training processes)."),
        ("Device", ".status.peaks.device.max", "string", 0, "Largest peak bytes of a rank in device memory."),
        ("Host", ".status.peaks.host.max", "string", 0, "Largest peak bytes of a rank in host memory."),
        ("NVMe", ".status.peaks.nvme.max", "string", 0, "Largest peak bytes of a rank on NVMe."),
        ("Attempts", ".status.count", "integer", 0, "Number of attempts that were observed."),
        ("Last", ".status.attempt", "string", 1, "Attempt that was observed last."),
        (
            "Clamped",
            ".status.clamped",
            "boolean",
            1,
            "Whether a peak that a trainer reported was implausible and was limited.",
        ),
        ("Plan", ".spec.plan", "string", 1, "The plan in words."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since the first observation."),
    ),
)
NODE_PROFILE = Kind(
    kind="NodeProfile",
    short_name="nprof",
    scope="Cluster",
    description="Measured capacities and rates of the node of the same name.",
    spec=NodeProfileSpec,
    columns=(
        ("Device", ".spec.deviceKind", "string", 0, "Kind of device that was measured."),
        ("Devices", ".spec.numDevices", "integer", 0, "Number of devices of the node."),
        ("Device-Mem", ".spec.deviceMemory", "string", 0, "Usable memory of each device."),
        ("Host", ".spec.hostMemory", "string", 0, "Host memory of the node for pods."),
        ("NVMe", ".spec.nvmeCapacity", "string", 0, "Disk space of the node for spilling."),
        ("H2D", ".spec.link.h2dBytesPerSecond", "string", 0, "Bytes per second from host memory to a device."),
        ("Write", ".spec.nvmeWriteBytesPerSecond", "string", 1, "Bytes per second to all NVMe drives."),
        ("Source", ".spec.source", "string", 0, "Where the figures come from: Probe, Training or User."),
        ("Measured", ".spec.measuredTime", "date", 0, "Time since the measurement."),
    ),
)
OPERATOR_CONFIG = Kind(
    kind="OperatorConfig",
    short_name="opconf",
    scope="Cluster",
    description="Defaults and other settings for all TrainingJobs of the cluster. Only the object named default is "
    "used.",
    spec=OperatorConfigSpec,
    rules=CONFIG_RULES,
    columns=(
        ("Image", ".spec.jobDefaults.pod.image", "string", 0, "Trainer image of jobs that do not set pod.image."),
        ("Queue", ".spec.jobDefaults.scheduling.queueName", "string", 0, "Kueue LocalQueue of jobs without one."),
        ("Age", ".metadata.creationTimestamp", "date", 0, "Time since the object was created."),
    ),
)
KINDS = (TRAINING_JOB, MEMORY_PROFILE, NODE_PROFILE, OPERATOR_CONFIG)

# --- the definition ---------------------------------------------------------------------------------------------------


def definition(kind: Kind = TRAINING_JOB) -> Schema:
    """The whole CustomResourceDefinition as plain data."""
    singular = kind.kind.lower()
    names: Schema = {
        "plural": kind.plural,
        "singular": singular,
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "shortNames": [kind.short_name],
    }
    if kind.categories:
        names["categories"] = list(kind.categories)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.plural}.{GROUP}"},
        "spec": {"group": GROUP, "scope": kind.scope, "names": names, "versions": [_version(kind)]},
    }


def _version(kind: Kind) -> Schema:
    made: Schema = {"name": VERSION, "served": True, "storage": True}
    if kind.status is not None:
        made["subresources"] = {"status": {}}
    made["additionalPrinterColumns"] = [
        {"name": name, "jsonPath": path, "type": type_, "priority": priority, "description": text}
        for name, path, type_, priority, text in kind.columns
    ]
    if kind.selectable:
        made["selectableFields"] = [{"jsonPath": path} for path in kind.selectable]
    return made | {"schema": {"openAPIV3Schema": _object_schema(kind)}}


def _object_schema(kind: Kind) -> Schema:
    made: Schema = {
        "description": kind.description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of the schema."},
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": structural(kind.spec, "spec", kind.rules),
        },
    }
    if kind.spec is TrainingJobSpec:
        _add_earlier(made["properties"]["spec"])
        _add_command(made["properties"]["spec"])
    if kind.status is not None:
        made["properties"]["status"] = structural(kind.status, "status", kind.rules)
    if "" in kind.rules:
        made["x-kubernetes-validations"] = kind.rules[""]
    return made


def _add_command(spec: Schema) -> None:
    """What a script has in place of a model, its data and training, which are needed by a rule then."""
    properties = spec["properties"]
    del spec["required"]
    first = {name: properties.pop(name) for name in ("model", "data", "training")}
    command = structural(ScriptSpec, "spec", {})["properties"]["command"]
    spec["properties"] = first | {"command": command} | properties


def _add_earlier(spec: Schema) -> None:
    """Fields of earlier schemas (earlier.py): stored objects keep them, a new value is rejected. They have the types of
    the fields that they became, without which the API server would not see that a value is the one that was there."""
    for old, new in MOVED.items():
        owner, _, name = old.rpartition(".")
        _properties(spec, owner)[name] = _bare(_node(spec, new)) | _rejected(problem_of_earlier(old) or "")
    _properties(spec, "data")["huggingFace"] = {
        "type": "object", "x-kubernetes-preserve-unknown-fields": True,
    } | _rejected(HUGGING_FACE_INSTEAD)  # fmt: skip
    overrides = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1024}, "maxProperties": 64}
    _properties(spec, "members")["overrides"] = overrides | _rejected(OVERRIDES)


def _rejected(problem: str) -> Schema:
    return {"description": f"{NO_FIELD}: {problem}.", "x-kubernetes-validations": [_rule("false", problem)]}


def _node(spec: Schema, path: str) -> Schema:
    for name in path.split(".") if path else ():
        spec = spec["properties"][name]
    return spec


def _properties(spec: Schema, path: str) -> Schema:
    node = _node(spec, path)
    found: Schema = node.get("items", node)["properties"]
    return found


def _bare(schema: Schema) -> Schema:
    """Types, bounds and descriptions."""
    left = ("default", "required", "x-kubernetes-validations", "x-kubernetes-list-map-keys")
    made = {key: value for key, value in schema.items() if key not in left}
    if "x-kubernetes-list-type" in made:
        made["x-kubernetes-list-type"] = "atomic"
    if "properties" in made:
        made["properties"] = {name: _bare(inner) for name, inner in made["properties"].items()}
    return made | {key: _bare(made[key]) for key in ("items", "additionalProperties") if key in made}


def structural(model: type[BaseModel], path: str, rules: Mapping[str, list[Schema]]) -> Schema:
    """The structural schema of a model; `path` is its place in the object."""
    schema = model.model_json_schema(by_alias=True)
    return _Inlining(schema.get("$defs", {}), rules, dict(_bounds(model, path))).inlined(schema, path)


@dataclass(frozen=True, slots=True)
class _Inlining:
    definitions: Schema
    rules: Mapping[str, list[Schema]]
    bounds: Mapping[str, list[Schema]]

    def inlined(self, schema: Schema, path: str) -> Schema:
        schema = _resolved(schema, self.definitions)
        made = _described(schema) | _typed(schema)
        if "properties" in schema:
            made["properties"] = {
                name: self.inlined(inner, f"{path}.{name}") for name, inner in schema["properties"].items()
            }
            if schema.get("required"):
                made["required"] = schema["required"]
        elif path in MEMBER_SECTIONS:
            whole = structural(MEMBER_SECTIONS[path], path, {})
            made |= {"properties": _optional(whole["properties"]), "default": {}}
            for name in NO_MEMBERS_FIELDS.get(path, ()):
                del made["properties"][name]
        elif schema.get("type") == "object":
            made["additionalProperties"] = self.inlined(schema["additionalProperties"], f"{path}.*")
            made["maxProperties"] = schema.get("maxProperties", 64)
        if schema.get("type") == "array":
            made["items"] = self.inlined(schema["items"], f"{path}[]")
            made["x-kubernetes-list-type"] = schema.get("x-kubernetes-list-type", "atomic")
            keys = ("x-kubernetes-list-map-keys", "minItems", "maxItems")
            made |= {key: schema[key] for key in keys if key in schema}
        rules = [*self.rules.get(path, ()), *self.bounds.get(path, ())]
        if rules:
            made["x-kubernetes-validations"] = rules
        return made


_COMPARED = {Gt: (">", "gt", "more than"), Ge: (">=", "ge", "at least"), Lt: ("<", "lt", "less than"),
             Le: ("<=", "le", "at most")}  # fmt: skip


def _bounds(annotation: Any, path: str, metadata: Sequence[Any] = ()) -> Iterator[tuple[str, list[Schema]]]:
    """Rules for the bounds of floats, which are strings in a manifest: path, rules."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for field_ in annotation.model_fields.values():
            yield from _bounds(field_.annotation, f"{path}.{field_.alias}", field_.metadata)
    elif annotation is float and WithJsonSchema(NUMBER_SCHEMA) in metadata:
        compared = [(*_COMPARED[type(one)], one) for one in metadata if type(one) in _COMPARED and one != Ge(0.0)]
        limits = [(sign, words, getattr(one, name)) for sign, name, words, one in compared]
        if limits:
            rule = " && ".join(f"double(self) {sign} {limit!r}" for sign, _, limit in limits)
            allowed = ", ".join(f"{words} {limit:g}" for _, words, limit in limits)
            yield path, [_rule(rule, allowed, f"%s: {allowed}", "self")]
    elif get_origin(annotation) is Annotated:
        base, *own = get_args(annotation)
        flat = [inner for one in own for inner in (one.metadata if isinstance(one, FieldInfo) else [one])]
        yield from _bounds(base, path, [*metadata, *flat])
    elif get_origin(annotation) in (Union, UnionType):
        for choice in get_args(annotation):
            yield from _bounds(choice, path, metadata)
    elif get_origin(annotation) is tuple:
        yield from _bounds(get_args(annotation)[0], f"{path}[]")


def _optional(properties: Schema) -> Schema:
    """The same fields, none of them required or with a default: what a member leaves out is as in the job."""
    made = {}
    for name, schema in properties.items():
        made[name] = {key: value for key, value in schema.items() if key not in ("required", "default")}
        made[name]["description"] = f"{schema['description'].partition(' Default:')[0]} Default: as in the job."
        if "properties" in schema:
            made[name]["properties"] = _optional(schema["properties"])
    return made


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    """Follow $ref and `X | null`: an absent field and null are the same to the API server."""
    while "$ref" in schema or "anyOf" in schema:
        outer = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
        if "$ref" in schema:
            inner = definitions[schema["$ref"].rpartition("/")[2]]
        else:
            (inner,) = [choice for choice in schema["anyOf"] if choice.get("type") != "null"]
        schema = inner | outer
    return schema


def _described(schema: Schema) -> Schema:
    """Description with the default's value, and the default itself where it is static."""
    made: Schema = {}
    text, default = " ".join(schema.get("description", "").split()), _as_yaml(schema, schema.get("default"))
    if schema.get("type") == "object" and isinstance(default, dict) and "properties" in schema:
        made["default"] = {}
    elif default not in (None, "", [], {}):
        made["default"] = default
        shown = ", ".join(map(str, default)) if isinstance(default, list) else _shown(default)
        if shown and "Default" not in text:
            text += f" Default: {shown}."
    if text:
        made["description"] = text
    return made


def _as_yaml(schema: Schema, default: Any) -> Any:
    """Numbers are strings in the manifest."""
    if isinstance(default, list):
        return [_as_yaml(schema.get("items", {}), value) for value in default]
    return quoted(default) if isinstance(default, float) else default


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _typed(schema: Schema) -> Schema:
    """Type and bounds in the words of a structural schema."""
    if schema.get("x-kubernetes-int-or-string"):
        bounds: Schema = {key: schema[key] for key in ("pattern", "maxLength", "minimum") if key in schema}
        return {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            **bounds,
        }
    kind = schema["type"]
    made: Schema = {"type": kind}
    if "const" in schema:
        made["enum"] = [schema["const"]]
    if kind == "integer":
        made["format"] = "int64"
        made["minimum"] = schema.get("minimum", 0)
        made["maximum"] = min(schema.get("maximum", MAX_INT64), MAX_INT64)
    keys = ("enum", "pattern", "minLength", "maxLength", "format") if kind == "string" else ()
    return made | {key: schema[key] for key in keys if key in schema}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


# PyYAML takes 1e-08 for a string and leaves it bare; every other YAML parser takes it for a number.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"^[0-9]+[eE][-+]?[0-9]+$"), list("0123456789"))


def text(kind: Kind = TRAINING_JOB) -> str:
    """The file's contents."""
    body = yaml.dump(definition(kind), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
    return f"# Generated from operator/spillway/api/training_job.py by `make crds`. Do not edit.\n{body}"


def main(arguments: list[str]) -> int:
    """Write the files, or with --check say which are out of step; run from the root of the repository."""
    if "--check" not in arguments:
        DIRECTORY.mkdir(exist_ok=True)
        for kind in KINDS:
            kind.path.write_text(text(kind), encoding="utf-8")
        return 0
    stale = [kind.path for kind in KINDS if not kind.path.is_file() or kind.path.read_text("utf-8") != text(kind)]
    for path in stale:
        sys.stderr.write(f"{path} is out of step with operator/spillway/api/training_job.py: run `make crds`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
