"""A real Kubernetes on one Linux machine, for tests: control plane, one real node, fake nodes and GPUs, Prometheus.

binaries -> machine (what changes, recorded first) -> network -> control plane -> node -> what was asked for besides
"""
