# Targets for people and for CI; `make help` lists them.
# Every target but test-gpu and test-gpu-multi runs in .venv, which the stamp below makes, and makes anew when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.setup-done

# Two workers of one thread each: the suite is meant for machines with two cores.
WORKERS ?= 2
ONE_THREAD := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST_ARGS ?=

# $(call run-tests,COMMAND,TESTS,ARGUMENTS): pytest by COMMAND of the TESTS that a marker expression names. Those that compare
# times run first, one after the other; the others then with ARGUMENTS, whose closing line counts both. Status 5: there are none.
define run-tests
@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT; \
$(1) -m "timing and $(2)" --reports-out="$$folder/timing" -q $(PYTEST_ARGS) $(if $(3),-n 0); timed=$$?; \
$(1) -m "not timing and $(2)" --reports-in="$$folder/timing" $(3) $(PYTEST_ARGS); others=$$?; \
if [ $$timed -ne 0 ] && [ $$timed -ne 5 ]; then exit $$timed; fi; \
if [ $$others -eq 5 ] && [ $$timed -eq 0 ]; then exit 0; fi; \
exit $$others
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint types test-gpu test-gpu-multi test-emulator-full bench wheel figures docs clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

setup: $(STAMP)  ## create .venv with everything that the other targets need

$(STAMP): pyproject.toml
	@echo "making $(VENV) with all that the targets need: minutes, and some gigabytes"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train a small language model with the fused loss and beside it with torch's; DEMO_ARGS="--help"
	$(BIN)/python -m examples.train_lm $(DEMO_ARGS)

test: $(STAMP)  ## run the tests that need no GPU
	$(call run-tests,$(ONE_THREAD) $(BIN)/python -m pytest,not gpu and not gpu_multi and not emulator_full,-n $(WORKERS) --dist worksteal)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

check: lint types  ## lint, types, then the tests, whose closing line comes last
	@$(MAKE) --no-print-directory test

test-gpu:  ## run the tests that need a GPU with the python3 that is there; installs nothing
	@$(PYTHON) -c 'import torch, sys; sys.exit(0 if torch.cuda.is_available() else "test-gpu: $(PYTHON) has torch %s, which sees no CUDA device" % torch.__version__)'
	$(call run-tests,$(PYTHON) -m pytest,gpu)

test-gpu-multi:  ## run the tests that need several GPUs, on all that are there; installs nothing
	@$(PYTHON) -c 'import torch, sys; n = torch.cuda.device_count(); sys.exit(0 if n > 1 else "test-gpu-multi: $(PYTHON) has torch %s, which sees %d CUDA devices" % (torch.__version__, n))'
	$(PYTHON) -m pytest -m gpu_multi tests/distributed tests/integrations $(PYTEST_ARGS)

test-emulator-full: $(STAMP)  ## run the long sweeps of emulated and of compiled kernels
	$(ONE_THREAD) $(BIN)/python -m pytest -m emulator_full -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

bench: $(STAMP)  ## time the loss beside its peers; BENCH_ARGS="--help" (on a GPU: python3 -m bench.run ...)
	$(BIN)/python -m bench.run $(BENCH_ARGS)

wheel: $(STAMP)  ## build a wheel that carries the compiled kernels, into dist; WHEEL_ARGS="--help"
	$(BIN)/python -m cute_lce.commands.wheel $(WHEEL_ARGS)

figures: $(STAMP)  ## draw docs/figures from the kept results
	$(BIN)/python -m bench.plot
	$(BIN)/python -m bench.grid
	$(BIN)/python -m bench.speed_up_figure
	$(BIN)/python -m bench.error_figure
	$(BIN)/python -m bench.scaling
	$(BIN)/python -m bench.step_figure

docs: $(STAMP)  ## check the documents (links, measured numbers, examples) and build their site, docs/_build/html
	$(BIN)/python -m pytest -q tests/host/test_docs.py tests/host/test_documented_numbers.py
	$(BIN)/python -m sphinx -M html docs docs/_build -W --keep-going -n -q

clean:  ## remove what the other targets made, but not .venv
	rm -rf build dist docs/_build *.egg-info .pytest_cache .ruff_cache
	find cute_lce tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
