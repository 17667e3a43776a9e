"""Nodes on which plans of tests are made."""

import math
from dataclasses import replace

from spillway.planning.hardware import NodeSpec, local_node


def products_only(num_cores: int, device_bytes: int, host_bytes: int, nvme_bytes: int) -> NodeSpec:
    """A CPU on which only matrix products take time: what else a plan computes does not decide."""
    return replace(
        local_node(num_cores, device_bytes, host_bytes, nvme_bytes),
        bfloat16_values_per_second=math.inf,
        float32_values_per_second=math.inf,
        operation_overhead_seconds=0.0,
    )
