"""Reads what the compiler produced and decides whether it may ship.

Sources: ptxas' remarks (registers, spills, notes), the PTX (threads, setmaxnreg, line info), the
SASS through nvdisasm (opcode counts) and the lowered host module (dynamic shared memory).
A build fails on: spills, local memory, a ptxas C75xx note (serialised or injected WGMMA waits),
register totals that setmaxnreg could never grant, a setmaxnreg that ptxas dropped, too much shared
memory, a register of a WGMMA that is written behind its fence (``codegen.fences``), a kernel that
is not what its budget declares (tensor-core instructions of another kind, and on SM100 of another
number, among it), host code that only the building machine's CPU runs, or an order of Q.K and
softmax that is not the one asked for.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from codegen import fences, toolchain
from codegen.artifacts import Record
from dsl_kernels.blocks import budget
from dsl_kernels.families import TARGETS

SMEM_LIMIT = budget.SMEM_MAX
WARPGROUP = 128

_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?:, used (\d+) barriers)?(.*)")
_ENTRY_USED = re.compile(r"Compiling entry function\s+'(\w+)'.*?Used (\d+) registers", re.DOTALL)
_ENTRY_THREADS = re.compile(
    r"\.entry (\w+)\(.*?^\.reqntid (\d+(?:, ?\d+)*)", re.DOTALL | re.MULTILINE
)
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_NOTE = re.compile(r"^.*\bC75\d\d\b.*$", re.MULTILINE)
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_LINE = re.compile(_OPCODE.pattern + r"(.*)$|^(\.L_x_\d+):", re.MULTILINE)
_TO_LABEL = re.compile(r"`\((\.L_x_\d+)\)")
_MMA = re.compile(r"[QHI]GMMA")
# What has to lie between the first and the last MMA of a loop whose Q.K runs under its softmax: the
# end of the maxima, exponentials, P's way to shared memory.
SOFTMAX_OPCODES = {"FMNMX": "maxima", "MUFU": "exponentials", "STSM": "stores of P"}
_BEYOND = re.compile(
    r"\t(?:v[a-z]\w+|andn|bextr|bls(?:i|r|msk)|bzhi|mulx|pdep|pext|rorx|sarx|shlx|shrx|tzcnt|lzcnt|movbe)"
    r"\s"
)
_ASSEMBLED_FOR = re.compile(rb"-arch (sm_\w+)")  # ptxas' command line, a note in the cubin
_CONFIG_SMEM = re.compile(
    r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] : .*struct<\(array<3 x i32>, array<3 x i32>, i64"
)


def read_ptxas(record: Record, remarks: str) -> None:
    """Fills registers (also by kernel), barriers, stack, spills, static shared memory, notes."""
    used = _USED.findall(remarks)
    if not used:
        raise RuntimeError(f"{record.name}: no ptxas remark in the compiler's output:\n{remarks}")
    record.registers = max(int(registers) for registers, _, _ in used)
    record.kernel_registers = {name: int(n) for name, n in _ENTRY_USED.findall(remarks)}
    record.barriers = max(int(barriers or 0) for _, barriers, _ in used)
    record.static_smem = max(
        [int(n) for *_, rest in used for n in _STATIC_SMEM.findall(rest)], default=0
    )
    for stack, stores, loads in _SPILLS.findall(remarks):
        record.stack_frame += int(stack)
        record.spill_stores += int(stores)
        record.spill_loads += int(loads)
    record.notes = sorted({note.strip() for note in _NOTE.findall(remarks)})


def read_ptx(record: Record, ptx: str) -> None:
    """Fills PTX version, threads, setmaxnreg values, writes behind a WGMMA's fence; after
    ``read_ptxas``, the register pool.

    Raises:
        ValueError: ``codegen.fences`` does not understand a WGMMA.
    """
    if version := re.search(r"^\.version (\S+)", ptx, re.MULTILINE):
        record.ptx_version = version.group(1)
    threads = {
        name: math.prod(int(n) for n in dims.split(","))
        for name, dims in _ENTRY_THREADS.findall(ptx)
    }
    record.threads = max(threads.values(), default=0)
    record.launch_registers = max(
        (n * threads.get(name, 0) for name, n in record.kernel_registers.items()), default=0
    )
    record.warpgroup_registers = [
        int(n) for n in re.findall(r"setmaxnreg\.(?:inc|dec)\.\S+\s+(\d+)", ptx)
    ]
    record.wrong_way = [
        f"setmaxnreg.{way} {count}"
        for way, count in re.findall(r"setmaxnreg\.(inc|dec)\.\S+\s+(\d+)", ptx)
        if (int(count) - record.registers) * (1 if way == "inc" else -1) < 0
    ]
    record.late_writes = fences.late_writes(ptx)


def read_counts(record: Record, ptx: str) -> None:
    """Fills the arrival counts of the mbarriers that the kernel initialises, and the columns of
    tensor memory that it allocates."""

    def operands(opcode: str) -> list[str]:
        values = []
        for function in ptx.split(".entry "):  # each names its registers anew
            constants = dict(re.findall(r"mov\.[bu]32\s+(%r\d+), (\d+);", function))
            found = re.findall(rf"{opcode}\.\S+\s+\[[^\]]+\], (%r\d+|\d+)", function)
            values += [constants.get(value, value) for value in found]
        return values

    record.barrier_counts = dict(sorted(Counter(operands(r"mbarrier\.init")).items()))
    record.tmem_columns = sum(map(int, operands(r"tcgen05\.alloc")))


def read_host(record: Record, obj: Path) -> None:
    """Fills ``host_beyond`` where objdump is at hand; a baseline of x86-64-v2 has no VEX or BMI."""
    tool = shutil.which("objdump")
    if tool is None or not record.host_cpu:
        return
    command = [tool, "-d", "--no-show-raw-insn", str(obj)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"objdump failed on {record.name}: {done.stderr.strip()}")
    record.host_beyond = len(_BEYOND.findall(done.stdout))


def read_host_module(record: Record, module: str) -> None:
    """Fills dynamic shared memory from the launch configuration of the lowered host code."""
    sizes: list[int] = []
    for match in _CONFIG_SMEM.finditer(module):
        body = module[: match.start()].rpartition("llvm.func @")[2]
        tail = module[match.end() : match.end() + 4000]
        store = re.search(rf"llvm\.store (%\d+), {re.escape(match.group(1))} : i64", tail)
        if store is None:
            continue
        value = re.search(
            rf"{re.escape(store.group(1))} = llvm\.mlir\.constant\((\d+) : i64\)",
            body + module[match.start() : match.end()],
        )
        if value is not None:
            sizes.append(int(value.group(1)))
    record.dynamic_smem = max(sizes, default=None)


def read_target(record: Record, cubin: bytes) -> None:
    """Fills what the cubin was assembled for, as ptxas noted it in the cubin.

    Raises:
        RuntimeError: there is no such note, or of a target that no card is known to load.
    """
    found = {name.decode() for name in _ASSEMBLED_FOR.findall(cubin)}
    if len(found) != 1 or not found <= set(TARGETS):
        some = ", ".join(sorted(found)) or "nothing"
        raise RuntimeError(
            f"{record.name}: the cubin says that it is for {some}, expected one of "
            f"{', '.join(TARGETS)}"
        )
    (record.target,) = found


def read_sass(record: Record, cubin: bytes) -> None:
    """Fills opcode counts and ``amid_mmas``.

    Raises:
        RuntimeError: no usable nvdisasm is installed.
    """
    tool = toolchain.nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm: not found; install the [compile] extra, which brings it")
    with tempfile.TemporaryDirectory() as tmp:
        path = Path(tmp, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([str(tool), "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed on {record.name}: {done.stderr.strip()}")
    record.sass = dict(sorted(Counter(_OPCODE.findall(done.stdout)).items()))
    record.amid_mmas = amid_mmas(done.stdout)


def amid_mmas(sass: str) -> dict[str, int]:
    """``Record.amid_mmas`` of nvdisasm's text: of the shortest loop with both MMAs and ``ex2``."""
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for opcode, rest, label in _LINE.findall(sass):
        if label:
            labels[label] = len(opcodes)
            continue
        opcodes.append("MUFU.EX2" if opcode == "MUFU" and ".EX2" in rest else opcode)
        target = _TO_LABEL.search(rest) if opcode == "BRA" else None
        if target and target[1] in labels:  # known already: backwards
            loops.append(opcodes[labels[target[1]] :])
    both = [loop for loop in loops if "MUFU.EX2" in loop and any(map(_MMA.fullmatch, loop))]
    if not both:
        return {}
    loop = min(both, key=len)
    places = [at for at, opcode in enumerate(loop) if _MMA.fullmatch(opcode)]
    found = Counter(opcode.partition(".")[0] for opcode in loop[places[0] : places[-1] + 1])
    return dict(sorted(found.items()))


def granted_registers(record: Record) -> int | None:
    """Upper bound of the registers a CTA asks for after its setmaxnreg instructions.

    Each value is taken by at least one warpgroup; warpgroups beyond the number of values are
    counted with the largest one.  None if the kernel has no setmaxnreg.
    """
    values = record.warpgroup_registers
    if not values:
        return None
    groups = -(-record.threads // WARPGROUP)
    return (sum(values) + max(0, groups - len(values)) * max(values)) * WARPGROUP


def problems(record: Record) -> list[str]:
    """Reasons why this build must not ship; empty if it may."""
    found: list[str] = []
    if record.spill_stores or record.spill_loads:
        found.append(
            f"registers spill ({record.spill_stores} B stored, {record.spill_loads} B loaded)"
        )
    local = record.sass.get("LDL", 0) + record.sass.get("STL", 0)
    if record.stack_frame or local:
        found.append(
            f"local memory: {record.stack_frame} B stack frame, {local} LDL/STL "
            "(often a register tensor indexed by a runtime value)"
        )
    found += [f"ptxas note: {note}" for note in record.notes]
    if record.wrong_way:
        found.append(
            f"{', '.join(record.wrong_way)}: launched with {record.registers} registers a thread; "
            "the wrong direction is an illegal instruction"
        )
    found += record.late_writes
    asked, kept = len(record.warpgroup_registers), record.sass.get("USETMAXREG", 0)
    if kept != asked:
        found.append(
            f"setmaxnreg: {asked} in the PTX, {kept} USETMAXREG in the SASS; ptxas drops it "
            "without a word where the launch gives no min_blocks_per_mp"
        )
    granted = granted_registers(record)
    pool = record.launch_registers
    if granted is not None and granted > min(pool, 65536):
        found.append(
            f"setmaxnreg asks for up to {granted} registers in all, the CTA owns {pool}: "
            "it would wait forever"
        )
    if pool > 65536:
        found.append(f"a CTA wants {pool} registers at launch, an SM has 65536")
    smem = record.static_smem + (record.dynamic_smem or 0)
    if smem > SMEM_LIMIT:
        found.append(f"{smem} bytes of shared memory exceed {SMEM_LIMIT}")
    if record.host_beyond:
        found.append(
            f"host code: {record.host_beyond} instructions that {record.host_cpu} does not have; "
            "other servers would die of SIGILL"
        )
    found += _undeclared(record)
    return found


def _undeclared(record: Record) -> list[str]:
    """Differences of the compiled kernel from the budget that its module declares."""
    declared = record.declared
    if declared is None:
        return []
    found: list[str] = []
    for what, built in (
        ("threads", record.threads),
        ("warpgroup_registers", sorted(set(record.warpgroup_registers))),
        ("barrier_counts", record.barrier_counts),
        ("tmem_columns", record.tmem_columns),
    ):
        if built != declared[what]:
            found.append(f"budget: {what} is declared {declared[what]}, built {built}")
    for opcode in declared["opcodes"]:
        if not record.sass.get(opcode):
            found.append(f"no {opcode} in the SASS: the MMA was not built as intended")
    for opcode, count in declared.get("mma_counts", {}).items():
        if record.sass.get(opcode, 0) != count:
            found.append(f"{record.sass.get(opcode, 0)} {opcode} in the SASS, declared are {count}")
    if declared["under_softmax"]:
        amid = record.amid_mmas
        missing = [op for op in declared["under_softmax"] if not amid.get(op)]
        missing += [f"{op} ({w})" for op, w in SOFTMAX_OPCODES.items() if not amid.get(op)]
        if missing:
            found.append(
                "Q.K is not under softmax: from the first to the last MMA of the loop there is no "
                + ", no ".join(missing)
            )
        if amid.get("BRA"):
            found.append(f"{amid['BRA']} branches or waits amid the MMAs that run under softmax")
    smem = record.static_smem + (record.dynamic_smem or 0)
    if smem > declared["smem"]:
        found.append(f"budget: {declared['smem']} bytes of shared memory declared, {smem} built")
    return found
