"""Names and limits of the API."""

from __future__ import annotations

from spillway.api.progress import CA_VARIABLE, TOKEN_VARIABLE, URL_VARIABLE

GROUP = "spillway.dev"
VERSION = "v1alpha1"
MANAGER = "spillway.dev/operator"
"""spec.managedBy of jobs that Spillway manages."""
MIN_TEXT_VOCABULARY = 257
"""Number of tokens of a byte-level tokenizer: one for every byte, and one for the end of text."""
LORA_LLAMA_HAS_NO_DROPOUT = (
    "with model.lora, Spillway uses the llama of transformers, which has no dropout; leave dropout out"
)
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
"""Largest number of shapes that the members of a sweep may give to one model from a source or entry point. The model is
built once for each shape."""
MEMBERS_HAVE_STEPS = (
    "members take turns, whose length is counted in steps; set training.steps instead of training.epochs"
)
MAX_NAME_LENGTH = 52
"""Host names of pods, <name>-<attempt>-<index>, may have at most 63 characters."""
MAX_RANKS = 1024
INSPECTION_DEADLINE_SECONDS = 600
"""Deadline of the pod that builds a model to find its sizes, including the pull of its image. A pod that also downloads
files has FETCH_DEADLINE_SECONDS."""
FETCH_DEADLINE_SECONDS = 24 * 3600
INSPECTION_MEMORY_BYTES = 4 << 30
"""Memory of that pod, for the libraries and a model whose weights take no memory."""
ENTRY_POINT_MEMORY_BYTES = 2 << 30
"""Memory for the function that data.entrypoint names, while the corpus is built."""
USER_ID = 1000
"""User and group of pods that name none, and of their volumes. The trainer image has this user."""
MAX_SPILL_VOLUMES = 8
MAX_SPEC_BYTES = 64 << 10
"""Largest spec, as JSON. It is limited because the operator reads the spec each time it looks at a job, and every
attempt has it in a ConfigMap."""
MAX_ENV_BYTES = 32 << 10
"""Largest number of characters in all values of pod.env together."""
OWN_DIRECTORIES = (
    r"^/(etc/spillway|work|checkpoints|claims|tmp|dev|proc|sys|run|var/run|opt/spillway|spill(-[0-9])?)(/.*)?$"
    r"|^/(etc|usr|bin|sbin|lib|lib64|opt|var)?$|/\.\.?(/|$)"
)
"""Paths in a pod that pod.mounts may not use: the operator's own, the system's, and those that contain "." or ".."."""
NOT_MOUNTED_THERE = "the pod itself uses this path; mount the volume elsewhere, for example at /data"
RESERVED_PREFIXES = (
    "spillway.dev/", "kueue.x-k8s.io/", "batch.kubernetes.io/", "apps.kubernetes.io/",
    "container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)  # fmt: skip
"""Prefixes of labels and annotations that mean something to this operator, to the queue or to the Job controller, or
that loosen what a container may do."""
QUEUE_ANNOTATIONS = tuple(
    f"kueue.x-k8s.io/podset-{name}"
    for name in (
        "required-topology", "preferred-topology", "unconstrained-topology", "slice-required-topology", "slice-size",
        "slice-required-topology-constraints",
    )
)  # fmt: skip
"""Annotations of pods with which a job asks Kueue for nodes near each other. They are allowed although their prefix is
reserved."""
RESERVED_KEYS = ("app.kubernetes.io/managed-by", "job-name", "controller-uid")
CHECKPOINT_VARIABLE, SPILL_VARIABLE = DIRECTORY_VARIABLES = (
    "SPILLWAY_CHECKPOINT_DIRECTORY", "SPILLWAY_SPILL_DIRECTORY",
)  # fmt: skip
"""Environment variables that tell a script where its directories are."""
RESERVED_VARIABLES = (
    URL_VARIABLE, TOKEN_VARIABLE, CA_VARIABLE, "TMPDIR", "HOME", "JOB_COMPLETION_INDEX", "RANK", "LOCAL_RANK",
    "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    *DIRECTORY_VARIABLES,
)  # fmt: skip
"""Environment variables that the attempt sets; jobs that set them are rejected."""
