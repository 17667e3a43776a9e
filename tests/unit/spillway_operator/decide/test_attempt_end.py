"""Why an attempt ended, from what its pods left behind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import ExitCode, reason_of
from spillway_operator.decide.attempt_end import (
    FREE_SHORT_ATTEMPTS,
    LONGEST_TERMINATION,
    Cause,
    cause_of_end,
    read_termination,
    saved_step,
)
from spillway_operator.decide.conditions import CAUSES, LONGEST_MESSAGE
from spillway_operator.decide.observed import ContainerEnding, PodObject
from spillway_trainer.ending import PeerLost, ending_of
from spillway_trainer.parallel import distributed
from spillway_trainer.ranks import World


def said(code: int, **more: object) -> str:
    return json.dumps({"v": 1, "reason": reason_of(code), "exitCode": code, "message": "the reason"} | more)


def ending(code: int, message: str | None = None, reason: str = "Error", second: int = 0) -> ContainerEnding:
    text = said(code) if message is None else message
    return ContainerEnding(code, reason, text, f"2026-11-21T10:00:{second:02d}Z")


def pod(index: int = 0, ended: ContainerEnding | None = None, **more: object) -> PodObject:
    fields: dict[str, object] = {"phase": "Failed" if ended else "Running", "ending": ended} | more
    return PodObject(name=f"demo-1-{index}", uid=f"u{index}", index=index, node=f"node-{index}", **fields)  # type: ignore[arg-type]


def cause_of(pods: Iterable[PodObject], num_nodes: int, short_in_a_row: int = 0) -> Cause:
    return cause_of_end(pods, num_nodes, "demo-1", short_in_a_row)


@pytest.mark.parametrize("code", [64, 70, 71, 72, 73, 74, 75, 76, 77])
def test_a_documented_code_with_its_message_is_the_reason(code: int) -> None:
    cause = cause_of([pod(0, ending(code))], 1)
    assert cause.reason == ExitCode(code).reason
    assert cause.message == "demo-1-0 on node-0: the reason"


def test_rank_and_step_of_the_message_are_named() -> None:
    cause = cause_of([pod(0, ending(70, said(70, rank=3, step=812)))], 1)
    assert cause.message == "demo-1-0 on node-0 (rank 3, step 812): the reason"


@pytest.mark.parametrize("message", ["", "no JSON", "{", '{"v": 1}', "[1]", said(71), said(70, v=3), said(70, v=True)])
def test_a_code_without_the_message_that_fits_is_a_crash(message: str) -> None:
    assert cause_of([pod(0, ending(70, message))], 1).reason == "RankCrashed"


def test_the_message_of_the_version_before_is_read() -> None:
    assert cause_of([pod(0, ending(70, said(70, v=0)))], 1).reason == "DeviceOutOfMemory"


def test_the_last_line_of_the_log_explains_a_crash_without_message() -> None:
    cause = cause_of([pod(0, ending(1, "Traceback ...\nValueError: bad\n\n"))], 1)
    assert cause.message.endswith("the trainer exited with code 1; last log line: ValueError: bad")


@pytest.mark.parametrize("code", [137, 3, 70, 0])
def test_oom_killed_counts_with_any_exit_code(code: int) -> None:
    """On cgroup v1 a killed child leaves its mark on whatever the container ends with."""
    assert cause_of([pod(0, ending(code, reason="OOMKilled"))], 1).reason == "OOMKilled"


def test_the_first_failing_rank_is_the_cause() -> None:
    pods = [pod(0, ending(71, second=9)), pod(1, ending(70, second=3))]
    assert cause_of(pods, 2).reason == "DeviceOutOfMemory"


def test_followers_are_passed_over() -> None:
    pods = [pod(0, ending(1, said(1, follower=True), second=1)), pod(1, ending(70, second=2))]
    assert cause_of(pods, 2).reason == "DeviceOutOfMemory"


def test_a_follower_whose_code_its_message_does_not_fit_is_still_one() -> None:
    pods = [pod(0, ending(1, said(70, follower=True), second=1)), pod(1, ending(71, second=2))]
    assert cause_of(pods, 2).reason == "NonFinite"


def test_followers_alone_are_a_crash_that_says_so() -> None:
    cause = cause_of([pod(0, ending(1, said(1, follower=True)))], 1)
    assert (cause.reason, cause.message) == ("RankCrashed", "demo-1-0 on node-0: the reason")


def test_out_of_memory_outranks_peer_failures_in_the_same_second() -> None:
    pods = [pod(0, ending(1, "")), pod(1, ending(137, "", "OOMKilled"))]
    assert cause_of(pods, 2).reason == "OOMKilled"


def test_within_one_second_a_failure_goes_before_an_orderly_stop() -> None:
    assert cause_of([pod(0, ending(75)), pod(1, ending(71))], 2).reason == "NonFinite"


def test_137_on_a_deleted_pod_is_a_disruption() -> None:
    assert cause_of([pod(0, ending(137, ""), deleting=True)], 1).reason == "PodDeleted"


def test_137_on_a_pod_that_nobody_deleted_is_a_crash() -> None:
    assert cause_of([pod(0, ending(137, ""))], 1).reason == "RankCrashed"


def test_a_drained_pod_that_wrote_its_checkpoint_was_preempted() -> None:
    drained = pod(0, ending(75), disruption="EvictionByEvictionAPI", deleting=True)
    assert cause_of([drained], 1).reason == "Preempted"


def test_a_pod_that_is_gone_was_deleted() -> None:
    assert cause_of([], 1).reason == "PodDeleted"
    message = cause_of([pod(0, ending(1, said(1, follower=True)))], 2).message
    assert message == "pod 1 of Job demo-1 was deleted"


def test_a_failed_job_whose_pods_ended_well_is_named() -> None:
    cause = cause_of([pod(0, ending(0))], 1)
    assert cause.reason == "RankCrashed"
    assert cause.message.startswith("Job demo-1 failed, but its pods are gone or ended without an error")
    assert cause.message.endswith("; see kubectl describe job demo-1")


VAIN = "rank 0 waited 300 s at demo-1-0.demo-1:29500 for rank 1; see its log"
LOST = "another rank ended while this one waited for the other ranks' gradients: Connection closed by peer"


def follower(message: str, second: int = 5) -> PodObject:
    more = {"neverJoined": True} if message == VAIN else {}
    return pod(0, ending(1, said(1, follower=True, message=message, **more), second=second))


def test_rank_that_waited_in_vain_is_a_crash_even_when_its_peer_is_gone() -> None:
    """The Job controller deletes the peer because the Job failed."""
    cause = cause_of([follower(VAIN)], 2)
    assert (cause.reason, cause.message) == ("RankCrashed", f"demo-1-0 on node-0: {VAIN}")


def test_the_trainers_own_message_says_that_the_peer_never_joined() -> None:
    world = World(rank=1, size=2, master_address="127.0.0.1", master_port=1)
    with pytest.raises(PeerLost) as lost:
        distributed.await_listener(world, distributed.JoinDeadline(world, 0.0))
    told = ending_of(lost.value).to_json(rank=1, step=0)
    assert cause_of([pod(1, ending(1, told))], 2).reason == "RankCrashed"


def test_a_rank_whose_peer_is_gone_lost_a_deleted_pod() -> None:
    assert cause_of([follower(LOST)], 2).reason == "PodDeleted"


def test_a_peer_that_is_gone_again_and_again_is_no_excuse() -> None:
    assert cause_of([follower(LOST)], 2, FREE_SHORT_ATTEMPTS - 1).reason == "PodDeleted"
    cause = cause_of([follower(LOST)], 2, FREE_SHORT_ATTEMPTS)
    assert (cause.reason, cause.message) == ("RankCrashed", f"demo-1-0 on node-0: {LOST}")
    assert cause_of([], 2, FREE_SHORT_ATTEMPTS).reason == "PodDeleted", "no pod says anything else"


@pytest.mark.parametrize(("asked", "reason"), [(4, "PodDeleted"), (5, "PodDeleted"), (6, "RankCrashed")])
@pytest.mark.parametrize("message", [VAIN, LOST])
def test_of_a_peer_that_is_still_there_the_deletion_has_a_time(asked: int, reason: str, message: str) -> None:
    """deletionTimestamp is when the grace period ends. After the follower's end it was the Job controller's."""
    taken = pod(1, deleting=True, deletion_time=f"2026-11-21T10:00:{30 + asked:02d}Z", grace_seconds=30)
    assert cause_of([follower(message), taken], 2).reason == reason


def test_a_drained_peer_is_a_disruption_whatever_its_follower_says() -> None:
    drained = pod(1, deleting=True, disruption="EvictionByEvictionAPI", deletion_time="2026-11-21T10:09:00Z")
    assert cause_of([follower(VAIN), drained], 2).reason == "PodDeleted"
    assert cause_of([follower(VAIN), pod(1, ending(75, said(75)), deleting=True)], 2).reason == "Preempted"


def test_the_step_that_was_saved_on_request_is_read() -> None:
    assert saved_step([pod(0, ending(75, said(75, savedStep=120))), pod(1, ending(75))]) == 120
    assert saved_step([pod(0, ending(75)), pod(1, ending(1, said(1, savedStep=9))), pod(2)]) is None


def test_a_failure_goes_before_the_pods_that_were_deleted_because_of_it() -> None:
    pods = [pod(0, ending(71, second=1)), pod(1, ending(137, "", second=5), deleting=True)]
    assert cause_of(pods, 2).reason == "NonFinite"
    assert cause_of(pods[:1], 2).reason == "NonFinite"


def test_an_eviction_for_the_pods_own_disk_use_is_not_a_disruption() -> None:
    evicted = pod(0, phase="Failed", status_reason="Evicted", status_message='Usage of EmptyDir volume "spill" exceeds')
    cause = cause_of([evicted], 1)
    assert cause.reason == "Evicted"
    assert "exceeds" in cause.message


def test_an_orderly_stop_does_not_hide_the_eviction_that_asked_for_it() -> None:
    """Otherwise a job that outgrows its disk would be evicted and repeated for ever, free of charge."""
    first = pod(0, ending(75), phase="Failed", status_reason="Evicted", status_message="usage exceeds 256Mi")
    cause = cause_of([first, pod(1, ending(75, second=2))], 2)
    assert cause.reason == "Evicted"
    assert cause.message == "demo-1-0 on node-0: evicted by the kubelet: usage exceeds 256Mi"


def test_a_failure_of_another_rank_goes_before_an_eviction() -> None:
    evicted = pod(0, ending(75, second=2), phase="Failed", status_reason="Evicted")
    assert cause_of([evicted, pod(1, ending(72, second=1))], 2).reason == "SpillVolumeFull"


def test_kill_for_node_memory_pressure_is_not_the_pods_own_limit() -> None:
    evicted = pod(
        0, ending(137, "", "OOMKilled"), status_reason="Evicted", disruption="TerminationByKubelet",
        status_message="The node was low on resource: memory.",
    )  # fmt: skip
    cause = cause_of([evicted], 1)
    assert cause.reason == "PodDeleted"
    assert "low on resource: memory" in cause.message
    assert cause_of([evicted, pod(1, ending(137, "", "OOMKilled", second=1))], 2).reason == "OOMKilled"


def test_an_eviction_for_want_of_space_on_the_node_is_a_disruption() -> None:
    evicted = pod(0, phase="Failed", status_reason="Evicted", disruption="TerminationByKubelet")
    assert cause_of([evicted], 1).reason == "PodDeleted"


@pytest.mark.parametrize(
    "lost", [{"disruption": "DeletionByTaintManager"}, {"status_reason": "NodeLost"}, {"disruption": "DeletionByPodGC"}]
)
def test_a_lost_node_is_named(lost: dict[str, str]) -> None:
    cause = cause_of([pod(0, deleting=True, **lost)], 1)
    assert cause.reason == "NodeLost"
    assert "node-0" in cause.message


def test_a_pod_that_the_kubelet_did_not_admit_was_taken_away() -> None:
    cause = cause_of([pod(0, phase="Failed", status_reason="OutOfmemory", status_message="Node has too little")], 1)
    assert cause.reason == "PodDeleted"
    assert "OutOfmemory" in cause.message


texts = st.text(max_size=200) | st.from_regex(r"\{\"v\":1,.{0,60}\}") | st.just("[" * 100_000)
values = st.none() | st.booleans() | st.integers() | st.text(max_size=30) | st.lists(st.integers(), max_size=2)


@given(
    st.lists(
        st.builds(
            ContainerEnding,
            st.integers(-1, 300),
            st.sampled_from(["Error", "OOMKilled", "Completed", ""]),
            texts | st.dictionaries(st.sampled_from(["v", "reason", "exitCode", "message", "rank", "step", "follower"]),
                                    values).map(json.dumps),
            st.sampled_from(["", "2026-11-21T10:00:00Z", "yesterday"]),
        ),
        max_size=3,
    )
)  # fmt: skip
def test_cause_is_always_one_printable_line_with_a_known_reason(endings: list[ContainerEnding]) -> None:
    pods = [pod(index, ended) for index, ended in enumerate(endings)]
    cause = cause_of(pods, 3)
    assert cause.reason in CAUSES
    assert cause.message.isprintable() and len(cause.message) <= LONGEST_MESSAGE + 100


def test_a_message_beyond_the_kubelets_limit_is_not_read() -> None:
    long = ending(70, said(70, message="x" * LONGEST_TERMINATION))
    assert read_termination(long).reason == ""
    assert read_termination(replace(long, message=said(70))).reason == "DeviceOutOfMemory"
