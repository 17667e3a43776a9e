"""Series for `promtool test rules`: for each alert, series that make it fire and series that just do not, and the
series of a cluster without a fault."""

from __future__ import annotations

from dataclasses import dataclass, field

Series = dict[str, str]
"""series -> values that are a minute apart, in promtool's notation"""

TRAINER = 'namespace="team",training_job="demo",pod="demo-0",node="node-a"'
JOB = 'namespace="team",training_job="demo"'
RANK = f'{TRAINER},rank="0"'
STEP, STEP_TIME = f"spillway_step{{{TRAINER}}}", f"spillway_last_step_timestamp_seconds{{{TRAINER}}}"
CHECKPOINT_TIME = f"spillway_checkpoint_last_success_timestamp_seconds{{{TRAINER}}}"
RANK_UP = f"spillway_rank_up{{{RANK}}}"
RETRIES = f"spillway_allocator_retries_total{{{RANK}}}"
DEVICE_PEAK = f'spillway_tier_peak_bytes{{{RANK},tier="device"}}'
MISSED = f"spillway_checkpoints_missed_total{{{TRAINER}}}"
NON_FINITE, OVERFLOWS = (f"spillway_{name}_total{{{TRAINER}}}" for name in ("nonfinite", "loss_scale_overflows"))
LEADS, STANDS_BY = (f'spillway_operator_leader{{pod="operator-{n}"}}' for n in (0, 1))
ANSWERED = 'spillway_operator_api_requests_total{verb="get",resource="jobs",code="200"}'
REPORTS = 'spillway_operator_progress_reports_total{code="200"}'
LOOP_LAG, PLANNING_AGE, METRICS_AGE, EXPIRY = (
    f"spillway_operator_{name}_seconds"
    for name in ("loop_lag", "planning_oldest", "metrics_age", "certificate_expiry_timestamp")
)
WATCH_LAG = 'spillway_operator_watch_lag_seconds{resource="trainingjobs"}'
HELD, COMMITTED = (
    f'spillway_operator_device_seconds_total{{namespace="team",use="{use}"}}' for use in ("held", "committed")
)
LOST = 'spillway_operator_attempts_ended_total{namespace="team",reason="NodeLost"}'
RESTARTS, MEMORY = (
    f'spillway_operator_job_ended_attempts{{{JOB},kind="{kind}",pod="operator-0"}}' for kind in ("restart", "memory")
)
VOLUME_FREE = f"spillway_checkpoint_volume_free_ratio{{{TRAINER}}}"
DRIVE_FREE, DRIVE_SIZE, DRIVE_WEAR = (
    f'spillway_node_disk_{what}{{node="node-a",mountpoint="/nvme",storage_class="fast",drive="nvme0n1"}}'
    for what in ("free_bytes", "total_bytes", "wear_ratio")
)
DISK_FREE, DISK_SIZE = (f'node_filesystem_{what}_bytes{{node="node-a",mountpoint="/"}}' for what in ("avail", "size"))
STALLED = 'node_pressure_memory_stalled_seconds_total{node="node-a"}'

HEALTHY: Series = {
    RANK_UP: "1x600",
    STEP: "0+1x600",
    STEP_TIME: "0+60x600",
    f"spillway_predicted_step_seconds{{{TRAINER}}}": "10x600",
    CHECKPOINT_TIME: "0+60x600",
    MISSED: "0x600",
    NON_FINITE: "0x600",
    OVERFLOWS: "0x600",
    DEVICE_PEAK: "95x600",
    f'spillway_tier_budget_bytes{{{RANK},tier="device"}}': "100x600",
    RETRIES: "0x600",
    f'spillway_spill_faults_total{{{RANK},kind="redirected"}}': "0+1x600",
    LEADS: "1x600",
    STANDS_BY: "0x600",
    ANSWERED: "0+60x600",
    'spillway_operator_reconciles_total{result="done"}': "0+60x600",
    REPORTS: "0+10x600",
    LOOP_LAG: "0.1x600",
    PLANNING_AGE: "0x600",
    METRICS_AGE: "5x600",
    EXPIRY: "100000000x600",
    WATCH_LAG: "0x600",
    HELD: "0+60x600",
    COMMITTED: "0+50x600",
    LOST: "0x600",
    RESTARTS: "2x600",
    MEMORY: "2x600",
    VOLUME_FREE: "0.5x600",
    DRIVE_FREE: "60x600",
    DRIVE_SIZE: "100x600",
    DRIVE_WEAR: "0.5x600",
    DISK_FREE: "50x600",
    DISK_SIZE: "100x600",
    STALLED: "0+1x600",
    'node_memory_MemAvailable_bytes{node="node-a"}': "8000000000x600",
}
"""a job that trains, checkpoints and reports; two operators, of which one leads"""


def problem(condition: str, reason: str) -> str:
    return f'spillway_operator_job_problem_seconds{{{JOB},condition="{condition}",reason="{reason}"}}'


@dataclass(frozen=True)
class AlertCase:
    fires: Series
    """series that replace some of HEALTHY or are added to them"""
    silent: Series
    says: str
    """the beginning of the summary, up to what to run next"""
    labels: dict[str, str] = field(default_factory=dict)
    """the alert's labels, apart from its severity"""
    also: tuple[str, ...] = ()
    """other alerts that the same fault makes fire; they are declared as inhibited"""
    at: str = "40m"


OF_DEMO = {"namespace": "team", "training_job": "demo"}


def of_problem(condition: str, reason: str) -> dict[str, str]:
    return {**OF_DEMO, "condition": condition, "reason": reason}


CASES = {
    "SpillwayTrainerStuck": AlertCase(
        {STEP_TIME: "0+60x20 1200x600"}, {STEP_TIME: "0+60x31 1860x600"},
        "team/demo has trained no step for 20m 0s", OF_DEMO,
    ),
    "SpillwayTrainerNotHeard": AlertCase(
        {problem("Progressing", "NoReport"): "0+60x600"}, {problem("Progressing", "Waiting"): "0+20x600"},
        "team/demo runs, but has reported no step to the operator for 40m 0s (NoReport)",
        of_problem("Progressing", "NoReport"),
    ),
    "SpillwayRankSilent": AlertCase(
        {RANK_UP: "1x30 0x600"}, {RANK_UP: "1x37 0x600"},
        "rank 0 of team/demo does not answer the launcher of its pod", {**OF_DEMO, "rank": "0"},
    ),
    "SpillwayJobFailed": AlertCase(
        {problem("Failed", "UserError"): "_x30 0+60x600"}, {problem("Failed", "UserError"): "0+60x30 _x600"},
        "team/demo failed: UserError", of_problem("Failed", "UserError"),
    ),
    "SpillwayJobRestarts": AlertCase(
        {RESTARTS: "2x20 3x5 5x600"}, {RESTARTS: "2x20 4x600"},
        "team/demo restarted 3 times within an hour", OF_DEMO,
    ),
    "SpillwayJobOutOfMemory": AlertCase(
        {MEMORY: "0x20 1x5 2x600"}, {MEMORY: "0x20 1x600"},
        "team/demo ran out of memory 2 times within six hours, each time with a different plan", OF_DEMO,
    ),
    "SpillwayJobDoesNotFit": AlertCase(
        {problem("Planned", "DoesNotFit"): "0+60x600"}, {problem("Planned", "DoesNotFit"): "0+20x600"},
        "no node has been able to run team/demo for 40m 0s (DoesNotFit)", of_problem("Planned", "DoesNotFit"),
    ),
    "SpillwayJobRejected": AlertCase(
        {problem("Planned", "ClaimNotFound"): "0+60x600"}, {problem("Planned", "Inspecting"): "0+60x600"},
        "team/demo cannot continue until its spec or the cluster is changed: Planned, ClaimNotFound",
        of_problem("Planned", "ClaimNotFound"),
    ),
    "SpillwayJobPending": AlertCase(
        {problem("Scheduled", "Unschedulable"): "0+200x600"}, {problem("QuotaReserved", "Waiting"): "0+60x600"},
        "team/demo has waited 2h 13m 20s for its pods to run: Scheduled, Unschedulable",
        of_problem("Scheduled", "Unschedulable"),
    ),
    "SpillwayLossNotFinite": AlertCase(
        {NON_FINITE: "0x30 1x600"}, {NON_FINITE: "0x30 2x600", OVERFLOWS: "0x30 2x600"},
        "team/demo skipped steps because loss or gradients were not finite", OF_DEMO,
    ),
    "SpillwayDeviceMemoryTight": AlertCase(
        {RETRIES: "0+1x600"}, {RETRIES: "0+1x600", DEVICE_PEAK: "90x600"},
        "rank 0 of team/demo uses 95% of its device budget, and torch's allocator had to free its cache and retry",
        {**OF_DEMO, "rank": "0"},
    ),
    "SpillwayGoodputLow": AlertCase(
        {COMMITTED: "0+24x600"}, {COMMITTED: "0+24x600", HELD: "0+29x600"},
        "over six hours, only 40% of the time in which jobs of namespace team held devices was spent on steps that are "
        "saved in checkpoints",
        {"namespace": "team"}, at="8h",
    ),
    "SpillwayCheckpointNotWritten": AlertCase(
        {MISSED: "0x30 1x600"}, {MISSED: "4x600"},
        "a checkpoint of team/demo could not be written to its volume within the last hour; training goes on", OF_DEMO,
    ),
    "SpillwayCheckpointMissing": AlertCase(
        {CHECKPOINT_TIME: "0+60x60 3600x600"}, {CHECKPOINT_TIME: "0+60x200 12000x600"},
        "team/demo trains, and its last checkpoint is more than an hour old, or there is none", OF_DEMO, at="5h",
    ),
    "SpillwayCheckpointVolumeFull": AlertCase(
        {VOLUME_FREE: "0.09x600"}, {VOLUME_FREE: "0.11x600"},
        "the volume with the checkpoints of team/demo has 9% free space", OF_DEMO,
    ),
    "SpillwaySpillDriveFull": AlertCase(
        {DRIVE_FREE: "14x600"}, {DRIVE_FREE: "16x600", DISK_FREE: "16x600"},
        "the file system of node node-a to which trainers spill has 14% free space", {"node": "node-a"},
    ),
    "SpillwaySpillDriveWorn": AlertCase(
        {DRIVE_WEAR: "0.9x600"}, {DRIVE_WEAR: "0.8x600"},
        "the drive at /nvme of node node-a has used 90% of its rated life", {"node": "node-a", "mountpoint": "/nvme"},
    ),
    "SpillwaySpillDriveFailing": AlertCase(
        {f'spillway_spill_faults_total{{{RANK},kind="write_failed"}}': "2x600"},
        {f'spillway_spill_faults_total{{{RANK},kind="write_failed"}}': "0x600"},
        "a drive of node node-a to which team/demo spills had 2 faults (write_failed); the job goes on",
        {**OF_DEMO, "node": "node-a", "kind": "write_failed"},
    ),
    "SpillwayNodeLost": AlertCase(
        {LOST: "0x30 1x600"}, {LOST: "7x600"},
        "an attempt in namespace team lost its node within the last hour", {"namespace": "team"},
    ),
    "SpillwayNodeAvoided": AlertCase(
        {'spillway_operator_node_avoided{node="node-b"}': "1x600"},
        {'spillway_operator_node_avoided{node="node-b"}': "1x30 _x600"},
        "the operator places no job on node node-b for now, because attempts of several jobs failed there",
        {"node": "node-b"},
    ),
    "SpillwayHostMemoryStalled": AlertCase(
        {STALLED: "0+9x600"}, {STALLED: "0+5x600"},
        "trainers on node node-a wait for host memory 15% of the time", {"node": "node-a"},
    ),
    "SpillwayOperatorDown": AlertCase(
        {LEADS: "1x20 _x600", STANDS_BY: "0x20 _x600"}, {LEADS: "1x20 _x600", STANDS_BY: "0x20 1x600"},
        "Prometheus scrapes no operator: either none runs, so no job starts or restarts, or its metrics are not "
        "collected",
    ),
    "SpillwayOperatorWithoutLeader": AlertCase(
        {LEADS: "1x30 0x600"}, {LEADS: "1x30 0x600", STANDS_BY: "0x31 1x600"},
        "operators run, but none of them is the leader, so no job starts or restarts",
    ),
    "SpillwayOperatorForbidden": AlertCase(
        {'spillway_operator_api_requests_total{verb="list",resource="pods",code="403"}': "0+1x600"},
        {'spillway_operator_api_requests_total{verb="create",resource="jobs",code="403"}': "0+1x600"},
        "the API server does not let the operator list pods", {"verb": "list", "resource": "pods"},
    ),
    "SpillwayOperatorApiErrors": AlertCase(
        {'spillway_operator_api_requests_total{verb="get",resource="jobs",code="503"}': "0+20x600"},
        {'spillway_operator_api_requests_total{verb="get",resource="jobs",code="409"}': "0+20x600"},
        "25% of the operator's requests to the API server fail (no answer, 429 or 5xx)",
    ),
    "SpillwayOperatorFailing": AlertCase(
        {'spillway_operator_reconciles_total{result="failed"}': "0+1x600"},
        {'spillway_operator_reconciles_total{result="raced"}': "0+1x600"},
        "the operator fails to reconcile some jobs (failed)", {"result": "failed"},
    ),
    "SpillwayOperatorSlow": AlertCase(
        {LOOP_LAG: "6x600"}, {LOOP_LAG: "4x600"}, "the operator's event loop was blocked for 6s",
    ),
    "SpillwayPlanningStuck": AlertCase(
        {PLANNING_AGE: "200x600"}, {PLANNING_AGE: "170x600"}, "a job has waited 3m 20s for its plan",
    ),
    "SpillwayWatchLags": AlertCase(
        {WATCH_LAG: "90x600"}, {WATCH_LAG: "50x600"},
        "the operator's watch of trainingjobs is 1m 30s late", {"resource": "trainingjobs"},
    ),
    "SpillwayCertificateExpires": AlertCase(
        {EXPIRY: "867600x600"}, {EXPIRY: "1220000x600"},
        "the certificate of the progress endpoint expires in 10d 0h 0m 0s; after that, trainers cannot report", at="1h",
    ),
    "SpillwayCertificateExpired": AlertCase(
        {EXPIRY: "1800x600"}, {EXPIRY: "2500x600"},
        "the certificate of the progress endpoint expired 10m 0s ago: no trainer can report",
    ),
    "SpillwayReportsRejected": AlertCase(
        {'spillway_operator_progress_reports_total{code="401"}': "0+10x600"},
        {'spillway_operator_progress_reports_total{code="401"}': "0+1x600"},
        "the operator rejects 50% of the trainers' reports",
    ),
    "SpillwayPlacementMetricsStale": AlertCase(
        {METRICS_AGE: "400x600"}, {METRICS_AGE: "290x600"},
        "the operator places jobs without knowing the nodes' free memory: its metrics are 6m 40s old",
    ),
    "SpillwaySeriesWithoutNode": AlertCase(
        {'DCGM_FI_DEV_FB_FREE{gpu="0"}': "5x600"}, {'DCGM_FI_DEV_FB_FREE{gpu="0"}': "_x20 5x600"},
        "series of DCGM_FI_DEV_FB_FREE have no label `node` (1 of them), so placement does not use these",
        {"series": "DCGM_FI_DEV_FB_FREE"},
    ),
}  # fmt: skip
