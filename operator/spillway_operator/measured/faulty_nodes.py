"""Nodes on which attempts failed through the node's fault, according to the statuses of jobs."""

from __future__ import annotations

import json
from datetime import datetime

from ..decide.observed import JobObject

AVOIDED_SECONDS = 3600.0
"""How long a failure on a node counts; while those of at least MOST_JOBS jobs count, all jobs avoid the node."""
MOST_JOBS = 3
"""Number of jobs that must have failed on a node before all jobs avoid it."""


class FaultyNodes:
    """Failures by node; they are rebuilt from the statuses after a restart."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}
        """Node -> uid of a job -> Unix seconds of its last failure there."""

    def seen(self, job: JobObject) -> None:
        """Records the failures in the job's status; called for each look."""
        if b'"faultyNodes"' not in job.status:
            return
        attempts = json.loads(job.status).get("attempts")
        for fault in (attempts.get("faultyNodes") if isinstance(attempts, dict) else None) or ():
            try:
                node, seconds = str(fault["node"]), datetime.fromisoformat(fault["time"]).timestamp()
            except (KeyError, TypeError, ValueError):  # written by another version
                continue
            self._seen.setdefault(node, {})[job.uid] = seconds

    def avoided(self, now: float) -> frozenset[str]:
        """Nodes that no job should use, at Unix time `now`."""
        for node, jobs in list(self._seen.items()):
            self._seen[node] = {uid: seconds for uid, seconds in jobs.items() if now - seconds < AVOIDED_SECONDS}
            if not self._seen[node]:
                del self._seen[node]
        return frozenset(node for node, jobs in self._seen.items() if len(jobs) >= MOST_JOBS)
