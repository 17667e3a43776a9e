# `make demo` or `make test` alone is enough on a fresh machine with Python 3.11+, make and g++.
PYTHON ?= python3
TOOLS  := .tools
UV     := $(TOOLS)/bin/uv
RUN    := .venv/bin/
OUTPUT ?= demo
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help env demo test check format crds faults bench cluster-up cluster-down cluster-status images clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit("Spillway needs Python 3.11 or newer; found " + sys.version.split()[0] + ". Set PYTHON=.") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(TOOLS) || { echo "python3 -m venv failed: install your system's python3-venv package"; exit 1; }
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'

.venv/.in-step: $(UV) pyproject.toml uv.lock CMakeLists.txt $(wildcard csrc/* csrc/*/*)
	$(UV) sync --locked --quiet --python $(PYTHON)
	@touch $@

env: .venv/.in-step ## .venv from the lock file, native library built

demo: env ## from nothing to a finished training run under a memory budget (OUTPUT=demo)
	$(RUN)spillway demo --output $(OUTPUT)

test: env ## every test that runs on this machine; the long sweeps reduced
	$(RUN)pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

check: env ## ruff, mypy --strict, import-linter, generated files in step
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports
	$(RUN)python -m spillway.crd --check
	$(RUN)python charts/chart_files.py --check

format: env ## let ruff mend what it can
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

crds: env ## crds/*.yaml from api.py
	$(RUN)python -m spillway.crd
	$(RUN)python charts/chart_files.py

faults: env ## the long sweeps in full: kills, faults, lost nodes, releases, 4,800 cells of streamed models
	SPILLWAY_SWEEPS=full $(RUN)pytest tests/faults tests/local tests/unit/spillway_operator/on_a_cluster_model/test_crashes.py tests/unit/spillway/test_fuzzed_jobs.py tests/parity/model_spill/test_model_spill.py tests/parity/parallel/test_zero.py tests/parity/parallel/test_fsdp.py tests/cluster

bench: env ## against fio, DeepSpeed and torch, in turns, the update as modelled, placement as simulated, the operator beside a Prometheus that lies, and with 1,000 jobs; figures in build/bench (BENCH=--quick for a minute each, all but the first five; needs fio, libaio, root for the last)
	@mkdir -p build/bench
	for each in optimizer_offload spill_io cpu_adam step_time overlap nvme_states activation_spill model_spill placement lying_metrics operator_scale; do $(RUN)python benchmarks/$$each.py $(BENCH) --json build/bench/$$each.json || exit 1; done

TESTBED := PYTHONPATH=hack $(PYTHON) -m testbed

cluster-up: ## a real Kubernetes on this machine (ARGS="--fake-nodes 4 --fake-gpus 4 --prometheus"); needs root
	@$(TESTBED) up $(ARGS)

cluster-down: ## end it and put the machine back
	@$(TESTBED) down

cluster-status: ## what of it runs, and where
	@$(TESTBED) status $(ARGS)

images: ## operator and trainer image as archives, by buildah (ARGS=operator for one); needs root
	@$(PYTHON) hack/images.py $(ARGS)

clean: ## remove what the other targets made
	rm -rf .venv $(TOOLS) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
