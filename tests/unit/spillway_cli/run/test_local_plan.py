"""What a local run says of a job that this machine is too small for."""

from __future__ import annotations

import pytest

from cases.job_documents import job
from spillway.plan import Infeasible
from spillway.units import GIB, MIB
from spillway_cli.machine.local_node import LocalResources
from spillway_cli.run.plan import decided_for_this_machine

STATES_ON_NVME = {"spec.memory.advanced.optimizer.placement": "Nvme", "spec.memory.budget.nvme": "1Gi"}


@pytest.mark.parametrize(("nvme", "is_the_disk"), [("1Gi", True), ("1Mi", False)])
def test_a_disk_with_less_than_the_budget_is_named(nvme: str, is_the_disk: bool) -> None:
    resources = LocalResources(2, 8 * GIB, 2 * MIB)
    asked = job(STATES_ON_NVME | {"spec.memory.budget.nvme": nvme})
    found = decided_for_this_machine(asked, resources)
    assert isinstance(found, Infeasible)
    said = "the disk to spill to has only 2.00 MiB free; free space there, or spill to another disk"
    assert (said in found.nearest) is is_the_disk
