"""What one rank decides for itself: who it is, what is its share, what it tells, how it ends when others are gone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness import local_runs
from spillway.errors import CheckpointCorrupt, Fenced, InvalidJob, SpillwayError, UserError
from spillway.plan import Tier
from spillway.planning.footprint import exchange_bytes
from spillway.planning.model_shape import model_shape
from spillway.planning.workload import EXCHANGE_PARAMETERS, Workload
from spillway_trainer import config, run_job
from spillway_trainer.assemble import Tiers
from spillway_trainer.checkpoints.directory import CheckpointNotWritten
from spillway_trainer.ending import PeerLost, ending_of
from spillway_trainer.parallel import distributed
from spillway_trainer.parallel.distributed import (
    ExchangedSum,
    Outcome,
    Timeouts,
    buckets,
    decided,
    header_of,
    read_header,
)
from spillway_trainer.ranks import World, dealt
from spillway_trainer.reporting.exporter import Exporter
from spillway_trainer.reporting.recorder import Recorder
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes


def test_without_torchruns_variables_there_is_one_rank() -> None:
    assert World.of({}) == World(rank=0, local_rank=0, size=1)


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2, but WORLD_SIZE = 2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "variable RANK is 'one', but must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "variable RANK is '-1', but must be a whole number, 0 or more"),
    ],
)
def test_variables_that_make_no_sense_are_named(variables: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        World.of(variables)


def test_a_job_of_two_ranks_is_not_trained_by_one(tmp_path: Path) -> None:
    job = local_runs.job_file(tmp_path, tmp_path, tmp_path, 1).model_copy(update={"ranks_per_node": 2})
    with pytest.raises(
        UserError, match=r"asks for 2 ranks \(1 nodes x 2\), but the environment variable WORLD_SIZE is 1"
    ):
        config.check_world(job, World())


@pytest.mark.parametrize("text", ["0", "-3", "soon", "nan", "inf"])
def test_a_time_limit_is_a_positive_number(text: str) -> None:
    with pytest.raises(UserError, match="SPILLWAY_COLLECTIVE_SECONDS"):
        Timeouts.of({"SPILLWAY_COLLECTIVE_SECONDS": text})


POD = World(rank=1, size=4, master_address="demo-1-0.demo-1", num_nodes=2)


@pytest.mark.parametrize(
    ("world", "ready", "missing"),
    [
        (POD, ["10.0.0.1"], True),
        (POD, ["10.0.0.1", "10.0.0.1"], True),
        (POD, ["10.0.0.1", "10.0.0.2"], False),
        (POD, None, False),
        (replace(POD, master_address="demo-1-0.example.com"), ["10.0.0.1"], False),
        (replace(POD, master_address="127.0.0.1"), ["127.0.0.1"], False),
    ],
    ids=["one of two", "named twice", "all", "no DNS", "another host", "one machine"],
)
def test_the_service_says_whether_a_pod_is_not_ready(
    world: World, ready: list[str] | None, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def addresses(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        assert host == "demo-1"
        if ready is None:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in ready]

    monkeypatch.setattr(distributed.socket, "getaddrinfo", addresses)
    assert distributed.is_pod_missing(world) is missing


def test_time_to_join_counts_from_when_all_pods_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now)
    monkeypatch.setattr(distributed, "is_pod_missing", lambda _world: now < 1000)
    deadline = distributed.JoinDeadline(POD, 300.0)
    for second in range(0, 1400, 10):
        now = float(second)
        assert deadline.is_over() == (second > 990 + 300), f"{second}: it looks every 30 s, so last at 990 s in vain"


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_micro_batches_are_dealt_out_in_turn_and_collected_in_order(size: int) -> None:
    shares = [World(rank=rank, size=size).share(4) for rank in range(size)]
    assert dealt([[float(number) for number in share] for share in shares]) == list(range(4 * size))


def test_corpus_is_built_by_rank_0_then_the_first_rank_of_each_other_node() -> None:
    worlds = [World(rank=rank, local_rank=rank % 2, size=6) for rank in range(6)]
    assert [world.corpus_turn for world in worlds] == [0, 2, 1, 2, 1, 2]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_buckets_hold_every_gradient_once_and_large_ones_by_themselves(size: int) -> None:
    gradients = [torch.arange(start, start + count) for start, count in ((0, 5), (5, 1), (6, 0), (6, 14), (20, 2))]
    found = list(buckets(iter(gradients), size))
    held = [piece for pieces in found for piece in pieces]
    assert sorted(torch.cat(held).tolist()) == list(range(22))
    assert max(sum(map(len, pieces)) for pieces in found) <= size
    large = [gradient for gradient in gradients if 2 * len(gradient) >= size]
    assert [len(pieces) for pieces in found].count(1) >= sum(-(-len(gradient) // size) for gradient in large)
    small = [pieces for pieces in found if len(pieces) > 1][:-1]
    assert all(sum(map(len, pieces)) == size for pieces in small)
    for piece in held:
        piece.add_(100)
    assert torch.cat(gradients).tolist() == list(range(100, 122)), "pieces are the gradients' own memory"


def rejected(error: SpillwayError) -> SpillwayError:
    """`error` of rank 0 as another rank raises it."""

    def work() -> str:
        raise error

    with pytest.raises(SpillwayError) as raised:
        Outcome.from_json(decided(work).to_json()).result()
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        Fenced("epoch 3 owns the run", epoch=1, newest_epoch=3),
        CheckpointCorrupt("no checkpoint can be used", problems=["step-2.e1: bad"]),
        CheckpointNotWritten("the disk is full"),
        InvalidJob("job.yaml", []),
    ],
    ids=lambda error: type(error).__name__,
)
def test_the_error_of_rank_0_is_raised_by_the_others_as_it_is(error: SpillwayError) -> None:
    theirs = rejected(error)
    assert (type(theirs), str(theirs), theirs.details) == (type(error), str(error), error.details)
    assert ending_of(theirs) == ending_of(error)


def test_what_rank_0_says_may_be_any_text() -> None:
    assert Outcome.from_json(decided(lambda: '{"ü": "\n"}').to_json()).result() == '{"ü": "\n"}'


def test_a_tensor_is_announced_by_name_and_shape() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        header = header_of("exp_avg.läyers.0", (3, 0, 7), dtype)
        assert read_header(header) == ("exp_avg.läyers.0", [3, 0, 7], dtype)


def test_a_lost_peer_is_a_crash_that_says_it_is_not_the_cause() -> None:
    def lose() -> None:
        with distributed.peers("the other ranks' gradients"):
            raise RuntimeError(
                "[/some/where/pair.cc:561] Connection closed by peer [127.0.0.1]:10904. Go and look.\nmore"
            )

    with pytest.raises(PeerLost) as lost:
        lose()
    ending = ending_of(lost.value)
    said = json.loads(ending.to_json(rank=3, step=8))
    assert (said["reason"], said["exitCode"], said["follower"], said["rank"]) == ("RankCrashed", 1, True, 3)
    assert said["message"] == (
        "another rank ended while this one waited for the other ranks' gradients: "
        "Connection closed by peer [127.0.0.1]:10904; read the logs of the other ranks"
    )
    assert ending.expected, "no traceback: the sentence says all"


def test_other_errors_among_peers_keep_their_names() -> None:
    with pytest.raises(ZeroDivisionError), distributed.peers("nobody"):
        raise ZeroDivisionError


def test_an_interface_that_is_not_there_is_no_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(RuntimeError, match="nowhere0"):
        distributed.check_device()


@pytest.mark.parametrize(("address", "local"), [("127.0.0.1", True), ("localhost", True), ("job-1-0.job-1", False)])
def test_ranks_of_one_machine_meet_where_nobody_else_can_come(address: str, local: bool) -> None:
    listener = distributed.local_listener(World(size=2, master_address=address))
    assert (listener is not None) == local
    if listener is not None:
        with socket.socket(fileno=listener) as opened:
            assert opened.getsockname()[0] == "127.0.0.1"


SMALL = local_runs.job_file(Path(), Path("text"), Path("corpus"), 1)


def families(rank: int) -> Iterator[tuple[str, dict[str, str]]]:
    exporter = Exporter(SMALL, rank, local_runs.spread_plan(), "threads")
    exporter.evaluation(2.0)
    for family in exporter.collect():
        for sample in family.samples:
            yield sample.name, sample.labels


def test_ranks_other_than_0_export_only_what_they_alone_know() -> None:
    names, others = dict(families(0)), list(families(1))
    assert {"spillway_evaluation_loss", "spillway_steps_planned", "spillway_tier_budget_bytes"} <= names.keys()
    assert others
    assert all(labels["rank"] == "1" for _, labels in others)


def test_the_launcher_gives_a_rank_its_metrics_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    exporter: Any = SimpleNamespace(serve=lambda *where: asked.append(where))
    job: Any = SimpleNamespace(metrics_port=9400)
    run_job.serve_metrics(exporter, job)
    monkeypatch.setenv("SPILLWAY_METRICS_PORT", "40001")
    run_job.serve_metrics(exporter, job)
    assert asked == [(9400,), (40001, "127.0.0.1")]


def test_taken_metrics_port_costs_the_metrics_but_not_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = Exporter(SMALL, 0, local_runs.spread_plan(), "threads")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SPILLWAY_METRICS_PORT", str(port))
        run_job.serve_metrics(exporter, SimpleNamespace(metrics_port=9400))  # type: ignore[arg-type]
    assert f"without the metrics of this rank: metrics port {port}" in capsys.readouterr().out


def test_a_recorder_without_a_path_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None)
    recorder.start(job="small")
    recorder.end(1, "Completed", 0, "done")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 64])
def test_the_footprint_counts_the_buffers_of_the_exchange(
    size: int, wire: torch.dtype, kind: str, tmp_path: Path
) -> None:
    job = local_runs.job_file(tmp_path, tmp_path, tmp_path, 1)
    shape = model_shape(job.spec.model.transformer, "bfloat16")
    for num_values in (shape.num_accumulated, 10**9):
        work = Workload(shape, 4, 64, 2, world_size=size, wire_bytes=wire.itemsize, on_cuda=kind == "cuda")
        taken = list[int]()
        ExchangedSum(World(size=size), num_values, wire, partial(buffer_of, taken), 1, None, torch.device(kind))
        if num_values < EXCHANGE_PARAMETERS:
            assert taken == [exchange_bytes(work)]
        else:
            assert taken[0] <= 14 * (2**20 if kind == "cpu" else 2**24)


def buffer_of(taken: list[int], nbytes: int) -> torch.Tensor:
    taken.append(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8)


def test_the_exchange_is_held_where_the_plan_counts_it() -> None:
    host, ledger = HostSlab(2**20), DeviceLedger(None)
    tiers = Tiers(ledger, host, None, CpuLanes(host, ledger))
    with closing(tiers):
        assert tiers.exchange_buffer(4096).nbytes == 4096
        assert tiers.held_bytes() == dict.fromkeys(Tier, 0) | {Tier.DEVICE: 4096}


def test_one_rank_exchanges_nothing(tmp_path: Path) -> None:
    job = local_runs.job_file(tmp_path, tmp_path, tmp_path, 1)
    assert exchange_bytes(Workload(model_shape(job.spec.model.transformer, "bfloat16"), 4, 64, 2)) == 0
