# Everything is done with pip in .venv: `make demo` and `make test` work on a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
export OMP_NUM_THREADS ?= 1

.PHONY: env demo test test-fast check format bench clean

env: .venv/ready

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[trainer,dev]'
	rm -rf $(SITE)/trio-stubs  # outdated stubs that libp2p brings in; they would hide trio's own types
	touch $@

demo: env
	$(BIN)/echo-node demo $(ARGS)

test: env
	$(BIN)/pytest $(ARGS)

test-fast: env
	$(BIN)/pytest -m 'not slow' $(ARGS)

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
