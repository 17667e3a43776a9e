# `make demo` or `make test` alone is enough on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
TOOLS  := .tools
UV     := $(TOOLS)/bin/uv
RUN    := .venv/bin/
OUTPUT ?= demo
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help env demo test test-ci test-cluster test-all check format crds bench pictures cluster-up cluster-down cluster-status images clean
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

# A worker a core, four at most; a file a worker; whatever is left running at the end, or at Ctrl-C, is ended (hack/supervised.py).
SUPERVISED := $(RUN)python hack/supervised.py
PYTEST     := $(RUN)pytest --durations 20 $(ARGS)
BY_FILES   := --dist loadscope --no-loadscope-reorder
PARALLEL   := --numprocesses logical --maxprocesses 4 $(BY_FILES)
# Files beside each other, but for tests/cluster/alone (CLUSTER_WORKERS=1 beside other work).
CLUSTER_WORKERS ?= 3

test: env ## minutes: any user, no cluster, no compiler (ARGS="-k lanes tests/parity" for some of it)
	$(SUPERVISED) $(PYTEST) $(PARALLEL)

test-ci: env ## the same tests and more, deeper: real processes, sanitizers, ranks; what CI runs besides the cluster's
	SPILLWAY_DEPTH=ci $(SUPERVISED) $(PYTEST) $(PARALLEL)

test-cluster: env ## on a real Kubernetes that it boots and removes; root on Linux (SPILLWAY_DEPTH=ci: all that CI runs of it)
	$(SUPERVISED) $(PYTEST) --numprocesses $(CLUSTER_WORKERS) $(BY_FILES) tests/cluster

# A folder after the other, in processes of their own: what a worker compiles and keeps would not fit in memory.
# No stacks after ten minutes: to write them while a test runs can end its process.
PARTS := tests/contract $(filter-out %/__pycache__,$(wildcard tests/unit/* tests/parity/*)) tests/faults tests/local tests/gpu
test-all: env ## everything and every sweep in full, on the cluster, too: hours
	for part in $(PARTS); do \
	  SPILLWAY_DEPTH=all $(SUPERVISED) $(PYTEST) -o faulthandler_timeout=0 $(PARALLEL) $$part || failed="$$failed $$part"; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }
	SPILLWAY_DEPTH=all $(MAKE) --no-print-directory test-cluster

check: env ## ruff, mypy --strict, import-linter, generated files in step
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports
	$(RUN)python -m spillway.api.crd --check
	$(RUN)python charts/chart_files.py --check
	$(RUN)python hack/field_reference.py --check

format: env ## let ruff mend what it can
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

crds: env ## what is generated: crds/*.yaml and docs/fields.md from operator/spillway/api, dashboards, rules
	$(RUN)python -m spillway.api.crd
	$(RUN)python charts/chart_files.py
	$(RUN)python hack/field_reference.py

bench: env ## against fio, DeepSpeed and torch, in turns, the update as modelled, placement as simulated, the operator beside a Prometheus that lies, with 1,000 jobs, and beside a greedy namespace; figures in build/bench (BENCH=--quick for a minute each, all but the first five; needs fio, libaio, root for the last two)
	SPILLWAY_DEPTH=ci $(PYTEST) tests/unit/benchmarks
	@mkdir -p build/bench
	for each in optimizer_offload spill_io cpu_adam step_time overlap nvme_states activation_spill end_to_end model_spill placement lying_metrics operator_scale operator_fairness; do $(RUN)python benchmarks/$$each.py $(BENCH) --json build/bench/$$each.json || exit 1; done

pictures: env ## docs/pictures/jobs.svg, from runs made now: a quiet machine, ten minutes
	$(RUN)python benchmarks/pictures.py

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
