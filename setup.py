"""Build h2o._core, one C11 extension from every .c file of csrc. Only numpy is needed.

Environment variables:

H2O_PURE=1       build no core: a wheel for any system, which runs on torch operations
H2O_IN_PLACE=1   build no core yet: for an editable install whose core is built later with
                 `setup.py build_ext --inplace`
H2O_WERROR=1     treat warnings as errors
H2O_DEBUG=1      build without optimization, with debug information
H2O_COVERAGE=1   instrument for gcov

Objects are rebuilt when a source or header changes, but not when these variables change. Give an
instrumented build its own folders, with --build-temp and --build-lib.
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
    del os.environ["CC"]  # with an empty CC distutils would run its first flag as the compiler


def wanted(name):
    return os.environ.get(name, "0") not in ("", "0")


# -ffp-contract=fast: kernels are written for a*b+c with a single rounding, which -std=c11 would
# forbid. No code looks at errno or the floating-point flags.
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


PLATFORM = sysconfig.get_platform()  # the platform that the core is built for

# One binary for Python 3.10 and later. Free-threaded builds of Python have no limited API.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")
limited_macros = [("Py_LIMITED_API", "0x030a0000")] if LIMITED else []
limited_tag = {"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {}


def kernels_word():
    """The last bytes of a file of kernels that was built from these sources, as in the Makefile."""
    agreed = [*sorted(glob("csrc/*.h")), *sorted(glob("csrc/cuda/kernels*.h")), "csrc/cuda/plan.c"]
    text = b"".join(Path(path).read_bytes() for path in agreed)
    return f"h2o-kernels-{hashlib.sha256(text).hexdigest()[:16]}"


NO_CLONES = "-fno-ipa-cp-clone"
"""gcc's -O3 clones functions for constant arguments. Kernels are instantiated by hand, so clones
would make the file a sixteenth larger and nothing faster (instructions within 0.2%)."""


def takes(compiler, flag):
    """Whether a compiler, given as a list of words, accepts a flag."""
    command = [*compiler, "-Werror", flag, "-x", "c", "-c", os.devnull, "-o", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


def is_mingw_gcc(compiler):
    """Whether a compiler, given as a list of words, is MinGW's gcc. clang defines both macros."""
    command = [*compiler, "-dM", "-E", "-x", "c", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True).stdout
    return "__MINGW32__" in macros and "__clang__" not in macros


def together(compile_in_turn):
    """Make a compile function that compiles as many files at a time as there are processors."""

    def compile_all(sources, **options):
        def compile_one(source):
            return compile_in_turn([source], **options)

        own = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
        with ThreadPoolExecutor(len(own(0))) as pool:
            return [x for objects in pool.map(compile_one, sources) for x in objects]

    return compile_all


def refuse(reason):
    sys.exit(
        f"{reason}. Without a compiler, install h2o without its core, which works on any system: "
        "H2O_PURE=1 pip install '.[hf]'. It uses torch operations instead and is slower"
    )


class BuildSources(build_py):
    """Copies the Python files and data of the package, without those of an earlier build.

    setuptools copies into the folder of the last build, and a wheel would contain files whose
    sources have been removed or renamed since. The core stays, since compiling it takes minutes.
    """

    def run(self):
        if not self.editable_mode:
            for path in Path(self.build_lib, "h2o").rglob("*"):
                if path.is_file() and not path.name.startswith("_core."):
                    path.unlink()
        super().run()


class BuildPure(BuildSources):
    """Records in the package that it was built without a core, and the version, which the core
    would otherwise give."""

    def run(self):
        if self.editable_mode:
            sys.exit("H2O_PURE=1 builds a wheel, not an editable install: pip install without -e")
        super().run()
        marker = Path(self.build_lib, "h2o", "pure_build.txt")
        marker.write_text(self.distribution.get_version() + "\n")


class InstallSources(BuildSources):
    """Allows editable installs only: a wheel would lack the core without any sign of it."""

    def run(self):
        if not self.editable_mode:
            sys.exit("H2O_IN_PLACE=1 is for editable installs: pip install with -e, or unset it")
        super().run()


class BuildCore(build_ext):
    """Passes the version to the core, so that only pyproject.toml states it."""

    def get_ext_filename(self, name):
        """The name of the core's file, also when cross-compiling for Windows (tools/wheels.py)."""
        file = super().get_ext_filename(name)
        return file.replace(".abi3.so", ".pyd") if PLATFORM.startswith("win") else file

    def build_extension(self, extension):
        version = self.distribution.get_version()
        extension.define_macros.append(("H2O_VERSION", f'"{version}"'))
        extension.define_macros.append(("H2O_KERNELS", f'"{kernels_word()}"'))
        compiler = (getattr(self.compiler, "compiler_so", None) or ["cc"])[0]
        if self.compiler.compiler_type == "msvc":
            refuse("h2o-kv is written with GNU C's vector types, which Microsoft's compiler lacks")
        if shutil.which(compiler) is None:
            refuse(
                f"h2o-kv needs a C compiler, and {compiler!r} was not found: install one "
                "(Debian and Ubuntu: apt install gcc python3-dev), or name it in CC"
            )
        if is_mingw_gcc(self.compiler.compiler_so):
            refuse(
                "MinGW's gcc does not align vectors on the stack (GCC bug 54412), so h2o-kv would "
                "crash: use clang for MinGW instead, by naming it in CC"
            )
        if takes(self.compiler.compiler_so, NO_CLONES):
            extension.extra_compile_args.append(NO_CLONES)
        self.compiler.compile = together(self.compiler.compile)
        super().build_extension(extension)


def describe_core():
    """Arguments of setup() for a build with the core."""
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
    commands = {"build_ext": BuildCore, "build_py": BuildSources}
    return {"ext_modules": [core], "cmdclass": commands, "options": limited_tag}


def describe_pure():
    """Arguments of setup() for a build without the core: only Python, without the kernels, which
    need a core to launch them."""
    left_out = {"h2o": ["kernels.fatbin", "_core.pyi"]}
    return {"cmdclass": {"build_py": BuildPure}, "exclude_package_data": left_out}


if wanted("H2O_PURE"):
    setup(**describe_pure())
elif wanted("H2O_IN_PLACE"):
    setup(cmdclass={"build_py": InstallSources})
else:
    setup(**describe_core())
