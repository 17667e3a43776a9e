"""The manifest: what is accepted, and what is said about each mistake."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.job_documents import EXAMPLE_JOBS, REMOVED, document, job, text
from spillway.api.load import load_job, parse_job
from spillway.api.profiles import MemoryProfile
from spillway.api.rejections import not_used_locally, rejections, rejections_in_cluster
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import ExitCode, FieldProblem, InvalidJob, UserError

EVERY_FIELD = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: tiny-llama, namespace: research, labels: {team: a}, annotations: {note: "x"}}
spec:
  model:
    config: {architecture: llama, hiddenSize: 2048, numLayers: 24, numHeads: 32, numKeyValueHeads: 8,
             intermediateSize: 5632, vocabSize: 32000, dropout: "0.1", tieWordEmbeddings: true,
             ropeTheta: "500000", normEps: "1e-6"}
    precision: {compute: bfloat16, master: float32, gradientReduce: bfloat16, gradientAccumulate: float32}
  data:
    text: {claim: corpus, subPath: en}
    evaluation: {fraction: "0.01", everySteps: 100}
  training: {steps: 1000, sequenceLength: 2048, globalBatchSize: 64, microBatchSize: 4, seed: 0,
             gradientClipping: "1.0", nonFinite: SkipStep,
             optimizer: {name: AdamW, learningRate: "3e-4", betas: ["0.9", "0.95"], eps: "1e-8", weightDecay: "0.1"},
             schedule: {name: Cosine, warmupSteps: 100, finalFraction: "0.1"}}
  parallelism: {nodes: 2, devicesPerNode: 4, device: Auto, strategy: Auto}
  memory:
    mode: Auto
    budget: {device: 24Gi, host: 64Gi, nvme: 200Gi}
    advanced:
      optimizer: {placement: Auto}
      activations: {policy: Auto}
      parameters: {placement: Auto}
    endurance: {driveWritesPerDay: "1"}
  spill: {storageClassName: "", encryption: None}
  members: []
  checkpoint: {everySteps: 200, keep: 2, claim: checkpoints, subPath: "", resume: OwnOnly, from: null}
  pod:
    image: ""
    imagePullSecrets: [{name: registry}]
    env: [{name: A, value: b}, {name: C, valueFrom: {secretKeyRef: {name: s, key: k}}}]
    resources: {cpu: "8", memory: 64Gi, sharedMemory: 1Gi, extended: {rdma/hca: 1}}
    resourceName: nvidia.com/gpu
    labels: {a: b}
    annotations: {c: d}
    serviceAccountName: trainer
    runtimeClassName: ""
    securityContext: {assignedByCluster: false, runAsUser: 1, runAsGroup: 1, fsGroup: 1, supplementalGroups: [2]}
    networkPreset: ""
    hostNetwork: false
  command: []
  scheduling: {queueName: "", priorityClassName: "", workloadPriorityClassName: "", gang: Auto, nodeSelector: {},
               tolerations: [{operator: Exists}]}
  lifecycle: {activeDeadlineSeconds: 1, pendingDeadlineSeconds: null, stallSeconds: 1800, ttlSecondsAfterFinished: null,
              maxRestarts: 5}
  managedBy: spillway.dev/operator
  suspend: false
"""


def problems(changes: dict[str, Any]) -> dict[str, FieldProblem]:
    with pytest.raises(InvalidJob) as caught:
        job(changes)
    assert caught.value.exit_code is ExitCode.USER_ERROR
    return {problem.path: problem for problem in caught.value.problems}


def problems_of(manifest: str) -> list[FieldProblem]:
    with pytest.raises(InvalidJob) as caught:
        parse_job(manifest, "job.yaml")
    return list(caught.value.problems)


def test_every_documented_field_is_accepted() -> None:
    spec = parse_job(EVERY_FIELD, "job.yaml").spec
    assert spec.memory.budget.device == 24 * 2**30
    assert spec.training.optimizer.learning_rate == 3e-4


def test_a_spec_survives_json() -> None:
    spec = parse_job(EVERY_FIELD, "job.yaml").spec
    assert TrainingJobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_floats_are_strings_in_json() -> None:
    assert job().model_dump(mode="json")["spec"]["training"]["optimizer"]["learningRate"] == "0.0003"


@pytest.mark.parametrize("example", EXAMPLE_JOBS, ids=lambda path: path.name)
def test_examples_load(example: Path) -> None:
    assert load_job(example).kind == "TrainingJob"


def test_defaults_that_depend_on_other_fields() -> None:
    config = job(
        {
            "spec.model.config": {
                "architecture": "gpt2",
                "hiddenSize": 64,
                "numLayers": 1,
                "numHeads": 4,
                "vocabSize": 300,
            }
        }
    ).spec.model.transformer
    assert (config.num_key_value_heads, config.intermediate_size, config.tie_word_embeddings) == (4, 256, True)


MISTAKES: dict[str, tuple[dict[str, Any], str, str]] = {
    # what the user wrote -> field that is named, words of the explanation
    "a field that does not exist": ({"spec.training.step": 5}, "spec.training.step", "did you mean steps?"),
    "snake_case": ({"spec.model.config.hidden_size": 5}, "spec.model.config.hidden_size", "did you mean hiddenSize?"),
    "no steps at all": ({"spec.training.steps": 0}, "spec.training.steps", "at least 1"),
    "a negative number": ({"spec.training.steps": -3}, "spec.training.steps", "at least 1"),
    "a missing model": ({"spec.model": REMOVED}, "spec.model", "missing; this field is required"),
    "two data sources": ({"spec.data.text": {"path": "/a"}}, "spec.data", "found text and builtin"),
    "no data source": ({"spec.data": {}}, "spec.data", "found none"),
    "a function without its module": (
        {"spec.data": {"entrypoint": "load"}},
        "spec.data.entrypoint",
        "write package.module:function",
    ),
    "a path in place of a module": (
        {"spec.model": {"entrypoint": "./mine.py:build"}},
        "spec.model.entrypoint",
        "write package.module:function",
    ),
    "an enum in lower case": (
        {"spec.memory.advanced.activations.policy": "keep"},
        "spec.memory.advanced.activations.policy",
        "one of Auto, Keep, Recompute, Host, Nvme; did you mean Keep?",
    ),
    "a quantity in GB": ({"spec.memory.budget.device": "24GB"}, "spec.memory.budget.device", "for example 24Gi"),
    "heads that do not divide": ({"spec.model.config.numHeads": 3}, "spec.model.config.numHeads", "divide hiddenSize"),
    "key-value heads that do not divide": (
        {"spec.model.config.numKeyValueHeads": 3},
        "spec.model.config.numKeyValueHeads",
        "divide numHeads (4)",
    ),
    "a batch that does not divide": (
        {"spec.training.globalBatchSize": 6},
        "spec.training.globalBatchSize",
        "multiple of microBatchSize (4)",
    ),
    "a batch too small for the ranks": (
        {"spec.parallelism": {"devicesPerNode": 8}},
        "spec.training.globalBatchSize",
        "microBatchSize x ranks (4 x 8)",
    ),
    "more ranks than 1,024": (
        {"spec.parallelism": {"nodes": 256, "devicesPerNode": 8}},
        "spec.parallelism",
        "at most 1024 ranks; nodes x devicesPerNode is 256 x 8 = 2048",
    ),
    "variables that are too long together": (
        {"spec.pod.env": [{"name": f"V{number}", "value": "x" * 8000} for number in range(5)]},
        "spec.pod.env",
        "all values together have 40000 characters, at most 32768 are allowed",
    ),
    "a label that none is": (
        {"spec.pod": {"labels": {"team": "a b"}}},
        "spec.pod.labels.team",
        "",
    ),
    "another apiVersion": ({"apiVersion": "spillway.dev/v1"}, "apiVersion", "must be spillway.dev/v1alpha1"),
    "another kind": ({"kind": "Job"}, "kind", "must be TrainingJob"),
    "a list for a map": ({"spec.training": [1, 2]}, "spec.training", "a map of fields is needed"),
    "a string for an integer": ({"spec.training.steps": "100"}, "spec.training.steps", "an integer is needed"),
    "a float for an integer": ({"spec.training.steps": 1.5}, "spec.training.steps", "an integer is needed"),
    "a boolean for an integer": ({"spec.training.steps": True}, "spec.training.steps", "an integer is needed"),
    "a name with capitals": ({"metadata.name": "Tiny_Llama"}, "metadata.name", "for example tiny-llama"),
    "a name that is too long": ({"metadata.name": "a" * 53}, "metadata.name", "at most 52 characters"),
    "words for a number": (
        {"spec.training.optimizer.learningRate": "fast"},
        "spec.training.optimizer.learningRate",
        '"3e-4"',
    ),
    "an infinite number": (
        {"spec.training.gradientClipping": "inf"},
        "spec.training.gradientClipping",
        "a number >= 0",
    ),
    "one beta": ({"spec.training.optimizer.betas": ["0.9"]}, "spec.training.optimizer.betas", "at least 2 entries"),
    "a beta of one": (
        {"spec.training.optimizer.betas": ["0.9", "1"]},
        "spec.training.optimizer.betas[1]",
        "less than 1",
    ),
    "one checkpoint": ({"spec.checkpoint.keep": 1}, "spec.checkpoint.keep", "at least 2"),
    "another optimizer": (
        {"spec.training.optimizer.name": "Adafactor"},
        "spec.training.optimizer.name",
        "one of AdamW, Adam, SgdMomentum, Lion",
    ),
    "momentum for AdamW": (
        {"spec.training.optimizer.momentum": "0.9"},
        "spec.training.optimizer.momentum",
        "AdamW does not use it; leave it out",
    ),
    "eps for Lion": (
        {"spec.training.optimizer": {"name": "Lion", "eps": "1e-8"}},
        "spec.training.optimizer.eps",
        "Lion does not use it; leave it out",
    ),
    "betas for SgdMomentum": (
        {"spec.training.optimizer": {"name": "SgdMomentum", "betas": ["0.9", "0.95"]}},
        "spec.training.optimizer.betas",
        "SgdMomentum does not use it; leave it out",
    ),
    "an eps that is 0 in float32": (
        {"spec.training.optimizer": {"name": "AdamW", "eps": "1e-300"}},
        "spec.training.optimizer.eps",
        "at least 1e-37",
    ),
    "float8": (
        {"spec.model.precision.compute": "float8"},
        "spec.model.precision.compute",
        "bfloat16, float16, float32",
    ),
    "Disabled without a bound": ({"spec.memory.mode": "Disabled"}, "spec.memory.budget.host", "required"),
    "Disabled with offloading": (
        {
            "spec.memory": {
                "mode": "Disabled",
                "budget": {"host": "1Gi"},
                "advanced": {"optimizer": {"placement": "Host"}},
            }
        },
        "spec.memory.advanced.optimizer.placement",
        "keeps everything on the device",
    ),
    "Disabled with overlap": (
        {
            "spec.memory": {
                "mode": "Disabled",
                "budget": {"host": "1Gi"},
                "advanced": {"optimizer": {"overlap": "Forward"}},
            }
        },
        "spec.memory.advanced.optimizer.overlap",
        "does not overlap the update",
    ),
    "a subPath without a claim": (
        {"spec.data": {"text": {"path": "/a", "subPath": "b"}}},
        "spec.data.text.subPath",
        "only applies to a claim",
    ),
    "text outside its claim": (
        {"spec.data": {"text": {"claim": "c", "subPath": "en/../../other"}}},
        "spec.data.text.subPath",
        'must be a relative path on the claim, without ".."',
    ),
    "a model outside its claim": (
        {"spec.model": {"source": {"claim": "c", "subPath": "/etc"}}},
        "spec.model.source.subPath",
        'must be a relative path on the claim, without ".."',
    ),
    "a warm-up longer than the run": (
        {"spec.training.schedule": {"warmupSteps": 101}},
        "spec.training.schedule.warmupSteps",
        "at most steps (100)",
    ),
    "a sequence beyond gpt2's positions": (
        {
            "spec.model.config": {
                "architecture": "gpt2",
                "hiddenSize": 64,
                "numLayers": 1,
                "numHeads": 4,
                "vocabSize": 300,
                "maxPositions": 128,
            }
        },
        "spec.training.sequenceLength",
        "at most model.config.maxPositions (128)",
    ),
    "a t5 whose head is a matrix of its own": (
        {"spec.model.config.architecture": "t5", "spec.model.config.tieWordEmbeddings": False},
        "spec.model.config.tieWordEmbeddings",
        "one matrix for all its embeddings",
    ),
    "grouped heads in a bert": (
        {"spec.model.config.architecture": "bert", "spec.model.config.numKeyValueHeads": 1},
        "spec.model.config.numKeyValueHeads",
        "bert has one key and value head per attention head",
    ),
}


@pytest.mark.parametrize(("changes", "path", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_what_is_allowed(changes: dict[str, Any], path: str, words: str) -> None:
    assert words in problems(changes)[path].problem


NOT_YET: dict[str, tuple[dict[str, Any], str]] = {
    "spec.model.config.dropout": ({"spec.model.lora": {}, "spec.model.config.dropout": "0.1"}, "leave dropout out"),
    "spec.parallelism.nodes": ({"spec.members": [{"name": "a"}], "spec.parallelism.nodes": 2}, "devices of one node"),
    "spec.model.config.vocabSize": ({"spec.model.config.vocabSize": 256}, "at least 257"),
    "spec.checkpoint.resume": ({"spec.checkpoint": {"resume": "Never"}}, "another --output"),
}


@pytest.mark.parametrize("path", NOT_YET)
def test_what_does_not_work_yet_is_rejected_with_what_works_instead(path: str) -> None:
    changes, words = NOT_YET[path]
    found = problems(changes)
    assert list(found) == [path]
    assert words in found[path].problem


def sizes(architecture: str, **fields: Any) -> dict[str, Any]:
    given = {"hiddenSize": 64, "numLayers": 1, "numHeads": 4, "vocabSize": 300, "maxPositions": 256}
    return {"architecture": architecture, **given, **fields}


RUNNABLE: dict[str, dict[str, Any]] = {
    "a llama": {},
    "a gpt2": {"spec.model": {"config": sizes("gpt2")}},
    "a bert": {"spec.model": {"config": sizes("bert")}},
    "a t5": {"spec.model": {"config": sizes("t5")}},
    "adapters": {"spec.model.lora": {"rank": 4, "targetModules": ["q_proj"]}},
    "streamed parameters": {"spec.memory.advanced.parameters.placement": "Stream"},
}
BUILT: dict[str, dict[str, Any]] = {
    "spec.model.source": {"spec.model": {"source": {"path": "/m"}}},
    "spec.model.entrypoint": {"spec.model": {"entrypoint": "a:b", "lora": {}}},
}
"""models whose shape only building them can tell"""


@pytest.mark.parametrize("changes", [*RUNNABLE.values(), *BUILT.values()], ids=[*RUNNABLE, *BUILT])
def test_every_kind_of_model_can_run_locally(changes: dict[str, Any]) -> None:
    assert rejections(job(changes)) == []


@pytest.mark.parametrize("changes", RUNNABLE.values(), ids=RUNNABLE)
def test_a_model_by_its_sizes_can_run_in_a_cluster(changes: dict[str, Any]) -> None:
    assert rejections_in_cluster(job(changes)) == []


@pytest.mark.parametrize("path", BUILT)
def test_a_model_that_must_be_built_can_run_in_a_cluster(path: str) -> None:
    assert rejections_in_cluster(job(BUILT[path])) == []


@pytest.mark.parametrize(("architecture", "smallest"), [("llama", 257), ("bert", 258)])
def test_the_vocabulary_must_hold_every_byte_and_the_special_tokens(architecture: str, smallest: int) -> None:
    job({"spec.model": {"config": sizes(architecture, vocabSize=smallest)}})
    smaller = {"spec.model": {"config": sizes(architecture, vocabSize=smallest - 1)}}
    assert list(problems(smaller)) == ["spec.model.config.vocabSize"]


def evaluation(**fields: Any) -> dict[str, Any]:
    return {"spec.data": {"builtin": "PythonStdlib", "evaluation": fields}}


def test_evaluation_holds_out_a_share_where_no_text_is_given() -> None:
    """An API server writes down static defaults; then every job with a text would have a share, too."""
    with_text = job(evaluation(text={"path": "/e"})).spec.data.evaluation
    assert with_text is not None and (with_text.fraction, with_text.sequences) == (None, 64)
    without = job(evaluation()).spec.data.evaluation
    assert without is not None and (without.text, without.fraction) == (None, 0.01)


def test_evaluation_without_new_fields_is_read_by_earlier_trainers() -> None:
    old = {"everySteps": 100, "fraction": "0.01"}
    assert job(evaluation()).model_dump(mode="json")["spec"]["data"]["evaluation"] == old
    new = {"sequences": 1, "seed": 1, "text": {"claim": "c", "subPath": "", "path": None}}
    written = job(evaluation(**new)).model_dump(mode="json")
    assert written["spec"]["data"]["evaluation"] == {"everySteps": 100, "fraction": None, **new}
    assert parse_job(yaml.safe_dump(written), "again.yaml").spec == job(evaluation(**new)).spec


def test_evaluation_has_a_share_or_a_text_and_not_both() -> None:
    found = problems(evaluation(fraction="0.1", text={"path": "/e"}))
    assert "one of text, chat, fraction is needed; found text and fraction" in found["spec.data.evaluation"].problem


CHAT = {"spec.model": {"source": {"path": "/m"}}, "spec.data": {"chat": {"claim": "c"}}}


def test_chats_need_a_model_with_a_template_and_are_evaluated_on_chats() -> None:
    held: dict[str, Any] = {"path": "/held"}
    found = job({**CHAT, "spec.data": {"chat": {"claim": "c"}, "evaluation": {"chat": held}}}).spec
    assert [*found.texts] == ["data.chat", "data.evaluation.chat"]
    assert found.data.evaluation is not None and found.data.evaluation.fraction is None
    assert "needs model.source" in problems({"spec.data": CHAT["spec.data"]})["spec.data.chat"].problem
    assert "needs model.source" in problems({"spec.data": {"tokens": held}})["spec.data.tokens"].problem
    text = problems({**CHAT, "spec.data": {"chat": held, "evaluation": {"text": held}}})
    assert "use evaluation.chat or fraction" in text["spec.data.evaluation.text"].problem
    chat = problems({"spec.data": {"text": held, "evaluation": {"chat": held}}})
    assert "belongs to data.chat" in chat["spec.data.evaluation.chat"].problem


def test_a_cluster_takes_gpus_and_every_strategy() -> None:
    for strategy in ("Ddp", "Fsdp", "Zero1", "Zero2", "Zero3"):
        assert rejections_in_cluster(job({"spec.parallelism": {"device": "Cuda", "strategy": strategy}})) == []


def test_deepspeed_divides_no_adapters_and_fsdp_does() -> None:
    adapters = {"spec.model.lora": {"rank": 2}}
    (problem,) = rejections_in_cluster(job(adapters | {"spec.parallelism.strategy": "Zero2"}))
    assert (problem.path, problem.problem[-15:]) == ("spec.model.lora", "use Ddp or Fsdp")
    assert rejections_in_cluster(job(adapters | {"spec.parallelism.strategy": "Fsdp"})) == []


def test_overlap_with_forward_is_accepted_for_fsdp_and_rejected_for_zero3() -> None:
    forward = {"spec.memory.advanced.optimizer": {"placement": "Host", "overlap": "Forward"}}
    (problem,) = rejections_in_cluster(job(forward | {"spec.parallelism.strategy": "Zero3"}))
    assert (problem.path, problem.problem[-16:]) == ("spec.memory.advanced.optimizer.overlap", "or strategy Fsdp")
    assert rejections_in_cluster(job(forward | {"spec.parallelism.strategy": "Fsdp"})) == []


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.training.optimizer", {"moments": "float16"}, "one of float32, bfloat16, int8"),
        ("spec.parallelism", {"strategy": "Zero4"}, "one of Auto, Ddp, Fsdp, Zero1, Zero2, Zero3"),
        ("spec.training", {"steps": 10**41}, "an integer of at most 40 digits is needed"),
    ],
)
def test_a_number_in_a_word_is_no_slip_and_one_too_long_is_no_string(path: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidJob) as rejected:
        job({path: document()["spec"].get(path.removeprefix("spec."), {}) | value})
    (problem,) = rejected.value.problems
    assert problem.problem.partition(" (line")[0] == said


def test_half_a_core_can_be_asked_for() -> None:
    assert job({"spec.pod.resources.cpu": "500m"}).spec.pod.resources.cpu == 0.5
    assert job({"spec.pod.resources.cpu": 2}).spec.model_dump(mode="json")["pod"]["resources"]["cpu"] == "2"


def test_a_profile_reads_what_it_writes() -> None:
    written = MemoryProfile(fingerprint="0123456789abcdef", world_size=2, count=1)
    assert MemoryProfile.model_validate(written.model_dump(mode="json", exclude_none=True)) == written


def test_all_mistakes_are_reported_at_once() -> None:
    found = problems({"kind": "Job", "spec.training.steps": 0, "spec.data": {}, "spec.memory.budget.host": "1XB"})
    assert set(found) == {"kind", "spec.training.steps", "spec.data", "spec.memory.budget.host"}


def test_a_problem_shows_the_value_and_the_line() -> None:
    (problem,) = problems_of(text({"spec.training.steps": -7}))
    line = next(n for n, row in enumerate(text({"spec.training.steps": -7}).splitlines(), 1) if "-7" in row)
    assert (problem.given, problem.problem) == ("-7", f"at least 1 (line {line})")


@pytest.mark.parametrize("value", [0.1, "0.1", "1e-1", 0, "0"])
def test_numbers_are_accepted_with_and_without_quotes(value: object) -> None:
    assert job({"spec.training.optimizer.weightDecay": value}).spec.training.optimizer.weight_decay == float(value)  # type: ignore[arg-type]


def test_an_unquoted_exponent_is_a_number() -> None:
    manifest = text().replace("steps: 100", "steps: 100\n    optimizer: {learningRate: 1e-3}")
    assert parse_job(manifest, "job.yaml").spec.training.optimizer.learning_rate == 1e-3


# --- YAML -------------------------------------------------------------------------------------------------------------


def test_a_key_given_twice_is_rejected_with_both_lines() -> None:
    (problem,) = problems_of("apiVersion: a\nkind: b\nkind: c\n")
    assert (problem.path, problem.problem) == ("kind", "given twice, on lines 2 and 3; keep one")


@pytest.mark.parametrize("word", ["yes", "no", "on", "off", "Yes", "OFF"])
def test_a_word_that_yaml_reads_as_a_boolean_is_rejected(word: str) -> None:
    (problem,) = problems_of(text().replace("name: tiny", f"name: {word}"))
    assert problem.path == "metadata.name"
    assert "quote it" in problem.problem


def test_a_quoted_boolean_word_is_a_string() -> None:
    assert parse_job(text().replace("name: tiny", 'name: "no"'), "job.yaml").metadata.name == "no"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("3e4", "an integer is needed; write 30000"),
        ("3E+4", "an integer is needed; write 30000"),
        ("100.0", "an integer is needed; write 100"),
        ("0100", "an integer is needed"),
        ("0.5", "an integer is needed"),
        ("3e-4", "an integer is needed"),
        ("1e30", "an integer is needed"),
        ("many", "an integer is needed"),
        ("true", "an integer is needed"),
        ('"100"', "an integer is needed, without quotes"),
    ],
)
def test_a_count_that_is_not_an_integer_is_told_as_it_was_written(written: str, said: str) -> None:
    (problem,) = problems_of(text().replace("steps: 100", f"steps: {written}"))
    assert problem.problem.partition(" (line")[0] == said


@pytest.mark.parametrize("written", ['"true"', "maybe", "1"])
def test_a_flag_that_is_not_a_boolean_is_told_what_is_true_of_it(written: str) -> None:
    (problem,) = problems_of(text({"spec.suspend": "SUSPEND"}).replace("SUSPEND", written))
    assert problem.problem.partition(" (line")[0] == "true or false is needed, as a plain word"


def test_a_name_in_binary_is_rejected_with_its_line() -> None:
    (problem,) = problems_of(text().replace("name: tiny", "name: !!binary aGVsbG8="))
    assert problem.path == "metadata.name"
    assert problem.problem.startswith("no field has the YAML type '!!binary'; write a plain value (line ")


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ("", "write a map with apiVersion"),
        ("# nothing\n", "write a map with apiVersion"),
        ("- a\n- b\n", "write a map with apiVersion"),
        ("just words", "write a map with apiVersion"),
        ("a: [1, 2", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "more than one document; write one per file"),
        ("a: *b", "not valid YAML: found undefined alias"),
        ("a: &x 1\nb: &x 2", "not valid YAML: found duplicate anchor"),
        ("a: &x {b: 1}\nc: {<<: *x}", "merge keys (<<) are not supported; write the fields out (line 2)"),
        ("? [a]\n: 1", "a key must be a name, not a list or a mapping (line 1)"),
        ("a: !!python/object/apply:os.system [ls]", "no field has the YAML type '!!python/object/apply:os.system'"),
        ("a: !mine 3", "no field has the YAML type '!mine'; write a plain value (line 1)"),
        ("a: !!set {b}", "no field has the YAML type '!!set'"),
        ("a: &x {b: *x}", "an alias that contains itself"),
        ("a: &a [1, 2]\n" + "".join(f"{k}: &{k} [{('*' + j + ', ') * 9}]\n" for j, k in pairwise("abcdefgh")), "20000"),
        ("[" * 4000, "nested too deeply"),
    ],
)
def test_a_file_that_is_not_a_manifest_is_explained(manifest: str, words: str) -> None:
    assert any(words in str(problem) for problem in problems_of(manifest))


def test_a_syntax_error_has_line_and_column() -> None:
    (problem,) = problems_of("apiVersion: x\nkind: [a\nspec: 1\n")
    assert problem.path.startswith("line 3, column")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.yaml: no such file"):
        load_job(tmp_path / "nothing.yaml")


def test_a_directory_is_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_job(tmp_path)


def test_bytes_that_are_no_text_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_job(path)


def test_a_control_character_is_rejected_with_its_line() -> None:
    (problem,) = problems_of(text() + "\x01")
    assert problem.path == f"line {text().count(chr(10)) + 1}" and "U+0001" in problem.problem


def test_an_endless_file_is_not_read_to_its_end() -> None:
    with pytest.raises(UserError, match="more than 1048576 bytes"):
        load_job(Path("/dev/zero"))


@pytest.mark.parametrize("value", ["9" * 10_000, '"' + "9" * 10_000 + '"', '"8Gi\\n"', '" 8Gi"'])
def test_a_quantity_that_the_crd_rejects_is_rejected(value: str) -> None:
    manifest = text({"spec.memory.budget.device": "DEVICE"}).replace("DEVICE", value)
    (problem,) = problems_of(manifest)
    assert problem.path == "spec.memory.budget.device" and "at most 32 characters" in problem.problem


@pytest.mark.parametrize("value", ["0." + "1" * 31, "1e-3\n"])
def test_a_number_that_the_crd_rejects_is_rejected(value: str) -> None:
    assert (
        "a number >= 0"
        in problems({"spec.training.optimizer.learningRate": value})["spec.training.optimizer.learningRate"].problem
    )


def test_a_key_cannot_command_the_terminal() -> None:
    with pytest.raises(InvalidJob) as caught:
        job({"spec.st\x1b[31meps": 4})
    assert "\x1b" not in str(caught.value)


def test_an_object_from_a_server_loads() -> None:
    served = document({"status": {"state": "Running"}})
    served["metadata"] |= {"uid": "x", "resourceVersion": "7", "generation": 1, "managedFields": [{}]}
    assert parse_job(yaml.safe_dump(served), "job.yaml").metadata.name == "tiny"


# --- names ------------------------------------------------------------------------------------------------------------


def all_names() -> set[str]:
    """Every property name and enum value of the API."""
    found: set[str] = set()

    def visit(schema: Any) -> None:
        if isinstance(schema, dict):
            found.update(schema.get("properties", {}))
            found.update(value for value in schema.get("enum", []) if isinstance(value, str))
            for inner in schema.values():
                visit(inner)
        elif isinstance(schema, list):
            for inner in schema:
                visit(inner)

    visit(TrainingJob.model_json_schema())
    return found


def test_no_name_or_value_is_a_yaml_boolean() -> None:
    words = {"y", "n", "yes", "no", "on", "off", "true", "false"}
    assert {name for name in all_names() if name.lower() in words} == set()


def test_enums_are_camel_case_but_for_names_of_others() -> None:
    of_others = {
        "llama",
        "gpt2",
        "bert",
        "t5",
        "bfloat16",
        "float16",
        "float32",
        "int8",
        "online",
        "offline",
        "spillway.dev/v1alpha1",
        "TrainingJob",
    }
    values = {value for value in all_names() if value and value[0].isupper()} | of_others
    schema_values = {
        value for definition in TrainingJob.model_json_schema()["$defs"].values()
        for field in definition.get("properties", {}).values()
        for value in field.get("enum", [])
    }  # fmt: skip
    assert schema_values - values - {""} == set()


def test_fields_without_local_meaning_are_listed_when_they_were_set() -> None:
    spec = job(
        {
            "spec.scheduling": {"queueName": "a", "nodeSelector": {"x": "y"}},
            "spec.pod.image": "i",
            "spec.suspend": False,
        }
    ).spec
    assert not_used_locally(spec) == ["spec.pod.image", "spec.scheduling.queueName", "spec.scheduling.nodeSelector"]


def test_a_plain_job_uses_every_field_it_sets() -> None:
    assert not_used_locally(job().spec) == []
