# Every target makes the environment it needs first (scripts/bootstrap.py): the active Python if it has torch,
# else .venv. PYTHON picks the interpreter that starts this, JOBS the number of test processes.
PYTHON ?= python3
JOBS ?= 2
RUN = $(PYTHON) scripts/bootstrap.py run
MODEL ?= smollm2
PROMPT ?= The capital of France is
TOKENS ?= 32
ARCHS ?= 80,90a,120
SANITIZERS ?= memcheck racecheck initcheck synccheck

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types compile gpu-test sanitize bench docs clean

help:
	@echo "make demo      generate text with SmolLM2-135M through pykern's kernels (a GPU is used if there is one)"
	@echo "make test      lint, types and tests (no GPU needed)"
	@echo "make compile   build every op variant with nvcc for $(ARCHS); no GPU needed"
	@echo "make gpu-test  the tests that need a GPU      make sanitize  the same under compute-sanitizer"
	@echo "make bench     time every op beside its peers on this GPU"
	@echo "make docs      write docs/ops.md from the op registry"
	@echo "make clean     remove what the build and the tests left in the checkout"

setup:
	@$(PYTHON) scripts/bootstrap.py

demo:
	@$(RUN) -m pykern generate $(MODEL) --prompt "$(PROMPT)" --max-tokens $(TOKENS)

lint:
	@$(RUN) -m ruff check .

types:
	@$(RUN) -m mypy

# One thread a test process: torch's own would spin against each other's on few cores.
test: lint types
	@OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS)

compile:
	@$(RUN) -m pykern compile --arch $(ARCHS)

gpu-test:
	@$(RUN) -m pytest -m gpu

sanitize:
	@$(RUN) scripts/sanitize.py $(SANITIZERS)

bench:
	@$(RUN) -m pykern bench

docs:
	@$(RUN) scripts/write_docs.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .mypy_cache .coverage htmlcov
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
