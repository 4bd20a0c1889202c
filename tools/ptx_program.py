"""Translate PTX into a program for the machine of tools/ptx, which runs and counts it on the CPU.

    python tools/ptx_program.py build/kernels/compute_80.ptx build/kernels/compute_80.program

A program is a text file. Each line is a word followed by its operands:

    kernel NAME BYTES SLOTS   begins a kernel: bytes of its parameters, number of slots
    const SLOT VALUE          a slot that holds a constant in all lanes
    special SLOT NAME         a slot that the launch fills: tid.x, ctaid.x, parameters, ...
    i NAME KIND COST GUARD RESULTS SPACE OFFSET TARGET OPERAND...   an instruction

Slots are registers and constants. Every operand is a slot, and the instruction writes the first
RESULTS of them. GUARD is 0 if the instruction always runs. Otherwise it is a slot + 1, negative if
the instruction runs when the slot is false. TARGET is the number of the instruction to which a
branch leads, or -1.

COST is the number of issue slots of a warp that the instruction takes once ptxas has compiled it,
see `cost`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

SPECIAL = {"%tid.x", "%ntid.x", "%nctaid.x", "%nctaid.y", "%nctaid.z"}
SPECIAL |= {"%ctaid.x", "%ctaid.y", "%ctaid.z"}
SPACES = ["generic", "global", "shared", "param"]
SHARED_AT = 1024
"""Address at which the dynamic shared memory begins"""

MODIFIERS = {"rn", "approx", "ftz", "lo", "uni", "sync", "aligned", "to", "gl", "cg", "ca"}
SIGNLESS = {"add", "sub", "mul", "mad", "and", "or", "xor", "not", "shl", "selp", "mov", "bfi",
            "neg", "popc", "prmt"}  # fmt: skip
"""Operations whose result has the same bits for signed and unsigned integers"""

CALLS = {"__internal_accurate_pow": "pow.f64"}

LOGIC = set("setp selp min max and or xor not shl shr prmt bfi popc".split())
"""Operations that only the integer unit can do, even on floats. Sums and products of integers can
also go to the unit for floats."""

CONVERSIONS = r"[us]\d+\.f\d+|f\d+\.[us]\d+|f32\.f64|f64\.f32|.*\.r[nz]i"
"""Conversions that the unit for special functions does: between integers and floats, those of 64
bits, and rounding to whole numbers, but not those between floats of 16 and 32 bits"""


class UnknownPTX(ValueError):
    """A statement that cannot be translated."""


def own_names(block: re.Match[str]) -> str:
    """A block in braces, with its registers renamed, since the kernel may use the same names."""
    declared = re.findall(r"\.reg\s+\.\w+\s+(%\w+)\s*;", block[0])
    return re.sub(r"%\w+", lambda x: x[0] + f"_{block.start()}" * (x[0] in declared), block[0])


def statements(body: str) -> Iterator[str]:
    """Yield labels with their colon and statements without the semicolon. Braces are left out."""
    body = re.sub(r"\{[^{}]*\.reg\s[^{}]*\}", own_names, body)
    for text in re.findall(r"\$\w+:|(?!\s)(?:\{[^{};]*\}|[^;{}])+(?=;)", body):
        yield " ".join(text.split())


def kernels(ptx: str) -> Iterator[tuple[str, int, str]]:
    """Yield the name, the bytes of the first parameter, and the body of each kernel."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    pattern = r"\.entry (\w+)\s*\((.*?)\)\s*(?:\.\w+[^\n{]*\s*)*\{"
    for entry in re.finditer(pattern, text, re.DOTALL):
        size = re.search(r"_param_0\[(\d+)\]", entry[2])
        if size is None:
            raise UnknownPTX(f"{entry[1]} has no parameters by value")
        end, depth = entry.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield entry[1], int(size[1]), text[entry.end() : end - 1]


def split(operands: str) -> list[str]:
    """Split operands at the commas outside of brackets."""
    return [x.strip() for x in re.findall(r"(?:\{[^}]*\}|\[[^]]*\]|\([^)]*\)|[^,])+", operands)]


def cost(name: str, kind: str) -> int:
    """Issue slots of an instruction. Instructions that ptxas folds into another one (moves,
    parameters in the constant bank, logic on predicates) take none. Integers of 64 bits are pairs
    of registers."""
    operation, _, rest = name.partition(".")
    wide = rest.endswith("64") and not rest.endswith("f64")
    if kind in ("move", "param"):
        return 0
    if operation in ("div", "rem"):
        return 80 if wide else 20 if rest.endswith("32") and rest != "f32" else 10
    if operation == "pow":
        return 200
    if operation in ("sqrt", "rcp") and "approx" not in name:
        return 8
    if operation == "cvt":
        return int(not re.match(r"[usb]\d+\.[usb](32|64)$", rest) or rest == "s64.s32")
    if operation in ("mul", "mad", "min", "max") and wide:
        return 4
    if operation == "bfi":
        return 4 if wide else 2
    if operation in ("abs", "neg") and rest.startswith("f"):
        return 0
    return 2 if wide and kind in ("int64", "logic") else 1


def kind_of(name: str, space: int) -> str:
    operation, _, rest = name.partition(".")
    if operation in ("load", "store", "atom"):
        return ("global", "global", "shared", "param")[space]
    if operation == "cvt" and re.match(CONVERSIONS, rest):
        return "convert"
    if operation in ("mma", "ldmatrix", "bra", "ret", "cvt", "ex2"):
        return {"bra": "branch", "ret": "branch"}.get(operation, operation)
    if operation.startswith("copy"):
        return "cp.async"
    if operation in ("bar", "shfl", "vote", "membar"):
        return "sync"
    if operation in ("mov", "unpack", "cvta") or (rest.endswith("pred") and operation != "setp"):
        return "move"
    if operation == "pack":
        return "move" if rest == "32" else "int32"
    if operation in LOGIC:
        return "logic"
    if re.search(r"\bf(16x2|32|64)\b", rest):
        return "float"
    return "int64" if rest.endswith("64") else "int32"


class Kernel:
    """Translates one kernel. `lines` is its program."""

    def __init__(self, name: str, size: int, body: str) -> None:
        self.slots: dict[str, int] = {"_": 0}
        self.begin: list[str] = []
        self.labels: dict[str, int] = {}
        self.code: list[list[str]] = []
        self.static: set[str] = set()  # registers that hold the address of the parameters
        for statement in statements(body):
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.code)
            elif not re.match(r"\.(reg|param|pragma|loc|align)", statement):
                try:
                    self.add(statement)
                except (KeyError, IndexError, ValueError) as error:
                    raise UnknownPTX(f"{name}: {statement}") from error
        self.fold()
        self.lines = [f"kernel {name} {size} {len(self.slots)}", *self.begin]
        for words in self.code:
            words[7] = str(self.labels[words[7]]) if words[7] in self.labels else words[7]
            self.lines.append("i " + " ".join(words))

    def slot(self, operand: str) -> int:
        """The slot of a register, a constant, a symbol or a special register."""
        value = operand
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", operand):
            value = f"#{int(operand.rstrip('U'), 0) & (1 << 64) - 1}"
        elif re.fullmatch(r"0[fd][0-9a-fA-F]+", operand):
            value = f"#{int(operand[2:], 16)}"
        elif operand == "dynamic_shared":
            value = f"#{SHARED_AT}"
        elif parameter := re.fullmatch(r"\w+_param_([01])", operand):
            value = f"parameter.{parameter[1]}"
        if value not in self.slots:
            self.slots[value] = len(self.slots)
            if value[0] == "#":
                self.begin.append(f"const {self.slots[value]} {value[1:]}")
            elif value in SPECIAL or value.startswith("parameter."):
                self.begin.append(f"special {self.slots[value]} {value.lstrip('%')}")
            elif not re.fullmatch(r"%\w+|param[01]|retval0", value):
                raise UnknownPTX(operand)
        return self.slots[value]

    def emit(
        self, name: str, guard: int, results: list[str], operands: list[str],
        *, space: int = 0, offset: int = 0, target: str = "-1", kind: str | None = None,
    ) -> None:  # fmt: skip
        kind = kind or kind_of(name, space)
        slots = [str(self.slot(x)) for x in (*results, *operands)]
        words = [name, kind, cost(name, kind), guard, len(results), space, offset, target]
        self.code.append([*map(str, words), *slots])

    def add(self, statement: str) -> None:
        guard = 0
        if guarded := re.match(r"@(!?)(%\w+) (.*)", statement):
            guard = (self.slot(guarded[2]) + 1) * (-1 if guarded[1] else 1)
            statement = guarded[3]
        word, _, rest = statement.partition(" ")
        parts, operands = word.split("."), split(rest)
        operation, *parts = [x for x in parts if x not in MODIFIERS]
        kind = parts[-1] if parts else ""
        first = parts[0] if parts else ""
        if operation in ("ld", "st", "atom"):
            self.add_memory(operation, parts, operands, guard)
        elif operation == "cp":
            self.add_copy(parts, operands, guard)
        elif operation in ("mma", "ldmatrix"):
            self.add_matrix(operation, parts, operands, guard)
        elif operation == "bra":
            self.emit("bra", guard, [], [], target=operands[0])
        elif operation in ("ret", "membar"):
            self.emit(operation, guard, [], [])
        elif operation == "call":
            result, function, arguments = operands
            self.emit(CALLS[function], guard, split(result[1:-1]), split(arguments[1:-1]))
        elif operation == "bar":
            results, values = (operands[:1], operands[2:]) if first == "red" else ([], [])
            name = "bar.warp" if first == "warp" else "bar.red" if results else "bar"
            self.emit(name, guard, results, self.positive(values, guard))
        elif operation == "shfl":
            result, _, valid = operands[0].partition("|")
            name = "shfl" if first == "bfly" else f"shfl.{first}"
            self.emit(name, guard, [result, valid or "_"], operands[1:3])
        elif operation == "vote":
            self.emit(f"vote.{first}", guard, operands[:1], self.positive(operands[1:2], guard))
        elif operation == "mov" and "{" in rest:
            packs = operands[1].startswith("{")
            many = split(operands[packs][1:-1])
            name = f"{'pack' if packs else 'unpack'}.{int(kind[1:]) // len(many)}"
            results, values = (operands[:1], many) if packs else (many, operands[1:])
            self.emit(name, guard, results, values)
        elif operation == "cvta":
            inward = "shared" in parts and word.split(".")[1] == "to"
            name = f"cvta.{'to.' * inward}shared" if "shared" in parts else "mov.u64"
            self.emit(name, guard, operands[:1], operands[1:], kind="move")
        elif operation == "cvt":
            self.emit(
                ".".join(["cvt", *parts[-2:], *parts[:-2]]), guard, operands[:1], operands[1:]
            )
        else:
            if operation == "mov" and "_param_0" in operands[1]:
                self.static.add(operands[0])
            if (operation in SIGNLESS and "wide" not in parts) or kind[:1] == "b":
                parts[-1] = re.sub(r"^[sb](?=\d)", "u", kind)
            if operation == "rcp" and ".approx." in word:
                operation = "rcp.approx"
            results = 1 + (operation == "setp" and "|" in operands[0])
            values = self.positive(operands[results:], guard)
            self.emit(".".join([operation, *parts]), guard, operands[:results], values)

    def fold(self) -> None:
        """Set the cost to 0 for adding a constant to a value that is used as an address only, since
        the constant becomes the offset of the load, store or copy."""
        constants = {words.split()[1] for words in self.begin if words.startswith("const")}
        other: set[str] = set()  # slots that are read as more than an address
        before = -1
        while before != len(other):
            before = len(other)
            folded = []
            for words in reversed(self.code):
                operation, results = words[0].partition(".")[0], int(words[4])
                written, read = words[8 : 8 + results], words[8 + results :]
                if operation in ("load", "store", "ldmatrix", "copy"):
                    other.update(read[2 if operation == "copy" else 1 :])
                elif not other.intersection(written) and (
                    words[0] in ("mov.u64", "cvt.u32.u64", "cvta.to.shared")
                    or (words[0] in ("add.u64", "add.u32") and constants.intersection(read))
                ):
                    folded.append(words)
                else:
                    other.update(read)
        for words in folded:
            words[2] = "0"

    def positive(self, operands: list[str], guard: int) -> list[str]:
        """The operands with each !%p replaced by the result of a separate negation."""
        for i, x in enumerate(operands):
            if x.startswith("!"):
                self.emit("not.pred", guard, [f"%not{x[2:]}"], [x[1:]])
                operands = [*operands[:i], f"%not{x[2:]}", *operands[i + 1 :]]
        return operands

    def address(self, operand: str) -> tuple[str, int]:
        base, _, offset = operand.strip("[]").partition("+")
        return base, int(offset or 0)

    def add_memory(self, operation: str, parts: list[str], operands: list[str], guard: int) -> None:
        if operation == "st":
            operands = operands[::-1]
        base, offset = self.address(operands[1])
        many = split(operands[0][1:-1]) if operands[0].startswith("{") else operands[:1]
        if re.fullmatch(r"param[01]|retval0", base):  # arguments of a call are registers here
            results, values = ([base], many) if operation == "st" else (many, [base])
            return self.emit("mov.u64", guard, results, values)
        named = [x for x in parts if x in SPACES]
        space = SPACES.index(named[0]) if named else 0
        kind = re.sub(r"^[bf]", "u", parts[-1])
        constant = space == 3 and (not base.startswith("%") or base in self.static)
        label = "int32" if space == 3 and not constant else None
        if operation == "ld":
            self.emit(f"load.{kind}", guard, many, [base], space=space, offset=offset, kind=label)
        elif operation == "st":
            self.emit(f"store.{kind}", guard, [], [base, *many], space=space, offset=offset)
        else:
            ordered = "release." * ("acq_rel" in parts)
            name = f"atom.{ordered}{'.'.join(parts[-2:])}"
            self.emit(name, guard, many, [base, operands[2]], space=space, offset=offset)

    def add_copy(self, parts: list[str], operands: list[str], guard: int) -> None:
        if parts[-1] == "commit_group":
            return self.emit("copy.commit", guard, [], [])
        if parts[-1] == "wait_group":
            return self.emit("copy.wait", guard, [], [], offset=int(operands[0]))
        (to, zero), (source, also) = self.address(operands[0]), self.address(operands[1])
        if zero or also:
            raise UnknownPTX("cp.async with an offset")
        self.emit("copy", guard, [], [to, source], offset=int(operands[2]))

    def add_matrix(self, operation: str, parts: list[str], operands: list[str], guard: int) -> None:
        registers = [split(x[1:-1]) for x in operands if x.startswith("{")]
        if operation == "ldmatrix":
            base, offset = self.address(operands[1])
            name = "ldmatrix.trans" if "trans" in parts else "ldmatrix"
            return self.emit(name, guard, registers[0], [base], space=2, offset=offset)
        name = f"mma.{parts[4]}.{parts[0].rpartition('k')[2]}"
        self.emit(name, guard, registers[0], [x for r in registers[1:] for x in r])


def program(ptx: str) -> str:
    """The program of all kernels of a PTX file."""
    return "\n".join(line for k in kernels(ptx) for line in Kernel(*k).lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    text = Path(sys.argv[1]).read_bytes().rstrip(b"\0").decode()
    Path(sys.argv[2]).write_text(program(text))
