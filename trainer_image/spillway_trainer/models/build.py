"""spec.model -> Chain: the one place that knows how each kind of model comes to be."""

from __future__ import annotations

import torch

from spillway.api import TrainingJobSpec

from .. import config
from .chain import Chain
from .transformer import Transformer


def build_model(spec: TrainingJobSpec) -> Chain:
    """The model of a job in its compute dtype, without memory: every parameter is on device `meta`, every buffer real.

    Whoever assembles the run decides where parameters live (chain.allocate gives all of them memory).
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(config.compute_dtype(spec))
    try:
        with torch.device("meta"):
            return Transformer(config.transformer_config(spec))
    finally:
        torch.set_default_dtype(default)
