"""Nodes on which attempts failed for the node's own sake, by what the statuses of jobs say."""

from __future__ import annotations

import json
from datetime import datetime

from ..decide.observed import JobObject

AVOIDED_SECONDS = 3600.0
"""How long a node is avoided by all after the last of these failures."""
MOST_JOBS = 3
"""Jobs that must have failed on a node before all avoid it."""


class FaultyNodes:
    """Rebuilt from the statuses after a restart."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, float]] = {}
        """Node -> uid of a job -> Unix seconds of its last failure there."""

    def seen(self, job: JobObject) -> None:
        """Takes note of what the job's status says; called for each look."""
        if b'"faultyNodes"' not in job.status:
            return
        attempts = json.loads(job.status).get("attempts")
        for fault in (attempts.get("faultyNodes") if isinstance(attempts, dict) else None) or ():
            try:
                node, seconds = str(fault["node"]), datetime.fromisoformat(fault["time"]).timestamp()
            except (KeyError, TypeError, ValueError):  # of another version
                continue
            self._seen.setdefault(node, {})[job.uid] = seconds

    def avoided(self, now: float) -> frozenset[str]:
        """Nodes that no job should use, at Unix time `now`."""
        for node, jobs in list(self._seen.items()):
            self._seen[node] = {uid: seconds for uid, seconds in jobs.items() if now - seconds < AVOIDED_SECONDS}
            if not self._seen[node]:
                del self._seen[node]
        return frozenset(node for node, jobs in self._seen.items() if len(jobs) >= MOST_JOBS)
