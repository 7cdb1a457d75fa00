# SPDX-License-Identifier: Apache-2.0
# Every target needs Python 3.11 or newer and make, and does its own set-up.
#   make train ARGS='training.steps=50'     make test ARGS=tests/test_mesh.py
#   make test PYTHON=python3.12 VENV=.venv-3.12

VENV ?= .venv
ARGS ?=

# The first of these that is new enough, unless PYTHON says which.
PYTHON := $(or $(PYTHON),$(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && { echo $$python; break; }; done),python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CONSTRAINTS := constraints/$(if $(filter 3.11,$(VERSION)),py311,py312).txt

BIN = $(VENV)/bin
# The second name pins the tools that build packages, from pip 25.3 on.
PINNED = PIP_CONSTRAINT=$(CONSTRAINTS) PIP_BUILD_CONSTRAINT=$(CONSTRAINTS) \
  $(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile

MADE := $(VENV)/.made-$(VERSION)
TRAIN_READY := $(VENV)/.train-ready-$(VERSION)
DEV_READY := $(VENV)/.dev-ready-$(VERSION)
DOCS_READY := $(VENV)/.docs-ready-$(VERSION)

# JAX's extra: that of the machine's driver for bench-gpu, any for test-targets.
# For bench-gpu also PyTorch in an environment of its own, as both bring CUDA along, and
# the dense bf16 TFLOP/s that MFU is a share of.
CUDA ?= cuda12
PEAK ?= 989
GPU_READY := $(VENV)/.$(CUDA)-ready-$(VERSION)
TORCH_VENV := .venv-torch
TORCH_READY := $(TORCH_VENV)/.ready
# For test-hf, in an environment of its own, as PyTorch takes 1 GB. Tests call methods
# of TRL's trainers that are not public: hence one version of it.
HF_VENV := .venv-hf
HF_READY := $(HF_VENV)/.trl-ready
# For test-targets likewise: both compilers take 5 GB, and JAX loads its plugins.
TARGETS_VENV := .venv-targets
TARGETS_READY := $(TARGETS_VENV)/.$(CUDA)-ready-$(VERSION)
# For test-report: Playwright, and its Chromium where there is no other.
REPORT_VENV := .venv-report
REPORT_READY := $(REPORT_VENV)/.ready-$(VERSION)
# For test-engines: PyTorch, which has torchrun, and Ray.
ENGINES_VENV := .venv-engines
ENGINES_READY := $(ENGINES_VENV)/.ready
# For test-jax-next: JAX's nightly builds, as its installation guide has them.
JAX_NEXT_VENV := .venv-jax-next
JAX_NIGHTLY := https://us-python.pkg.dev/ml-oss-artifacts-published/jax-public-nightly-artifacts-registry/simple/
GPU_RESULTS := benchmarks/results/gpu
# Benchmarks that need the compilers of targets, and one that needs rates to be measured.
COMPILED := $(addprefix benchmarks/,$(addsuffix .py,attention_compiled gpu_kernels \
  compiled_step fusion_bytes overlap planner_memory planner_tpu))
CALIBRATED := benchmarks/planner_layouts.py
GPU_DAY := benchmarks/gpu_day.py
ON_GPU = JAX_PLATFORMS=cuda,cpu $(BIN)/python

# Most tests start Python again: it keeps what it compiled, whatever the shell says.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test test-smoke test-all test-hf test-report test-targets test-engines test-jax test-jax-next fuzz lint format docs docs-browser bench bench-targets bench-gpu gpu-wheels constraints clean

help: ## Say what there is to make
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 22

train: $(TRAIN_READY) ## Train the default model: run_training.py $(ARGS)
	$(BIN)/python run_training.py $(ARGS)

test: $(DEV_READY) ## Test every public behaviour once: pytest $(ARGS)
	$(BIN)/python -m pytest -m "not full" $(ARGS)

# The doors to JAX, the API, parsers, one run that is trained and resumed: what another
# version of JAX or of Python breaks first.
SMOKE := $(addprefix tests/,jax_compat annotations graph/test_function.py graph/test_function_misuse.py \
  graph/test_distribute.py graph/test_pipeline.py graph/test_training_step.py \
  graph/test_value_and_grad.py graph/test_objects_of_nnx.py graph/lower \
  graph/tracer/test_tracer.py graph/tracer/test_spmd_region.py \
  graph/passes/test_differentiate_losses.py ops/attention/test_dispatch.py \
  graph/test_kernel.py train/runtime/test_compile_cache.py \
  train/runtime/test_devices.py targets/test_target.py test_mesh.py \
  foundations/test_primitive_properties.py tracing/test_scope.py test_shard.py \
  test_run_training.py train/checkpoints/test_resumed_runs.py)

test-smoke: $(DEV_READY) ## Test what another JAX or Python breaks first: pytest $(ARGS)
	$(BIN)/python -m pytest -m "not full" $(SMOKE) $(ARGS)

test-all: $(DEV_READY) ## Run all tests: pytest $(ARGS)
	$(BIN)/python -m pytest $(ARGS)

test-hf: $(DEV_READY) $(HF_READY) ## Compare with Hugging Face Transformers and TRL: pytest $(ARGS)
	$(HF_VENV)/bin/python -m tests.train.models.golden.make_golden --check
	TESSERA_HF_PYTHON=$(abspath $(HF_VENV))/bin/python $(BIN)/python -m pytest $(or $(ARGS),tests/hf)

# A browser of PATH or of CHROMIUM is taken, else Playwright's own is fetched.
test-report: $(REPORT_READY) ## Open reports in headless Chromium: pytest $(ARGS)
	PLAYWRIGHT_BROWSERS_PATH=$(abspath $(REPORT_VENV))/browsers \
	  $(REPORT_VENV)/bin/python -m pytest -n0 -s $(or $(ARGS),tests/train/report/test_in_browser.py)

test-targets: $(TARGETS_READY) ## Compile for GPUs and TPUs that are not here: pytest $(ARGS)
	TESSERA_TEST_TARGETS=1 $(TARGETS_VENV)/bin/python -m pytest $(or $(ARGS),tests/targets/compiled)

test-engines: $(DEV_READY) $(ENGINES_READY) ## Run under real torchrun, Open MPI, Slurm and Ray: pytest $(ARGS)
	TESSERA_ENGINES_BIN=$(abspath $(ENGINES_VENV))/bin $(BIN)/python -m pytest -n0 $(or $(ARGS),tests/engines)

test-jax: $(DEV_READY) ## Run JAX's own tests on ts.jit: JAX_TESTS=folder, ARGS='--replace grad'
	@test -d "$(JAX_TESTS)" || { \
	  echo "Say where the tests of JAX 0.10.2 are: make test-jax JAX_TESTS=jax/tests" >&2; exit 1; }
	$(BIN)/python -m tests.jax_tests $(JAX_TESTS) $(ARGS)

# Made anew each time, as nothing pins what is not released. pip warns that the package
# excludes this JAX.
test-jax-next: BIN := $(JAX_NEXT_VENV)/bin
test-jax-next: ## Run test-smoke on JAX's nightly build: pytest $(ARGS)
	@$(PYTHON) -m venv --clear $(JAX_NEXT_VENV)
	@$(PINNED) -e '.[dev]'
	$(BIN)/python -m pip --disable-pip-version-check --quiet install --no-compile --upgrade --pre \
	  jax jaxlib --extra-index-url $(JAX_NIGHTLY)
	$(BIN)/python -c 'import jax; print("JAX", jax.__version__)'
	$(BIN)/python -m pytest -m "not full" $(SMOKE) $(ARGS)

fuzz: $(DEV_READY) ## Compare drawn programs with Python, NumPy and JAX: all seeds
	TESSERA_FUZZ=$(or $(TESSERA_FUZZ),whole) $(BIN)/python -m pytest $(or $(ARGS),tests/fuzz)

lint: $(DEV_READY) ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports --no-logo

format: $(DEV_READY) ## Format, and mend what ruff can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: $(DOCS_READY) ## Build the documentation in docs/_build/html; a warning is an error
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html

docs-browser: $(DOCS_READY) ## Open every page in headless Chromium: links, clipped content, phone width
	@$(PINNED) -e '.[docs-browser]'
	$(BIN)/python docs/_ext/report_pictures.py docs/_generated
	$(BIN)/sphinx-build -W --keep-going -q docs docs/_build/html
	$(BIN)/python docs/_ext/browse.py docs/_build/html $(ARGS)

bench: $(TRAIN_READY) ## Run the benchmarks of this machine, one after another; ARGS=--quick for a minute each
	@set -e; for benchmark in $$(grep -l __main__ $(filter-out $(COMPILED) $(CALIBRATED) $(GPU_DAY), \
	  $(wildcard benchmarks/*.py))); do \
	  echo "== $$benchmark"; $(BIN)/python $$benchmark $(ARGS); done

bench-targets: $(TARGETS_READY) ## Run the benchmarks that compile for GPUs and TPUs that are not here
	@set -e; for benchmark in $(COMPILED); do \
	  echo "== $$benchmark"; $(TARGETS_VENV)/bin/python $$benchmark $(ARGS); done

# What fails is told at the end: a GPU is too dear to stop at the first thing.
bench-gpu: $(GPU_READY) $(TORCH_READY) ## Test kernels and measure on a GPU: CUDA=cuda13 PEAK=989
	$(ON_GPU) -c 'import jax; print(jax.devices("cuda"))'
	@mkdir -p $(GPU_RESULTS)
	@failed=; measure() { json=$(GPU_RESULTS)/$$1.json; shift; echo "== $$*"; \
	  $(ON_GPU) "$$@" --json $$json $(ARGS) || failed="$$failed $$1"; }; \
	$(ON_GPU) -m pytest -m gpu -n0 tests || failed=tests; \
	for name in attention loss; do \
	  if test -e benchmarks/$$name.py; then measure $$name benchmarks/$$name.py; fi; done; \
	if test -e benchmarks/peers.py; then \
	  for size in 0.3B 1B 1.3B; do for length in 2048 4096 8192; do \
	    measure peers-$$size-$$length benchmarks/peers.py --size $$size --length $$length \
	      --rows $$((16384 / length)) --peak-tflops $(PEAK) \
	      --torch-python $(TORCH_VENV)/bin/python; done; done; fi; \
	test -z "$$failed" || { echo "failed: $$failed" >&2; exit 1; }

# For benchmarks/gpu_day.py, on a machine with Python 3.12 and JAX and without a network.
# antlr4 has no wheel of its own.
gpu-wheels: $(MADE) ## Fill .whl/ with what a GPU machine without a network lacks
	@rm -rf .whl
	$(BIN)/python -m pip --disable-pip-version-check --quiet download --dest .whl --no-deps \
	  --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
	  $(addprefix --platform ,manylinux2014_x86_64 $(addsuffix _x86_64,manylinux_2_17 manylinux_2_24 manylinux_2_28)) \
	  --constraint constraints/py312.txt --requirement constraints/gpu-wheels.txt
	$(BIN)/python -m pip --disable-pip-version-check --quiet wheel --wheel-dir .whl --no-deps \
	  --constraint constraints/py312.txt antlr4-python3-runtime
	@ls -l .whl
	@test $$(du -sm .whl | cut -f1) -le 20 || { echo ".whl is larger than 20 MiB" >&2; exit 1; }

$(MADE): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Tessera needs Python 3.11 or newer, and '$(PYTHON)' is $(or $(VERSION),not there)." >&2; \
	  echo "Say where one is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test ! -e $(VENV) -o -e $(VENV)/pyvenv.cfg || { \
	  echo "$(VENV) is not a virtual environment: choose another VENV" >&2; exit 1; }
	@echo "Setting up $(VENV): Python $(VERSION), versions of $(CONSTRAINTS)" >&2
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(TRAIN_READY): $(MADE)
	@$(PINNED) -e '.[train]'
	@touch $@

# Compiled here: a warning of the compiler in the first import would fail a test.
$(DEV_READY): $(MADE)
	@$(PINNED) -e '.[dev]'
	@-$(BIN)/python -m compileall -qq -j0 $(VENV)/lib
	@touch $@ $(TRAIN_READY)

$(GPU_READY): $(DEV_READY)
	@$(PINNED) -e '.[dev,$(CUDA)]'
	@touch $@

$(TARGETS_READY): BIN := $(TARGETS_VENV)/bin
$(TARGETS_READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -m venv --clear $(TARGETS_VENV)
	@$(PINNED) -e '.[dev,targets-$(CUDA),targets-tpu]'
	@touch $@

$(REPORT_READY): BIN := $(REPORT_VENV)/bin
$(REPORT_READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -m venv --clear $(REPORT_VENV)
	@$(PINNED) -e '.[dev,docs-browser]'
	@test -n "$$CHROMIUM" || command -v chromium chromium-browser google-chrome >/dev/null || \
	  PLAYWRIGHT_BROWSERS_PATH=$(abspath $(REPORT_VENV))/browsers \
	  $(BIN)/python -m playwright install chromium
	@touch $@

$(HF_READY):
	@$(PYTHON) -m venv --clear $(HF_VENV)
	@$(HF_VENV)/bin/python -m pip --disable-pip-version-check --quiet install torch \
	  transformers peft safetensors 'lm_eval[hf]' 'trl==1.16.*' \
	  --extra-index-url https://download.pytorch.org/whl/cpu
	@touch $@

$(ENGINES_READY):
	@$(PYTHON) -m venv --clear $(ENGINES_VENV)
	@$(ENGINES_VENV)/bin/python -m pip --disable-pip-version-check --quiet install torch 'ray[train]' \
	  --extra-index-url https://download.pytorch.org/whl/cpu
	@touch $@

$(TORCH_READY):
	@$(PYTHON) -m venv --clear $(TORCH_VENV)
	@$(TORCH_VENV)/bin/python -m pip --disable-pip-version-check --quiet install torch numpy
	@touch $@

$(DOCS_READY): $(DEV_READY)
	@$(PINNED) -e '.[docs]'
	@touch $@

constraints: VENV := .venv-constraints
constraints: ## Resolve all dependencies anew for PYTHON, and pin them
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip --quiet install --upgrade \
	  -e '.[dev,docs,docs-browser]' hatchling setuptools wheel
	{ sed '/^[^#]/,$$d' $(CONSTRAINTS); \
	  $(BIN)/python -m pip freeze --all --exclude pip --exclude-editable; } > $(VENV)/pins.txt
	mv $(VENV)/pins.txt $(CONSTRAINTS)
	rm -rf $(VENV)

clean: ## Remove environments, caches and built documentation; keep outputs/
	rm -rf .venv .venv-* docs/_build .pytest_cache .ruff_cache .hypothesis .import_linter_cache .pyrefly_cache
	find tessera tests -name __pycache__ -prune -exec rm -rf {} +
