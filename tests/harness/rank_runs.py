"""Runs of several ranks for tests: each rank is a forked process with the environment that the launcher would give
it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness import local_runs
from harness.patience import Patience, Taken, taken_by
from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, ParameterPlan, Policy, Tier
from spillway_trainer.launch.launcher import free_ports

NUM_LAYERS = 2
JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: small}
spec:
  model:
    config: {architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 4, numKeyValueHeads: 2,
             intermediateSize: 80, vocabSize: 300, tieWordEmbeddings: true, dropout: "0.1"}
    precision: {compute: bfloat16, gradientReduce: bfloat16}
  data:
    text: {path: TEXT}
    evaluation: {fraction: "0.003", everySteps: 2}
  training: {steps: 4, sequenceLength: 32, globalBatchSize: 8, microBatchSize: 2, gradientClipping: "0.5",
             optimizer: {learningRate: "2e-3"}, schedule: {name: Cosine, warmupSteps: 1}}
  memory: {budget: {host: 64Mi}}
  checkpoint: {everySteps: 100}
"""
LOOK_SECONDS = 1.0
GATHERS = "this rank begins to wait for the others"
"""a line that a rank writes to its log when it begins to wait"""
BUCKET_VARIABLE = "TEST_EXCHANGE_PARAMETERS"
"""sets the size of the buckets in which gradients are exchanged, because a test's model is smaller than a default
bucket"""
AFTER_VARIABLE = "TEST_EXCHANGES_AFTER_BACKWARD"
"""if set, nothing is exchanged during backward"""
DIES_VARIABLE = "TEST_DIES_IN_BUCKET"
"""a rank, and the number of the bucket at whose exchange SIGKILL ends it"""
FAILS_VARIABLE = "TEST_FAILS_AT_GRADIENT"
"""a rank, and the number of the gradient at which it runs out of device memory"""
OWN_DISK_VARIABLE = "TEST_HAS_A_DISK_OF_ITS_OWN"
"""a rank that does not see the checkpoint directory of rank 0, as on a node with a disk of its own"""
LOOKS_VARIABLE = "TEST_LOOKS_AT_PODS"
"""a file; the rank always finds that a pod is not ready, and appends a byte to the file at each look"""
POST_VARIABLE = "TEST_POST_SECONDS"
"""sets the seconds between two reports of progress, because a test's run is shorter than the default"""
KEEP, RECOMPUTE, HOST, NVME = Policy.KEEP, Policy.RECOMPUTE, Policy.HOST, Policy.NVME
PLACEMENTS: dict[str, tuple[tuple[float, float, float, float], int, list[Policy]]] = {
    "resident, kept": ((0.0, 0.0, 1.0, 0.0), 1 << 20, [KEEP, KEEP]),
    "all on the CPU, kept": ((1.0, 0.0, 0.0, 0.0), 1009, [KEEP, KEEP]),
    "all streamed, host": ((0.0, 1.0, 0.0, 0.0), 2048, [HOST, HOST]),
    "half and half, NVMe": ((0.5, 0.5, 0.0, 0.0), 777, [NVME, NVME]),
    "a third each, recomputed": ((0.34, 0.33, 0.33, 0.0), 4096, [RECOMPUTE, RECOMPUTE]),
    "interleaved, mixed": ((0.61, 0.17, 0.22, 0.0), 513, [NVME, HOST]),
    "all on the CPU, parameters in slots": ((1.0, 0.0, 0.0, 0.0), 777, [RECOMPUTE, HOST]),
    "parameters in slots, segment by segment": ((0.9, 0.05, 0.05, 0.0), 513, [RECOMPUTE, NVME]),
    "all states on NVMe, kept": ((0.0, 0.0, 0.0, 1.0), 777, [KEEP, KEEP]),
    "states everywhere, mixed": ((0.2, 0.2, 0.2, 0.4), 513, [HOST, NVME]),
}
"""name -> shares on the CPU, streamed, resident and on NVMe; parameters per chunk; answers of the two blocks"""
STREAMED = {
    "all on the CPU, parameters in slots": ParameterPlan(homes=(Tier.HOST, Tier.HOST, Tier.NVME, Tier.HOST)),
    "parameters in slots, segment by segment": ParameterPlan(
        homes=(Tier.NVME, Tier.DEVICE, Tier.HOST, Tier.NVME), num_slots=1, order="WeightStationary", boundaries=HOST
    ),
}
"""parameter plans of the placements whose parameters leave the device; homes of the embedding, two blocks and the
head"""


def job_file(output: Path, text: Path, corpus: Path, epoch: int, world: int, changes: Mapping[str, str]) -> JobFile:
    document = JOB.replace("TEXT", str(text))
    for old, new in changes.items():
        assert old in document, old
        document = document.replace(old, new)
    job = local_runs.job_file(output, text, corpus, epoch)
    return job.model_copy(update={"spec": parse_job(document, "small job").spec, "ranks_per_node": world})


def plan_for(job: JobFile, placement: str | None = None) -> MemoryPlan:
    """The plan of one of PLACEMENTS; None means memory.mode Disabled."""
    training = job.spec.training
    update: dict[str, Any] = {
        "micro_batch_size": training.micro_batch_size,
        "num_micro_batches": training.global_batch_size // training.micro_batch_size // job.world_size,
        "world_size": job.world_size,
    }
    if placement is None:
        return local_runs.disabled_plan(NUM_LAYERS).model_copy(update=update)
    (cpu, streamed, resident, nvme), chunk, answers = PLACEMENTS[placement]
    update["optimizer"] = OptimizerPlan(
        cpu_share=cpu, streamed_share=streamed, resident_share=resident, nvme_share=nvme, chunk_parameters=chunk
    )
    update["activations"] = ActivationPlan(
        answers=(KEEP, *answers, KEEP), minimum_bytes=512, window_bytes=1 << 16, num_io_threads=1
    )
    update["parameters"] = STREAMED.get(placement, ParameterPlan())
    return local_runs.spread_plan(NUM_LAYERS).model_copy(update=update)


@dataclass(frozen=True)
class Ended:
    """What one rank left behind."""

    exit_code: int
    termination: dict[str, Any]
    log: str
    state: dict[str, str]
    """digest of every parameter and state at the end of training; empty if the rank did not reach it"""


@dataclass
class Started:
    """The processes of one attempt."""

    job: JobFile
    processes: dict[int, BaseProcess]
    """by rank"""
    patience: Patience = field(init=False)

    def __post_init__(self) -> None:
        self.patience = Patience(self._taken, waits_for=f"the ranks of {self.job.output_directory}")

    def _taken(self) -> Taken:
        return taken_by(process.pid for process in self.processes.values() if process.pid is not None)

    def look(self) -> None:
        """Kills the ranks and raises AssertionError if they hang."""
        try:
            self.patience.look()
        except AssertionError:
            for process in self.processes.values():
                process.kill()
            raise

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def join(self) -> list[Ended]:
        for process in self.processes.values():
            while process.is_alive():
                process.join(LOOK_SECONDS)
                self.look()
        return [self._ended(rank, process) for rank, process in self.processes.items()]

    def _ended(self, rank: int, process: BaseProcess) -> Ended:
        assert process.exitcode is not None
        log = log_path(self.job, rank)
        return Ended(
            process.exitcode,
            json.loads(_text(termination_path(self.job, rank)) or "{}"),
            _text(log),
            json.loads(_text(log.with_suffix(".state")) or "{}"),
        )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def log_path(job: JobFile, rank: int) -> Path:
    return Path(job.output_directory) / f"rank-{rank}.{job.epoch}.log"


def gathers(job: JobFile, rank: int) -> bool:
    """Whether the rank waits, or has waited, for its peers."""
    return GATHERS in _text(log_path(job, rank))


def _a_pod_is_missing(looks: Path) -> bool:
    with looks.open("ab") as file:
        file.write(b".")
    return True


def termination_path(job: JobFile, rank: int) -> Path:
    return Path(job.output_directory) / f"rank-{rank}.{job.epoch}.json"


def run_rank(job: JobFile, plan: MemoryPlan, rank: int, environment: Mapping[str, str]) -> None:
    """Entry point of a forked rank; never returns."""
    log = os.open(log_path(job, rank), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(environment)
    from harness.after_backward import AfterBackward
    from spillway_trainer import assemble, run_job
    from spillway_trainer.__main__ import attempt
    from spillway_trainer.ending import leave
    from spillway_trainer.parallel import distributed
    from spillway_trainer.reporting import progress_client

    meet = distributed.meet

    def gather(*given: Any) -> Any:
        print(GATHERS, flush=True)
        return meet(*given)

    distributed.meet = gather
    distributed.EXCHANGE_PARAMETERS = int(environment.get(BUCKET_VARIABLE, distributed.EXCHANGE_PARAMETERS))
    progress_client.POST_INTERVAL_SECONDS = float(environment.get(POST_VARIABLE, progress_client.POST_INTERVAL_SECONDS))
    if looks := environment.get(LOOKS_VARIABLE):
        distributed.is_pod_missing = lambda _world: _a_pod_is_missing(Path(looks))
    if AFTER_VARIABLE in environment:
        assemble.BackwardExchange = AfterBackward  # type: ignore[misc,assignment]
    dies_in = environment.get(DIES_VARIABLE, "").split()
    if dies_in and int(dies_in[0]) == rank:
        die_in_bucket(int(dies_in[1]))
    fails_at = environment.get(FAILS_VARIABLE, "").split()
    if fails_at and int(fails_at[0]) == rank:
        fail_at_gradient(int(fails_at[1]))
    if environment.get(OWN_DISK_VARIABLE) == str(rank):
        run_job.RunCheckpoints._is_shared = lambda self: all(self.ranks.each("", str))  # type: ignore[method-assign]
    train = run_job.train

    def train_and_tell(run: Any, *arguments: Any) -> None:
        train(run, *arguments)
        tensors = [*run.optimizer.state(), *run.model.named_parameters()]
        own = ((name, getattr(tensor.detach(), "_local_tensor", tensor.detach())) for name, tensor in tensors)
        state = {name: run_job.digest(repr(tensor.double().tolist())) for name, tensor in own}
        log_path(job, rank).with_suffix(".state").write_text(json.dumps(state))

    run_job.train = train_and_tell  # type: ignore[assignment]
    leave(attempt(job, lambda: plan))


def die_in_bucket(number: int) -> None:
    """Makes this process kill itself in the network lane's thread at bucket `number`. Each bucket takes two sends."""
    from spillway_trainer.parallel.distributed import dist

    sent, send = 0, dist.batch_isend_irecv

    def count(*given: Any, **more: Any) -> Any:
        nonlocal sent
        sent += 1
        if sent == 2 * number:
            assert threading.current_thread() is not threading.main_thread()
            os.kill(os.getpid(), signal.SIGKILL)
        return send(*given, **more)

    dist.batch_isend_irecv = count


def fail_at_gradient(number: int) -> None:
    """Makes this process run out of device memory in backward, at gradient `number`, while exchanges are under way."""
    from spillway.errors import DeviceOutOfMemory
    from spillway_trainer.parallel.backward_exchange import BackwardExchange

    come, taken = 0, BackwardExchange.taken

    def count(self: BackwardExchange, name: str) -> None:
        nonlocal come
        come += 1
        if come == number:
            raise DeviceOutOfMemory("the test takes all of it")
        taken(self, name)

    BackwardExchange.taken = count  # type: ignore[method-assign]


def start(
    job: JobFile,
    plan: MemoryPlan,
    each: Mapping[int, tuple[JobFile, MemoryPlan]] | None = None,
    only: int | None = None,
    **environment: str,
) -> Started:
    """Starts all ranks of `job`, or `only` one of them. `each` gives single ranks another job and plan."""
    world, port = job.world_size, free_ports(1)[0]
    processes = {}
    for rank in range(world) if only is None else [only]:
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SPILLWAY_TERMINATION_PATH": str(termination_path(job, rank)),
            "SPILLWAY_COLLECTIVE_SECONDS": "60",
            **environment,
        }
        rank_job, rank_plan = (each or {}).get(rank, (job, plan))
        process = local_runs.CONTEXT.Process(target=run_rank, args=(rank_job, rank_plan, rank, variables))
        process.start()
        processes[rank] = process
    return Started(job, processes)


def complete(job: JobFile, plan: MemoryPlan, **environment: str) -> list[Ended]:
    """Runs all ranks to their end. All must exit with 0, and with the same parameters and states."""
    ended = start(job, plan, **environment).join()
    assert [each.exit_code for each in ended] == [0] * len(ended), "\n".join(each.log for each in ended)
    assert all(each.state == ended[0].state for each in ended), "ranks hold different parameters or states"
    assert None not in losses(job).values(), "a run without finite losses compares nothing"
    return ended


def losses(job: JobFile) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in local_runs.events(Path(job.output_directory), "step")}


def evaluations(job: JobFile) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in local_runs.events(Path(job.output_directory), "evaluation")}
