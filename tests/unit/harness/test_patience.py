"""A wait ends when the processes hang, and not because the machine is busy."""

from __future__ import annotations

import os

import pytest

from harness.patience import CPU_SECONDS, IDLE_SECONDS, Patience, Taken, taken_by


class Machine:
    """Its clock and its processes, moved by hand."""

    def __init__(self) -> None:
        self.now, self.cpu_seconds, self.is_stopped = 0.0, 0.0, False
        self.patience = Patience(lambda: Taken(self.cpu_seconds, self.is_stopped), lambda: self.now)

    def passes(self, looks: int, seconds: float, cpu_seconds: float = 0.0) -> None:
        """So many looks, each after so long, in which they ran so long."""
        for _ in range(looks):
            self.now += seconds
            self.cpu_seconds += cpu_seconds
            self.patience.look()


def test_processes_that_get_little_of_the_cores_are_waited_for() -> None:
    Machine().passes(looks=5000, seconds=1.0, cpu_seconds=0.06)


def test_a_frozen_machine_is_no_hang() -> None:
    Machine().passes(looks=100, seconds=3600.0)


def test_frozen_processes_are_no_hang() -> None:
    machine = Machine()
    machine.is_stopped = True
    machine.passes(looks=int(3 * IDLE_SECONDS), seconds=1.0)


def test_processes_that_wait_for_ever_are_a_hang() -> None:
    machine = Machine()
    machine.passes(looks=10, seconds=1.0, cpu_seconds=0.5)
    with pytest.raises(AssertionError, match="none ran for 120 s"):
        machine.passes(looks=int(IDLE_SECONDS) + 1, seconds=1.0, cpu_seconds=1e-5)


def test_processes_that_go_round_in_circles_are_a_hang() -> None:
    with pytest.raises(AssertionError, match="took 600 CPU-seconds"):
        Machine().passes(looks=int(CPU_SECONDS) + 1, seconds=0.5, cpu_seconds=1.0)


def test_own_cpu_time_is_measured_and_a_dead_process_has_none() -> None:
    assert taken_by([os.getpid()]).cpu_seconds > 0.0
    assert taken_by([2**30]) == Taken(0.0, False)
