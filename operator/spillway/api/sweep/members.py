"""Members of a sweep. Each is an ordinary job: the spec with some fields below model, data or training changed.

spec.members[i] -> member_spec: the spec of its solo run, which is what it trains bit for bit
                -> member_job:  the job.json of its solo run, with directories of its own below the sweep's
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from spillway.api.job_file import JobFile
from spillway.api.limits import (
    MEMBERS_HAVE_STEPS,
    MEMBERS_ON_ONE_NODE,
    MEMBERS_SHARE_FILES,
    MOST_INSPECTED,
    NOT_OF_MEMBERS,
)
from spillway.api.manifest import shown, validate
from spillway.api.model import Model
from spillway.api.pod import Member
from spillway.api.sweep.search_space import SearchSpace
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import FieldProblem, InvalidJob
from spillway.units import format_quantity
from spillway.update_rules import RULE_FIELDS, UpdateRule

SECTIONS = ("model", "data", "training")
"""Sections of the spec in which members may differ: those that determine the numbers of a run. All else is as in the
job."""
DIRECTORY = "members"
"""Name of the directory, below a sweep's output and checkpoint directories, that contains one directory per member."""
_DERIVED_SIZES = ("numKeyValueHeads", "intermediateSize", "tieWordEmbeddings")
"""Sizes of model.config whose defaults depend on other fields."""


def member_spec(spec: TrainingJobSpec, member: Member) -> TrainingJobSpec:
    """The spec of the member's solo run. Raises InvalidJob with every field that is wrong.

    The default of some fields depends on another field (intermediateSize on hiddenSize, betas on the optimizer's name).
    A field that has such a default in the job has the default that follows from the member's own fields.
    """
    document = spec.model_dump(
        mode="json", by_alias=True, exclude={"search", "members", "objective"}, exclude_none=True
    )
    document["parallelism"].pop("devicesPerNode", None)  # the sweep's devices; a member trains on one
    _forget_derived(document, member.changes)
    for path, value in member.changes.items():
        _set(document, path, value)
    try:
        return validate(type(spec), document, f"member {member.name}")
    except InvalidJob as error:
        raise InvalidJob(f"member {member.name}", [_of_member(member, one) for one in error.problems]) from None


def member_training_job(job: TrainingJob, member: Member) -> TrainingJob:
    """The solo job of a member: `spillway run` trains it along the same loss curve."""
    return job.model_copy(update={"spec": member_spec(job.spec, member)})


def member_job(job: JobFile, member: Member) -> JobFile:
    """job.json of the member: its spec, with directories of its own. Members with the same text and vocabulary share a
    corpus; others build their own."""
    spec = member_spec(job.spec, member)
    corpus, directory = _corpus_of(spec), job.corpus_directory
    if corpus != _corpus_of(job.spec):
        same = next(one for one in job.spec.members if _corpus_of(member_spec(job.spec, one)) == corpus)
        directory = f"{directory}-{same.name}"
    return job.model_copy(
        update={
            "spec": spec,
            "output_directory": str(member_directory(job.output_directory, member.name)),
            "checkpoint_directory": str(member_directory(job.checkpoint_directory, member.name)),
            "corpus_directory": directory,
            "metrics_port": None,
            "ranks_per_node": 1,
        }
    )


def member_directory(directory: str | PurePath, name: str) -> PurePath:
    """Directory of the member `name` below a sweep's output directory, or below its checkpoint directory."""
    return PurePath(directory) / DIRECTORY / name


def problems_of(job: TrainingJob) -> list[FieldProblem]:
    """What is wrong with the members of `job` and with its objective; nothing for a job without either."""
    spec = job.spec
    if not spec.members:
        needless = "compares the members of a sweep, but this job has no members; leave it out"
        return [] if spec.objective is None else [FieldProblem("spec.objective", "{...}", needless)]
    found = [*_names(spec), *_sweep(spec), *_overrides(spec)]
    if not found and spec.model.config is None:
        shapes = len({inspected_as(one) for one in solo_specs(spec)})
        if shapes > MOST_INSPECTED:
            several = (
                f"differ in {shapes} combinations of model.lora, training.microBatchSize and training.sequenceLength, "
                f"and a model from source or entrypoint is built for each of them; use at most {MOST_INSPECTED}"
            )
            found = [FieldProblem("spec.members", f"{len(spec.members)} members", several)]
    return found if spec.search is None else _of_parameters(spec, spec.search, found)


def _names(spec: TrainingJobSpec) -> Iterator[FieldProblem]:
    counts, seen = Counter(member.name for member in spec.members), set[str]()
    for index, member in enumerate(spec.members):
        if counts[member.name] > 1 and member.name in seen:
            yield FieldProblem(
                f"spec.members[{index}].name", member.name, "another member has the same name; give each member its own"
            )
        seen.add(member.name)


def devices_problems(spec: TrainingJobSpec, num_devices: int) -> Iterator[FieldProblem]:
    """Problems of a sweep on `num_devices` devices, a number that may differ from devicesPerNode in a local run
    (--ranks)."""
    if num_devices > len(spec.members):
        idle = f"each member trains on one device, so other devices would be idle; use at most {len(spec.members)}"
        yield FieldProblem("spec.parallelism.devicesPerNode", str(num_devices), idle)
    if num_devices > 1 and spec.spill.encryption != "None":
        yield FieldProblem("spec.spill.encryption", spec.spill.encryption, MEMBERS_SHARE_FILES)


def _sweep(spec: TrainingJobSpec) -> Iterator[FieldProblem]:
    """Problems of the job's fields. Members take turns on the devices of one node, each on one device at a time."""
    parallelism, objective = spec.parallelism, spec.objective
    if parallelism.nodes > 1:
        yield FieldProblem("spec.parallelism.nodes", str(parallelism.nodes), MEMBERS_ON_ONE_NODE)
    yield from devices_problems(spec, parallelism.devices_per_node)
    if parallelism.strategy not in ("Auto", "Ddp"):
        undivided = "each member trains on one device, where nothing is sharded; use Ddp, or a job for each model"
        yield FieldProblem("spec.parallelism.strategy", parallelism.strategy, undivided)
    if reserve := spec.memory.advanced.activations.host_reserve:
        fixed = (
            "activations of a sweep do not move while its members run, so this memory would not be used; leave it out"
        )
        yield FieldProblem("spec.memory.advanced.activations.hostReserve", format_quantity(reserve), fixed)
    if spec.training.epochs is not None:
        yield FieldProblem("spec.training.epochs", str(spec.training.epochs), MEMBERS_HAVE_STEPS)
    for field in spec.uses_evaluation:
        yield FieldProblem(f"spec.{field}", "{...}" if field.startswith("training") else "true", NOT_OF_MEMBERS)
    if objective is not None and objective.metric == "EvaluationLoss" and spec.data.evaluation is None:
        held_out = "needs held-out text: give data.evaluation, or use Loss"
        yield FieldProblem("spec.objective.metric", objective.metric, held_out)


def _overrides(spec: TrainingJobSpec) -> Iterator[FieldProblem]:
    for index, member in enumerate(spec.members):
        try:
            own = member_spec(spec, member)
        except InvalidJob as error:
            for one in error.problems:
                yield FieldProblem(f"spec.members[{index}].{one.path}", one.given, one.problem)
            continue
        if own.training.early_stopping is not None and spec.training.early_stopping is None:
            yield FieldProblem(f"spec.members[{index}].training.earlyStopping", "{...}", NOT_OF_MEMBERS)
        if own.model.config is None and own.model.model_copy(update={"lora": spec.model.lora}) != spec.model:
            path, given = next(
                (path, value)
                for path, value in member.changes.items()
                if path.startswith("model.") and not path.startswith("model.lora")
            )
            unknown = (
                "all members have the model of spec.model.source or spec.model.entrypoint; let members differ only in "
                "model.lora, training and data, or create a separate job for this member"
            )
            yield FieldProblem(f"spec.members[{index}].{path}", shown(given), unknown)
        evaluated = (spec.data.evaluation, own.data.evaluation)
        differs = len({one and one.model_copy(update={"every_steps": 1}) for one in evaluated}) > 1
        if spec.compared_by.metric == "EvaluationLoss" and spec.data.evaluation and differs:
            compared = (
                "members are compared by their evaluation loss, so all must be evaluated on the same text; leave it "
                "out, or use objective.metric: Loss"
            )
            yield FieldProblem(f"spec.members[{index}].data.evaluation", "{...}", compared)


def _of_parameters(spec: TrainingJobSpec, search: SearchSpace, problems: Sequence[FieldProblem]) -> list[FieldProblem]:
    """Moves problems of members that a search made to the parameter that has the wrong value or, if several fields do
    not go together, to the list of parameters. Keeps the first problem of each."""
    made = dict[str, FieldProblem]()
    for problem in problems:
        where, given, said = problem.path, problem.given, problem.problem
        if found := re.fullmatch(r"spec\.members\[(\d+)\]\.(.+)", problem.path):
            member, where = spec.members[int(found[1])], "spec.search.parameters"
            values = ", ".join(f"{path} {shown(value)}" for path, value in member.changes.items())
            given, said = "", f"{member.name} ({values}): {said}"
            for index, parameter in enumerate(search.parameters):
                if f"{found[2]}.".startswith(f"{parameter.path}."):
                    where, given = f"{where}[{index}]", shown(member.changes.get(parameter.path))
                    said = f"{member.name}: {problem.problem}"
        made.setdefault(where, FieldProblem(where, given, said))
    return list(made.values())


def _of_member(member: Member, problem: FieldProblem) -> FieldProblem:
    """A problem of the member's spec: at the member's own field if that is wrong, else at the first section that the
    member changes."""
    if any(path == problem.path or path.startswith(f"{problem.path}.") for path in member.changes):
        return problem
    section = next(name for name in SECTIONS if getattr(member, name))
    return FieldProblem(section, "{...}", f"with this change, spec.{problem}")


def _set(document: dict[str, Any], path: str, value: object) -> None:
    *parts, last = path.split(".")
    for part in parts:
        inner = document.get(part)
        document[part] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        document = inner
    document[last] = value


def _forget_derived(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Removes values that are only defaults derived from a field that the member changes."""
    if any(path.startswith("model.config.") for path in changes) and (config := document["model"].get("config")):
        for name in _DERIVED_SIZES:
            if config.get(name) == _default_size(config, name):
                config.pop(name, None)
    if "training.optimizer.name" in changes:
        optimizer = document["training"]["optimizer"]
        defaults = UpdateRule(optimizer["name"]).defaults
        for name in (*RULE_FIELDS, "weightDecay"):
            if name in optimizer and _as_numbers(optimizer[name]) == _as_numbers(defaults.get(name)):
                del optimizer[name]


def _default_size(config: Mapping[str, Any], name: str) -> object:
    return {
        "numKeyValueHeads": config["numHeads"],
        "intermediateSize": 4 * config["hiddenSize"],
        "tieWordEmbeddings": config["architecture"] != "llama",
    }[name]


def _as_numbers(value: Any) -> tuple[float, ...]:
    """One or several numbers of a manifest as floats; each may be written as a string."""
    if value is None:
        return ()
    return tuple(map(float, value)) if isinstance(value, list | tuple) else (float(value),)


def named_specs(spec: TrainingJobSpec) -> dict[str, TrainingJobSpec]:
    """Solo specs of the members by name, in their order; for a job that is no sweep, its own spec under "". Raises
    InvalidJob as member_spec does."""
    return {one.name: member_spec(spec, one) for one in spec.members} or {"": spec}


def solo_specs(spec: TrainingJobSpec) -> tuple[TrainingJobSpec, ...]:
    return tuple(named_specs(spec).values())


def inspected_as(spec: TrainingJobSpec) -> str:
    """A key of those fields which members may change and on which the sizes of a model from a source or entry point
    depend."""
    return f"{adapters_of(spec.model)} {spec.training.micro_batch_size} x {spec.training.sequence_length}"


def adapters_of(model: Model) -> str:
    """A text that differs wherever the sizes of adapters differ."""
    return "none" if model.lora is None else model.lora.model_dump_json(exclude={"alpha"})


def num_corpora(specs: Sequence[TrainingJobSpec]) -> int:
    """Number of different token corpora that `specs` train on."""
    found = [_corpus_of(one) for one in specs]
    return sum(one not in found[:index] for index, one in enumerate(found))


def _corpus_of(spec: TrainingJobSpec) -> object:
    """What a corpus is made from: specs for which this is equal share a corpus."""
    model = spec.model
    data = spec.data.model_dump(mode="json", exclude={"evaluation"}), sorted(map(repr, spec.texts.items()))
    tokenizer: object = model.source or model.entrypoint
    if model.config is not None:
        tokenizer = (model.config.vocab_size, model.config.architecture == "bert")
    return data, tokenizer
