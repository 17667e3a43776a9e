"""Whatever happens to operator and cluster, at any moment: one live attempt, epochs that only rise, counts that only
grow, deadlines that are kept, and an end.

The riskiest assumption of the operator, tried on the model of a cluster with its real shell (cluster_model.py).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.cluster_model import (
    Fault,
    World,
    _attempt,
    _ended,
    _is_deleting,
    seconds_of,
    termination,
)
from harness.depth import at

CODES = (1, 1, 75, 75, 74, 137, 143, 64, 70)
COUNTS = ("restarts", "disruptions", "memoryErrors", "activeSeconds")
faults = st.builds(Fault, st.integers(0, 4), st.booleans(), st.booleans(), st.booleans())


def has_running_pods(machine: ClusterMachine) -> bool:
    return bool(machine.running_pods())


class ClusterMachine(RuleBasedStateMachine):
    """Every rule is one thing that happens; the invariants hold after each."""

    @initialize(
        num_nodes=st.integers(1, 2),
        queue=st.sampled_from(["", "", "team-a"]),
        max_restarts=st.sampled_from([0, 1, 3, 3]),
        rounds=st.integers(0, 2),
        lifecycle=st.fixed_dictionaries(
            {},
            optional={
                "activeDeadlineSeconds": st.sampled_from([30, 2000]),
                "pendingDeadlineSeconds": st.sampled_from([30, 2000]),
                "stallSeconds": st.sampled_from([0, 60, 1000]),
            },
        ),
    )
    def begin(
        self, num_nodes: int, queue: str, max_restarts: int, rounds: int, lifecycle: dict[str, int] | None = None
    ) -> None:
        self.world = World(num_nodes, queue, max_restarts, lifecycle or {})
        self.counts = dict.fromkeys(COUNTS, 0)
        self.step = 0
        self.contracts: dict[int, dict[str, str]] = {}
        self.jobs_seen: dict[str, int] = {}
        """uid -> attempt"""
        self.known_total = 0
        self.void = 0
        """newest contract when the job was last suspended"""
        self.admitted: set[int] = set()
        """attempts that the status said were admitted by the queue"""
        self.final: Any = None
        self.creations_when_final = 0
        self.cluster_and_operator_act(rounds)

    # the operator

    @rule(fault=st.none() | faults)
    def operator_looks(self, fault: Fault | None) -> None:
        self.world.look(fault)

    @rule(fault=st.none() | faults)
    def operator_hears_and_looks(self, fault: Fault | None) -> None:
        self.world.operator.deliver_all()
        self.world.look(fault)

    @rule(plural=st.sampled_from(["jobs", "trainingjobs"]), count=st.integers(1, 3))
    def a_watch_delivers(self, plural: str, count: int) -> None:
        self.world.operator.deliver(plural, count)

    @rule()
    def the_operator_is_killed(self) -> None:
        self.world.restart_operator()

    @rule()
    def nothing_is_written_when_nothing_changed(self) -> None:
        created = self.num_creations()
        self.world.settle()
        suspended = self.world.condition("Suspended").get("status") == "True"
        assert not suspended or self.world.job["spec"].get("suspend") or self.world.is_over()
        assert not self.world.job["spec"].get("suspend") or self.num_creations() == created
        before = len(self.world.server.writes)
        self.world.look()
        self.world.restart_operator()
        self.world.look()
        steady = self.world.status["state"] in ("Running", "Queued", "Suspended", "Complete", "Failed")
        due = self.world.operator.due  # a deadline
        steady = steady and (due is None or due > self.world.server.now + 60)
        if steady and not any(pod.get("lost") or _is_deleting(pod) for pod in self.world.pods()):
            self.world.advance(60)
            self.world.look()
        assert len(self.world.server.writes) == before
        queued = [
            _attempt(job) for job in self.world.attempts() if job["spec"].get("suspend") and not _is_deleting(job)
        ]
        assert not self.admitted.intersection(queued), "an epoch that ran waits to run again"

    # the cluster

    @rule()
    def controllers_act(self) -> None:
        self.world.control()

    @rule()
    def pods_start(self) -> None:
        self.world.start_pods()

    @rule(rounds=st.integers(1, 4), kubelets_are_quick=st.booleans())
    def cluster_and_operator_act(self, rounds: int, kubelets_are_quick: bool = True) -> None:
        """The ordinary course, so that runs come far; what must hold holds in between, too."""
        for _ in range(rounds):
            self.world.operator.deliver_all()
            self.world.look()
            self.everything_holds()
            self.world.control()
            self.world.start_pods()
            self.everything_holds()
            if kubelets_are_quick:
                self.world.terminate_pods()
            self.world.control()
            self.everything_holds()
            self.world.advance(1)

    @rule()
    def the_ordinary_course(self) -> None:
        """Once more, because rules are drawn with equal chances."""
        self.cluster_and_operator_act(2)

    @rule()
    def the_ordinary_course_with_slow_kubelets(self) -> None:
        self.cluster_and_operator_act(1, kubelets_are_quick=False)

    @rule()
    def kubelets_terminate(self) -> None:
        self.world.terminate_pods()

    @rule(seconds=st.sampled_from([1, 12, 80, 400]))
    def time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    @precondition(has_running_pods)
    @rule(which=st.integers(0, 1), code=st.sampled_from(CODES), says=st.booleans())
    def a_pod_fails(self, which: int, code: int, says: bool) -> None:
        self._with_pod(
            which, lambda pod: self.world.end_pod(pod, code, termination(code, "x") if says else "garbled {")
        )

    @precondition(has_running_pods)
    @rule(which=st.integers(0, 1))
    def a_process_runs_out_of_memory(self, which: int) -> None:
        self._with_pod(which, lambda pod: self.world.end_pod(pod, 3, "", "OOMKilled"))

    @precondition(has_running_pods)
    @rule(which=st.integers(0, 1), more=st.sampled_from([{"neverJoined": True}, {}]))
    def a_rank_finds_no_peer(self, which: int, more: dict[str, bool]) -> None:
        said = termination(1, "it waited", follower=True, **more)
        self._with_pod(which, lambda pod: self.world.end_pod(pod, 1, said))

    @precondition(has_running_pods)
    @rule()
    def all_pods_succeed(self) -> None:
        for pod in self.running_pods():
            if not _is_deleting(pod):
                self.world.end_pod(pod, 0)

    @precondition(has_running_pods)
    @rule(which=st.integers(0, 1))
    def a_pod_is_deleted(self, which: int) -> None:
        self._with_pod(which, self.world.delete_pod)

    @precondition(has_running_pods)
    @rule(which=st.integers(0, 1))
    def a_node_is_lost(self, which: int) -> None:
        self._with_pod(which, self.world.lose_node)

    # trainers report

    @precondition(has_running_pods)
    @rule(steps=st.sampled_from([0, 1, 7]), is_late=st.booleans())
    def a_trainer_reports(self, steps: int, is_late: bool = False) -> None:
        """`steps` more than before, or a post without a new one; it may not have had its turn to be written."""
        self.step += steps
        self.world.report(self.step, _attempt(self.running_pods()[-1]), release=not is_late)

    # users and the queue

    @precondition(lambda self: self.world.attempts())
    @rule(foreground=st.booleans())
    def somebody_deletes_the_attempts_job(self, foreground: bool) -> None:
        self.world.delete_attempt(self.world.attempts()[-1], foreground)

    @rule(wanted=st.booleans())
    def the_user_suspends_or_resumes(self, wanted: bool) -> None:
        self.world.suspend(wanted)

    @rule(
        field=st.sampled_from(["activeDeadlineSeconds", "pendingDeadlineSeconds", "stallSeconds", "maxRestarts"]),
        value=st.sampled_from([0, 60, 1000]),
    )
    def the_user_changes_the_lifecycle(self, field: str, value: int) -> None:
        if field == "maxRestarts":
            self.world.max_restarts = max(self.world.max_restarts, value)
        self.world.edit(lifecycle={field: value})

    @precondition(lambda self: self.world.server.all("configmaps"))
    @rule()
    def somebody_deletes_an_old_configmap(self) -> None:
        """Of an attempt whose end is in the status: nothing but the number of threads rests on it."""
        ended = self.world.status.get("attempts", {}).get("ended", 0)
        for found in self.world.server.all("configmaps"):
            if found["metadata"].get("ownerReferences") and _attempt(found) <= ended:
                self.world.server.take("configmaps", found["metadata"]["name"])
                return

    @precondition(lambda self: self.world.attempts())
    @rule()
    def somebody_takes_the_labels_off_a_job(self) -> None:
        job = self.world.attempts()[-1]
        job["metadata"]["labels"] = {"spillway.dev/attempt": str(_attempt(job))}
        self.world.server.put("jobs", job)

    @precondition(lambda self: self.world.queue and self.world.attempts())
    @rule(admits=st.booleans())
    def the_queue_admits_or_evicts(self, admits: bool) -> None:
        (self.world.admit if admits else self.world.evict)(self.world.attempts()[-1])

    @rule(plural=st.sampled_from(["jobs", "configmaps"]), ahead=st.integers(1, 2), labelled=st.booleans())
    def a_foreign_namesake_appears(self, plural: str, ahead: int, labelled: bool) -> None:
        self.world.plant_foreign(plural, max(self.contracts, default=0) + ahead, labelled)

    @rule()
    def foreign_namesakes_go(self) -> None:
        self.world.remove_foreign()

    @rule(plural=st.sampled_from(["jobs", "configmaps", "services"]))
    def admission_rejects(self, plural: str) -> None:
        self.world.server.rejects = {plural}

    @rule()
    def admission_allows(self) -> None:
        self.world.server.rejects = set()

    def running_pods(self) -> list[Any]:
        return [pod for pod in self.world.pods() if pod["status"]["phase"] == "Running"]

    def _with_pod(self, which: int, do: Any) -> None:
        pods = self.running_pods()
        do(pods[which % len(pods)])

    # what must hold

    def everything_holds(self) -> None:
        self.at_most_one_attempt_lives()
        self.epochs_only_rise_and_keep_their_content()
        self.no_epoch_runs_twice_once_the_status_knows_it()
        self.the_status_says_what_was_decided()
        self.the_end_is_for_ever()
        self.restarts_stay_within_their_budget()
        self.counts_only_grow()
        self.time_is_counted_once()

    @invariant()
    def counts_only_grow(self) -> None:
        counted = self.world.status.get("attempts", {})
        for name in COUNTS:
            assert counted.get(name, 0) >= self.counts[name], name
            self.counts[name] = counted.get(name, 0)

    @invariant()
    def time_is_counted_once(self) -> None:
        """No more than what passed; and a job either waits or runs, or does neither."""
        counted = self.world.status.get("attempts", {})
        assert counted.get("activeSeconds", 0) <= self.world.server.now
        assert not (counted.get("activeTime") and counted.get("pendingTime"))
        assert not counted.get("activeTime") or counted["total"] > counted["ended"]

    @invariant()
    def at_most_one_attempt_lives(self) -> None:
        live = [job["metadata"]["name"] for job in self.world.attempts() if not _ended(job) and not _is_deleting(job)]
        assert len(live) <= 1, live
        running = {
            pod["metadata"]["labels"]["spillway.dev/attempt"]
            for pod in self.world.pods()
            if pod["status"]["phase"] in ("Pending", "Running") and not pod.get("lost")
        }
        assert len(running) <= 1, running

    @invariant()
    def epochs_only_rise_and_keep_their_content(self) -> None:
        own = [found for found in self.world.server.all("configmaps") if found["metadata"].get("ownerReferences")]
        for found in own:
            epoch = _attempt(found)
            if epoch not in self.contracts:
                assert epoch == max(self.contracts, default=0) + 1, (epoch, sorted(self.contracts))
                self.contracts[epoch] = copy.deepcopy(found["data"])
            assert found["data"] == self.contracts[epoch]

    @invariant()
    def no_epoch_runs_twice_once_the_status_knows_it(self) -> None:
        total = self.world.status.get("attempts", {}).get("total", 0)
        for job in self.world.attempts():
            uid, epoch = job["metadata"]["uid"], _attempt(job)
            assert epoch in self.contracts
            if uid not in self.jobs_seen:
                assert epoch > self.known_total, f"a second Job for attempt {epoch}"
                assert epoch > self.void, f"attempt {epoch} was decided before a suspension"
                self.jobs_seen[uid] = epoch
                if self.world.num_nodes > 1:
                    assert self.world.server.get("services", job["metadata"]["name"]) is not None
        assert total >= self.known_total
        self.known_total = total
        suspended, generation = self.world.condition("Suspended"), self.world.job["metadata"]["generation"]
        if suspended.get("status") == "True" and suspended["observedGeneration"] == generation:
            # A contract that landed late, after the operator had looked, may still be carried on.
            late = self.world.server.landed_late
            self.void = self.world.status["attempts"]["ended"] if late else max(self.contracts, default=0)
        if self.world.condition("QuotaReserved").get("reason") == "Admitted":
            self.admitted.add(total)

    @invariant()
    def the_status_says_what_was_decided(self) -> None:
        plan = self.world.status.get("plan")
        if plan is not None:
            files = self.contracts[int(plan["configMap"].removeprefix("demo-"))]
            assert plan["reason"] == json.loads(files["decision.json"])["reason"]

    @invariant()
    def the_end_is_for_ever(self) -> None:
        creations = self.num_creations()
        if self.final is None:
            if self.world.is_over():
                self.final = self._ending()
                self.creations_when_final = creations
            return
        assert self._ending() == self.final
        assert creations == self.creations_when_final

    def num_creations(self) -> int:
        return sum(write.verb == "create" for write in self.world.server.writes)

    def _ending(self) -> Any:
        status = self.world.status
        return (
            [{key: value for key, value in condition.items() if key != "observedGeneration"}
             for condition in status["conditions"] if condition["type"] in ("Complete", "Failed")],
            status["attempts"], status["completionTime"],
        )  # fmt: skip

    @invariant()
    def restarts_stay_within_their_budget(self) -> None:
        assert self.world.status.get("attempts", {}).get("restarts", 0) <= self.world.max_restarts

    def teardown(self) -> None:
        """When the faults end, the job does, too."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.remove_foreign()
        world.server.rejects = set()
        world.suspend(False)
        for _ in range(60):
            if world.is_over():
                break
            world.advance(30)
            if world.queue and world.attempts():
                world.admit(world.attempts()[-1])
            world.control()
            world.start_pods()
            world.terminate_pods()
            for pod in world.pods():
                if not _is_deleting(pod):
                    world.end_pod(pod, 0)
            world.control()
            world.settle()
            self.everything_holds()
        assert world.is_over(), world.status
        before = len(world.server.writes)
        world.restart_operator()
        world.settle()
        assert len(world.server.writes) - before <= 1  # a last deletion at most
        self.a_finished_job_is_deleted_in_its_time_and_never_run_again()

    def a_finished_job_is_deleted_in_its_time_and_never_run_again(self) -> None:
        world, creations = self.world, self.num_creations()
        world.edit(lifecycle={"ttlSecondsAfterFinished": 900})
        left = seconds_of(world.status["completionTime"]) + 900 - world.server.now
        if left > 1:
            world.advance(left - 1)
            world.settle()
            assert not world.is_gone and not _is_deleting(world.job)
        world.advance(max(1, left))
        for _ in range(8):
            world.operator.deliver_all()
            world.look()
            world.restart_operator()
            world.terminate_pods()
            world.advance(60)
            world.control()
        lost = any(pod.get("lost") for pod in world.pods())  # the garbage collector waits for it
        assert world.is_gone or (lost and _is_deleting(world.job))
        assert self.num_creations() == creations


def test_one_live_attempt_and_rising_epochs_whatever_happens() -> None:
    run_state_machine_as_test(
        ClusterMachine,
        settings=settings(
            max_examples=at(25, 150, 1000),
            stateful_step_count=at(30, 40, 60),
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# --- long histories ---------------------------------------------------------------------------------------------------
# hypothesis finds short ways to fail and shrinks them; these go where only many attempts lead.


def disturb(machine: ClusterMachine, chance: Random) -> None:
    """One thing that goes wrong, or that somebody wants."""
    happens: list[Callable[[], object]] = [
        lambda: machine.the_user_suspends_or_resumes(chance.random() < 0.4),
        lambda: machine.a_foreign_namesake_appears(
            chance.choice(["jobs", "configmaps"]), chance.randint(1, 2), chance.random() < 0.5
        ),
        lambda: machine.admission_rejects(chance.choice(["jobs", "configmaps", "services"])),
        machine.the_operator_is_killed,
        lambda: machine.operator_looks(fault(chance)),
        lambda: machine.the_user_changes_the_lifecycle(chance.choice(["stallSeconds", "maxRestarts"]), 1000),
        machine.somebody_deletes_an_old_configmap,
    ]
    if machine.world.attempts():
        happens += [lambda: machine.somebody_deletes_the_attempts_job(chance.random() < 0.5)] * 3
        if machine.world.queue:
            happens += [lambda: machine.the_queue_admits_or_evicts(chance.random() < 0.5)] * 6
    if machine.running_pods():
        which = chance.randint(0, 1)
        happens += [
            lambda: machine.a_pod_fails(which, chance.choice(CODES), chance.random() < 0.7),
            lambda: machine.a_pod_is_deleted(which),
            lambda: machine.a_pod_is_deleted(which),
            lambda: machine.a_node_is_lost(which),
            lambda: machine.time_passes(400),
            lambda: machine.a_trainer_reports(chance.choice([0, 1, 7]), chance.random() < 0.5),
            lambda: machine.a_trainer_reports(1),
        ]
    chance.choice(happens)()


def go_on(machine: ClusterMachine, chance: Random) -> None:
    """The ordinary course for a while, with a fault of the operator's now and then."""
    machine.foreign_namesakes_go() if chance.random() < 0.3 else None
    machine.admission_allows() if chance.random() < 0.3 else None
    for _ in range(chance.randint(1, 5)):
        machine.operator_hears_and_looks(fault(chance) if chance.random() < 0.3 else None)
        machine.everything_holds()
        machine.cluster_and_operator_act(1, chance.random() < 0.6)
        if machine.world.queue and machine.world.attempts() and chance.random() < 0.7:
            machine.the_queue_admits_or_evicts(True)
    machine.time_passes(chance.choice([1, 1, 12, 80, 400]))


def fault(chance: Random) -> Fault:
    return Fault(chance.randint(0, 4), chance.random() < 0.5, chance.random() < 0.5, chance.random() < 0.3)


def test_long_histories_keep_every_promise() -> None:
    for seed in range(at(8, 40, 500)):
        chance, machine = Random(seed), ClusterMachine()
        lifecycle = {"stallSeconds": chance.choice([0, 60, 1800])}
        machine.begin(chance.randint(1, 2), chance.choice(["", "", "team-a"]), 50, 2, lifecycle)
        try:
            for _ in range(25):
                disturb(machine, chance)
                machine.everything_holds()
                go_on(machine, chance)
                if chance.random() < 0.2:
                    machine.nothing_is_written_when_nothing_changed()
                machine.everything_holds()
            machine.teardown()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_job_that_is_created_late_is_the_one_that_a_changed_deadline_waits_for() -> None:
    """Two attempts lived for a moment: the contract of the first was not used because spec.lifecycle had changed."""
    machine = ClusterMachine()
    machine.begin(1, "", 0, 0, {"activeDeadlineSeconds": 30})
    machine.operator_hears_and_looks(Fault(1, landed=False, dies=False, late=True))
    machine.the_user_changes_the_lifecycle("activeDeadlineSeconds", 0)
    machine.operator_hears_and_looks(None)
    machine.at_most_one_attempt_lives()
    assert [job["metadata"]["name"] for job in machine.world.attempts()] == ["demo-1"]
