"""PTX text -> kernels made of instructions with parsed operands.

PTX ISA sections 4 (syntax), 5 (state spaces, types), 6 (operands), 11 (directives).  Nothing here
knows what an instruction does.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import PtxSyntaxError

TYPE_BYTES = {
    "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2, "b32": 4,
    "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "b128": 16,
}  # fmt: skip


def type_bytes(kind: str) -> int:
    """Bytes of a type.  Raises PtxSyntaxError."""
    if kind not in TYPE_BYTES:
        raise PtxSyntaxError(f"type .{kind} not understood")
    return TYPE_BYTES[kind]


@dataclass(frozen=True)
class Reg:
    """A register, special register, or named variable; scoped names carry ``@scope``."""

    name: str


@dataclass(frozen=True)
class Imm:
    """An immediate.  ``bits`` is its two's complement or IEEE encoding, ``kind`` i, f or d."""

    bits: int
    kind: str = "i"


@dataclass(frozen=True)
class Vec:
    """``{a, b, ...}``"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Mem:
    """``[base + offset]`` or, for tensors, ``[base, {coordinates}]``."""

    base: Operand
    offset: int = 0
    coords: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Pair:
    """``d|p``"""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Not:
    """``!p``"""

    value: Operand


Operand = Reg | Imm | Vec | Mem | Pair | Not


@dataclass
class Instr:
    """One instruction.

    Attributes:
        opcode: as written, with all modifiers.
        args: operands; a branch target is a ``Reg`` that holds the label.
        pred, negated: guard predicate.
        line: line in the PTX text, from 1.
        source: ``file:line`` of the nearest ``.loc``, or None.
        pc: index in the kernel; target: pc of the branch target.
        scopes: the braces it stands in, innermost first; text: the statement.
    """

    opcode: str
    args: tuple[Operand, ...]
    pred: Reg | None
    negated: bool
    line: int
    source: tuple[int, int] | None
    pc: int = 0
    target: int | None = None
    scopes: tuple[int, ...] = ()
    text: str = ""

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass
class Param:
    name: str
    size: int
    align: int


@dataclass
class Variable:
    """A ``.shared``, ``.local``, ``.global`` or ``.const`` variable."""

    name: str
    space: str
    size: int
    align: int
    extern: bool = False
    data: bytes = b""


def short_name(name: str) -> str:
    """A kernel's name for reports: without what the DSL puts around the function and its class, and
    without the types of its arguments."""
    return re.split(r"_object_at_|_tensorptr", name)[0].removeprefix("kernel_cutlass_")[:80]


@dataclass
class Kernel:
    """One ``.entry``: parameters, code, register types, variables of its scope."""

    name: str
    params: list[Param] = field(default_factory=list)
    code: list[Instr] = field(default_factory=list)
    reg_types: dict[str, str] = field(default_factory=dict)
    reg_counts: dict[str, int] = field(default_factory=dict)  # of ``%r<9>``, by the stem
    variables: dict[str, Variable] = field(default_factory=dict)
    directives: dict[str, str] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)  # paths, by number

    @property
    def short_name(self) -> str:
        """See ``short_name``."""
        return short_name(self.name)

    def reg_type(self, name: str) -> str | None:
        """Declared type of a register, such as ``b32`` or ``pred``; None if it is no register."""
        if name in self.reg_types:
            return self.reg_types[name]
        # ``.reg .b64 a<12>`` declares a0 to a11 (PTX ISA 5.3.3): any name, with or without %, and
        # of ``a1<12>`` too; the longest run of digits is not always the number
        stem = name
        while stem[-1:].isdigit():
            stem = stem[:-1]
            kind = self.reg_types.get(stem + "<>")
            if kind is not None and int(name[len(stem) :]) < self.reg_counts[stem]:
                return kind
        return None

    def source_of(self, ins: Instr) -> str:
        """``file.py:12``, or ``PTX`` without line information."""
        if ins.source is None:
            return "PTX"
        file = self.path_of(ins).rsplit("/", 1)[-1] or f"file {ins.source[0]}"
        return f"{file}:{ins.source[1]}"

    def path_of(self, ins: Instr) -> str:
        """The source's path as the PTX states it; empty where it states none."""
        return self.files.get(ins.source[0], "") if ins.source is not None else ""

    def where(self, ins: Instr) -> str:
        """``file.py:12 (PTX line 345)``"""
        if ins.source is None:
            return f"PTX line {ins.line}"
        return f"{self.source_of(ins)} (PTX line {ins.line})"


@dataclass
class Module:
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    version: str = ""
    target: str = ""

    @property
    def architecture(self) -> int:
        """90 of ``.target sm_90a``; 0 without a target."""
        found = re.match(r"sm_(\d+)", self.target)
        return int(found[1]) if found else 0


_BRACKET = re.compile(r"[{}()\[\]]")
_FIRST_OF_IMMEDIATE = frozenset("-0123456789")
_NAME = r"[%$A-Za-z_][\w$.]*"
_IS_NAME = re.compile(_NAME)
_LABEL = re.compile(r"([$A-Za-z_][\w$]*)\s*:(?!:)")
_STATEMENT = re.compile(r"(?:@(!?)\s*(" + _NAME + r")\s+)?([A-Za-z][\w.:]*)\s*(.*)$", re.S)
_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*"
    r"((?:\[\d*\])*)\s*(?:=\s*(\{.*\}|[^{]+))?$",
    re.S,
)


def _strip_comments(text: str) -> str:
    """Comments become spaces; line breaks stay, so that line numbers hold."""

    def blank(m: re.Match[str]) -> str:
        return "\n" * m.group(0).count("\n") or " "

    return re.sub(r"/\*.*?\*/|//[^\n]*", blank, text, flags=re.S)


_INLINE = re.compile(r"// begin inline asm\n(.*?)// end inline asm", re.S)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")


def _settle_inline_asm(text: str) -> str:
    """Inside inline assembly, line n of the text is numbered (line of the call) + n: undo that.

    LLVM's assembler printer counts so; all of one inline-assembly block belongs to one source line.
    """

    def block(m: re.Match[str]) -> str:
        out, index = [], 0
        for line in m.group(1).split("\n"):
            loc = _LOC.match(line)
            if loc is None:
                index += 1
            else:
                line = f".loc {loc.group(1)} {max(int(loc.group(2)) - index, 0)} 0"
            out.append(line)
        return "// begin inline asm\n" + "\n".join(out) + "// end inline asm"

    return _INLINE.sub(block, text)


def _split_args(text: str) -> list[str]:
    if not _BRACKET.search(text):  # as most are
        parts = [part.strip() for part in text.split(",")]
        return parts if parts[-1] else parts[:-1]
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*out, last] if last else out


def parse_immediate(text: str) -> Imm | None:
    """PTX ISA 4.5 constants; None if ``text`` is not one."""
    if text[:1] not in _FIRST_OF_IMMEDIATE:  # as most are: registers
        return None
    m = re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})", text)
    if m:
        return Imm(int(m.group(1), 16), "f")
    m = re.fullmatch(r"0[dD]([0-9A-Fa-f]{16})", text)
    if m:
        return Imm(int(m.group(1), 16), "d")
    m = re.fullmatch(r"(-?)(0[xX][0-9A-Fa-f]+|0[bB][01]+|\d+)U?", text)
    if m:
        digits = m.group(2)
        octal = re.fullmatch(r"0[0-7]+", digits)
        value = int(digits, 8) if octal else int(digits, 0)
        return Imm(-value if m.group(1) else value)
    m = re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text)
    if m:
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], "d")
    return None


class _Body:
    """Parser of one kernel body."""

    def __init__(self, kernel: Kernel, text: str, line: int) -> None:
        self.kernel, self.text, self.line = kernel, text, line
        self.scopes: list[tuple[int, set[str]]] = [(0, set())]
        self.labels: dict[tuple[str, int], int] = {}
        self.source: tuple[int, int] | None = None
        self.scope_count = 0

    def rename(self, name: str) -> str:
        for scope, names in reversed(self.scopes):
            if name in names:
                return f"{name}@{scope}"
        return name

    def operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("{"):
            return Vec(tuple(self.operand(t) for t in _split_args(text[1:-1])))
        if text.startswith("["):
            inner = _split_args(text[1:-1])
            base, offset = self.address(inner[0])
            if len(inner) == 1:
                return Mem(base, offset)
            coords = self.operand(inner[1])
            return Mem(base, offset, coords.items if isinstance(coords, Vec) else (coords,))
        if text.startswith("!"):
            return Not(self.operand(text[1:]))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self.operand(first), self.operand(second))
        imm = parse_immediate(text)
        if imm is not None:
            return imm
        if _IS_NAME.fullmatch(text):
            return Reg(self.rename(text))
        m = re.fullmatch(r"(" + _NAME + r")\s*\+\s*(-?\d+)", text)
        if m:
            return Mem(Reg(self.rename(m.group(1))), int(m.group(2)))
        raise PtxSyntaxError(f"PTX line {self.line}: operand {text!r} not understood")

    def address(self, text: str) -> tuple[Operand, int]:
        m = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", text.strip())
        if m:
            return self.operand(m.group(1)), int(m.group(2), 0)
        return self.operand(text), 0

    def declare(self, statement: str) -> None:
        """``.reg .b32 %r<12>;`` and ``.reg .pred P1, P2;``"""
        m = re.match(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)$", statement, re.S)
        if not m:
            raise PtxSyntaxError(f"PTX line {self.line}: {statement!r}")
        kind = m.group(1)
        for name in (n.strip() for n in m.group(2).split(",")):
            r = re.fullmatch(r"(.+)<(\d+)>", name)
            if r:
                stem, count = r.group(1), int(r.group(2))
                if len(self.scopes) > 1:
                    for one in (f"{stem}{i}" for i in range(count)):
                        self.scopes[-1][1].add(one)
                        self.kernel.reg_types[self.rename(one)] = kind
                else:
                    self.kernel.reg_types[stem + "<>"] = kind
                    self.kernel.reg_counts[stem] = count
            elif len(self.scopes) > 1:
                self.scopes[-1][1].add(name)
                self.kernel.reg_types[self.rename(name)] = kind
            else:
                self.kernel.reg_types[name] = kind

    def instruction(self, statement: str) -> None:
        m = _STATEMENT.match(statement)
        if not m:
            raise PtxSyntaxError(f"PTX line {self.line}: {statement!r}")
        negated, pred, opcode, rest = m.groups()
        code = self.kernel.code
        if opcode.startswith("call"):
            args: tuple[Operand, ...] = ()  # reported as unmodelled when it is reached
        else:
            args = tuple(self.operand(t) for t in _split_args(rest))
        code.append(
            Instr(
                opcode=opcode,
                args=args,
                pred=Reg(self.rename(pred)) if pred else None,
                negated=bool(negated),
                line=self.line,
                source=self.source,
                pc=len(code),
                scopes=tuple(s for s, _ in reversed(self.scopes)),
                text=" ".join(statement.split()),
            )
        )

    def parse(self) -> None:
        text, i, n = self.text, 0, len(self.text)
        while i < n:
            ch = text[i]
            if ch == "\n":
                self.line += 1
                i += 1
            elif ch.isspace() or ch == ";":
                i += 1
            elif ch == "{":
                self.scope_count += 1
                self.scopes.append((self.scope_count, set()))
                i += 1
            elif ch == "}":
                self.scopes.pop()
                i += 1
            elif text.startswith((".loc\t", ".loc "), i):
                end = text.find("\n", i)
                end = n if end < 0 else end
                words = text[i:end].replace(",", " ").split()
                if words[2] != "0":
                    self.source = (int(words[1]), int(words[2]))
                i = end
            else:
                m = _LABEL.match(text, i)
                if m:
                    self.labels[(m.group(1), self.scopes[-1][0])] = len(self.kernel.code)
                    i = m.end()
                    continue
                end = text.find(";", i)
                if end < 0:
                    raise PtxSyntaxError(f"PTX line {self.line}: statement without ';'")
                self.statement(text[i:end].strip())
                self.line += text.count("\n", i, end)
                i = end + 1
        self.resolve()

    def statement(self, statement: str) -> None:
        if statement.startswith(".reg"):
            self.declare(statement)
        elif statement.startswith((".shared", ".local")):
            var = _variable(statement, extern=False)
            self.kernel.variables[var.name] = var
        elif statement.startswith((".pragma", ".branchtargets", ".param", ".callprototype")):
            return
        elif statement.startswith("."):
            raise PtxSyntaxError(f"PTX line {self.line}: directive {statement.split()[0]!r}")
        else:
            self.instruction(statement)

    def resolve(self) -> None:
        for ins in self.kernel.code:
            if ins.parts[0] != "bra":
                continue
            label = ins.args[0] if ins.args else None
            if not isinstance(label, Reg):
                raise PtxSyntaxError(f"PTX line {ins.line}: {ins.text}: a label expected")
            for scope in ins.scopes:
                if (label.name, scope) in self.labels:
                    ins.target = self.labels[(label.name, scope)]
                    break
            else:
                raise PtxSyntaxError(f"PTX line {ins.line}: label {label.name} not found")


def _variable(statement: str, extern: bool) -> Variable:
    """Raises PtxSyntaxError."""
    m = _VARIABLE.match(statement.strip())
    if not m:
        raise PtxSyntaxError(f"variable declaration {statement!r} not understood")
    space, align, kind, name, dims, init = m.groups()
    size = width = type_bytes(kind)
    for d in re.findall(r"\[(\d*)\]", dims):
        size *= int(d or 0)
    data = b""
    if init is not None:
        for item in _split_args(init[1:-1] if init[0] == "{" else init):
            imm = parse_immediate(item)
            if imm is None:
                raise PtxSyntaxError(f"initialiser of {name}: {item!r} not understood")
            data += (imm.bits & ((1 << (8 * width)) - 1)).to_bytes(width, "little")
    return Variable(name, space, max(size, len(data)), int(align or width), extern, data)


def _match_brace(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
    raise PtxSyntaxError("unbalanced braces")


_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+"
    r"(?:\.ptr\s*(?:\.(?:global|shared|local|const)\s*)?(?:\.align\s+(\d+)\s*)?)?"
    r"([\w$]+)\s*(?:\[(\d+)\])?"
)


def _parameters(head: str) -> list[Param]:
    params = []
    for p in _PARAM.finditer(head):
        align, kind, _, name, count = p.groups()
        size = type_bytes(kind)
        params.append(Param(name, size * int(count or 1), int(align or size)))
    return params


def _entry(text: str, start: int, brace: int, end: int, files: dict[int, str]) -> Kernel:
    """The kernel with its name at ``start`` and its body between ``brace`` and ``end``."""
    head = text[start:brace]
    name = re.match(r"[\w$]+", head)
    if not name:
        raise PtxSyntaxError("entry without a name")
    kernel = Kernel(name.group(0), _parameters(head), files=files)
    tail = head[head.rfind(")") + 1 :] if ")" in head else head[len(kernel.name) :]
    for d in re.finditer(r"\.(\w+)\s*([\d, ]*)", tail):
        kernel.directives[d.group(1)] = d.group(2).strip()
    _Body(kernel, text[brace + 1 : end], text.count("\n", 0, brace + 1) + 1).parse()
    return kernel


def _module_variables(text: str) -> dict[str, Variable]:
    """Declarations outside of kernels and functions."""
    variables = {}
    for statement in text.split(";"):
        m = re.search(r"((?:\.extern|\.visible|\.weak)\s+)?\.(shared|global|const)\b", statement)
        if m:
            declaration = statement[m.start(2) - 1 :]
            var = _variable(declaration, extern=".extern" in (m.group(1) or ""))
            variables[var.name] = var
    return variables


def parse(text: str) -> Module:
    """Parses a PTX module.  Raises PtxSyntaxError with the line."""
    text = _strip_comments(_settle_inline_asm(text))
    version = re.search(r"\.version\s+([\d.]+)", text)
    target = re.search(r"\.target\s+([\w, ]+)", text)
    files = {int(m.group(1)): m.group(2) for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    kernels: dict[str, Kernel] = {}
    outside, last = [], 0
    for m in re.finditer(r"\.(entry|func)\s+", text):
        if m.start() < last:
            continue
        outside.append(text[last : m.start()])
        semicolon, brace = text.find(";", m.end()), text.find("{", m.end())
        if m.group(1) == "func" and semicolon >= 0 and (semicolon < brace or brace < 0):
            last = semicolon + 1  # a declaration
            continue
        if brace < 0:
            raise PtxSyntaxError(f".{m.group(1)} without a body")
        end = _match_brace(text, brace)
        if m.group(1) == "entry":
            kernel = _entry(text, m.end(), brace, end, files)
            kernels[kernel.name] = kernel
        last = end + 1
    outside.append(text[last:])
    return Module(
        kernels,
        _module_variables("\n".join(outside)),
        version.group(1) if version else "",
        target.group(1).strip() if target else "",
    )
