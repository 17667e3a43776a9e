"""The extras of the distribution, and the error message for one that is not installed."""

from __future__ import annotations

from importlib.util import find_spec

from spillway import DISTRIBUTION
from spillway.api.sweep.members import solo_specs
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.planning.workload import ZERO_STRATEGIES

EXTRAS = {
    "trainer": ("torch", "numpy", "tokenizers", "safetensors", "prometheus-client"),
    "operator": ("kubernetes",),
    "hf": ("transformers", "peft"),
    "fetch": ("s3fs", "aiohttp"),
    "tables": ("pyarrow",),
    "trackers": ("tensorboardx", "mlflow-skinny", "wandb"),
    "deepspeed": ("deepspeed",),
}
"""Extra of pyproject.toml -> distributions that it installs."""
_MODULES = {"tensorboardx": "tensorboardX", "mlflow-skinny": "mlflow"}
"""Modules of the distributions whose module has a different name."""


def install_command(extra: str) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def need(extra: str) -> None:
    """Raises UserError if a distribution of `extra` is not installed."""
    if absent := [name for name in EXTRAS[extra] if find_spec(_MODULES.get(name, name.replace("-", "_"))) is None]:
        raise UserError(f"Python packages not installed: {', '.join(absent)}; run: {install_command(extra)}")


def need_for(spec: TrainingJobSpec, num_ranks: int) -> None:
    """Raises UserError if an extra is missing that training the job, or any of its members, needs."""
    need("trainer")
    if spec.tracking is not None:
        need("trackers")
    for one in solo_specs(spec):
        if one.model.entrypoint is None and not one.model.is_own_llama:
            need("hf")
        if num_ranks > 1 and one.parallelism.device != "Cuda" and one.parallelism.strategy in ZERO_STRATEGIES:
            need("deepspeed")
