"""Issued machine instructions, estimated from executed PTX.

The software GPU executes PTX; hardware issues SASS, which ptxas makes of it: it fuses, drops and
adds instructions, and moves them between lines.  Both carry the source line of every instruction.
A basic block of SASS is taken to run as often as the PTX of its lines does: the mean over its
instructions' lines of (executions of the line's PTX) / (PTX instructions of the line).  Code that
is inlined in several places has one line; so lines all of whose PTX runs equally often decide
alone where a block has any, and of other lines the blocks that remain get what is left.  What is
not in PTX is not seen: loops that poll while a warp waits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..ptx import Instr, Kernel
from .cubin import cubins, nvdisasm

Line = tuple[str, int]  # file (its name without folders) and line
_WHERE = re.compile(r'//## File "([^"]+)", line (\d+)')
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\S+\s+)?([A-Z][A-Z0-9_]*)([\w.]*)")
_ENDS = ("BRA", "EXIT", "RET", "BSYNC", "WARPSYNC", "CALL", "BRX", "JMP", "BREAK", "KILL")
EQUAL = 0.01  # of the most: PTX whose executions differ by less runs equally often


@dataclass
class Block:
    """A basic block: opcode (without modifiers) and line of each instruction; None: no line."""

    code: list[tuple[str, Line | None]] = field(default_factory=list)


def short(path: str) -> str:
    """A file without its folders, as places of PTX name it."""
    return path.rsplit("/", 1)[-1]


def line_of(kernel: Kernel, ins: Instr) -> Line | None:
    """The source line of a PTX instruction."""
    if ins.source is None:
        return None
    file, line = ins.source
    return short(kernel.files.get(file, str(file))), line


def blocks(library: Path) -> dict[str, list[Block]]:
    """Basic blocks of every kernel of an object, by the kernel's name.

    Raises:
        ValueError: there is no cubin.
        RuntimeError: no nvdisasm, or it failed.
    """
    tool = nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm: not found; install the [compile] extra, which brings it")
    found: dict[str, list[Block]] = {}
    for cubin in cubins(library):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            done = subprocess.run(
                [str(tool), "-g", "-c", file.name], capture_output=True, text=True
            )
        if done.returncode:
            raise RuntimeError(f"nvdisasm failed on {library}: {done.stderr.strip()}")
        found |= parse(done.stdout)
    return found


def parse(text: str) -> dict[str, list[Block]]:
    """The blocks in what ``nvdisasm -g -c`` prints."""
    found: dict[str, list[Block]] = {}
    here: list[Block] = []
    where: Line | None = None
    for line in text.splitlines():
        if line.startswith(".text.") and line.endswith(":"):
            here, where = found.setdefault(line[6:-1], [Block()]), None
        elif match := _WHERE.search(line):
            where = short(match[1]), int(match[2])
        elif line.startswith(".L_"):
            if here and here[-1].code:
                here.append(Block())
        elif here and (match := _INSTRUCTION.match(line)):
            if match[1] == "NOP":
                continue
            here[-1].code.append((match[1], where))
            if match[1] in _ENDS:
                here.append(Block())
    return found


class Estimate:
    """Estimates how often the SASS blocks of one kernel run, from executions of its PTX."""

    def __init__(self, kernel: Kernel, code: list[Block]) -> None:
        self.code = [b for b in code if b.code]
        self.lines = [line_of(kernel, ins) for ins in kernel.code]
        self.pcs: dict[Line | None, list[int]] = defaultdict(list)
        for pc, line in enumerate(self.lines):
            self.pcs[line].append(pc)

    def times(self, executed: Mapping[int, float]) -> list[float]:
        """Executions of each block of ``code``."""
        rate: dict[Line | None, float] = {}
        clear: set[Line | None] = set()
        for line, pcs in self.pcs.items():
            if line is None:
                continue
            counts = [executed.get(pc, 0.0) for pc in pcs]
            rate[line] = sum(counts) / len(counts)
            if max(counts) - min(counts) <= EQUAL * max(counts):
                clear.add(line)
        out: list[float | None] = []
        for block in self.code:
            known = [x for _, x in block.code if x in clear]
            out.append(sum(rate[x] for x in known) / len(known) if known else None)
        left = self._left(rate, out)
        for i, block in enumerate(self.code):
            if out[i] is None:
                known = [x for _, x in block.code if x in left]
                out[i] = sum(left[x] for x in known) / len(known) if known else 0.0
        return [n or 0.0 for n in out]

    def _left(
        self, rate: Mapping[Line | None, float], out: list[float | None]
    ) -> dict[Line | None, float]:
        """The mean executions of a line's SASS in the blocks whose own are not known yet."""
        all_of: dict[Line | None, float] = defaultdict(float)
        taken: dict[Line | None, float] = defaultdict(float)
        open_: dict[Line | None, float] = defaultdict(float)
        for block, n in zip(self.code, out, strict=True):
            for _, line in block.code:
                all_of[line] += 1
                if n is None:
                    open_[line] += 1
                else:
                    taken[line] += n
        return {
            line: max(0.0, (rate[line] * all_of[line] - taken[line]) / n)
            for line, n in open_.items() if line in rate
        }  # fmt: skip

    def opcodes(self, executed: Mapping[int, float]) -> dict[str, float]:
        """Issued instructions by opcode."""
        found: dict[str, float] = defaultdict(float)
        for block, n in zip(self.code, self.times(executed), strict=True):
            if n:
                for opcode, _ in block.code:
                    found[opcode] += n
        return dict(found)
