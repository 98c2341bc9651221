"""Registers of a WGMMA that are written between its fence and itself, in PTX.

``wgmma.fence`` orders what was written to registers before it; accumulators, and A where it is in
registers, may be touched behind it by WGMMAs alone, up to the wait.  A compiler keeps to that as
little as its input does: accumulators that a loop carries got copies behind the fence, right before
the WGMMA, and a kernel so compiled is right on most days.

The reading is of the text, from one fence to the next: instructions lie there in the order that
ptxas gets, and a loop that begins between fence and WGMMA is read once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(r"(?:@!?%?\w+\s+)?([a-z][\w.:]*)(?:\s+(.*))?")
_REGISTER = re.compile(r"%\w+")
_FIRST = re.compile(r"\{[^}]*\}|[^,]*")  # operand, which is written: a register, or some in braces
_BRACES = re.compile(r"\{([^}]*)\}")
# What writes no register though its first operand is one.
_NO_RESULT = ("st", "red", "bar", "barrier", "wgmma", "cp", "prefetch", "setmaxnreg", "bra", "call",
              "multimem", "stmatrix", "tcgen05", "membar", "fence")  # fmt: skip


def _instructions(number: int, line: str) -> Iterator[tuple[str, str]]:
    """(opcode, operands) of a line; inline blocks may have several in one."""
    for text in line.partition("//")[0].split(";"):
        text = text.strip().lstrip("{").strip()
        found = _INSTRUCTION.fullmatch(text)
        if found is not None:
            yield found[1], found[2] or ""
        elif "wgmma.mma_async" in text:
            raise ValueError(f"line {number}: a WGMMA that is not understood: {text[:100]}")


def late_writes(ptx: str) -> list[str]:
    """Each WGMMA that takes a register which was written behind the fence before it.

    Args:
        ptx: of a module, an instruction a line.

    Returns:
        a sentence each; empty if there are none.

    Raises:
        ValueError: a WGMMA that this does not understand.
    """
    found: list[str] = []
    written: dict[str, tuple[int, str]] | None = None  # behind a fence: where, by what
    for number, line in enumerate(ptx.splitlines(), 1):
        if written is None and "wgmma" not in line:  # most lines, and of kernels without one, all
            continue
        for opcode, operands in _instructions(number, line):
            if opcode.startswith("wgmma.fence"):
                written = {}
            elif opcode.startswith("wgmma.mma_async"):
                taken = _REGISTER.findall(" ".join(_BRACES.findall(operands)))
                late = [register for register in taken if register in (written or {})]
                if written and late:
                    found.append(_sentence(number, opcode, late, *written[late[0]]))
            elif opcode in ("ret", "exit"):
                written = None
            elif written is not None and opcode.partition(".")[0] not in _NO_RESULT:
                result = _FIRST.match(operands)
                for register in _REGISTER.findall(result[0] if result else ""):
                    written[register] = (number, opcode)
    return found


def _sentence(number: int, opcode: str, late: list[str], line: int, by: str) -> str:
    more = f" and {len(late) - 1} more" if late[1:] else ""
    return (
        f"PTX line {number}: {opcode.split('.aligned.')[-1]} takes {late[0]}{more}, "
        f"which {by} of line {line} writes behind the wgmma.fence"
    )
