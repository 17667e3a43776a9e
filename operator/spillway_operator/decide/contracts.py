"""Reads the contracts (ConfigMaps) of a job's attempts."""

from __future__ import annotations

from spillway.feedback.ladder import MemoryFailure
from spillway.plan import Tier

from . import conditions as c
from . import manifests
from .case import Case
from .conditions import Finding, true
from .manifests import AttemptFiles
from .observed import Contract
from .planning import belongs_to


def newest_contract(case: Case) -> int:
    """The highest attempt that follows the known ones without a gap, or 0. The operator leaves no gap, so a number that
    somebody made up is not used."""
    numbers = {contract.attempt for contract in contracts_of(case)}
    newest = case.attempts.total
    while newest + 1 in numbers:
        newest += 1
    return newest if newest in numbers else 0


def contracts_of(case: Case) -> list[Contract]:
    uid = case.observed.job.uid
    return [contract for contract in case.observed.contracts or () if contract.owner_uid == uid]


def read_files(case: Case, attempt: int) -> AttemptFiles | None:
    """The files of that attempt; None if there are none or they cannot be read."""
    for contract in contracts_of(case):
        if contract.attempt == attempt:
            files = manifests.read_contract(contract)
            return files if files is not None and belongs_to(files, case.observed.job, attempt) else None
    return None


def not_read(case: Case, attempt: int) -> Finding | None:
    """The finding for a contract that exists but that this operator cannot read."""
    for contract in contracts_of(case):
        if contract.attempt == attempt and manifests.read_contract(contract) is None:
            return true(c.ACCEPTED, c.CONTRACT_NOT_READ, manifests.why_not_read(contract))
    return None


def newest_begun(case: Case) -> AttemptFiles | None:
    """The files of the newest attempt that was started and whose contract can be read."""
    begun = [contract.attempt for contract in contracts_of(case) if contract.attempt <= case.attempts.total]
    for number in sorted(begun, reverse=True):
        files = read_files(case, number)
        if files is not None:
            return files
    return None


def memory_failures(case: Case) -> tuple[MemoryFailure, ...]:
    """Attempts that ran out of memory and whose contracts can be read."""
    found = (memory_failure(case, one.attempt, one.reason) for one in case.status.escalations)
    return tuple(failure for failure in found if failure is not None)


def memory_failure(case: Case, attempt: int, reason: str) -> MemoryFailure | None:
    files = read_files(case, attempt)
    if files is None or any(tier not in held for tier in Tier for held in (files.plan.bytes, files.plan.budget)):
        return None
    return MemoryFailure(attempt, reason, files.plan, files.resources.memory_bytes, files.spared_bytes)


def missing(case: Case, *names: str) -> frozenset[str]:
    """Those of `names` ("contracts", "pods", "claims") that were not observed."""
    return frozenset(name for name in names if getattr(case.observed, name) is None)
