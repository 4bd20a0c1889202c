"""Builds h2o._core: every .c of csrc, one C11 extension, nothing but numpy needed.

What the environment may say:

H2O_WERROR=1     warnings are errors
H2O_DEBUG=1      unoptimised, with debug information
H2O_COVERAGE=1   instrumented for gcov

Objects are rebuilt when a source or header changes, not when these variables
do: give an instrumented build a folder of its own, with --build-temp and
--build-lib.
"""

import hashlib
import os
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

if not os.environ.get("CC", "cc").strip():
    del os.environ["CC"]  # distutils would take its first flag for the compiler

if sys.platform != "linux":
    raise SystemExit(f"h2o-kv runs on Linux only, this is {sys.platform}")


def wanted(name):
    return os.environ.get(name, "0") not in ("", "0")


# ISO mode would forbid a*b+c in one rounding; kernels are written for it. Errors
# are never reported through errno or the floating-point flags.
compile_args = [
    "-std=c11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread",
]  # fmt: skip
link_args = ["-pthread"]

if wanted("H2O_WERROR"):
    compile_args += ["-Werror"]
if wanted("H2O_DEBUG"):
    compile_args += ["-O0", "-g3"]
if wanted("H2O_COVERAGE"):
    compile_args += ["-O0", "-g", "--coverage"]
    link_args += ["--coverage"]


# One binary for Python 3.10 and all that follow. The free-threaded builds know no such limited API.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
limited_macros = [("Py_LIMITED_API", "0x030a0000")] if LIMITED else []
limited_tag = {"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {}


def kernels_word():
    """What a file of kernels must end with to be of these sources; the Makefile says the same."""
    agreed = [*sorted(glob("csrc/*.h")), "csrc/cuda/kernels.h", "csrc/cuda/plan.c"]
    text = b"".join(Path(path).read_bytes() for path in agreed)
    return f"h2o-kernels-{hashlib.sha256(text).hexdigest()[:16]}"


def together(compile_in_turn):
    """Compiles as many files at a time as there are processors."""

    def compile_all(sources, **options):
        def compile_one(source):
            return compile_in_turn([source], **options)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return [x for objects in pool.map(compile_one, sources) for x in objects]

    return compile_all


class BuildCore(build_ext):
    """Tells the core the version that pyproject.toml gives, so that it is written once."""

    def build_extension(self, extension):
        version = self.distribution.get_version()
        extension.define_macros.append(("H2O_VERSION", f'"{version}"'))
        extension.define_macros.append(("H2O_KERNELS", f'"{kernels_word()}"'))
        compiler = (getattr(self.compiler, "compiler_so", None) or ["cc"])[0]
        if shutil.which(compiler) is None:
            sys.exit(
                f"h2o-kv is built with a C compiler, and {compiler!r} is not here: install one "
                "(Debian and Ubuntu: apt install gcc python3-dev), or name it in CC"
            )
        self.compiler.compile = together(self.compiler.compile)
        super().build_extension(extension)


included = [path for ending in ("h", "inc") for path in glob(f"csrc/**/*.{ending}", recursive=True)]

core = Extension(
    "h2o._core",
    sources=sorted(glob("csrc/*.c") + glob("csrc/cpu/*.c") + glob("csrc/cuda/*.c")),
    depends=["setup.py", *included],
    py_limited_api=LIMITED,
    define_macros=limited_macros,
    include_dirs=["csrc", numpy.get_include()],
    libraries=["m", "dl"],
    extra_compile_args=compile_args,
    extra_link_args=link_args,
)

setup(ext_modules=[core], cmdclass={"build_ext": BuildCore}, options=limited_tag)
