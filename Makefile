# One virtual environment for everything; `make demo` and `make test` create it when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
BACKEND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/.installed-$(BACKEND)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test unit check docs chaos fuzz bench-journal bench-offpolicy bench-sparse clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(STAMP) ## teach a small model arithmetic with a real vLLM producer and a real TRL trainer (SEED=1)
	$(BIN)/python -m examples.arithmetic.demo --seed $(SEED)

test: $(STAMP) ## run every test
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/unit tests/contract
	$(BIN)/python -m pytest tests/integration tests/chaos tests/faults

unit: $(STAMP) ## run the unit tests only
	$(BIN)/python -m pytest -n 3 --dist worksteal tests/unit tests/contract

check: $(STAMP) ## lint, format, types, import rules, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate_configuration.py --check

docs: $(STAMP) ## regenerate docs/configuration.md from the schema
	$(BIN)/python docs/generate_configuration.py

chaos: $(STAMP) ## kill real daemons some 200 times and check that nothing is lost or trained twice (SEED=1)
	$(BIN)/python -m tests.chaos --kills 200 --seed $(SEED) --out runs/chaos/summary.json

fuzz: $(STAMP) ## a million spoiled frames against the codec, about a minute (SEED=1)
	$(BIN)/python -m tests.fuzz.frames --count 1000000 --seed $(SEED)

bench-journal: $(STAMP) ## durable groups per second and latency of acknowledgements, beside raw appends
	$(BIN)/python -m benchmarks.journal --out runs/bench/journal.json --plot runs/bench/journal.png

bench-offpolicy: $(STAMP) ## accuracy under scripted staleness, without and with each correction, 15 to 45 minutes
	$(BIN)/python -m benchmarks.offpolicy --plot runs/bench/offpolicy/offpolicy.png

bench-sparse: $(STAMP) ## accuracy per generated token under sparse rewards, with replay and rerolls, about five minutes
	$(BIN)/python -m benchmarks.sparse --plot runs/bench/sparse/sparse.png

clean: ## remove the virtual environment and the demo's files
	rm -rf $(VENV) runs/demo runs/demo-base

# vLLM's CPU build asks for CPU builds of torch. Where pip's indexes have none, uv knows where PyTorch keeps them.
# torchvision, torchaudio and torchcodec come along as CUDA builds, which break transformers beside a CPU torch; text
# needs none of them.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Slipstream needs Python 3.11 or newer; try make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ($(BACKEND) build; a few minutes, about 4 GB) ..."
	@$(BIN)/python -m pip install --quiet -e '.[$(BACKEND),demo,dev]' \
	  || { $(BIN)/python -m pip install --quiet uv && UV_TORCH_BACKEND=auto $(BIN)/uv pip install --python $(BIN)/python -e '.[$(BACKEND),demo,dev]'; }
	@test $(BACKEND) = gpu || $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
