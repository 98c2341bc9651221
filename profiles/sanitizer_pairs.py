"""Pairs of accesses that racecheck reports although they are ordered, and why they are.

A pair is known by the functions that its two source lines are in, so that edits move nothing.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import dsl_kernels

SOURCES = Path(dsl_kernels.__file__).parent
CAUSE = (
    "racecheck follows an mbarrier's arrival from the thread that arrives, and here one lane "
    "arrives for its warp.  The other lanes' accesses come before it by `bar.warp.sync` or a named "
    "barrier, which order memory among the threads that take part; the arrival releases, the wait "
    "acquires, and causality order is transitive.  The software GPU's hazard check follows every "
    "lane: it finds these kernels clean under every schedule, and reports the pair where nothing "
    "brings the lanes together before the arrival."
)


@dataclass(frozen=True)
class Handover:
    """Shared memory that some functions write and others read, handed over by one lane a warp.

    Attributes:
        what: lies there.
        there: what orders the writers before the readers.
        back: what orders the readers before the next writers.
        writers, readers: ``file.py:function``.
    """

    what: str
    there: str
    back: str
    writers: frozenset[str]
    readers: frozenset[str]

    @property
    def why(self) -> str:
        """In a sentence."""
        return f"{self.what}: written, then {self.there}; read, then {self.back}"


HANDOVERS = (
    Handover(
        "1 / sums of an item's rows", "`bar.warp.sync`, one lane arrives at INV_RING's full",
        "`bar.warp.sync`, one lane arrives at INV_RING's empty, which the next writers wait for",
        frozenset((
            "across_warps.py:finish_rows", "softmax_many.py:finish_rows",
            "mix16_frames.py:finish_rows", "dense_many.py:finish_rows",
            "sparse_prefill_few.py:finish", "sparse_prefill_many.py:finish",
        )),
        frozenset((
            "fp8_etap.py:write_rows", "mix16_pv.py:write_rows", "mix16_v4_pv.py:write_rows",
            "dense_few.py:write_rows", "dense_many.py:write_rows",
            "sparse_prefill_few.py:write", "sparse_prefill_many.py:write",
        )),
    ),
    Handover(
        "factors and flags that come with P",
        "`bar.warp.sync`, one lane arrives at the full barrier of P",
        "`bar.warp.sync`, one lane frees P, or the tile's stage, whose next tile's P comes behind "
        "a wait for that tile",
        frozenset((
            "softmax_few.py:block", "softmax_many.py:block", "softmax_many.py:hand_over",
            "dense_few.py:block", "dense_many.py:block", "mix16_softmax.py:hand_over",
            "mix16_frames.py:move_frames", "sparse_prefill_few.py:tile",
            "sparse_prefill_many.py:tile",
        )),
        frozenset((
            "fp8_etap.py:pv_block", "softmax_role.py:any_flag", "mix16.py:pv_block",
            "dense_few.py:pv_block", "dense_many.py:pv_block", "sparse_prefill_few.py:product",
            "sparse_prefill_many.py:product",
        )),
    ),
    Handover(
        "what a warp makes of a tile's scales (sigma, log2, 1 / sigma, ratios)",
        "`bar.warp.sync`, one lane arrives at the tile's full barrier (of the ring, or of the "
        "triples)",
        "`bar.warp.sync`, one lane of each reading warp frees the stage, which the next copy, and "
        "behind it whoever makes these, waits for",
        frozenset((
            "scale_triples.py:_make", "mix16_powers.py:_make", "mix16_powers.py:_make_ratios",
            "mix16_parts.py:_make", "mix16_parts.py:_clear",
        )),
        frozenset((
            "block_softmax.py:logits", "mix16_softmax.py:facts_of", "mix16_softmax.py:load_ratio",
            "mix16_v4_parts.py:load_ratio", "mix16_pv.py:load_ratio",
        )),
    ),
    Handover(
        "frame factors of the other warpgroup's block",
        "the warpgroup's named barrier, one lane a warp arrives at `ready`",
        "the next announcement of the readers' own block, which the writers wait for before they "
        "write the buffer again",
        frozenset(("fp8_dual_wg.py:own_frame",)),
        frozenset(("fp8_dual_wg.py:peer_frame",)),
    ),
)  # fmt: skip


@functools.cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions of a file."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.lineno, n.end_lineno or 0, n.name) for n in ast.walk(tree) if isinstance(n, kinds)]


def function_at(place: str, arch: str = "sm_90a") -> str:
    """``file.py:function`` of ``path/file.py:12``: the innermost one of our kernels' file of that
    name; ``file.py:?`` where there is none."""
    path, _, line = place.rpartition(":")
    name, number = Path(path).name, int(line) if line.isdigit() else 0
    other = {"sm_90a": "sm100", "sm_100a": "sm90"}.get(arch)
    files = [p for p in SOURCES.rglob(name) if p.parent.name != other] if name else []
    around = [
        (last - first, function)
        for file in files
        for first, last, function in _functions(file)
        if first <= number <= last
    ]
    return f"{name}:{min(around)[1] if around else '?'}"


def explanation(functions: tuple[str, ...]) -> str:
    """Why a pair of accesses in these functions is ordered; empty where nothing is known."""
    if len(functions) != 2:
        return ""
    for one, other in (functions, functions[::-1]):
        for handover in HANDOVERS:
            if one in handover.writers and other in handover.readers:
                return handover.why
    return ""
