# Everything is done with pip in .venv: `make demo` and `make test` work on a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: env demo test test-fast test-network check format bench clean

env: .venv/ready

.venv/ready: pyproject.toml
	@echo "Making .venv: a few minutes, most of it torch."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[trainer,dev]'
	rm -rf .venv/lib/python3.*/site-packages/trio-stubs  # outdated; libp2p brings them in, and they hide trio's own types
	touch $@

demo: env
	$(BIN)/echo-node demo $(ARGS)

test: env
	$(BIN)/pytest -m 'not network' $(ARGS)

test-network: env
	$(BIN)/pytest -m network -rs $(ARGS)

test-fast: env
	$(BIN)/pytest -m 'not slow and not network' $(ARGS)

check: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: env
	$(BIN)/python tests/bench/swarm.py --json bench.json

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
