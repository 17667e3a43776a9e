"""Names and limits of the API."""

from __future__ import annotations

from spillway.api.progress import CA_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE

GROUP = "spillway.dev"
VERSION = "v1alpha1"
MANAGER = "spillway.dev/operator"
"""spec.managedBy of jobs that Spillway manages."""
MIN_TEXT_VOCABULARY = 257
"""Tokens of a byte-level tokenizer: every byte, and the end of text."""
CHAT_NEEDS_SOURCE = "needs model.source: a model whose directory has a tokenizer and its chat template"
TOKENS_NEED_SOURCE = "needs model.source: a model whose directory has the tokenizer that made the tokens"
NEEDS_EVALUATION = "needs data.evaluation, because it uses the evaluation loss"
NOT_OF_MEMBERS = "only works for a job without members; leave it out (objective.halving stops members early)"
MEMBERS_ON_ONE_NODE = "members train on the devices of one node; use nodes: 1, and devicesPerNode for more devices"
MEMBERS_SHARE_FILES = (
    "paused members are stored in one spill file, which the processes of all devices use, but each process has its own "
    "encryption key; set spill.encryption: None, or use one device"
)
MOST_INSPECTED = 16
"""Shapes of one model from a source or entry point, as members of a sweep have it."""
MEMBERS_HAVE_STEPS = (
    "members take turns, whose length is counted in steps; set training.steps instead of training.epochs"
)
MAX_NAME_LENGTH = 52
"""Pod host names, <name>-<attempt>-<index>, must fit 63 characters."""
MAX_RANKS = 1024
INSPECTION_DEADLINE_SECONDS = 600
"""For the pod that builds a model to find its sizes, its image's pull included; what it fetches has a day."""
FETCH_DEADLINE_SECONDS = 24 * 3600
INSPECTION_MEMORY_BYTES = 4 << 30
"""Of that pod: a model without memory, and the libraries."""
ENTRY_POINT_MEMORY_BYTES = 2 << 30
"""Of what data.entrypoint calls, while the corpus is built."""
USER_ID = 1000
"""User and group of a pod that names none, and of its volumes; the image has this user."""
MAX_SPILL_VOLUMES = 8
MAX_SPEC_BYTES = 64 << 10
"""As JSON: every look at a job reads it, and every attempt has it in a ConfigMap."""
MAX_ENV_BYTES = 32 << 10
"""All values together."""
OWN_DIRECTORIES = (
    r"^/(etc/spillway|work|checkpoints|claims|tmp|dev|proc|sys|run|var/run|opt/spillway|spill(-[0-9])?)(/.*)?$"
    r"|^/(etc|usr|bin|sbin|lib|lib64|opt|var)?$|/\.\.?(/|$)"
)
"""Paths in a pod that pod.mounts may not take: the operator's own, the system's, and those that lead elsewhere."""
NOT_MOUNTED_THERE = "the pod itself uses this path; mount the volume elsewhere, for example at /data"
RESERVED_PREFIXES = (
    "spillway.dev/", "kueue.x-k8s.io/", "batch.kubernetes.io/", "apps.kubernetes.io/",
    "container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)  # fmt: skip
"""Labels and annotations below these mean something to this operator, to the queue or to the Job controller, or loosen
what a container may do."""
QUEUE_ANNOTATIONS = tuple(
    f"kueue.x-k8s.io/podset-{name}"
    for name in (
        "required-topology", "preferred-topology", "unconstrained-topology", "slice-required-topology", "slice-size",
        "slice-required-topology-constraints",
    )
)  # fmt: skip
"""Annotations of pods by which a job asks Kueue for near nodes: allowed, although their prefix is reserved."""
RESERVED_KEYS = ("app.kubernetes.io/managed-by", "job-name", "controller-uid")
CHECKPOINT_VARIABLE, SPILL_VARIABLE = DIRECTORY_VARIABLES = (
    "SPILLWAY_CHECKPOINT_DIRECTORY", "SPILLWAY_SPILL_DIRECTORY",
)  # fmt: skip
"""Environment variables with which a script finds its directories."""
RESERVED_VARIABLES = (
    URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE, "TMPDIR", "HOME", "JOB_COMPLETION_INDEX", "RANK", "LOCAL_RANK",
    "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    *DIRECTORY_VARIABLES,
)  # fmt: skip
"""Environment variables that the attempt sets; jobs that set them are rejected."""
