"""Mutation of kernels: take one synchronisation instruction away and see who notices.

``sites`` lists the instructions, ``without`` gives the program that skips one of them, and
``study`` runs every mutant until a seed kills it: by a hazard, a fault, a deadlock, or a wrong
result.  A survivor is either an instruction that is not needed, or a hole in the checker or in the
workload; the caller explains which.

``edited`` and ``planted`` go further: they change the PTX text of chosen instructions (another
immediate, another address, an instruction more), for tests that plant a certain bug; ``matching``
finds the instructions by what they are and by their source line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .decode import Program, decode
from .errors import SoftGpuError
from .loader import LoadedKernel, using
from .options import Options
from .ptx import Instr, Kernel, parse

OLD = "<old>"  # in a replacement text: the statement that stood there

_FAMILIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("wait", ("mbarrier.try_wait", "mbarrier.test_wait", "wgmma.wait_group", "cp.async.wait",
              "cp.async.bulk.wait_group", "griddepcontrol.wait", "barrier.cluster.wait",
              "tcgen05.wait::ld", "tcgen05.wait::st")),
    ("arrive", ("mbarrier.arrive", "barrier.cluster.arrive", "bar.arrive", "barrier.arrive",
                "mbarrier.expect_tx", "griddepcontrol.launch_dependents",
                "cp.async.mbarrier.arrive")),
    ("fence", ("fence", "membar", "wgmma.fence", "tcgen05.fence::before_thread_sync",
               "tcgen05.fence::after_thread_sync")),
    ("commit", ("wgmma.commit_group", "cp.async.commit_group", "cp.async.bulk.commit_group",
                "tcgen05.commit")),
    ("allocation", ("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")),
    ("barrier", ("bar.sync", "barrier.sync", "bar.warp.sync", "barrier.warp.sync", "bar.cta.sync",
                 "barrier.cta.sync")),
)  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One synchronisation instruction of a kernel.

    Attributes:
        source: ``file.py:12``.
        path: of that file, as the PTX states it.
    """

    pc: int
    family: str
    source: str
    ptx_line: int
    text: str
    path: str = ""


@dataclass(frozen=True)
class Outcome:
    """Fate of the mutant without ``site``.

    Attributes:
        killed: whether any seed noticed.
        seed: the first that did, or how many were tried.
        how: kind of hazard or error, ``wrong result``, or empty.
        report: the whole message.
    """

    site: Site
    killed: bool
    seed: int
    how: str
    report: str


def sites(program: Program) -> list[Site]:
    """All waits, arrives, fences, commits and barriers, in program order.

    Of tensor memory's allocation the instructions that end it: without tcgen05.alloc there would be
    nothing to synchronise.
    """
    kernel, out = program.kernel, []
    for ins in kernel.code:
        for family, prefixes in _FAMILIES:
            if any(ins.opcode == p or ins.opcode.startswith(p + ".") for p in prefixes) or (
                family == "wait" and ins.opcode.startswith("cp.async.wait")
            ):
                where = kernel.source_of(ins), ins.line, ins.text, kernel.path_of(ins)
                out.append(Site(ins.pc, family, *where))
                break
    return out


def without(program: Program, pc: int) -> Program:
    """The program with one instruction that does nothing; a wait succeeds at once."""
    kind, _, guard, negated = program.code[pc]
    ins = program.kernel.code[pc]
    done = -1
    if ins.parts[0] == "mbarrier" and ins.parts[1] in ("try_wait", "test_wait"):
        done = program.predicates[getattr(ins.args[0], "name", "")]

    def skip(w: Any, m: Any) -> None:
        if done >= 0:
            np.copyto(w.store[0][done], True, where=m)

    code = list(program.code)
    code[pc] = (kind, skip, guard, negated)
    return dataclasses.replace(program, code=code)


def matching(program: Program, opcode: str, source: str | None = None) -> list[Instr]:
    """Instructions, in program order, whose opcode is ``opcode`` or continues it with a dot.

    Args:
        source: ``file.py:12`` to take only those of that line.
    """
    kernel = program.kernel
    return [
        ins
        for ins in kernel.code
        if (ins.opcode == opcode or ins.opcode.startswith(opcode + "."))
        and (source is None or kernel.source_of(ins) == source)
    ]


def edited(kernel: LoadedKernel, entry: str, changes: Mapping[int, str]) -> Program:
    """``entry`` decoded from its PTX with some statements rewritten.

    Args:
        changes: pc -> PTX statements in place of that one; ``OLD`` in it stands for the old
            statement, an empty text drops it.  They may declare registers inside braces.

    Raises:
        ValueError: an instruction is not found in the PTX text.
        PtxSyntaxError: the new text cannot be parsed.
    """
    original = kernel.program(entry)
    lines = kernel.ptx_path.read_text().split("\n")
    for pc, text in changes.items():
        _rewrite(lines, original.kernel, pc, text)
    module = parse("\n".join(lines))
    program = decode(module.kernels[entry], module)
    program.globals, program.shared_map = original.globals, original.shared_map
    return program


def _rewrite(lines: list[str], kernel: Kernel, pc: int, text: str) -> None:
    """Replaces one statement in ``lines``; the number of lines stays."""
    ins = kernel.code[pc]
    statement = r"(?:@!?\S+\s+)?" + re.escape(ins.opcode) + r"(?![\w.:])[^;]*;"
    found = re.search(statement, lines[ins.line - 1])
    if found is None:
        raise ValueError(f"pc {pc}: {ins.opcode} does not stand on PTX line {ins.line} alone")
    old, new = found.group(0), text.replace(OLD, found.group(0))
    if new and not new.rstrip().endswith((";", "}")):
        new += ";"
    lines[ins.line - 1] = lines[ins.line - 1].replace(old, new, 1)


@contextmanager
def planted(kernel: LoadedKernel, entry: str, changes: Mapping[int, str]) -> Iterator[None]:
    """Makes ``kernel`` run with ``edited(kernel, entry, changes)``."""
    original = kernel.program(entry)
    kernel.replace_program(entry, edited(kernel, entry, changes))
    try:
        yield
    finally:
        kernel.replace_program(entry, original)


@contextmanager
def mutant(kernel: LoadedKernel, entry: str, pc: int) -> Iterator[None]:
    """Makes ``kernel`` run without the instruction at ``pc`` of ``entry``."""
    original = kernel.program(entry)
    kernel.replace_program(entry, without(original, pc))
    try:
        yield
    finally:
        kernel.replace_program(entry, original)


def schedule(seed: int, hazards: str = "raise") -> Options:
    """Options of one adversarial run: landing mode and order follow from the seed."""
    mode = ("random", "late", "early")[seed % 3]
    return Options(asynchronous=mode, seed=seed, hazards=hazards)


def study(
    kernel: LoadedKernel,
    entry: str,
    run: Callable[[], bool],
    seeds: int | Callable[[Site], int] = 10,
    chosen: list[Site] | None = None,
) -> Iterator[Outcome]:
    """Runs the mutant of every site; yields what became of it.

    Args:
        kernel, entry: the loaded object and the kernel in it that is mutated.
        run: performs the workload with ``kernel`` and says whether the result is right.
        seeds: adversarial schedules to try before a mutant counts as a survivor, of all sites or
            of each.
        chosen: sites to study, all if None.
    """
    before = kernel.options
    try:
        for site in sites(kernel.program(entry)) if chosen is None else chosen:
            with mutant(kernel, entry, site.pc):
                yield _one(kernel, site, run, seeds if isinstance(seeds, int) else seeds(site))
    finally:
        kernel.options = before


def _one(kernel: LoadedKernel, site: Site, run: Callable[[], bool], seeds: int) -> Outcome:
    for seed in range(seeds):
        kernel.options = schedule(seed)
        try:
            with using(kernel.options):
                right = run()
            if not right:
                return Outcome(site, True, seed, "wrong result", "")
        except SoftGpuError as error:
            how = getattr(error, "kind", type(error).__name__)
            return Outcome(site, True, seed, how, str(error))
    return Outcome(site, False, seeds, "", "")
