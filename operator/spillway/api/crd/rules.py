"""CEL rules that the CustomResourceDefinitions have in addition to their schemas: immutability, unions, divisibility.

`load_job` checks the same and words its messages better.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from spillway.api.field_types import (
    EXTENDED_RESOURCE_NEEDED,
    MAX_DOMAIN_LENGTH,
    NATIVE_RESOURCES,
    QUOTA_PREFIX,
    RESOURCE_PATTERN,
    STAYS_ON_CLAIM,
)
from spillway.api.limits import (
    CHAT_NEEDS_SOURCE,
    LORA_LLAMA_HAS_NO_DROPOUT,
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
)
from spillway.api.memory import Parallelism
from spillway.api.model import (
    CHAT_EVALUATES_CHAT,
    FETCHED_BELOW,
    FETCHED_ON_CLAIM,
    PACKING_NEEDS_CHATS,
    TEXT_EVALUATES_NO_CHAT,
    Data,
    Model,
)
from spillway.api.operator_config import CONFIG_NAME
from spillway.api.pod import ASSIGNED_BY_CLUSTER, FIXED_WITHOUT_PLAN, ONLY_CLAIMS_ARE_WRITTEN, REQUESTED_BY_PLAN
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
)
from spillway.api.sweep.search_space import BOTH_ENDS, MEMBERS_ARE_MADE, STEP_OF_RANGE, TRIALS_NEEDED
from spillway.api.tracking import ONE_TRACKER
from spillway.api.training import ONE_WARM_UP, Training
from spillway.update_rules import RULE_FIELDS, UpdateRule

Schema = dict[str, Any]

REQUIRED = "this field is required (or command, to run a script)"

# --- rules ------------------------------------------------------------------------------------------------------------


def cel(rule: str, message: str, shown: str = "", values: str = "", at: str = "") -> Schema:
    """A validation rule. `message` says what is allowed. `shown` says the same as a template whose %s and %d stand for
    the `values` found (CEL, separated by commas). The API server rejects messages that are composed in other ways,
    because it cannot bound their cost. `at` is the path of the wrong field below the field that has the rule."""
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
    return cel(rule, needed, f"{needed}; found %s", f"[{found}].filter(name, name != '')")


def _immutable(name: str, model: type[BaseModel]) -> Schema:
    changed = ", ".join(_if_changed(field.alias or "", field.default is None) for field in model.model_fields.values())
    never = f"{name} is immutable; create a new TrainingJob"
    return cel("self == oldSelf", never, f"%s changed, but {never}", f"[{changed}].filter(name, name != '')")


def _if_changed(name: str, may_lack: bool = False) -> str:
    """CEL: the field's name when its value changed, else ''."""
    differs = f"self.{name} != oldSelf.{name}"
    if may_lack:
        differs = f"has(self.{name}) != has(oldSelf.{name}) || (has(self.{name}) && {differs})"
    return f"{differs} ? '{name}' : ''"


def _immutable_text(kind: str) -> Schema:
    return cel(
        "self == oldSelf", "is immutable", f"immutable: %s cannot become %s; create a new {kind}", "oldSelf, self"
    )


def _no_reserved_keys(*allowed: str) -> Schema:
    reserved = " || ".join(f"key.startsWith('{prefix}')" for prefix in RESERVED_PREFIXES)
    reserved += "".join(f" || key == '{key}'" for key in RESERVED_KEYS)
    if allowed:
        reserved = f"!(key in {list(allowed)}) && ({reserved})"
    return cel(
        f"!self.exists(key, {reserved})",
        f"reserved keys: {', '.join((*RESERVED_PREFIXES, *RESERVED_KEYS))}",
        "%s is reserved; use another key",
        f"self.filter(key, {reserved})[0]",
    )


def _never(path: str, problem: str) -> Schema:
    """Rejects a field below spec that this operator never honours. Jobs of other managers may set it."""
    given = {"checkpoint.resume": "self.checkpoint.resume != 'OwnOnly'"}
    rule = f"self.managedBy != '{MANAGER}' || !has(self.{path})"
    return cel(f"{rule} || !({given[path]})" if path in given else rule, problem, at=f".{path}")


_EXTENDED = (
    f"self.indexOf('/') <= {MAX_DOMAIN_LENGTH} && !self.startsWith('{QUOTA_PREFIX}') && "
    f"!self.contains('{NATIVE_RESOURCES}')"
)
"""CEL: the resource is not one of Kubernetes' own, and its name is short enough for a quota."""
_LOCATION = [
    _one_of("claim", "path"),
    cel(
        "!has(self.path) || !has(self.subPath) || size(self.subPath) == 0",
        "only applies to a claim; leave it out, and write the whole directory into path",
        at=".subPath",
    ),
    cel("!has(self.fetch) || has(self.claim)", FETCHED_ON_CLAIM, at=".fetch"),
    cel(
        "!has(self.fetch) || !has(self.claim) || (has(self.subPath) && size(self.subPath) > 0)",
        FETCHED_BELOW,
        at=".subPath",
    ),
]
_EXTENDED_NAMES = [
    cel(
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
"""CEL: the number of ranks that share a batch. A member of a sweep trains on one device."""
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
     LORA_LLAMA_HAS_NO_DROPOUT),
    (f"{_SIZES}.architecture == 'bert' && self.model.config.vocabSize < {MIN_TEXT_VOCABULARY + 1}",
     ".model.config.vocabSize",
     f"must be at least {MIN_TEXT_VOCABULARY + 1} for text: one token for each byte, one for the end of text, and one "
     f"for the mask"),
    ("has(self.data.chat) && !has(self.model.source)", ".data.chat", CHAT_NEEDS_SOURCE),
    ("has(self.data.tokens) && !has(self.model.source)", ".data.tokens", TOKENS_NEED_SOURCE),
    ("self.data.packing && !has(self.model.source)", ".data.packing", CHAT_NEEDS_SOURCE),
    ("self.data.packing && !has(self.data.chat) && !has(self.data.entrypoint)", ".data.packing", PACKING_NEEDS_CHATS),
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
    (f"self.scheduling.gang == 'Required' && self.parallelism.nodes > 1 && {_NO_QUEUE}",
     ".scheduling.gang", "Required needs a queue; set scheduling.queueName (Kueue), or use Auto"),
    (f"has(self.scheduling.workloadPriorityClassName) && size(self.scheduling.workloadPriorityClassName) > 0 && "
     f"{_NO_QUEUE}",
     ".scheduling.workloadPriorityClassName",
     "only applies to jobs in a queue; set scheduling.queueName, or use priorityClassName"),
)  # fmt: skip
"""Combinations of fields that a run rejects: CEL that is true if the combination is wrong, the field below spec, what
to do."""
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
"""The same for a job with command: fields that it cannot have, and fields that it lacks."""


def _together(wrong: str, at: str, problem: str) -> Schema:
    of_a_model = re.search(r"self\.(model|data|training)\b", wrong)
    return cel(f"!({_TRAINS} && ({wrong}))" if of_a_model else f"!({wrong})", problem, at=at)


_SUB_PATH = [
    cel(
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
"""Field of a spec that can change only while the job is suspended -> whether the field may be left out."""
_CHANGED = ", ".join(_if_changed(name, may_lack) for name, may_lack in _LOCKED_UNLESS_SUSPENDED.items())


def _owners_of_rule_fields() -> dict[str, list[str]]:
    """Field of training.optimizer that only some update rules have -> names of those rules."""
    owners = {to_camel(name): [rule.value for rule in UpdateRule if name in rule.defaults] for name in RULE_FIELDS}
    return {name: found for name, found in owners.items() if len(found) < len(UpdateRule)}


JOB_RULES: dict[str, list[Schema]] = {
    "": [
        cel(
            f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
            f"metadata.name: at most {MAX_NAME_LENGTH} characters",
            f"metadata.name %s has %d characters; at most {MAX_NAME_LENGTH} are allowed, because names of pods contain "
            f"it",
            "self.metadata.name, size(self.metadata.name)",
        ),
        cel(
            "!self.metadata.name.contains('.')",
            "metadata.name: lower-case letters, digits and hyphens, no dot",
            "metadata.name %s: use lower-case letters, digits and hyphens, but no dot, because names of Services "
            "contain it",
            "self.metadata.name",
        ),
    ],
    "spec": [
        cel(
            f"oldSelf.suspend || [{_CHANGED}].all(name, name == '')",
            f"{', '.join(_LOCKED_UNLESS_SUSPENDED)} can change only while the job is suspended: apply suspend: "
            f"true alone first, then this change",
            "%s can change only while the job is suspended: apply suspend: true alone first, then this change",
            f"[{_CHANGED}].filter(name, name != '')",
        ),
        cel(
            f"!({_TRAINS}) || "
            f"self.training.microBatchSize * {_BATCH_RANKS} < 1 || "  # minima reject this; it avoids a division by 0
            f"self.training.globalBatchSize % (self.training.microBatchSize * {_BATCH_RANKS}) == 0",
            "must be a multiple of microBatchSize x ranks",
            "%d must be a multiple of microBatchSize x ranks (%d); the ranks are nodes x devicesPerNode, or 1 in a "
            "sweep",
            f"self.training.globalBatchSize, self.training.microBatchSize * {_BATCH_RANKS}",
            ".training.globalBatchSize",
        ),
        cel(
            f"{_WORLD} <= {MAX_RANKS}",
            f"nodes x devicesPerNode must be at most {MAX_RANKS} ranks",
            f"at most {MAX_RANKS} ranks; nodes x devicesPerNode is %d x %d = %d",
            f"self.parallelism.nodes, self.parallelism.devicesPerNode, {_WORLD}",
            ".parallelism",
        ),
        cel(
            "!(has(self.memory.mode) && self.memory.mode == 'Disabled' && has(self.pod.resources.memory))",
            FIXED_WITHOUT_PLAN,
            at=".pod.resources.memory",
        ),
        *(_together(*wrong) for wrong in WRONG_TOGETHER),
        *(_never(path, problem) for path, problem in NOT_YET.items()),
        *(cel(f"!({_SCRIPT} && ({wrong}))", problem, at=at) for wrong, at, problem in WRONG_IN_SCRIPTS),
        *(cel(f"({_SCRIPT}) || has(self.{name})", REQUIRED, at=f".{name}") for name in ("model", "data", "training")),
        cel(
            f"({_SCRIPT}) == ({_WAS_SCRIPT}) && (!({_SCRIPT}) || self.command == oldSelf.command)",
            "command is immutable; create a new TrainingJob",
            at=".command",
        ),
    ],
    "spec.model": [_immutable("model", Model), _one_of("config", "source", "entrypoint")],
    "spec.model.config": [
        cel(
            "self.numHeads < 1 || self.hiddenSize % self.numHeads == 0",
            "must divide hiddenSize",
            "%d must divide hiddenSize (%d)",
            "self.numHeads, self.hiddenSize",
            ".numHeads",
        ),
        cel(
            "!has(self.numKeyValueHeads) || self.numKeyValueHeads < 1 || self.numHeads % self.numKeyValueHeads == 0",
            "must divide numHeads",
            "%d must divide numHeads (%d)",
            "self.numKeyValueHeads, self.numHeads",
            ".numKeyValueHeads",
        ),
        cel(
            "self.architecture != 'llama' || self.numHeads < 1 || (self.hiddenSize / self.numHeads) % 2 == 0",
            "hiddenSize / numHeads must be even: rotary embeddings need an even number",
            at=".numHeads",
        ),
        cel(
            "self.architecture == 'llama' || !has(self.numKeyValueHeads) || self.numKeyValueHeads == self.numHeads",
            "only llama can have fewer key and value heads than attention heads; leave it out, or write numHeads",
            "%s has one key and value head per attention head; leave it out, or write %d",
            "self.architecture, self.numHeads",
            ".numKeyValueHeads",
        ),
        cel(
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
        cel(
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
        cel(
            "!has(self.steps) || self.schedule.warmupSteps <= self.steps",
            "warmupSteps must be at most training.steps",
            "%d must be at most training.steps (%d)",
            "self.schedule.warmupSteps, self.steps",
            ".schedule.warmupSteps",
        ),
        _one_of("steps", "epochs"),
    ],
    "spec.training.schedule": [
        cel("!has(self.warmupRatio) || self.warmupSteps == 0", ONE_WARM_UP, at=".warmupRatio"),
    ],
    "spec.training.lossScale": [
        cel(
            "self.minimum <= self.initial",
            "must be at most lossScale.initial",
            "%d: must be at most lossScale.initial (%d)",
            "self.minimum, self.initial",
            ".minimum",
        ),
    ],
    "spec.training.optimizer": [
        cel(
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
        # The API server also evaluates rules on the bare default, {}.
        cel(
            "!has(self.mode) || self.mode != 'Disabled' || (has(self.budget) && has(self.budget.host))",
            "required with mode Disabled, because no plan computes it",
            at=".budget.host",
        ),
    ],
    "spec.spill": [
        cel(
            "!has(self.numVolumes) || self.numVolumes <= 1 || "
            "(has(self.storageClassName) && size(self.storageClassName) > 0)",
            "without storageClassName there is only one volume, an emptyDir; set storageClassName, or leave numVolumes "
            "out",
            at=".numVolumes",
        ),
    ],
    "spec.pod.env": [
        cel(
            f"self.map(one, has(one.value) ? size(one.value) : 0).sum() <= {MAX_ENV_BYTES}",
            f"all values together may have {MAX_ENV_BYTES} characters; move long values to a Secret",
            f"all values together have %d characters, at most {MAX_ENV_BYTES} are allowed; move long values to a "
            f"Secret",
            "self.map(one, has(one.value) ? size(one.value) : 0).sum()",
        )
    ],
    "spec.pod.mounts[]": [
        _one_of("claim", "configMap", "secret"),
        cel(
            f"!self.path.matches(r'{OWN_DIRECTORIES}')",
            NOT_MOUNTED_THERE,
            f"%s: {NOT_MOUNTED_THERE}",
            "self.path",
            ".path",
        ),
        cel("!has(self.writable) || !self.writable || has(self.claim)", ONLY_CLAIMS_ARE_WRITTEN, at=".writable"),
    ],
    "spec.pod.mounts[].subPath": _SUB_PATH,
    "spec.pod.env[]": [
        _one_of("value", "valueFrom"),
        cel(
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
        cel(
            "!has(self.resources) || !has(self.resources.extended) || "
            "!has(self.resourceName) || !(self.resourceName in self.resources.extended)",
            REQUESTED_BY_PLAN,
            at=".resources.extended",
        )
    ],
    "spec.pod.resources.extended": _EXTENDED_NAMES,
    "spec.pod.securityContext": [
        cel(
            "!has(self.assignedByCluster) || !self.assignedByCluster || "
            "!(has(self.runAsUser) || has(self.runAsGroup) || has(self.fsGroup))",
            ASSIGNED_BY_CLUSTER,
            at=".assignedByCluster",
        )
    ],
    "spec.pod.resourceName": [
        cel(
            _EXTENDED,
            EXTENDED_RESOURCE_NEEDED,
            f"%s: {EXTENDED_RESOURCE_NEEDED}",
            "self",
        )
    ],
    "spec.tracking": [cel("has(self.tensorBoard) || has(self.mlflow) || has(self.wandb)", ONE_TRACKER)],
    "spec.search": [
        cel("self.algorithm == 'Grid' || has(self.trials)", TRIALS_NEEDED, at=".trials"),
    ],
    "spec.search.parameters[]": [
        _one_of("values", "min"),
        cel("has(self.min) == has(self.max)", BOTH_ENDS, at=".max"),
        cel("!has(self.step) || has(self.min)", STEP_OF_RANGE, at=".step"),
    ],
    "spec.managedBy": [_immutable_text("TrainingJob")],
}
"""CEL rules by field path. Transition rules refer to the stored object as oldSelf."""

CONFIG_RULES: dict[str, list[Schema]] = {
    "": [
        cel(
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
"""Section of a member -> type whose fields the section has, all of them optional."""
NO_MEMBERS_FIELDS = {"spec.members[].training": ("epochs", "earlyStopping")}
"""Section of a member -> fields of its type that no member has."""


PROFILE_RULES: dict[str, list[Schema]] = {"spec.fingerprint": [_immutable_text("MemoryProfile")]}
