"""PodEvidence: observed memory of pods under one plan -> memory request of the next pod. Pure.

    cgroup's peak of a whole run -> MemoryProfile.status.pod -> PodEvidence -> the request, instead of the counted bytes

Here evidence may lower a request (ADR 27). It applies only to pods that match the observed ones in model, plan and
ranks (the profile's fingerprint), and in everything else that a pod's memory depends on (`workload`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from spillway.api.profiles import MemoryProfile, ObservedPod
from spillway.api.training_job import TrainingJobSpec
from spillway.feedback.recent_peaks import MOST_RECENT, plausible, quantile
from spillway.plan import MemoryPlan
from spillway.planning.workload import padded
from spillway.units import MIB, format_bytes

AT_THE_LIMIT = 0.98
"""Share of a pod's limit from which a peak is dropped: page cache fills a pod, so such a peak does not show what the
pod needs."""
POD_MARGIN = 0.03
"""Margin above observed peaks. They include page cache, which is freed before a process is killed."""
WORKLOAD_DIGITS = 16
WITHOUT_MEMORY: dict[str, Any] = {
    "pod": {"image", "image_pull_secrets"},  # `workload` has the resolved image
    "scheduling": True,
    "lifecycle": True,
    "managed_by": True,
    "suspend": True,
    "objective": True,
    "checkpoint": {"claim", "sub_path"},
    "parallelism": {"device"},  # `workload` has the device of the plan
    "training": {"seed": True, "schedule": True, "optimizer": {"learning_rate", "betas", "eps", "weight_decay"}},
}
"""Fields of a spec that do not affect a pod's memory."""


@dataclass(frozen=True, slots=True)
class PodPeak:
    """Peak memory of a pod's cgroup, as reported by its trainer."""

    peak_bytes: int
    """Including page cache."""
    counted_bytes: int
    """Computed bytes of such a pod."""
    limit_bytes: int
    """This pod's limit."""
    is_whole: bool
    """Whether the pod did everything that a run does: built the corpus, trained all steps, wrote the last
    checkpoint."""
    workload: str
    """Hash of what the pod did: see workload()."""

    @property
    def is_its_own(self) -> bool:
        """Whether the peak is of the pod's own cgroup: no cgroup exceeds its limit, so a larger figure belongs to
        another one, for example the node's."""
        return self.peak_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class PodEvidence:
    """What pods used with one plan, from one MemoryProfile."""

    workload: str
    peak_bytes: int
    """95th percentile of the recent runs' peaks; newer ones weigh more."""
    highest_bytes: int
    """Highest peak of the recent runs."""
    counted_bytes: int
    """Fewest bytes that were counted for one of these pods."""
    num_runs: int

    def request_bytes(self, counted_bytes: int) -> int:
        """Returns the request in whole MiB: never below the highest recent peak, nor implausibly far from the counted
        bytes. If more bytes are counted now than when the peaks were observed, because of a correction or a newer
        version, the difference is added."""
        wanted = max(ceil(self.peak_bytes * (1.0 + POD_MARGIN)), self.highest_bytes)
        more = max(0, counted_bytes - self.counted_bytes)
        return padded(plausible(counted_bytes, wanted + more), MIB)

    def sentence(self, counted_bytes: int) -> str:
        """Says why a pod requests this much memory."""
        runs = "one run" if self.num_runs == 1 else f"{self.num_runs} runs"
        return (
            f"a pod requests {format_bytes(self.request_bytes(counted_bytes))} instead of the computed "
            f"{format_bytes(counted_bytes)}, because in {runs} under this plan a pod used "
            f"{format_bytes(self.peak_bytes)}"
        )


@dataclass(frozen=True, slots=True)
class SeenPods:
    """Evidence that is known when a job is placed."""

    known: Mapping[str, PodEvidence] = field(default_factory=dict)
    """Fingerprint of model and plan -> evidence from its pods."""
    image: str = ""
    """The job's trainer image."""

    def of(self, fingerprint: str, spec: TrainingJobSpec, plan: MemoryPlan) -> PodEvidence | None:
        """Returns the evidence from pods that ran this job with this plan; None if there were none."""
        seen = self.known.get(fingerprint)
        return seen if seen is not None and seen.workload == workload(spec, plan, self.image) else None


NO_PODS_SEEN = SeenPods()


def workload(spec: TrainingJobSpec, plan: MemoryPlan, image: str) -> str:
    """Returns 16 hexadecimal digits of a hash over everything, apart from model, plan and ranks, that a pod's memory
    may depend on: every field of the spec except WITHOUT_MEMORY (so new fields count); the device that Auto resolved
    to; the trainer's image; and the numbers of threads, because threads have buffers of their own."""
    decides = {
        "spec": spec.model_dump(mode="json", exclude_none=True, exclude=WITHOUT_MEMORY),
        "device": plan.device,
        "image": image,
        "numThreads": plan.optimizer.num_threads,
        "numIoThreads": plan.activations.num_io_threads,
    }
    text = json.dumps(decides, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:WORKLOAD_DIGITS]


def may_be_seen(spec: TrainingJobSpec) -> bool:
    """Whether a pod's peak predicts that of the next pod and may decide its request. If there are several pods, only
    the first reports; for a sweep, it is unknown which members a run held at the same time; and a live correction may
    need memory that a run left unused. Requests are decided only in mode Auto, unless the spec gives the pod's
    memory."""
    alone = spec.parallelism.nodes == 1 and not spec.members
    decides = spec.memory.mode == "Auto" and spec.pod.resources.memory is None
    return decides and alone and not spec.memory.advanced.activations.host_reserve


def with_peak(known: ObservedPod | None, spec: TrainingJobSpec, pod: PodPeak, attempt: str) -> ObservedPod | None:
    """Returns the evidence after `attempt` (<job>-<number>) reported the peak of its `pod`; None if nothing changes. A
    peak at the limit is page cache and is dropped. Another workload starts over. Within an attempt, peaks only rise."""
    if not (may_be_seen(spec) and pod.is_whole and pod.is_its_own and pod.counted_bytes):
        return None
    if not 0 < pod.peak_bytes < AT_THE_LIMIT * pod.limit_bytes:
        return None
    before = known if known is not None and known.workload == pod.workload else None
    seen = {} if before is None else dict(zip(before.attempts, before.recent, strict=False))
    believed, is_new = plausible(pod.counted_bytes, pod.peak_bytes), attempt not in seen
    if seen.get(attempt, -1) >= believed:
        return None
    seen[attempt] = believed
    kept = tuple(seen)[-MOST_RECENT:]
    peaks = tuple(seen[name] for name in kept)
    return ObservedPod(
        workload=pod.workload,
        counted=pod.counted_bytes if before is None else min(before.counted, pod.counted_bytes),
        attempts=kept,
        recent=peaks,
        p95=quantile(peaks, 0.95),
        count=(0 if before is None else before.count) + is_new,
    )


def evidence_of(profile: MemoryProfile) -> PodEvidence | None:
    """Returns the profile's evidence; None without observations, or if a pod ran out of memory and none has used more
    since, because the need is then unknown."""
    pod, bound = profile.pod, profile.lower_bounds.pod
    peaks = () if pod is None else tuple(size for size in pod.recent if size > 0)
    if pod is None or not peaks:
        return None
    peak = quantile(peaks, 0.95)
    if bound is not None and peak <= bound.held:
        return None
    return PodEvidence(pod.workload, peak, max(peaks), pod.counted, max(1, pod.count))
