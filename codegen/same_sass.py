"""Shows that two builds hold the same instructions: ``python -m codegen.same_sass OLD NEW``.

What a refactoring of kernels must not change: the SASS of every kernel, its registers, shared
memory and barriers.  Symbol names hold module and class names, and line info the sources' lines;
both are left out.  Variants that were renamed are paired by ``--renamed FROM=TO``, a regular
expression and what replaces it.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from codegen import artifacts, toolchain
from codegen.artifacts import Record

_SECTION = re.compile(r"^//-+ \.text\.(\S+) -+$", re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*)$")
_LABEL = re.compile(r"\.L_x_\d+")
_SYMBOL = re.compile(r"`\(kernel_\w+\)")  # RET names the kernel that it leaves
COMPARED = (
    "registers", "launch_registers", "barriers", "stack_frame", "static_smem", "dynamic_smem",
    "threads", "warpgroup_registers", "barrier_counts",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One variant of the old build: its new name, and what differs ('' if nothing)."""

    old: str
    new: str
    kernels: int
    instructions: int
    difference: str


def cubins(library: Path) -> list[bytes]:
    """The cubins that an object or a library embeds: ``softgpu.cost.cubin.cubins``.

    Raises:
        ValueError: there is none.
    """
    from softgpu.cost import cubin  # not at the top: a command that reads none starts faster

    return cubin.cubins(library)


def kernels(library: Path) -> list[tuple[str, ...]]:
    """Instructions of every kernel, labels numbered in order of appearance; sorted.

    Raises:
        ValueError: there is no cubin.
        RuntimeError: no nvdisasm, or it failed.
    """
    tool = toolchain.nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm: not found; install the [compile] extra, which brings it")
    found: list[tuple[str, ...]] = []
    for cubin in cubins(library):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvdisasm failed on {library}: {done.stderr.strip()}")
        _, *parts = _SECTION.split(done.stdout)
        found += [_normal(text) for text in parts[1::2]]
    return sorted(found)


def _normal(text: str) -> tuple[str, ...]:
    """The instruction and label lines of one kernel."""
    labels: dict[str, str] = {}

    def renumber(match: re.Match[str]) -> str:
        return labels.setdefault(match[0], f".L{len(labels)}")

    lines = []
    for line in text.splitlines():
        instruction = _INSTRUCTION.match(line)
        if instruction or line.startswith(".L_x_"):
            line = _SYMBOL.sub("`(kernel)", instruction[1] if instruction else line)
            lines.append(_LABEL.sub(renumber, line))
    return tuple(lines)


def compare(old_dir: Path, new_dir: Path, old: Record, new_name: str) -> Row:
    """Compares a variant of the old build with its successor; the row names what differs."""
    new = Record.read(new_dir / f"{new_name}.json")
    if new is None:
        return Row(old.name, new_name, 0, 0, "missing")
    facts = [f for f in COMPARED if getattr(old, f) != getattr(new, f)]
    before, after = (kernels(d / f"{n}.so") for d, n in ((old_dir, old.name), (new_dir, new_name)))
    if before != after:
        facts.append("instructions")
    return Row(old.name, new_name, len(after), sum(map(len, after)), ", ".join(facts))


def page(rows: list[Row], left_out: list[str]) -> str:
    """The table as markdown."""
    bad = sum(bool(row.difference) for row in rows)
    lines = [
        "# Same instructions", "",
        f"{len(rows) - bad} of {len(rows)} variants hold the same instructions, registers, shared "
        "memory and barriers.", "",
        "| old name | new name | kernels | lines of SASS | difference |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        name = "the same" if row.new == row.old else row.new
        what = row.difference or "none"
        lines.append(f"| {row.old} | {name} | {row.kernels} | {row.instructions} | {what} |")
    if left_out:
        lines += ["", f"Left out: {', '.join(left_out)}."]
    return "\n".join([*lines, ""])


def main(
    old: Annotated[Path, typer.Argument(help="Directory of variants before.")],
    new: Annotated[Path, typer.Argument(help="Directory of variants after.")],
    renamed: Annotated[
        list[str] | None, typer.Option(help="FROM=TO, a regular expression.")
    ] = None,
    gone: Annotated[str, typer.Option(help="Regular expression of old names to leave out.")] = "",
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Compares every variant of OLD with its successor; exit code 1 if one differs."""
    rows, left_out = [], []
    for record in artifacts.records(old):
        if gone and re.search(gone, record.name):
            left_out.append(record.name)
            continue
        name = record.name
        for rule in renamed or []:
            before, _, after = rule.partition("=")
            name = re.sub(before, after, name)
        rows.append(compare(old, new, record, name))
    text = page(rows, left_out)
    typer.echo(text)
    if out is not None:
        artifacts.write_atomic(out, text)
    if not rows or any(row.difference for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
