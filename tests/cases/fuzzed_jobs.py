"""Random valid TrainingJobs: every field of the API, with ordinary and extreme values, in clusters of all kinds.

A job is valid if the schema and the rules between fields allow it; whether it fits any node, or can be run yet, is for
the operator to decide. One seed makes one job.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from cases.bad_manifests import claims_of, observed_spec
from cases.job_documents import job
from harness.observations import NOW
from spillway.api.field_types import MAX_DOMAIN_LENGTH, MAX_DOMAIN_NAME_LENGTH
from spillway.api.limits import MAX_ENV_BYTES, MAX_RANKS
from spillway.api.load import job_type
from spillway.api.manifest import validate
from spillway.api.script import TRAINED_FIELDS
from spillway.placement.cluster_view import ClusterView, LiveBytes, NodeView, Taint
from spillway.planning.model_shape import shape_of
from spillway.update_rules import MomentType, UpdateRule
from spillway_operator.decide.observed import Claim, Desired, Inspection
from spillway_operator.decide.reconcile import reconcile

Document = dict[str, Any]
GIB = 1 << 30
RARELY, SOMETIMES, OFTEN = 0.02, 0.3, 0.7

SIZES = ("1Ki", "1Mi", "64Mi", "1Gi", "24Gi", "80Gi", "512Gi", "4Ti", "1Pi", "7Ei", 1, 4096, 2**63 - 1, "0.5Gi", "1e9")
"""of budgets: from absurdly small to the largest quantity"""
COUNTS = (0, 1, 60, 3600, 10**6, 10**12)
TEXTS = ("", "en", "a/b/c", "x" * 1024, "ünïcödé 🚀", "'; DROP TABLE jobs; --", "$(whoami)", "{{ .Values }}", "\\n")
NAMES = ("a", "team-a", "my.claim", "x" * 253)
LONGEST_RESOURCE = "x" * MAX_DOMAIN_LENGTH + "/" + "X" * MAX_DOMAIN_NAME_LENGTH
NUMBERS = ("0", "0.0", "0.1", "1e-8", "0.9", "1", "10", "1e-300", "1e300")


def fuzzed_job(seed: int) -> Document:
    """A manifest, as plain data."""
    return _Maker(random.Random(seed)).job(f"fuzz-{seed}")


def as_script(spec: Document) -> Document:
    """The same spec for a script, without the fields that a script decides itself. Draws no random number."""
    made = {name: value for name, value in spec.items() if name not in TRAINED_FIELDS}
    pod = made.get("pod", {})
    made["pod"] = pod | {"resources": {"memory": "1Gi"} | pod.get("resources", {})}
    nvme = made.pop("memory", {}).get("budget", {}).get("nvme")
    made["memory"] = {} if nvme is None else {"budget": {"nvme": nvme}}
    checkpoint = made.get("checkpoint", {})
    made["checkpoint"] = {name: checkpoint[name] for name in ("claim", "subPath") if name in checkpoint}
    for section, field in (("parallelism", "strategy"), ("spill", "encryption")):
        made[section] = {name: value for name, value in made.get(section, {}).items() if name != field}
    return made


def as_other_data(data: Document, kind: str) -> Document:
    """The same data with chats or tokens in place of text. Draws no random number, so that recorded jobs stay the
    same."""
    place, evaluation = data["text"], dict(data.get("evaluation", {}))
    if evaluation.pop("text", None) or ("fetch" in place and kind == "chat"):
        evaluation.pop("fraction", None)
        return {"chat": place, "evaluation": evaluation | {"chat": place}}
    other = {kind if name == "text" else name: value for name, value in data.items()}
    return other | ({"packing": True} if kind == "chat" and len(str(data)) % 3 else {})


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes = self._one_of(1, 1, 1, 2, 4, 16, 128, 256, MAX_RANKS)
        self.devices = min(self._one_of(1, 1, 2, 4, 8, 64), MAX_RANKS // self.nodes)
        self.architecture = self._one_of("llama", "llama", "gpt2", "bert", "t5")
        self.is_float16 = self._often(0.1)
        self.has_blocks = False
        """whether moments are blocks of values that share a scale; set with the optimizer"""
        self.sequence = self._one_of(2, 64, 128, 2048, 4096, 8192, 131072, 1 << 24)

    def job(self, name: str) -> Document:
        metadata: Document = {"name": self._one_of(name, name.ljust(52, "x"))}
        self._maybe(metadata, "labels", SOMETIMES, {"team": "a"})
        self._maybe(metadata, "annotations", SOMETIMES, {"example.com/note": self._one_of(*TEXTS)})
        return {
            "apiVersion": "spillway.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": metadata,
            "spec": self._spec(),
        }

    def _one_of(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def _often(self, share: float) -> bool:
        return self.rng.random() < share

    def _maybe(self, holder: Document, name: str, share: float, *values: Any) -> None:
        if self._often(share):
            holder[name] = self._one_of(*values)

    def _spec(self) -> Document:
        spec: Document = {"model": self._model(), "data": self._data(), "training": self._training()}
        if "source" in spec["model"] and "text" in spec["data"]:
            spec["data"] = as_other_data(spec["data"], "chat" if len(str(spec)) % 2 else "tokens")
        if self._often(OFTEN) or self.nodes * self.devices > 1:
            spec["parallelism"] = self._parallelism()
        for name, make in (
            ("memory", self._memory), ("spill", self._spill), ("checkpoint", self._checkpoint),
            ("pod", self._pod), ("scheduling", self._scheduling), ("lifecycle", self._lifecycle),
        ):  # fmt: skip
            if self._often(OFTEN if name == "memory" else SOMETIMES):
                spec[name] = make()
        self._maybe(spec, "managedBy", SOMETIMES, "spillway.dev/operator")
        self._maybe(spec, "suspend", SOMETIMES, False, False, True)
        reserves = "hostReserve" in spec.get("memory", {}).get("advanced", {}).get(
            "activations", {}
        )  # which members do not have
        if self._often(RARELY) and not reserves:
            spec["members"] = [{"name": "a"}, {"name": "b", "training": {"seed": 1}, "data": {}, "model": {}}]
            spec["objective"] = {"metric": "Loss", "direction": "Maximize", "halving": self._one_of(*COUNTS[1:])}
        self._maybe(spec, "command", RARELY, ["python", "train.py"], ["x" * 4096] * 64)
        if self._often(SOMETIMES):  # last, so that everything else in recorded jobs stays the same
            spec["tracking"] = self._tracking()
        if self._often(RARELY):
            runs = {"claim": "runs", "subPath": "a", "fetch": {"uri": "s3://runs/a", "secretName": "keys"}}
            spec.setdefault("checkpoint", {})["from"] = self._one_of({"path": "/runs/a"}, runs)
        if "evaluation" in spec["data"] and "members" not in spec and self._often(SOMETIMES):
            spec["training"]["earlyStopping"] = {"patience": self._one_of(*COUNTS[1:])}
            self._maybe(spec["training"]["earlyStopping"], "minDelta", OFTEN, *NUMBERS)
            self._maybe(spec.setdefault("checkpoint", {}), "keepBest", OFTEN, True, False)
            if self._often(SOMETIMES):
                del spec["training"]["steps"]
                spec["training"]["epochs"] = self._one_of(1, 3, 10**6)
        if self._often(RARELY):
            places = ({"claim": "a", "writable": True}, {"configMap": "code", "subPath": "train.py"}, {"secret": "key"})
            mounts = [{"path": f"/mounts/{number}", **place} for number, place in enumerate(places)]
            spec.setdefault("pod", {})["mounts"] = self._one_of([], mounts)
            spec["pod"].setdefault("resources", {})["scratch"] = self._one_of(*SIZES)
        if "members" not in spec and self._often(RARELY):
            spec["search"] = self._search()
        return as_script(spec) if spec.get("command") else spec

    # what is trained

    def _model(self) -> Document:
        model: Document = {}
        if self._often(RARELY):
            model["source"] = self._one_of(
                {"claim": "models", "subPath": "llama"}, {"path": "/models/llama"},
                {"claim": "models", "subPath": "llama", "fetch": {"uri": "hf://org/llama", "secretName": "keys"}},
            )  # fmt: skip
        elif self._often(RARELY):
            model["entrypoint"] = "mine:build"
        else:
            model["config"] = self._config()
        if self._often(0.2):
            model["lora"] = {}
            self._maybe(model["lora"], "rank", OFTEN, 1, 16, 4096)
            self._maybe(model["lora"], "alpha", SOMETIMES, *NUMBERS)
            self._maybe(model["lora"], "targetModules", SOMETIMES, [], ["q_proj", "v_proj"], ["x"] * 64)
        if self._often(SOMETIMES):
            model["precision"] = {"master": "float32", "gradientAccumulate": "float32"}
            for field in ("compute", "gradientReduce"):
                self._maybe(model["precision"], field, OFTEN, "bfloat16", "float32")
        if self.is_float16:
            model.setdefault("precision", {})["compute"] = "float16"
        return model

    def _config(self) -> Document:
        heads = self._one_of(1, 2, 4, 8, 12, 32, 64, 1024)
        head_size = self._one_of(2, 64, 96, 128)
        key_values = self._one_of(*(count for count in (1, 2, 4, heads) if heads % count == 0))
        config: Document = {
            "architecture": self.architecture, "hiddenSize": heads * head_size, "numHeads": heads,
            "numLayers": self._one_of(1, 2, 4, 12, 32, 80, 128, 1024),
            "vocabSize": self._one_of(257, 258, 2048, 32000, 128256, 1 << 22),
        }  # fmt: skip
        if self.architecture == "llama":
            self._maybe(config, "numKeyValueHeads", OFTEN, key_values)
            self._maybe(config, "ropeTheta", SOMETIMES, "10000", "5e5", "1e-300")
        if self.architecture in ("gpt2", "bert"):
            config["maxPositions"] = max(self.sequence, self._one_of(1024, 1 << 24))
        if self.architecture != "t5":
            self._maybe(config, "tieWordEmbeddings", SOMETIMES, True, False)
        self._maybe(config, "intermediateSize", OFTEN, 1, 352, 11008, 28672, 1 << 20)
        self._maybe(config, "dropout", SOMETIMES, "0", "0.1", "0.999")
        self._maybe(config, "normEps", SOMETIMES, "1e-5", "1e-30", "1e30")
        return config

    def _data(self) -> Document:
        place: Document = self._one_of(
            {"claim": "corpus"}, {"claim": "my.claim", "subPath": "en/wiki"}, {"path": "/data"},
            {"claim": "corpus", "subPath": "a", "fetch": {"uri": "s3://corpus/a", "secretName": "keys"}},
        )  # fmt: skip
        kinds: tuple[Document, ...] = ({"builtin": "PythonStdlib"}, {"text": place})
        if self._often(RARELY):
            kinds = ({"text": place}, {"entrypoint": "mine.other:data"}, {"entrypoint": "mine:data"})
        data: Document = dict(self._one_of(*kinds))
        if self._often(SOMETIMES):
            data["evaluation"] = {}
            if self._often(SOMETIMES):
                data["evaluation"]["text"] = self._one_of(place, {"claim": "held"}, {"path": "/held"})
            else:
                self._maybe(data["evaluation"], "fraction", OFTEN, "0.01", "0.5", "1e-300")
            self._maybe(data["evaluation"], "sequences", SOMETIMES, *COUNTS)
            self._maybe(data["evaluation"], "seed", SOMETIMES, *COUNTS)
            self._maybe(data["evaluation"], "everySteps", OFTEN, 1, 100, 10**12)
        return data

    def _training(self) -> Document:
        micro = self._one_of(1, 1, 2, 4, 64, 1 << 20)
        world = self.nodes * self.devices
        while micro * world > 1 << 24:
            micro //= 2
        most = (1 << 24) // (micro * world)
        training: Document = {
            "steps": self._one_of(1, 100, 10**5, 10**12), "sequenceLength": self.sequence, "microBatchSize": micro,
            "globalBatchSize": micro * world * self._one_of(1, 1, min(2, most), min(64, most), most),
        }  # fmt: skip
        self._maybe(training, "seed", SOMETIMES, *COUNTS)
        self._maybe(training, "gradientClipping", SOMETIMES, *NUMBERS)
        self._maybe(training, "nonFinite", SOMETIMES, "SkipStep", "Fail")
        if self.is_float16 and self._often(0.8):
            training["lossScale"] = {}
            self._maybe(training["lossScale"], "initial", OFTEN, 1024, 65536, 1 << 24)
            self._maybe(training["lossScale"], "growthInterval", OFTEN, 1, 2000, 10**12)
            self._maybe(training["lossScale"], "minimum", OFTEN, 1, 1024)
        if self._often(SOMETIMES):
            rule = self._one_of(*UpdateRule)
            optimizer = training["optimizer"] = {"name": rule.value}
            self._maybe(optimizer, "learningRate", OFTEN, "1e-300", "3e-4", "10")
            values = {
                "betas": (["0.9", "0.95"], ["0", "0.9999999"]),
                "eps": ("1e-8", "1e30"),
                "momentum": ("0", "0.9"),
            }
            for name in sorted(set(values) & set(rule.defaults)):
                self._maybe(optimizer, name, OFTEN, *values[name])
            self._maybe(optimizer, "weightDecay", OFTEN, "0", "10")
            if "0.9999999" not in optimizer.get("betas", []):  # with it, moments in a narrow type would not shrink
                self._maybe(optimizer, "moments", SOMETIMES, *(kind.value for kind in MomentType))
            self.has_blocks = optimizer.get("moments") == MomentType.INT8
            self._maybe(
                optimizer, "groups", SOMETIMES, [], [{"match": "*", "learningRateFactor": "0.1", "weightDecay": "0"}]
            )
        if self._often(SOMETIMES):
            schedule = training["schedule"] = {"name": self._one_of("Cosine", "Linear", "Constant")}
            self._maybe(schedule, "warmupSteps", OFTEN, 0, 1, training["steps"])
            self._maybe(schedule, "finalFraction", OFTEN, "0", "0.1", "1")
            if "warmupSteps" not in schedule:  # draws no random number
                schedule["warmupRatio"] = "0.03"
        return training

    # how and where it is trained

    def _parallelism(self) -> Document:
        made: Document = {"nodes": self.nodes, "devicesPerNode": self.devices}
        self._maybe(made, "device", OFTEN, "Auto", "Cuda", "Cpu")
        divides = self._often(0.1) and not (self.is_float16 or self.has_blocks)
        strategies = ("Fsdp", "Zero1", "Zero2", "Zero3") if divides else ("Auto", "Ddp")
        self._maybe(made, "strategy", OFTEN, *strategies)
        return made

    def _memory(self) -> Document:
        memory: Document = {"mode": self._one_of("Auto", "Auto", "Advise", "Disabled")}
        disabled = memory["mode"] == "Disabled"
        budget: Document = {"host": self._one_of(*SIZES)} if disabled else {}
        for tier in ("device", "host", "nvme"):
            self._maybe(budget, tier, SOMETIMES, *SIZES, *(() if tier == "device" else (0, "0")))
        if budget or self._often(SOMETIMES):
            memory["budget"] = budget
        advanced: Document = {}
        placements = ("Auto", "Device") if disabled else ("Auto", "Device", "Host", "Interleaved", "Nvme")
        policies = ("Auto", "Keep") if disabled else ("Auto", "Keep", "Recompute", "Host", "Nvme")
        if self._often(SOMETIMES):
            advanced["optimizer"] = {"placement": self._one_of(*placements)}
            overlaps = ("Auto", "None") if disabled else ("Auto", "None", "Forward", "Backward")
            self._maybe(advanced["optimizer"], "overlap", SOMETIMES, *overlaps)
        if self._often(SOMETIMES):
            advanced["activations"] = {"policy": self._one_of(*policies)}
            spills = advanced["activations"]["policy"] in ("Auto", "Nvme") and not disabled
            if spills and "host" not in budget:  # hostReserve may not exceed it
                self._maybe(advanced["activations"], "hostReserve", SOMETIMES, "1Mi", "64Gi", 0)
        if self._often(SOMETIMES):
            advanced["parameters"] = {"placement": self._one_of("Auto", "Resident", "Stream")}
        if advanced:
            memory["advanced"] = advanced
        if self._often(SOMETIMES):
            memory["endurance"] = {"driveWritesPerDay": self._one_of("1e-300", "0.001", "1", "1e300")}
        return memory

    def _spill(self) -> Document:
        made: Document = {}
        self._maybe(made, "storageClassName", OFTEN, "", "fast", "x" * 253)
        if made.get("storageClassName"):
            self._maybe(made, "numVolumes", SOMETIMES, 1, 2, 8)
        made["encryption"] = "Ephemeral" if self._often(SOMETIMES) else "None"
        return made

    def _checkpoint(self) -> Document:
        made: Document = {}
        self._maybe(made, "everySteps", OFTEN, 1, 200, 10**12)
        self._maybe(made, "keep", OFTEN, 2, 1000)
        self._maybe(made, "claim", OFTEN, *NAMES)
        self._maybe(made, "subPath", SOMETIMES, *TEXTS)
        self._maybe(made, "resume", SOMETIMES, "OwnOnly")
        if self._often(RARELY):
            made["resume"] = "Never"
        return made

    def _tracking(self) -> Document:
        made: Document = {"tensorBoard": {}} if self._often(SOMETIMES) else {}
        if self._often(SOMETIMES) or not made:
            made["mlflow"] = {"uri": self._one_of("http://mlflow:5000", "https://example.com/mlflow")}
            self._maybe(made["mlflow"], "experiment", SOMETIMES, "team/runs", "x" * 253, "ünïcödé 🚀")
        if self._often(SOMETIMES):
            made["wandb"] = {"project": self._one_of("p", "x" * 128)}
            self._maybe(made["wandb"], "entity", SOMETIMES, "team")
            self._maybe(made["wandb"], "mode", SOMETIMES, "online", "offline")
        return made

    def _search(self) -> Document:
        parameters: list[Document] = [
            {"path": "training.seed", "min": 0, "max": 10**12, "distribution": "Uniform"},
            {"path": "training.optimizer.learningRate", "min": "1e-300", "max": 10, "distribution": "LogUniform"},
            {"path": "training.gradientClipping", "min": "0", "max": "1e300", "step": "2.5e299"},
            {"path": "training.optimizer.weightDecay", "values": ["0", "0.1", 1]},
        ]
        if self._often(SOMETIMES):
            return {"algorithm": "Grid", "trials": 15, "parameters": parameters[2:]}
        return {"seed": self._one_of(*COUNTS), "trials": self._one_of(1, 5, 64), "parameters": parameters}

    def _resources(self) -> Document:
        return self._one_of(
            {},
            {"cpu": 1},
            {"cpu": "100m"},
            {"cpu": "1n"},
            {"cpu": 10**6},
            {"memory": "64Gi"},
            {"memory": "1Mi"},
            {"sharedMemory": "1Gi"},
            {"extended": {"rdma/hca": 1}},
        )

    def _pod(self) -> Document:
        made: Document = {}
        self._maybe(made, "image", SOMETIMES, "", "trainer:1", "x" * 1024)
        self._maybe(made, "imagePullSecrets", SOMETIMES, [], [{"name": "a"}], [{"name": f"s{n}"} for n in range(16)])
        self._maybe(made, "resourceName", SOMETIMES, "nvidia.com/gpu", "amd.com/gpu", LONGEST_RESOURCE)
        self._maybe(made, "runtimeClassName", SOMETIMES, "", "nvidia", "x" * 253)
        self._maybe(made, "hostNetwork", RARELY, True, False)
        self._maybe(
            made,
            "securityContext",
            RARELY,
            {"assignedByCluster": True},
            {"runAsUser": 2000, "runAsGroup": 1, "fsGroup": 5, "supplementalGroups": [7]},
        )
        self._maybe(made, "networkPreset", RARELY, "ib", "")
        if self._often(SOMETIMES):
            made["resources"] = self._resources()
        if self._often(SOMETIMES):
            made["env"] = self._env()
        self._maybe(made, "labels", OFTEN, {}, {"a": "b"}, {f"example.com/k{n}": "v" for n in range(64)})
        self._maybe(made, "annotations", OFTEN, {}, {"a": self._one_of(*TEXTS)})
        self._maybe(made, "serviceAccountName", SOMETIMES, "", "trainer")
        return made

    def _scheduling(self) -> Document:
        made: Document = {}
        self._maybe(made, "queueName", SOMETIMES, "", "team", "x" * 63)
        self._maybe(made, "priorityClassName", SOMETIMES, "", "high")
        self._maybe(made, "workloadPriorityClassName", SOMETIMES, "", "high")
        self._maybe(made, "gang", SOMETIMES, "Auto", "Disabled", "Required" if self._often(0.1) else "Auto")
        self._maybe(made, "gangWaitSeconds", SOMETIMES, 1, 900)
        self._maybe(made, "nodeSelector", SOMETIMES, {}, {"pool": "a"})
        all_of_it = {"key": "a", "operator": "Equal", "value": "b", "effect": "NoExecute", "tolerationSeconds": 60}
        self._maybe(made, "tolerations", SOMETIMES, [], [{"operator": "Exists"}], [all_of_it] * 64)
        return made

    def _lifecycle(self) -> Document:
        made: Document = {}
        for name in ("activeDeadlineSeconds", "pendingDeadlineSeconds", "stallSeconds", "ttlSecondsAfterFinished"):
            self._maybe(made, name, SOMETIMES, *COUNTS[1:])
        self._maybe(made, "maxRestarts", SOMETIMES, 0, 1, 1000)
        return made

    def _env(self) -> list[Document]:
        secret = {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
        many = [{"name": f"V{n}", "value": "x" * 8192} for n in range(MAX_ENV_BYTES // 8192)]
        return list(self._one_of([], [{"name": "A", "value": self._one_of(*TEXTS)}], [secret], many))


# --- clusters ---------------------------------------------------------------------------------------------------------


def fuzzed_cluster(seed: int) -> ClusterView:
    """A cluster whose nodes have not been read, without nodes, or with nodes of a few kinds, with or without live
    metrics."""
    rng = random.Random(seed)
    if rng.random() < SOMETIMES:
        return ClusterView()
    nodes = tuple(_node(rng, number) for number in range(rng.choice((0, 1, 3, 20))))
    source = rng.choice(("", "Prometheus"))
    return ClusterView(nodes=nodes, metrics_source=source, metrics_age_seconds=3.0 if source else None)


def _node(rng: random.Random, number: int) -> NodeView:
    devices = rng.choice((0, 1, 8))
    labels = {"pool": rng.choice("ab")}
    if devices and rng.random() < OFTEN:
        product = rng.choice(("NVIDIA-H100-80GB-HBM3", "Unheard-Of"))
        labels |= {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": "81559"}
    return NodeView(
        name=f"node-{number}",
        labels=labels,
        taints=(Taint("a", "b", "NoSchedule"),) if rng.random() < SOMETIMES else (),
        allocatable_cores=rng.choice((0.5, 8.0, 96.0)),
        allocatable_memory_bytes=rng.choice((0, 4 * GIB, 512 * GIB, 2**50)),
        allocatable_ephemeral_bytes=rng.choice((0, 100 * GIB, 2**45)),
        allocatable_devices={"nvidia.com/gpu": devices} if devices else {},
        ready=rng.random() < 0.9,
        live=LiveBytes(
            devices=rng.choice(((), (0,), (70 * GIB, 0))),
            host=rng.choice((None, 0, 200 * GIB)),
            nvme=rng.choice((None, 0)),
        ),
    )


# --- the operator's decisions -----------------------------------------------------------------------------------------


def decided(seed: int) -> tuple[dict[str, Any], Desired]:
    """The manifest, and the operator's decision on the job as the API server would store it."""
    document = fuzzed_job(seed)
    spec = document["spec"]
    validate(job_type(document), document, "fuzz")
    claims = tuple(Claim(name, exists=True, access_modes=("ReadWriteMany",)) for name in sorted(claims_of(spec)))
    seen = observed_spec(spec, claims, fuzzed_cluster(seed))
    if "command" in spec:
        return document, reconcile(seen, NOW)
    if "source" in spec["model"] or "entrypoint" in spec["model"] or "fetch" in str(spec):  # its pod finds the shape
        seen = replace(seen, inspection=Inspection(shape=shape_of(job().spec).packed()))
    return document, reconcile(seen, NOW)
