"""Explanations of mutants that survive: an instruction, and the role of the code it stands in.

``OPCODE``, ``OPCODE @ ROLE`` or ``N x OPCODE @ ROLE``, of N at most.  A role is named here once,
with the functions that play it, so that an explanation, and a survivor that was recorded with its
roles, outlive the renaming of files and functions.  Survivors are judged when they are read: an
explanation that comes or goes changes the verdict, not what was run.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dsl_kernels import spec
from softgpu import mutate as mutation

_EXPLANATION = re.compile(r"(?:(\d+) x )?([^@]+?)(?: @ (.+))?")
KERNELS = Path(spec.__file__).parent


class Place(NamedTuple):
    """The code that plays a role.

    Attributes:
        functions: globs over qualified names of functions and classes (class, dot, method).
        text: that a source line holds; empty: all lines of those functions.
    """

    functions: tuple[str, ...]
    text: str = ""


ROLES: dict[str, Place] = {
    "producer, a part's first tile": Place(("PagedTma.*",), "consumer_wait(landed)"),
    "second chain of Q.K": Place(("ScoreChains.*",), "# orders nothing new"),
    "S freed by one lane": Place(("*.block",), "# one lane frees S for all"),
    "P handed over by one lane": Place(("*",), "# one lane hands P over for all"),
    "O freed by one lane": Place(("*",), "# one lane frees O for all"),
    "clearing of V": Place(("TokenScales.*", "LatentValues.clear")),
    "producer of Q": Place(("QTiles.*",)),
    "announcer of gathered rows": Place(("GatherBytes.*",)),
    "Q.K over bytes": Place(("MixSoftmax", "MixSoftmax.*")),
    "Q.K over FP8 in 16 bits": Place(("F16Softmax", "F16Softmax.*")),
    "P.V over bytes": Place(("ProductsOfV", "ProductsOfV.*")),
    "P.V over V4's tokens": Place(("ProductsOfV4", "ProductsOfV4.*")),
    "P.V, an item without tiles": Place(
        ("Mix16.*",), "INV_RING.wait_full(cta.st, 0, work_tiles & 1)"
    ),
    "clearing of groups with scale 0": Place(("FencedScales.*",)),
    "split lists, the grid before": Place(("*.kernel",), "queries, KV and indices come from"),
    "P.V, its wait for Q": Place(("Mix16.*",), "cta.q_pipe.consumer_wait(qst)"),
    "products of e4m3": Place(("Fp8Scores.*",)),
    "votes that nobody needs": Place(("*",), "# warps have met: no phase ends unread"),
    "threshold of top-k": Place(("find", "find.*", "clear", "cluster_sync")),
    "sums that may still be read": Place(("scan", "scan_max"), "# sums may still be read"),
    "producer of K and V of MHA": Place(("Loads.*", "Notes.*", "release")),
    "products of MHA": Place(("MhaFwd.*",)),
    "softmax of MHA, its wait for the notes": Place(("*",), "self.loads.found.wait_full"),
    "statistics, a CTA counts itself": Place(("_delta",), "cute.arch.sync_threads()"),
    "gradients, a tile that is there": Place(("Gradients.wait_tile",), "moving.wait_full"),
    "gradients, a tile that is clean": Place(("Gradients.wait_tile",), "clean.wait_full"),
    "gradients, a slot that is free": Place(("Gradients.fill",), "moving.wait_empty"),
    "gradients, a turn": Place(("Gradients.turn",)),
    "gradients of queries, hidden keys": Place(("MhaDq._look",)),
    "gradients of keys, at the end": Place(("MhaDkv.produce",), "compat.pdl_wait()"),
    "gradients of keys, behind the acquire": Place(("MhaDkv._wait",), "fence_proxy"),
    "gradients of keys, a note again": Place(("MhaDkv._note",)),
}  # fmt: skip


@dataclass(frozen=True)
class Survivor:
    """A mutant that no schedule noticed.

    Attributes:
        instruction: its opcode, with its operands where none is a register.
        roles: of the code that it stands in.
        tried: schedules.
        source: file and line, for messages.
    """

    instruction: str
    roles: tuple[str, ...]
    tried: int
    source: str = ""

    @classmethod
    def of(cls, site: mutation.Site, tried: int) -> Survivor:
        return cls(instruction(site), roles(site), tried, site.source)

    @classmethod
    def read(cls, data: dict[str, Any]) -> Survivor:
        return cls(**{**data, "roles": tuple(data["roles"])})

    def data(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def instruction(site: mutation.Site) -> str:
    """The instruction of a site without its predicate, and without operands that hold registers."""
    text = re.sub(r"^@\S+\s+", "", site.text)
    return text.split()[0] if "%" in text else text


def roles(site: mutation.Site) -> tuple[str, ...]:
    """The roles of the code that an instruction comes from; none if that is not ours."""
    path = KERNELS.parent / site.path
    if not path.is_relative_to(KERNELS) or not path.is_file():
        return ()
    return _roles(path, path.stat().st_mtime_ns, int(site.source.rpartition(":")[2]))


@functools.lru_cache(maxsize=4096)
def _roles(path: Path, stamp: int, number: int) -> tuple[str, ...]:
    lines, spans = read(path, stamp)
    line = lines[number - 1] if number <= len(lines) else ""
    around = [name for name, first, last in spans if first <= number <= last]
    return tuple(
        role
        for role, place in ROLES.items()
        if place.text in line
        and any(fnmatch.fnmatchcase(name, glob) for name in around for glob in place.functions)
    )


@functools.lru_cache(maxsize=512)
def read(path: Path, _stamp: int) -> tuple[list[str], list[tuple[str, int, int]]]:
    """Lines of a file; qualified names, first and last lines of its functions and classes."""
    text = path.read_text()
    spans: list[tuple[str, int, int]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                spans.append((prefix + child.name, child.lineno, child.end_lineno or child.lineno))
                walk(child, f"{prefix}{child.name}.")
            else:
                walk(child, prefix)

    walk(ast.parse(text), "")
    return text.splitlines(), spans


# ---------------------------------------------------------------------------- explanations


def check(text: str) -> None:
    """Raises ValueError, in a sentence, if an explanation names a role that there is none of."""
    found = _EXPLANATION.fullmatch(text)
    if found is None or (found[3] and found[3] not in ROLES):
        raise ValueError(
            f"expected 'OPCODE', 'OPCODE @ ROLE' or 'N x OPCODE @ ROLE' with a role of "
            f"{', '.join(ROLES)}; got {text!r}"
        )


def counted(text: str) -> int | None:
    """Number of survivors that an explanation is about; None: all."""
    found = _EXPLANATION.fullmatch(text)
    return int(found[1]) if found is not None and found[1] else None


def about(text: str, instruction: str, roles: Sequence[str]) -> bool:
    """True if an explanation, counted or not, is about an instruction with these roles."""
    found = _EXPLANATION.fullmatch(text)
    if found is None or not instruction.startswith(found[2]):
        return False
    return found[3] is None or found[3] in roles


def unexplained(survivors: Sequence[Survivor], explained: Sequence[str]) -> list[Survivor]:
    """The survivors that no explanation is about, or more than it is about."""
    left = list(survivors)
    for text in (text for text in explained if counted(text) is None):
        left = [s for s in left if not about(text, s.instruction, s.roles)]
    for text in (text for text in explained if counted(text) is not None):
        matching = [s for s in left if about(text, s.instruction, s.roles)]
        for survivor in matching[: counted(text)]:
            left.remove(survivor)
    return left
