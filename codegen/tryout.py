"""``make try VARIANT=...``, its first half: recompile one kernel and print what came of it.

The second half runs it against its reference (``python -m snapmla.testing run``).
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from codegen import artifacts, audit, link
from codegen import compile as compiler
from codegen.artifacts import Record
from dsl_kernels.spec import VariantSpec

SHOWN_OPCODES = (
    "QGMMA", "HGMMA", "UTCQMMA", "UTCHMMA", "UTCCP", "LDTM", "UTMALDG", "UTMASTG", "UBLKCP",
    "LDSM", "STSM", "LDS", "STS", "LDG", "STG", "MUFU", "FFMA", "FFMA2", "FMUL", "F2FP", "PRMT",
    "SHFL", "WARPGROUP", "SYNCS", "BAR", "LDL", "STL",
)  # fmt: skip


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    """Prints one line, of any length; a part may have a style, and no part is read as markup."""
    console.print(Text.assemble(*parts), soft_wrap=True)


def show(record: Record, console: Console) -> None:
    """Prints registers, spills, shared memory and opcode counts."""
    table = Table(title=f"{record.name}  ({record.compile_seconds:.1f} s)", show_header=False)
    per_group = " / ".join(map(str, record.warpgroup_registers)) or "-"
    dynamic = "unknown" if record.dynamic_smem is None else f"{record.dynamic_smem:,}"
    table.add_row("threads", str(record.threads))
    table.add_row("registers at launch", str(record.registers))
    table.add_row("setmaxnreg, program order", per_group)
    table.add_row("spill stores / loads", f"{record.spill_stores} / {record.spill_loads} B")
    table.add_row("stack frame", f"{record.stack_frame} B")
    table.add_row("shared memory", f"{record.static_smem:,} static + {dynamic} dynamic B")
    if record.tmem_columns:
        table.add_row("tensor memory", f"{record.tmem_columns} columns")
    table.add_row("named barriers", str(record.barriers))
    table.add_row("SASS instructions", f"{record.instructions:,}")
    shown = {op: record.sass[op] for op in SHOWN_OPCODES if record.sass.get(op)}
    table.add_row("opcodes", "  ".join(f"{op} {n}" for op, n in shown.items()))
    console.print(table)


def run(spec: VariantSpec, out_dir: Path, console: Console) -> bool:
    """Builds ``spec`` even if it is up to date, prints, audits.  True if all is well."""
    started = time.perf_counter()
    try:
        with artifacts.lock(out_dir, spec.name):
            record = compiler.build(spec, out_dir, strict=False)
    except compiler.BuildError as error:
        _say(console, (str(error), "red"))
        return False
    show(record, console)
    found = audit.problems(record)
    for problem in found:
        _say(console, ("problem", "red"), f" {problem}")
    if (unlinked := link.refusal()) is not None:
        _say(console, unlinked)
    console.print(f"{time.perf_counter() - started:.1f} s in all")
    return not found
