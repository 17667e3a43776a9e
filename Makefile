# `make demo` or `make test` alone is enough on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
TOOLS  := .tools
UV     := $(TOOLS)/bin/uv
RUN    := .venv/bin/
OUTPUT ?= demo
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help env demo test test-ci test-cluster test-all check format crds bench pictures cluster-up cluster-down cluster-status images clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' Makefile

$(UV):
	@$(PYTHON) -c 'import sys; sys.exit("Spillway needs Python 3.11 or newer; found " + sys.version.split()[0] + ". Set PYTHON=.") if sys.version_info < (3, 11) else None'
	@$(PYTHON) -m venv $(TOOLS) || { echo "python3 -m venv failed: install your system's python3-venv package"; exit 1; }
	@$(TOOLS)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'

.venv/.in-step: $(UV) pyproject.toml uv.lock CMakeLists.txt $(wildcard csrc/* csrc/*/*)
	$(UV) sync --locked --quiet --python $(PYTHON)
	@touch $@

env: .venv/.in-step ## make .venv from the lock file, and build the native library

demo: env ## train a small model under a memory budget, in the directory OUTPUT (default: demo)
	$(RUN)spillway demo --output $(OUTPUT)

# One worker per core, at most four; a worker runs whole test files. At the end, or at Ctrl-C, hack/supervised.py ends all
# processes that tests started.
SUPERVISED := $(RUN)python hack/supervised.py
PYTEST     := $(RUN)pytest --durations 20 $(ARGS)
BY_FILES   := --dist loadscope --no-loadscope-reorder
PARALLEL   := --numprocesses logical --maxprocesses 4 $(BY_FILES)
# Test files run in parallel, except tests/cluster/alone. Set CLUSTER_WORKERS=1 if other work runs on the machine.
CLUSTER_WORKERS ?= 3

test: env ## run the quick tests, in minutes; no root, cluster or compiler (some of them: ARGS="-k lanes tests/parity")
	$(SUPERVISED) $(PYTEST) $(PARALLEL)

test-ci: env ## run CI's tests except those on a cluster: more cases, real processes, sanitizers, several ranks
	SPILLWAY_DEPTH=ci $(SUPERVISED) $(PYTEST) $(PARALLEL)

test-cluster: env ## run the quick cluster tests on a Kubernetes of their own; root (SPILLWAY_DEPTH=ci: those of CI)
	$(SUPERVISED) $(PYTEST) --numprocesses $(CLUSTER_WORKERS) $(BY_FILES) tests/cluster

# One folder after the other, each in new processes: what one worker compiles and caches for all of them would not fit in
# memory. No stacks are written after ten minutes, because writing them while a test runs can crash its process.
PARTS := tests/contract $(filter-out %/__pycache__,$(wildcard tests/unit/* tests/parity/*)) tests/faults tests/local tests/gpu
PARTS += tests/cluster
PASSED := build/test-all/$(or $(shell git describe --always --dirty --abbrev=40 2>/dev/null),unknown-dirty)
test-all: env ## run all tests with all their cases, also on the cluster: hours; continues an earlier run of the same commit
	@mkdir -p $(PASSED); case $(PASSED) in *-dirty) rm -rf $(PASSED)/* ;; esac
	@for part in $(PARTS); do \
	  mark=$(PASSED)/$$(echo $$part | tr / .); workers="$(PARALLEL)"; \
	  [ $$part != tests/cluster ] || workers="--numprocesses $(CLUSTER_WORKERS) $(BY_FILES)"; \
	  if [ -e $$mark ]; then echo "$$part: passed $$(cat $$mark)"; continue; fi; \
	  echo "$$part"; \
	  if SPILLWAY_DEPTH=all $(SUPERVISED) $(PYTEST) -o faulthandler_timeout=0 $$workers $$part; then date -u +%FT%TZ > $$mark; else failed="$$failed $$part"; fi; \
	done; [ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

check: env ## run ruff, mypy --strict and import-linter, and check that generated files are up to date
	$(RUN)ruff check .
	$(RUN)ruff format --check .
	$(RUN)mypy
	$(RUN)lint-imports
	$(RUN)python -m spillway.api.crd --check
	$(RUN)python charts/chart_files.py --check
	$(RUN)python hack/field_reference.py --check

format: env ## let ruff fix and format the code
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

crds: env ## write the generated files: CRDs, docs/fields.md, dashboards, alert and recording rules
	$(RUN)python -m spillway.api.crd
	$(RUN)python charts/chart_files.py
	$(RUN)python hack/field_reference.py

bench: env ## run the benchmarks against fio, DeepSpeed, torch and simulations; figures in build/bench (BENCH=--quick: a minute each, but for the first five; needs fio and libaio, and root for the last two)
	SPILLWAY_DEPTH=ci $(PYTEST) tests/unit/benchmarks
	@mkdir -p build/bench
	for each in optimizer_offload spill_io cpu_adam step_time overlap nvme_states activation_spill end_to_end exchange model_spill many_devices placement lying_metrics operator_scale operator_fairness; do $(RUN)python benchmarks/$$each.py $(BENCH) --json build/bench/$$each.json || exit 1; done

pictures: env ## draw docs/pictures/jobs.svg from runs made now; ten minutes on an otherwise idle machine
	$(RUN)python benchmarks/pictures.py

TESTBED := PYTHONPATH=hack $(PYTHON) -m testbed

cluster-up: ## start a Kubernetes on this machine; root (ARGS="--fake-nodes 4 --fake-gpus 4 --prometheus")
	@$(TESTBED) up $(ARGS)

cluster-down: ## end this Kubernetes and undo its changes to the machine
	@$(TESTBED) down

cluster-status: ## show which processes of this Kubernetes run, and where
	@$(TESTBED) status $(ARGS)

images: ## build operator and trainer image with buildah, as archives (ARGS=operator: only one); root
	@$(PYTHON) hack/images.py $(ARGS)

clean: ## remove .venv, build and the tools' caches
	rm -rf .venv $(TOOLS) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
