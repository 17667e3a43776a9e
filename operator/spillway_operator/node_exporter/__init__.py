"""One node's memory, stalls, spill drives and GPUs as metrics: a pod of the DaemonSet, without kopf or torch."""
