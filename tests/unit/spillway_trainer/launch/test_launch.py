"""What the launcher decides: places of the ranks, the decisive end, merged metrics, cut lines. No processes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from spillway.api.job_file import JobFile
from spillway.errors import UserError
from spillway_trainer.launch import launcher as launch
from spillway_trainer.launch.ending import LONGEST_TERMINATION, RankEnd, decisive
from spillway_trainer.launch.launcher import (
    COMMIT_SECONDS,
    FOLLOW_SECONDS,
    STOP_SECONDS,
    LaunchSettings,
    patience,
    plan_ranks,
    read_layout,
    supervise,
)
from spillway_trainer.launch.merged_metrics import RankMetrics, merge
from spillway_trainer.launch.output import LONGEST_LINE, Stream, cut, write_all

NEVER = float("inf")


def ended(rank: int, code: int, said: dict[str, Any] | None = None, **more: Any) -> RankEnd:
    message = b"" if said is None else json.dumps({"v": 1, "exitCode": code, **said}).encode()
    return RankEnd(rank, code << 8, message, **more)


def killed(rank: int, number: int, **more: Any) -> RankEnd:
    return RankEnd(rank, number, **more)


def follower(rank: int) -> RankEnd:
    return ended(rank, 1, {"reason": "RankCrashed", "follower": True})


# --- which end is the pod's -------------------------------------------------------------------------------------------


def test_the_first_failure_in_order_of_death_decides() -> None:
    assert decisive([ended(2, 0), ended(1, 72), ended(0, 70)]).rank == 1


def test_a_follower_is_passed_over_for_a_failure_that_comes_later() -> None:
    assert decisive([follower(0), killed(1, signal.SIGKILL)]).rank == 1


def test_a_rank_that_the_launcher_stopped_is_no_cause() -> None:
    assert decisive([follower(1), killed(0, signal.SIGKILL, stopped=True)]).rank == 1


def test_a_follower_that_crashes_while_it_ends_is_a_follower() -> None:
    crashing = RankEnd(0, int(signal.SIGABRT), json.dumps({"exitCode": 1, "follower": True}).encode())
    assert decisive([crashing, ended(1, 73)]).rank == 1
    assert json.loads(crashing.termination())["follower"] is True


def test_a_rank_that_torch_ends_because_it_waits_for_a_peer_is_a_follower() -> None:
    waiting = RankEnd(0, int(signal.SIGABRT), waited_in_nccl=True)
    assert decisive([waiting, killed(1, signal.SIGKILL)]).rank == 1
    said = json.loads(waiting.termination())
    assert said["follower"] and "while rank 0 waited for it in NCCL" in said["message"]
    assert not killed(0, signal.SIGABRT).follows
    assert not killed(0, signal.SIGKILL, waited_in_nccl=True).follows
    failed = json.dumps({"exitCode": 78, "message": "the device failed"}).encode()
    assert not RankEnd(0, int(signal.SIGABRT), failed, waited_in_nccl=True).follows


def test_a_rank_that_the_kernel_killed_points_to_the_kernel_log() -> None:
    said = json.loads(killed(1, signal.SIGKILL).termination())["message"]
    assert said == "rank 1 was killed by SIGKILL (probably out of memory; see the kernel log)"


def test_without_a_failure_the_lowest_rank_speaks() -> None:
    assert decisive([ended(1, 0), ended(0, 0)]).rank == 0


def test_a_signal_is_128_and_its_number() -> None:
    assert killed(0, signal.SIGSEGV).exit_code == 139


def test_a_ranks_own_message_is_passed_on_byte_by_byte() -> None:
    end = ended(3, 70, {"reason": "DeviceOutOfMemory", "rank": 3, "requested": 7})
    assert end.termination() is end.message


def test_a_message_that_is_too_long_for_the_kubelet_is_replaced() -> None:
    end = ended(3, 70, {"message": "x" * LONGEST_TERMINATION})
    assert json.loads(end.termination())["reason"] == "DeviceOutOfMemory"
    assert len(end.termination()) < LONGEST_TERMINATION


@pytest.mark.parametrize("message", [b"", b"{", b"[]", b"\xff", b'{"exitCode": 0}'])
def test_a_documented_code_without_its_message_keeps_its_reason(message: bytes) -> None:
    said = json.loads(RankEnd(1, 72 << 8, message).termination())
    assert (said["reason"], said["exitCode"], said["rank"]) == ("SpillVolumeFull", 72, 1)


def test_a_rank_asked_to_stop_before_it_listens_was_preempted() -> None:
    end = killed(0, signal.SIGTERM, asked=True)
    said = json.loads(end.termination())
    assert (end.exit_code, said["reason"]) == (75, "Preempted")
    assert said["message"] == "rank 0 was stopped by SIGTERM before it could save"


def test_sigterm_from_a_stranger_is_a_crash() -> None:
    assert killed(0, signal.SIGTERM).exit_code == 143


# --- how long the others get ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "seconds"),
    [
        ([], NEVER),
        ([ended(0, 0)], COMMIT_SECONDS),
        ([ended(0, 75)], COMMIT_SECONDS),
        ([ended(0, 75), ended(1, 1)], FOLLOW_SECONDS),
        ([ended(0, 0), killed(1, signal.SIGKILL)], FOLLOW_SECONDS),
        ([killed(0, signal.SIGTERM, asked=True)], FOLLOW_SECONDS),
    ],
)
def test_ranks_wait_for_one_another_only_as_long_as_it_can_help(ends: list[RankEnd], seconds: float) -> None:
    assert patience(ends) == seconds


class Clockwork:
    """Ranks that end when they are killed, or at a given second; waiting is what moves the clock."""

    def __init__(self, ends: dict[float, RankEnd]) -> None:
        self.now, self.ends_to_come, self.ends = 0.0, ends, list[RankEnd]()
        self.running = {end.rank for end in ends.values()}
        self.sent: list[tuple[float, int]] = []
        self.asked = self.stopped = self.stop_requested = False

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def reap(self) -> None:
        for second in [second for second in self.ends_to_come if second <= self.now]:
            self.ends.append(self.ends_to_come.pop(second))
            self.running.discard(self.ends[-1].rank)

    def still_saves(self) -> bool:
        return False

    def signal(self, number: int) -> None:
        self.sent.append((self.now, number))
        if number == signal.SIGKILL:
            self.running.clear()


@pytest.mark.parametrize(
    ("ends", "sent"),
    [
        (
            {0.0: ended(1, 70), NEVER: ended(0, 0)},
            [(FOLLOW_SECONDS, signal.SIGTERM), (FOLLOW_SECONDS + STOP_SECONDS, signal.SIGKILL)],
        ),
        ({0.0: ended(1, 70), FOLLOW_SECONDS: follower(0)}, []),
        ({0.0: ended(1, 75), COMMIT_SECONDS - 1.0: ended(0, 75)}, []),
        ({0.0: ended(1, 75), 1.0: ended(2, 70), 20.0: ended(0, 75)}, [(1.0 + FOLLOW_SECONDS, signal.SIGTERM)]),
    ],
)
def test_the_ranks_that_are_left_get_time_then_sigterm_then_sigkill(
    ends: dict[float, RankEnd], sent: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clockwork: Any = Clockwork(dict(ends))
    monkeypatch.setattr(launch, "time", clockwork)
    supervise(clockwork, clockwork)
    assert clockwork.sent == sent


# --- places -----------------------------------------------------------------------------------------------------------


def layout(**changes: Any) -> LaunchSettings:
    return LaunchSettings(**{"name": "demo", "epoch": 2, "termination_message_path": "/dev/null", **changes})


def test_ranks_count_through_the_nodes() -> None:
    starts = plan_ranks(layout(num_nodes=3, ranks_per_node=2, master_port=29500), 2, Path("/scratch"))
    assert [start.rank for start in starts] == [4, 5]
    assert [start.environment["LOCAL_RANK"] for start in starts] == ["0", "1"]
    assert {start.environment["WORLD_SIZE"] for start in starts} == {"6"}
    assert {start.environment["MASTER_PORT"] for start in starts} == {"29500"}
    assert starts[1].termination_path == Path("/scratch/rank-5.json")


def test_a_pod_knows_its_node_by_its_completion_index() -> None:
    assert launch.node_rank(layout(num_nodes=2), {"JOB_COMPLETION_INDEX": "1"}) == 1
    assert launch.node_rank(layout(), {}) == 0


@pytest.mark.parametrize("index", ["2", "-1", "x", ""])
def test_an_index_without_a_node_is_rejected(index: str) -> None:
    with pytest.raises(UserError, match="JOB_COMPLETION_INDEX"):
        launch.node_rank(layout(num_nodes=2), {"JOB_COMPLETION_INDEX": index})


def test_ranks_without_metrics_get_no_port() -> None:
    assert "SPILLWAY_METRICS_PORT" not in plan_ranks(layout(), 0, Path("/scratch"))[0].environment


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x"}'])
def test_a_damaged_job_file_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(UserError, match="not a job file"):
        read_layout(tmp_path / "job.json")


def test_a_missing_job_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_layout(tmp_path / "job.json")


def test_several_nodes_need_a_port_to_meet(tmp_path: Path) -> None:
    content = {"name": "x", "epoch": 1, "termination_message_path": "/dev/null", "num_nodes": 2}
    (tmp_path / "job.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="master_port"):
        read_layout(tmp_path / "job.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", 7),
        ("name", None),
        ("epoch", 0),
        ("termination_message_path", None),
        ("termination_message_path", ""),
        ("metrics_port", "x"),
        ("metrics_port", 0),
        ("num_nodes", 0),
        ("num_nodes", True),
        ("ranks_per_node", "2"),
        ("ranks_per_node", 0),
        ("master_port", -1),
        ("master_address", None),
    ],
)
def test_a_field_that_cannot_be_is_named(tmp_path: Path, name: str, value: object) -> None:
    content = {"name": "x", "epoch": 1, "termination_message_path": "/dev/null", name: value}
    (tmp_path / "job.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"{name} = {re.escape(repr(value))}: must be a (number|text)"):
        read_layout(tmp_path / "job.json")


def test_no_metrics_port_is_a_field_that_can_be(tmp_path: Path) -> None:
    content = {"name": "x", "epoch": 1, "termination_message_path": "/dev/null", "metrics_port": None}
    (tmp_path / "job.json").write_text(json.dumps(content))
    assert read_layout(tmp_path / "job.json").metrics_port is None


def test_a_launcher_that_fails_itself_says_so_where_the_pod_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> RankEnd:
        raise ZeroDivisionError("of the launcher")

    monkeypatch.setattr(launch, "launch", fail)
    content = {"name": "x", "epoch": 1, "termination_message_path": str(tmp_path / "termination.json")}
    (tmp_path / "job.json").write_text(json.dumps(content))
    assert launch.main([str(tmp_path)]) == 1
    said = json.loads((tmp_path / "termination.json").read_text())
    assert (said["reason"], said["exitCode"]) == ("RankCrashed", 1)
    assert said["message"] == "the launcher failed: ZeroDivisionError: of the launcher"


def test_names_and_defaults_are_those_of_the_job_file() -> None:
    theirs = JobFile.model_fields
    for name, ours in LaunchSettings.__dataclass_fields__.items():
        required = ours.default is ours.default_factory
        assert theirs[name].is_required() == required, name
        assert required or theirs[name].default == ours.default, name


# --- merged metrics ---------------------------------------------------------------------------------------------------

FIRST = """\
# HELP spillway_step Steps.
# TYPE spillway_step gauge
spillway_step{training_job="a b"} 7.0
# HELP spillway_tier_bytes Bytes.
# TYPE spillway_tier_bytes gauge
spillway_tier_bytes{training_job="a b",rank="0",tier="host"} 1.0
"""
SECOND = FIRST.replace('rank="0"', 'rank="1"').replace("7.0", "8.0") + "own 1\n"


def test_a_family_of_several_ranks_has_one_head_and_all_samples() -> None:
    assert merge({1: SECOND, 0: FIRST}).splitlines() == [
        "# HELP spillway_step Steps.",
        "# TYPE spillway_step gauge",
        'spillway_step{training_job="a b"} 7.0',
        "# HELP spillway_tier_bytes Bytes.",
        "# TYPE spillway_tier_bytes gauge",
        'spillway_tier_bytes{training_job="a b",rank="0",tier="host"} 1.0',
        'spillway_tier_bytes{training_job="a b",rank="1",tier="host"} 1.0',
        "own 1",
    ]


def test_a_single_ranks_exposition_is_unchanged() -> None:
    assert merge({0: FIRST}) == FIRST


def test_samples_of_a_histogram_stay_with_it() -> None:
    text = "# TYPE h histogram\n" + "".join(f'h_bucket{{le="{le}"}} 1\n' for le in (1, 2)) + "h_count 2\nh_sum 3\n"
    assert merge({0: text, 1: text}) == text


def test_ranks_that_do_not_run_are_not_asked_and_are_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(metrics: RankMetrics, rank: int, answers: dict[int, str]) -> None:
        answers[rank] = ""

    monkeypatch.setattr(RankMetrics, "_ask", answer)
    metrics = RankMetrics("demo", {0: 1, 1: 1}, lambda rank: rank == 1)
    assert metrics.exposition().splitlines()[2:] == [
        'spillway_rank_up{training_job="demo",rank="0"} 0',
        'spillway_rank_up{training_job="demo",rank="1"} 1',
    ]


# --- lines ------------------------------------------------------------------------------------------------------------


def test_a_line_waits_for_its_end() -> None:
    assert cut(b"one\ntw", ended=False) == ([b"one"], b"tw")
    assert cut(b"two", ended=True) == ([b"two"], b"")


def test_a_long_line_comes_in_pieces_and_no_empty_one() -> None:
    lines, rest = cut(b"x" * (LONGEST_LINE + 1), ended=False)
    assert ([len(line) for line in lines], rest) == ([LONGEST_LINE], b"x")
    assert cut(b"x" * LONGEST_LINE, ended=False) == ([], b"x" * LONGEST_LINE)
    assert cut(b"x" * LONGEST_LINE + b"\n\n", ended=False) == ([b"x" * LONGEST_LINE, b""], b"")


def test_a_stream_that_ends_with_a_line_leaves_nothing() -> None:
    assert cut(b"", ended=True) == ([], b"")


# --- who reads the lines ----------------------------------------------------------------------------------------------


def test_a_slow_reader_of_a_pipe_that_does_not_block_loses_nothing() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    content = b"line\n" * 100_000
    writer = threading.Thread(target=write_all, args=(Stream(0, -1, write, b""), content))
    writer.start()
    received = b""
    while len(received) < len(content):
        received += os.read(read, 4096)
    writer.join()
    os.close(read)
    os.close(write)
    assert received == content


def test_a_reader_that_went_away_is_given_up() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = Stream(0, -1, write, b"")
    write_all(stream, b"line\n")
    os.close(write)
    assert stream.target == -1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_costs_the_lines_that_did_not_fit_and_no_later_ones() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    stream = Stream(0, -1, full, b"")
    write_all(stream, b"line\n")
    os.close(full)
    assert stream.target == full
