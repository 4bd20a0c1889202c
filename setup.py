"""Builds h2o._core: every .c of csrc, one C11 extension, nothing but numpy needed.

What the environment may say:

H2O_PURE=1       no core at all: a wheel for any system, which serves by torch operations
H2O_IN_PLACE=1   no core yet: an editable install, whose core `setup.py build_ext --inplace` builds
H2O_WERROR=1     warnings are errors
H2O_DEBUG=1      unoptimized, with debug information
H2O_COVERAGE=1   instrumented for gcov

Objects are rebuilt when a source or header changes, not when these variables
do: give an instrumented build a folder of its own, with --build-temp and
--build-lib.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

if not os.environ.get("CC", "cc").strip():
    del os.environ["CC"]  # distutils would take its first flag for the compiler


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


PLATFORM = sysconfig.get_platform()  # that is built for

# One binary for Python 3.10 and all that follow. The free-threaded builds know no such limited API.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
limited_macros = [("Py_LIMITED_API", "0x030a0000")] if LIMITED else []
limited_tag = {"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {}


def kernels_word():
    """What a file of kernels must end with to be of these sources; the Makefile says the same."""
    agreed = [*sorted(glob("csrc/*.h")), *sorted(glob("csrc/cuda/kernels*.h")), "csrc/cuda/plan.c"]
    text = b"".join(Path(path).read_bytes() for path in agreed)
    return f"h2o-kernels-{hashlib.sha256(text).hexdigest()[:16]}"


NO_CLONES = "-fno-ipa-cp-clone"
"""gcc's -O3 copies functions for constants. Kernels have their instances by hand, so that makes the
file a sixteenth larger and nothing faster (instructions within 0.2%)."""


def takes(compiler, flag):
    """Whether a compiler, a list of words, knows a flag."""
    command = [*compiler, "-Werror", flag, "-x", "c", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def is_mingw_gcc(compiler):
    """Whether a compiler, a list of words, is gcc for Windows; clang for it defines both macros."""
    command = [*compiler, "-dM", "-E", "-x", "c", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True).stdout
    return "__MINGW32__" in macros and "__clang__" not in macros


def together(compile_in_turn):
    """Compiles as many files at a time as there are processors."""

    def compile_all(sources, **options):
        def compile_one(source):
            return compile_in_turn([source], **options)

        own = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        with ThreadPoolExecutor(len(own(0))) as pool:
            return [x for objects in pool.map(compile_one, sources) for x in objects]

    return compile_all


def refuse(reason):
    sys.exit(
        f"{reason}. Without a compiler there are wheels: for common systems, and the pure one, "
        "py3-none-any, for all others, which serves by torch operations, slower (made of these "
        "sources with H2O_PURE=1 in the environment of pip install)"
    )


class BuildPure(build_py):
    """Says in the package that it was built without a core, and its version, which that knows."""

    def run(self):
        if self.editable_mode:
            sys.exit("H2O_PURE=1 makes a wheel: pip install it without -e")
        super().run()
        marker = Path(self.build_lib, "h2o", "pure_build.txt")
        marker.write_text(self.distribution.get_version() + "\n")


class InstallSources(build_py):
    """Refuses to make a wheel, which would have no core and not say so."""

    def run(self):
        if not self.editable_mode:
            sys.exit("H2O_IN_PLACE=1 installs the sources: pip install with -e, or leave it out")
        super().run()


class BuildCore(build_ext):
    """Tells the core the version that pyproject.toml gives, so that it is written once."""

    def get_ext_filename(self, name):
        """For Windows too where this is another system (tools/wheels.py)."""
        file = super().get_ext_filename(name)
        return file.replace(".abi3.so", ".pyd") if PLATFORM.startswith("win") else file

    def build_extension(self, extension):
        version = self.distribution.get_version()
        extension.define_macros.append(("H2O_VERSION", f'"{version}"'))
        extension.define_macros.append(("H2O_KERNELS", f'"{kernels_word()}"'))
        compiler = (getattr(self.compiler, "compiler_so", None) or ["cc"])[0]
        if self.compiler.compiler_type == "msvc":
            refuse("Microsoft's compiler lacks the vector types of GNU C that h2o-kv is written in")
        if shutil.which(compiler) is None:
            refuse(
                f"h2o-kv is built with a C compiler, and {compiler!r} is not here: install one "
                "(Debian and Ubuntu: apt install gcc python3-dev), or name it in CC"
            )
        if is_mingw_gcc(self.compiler.compiler_so):
            refuse(
                "MinGW's gcc does not align vectors on the stack (GCC bug 54412), so that h2o-kv "
                "would crash: name clang for MinGW in CC"
            )
        if takes(self.compiler.compiler_so, NO_CLONES):
            extension.extra_compile_args.append(NO_CLONES)
        self.compiler.compile = together(self.compiler.compile)
        super().build_extension(extension)


def describe_core():
    """What setup() is to know for a build with the core."""
    import numpy

    headers = [path for end in ("h", "inc") for path in glob(f"csrc/**/*.{end}", recursive=True)]
    core = Extension(
        "h2o._core",
        sources=sorted(glob("csrc/*.c") + glob("csrc/cpu/*.c") + glob("csrc/cuda/*.c")),
        depends=["setup.py", *headers],
        py_limited_api=LIMITED,
        define_macros=limited_macros,
        include_dirs=["csrc", numpy.get_include()],
        libraries=["m", "dl"] if "linux" in PLATFORM else [],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )
    return {"ext_modules": [core], "cmdclass": {"build_ext": BuildCore}, "options": limited_tag}


def describe_pure():
    """The same without it: Python alone, and no kernels that no core could launch."""
    left_out = {"h2o": ["kernels.fatbin", "_core.pyi"]}
    return {"cmdclass": {"build_py": BuildPure}, "exclude_package_data": left_out}


if wanted("H2O_PURE"):
    setup(**describe_pure())
elif wanted("H2O_IN_PLACE"):
    setup(cmdclass={"build_py": InstallSources})
else:
    setup(**describe_core())
