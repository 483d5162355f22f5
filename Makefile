# Targets for a clean checkout with Python 3.11 or newer. `make` lists them.
# `make test PYTHON=python3.12` uses a separate environment, `.venv-3.12`.

RECIPE = recipes/gpt_stdlib.py
WORKERS = 2
# Processes of `make test-gpu`. Each uses a tenth of the GPU's memory.
GPU_WORKERS = 8
# The extra of the CUDA version of the driver: cuda12 or cuda13.
GPU_EXTRA = cuda13
ARGS =

# Only a PYTHON that is passed to make is used, because shells may set this variable for other purposes.
ifeq ($(origin PYTHON),command line)
  INTERPRETER := $(shell .ci/find-python $(PYTHON))
  ifeq ($(INTERPRETER),)
    $(error no interpreter for PYTHON=$(PYTHON))
  endif
  VENV := .venv-$(shell $(INTERPRETER) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
else
  INTERPRETER :=
  VENV := .venv
endif

BIN := $(VENV)/bin
# A file's tests stay on one worker, so that what a module's fixtures compile is compiled once.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=15
# `make test` runs one case of each family. `REST` has grids, recipes, notebooks and compilations for GPUs.
QUICK := "not matrix and not pod and not foreign"
REST := "(matrix or pod) and not foreign"
# Central tests, which the second interpreter runs.
SUBSET := tests/test_packaging.py tests/test_layering.py tests/sharding tests/parallel/test_strategies.py \
    tests/pod/test_launch.py tests/runs/test_recipe.py \
    tests/training/test_state.py tests/training/test_step.py tests/layers/test_precision.py \
    tests/loop/test_checkpoint.py tests/loop/test_fit.py

.PHONY: help train test test-gpu test-foreign test-gate test-rest test-all test-subset durations lint format types docs notebooks programs constraints clean
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1 | /p' Makefile | awk -F' [|] ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

train: $(VENV)/.core ## set up and run the main job (RECIPE=..., ARGS="--steps 20 --name short")
	$(BIN)/meshpar train $(RECIPE) $(ARGS)

test: $(VENV)/.dev ## set up and run the tests (PYTHON=python3.12, ARGS="-k mesh")
	$(PYTEST) -m $(QUICK) $(ARGS)

test-rest: $(VENV)/.pods ## what `make test` leaves out: grids, recipes, notebooks, compilations for GPUs
	$(PYTEST) -m $(REST) $(ARGS)

test-gate: $(VENV)/.pods ## of what is left out, what a change must pass: recipes, notebooks, README, compilations for GPUs
	$(PYTEST) -m "pod and not matrix" $(ARGS)
	$(PYTEST) -m "matrix and not pod" tests/test_notebooks.py tests/test_recipes.py tests/test_docs.py $(ARGS)

test-all: test test-rest ## everything

test-gpu: $(VENV)-gpu/.gpu ## tests on a GPU: values, gradients, kernels, and a step next to its prediction
	XLA_CLIENT_MEM_FRACTION=.1 $(VENV)-gpu/bin/python -m pytest -n $(GPU_WORKERS) --durations=15 -m "not alone" tests/gpu $(ARGS)
	$(VENV)-gpu/bin/python -m pytest -m alone tests/gpu $(ARGS)

test-foreign: $(VENV)-foreign/.foreign ## models that nobody here wrote, in an environment of its own
	$(VENV)-foreign/bin/python -m pytest -n $(WORKERS) --durations=5 -m foreign tests/foreign $(ARGS)

test-subset: $(VENV)/.dev ## the spine's tests, for a second interpreter
	$(PYTEST) -m $(QUICK) $(SUBSET) $(ARGS)

durations: $(VENV)/.dev ## run the tests and keep the processor seconds of each
	$(PYTEST) -m $(QUICK) --durations-file tests/durations.json $(ARGS)

lint: $(VENV)/.dev ## ruff: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## ruff: mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev ## mypy
	$(BIN)/mypy

docs: $(VENV)/.dev ## the site of docs/ and the API reference, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

notebooks: $(VENV)/.dev ## run the notebooks again and keep their outputs
	$(BIN)/python tests/test_notebooks.py

programs: $(VENV)/.dev ## compile again the programs for GPUs that tests read
	$(BIN)/python -m tests.inspect.saved

constraints: $(VENV)/.dev ## look for newer third-party versions and pin them
	.ci/pin $(BIN)/uv

clean: ## remove the environments and what the tools left behind
	rm -rf .venv .venv-* .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

# The stamps: set-up runs again only when what is asked for changed.
$(VENV)/.core: pyproject.toml constraints.txt
	.ci/venv $(VENV) recipes $(INTERPRETER)
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	.ci/venv $(VENV) dev,aot $(INTERPRETER)
	@touch $(VENV)/.core $@

# Older versions of what other packages ask for.
$(VENV)-foreign/.foreign: pyproject.toml tests/foreign/constraints.txt
	PINS=tests/foreign/constraints.txt .ci/venv $(VENV)-foreign foreign $(INTERPRETER)
	@touch $@

$(VENV)-gpu/.gpu: pyproject.toml constraints.txt
	.ci/venv $(VENV)-gpu dev,$(GPU_EXTRA) $(INTERPRETER)
	@touch $@

# cuDNN, 2 GB, for what the quick tests leave out: the programs of recipes on GPUs.
$(VENV)/.pods: pyproject.toml constraints.txt
	.ci/venv $(VENV) dev,cudnn $(INTERPRETER)
	@touch $(VENV)/.core $(VENV)/.dev $@
