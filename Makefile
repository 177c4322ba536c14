# Everything a newcomer needs: `make demo` trains, `make test` tests. Both install into .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TPU_VENV := .venv-tpu
TPU_INSTALLED := $(TPU_VENV)/.installed
RAY_VENV := .venv-ray
RAY_INSTALLED := $(RAY_VENV)/.installed
MINI_VENV := .venv-mini-swe-agent
MINI_INSTALLED := $(MINI_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
THREADS := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell n=$(THREADS); [ $$n -gt 2 ] && n=2; echo $$n)
# What `make parity` runs the other implementation with: an environment of its own, or one that is there already.
PARITY_VENV := .venv-parity
PARITY_PYTHON ?= $(PARITY_VENV)/bin/python
# `make image EXTRAS="tpu ray" ENGINE=docker IMAGE=registry.example.org/swerve`
ENGINE ?= podman
IMAGE ?= swerve
EXTRAS ?=
IMAGE_EXTRAS := tpu cuda ray
# Extra words for the tools, for example `make test ARGS="tests/unit/config -x"` or `make demo ARGS="--run.seed 1"`.
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow goldens tpu ray apptainer mini-swe-agent vllm lint format bench docs parity image lock clean install

help:  ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Swerve needs Python 3.11 or newer; $(PYTHON) is not: run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): requirements.lock pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

install: $(INSTALLED)  ## Install Swerve and its tools into .venv

demo: $(INSTALLED)  ## Train the shipped policy to repair small functions, in minutes
	$(BIN)/swerve train recipes/demo.toml $(ARGS)

test: $(INSTALLED)  ## Run the tests
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(INSTALLED) $(TPU_INSTALLED) $(RAY_INSTALLED)  ## Run the tests that take long
	$(BIN)/python -m pytest -m slow --timeout 7200 $(ARGS)

goldens: $(INSTALLED)  ## Render the benchmark's recipes anew into tests/goldens, once a change to them is meant
	PYTHONPATH=src:tests $(BIN)/python -m recipe_goldens

# The compiler for TPUs is large and wanted by few: it has an environment of its own, with the locked version of JAX.
$(TPU_INSTALLED): requirements.lock pyproject.toml
	@test -x $(TPU_VENV)/bin/python || $(PYTHON) -m venv $(TPU_VENV)
	$(TPU_VENV)/bin/python -m pip install --quiet --require-hashes -r requirements.lock
	$(TPU_VENV)/bin/python -m pip install --quiet "jax[tpu]==$$($(TPU_VENV)/bin/python -c 'import jax; print(jax.__version__)')"
	$(TPU_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

tpu: $(TPU_INSTALLED)  ## Install the compiler for TPUs into .venv-tpu; no TPU needed

# Ray, likewise, with the versions of the container image.
$(RAY_INSTALLED): requirements.lock containers/locks/ray.lock
	@test -x $(RAY_VENV)/bin/python || $(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install --quiet --require-hashes -r requirements.lock
	$(RAY_VENV)/bin/python -m pip install --quiet --require-hashes --no-deps -r containers/locks/ray.lock
	@touch $@

ray: $(RAY_INSTALLED)  ## Install Ray into .venv-ray, for the slow tests of launching on a cluster

apptainer: $(INSTALLED)  ## Fetch Apptainer into .cache for the slow tests; Debian only, installs nothing in the system
	sh tests/tools/install_apptainer.sh .cache/apptainer $(BIN)/python

# An outside agent for the slow tests and for recipes/mini_swe_agent.toml; its dependencies are its own.
$(MINI_INSTALLED): examples/mini_swe_agent.requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m venv $(MINI_VENV)
	$(MINI_VENV)/bin/python -m pip install --quiet -r examples/mini_swe_agent.requirements.txt
	@touch $@

mini-swe-agent: $(MINI_INSTALLED)  ## Install mini-swe-agent into .venv-mini-swe-agent, 0.8 GB

# vLLM for CPUs, for the slow tests. What comes with it for pictures and sound is built for a torch with CUDA, and fails
# beside this one: the model needs the first to be importable, and nothing needs the second.
$(VLLM_INSTALLED): tests/tools/vllm.requirements.txt tests/tools/mend_torchvision.py | $(VENV)/bin/python
	$(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet -r tests/tools/vllm.requirements.txt
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/tools/mend_torchvision.py
	@touch $@

vllm: $(VLLM_INSTALLED)  ## Install vLLM for CPUs into .venv-vllm for the slow tests, 3 GB

lint: $(INSTALLED)  ## Style, types, layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --cache-dir .cache/import_linter
	$(BIN)/codespell
	$(BIN)/basedpyright --level error

format: $(INSTALLED)  ## Rewrite the code in its one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## Tabulate what the demo learns, over seeds
	$(BIN)/python benchmarks/demo_seeds.py $(ARGS)

$(PARITY_VENV)/.installed: tests/parity/requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/python -m pip install --quiet -r tests/parity/requirements.txt
	@touch $@

parity: $(INSTALLED) $(if $(filter $(PARITY_VENV)/%,$(PARITY_PYTHON)),$(PARITY_VENV)/.installed)  ## Compare the model with transformers', as a table
	PYTHONPATH=tests $(PARITY_PYTHON) -m parity.make_goldens
	PYTHONPATH=src:tests $(BIN)/python -m parity.compare

docs: $(INSTALLED)  ## Build the documentation into site/
	$(BIN)/python -c 'import material' 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/mkdocs build --strict

image:  ## Build the container image of the last commit with ENGINE (podman), EXTRAS="tpu cuda ray" as needed
	git archive HEAD | $(ENGINE) build -f containers/Dockerfile -t $(IMAGE) --build-arg SOURCE_COMMIT=$$(git rev-parse HEAD) \
	  --build-arg EXTRAS="$(EXTRAS)" -

lock: | $(VENV)/bin/python  ## Resolve the dependencies anew into requirements.lock
	$(BIN)/python -c 'import uv' 2>/dev/null || $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-emit-find-links --no-header --quiet -o requirements.lock
	# What the extras of the container image add to it, for the Python and the C library of its base.
	set -e; for extra in $(IMAGE_EXTRAS); do \
	  $(BIN)/uv pip compile pyproject.toml --extra $$extra -c requirements.lock --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_36 --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
	    --no-annotate --quiet $$(sed -n 's/^\([a-z][^=]*\)==.*/--no-emit-package \1/p' requirements.lock | sort -u) \
	    -o containers/locks/$$extra.lock; done

clean:  ## Remove what was built, keep runs
	rm -rf $(VENV) $(TPU_VENV) $(RAY_VENV) $(MINI_VENV) $(VLLM_VENV) build dist site .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
