"""What a plan costs: CPU seconds of make_plan for 200 jobs of all kinds, and whether the search finds the best plan.

    PYTHONPATH=operator python benchmarks/plan_corpus.py [--quick] [--json FILE]

Each seed gives one job: model (1 M to 70 B parameters, all families, LoRA, up to 1,024 blocks), node, budgets,
precision, forced placements, sweeps. One job in ten is drawn from kinds that plan slowly: very deep models, models
whose blocks all differ, models far too large for the node, drives that allow almost no writes, sweeps of up to 64
members in up to 64 shapes. Plans are explained, as for `spillway plan` and placement, and caches are emptied before
each plan. As in the operator's planning processes, the garbage collector skips what exists before the first plan.

    worst_plan_cpu_seconds    CPU seconds of this process for the slowest plan; the ten slowest are printed with their
                              jobs
    plans_by_deadline         plans that the operator would have given up (plan_service.DEADLINE_SECONDS)
    agreement                 share of 500 other jobs for which the search finds the best of all candidates
                              (`Search.all_candidates`): the same bytes of every tier and the same seconds; or, for a
                              job that does not fit, equally few missing bytes. Each of these jobs has one model and few
                              enough candidates to try them all
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from spillway.api.manifest import validate
from spillway.api.training_job import TrainingJob
from spillway.errors import InvalidJob, UserError
from spillway.plan import Infeasible, MemoryPlan
from spillway.planning import candidates, model_shape, step_time
from spillway.planning.candidates import best, timed
from spillway.planning.hardware import NodeSpec, resolve_node
from spillway.planning.model_shape import shape_of
from spillway.planning.planner import Overrides, ask, make_plan
from spillway.planning.search import Search
from spillway_operator.plan_service import DEADLINE_SECONDS

Document = dict[str, Any]
NUM_JOBS, NUM_COMPARED, NUM_WORST = 200, 500, 10
AT_MOST_SECONDS, AT_LEAST_AGREEMENT = 5.0, 0.99
SLOW_SHARE = 0.1
FIRST_COMPARED, MOST_LAYOUTS = 10_000, 2_500
GIB = 1 << 30
MODELS = (  # architecture, hidden size, blocks, heads, intermediate size, vocabulary: 1 M to 70 B parameters
    ("llama", 64, 2, 4, 176, 4096), ("gpt2", 128, 4, 4, 512, 8192), ("llama", 256, 8, 4, 688, 4096),
    ("bert", 384, 6, 6, 1536, 30522), ("t5", 512, 6, 8, 2048, 32128), ("gpt2", 768, 12, 12, 3072, 50257),
    ("bert", 1024, 24, 16, 4096, 30522), ("t5", 1024, 24, 16, 4096, 32128), ("llama", 2048, 22, 32, 5632, 32000),
    ("gpt2", 1600, 48, 25, 6400, 50257), ("llama", 4096, 32, 32, 14336, 128256), ("llama", 5120, 40, 40, 13824, 32000),
    ("llama", 6656, 60, 52, 17920, 32000), ("llama", 8192, 80, 64, 28672, 128256),
)  # fmt: skip
NODES = ("cpu", "cpu", "cpu-large", "rtx-4090", "l40s", "a100-40", "h100", "1xh100", "8xh100", "h200", "4xa100-80")


@dataclass(frozen=True, slots=True)
class Asked:
    """One job, and the node and budgets with which it is planned."""

    kind: str
    job: TrainingJob
    node: NodeSpec
    overrides: Overrides

    def __str__(self) -> str:
        spec = self.job.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        members, ours = spec.pop("members", ()), self.overrides
        tiers = (ours.device_bytes, ours.host_bytes, ours.nvme_bytes)
        spilled = "/".join("-" if size is None else f"{size / GIB:.3g}" for size in tiers)
        return f"{self.kind} on {self.node.name}, GiB {spilled}, {len(members)} members: {json.dumps(spec)}"


class Draw:
    """Draws one job."""

    def __init__(self, seed: int) -> None:
        self.rng, self.name = random.Random(seed), f"corpus-{seed}"

    def job(self, kind: str | None = None) -> Asked:
        slow = {
            "deep": self.deep, "uneven": self.uneven, "too large": self.too_large, "wearing": self.wearing,
            "sweep": self.sweep, "shapes": self.shapes,
        }  # fmt: skip
        if kind is None:
            kind = self.rng.choice([*slow]) if self._often(SLOW_SHARE) else "ordinary"
        return slow.get(kind, self.ordinary)()

    def ordinary(self, models: tuple[Any, ...] = MODELS) -> Asked:
        return self._asked("ordinary", self._spec(self._one_of(*models)))

    def deep(self) -> Asked:
        spec = self._spec((self._one_of("llama", "gpt2", "t5"), self._one_of(256, 1024, 4096), 0, 8, 1024, 32000))
        spec["model"]["config"]["numLayers"] = self._one_of(128, 512, 1024)
        return self._asked("deep", spec)

    def uneven(self) -> Asked:
        """A model as inspection finds it: blocks of many sizes in random order."""
        asked = self._asked("uneven", self._spec(("llama", 1024, 64, 16, 4096, 32000)))
        config = asked.job.spec.model.config
        assert config is not None
        sizes = [self.rng.randrange(256, 8192, 64) for _ in range(self._one_of(64, 256))]
        of_size = {
            size: shape_of(
                asked.job.spec.model_copy(
                    update={
                        "model": asked.job.spec.model.model_copy(
                            update={"config": config.model_copy(update={"intermediate_size": size, "num_layers": 1})}
                        )
                    }
                ),
                asked.node.device_kind,
            )
            for size in set(sizes)
        }
        blocks = tuple(of_size[size].blocks[0] for size in sizes)
        made = replace(of_size[sizes[0]], architecture="inspected", blocks=blocks, tied=())
        return replace(asked, overrides=replace(asked.overrides, shape=made))

    def too_large(self) -> Asked:
        spec = self._spec(MODELS[-self.rng.randint(1, 4)])
        spec["training"] |= {"microBatchSize": 64, "globalBatchSize": 960 * self.ranks, "sequenceLength": 8192}
        spec.get("memory", {}).pop("advanced", None)
        return self._asked("too large", spec)

    def wearing(self) -> Asked:
        spec = self._spec(self._one_of(*MODELS[8:]))
        spec["memory"] = {"endurance": {"driveWritesPerDay": self._one_of("0.001", "0.01", "0.1")}}
        return self._asked("wearing", spec)

    def sweep(self) -> Asked:
        """A sweep whose members have one shape and differ in seed and micro-batch, or (LoRA) in rank."""
        spec = self._spec(self._one_of(*MODELS[:11]), ranks=1)
        members = self._members(lambda index: {"training": {"seed": index, "microBatchSize": 1 << index % 3}})
        if "lora" in spec["model"]:
            members = self._members(lambda index: {"model": {"lora": {"rank": 4 << index % 4}}})
        spec["training"]["globalBatchSize"] = 16
        return self._asked("sweep", spec | {"members": members})

    def shapes(self) -> Asked:
        """A sweep whose members have 8 to 64 different shapes."""
        spec = self._spec(self._one_of(*MODELS[4:10]), ranks=1)
        config, count = spec["model"]["config"], self._one_of(8, 16, 64)
        spec["model"].pop("lora", None)

        def member(index: int) -> Document:
            change = {"numLayers": config["numLayers"] + index % 8, "intermediateSize": 1024 + 64 * (index % count)}
            return {"model": {"config": change}, "training": {"seed": index}}

        return self._asked("shapes", spec | {"members": self._members(member)})

    def _members(self, one: Callable[[int], Document]) -> list[Document]:
        return [{"name": f"m{index}", **one(index)} for index in range(self._one_of(32, 48, 64))]

    def _spec(self, model: tuple[Any, ...], ranks: int | None = None) -> Document:
        architecture, hidden, layers, heads, wide, vocabulary = model
        self.node = resolve_node(self._one_of(*NODES))
        most = self.node.num_devices if self.node.device_kind == "Cuda" else 4
        self.ranks = ranks or self._one_of(1, 1, most)
        sequence, micro = self._one_of(128, 512, 2048, 4096), self._one_of(1, 1, 2, 8)
        config = {
            "architecture": architecture, "hiddenSize": hidden, "numLayers": layers, "numHeads": heads,
            "intermediateSize": wide, "vocabSize": vocabulary,
        }  # fmt: skip
        if architecture in ("gpt2", "bert"):
            config["maxPositions"] = sequence
        compute = self._one_of("bfloat16", "bfloat16", "bfloat16", "float32", "float16")
        spec: Document = {
            "model": {"config": config, "precision": {"compute": compute}},
            "data": {"builtin": "PythonStdlib"},
            "training": {
                "steps": self._one_of(10, 1000, 10**6), "sequenceLength": sequence, "microBatchSize": micro,
                "globalBatchSize": micro * self.ranks * self._one_of(1, 2, 8, 32),
                "gradientClipping": self._one_of("0", "1"),
            },
            "parallelism": {"devicesPerNode": self.ranks},
        }  # fmt: skip
        if self._often(0.2):
            spec["model"]["lora"] = {"rank": self._one_of(8, 64)}
        if self._often(0.2):
            spec["training"]["optimizer"] = {"name": self._one_of("AdamW", "Lion", "SgdMomentum")}
        advanced: Document = {}
        for part, field, values in (
            ("optimizer", "placement", ("Device", "Host", "Interleaved", "Nvme")),
            ("optimizer", "overlap", ("None", "Forward", "Backward")),
            ("activations", "policy", ("Keep", "Recompute", "Host", "Nvme")),
            ("activations", "hostReserve", ("1Gi",)),
            ("parameters", "placement", ("Resident", "Stream")),
        ):
            if self._often(0.1):
                advanced.setdefault(part, {})[field] = self._one_of(*values)
        if advanced:
            spec["memory"] = {"advanced": advanced}
        return spec

    def _asked(self, kind: str, spec: Document) -> Asked:
        """Makes the job. Its budgets are multiples of what the model takes if nothing is spilled, or the node's own."""
        header = {"apiVersion": "spillway.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": self.name}}
        job = validate(TrainingJob, header | {"spec": spec}, self.name)
        shape = shape_of(job.spec, self.node.device_kind)
        tokens = job.spec.training.micro_batch_size * job.spec.training.sequence_length
        states, saved = 16 * shape.num_trained, tokens * shape.saved_bytes_per_token()
        needed = shape.parameter_bytes + states + saved
        device = int(needed * 10 ** self.rng.uniform(-1.5, 0.1)) if self._often(0.8) else None
        host = int(self.ranks * needed * self.rng.uniform(0.1, 1.5)) if self._often(0.7) else None
        parks = bool(job.spec.members)
        nvme = int(self.ranks * needed * self._one_of(0.0, 0.5, 2.0)) if self._often(0.5) and not parks else None
        return Asked(kind, job, self.node, Overrides(device, host, nvme))

    def _one_of(self, *values: Any) -> Any:
        return self.rng.choice(values)

    def _often(self, share: float) -> bool:
        return self.rng.random() < share


def corpus(number: int, first_seed: int = 0, kind: str | None = None) -> list[Asked]:
    """Returns `number` jobs that can be planned; seeds that give other jobs are skipped."""
    found: list[Asked] = []
    seed = first_seed
    while len(found) < number:
        try:
            asked = Draw(seed).job(kind)
            ask(asked.job, asked.node, asked.overrides)
            found.append(asked)
        except (InvalidJob, UserError):
            pass
        seed += 1
    return found


def forget() -> None:
    """Empties the planner's caches."""
    for module in (candidates, model_shape, step_time):
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


def planned(asked: Asked) -> tuple[MemoryPlan | Infeasible | None, float]:
    """Returns the plan, or None if the job contradicts itself, and the CPU seconds of this process."""
    forget()
    began = time.process_time()
    try:
        found = make_plan(asked.job, asked.node, asked.overrides)
    except UserError:
        found = None
    return found, time.process_time() - began


def agrees(search: Search) -> bool:
    """Whether the search gives the same as trying every candidate: the same candidate, or equally few missing bytes."""
    tried, question = list(search.all_candidates()), search.question
    fitting = [one for one in (timed(question, each) for each in tried if not each.missing) if not one.wears_out]
    if not fitting:
        least = min(one.weighted_missing for one in tried)
        return not search.fits() and not search.choices() and search.nearest_miss().weighted_missing == least
    choices = search.choices()
    return search.fits() and bool(choices) and best(choices) == best(fitting)


def compared(number: int) -> Iterator[bool]:
    """Yields for `number` jobs whether the search agrees. They have one model each and at most MOST_LAYOUTS layouts,
    because trying more takes minutes per job."""
    for seed in itertools.count(FIRST_COMPARED):
        for asked in corpus(1, seed):
            search = Search(ask(asked.job, asked.node, asked.overrides))
            num_layouts = sum(len(group.layouts) for group in search.groups)
            if asked.job.spec.members or not 0 < num_layouts <= MOST_LAYOUTS:
                continue
            yield agrees(search)
            number -= 1
            if not number:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of both")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    part = 10 if given.quick else 1
    asked = corpus(NUM_JOBS // part)
    gc.freeze()
    outcomes = [planned(one) for one in asked]
    seconds = [spent for _, spent in outcomes]
    slowest = sorted(zip(seconds, map(str, asked), strict=True), reverse=True)[:NUM_WORST]
    for spent, what in slowest:
        print(f"{spent:6.2f} s  {what}")
    same = list(compared(NUM_COMPARED // part))
    figures = {
        "worst_plan_cpu_seconds": max(seconds),
        "median_plan_cpu_seconds": median(seconds),
        "total_plan_cpu_seconds": sum(seconds),
        "plans_by_deadline": sum(spent > DEADLINE_SECONDS for spent in seconds),
        "plans": len(asked),
        "fitting": sum(isinstance(found, MemoryPlan) for found, _ in outcomes),
        "agreement": sum(same) / len(same),
        "compared": len(same),
    }
    for name, value in figures.items():
        print(f"{name} {value:.4g}")
    if given.json is not None:
        given.json.write_text(json.dumps({**figures, "slowest": slowest}, indent=2) + "\n", encoding="utf-8")
    if figures["worst_plan_cpu_seconds"] > AT_MOST_SECONDS or figures["agreement"] < AT_LEAST_AGREEMENT:
        sys.exit(f"at most {AT_MOST_SECONDS} s for a plan, at least {AT_LEAST_AGREEMENT:.0%} of plans the same")


if __name__ == "__main__":
    main()
