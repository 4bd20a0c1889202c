"""The layers of the project, checked with regular expressions over its sources.

Each test is one rule on which file may include, import, allocate or remember something.
docs/understand/architecture.md gives the reasons.
"""

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from h2o.backends import OPERATIONS, without_core
from h2o.policy import FIELDS, OperationScore, Policy, PolicyFields
from h2o.slots import KINDS, Slots

ROOT = Path(__file__).resolve().parent.parent
GENERATED = {".git", ".venv", "build", "dist", "__pycache__", "node_modules"}
LIBC = {
    "assert", "ctype", "errno", "float", "inttypes", "limits", "math", "stdalign", "stdarg",
    "stdatomic", "stdbool", "stddef", "stdint", "stdio", "stdlib", "string",
}  # fmt: skip

if not (ROOT / "csrc").is_dir():
    pytest.skip("the sources are not here", allow_module_level=True)


def sources(folder: str, *endings: str) -> dict[str, str]:
    """Text of the files below a folder, by path relative to the root."""
    texts = {}
    for place, folders, files in os.walk(ROOT / folder):
        folders[:] = (x for x in folders if x not in GENERATED and not x.endswith("_cache"))
        for name in files:
            if name.endswith(endings):
                path = Path(place, name)
                texts[path.relative_to(ROOT).as_posix()] = path.read_text("utf-8")
    return dict(sorted(texts.items()))


C = sources("csrc", ".c", ".h", ".inc", ".cu", ".cuh")
PYTHON = sources("h2o", ".py")


def includes(text: str) -> list[str]:
    """Headers that a C source includes, in order, with their quotes or angle brackets."""
    return re.findall(r'^\s*#\s*include\s+(["<][^">]+[">])', text, re.MULTILINE)


def imports(text: str) -> set[str]:
    """Modules that a Python source imports at any depth. "from a import b" gives a and a.b."""
    modules = set(re.findall(r"^\s*import ([\w.]+)", text, re.MULTILINE))
    pattern = r"^\s*from ([\w.]+) import (?:\(([^)]*)\)|(.*))"
    for module, many, few in re.findall(pattern, text, re.MULTILINE):
        names = re.findall(r"(\w+)(?: as \w+)?", many or few)
        modules |= {module, *(f"{module}.{name}" for name in names)}
    return modules


def importers(module: str) -> set[str]:
    """Files of the package that import a module or something inside it."""
    return {
        name
        for name, text in PYTHON.items()
        if any(x == module or x.startswith(f"{module}.") for x in imports(text))
    }


def without_prose(text: str) -> str:
    return re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


def test_sources_are_found():
    """With an empty list of sources every other test here would pass."""
    assert {"csrc/h2o.h", "csrc/policy.c", "csrc/module.c", "csrc/exchange.c"} <= set(C)
    assert {"h2o/ops.py", "h2o/hf/cache/cache.py", "h2o/config/h2o_config.py"} <= set(PYTHON)
    assert '"operands.h"' in includes(C["csrc/check.c"])
    assert importers("h2o._core")
    assert importers("transformers")


def test_python_is_known_to_the_border_only():
    border = {"csrc/module.c", "csrc/exchange.c", "csrc/exchange.h"}
    assert {name for name, text in C.items() if "<Python.h>" in includes(text)} <= border
    first = {"csrc/module.c": "<Python.h>", "csrc/arguments.c": '"arguments.h"'}
    first |= {"csrc/arguments.h": '"exchange.h"', "csrc/exchange.c": "<Python.h>"}
    for name, header in first.items():
        assert includes(C[name])[0] == header, f"{name}: Python.h first"
    assert includes(C["csrc/exchange.h"])[0] == "<Python.h>"
    for name, text in C.items():
        assert name == "csrc/exchange.c" or not re.search(r"include\s*<numpy/", text), name


def test_pure_rooms_include_only_their_own_headers_and_libc():
    shared = {
        f"{name}.h"
        for name in (
            *("h2o", "target", "types", "half", "guard", "policy", "quantize", "store"),
            *("operations", "tables", "operands"),
        )
    }
    levels = {
        f"{folder}{name}"
        for name in shared | {"expect.h", "run.h", "system.h"}
        for folder in ("", "../")
    }
    files = {"policy.c", "check.c", "counts.c", "error.c", "tables.c"}
    files |= {f"{name}.c" for name in OPERATIONS}
    pure = {f"csrc/{name}" for name in shared | files}
    intrinsics = {"<immintrin.h>", "<emmintrin.h>", "<arm_neon.h>"}
    for name, text in C.items():
        in_cpu = name.startswith("csrc/cpu/")
        if not (in_cpu or name in pure):
            continue
        for include in includes(text):
            inner = include[1:-1]
            allowed = (
                (include[0] == "<" and inner.removesuffix(".h") in LIBC)
                or inner in levels
                or (in_cpu and include[0] == '"' and "/" not in inner)
                or (include in intrinsics and re.match(r"csrc/cpu/(vec|level)_", name))
            )
            assert allowed, f"{name} includes {include}"


def test_libraries_are_opened_in_two_places():
    for name, text in C.items():
        driver = name.startswith("csrc/cuda/driver.")
        if re.search(r"\bh2o_(open|loaded)_library\(", text):
            assert driver or name in ("csrc/parallel.c", "csrc/system.c", "csrc/system.h"), name
        if re.search(r"\bCU(context|module|function|stream|deviceptr|result)\b", text):
            assert driver, name


def test_what_systems_do_differently_is_in_one_place():
    """A file outside system.c tests for an operating system, or includes a header that ISO C or
    MinGW's POSIX threads lack."""
    portable = {f"<{name}.h>" for name in LIBC | {"pthread"}}
    others = {"<Python.h>", "<numpy/arrayobject.h>", "<cpuid.h>", "<mma.h>", "<initializer_list>"}
    others |= {"<immintrin.h>", "<emmintrin.h>", "<arm_neon.h>"}
    differs = r"\b(_WIN32|_WIN64|__MINGW32__|__APPLE__|__linux__|_GNU_SOURCE)\b"
    differing = {name for name, text in C.items() if re.search(differs, without_comments(text))}
    assert differing == {"csrc/system.c", "csrc/system.h"}
    for name, text in C.items():
        unknown = {x for x in includes(text) if x[0] == "<"} - portable - others
        cuda = {x for x in unknown if name == "csrc/cuda/common.cuh" and x.startswith("<cuda")}
        assert name == "csrc/system.c" or unknown == cuda, f"{name}: {unknown}"


def test_what_only_a_gpu_has_is_in_one_place():
    """Kernels must compile and run unchanged without a GPU."""
    words = r"\basm\b|\b__\w*sync|\b__nv|\b__shared__|\b__global__|\batomic[A-Z]|<cuda|\bcg::"
    for name, text in C.items():
        own = name in ("csrc/cuda/common.cuh", "csrc/cuda/warpgroup.cuh")
        if name.startswith("csrc/cuda/") and not own:
            match = re.search(words, without_comments(text))
            assert not match, f"{name}: {match[0]}"


def test_core_allocates_no_tensors_and_remembers_nothing():
    """Only scratch.c keeps memory between calls. Everything else that outlives a call is written
    once."""
    allocators = {"csrc/system.c"}  # on behalf of scratch.c
    state = {"csrc/dispatch.c", "csrc/parallel.c", "csrc/scratch.c"}
    static_tables = r"PyMethodDef|PyModuleDef|struct PyModuleDef|PyModuleDef_Slot"
    for name, text in C.items():
        if name.startswith("csrc/cuda/driver."):
            continue
        code = without_comments(text)
        if name not in allocators:
            call = re.search(r"\b(malloc|calloc|realloc|aligned_alloc|posix_memalign|mmap)\(", code)
            assert not call, f"{name} calls {call[0]}...)"
        if re.search(r"\bh2o_allocate\(", code):
            assert name in ("csrc/scratch.c", "csrc/system.c", "csrc/system.h"), name
        if name not in state:
            # A definition at file scope (column 0), or a static one inside a function, must be
            # const unless it is a function.
            for line in re.findall(r"^(?:\s*static|_Thread_local)\b[^(){;=]*[;={]", code, re.M):
                assert re.search(rf"\bconst\b|{static_tables}", line), f"{name}: {line.strip()}"


DEVICES = {path.name for path in (ROOT / "csrc").iterdir() if path.is_dir()} - {"cpu"}


def test_a_device_is_a_folder_and_a_row():
    """Code outside a device's folder must not name the device, except in the list of devices."""
    assert DEVICES == {"cuda"}
    for device in DEVICES:
        named = {
            name
            for name, text in C.items()
            if not name.startswith(f"csrc/{device}/")
            and re.search(rf"\b(h2o_)?{device}[_/]|_{device}\b", without_comments(text))
        }
        assert named == {"csrc/devices.c"}


def quoted(text: str, names: Iterable[str]) -> set[str]:
    return {name for name in names if re.search(rf"""["']{name}["']""", text)}


def test_the_policy_is_declared_once():
    """The policy's fields are listed once in C and once in Python. A third list could disagree."""
    fields = Policy._fields
    assert tuple(FIELDS) == tuple(PolicyFields.__annotations__) == fields
    table = C["csrc/tables.c"]
    assert tuple(re.findall(r'\{\.name = "(\w+)",\s+\.kind = H2O_FIELD', table)) == fields
    files = {**C, **PYTHON, **sources("h2o", ".pyi")}
    listing = {name for name, text in files.items() if len(quoted(text, fields)) > 3}
    assert listing == {"csrc/tables.c", "h2o/policy.py"}


def test_a_ranking_touches_few_files():
    """A new ranking must be added to each file that names all rankings or computes with them, so
    there must be few of these files."""
    names = get_args(OperationScore)
    by_layers = set(FIELDS["score_by"].choices) - set(names)  # unknown to the kernels
    assert by_layers == {"mean-echo", "random"}
    assert not [name for name, text in C.items() if quoted(text, by_layers)]
    files = {
        name: text
        for name, text in {**C, **PYTHON}.items()
        if "rank" in text and not name.startswith(("h2o/analysis/", "h2o/calibration/"))
    }
    spelled = {name for name, text in files.items() if quoted(text, names) == set(names)}
    numbered = {name for name, text in C.items() if re.search(r"\bH2O_SCORE_[A-Z]+\b", text)}
    assert spelled | numbered == {
        "csrc/h2o.h", "csrc/policy.h", "csrc/tables.c", "h2o/config/h2o_config.py", "h2o/policy.py",
    }  # fmt: skip


def test_a_stored_dtype_touches_few_files():
    """In C, code for a type of rows is generated from the lists in types.h. A file that names a
    stored dtype would have to be edited for the next one."""
    named = {name for name, text in C.items() if re.search(r"\bH2O_[QS][84]\b", text)}
    assert named <= {"csrc/types.h", "csrc/cpu/stored_rows.h", "csrc/cuda/stored_rows.cuh"}
    spelled = {
        name for name, text in PYTHON.items() if re.search(r'"(int8-)?int4"', without_prose(text))
    }
    assert spelled <= {"h2o/kv_dtype.py", "h2o/backends/kernel_check.py"}


DTYPES = {"H2O_NONE": "", "H2O_F32": "float32", "H2O_F64": "float64", "H2O_I32": "int32"}
DTYPES |= {"H2O_I64": "int64", "H2O_U8": "uint8", "H2O_F16": "float16"}


def test_the_fields_of_slots_are_listed_once():
    """The fields are listed once in C and once in Python, in the same order and with the same
    shapes."""
    macro = re.search(r"#define H2O_SLOTS_FIELDS\(X\).*?\n\n", C["csrc/h2o.h"], re.DOTALL)[0]
    rows = re.findall(r'X\((\w+), "([^"]+)", (\w+),([^)]*)\)', macro)
    assert tuple(KINDS) == Slots._fields == tuple(name for name, *_ in rows)
    optional = {name for name, kind in KINDS.items() if kind.optional}
    assert set(Slots._field_defaults) == optional - {"values"}  # precedes fields without a default
    for name, letters, dtype, flags in rows:
        shape = letters.replace("G", "") if "PER_HEAD" in flags else letters
        shape = shape.replace("Z", "") if "PER_ROW" in flags else shape
        kind = (shape, "WRITTEN" in flags, "OPTIONAL" in flags, DTYPES[dtype])
        assert KINDS[name] == kind, name
    files = {name: quoted(text, KINDS) for name, text in {**C, **PYTHON}.items()}
    assert {name for name, importing in files.items() if len(importing) > 7} == {"h2o/slots.py"}


def test_an_operation_is_declared_once():
    """Each operation has a file of its own, and C and Python list the same operations. Code for all
    operations names none of them."""
    names = re.findall(r"X\((\w+), [A-Z]+\)", without_comments(C["csrc/operations.h"]))
    assert tuple(names) == OPERATIONS
    spread = {
        name
        for name, text in C.items()
        if len(set(re.findall(r"\bH2O_(ATTEND|EVICT|STEP|SIMULATE)\b", without_comments(text)))) > 1
    }
    assert not spread


def test_an_operation_touches_few_files():
    """A file that names all operations must be edited for the next one. Apart from the operations'
    own files there must be few."""
    naming = set()
    for name, text in {**C, **PYTHON}.items():
        code = without_comments(text) if name in C else without_prose(text)
        word = r"\b(plan_|H2O_|h2o_cuda_)?{}(_params|\.inc|\.cuh)?\b"
        named = [x for x in OPERATIONS if re.search(word.format(x), code, re.IGNORECASE)]
        if named == list(OPERATIONS) and Path(name).stem not in OPERATIONS:
            naming.add(name)
    assert naming == {
        "csrc/operations.h", "csrc/cpu/table.inc", "csrc/cuda/kernels.cu", "csrc/cuda/plan.c",
        "h2o/ops.py", "h2o/backends/kernel_check.py",
        "h2o/backends/without_core.py",
    }  # fmt: skip


def test_operands_without_a_core_are_those_of_the_core():
    """Names, shapes, dtypes and the flag "written" must agree with the tables in C. A mask may be
    bool, which NumPy and torch store like uint8, and the Q of a step is 1."""
    rows = re.findall(
        r'H2O_TENSOR(?:_AS)?\((\w+), (?:"[\w.]+", )?([\w.]+), "(\w+)",\s*(\w+),([^)]*)\)',
        "".join(C[f"csrc/{name}.c"] for name in OPERATIONS),
    )
    by_operation = {name: [] for name in OPERATIONS}
    for operation, field, letters, dtype, flags in rows:
        name = field.rpartition(".")[2]
        by_operation[operation].append(name)
        operand = without_core.OPERANDS[name]
        shape = letters.replace("1", "Q") if operation == "step" else letters
        shape = shape.replace("G", "") if "PER_HEAD" in flags else shape
        # attend writes the scores of new keys, and evict reads them.
        written = "WRITTEN" in flags or (operation, name) == ("evict", "scores")
        assert operand == (shape, written, "OPTIONAL" in flags, DTYPES[dtype]), (operation, name)
    numbers = {"slots", "scale", "softcap", "policy"}
    for operation, names in by_operation.items():
        parameters = without_core.parameters(operation)
        assert [name for name in parameters if name not in numbers] == names, operation


def test_core_is_imported_where_backends_are_chosen():
    assert importers("h2o._core") == {"h2o/backends/__init__.py", "h2o/backends/cuda.py"}
    assert importers("h2o.backends.cuda") == {"h2o/backends/__init__.py"}
    assert importers("h2o.backends.torch_backend") <= {
        "h2o/backends/__init__.py",
        "h2o/backends/cuda.py",  # what kernels leave to torch operations
        "h2o/backends/without_core.py",
        *sources("h2o/backends/torch_backend", ".py"),
    }


def test_the_package_does_not_lean_on_the_oracle():
    """The reference implementation judges the package, so the package must not use it."""
    assert not importers("tests")


def test_the_torch_backend_waits_for_no_device():
    """No code of the torch backend may read a tensor's values, which would wait for the device.
    tests/hf/test_fake_device.py runs the backend where reading fails."""
    reads = r"\.(item|tolist|numpy|cpu|nonzero|unique)\(|(?<![.\w])(int|bool|float)\("
    for name, text in sources("h2o/backends/torch_backend", ".py").items():
        match = re.search(reads, text)
        assert not match, f"{name}: {match[0]}"


def test_transformers_is_imported_where_it_is_served():
    allowed = {
        "h2o/compat.py",
        "h2o/compat_calls.py",
        "h2o/models.py",
        "h2o/evaluation/generation.py",
    }
    folders = ("h2o/hf/", "h2o/evaluation/")
    for name in importers("transformers"):
        assert name in allowed or name.startswith(folders), name


def private_names(tree: ast.AST) -> set[str]:
    """Names with one leading underscore that a source uses as attributes or imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("h2o"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            names |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    return {name for name in names if re.fullmatch(r"_[a-z]\w*", str(name))}


def defined_names(tree: ast.AST) -> set[str]:
    """Names that a source defines: functions, classes, variables and attributes of self or cls."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            names.add(node.attr)
    return names


def test_what_is_borrowed_from_inside_other_packages_stands_in_compat_files():
    """Private names, signatures and versions of transformers, accelerate, PEFT and torch are used
    in the compat files only."""
    assert private_names(ast.parse("x._y; from torch import _z; getattr(a, '_b')")) == {
        "_y", "_z", "_b",
    }  # fmt: skip
    compats = ["h2o/compat.py", "h2o/compat_calls.py", "h2o/compat_wrappers.py"]
    rooms = {*compats, *sources("h2o/vllm", ".py")}  # the plugin may use vLLM's
    rooms.add("h2o/backends/prompt_attention.py")  # needs torch and must not import transformers
    trees = {name: ast.parse(text) for name, text in PYTHON.items()}
    compat = set().union(*(private_names(trees[name]) for name in compats))
    ours = {"_fields", "_replace", "_asdict", "_make"}  # public methods of named tuples
    ours |= {"_core", "_actions"}  # our core; argparse's
    ours |= set().union(*(defined_names(tree) for tree in trees.values())) - compat
    for name, tree in trees.items():
        if name not in rooms:
            foreign = {x for x in private_names(tree) if x not in ours and not x.startswith("_h2o")}
            assert not foreign, f"{name}: {foreign}"
    asking = {name for name, text in PYTHON.items() if re.search(r"\bsignature\(", text)}
    assert {name for name in asking if not name.startswith("h2o/backends/")} == {"h2o/compat.py"}
    comparing = r"__version__[^\n]*[<>]|packaging\.version"
    assert [name for name, text in PYTHON.items() if re.search(comparing, text)] == []


def test_vllm_is_known_to_its_plugin():
    """Only the plugin's files import vLLM, and only page_removal.py and prompt_scoring.py there
    import h2o.hf, beside the table of modes, which needs neither torch nor transformers."""
    files = {
        f"h2o/vllm/{name}.py"
        for name in (
            "__init__",
            "plugin",
            "validation",
            "connector",
            "scheduler",
            "seeded_requests",
            "unsupported_backends",
        )
    }
    assert importers("vllm") == files
    modes = "h2o/hf/modes.py"
    assert modes not in importers("torch") | importers("transformers") | importers("vllm")
    knowing = {
        name
        for name in importers("h2o.hf")
        if name.startswith("h2o/vllm/") and IMPORTS[name] & {*sources("h2o/hf", ".py")} - {modes}
    }
    assert knowing == {"h2o/vllm/page_removal.py", "h2o/vllm/prompt_scoring.py"}


def test_a_conversation_and_its_pass_are_written_by_their_guard():
    """All other files ask it to do so (`PassGuard.put`, `announce`, `telling`), and a pass changes
    itself."""
    fields = re.findall(r"^    (\w+): ", PYTHON["h2o/hf/conversation/forward_pass.py"], re.M)
    assert {"before", "after", "stored", "waiting"} <= set(fields)
    writes = re.compile(
        rf"guard\.\w+ =[^=]|(pass|current|planned|finished)\.({'|'.join(fields)}) =[^=]"
        r"|\.stored\.add\(|\.accesses\[\w+\] [+]?="
    )
    examples = "guard.state = x", "guard.only_scores = True", "the_pass.after = x"
    assert all(writes.search(x) for x in (*examples, "the_pass.stored.add(layer)"))
    found = {name for name, text in PYTHON.items() if writes.search(text)}
    assert {x for x in found if x.startswith("h2o/hf/")} == {
        "h2o/hf/conversation/pass_guard.py",
    }


FLOORS = 10
"""Most levels of imports between rooms. A room is a folder or a file at the top of the package."""

FLOORS_OF_HF = 8
FILES_OF_A_ROOM = 11
"""Most files in a room of h2o/hf, including __init__.py."""

SERVING = {
    "arguments", "attention_blocks", "backends", "budgets", "compat", "compat_calls",
    "compat_wrappers", "config", "errors", "hf", "kv_dtype", "model_identity", "models", "ops",
    "packages", "policy", "quantization", "sink_logits", "slots", "spans", "tensors", "utils",
    "vllm",
}  # fmt: skip
"""Rooms that are needed to serve a model or to simulate serving in one forward pass. The other
rooms measure models or are commands."""


def imported_files(name: str) -> set[str]:
    """Files of the package that one of its files imports at any depth, including imports for
    types."""
    modules = set()
    for node in ast.walk(ast.parse(PYTHON[name])):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {file for module in modules if (file := file_of(module)) not in (None, name)}


def file_of(module: str) -> str | None:
    """File of a module, or of the module that defines a name. None if the module is not part of the
    package or is the compiled core."""
    path = "" if module.startswith("h2o._core") else module.replace(".", "/")
    while path:
        for file in (f"{path}.py", f"{path}/__init__.py"):
            if file in PYTHON:
                return file
        path = path.rpartition("/")[0]
    return None


def room_of(file: str) -> str:
    return file.split("/")[1].removesuffix(".py")


IMPORTS = {name: imported_files(name) for name in PYTHON}
ROOMS = {
    room: {room_of(y) for x in IMPORTS if room_of(x) == room for y in IMPORTS[x]} - {room}
    for room in map(room_of, IMPORTS)
}


def floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    """Floor of each node: 1 if it imports nothing, otherwise one more than its highest import.

    Raises an AssertionError that names the circle if a node imports itself through others.
    """
    floor: dict[str, int] = {}

    def climb(name: str, above: tuple[str, ...]) -> int:
        circle = " -> ".join([*above[above.index(name) :], name]) if name in above else ""
        assert not circle, f"a circle: {circle}"
        if name not in floor:
            below = [climb(other, (*above, name)) for other in sorted(arrows[name])]
            floor[name] = 1 + max(below, default=0)
        return floor[name]

    for name in sorted(arrows):
        climb(name, ())
    return floor


def test_files_import_one_another_in_one_direction():
    assert floors({"a": {"b"}, "b": set()}) == {"a": 2, "b": 1}
    with pytest.raises(AssertionError, match="a circle: a -> b -> a"):
        floors({"a": {"b"}, "b": {"a"}})
    assert "h2o/ops.py" in IMPORTS["h2o/result_file.py"]
    floors(IMPORTS)


def test_rooms_stand_on_one_another_on_few_floors():
    floor = floors(ROOMS)
    high = {name: number for name, number in floor.items() if number > FLOORS}
    assert not high, sorted(floor.items(), key=lambda x: x[1])
    measuring = ("analysis", "calibration", "evaluation")
    assert all(floor["hf"] < floor[room] < floor["cli"] for room in measuring if room in floor)


def test_rooms_of_hf_stand_on_one_another_on_few_floors():
    def room(file: str) -> str:
        return Path(file).parts[2]

    files = {file for file in IMPORTS if file.startswith("h2o/hf/") and file.count("/") > 1}
    files = {file for file in files if file != "h2o/hf/__init__.py"}
    arrows: dict[str, set[str]] = {room(file): set() for file in files}
    for file in files:
        arrows[room(file)] |= {room(x) for x in IMPORTS[file] & files} - {room(file)}
    floor = floors(arrows)
    assert max(floor.values()) <= FLOORS_OF_HF, sorted(floor.items(), key=lambda x: x[1])
    for name in arrows:
        assert sum(room(file) == name for file in files) <= FILES_OF_A_ROOM, name


def test_the_package_is_for_users():
    """`import h2o` loads all of the package's files, so none of them may import `h2o` itself."""
    assert not [name for name, files in IMPORTS.items() if "h2o/__init__.py" in files]


def test_what_serves_a_model_needs_nothing_that_measures_one():
    assert set(ROOMS) >= SERVING
    for room in sorted(SERVING):
        assert ROOMS[room] <= SERVING, f"{room} imports {sorted(ROOMS[room] - SERVING)}"


def test_calibration_needs_nothing_of_evaluation():
    below, rooms = set(), {"calibration"}
    while rooms := {x for room in rooms for x in ROOMS[room]} - below:
        below |= rooms
    assert "result_file" in below
    assert not below & {"evaluation", "cli"}


def test_no_two_files_have_one_name():
    """Two files of one name could only be told apart by their folders."""
    names = [Path(name).stem for name in [*PYTHON, *sources("benchmarks", ".py")]]
    repeated = {name for name in names if names.count(name) > 1} - {"__init__", "__main__"}
    assert not repeated


def test_config_needs_neither_torch_nor_transformers():
    assert not set(sources("h2o/config")) & (importers("torch") | importers("transformers"))


def test_the_transformers_served_are_those_that_pip_takes():
    wanted = re.search(r'"transformers>=([\d.]+),<(\d+)"', (ROOT / "pyproject.toml").read_text())
    least, below = wanted.groups()
    assert f"transformers >= {least} and < {below}" in PYTHON["h2o/packages.py"]


def test_citations_name_the_version():
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_nothing_is_registered_but_the_two_documented_names():
    for name, text in PYTHON.items():
        for call in re.findall(
            r"\b(?:AttentionInterface|AttentionMaskInterface)\.register\(", text
        ):
            assert name in ("h2o/compat.py", "h2o/__init__.py"), f"{name}: {call}"


def test_any_torch_will_do():
    for name, text in C.items():
        for include in includes(text):
            assert not re.match(r'["<](torch|ATen|c10|caffe2|pybind11)/', include), name
    assert not re.search(r"^\s*(import|from) torch", (ROOT / "setup.py").read_text(), re.M)


def test_files_stay_small_enough_to_read():
    limits = {".c": 600, ".inc": 600, ".cu": 600, ".py": 400, ".h": 300, ".cuh": 300}
    for name, text in {**C, **PYTHON}.items():
        limit = limits.get(name, limits[Path(name).suffix])
        assert len(text.splitlines()) <= limit, name


def test_project_stands_alone():
    """The sources must not contain paths of the machine they were written on."""
    homes = "|".join(("work", "root", "home", "opt", "Users"))
    paths = re.compile(rf"/(?<![\w.}}/-]/)(?:{homes})/\w|\.\./share" "d")
    endings = (".md", ".toml", ".txt", ".py", ".c", ".h", ".inc", ".ipynb", "Makefile", "run")
    for name, text in sources(".", *endings).items():
        match = paths.search(text)
        assert not match, f"{name}: {match[0]}"


def test_lines_of_json_end_at_line_ends():
    """splitlines() also splits at U+2028 and U+0085, which JSON may contain unescaped. Reading only
    the first line with it is allowed."""
    many = re.compile(r"\.splitlines\(\)(?!\[0\])")
    reading = {
        name: text
        for name, text in {**PYTHON, **sources("examples", ".py")}.items()
        if "json.loads(" in text
    }
    assert {"examples/batch_job.py", "examples/many_machines.py"} <= set(reading)
    assert not [name for name, text in reading.items() if many.search(text)]


def test_what_is_installed_needs_nothing_that_is_not():
    """Benchmarks, tests, tools and examples are not installed, so the package must not import
    them."""
    for room in ("benchmarks", "tests", "tools", "examples"):
        assert not importers(room), room
    benchmarks = sources("benchmarks", ".py")
    assert "benchmarks/runner.py" in benchmarks
    for name, text in benchmarks.items():
        assert len(text.splitlines()) <= 400, name
        assert "h2o._core" not in imports(text), name
        # A GPU machine without network may lack gguf, which only one table of other engines needs.
        assert not re.search(r"^(import|from) gguf", text, re.M), name
