"""Decoding: instructions -> Python closures with operands resolved once.

A warp's registers live in one array a width, lane-minor.  Each (register, type) pair that the
code uses becomes an index into ``warp.v``, a list of 32-lane numpy views; constants and special
registers are entries of the same list.  A handler is ``fn(warp, mask)``: ``mask`` is True for all
32 lanes or a bool array; it returns None, or a ``Wait`` if the warp has to stop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import UnmodelledInstruction
from .ptx import TYPE_BYTES, Imm, Instr, Kernel, Mem, Module, Not, Operand, Pair, Reg, Vec
from .registers import RegisterFiles

Handler = Callable[[Any, Any], Any]
Builder = Callable[[Instr, "Decoder"], Handler]

B128 = np.dtype([("low", np.uint64), ("high", np.uint64)])  # only ever moved
DTYPES: dict[str, Any] = {
    "pred": np.bool_, "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "b128": B128,
}  # fmt: skip

# Special registers (PTX ISA section 10): of the grid, of a block, of a warp.  Clocks are ``mov``'s.
_AXES = ("x", "y", "z")
OF_GRID = frozenset((
    "%nwarpid", "%nsmid", "%cluster_nctarank", "%is_explicit_cluster", "%dynamic_smem_size",
    "%total_smem_size", "%gridid", "WARP_SZ",
    *(f"%{n}.{a}" for n in ("ntid", "nctaid", "nclusterid", "cluster_nctaid") for a in _AXES),
))  # fmt: skip
OF_BLOCK = frozenset((
    "%cluster_ctarank", "%smid",
    *(f"%{n}.{a}" for n in ("ctaid", "clusterid", "cluster_ctaid") for a in _AXES),
))  # fmt: skip
OF_WARP = frozenset((
    "%laneid", "%warpid", *(f"%tid.{a}" for a in _AXES),
    *(f"%lanemask_{n}" for n in ("eq", "lt", "le", "gt", "ge")),
))  # fmt: skip
SPECIAL = OF_GRID | OF_BLOCK | OF_WARP

NORMAL, BRANCH, EXIT = 0, 1, 2
_MMA = "wgmma.mma_async."

_BUILDERS: dict[str, Builder] = {}
_WIDTH = {"pred": 0, "b8": 16, "u8": 16, "s8": 16, "b16": 16, "u16": 16, "s16": 16, "f16": 16,
          "bf16": 16, "b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64,
          "f64": 64, "b128": 128}  # fmt: skip


def op(*names: str) -> Callable[[Builder], Builder]:
    """Registers a builder for opcodes; the longest dotted prefix of an opcode wins.

    Raises ValueError, from the decorator, for a name that has a builder.
    """

    def register(builder: Builder) -> Builder:
        for name in names:
            if name in _BUILDERS:
                first, second = (
                    f"{b.__module__}.{b.__qualname__}" for b in (_BUILDERS[name], builder)
                )
                raise ValueError(f"opcode {name}: expected one builder, got {first} and {second}")
            _BUILDERS[name] = builder
        return builder

    return register


def builder_for(opcode: str) -> Builder | None:
    """The builder whose name is the longest dotted prefix of ``opcode``."""
    parts = opcode.split(".")
    for n in range(len(parts), 0, -1):
        found = _BUILDERS.get(".".join(parts[:n]))
        if found is not None:
            return found
    return None


class Mods:
    """The modifiers of one opcode; what no one asked for is unmodelled."""

    def __init__(self, ins: Instr, skip: int = 1) -> None:
        self.ins = ins
        self.left = ins.parts[skip:]

    def take(self, *names: str) -> str | None:
        """Removes and returns the first modifier among ``names``."""
        for part in self.left:
            if part in names:
                self.left.remove(part)
                return part
        return None

    def flag(self, name: str) -> bool:
        """Removes a modifier; whether it was there."""
        return self.take(name) is not None

    def type(self) -> str:
        """Removes and returns the last modifier, a type."""
        if not self.left or self.left[-1] not in DTYPES:
            raise unmodelled(self.ins, "type")
        return self.left.pop()

    def done(self) -> None:
        """Raises UnmodelledInstruction if a modifier is left."""
        if self.left:
            raise unmodelled(self.ins, "modifier ." + " .".join(self.left))


def unmodelled(ins: Instr, why: str = "") -> UnmodelledInstruction:
    """The error that says so, with the text of the instruction."""
    note = f" ({why})" if why else ""
    return UnmodelledInstruction(f"instruction not modelled{note}: {ins.text or ins.opcode}")


@dataclass
class Program:
    """A decoded kernel, shared by all launches.

    ``architecture`` is the number in ``.target sm_90a``.
    ``code[pc]`` is (kind, handler or branch target, guard view or -1, guard negated).  ``views``
    says how to build ``warp.v``; see ``Decoder``.  ``registers[pc]`` is the set of 32-bit slots
    the instruction names, as bits; ``shared_shift`` and ``global_shift`` are the log2 of the
    narrowest access, the hazard checker's granule; ``shared_map`` names parts of dynamic shared
    memory: (name, offset, bytes).
    """

    kernel: Kernel
    architecture: int
    code: list[tuple[int, Any, int, bool]]
    views: list[tuple[Any, ...]]
    counts: dict[int, int]
    variables: dict[str, int] = field(default_factory=dict)
    static_shared: int = 0
    local_size: int = 0
    globals: dict[str, Any] = field(default_factory=dict)
    missing: dict[int, UnmodelledInstruction] = field(default_factory=dict)
    registers: list[int] = field(default_factory=list)
    slot_names: dict[int, str] = field(default_factory=dict)
    predicates: dict[str, int] = field(default_factory=dict)
    shared_shift: int = 0
    global_shift: int = 0
    shared_map: list[tuple[str, int, int]] = field(default_factory=list)

    @functools.cached_property
    def register_views(self) -> dict[tuple[int, Any, int], list[tuple[int, int]]]:
        """The views of registers: (width, dtype, part) to (view, slot) of each."""
        found: dict[tuple[int, Any, int], list[tuple[int, int]]] = {}
        for index, view in enumerate(self.views):
            if view[0] == "reg":
                _, width, slot, dtype, part = view
                found.setdefault((width, dtype, part), []).append((index, slot))
        return found

    @functools.cached_property
    def files(self) -> RegisterFiles:
        """Register files of warps."""
        return RegisterFiles(self)

    @functools.cached_property
    def other_views(self) -> list[tuple[int, tuple[Any, ...]]]:
        """The views of what is no register: constants, symbols, special registers."""
        return [(i, view) for i, view in enumerate(self.views) if view[0] != "reg"]

    @functools.cached_property
    def checked(self) -> list[tuple[int, Any, int, bool]]:
        """``code`` with register accesses reported to the hazard checker first."""
        out = []
        mmas = {pc for pc, x in enumerate(self.kernel.code) if x.opcode.startswith(_MMA)}
        for pc, (kind, fn, guard, negated) in enumerate(self.code):
            if kind == NORMAL and mmas:
                fn = _checked(fn, pc, 0 if pc in mmas else self.registers[pc])
            elif kind == NORMAL:
                fn = _placed(fn, pc)
            out.append((kind, fn, guard, negated))
        return out

    def register_names(self, bits: int) -> str:
        """The registers of a bit set over 32-bit slots, at most eight of them."""
        slots = [i for i in range(bits.bit_length()) if bits >> i & 1]
        names = [self.slot_names.get(i, f"slot {i}") for i in slots[:8]]
        return ", ".join(names) + (f" and {len(slots) - 8} more" if len(slots) > 8 else "")


class Decoder:
    """Operand resolution for the builders.

    View descriptions: ("reg", width, slot, dtype, part), ("const", bits, dtype),
    ("special", name, dtype), ("symbol", name, dtype).
    """

    def __init__(self, kernel: Kernel, module: Module) -> None:
        self.kernel, self.module = kernel, module
        self.architecture = module.architecture
        self.cta_group = 0  # of the tcgen05 instructions, which all have the same
        self.slots: dict[str, tuple[int, int]] = {}
        self.counts = {0: 0, 16: 0, 32: 0, 64: 0, 128: 0}
        self.views: list[tuple[Any, ...]] = []
        self._index: dict[tuple[Any, ...], int] = {}
        self._kinds: dict[str, str | None] = {}
        self._scratch = 0
        self.ins: Instr  # the one whose operands are resolved
        self.variables: dict[str, int] = {}
        self.symbols = {p.name for p in kernel.params}
        self.static_shared = self.local_size = 0
        self._layout()

    def _layout(self) -> None:
        """Static shared variables first, then the dynamic (extern) array; locals from 0."""
        every = [*self.module.variables.values(), *self.kernel.variables.values()]
        for var in every:
            if var.space == "shared" and not var.extern:
                start = -(-self.static_shared // var.align) * var.align
                self.variables[var.name] = start
                self.static_shared = start + var.size
            elif var.space == "local":
                start = -(-self.local_size // var.align) * var.align
                self.variables[var.name] = start
                self.local_size = start + var.size
        for var in every:
            if var.space == "shared" and var.extern:
                start = -(-self.static_shared // var.align) * var.align
                self.variables[var.name] = start
        self.symbols |= {v.name for v in every}

    # ---- operands -----------------------------------------------------------------------------
    def error(self, why: str) -> UnmodelledInstruction:
        """Error which says that this instruction is not modelled, and why."""
        return unmodelled(self.ins, why)

    def _add(self, key: tuple[Any, ...]) -> int:
        if key not in self._index:
            self._index[key] = len(self.views)
            self.views.append(key)
        return self._index[key]

    def kind(self, name: str) -> str | None:
        """``Kernel.reg_type``, looked up once."""
        if name not in self._kinds:
            self._kinds[name] = self.kernel.reg_type(name)
        return self._kinds[name]

    def width(self, operand: Operand) -> int:
        """Register width in bits (0 for a predicate); an immediate or symbol counts as 64."""
        if isinstance(operand, Reg):
            kind = self.kind(operand.name)
            if kind is not None:
                if kind not in _WIDTH:
                    raise self.error(f"register type .{kind}")
                return _WIDTH[kind]
        return 64

    def slot(self, name: str) -> tuple[int, int]:
        """(width, slot) of a register."""
        if name not in self.slots:
            width = self.width(Reg(name))
            self.slots[name] = (width, self.counts[width])
            self.counts[width] += 1
        return self.slots[name]

    def const(self, bits: int, dtype: Any) -> int:
        size = 8 * np.dtype(dtype).itemsize
        return self._add(("const", bits & ((1 << size) - 1), dtype))

    def src(self, operand: Operand, kind: str | Any, part: int = 0) -> int:
        """View index of a source read as ``kind`` (a PTX type or a numpy dtype)."""
        dtype = DTYPES[kind] if isinstance(kind, str) else kind
        if isinstance(operand, Imm):
            if dtype is np.bool_:
                return self._add(("const", int(operand.bits != 0), dtype))
            if operand.kind == "d" and dtype is np.float32:
                value = np.array([operand.bits], np.uint64).view(np.float64).astype(np.float32)
                return self.const(int(value.view(np.uint32)[0]), dtype)
            if operand.kind == "d" and dtype is np.float16:
                raise self.error("f64 literal for f16")
            return self.const(operand.bits >> (8 * np.dtype(dtype).itemsize * part), dtype)
        if isinstance(operand, Mem) and operand.coords is None:  # symbol + offset as a value
            raise self.error("symbol + offset operand")
        if not isinstance(operand, Reg):
            raise self.error(f"operand {operand}")
        name = operand.name
        if self.kind(name) is not None:
            return self.reg(name, dtype, part)
        if name in self.symbols:
            return self._add(("symbol", name, dtype))
        if name in SPECIAL:
            return self._add(("special", name, dtype))
        if name.startswith("%"):
            raise self.error(f"special register {name}")
        raise self.error(f"unknown name {name}")

    def reg(self, name: str, dtype: Any, part: int = 0) -> int:
        width, slot = self.slot(name)
        size = 8 * np.dtype(dtype).itemsize
        if (width == 0) != (dtype is np.bool_) or (width and size > width):
            raise self.error(f"{name} is {width} bits wide, {np.dtype(dtype)} asked for")
        return self._add(("reg", width, slot, dtype, part))

    def dst(self, operand: Operand, kind: str | Any, part: int = 0) -> int:
        """View index of a destination; ``_`` gives a scratch register."""
        dtype = DTYPES[kind] if isinstance(kind, str) else kind
        if not isinstance(operand, Reg):
            raise self.error(f"destination {operand}")
        if operand.name == "_":
            self._scratch += 1
            name = f"%scratch{self._scratch}"
            width = 0 if dtype is np.bool_ else max(16, 8 * np.dtype(dtype).itemsize)
            self.kernel.reg_types[name] = {0: "pred", 16: "b16", 32: "b32", 64: "b64"}[width]
            return self.reg(name, dtype, part)
        return self.reg(operand.name, dtype, part)

    def dst_wide(self, operand: Operand, kind: str) -> tuple[int, Any]:
        """Destination in its full register width, for narrow loads: (view, dtype to extend to)."""
        width = self.width(operand) if operand != Reg("_") else 8 * TYPE_BYTES[kind]
        size = 8 * TYPE_BYTES[kind]
        if kind[0] == "f" or width <= size:
            return self.dst(operand, kind), DTYPES[kind]
        wide = ("s" if kind[0] == "s" else "u") + str(width)
        return self.dst(operand, wide), DTYPES[wide]

    def is_symbol(self, operand: Operand) -> bool:
        """True if an address is a declared name's, plus an offset: the same in all threads."""
        base = operand.base if isinstance(operand, Mem) else None
        return (
            isinstance(base, Reg)
            and base.name in self.symbols
            and self.kernel.reg_type(base.name) is None
        )

    def pred(self, operand: Operand) -> tuple[int, bool]:
        """(view, negated) of a predicate source."""
        if isinstance(operand, Not):
            return self.src(operand.value, "pred"), True
        return self.src(operand, "pred"), False

    def mem(self, operand: Operand, kind: str = "u64") -> tuple[int, int]:
        """(view of the base, byte offset) of ``[base + offset]``."""
        if not isinstance(operand, Mem):
            raise self.error(f"memory operand {operand}")
        base = operand.base
        if isinstance(base, Reg) and self.width(base) == 32 and kind == "u64":
            raise self.error("32-bit register as a 64-bit address")
        if isinstance(base, Imm):
            return self.const(base.bits, DTYPES[kind]), operand.offset
        return self.src(base, kind), operand.offset

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vec) else (operand,)

    def pair(self, operand: Operand) -> tuple[Operand, Operand | None]:
        if isinstance(operand, Pair):
            return operand.first, operand.second
        return operand, None

    def imm(self, operand: Operand) -> int:
        if not isinstance(operand, Imm):
            raise self.error(f"{operand} must be an immediate")
        return operand.bits


def decode(kernel: Kernel, module: Module) -> Program:
    """Decodes a kernel.  Unmodelled instructions become handlers that raise when reached.

    The builders are those that ``softgpu.ops`` has registered, which the package itself imports.
    """
    k = Decoder(kernel, module)
    code: list[tuple[int, Any, int, bool]] = []
    missing: dict[int, UnmodelledInstruction] = {}
    for ins in kernel.code:
        k.ins = ins
        guard = k.src(ins.pred, "pred") if ins.pred is not None else -1
        name = ins.parts[0]
        if name == "bra":
            code.append((BRANCH, ins.target, guard, ins.negated))
        elif name in ("ret", "exit"):
            code.append((EXIT, None, guard, ins.negated))
        else:
            try:
                builder = builder_for(ins.opcode)
                if builder is None:
                    raise unmodelled(ins)
                handler = _build(builder, ins, k)
            except UnmodelledInstruction as error:
                missing[ins.pc] = error
                handler = _raiser(error)
            code.append((NORMAL, handler, guard, ins.negated))
    program = Program(
        kernel,
        k.architecture,
        code,
        k.views,
        k.counts,
        k.variables,
        k.static_shared,
        k.local_size,
        {},
        missing,
    )
    program.slot_names = {slot: name for name, (width, slot) in k.slots.items() if width == 32}
    program.predicates = {name: slot for name, (width, slot) in k.slots.items() if width == 0}
    program.registers = [_registers(ins, k) for ins in kernel.code]
    program.shared_shift = _narrowest(kernel, "shared")
    program.global_shift = _narrowest(kernel, "global")
    return program


def _build(builder: Builder, ins: Instr, k: Decoder) -> Handler:
    """The handler.  Raises UnmodelledInstruction, also where a table or an operand is missing."""
    try:
        return builder(ins, k)
    except LookupError as error:
        raise unmodelled(ins, "modifiers or operands") from error


def register_names(operand: Operand | None) -> list[str]:
    """Registers an operand names."""
    if isinstance(operand, Reg):
        return [operand.name]
    if isinstance(operand, Vec):
        return [n for x in operand.items for n in register_names(x)]
    if isinstance(operand, Mem):
        return [n for x in (operand.base, *(operand.coords or ())) for n in register_names(x)]
    if isinstance(operand, Pair):
        return [*register_names(operand.first), *register_names(operand.second)]
    return register_names(operand.value) if isinstance(operand, Not) else []


def _registers(ins: Instr, k: Decoder) -> int:
    bits = 0
    for arg in ins.args:
        for name in register_names(arg):
            width, slot = k.slots.get(name, (0, 0))
            if width == 32:
                bits |= 1 << slot
    return bits


def _narrowest(kernel: Kernel, space: str) -> int:
    """log2 of the narrowest access to a state space (at most 4 bytes; generic ones count)."""
    least = 4
    for ins in kernel.code:
        parts = ins.parts
        if parts[0] not in ("ld", "ldu", "st", "atom", "red") or parts[-1] not in TYPE_BYTES:
            continue
        spaces = [p.split("::")[0] for p in parts[1:]]
        if space in spaces or not {"shared", "global", "local", "param", "const"} & set(spaces):
            least = min(least, TYPE_BYTES[parts[-1]])
    return least.bit_length() - 1


def _checked(fn: Handler, pc: int, bits: int) -> Handler:
    """The handler, with its place and its registers made known first."""

    def run(w: Any, m: Any) -> Any:
        w.pc = pc
        registers = w.hazard.registers
        registers.touched |= bits
        if registers.busy & bits:
            registers.access(bits)
        return fn(w, m)

    return run


def _placed(fn: Handler, pc: int) -> Handler:
    """The same of a kernel without WGMMAs, whose registers nobody asks for."""

    def run(w: Any, m: Any) -> Any:
        w.pc = pc
        return fn(w, m)

    return run


def _raiser(error: UnmodelledInstruction) -> Handler:
    def run(w: Any, m: Any) -> None:
        raise UnmodelledInstruction(str(error))

    return run
