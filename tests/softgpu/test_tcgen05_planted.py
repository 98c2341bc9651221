"""Bugs planted into a tcgen05 program (tests/support/ws_chain.py), and what is said about each.

As in ``test_planted``: a test changes instructions of the built program's PTX, found by what they
are and by the text of their source line, and expects the report.  A bug in the life of a CTA's peer
is in ``test_tcgen05_hazards_pairs``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import softgpu
from codegen import artifacts
from softgpu import mutate
from softgpu.ptx import Instr, Reg
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
SOURCE = Path(__file__).parents[1] / "support" / "ws_chain.py"
TILES, ROWS, TOKENS, WIDTH, ROPE = 4, 64, 64, 256, 64
BLOCK = 64 * 128  # bytes from one block of 128 channels of a tile to the next
SCHEDULES = [(mode, seed) for mode in ("early", "late", "random") for seed in (None, *range(1, 7))]


def line(text: str, after: str = "") -> str:
    """``ws_chain.py:12``: the first line with ``text``, behind the first line with ``after``."""
    seen = not after
    for number, content in enumerate(SOURCE.read_text().splitlines(), 1):
        if seen and text in content:
            return f"{SOURCE.name}:{number}"
        seen = seen or after in content
    raise AssertionError(f"no line with {text!r} behind {after!r}")


LOAD_K = line("cute.copy(atom, dg[None, i]")
QK, QK_ROPE = line("prim.tcgen05_mma_ws(content"), line("prim.tcgen05_mma_ws(rope")
PK = line("prim.tcgen05_mma_ws(weighed")
S_WAIT, S_COMMIT = line("cta.bars + S_EMPTY, (i"), line("tcgen05_commit(cta.bars + S_FULL)")
LOAD_S = line("prim.tcgen05_ld(", "def weigh")
STORE_O, STORE_O_WAIT = line("prim.tcgen05_st("), line("Tcgen05Wait.STORE")
STORE_P = line("chunk = cutlass.Vector")  # the compiler gives the store the line of its value
LOAD_O = line("prim.tcgen05_ld(", "def finish")
ALLOC, PERMIT = line("alloc_tmem("), line("relinquish_tmem")
LAST_BARRIER, DEALLOC = line("cute.arch.sync_threads()", "self.finish"), line("dealloc_tmem(")


@dataclass
class Bench:
    """The program with one input, and the oracle's result for it."""

    kernel: softgpu.LoadedKernel
    arguments: list[torch.Tensor]
    want: torch.Tensor

    @property
    def entry(self) -> str:
        return self.kernel.entry

    def all(self, opcode: str, source: str) -> list[Instr]:
        found = mutate.matching(self.kernel.program(self.entry), opcode, source)
        assert found, f"no {opcode} at {source}"
        return found

    def result(self, mode: str, seed: int | None, hazards: str = "raise") -> torch.Tensor:
        self.kernel.options = softgpu.Options(hazards=hazards, asynchronous=mode, seed=seed)
        out = torch.full_like(self.want, torch.nan)
        self.kernel(*self.arguments, out)
        return out

    def right(self) -> bool:
        """A run with the kernel's present options, for ``mutate.study``."""
        out = torch.full_like(self.want, torch.nan)
        self.kernel(*self.arguments, out)
        return torch.allclose(out, self.want, rtol=1e-5, atol=1e-5)

    def broken(
        self, changes: dict[int, str], mode: str = "early", seed: int | None = None
    ) -> softgpu.SoftGpuError:
        with (
            mutate.planted(self.kernel, self.entry, changes),
            pytest.raises(softgpu.SoftGpuError) as error,
        ):
            self.result(mode, seed)
        return error.value

    def reports(self, changes: dict[int, str], seeds: Iterable[int]) -> set[tuple[str, ...]]:
        """(kind, source lines) of the hazards under several schedules; each finds something."""
        errors = [self.broken(changes, "random", seed) for seed in seeds]
        hazards = [e for e in errors if isinstance(e, softgpu.Hazard)]
        return {(e.kind, *(event.source for event in e.events)) for e in hazards}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Built for sm_100a; the oracle is a float64 matrix product, exact for these small integers."""
    directory = tmp_path_factory.mktemp("ws_chain")
    subprocess.run(
        [sys.executable, "-m", "tests.support.ws_chain", str(directory)], check=True, timeout=300,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(artifacts.ROOT), "CUTE_DSL_ARCH": "sm_100a"},
    )  # fmt: skip
    kernel = softgpu.load(directory / "ws_chain.o", directory / "ws_chain.ptx", "ws_chain")
    generator, f8 = torch.Generator().manual_seed(3), torch.float8_e4m3fn

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    q, q_rope = integers(1, ROWS, WIDTH), integers(1, ROWS, ROPE)
    k, k_rope = integers(TILES, TOKENS, WIDTH), integers(TILES, TOKENS, ROPE)
    p = ((q @ k.mT + q_rope @ k_rope.mT) / 64).float().to(f8).double()
    arguments = [x.to(f8).view(torch.uint8) if x.shape[2] == WIDTH else x.bfloat16()
                 for x in (q, q_rope, k, k_rope)]  # fmt: skip
    return Bench(kernel, arguments, (p @ k).sum(0).float())


def check(error: softgpu.SoftGpuError, kind: str, *sources: str) -> None:
    """``error`` is a hazard of that kind between instructions of these source lines."""
    assert isinstance(error, softgpu.Hazard), error
    assert (error.kind, [e.source for e in error.events]) == (kind, list(sources)), error
    for event in error.events:
        assert f"{event.source} (PTX line {event.ptx_line})" in str(error)


def at(error: softgpu.SoftGpuError, kind: type[Exception], source: str, text: str) -> None:
    """``error`` is a fault of that kind, at this source line, and says ``text``."""
    assert type(error) is kind and source in str(error) and text in str(error), error


def with_operand(mma: Instr, number: int, change: str) -> str:
    """The mma with its register operand ``number`` changed: ``change`` makes ``n`` from it."""
    operand = mma.args[number]
    assert isinstance(operand, Reg)
    width = "b64" if operand.name.startswith("%rd") else "b32"
    text, count = re.subn(re.escape(operand.name) + r"(?!\d)", "n", mma.text)
    assert count == 1, mma.text
    return f"{{ .reg .{width} n; {change.format(operand.name)} {text}; }}"


modes = pytest.mark.parametrize("mode", ["early", "late"])


def test_every_schedule_gives_one_clean_result(chain: Bench) -> None:
    assert len(SCHEDULES) > 20
    for mode, seed in SCHEDULES:
        assert torch.equal(chain.result(mode, seed), chain.want), (mode, seed)


# ---- the order of instructions -------------------------------------------------------------------
@modes
def test_missing_wait_for_stores(chain: Bench, mode: str) -> None:
    [wait] = chain.all("tcgen05.wait::st", STORE_O_WAIT)
    error = chain.broken({wait.pc: ""}, mode)
    check(error, "read-before-complete", STORE_O, PK)
    assert "tensor memory, columns 0-31, lanes 0-31, block (0, 0, 0)" in str(error)
    assert "in flight until tcgen05.wait::st" in str(error)


@modes
def test_commit_before_the_last_mma(chain: Bench, mode: str) -> None:
    [commit], mma = chain.all("tcgen05.commit", S_COMMIT), chain.all("tcgen05.mma", QK_ROPE)[-1]
    error = chain.broken({commit.pc: "", mma.pc: f"{commit.text}; {mutate.OLD}"}, mode)
    check(error, "read-before-complete", QK_ROPE, LOAD_S)
    assert "tensor memory, columns 128-159, lanes 0-31" in str(error)


def test_slot_of_s_used_again(chain: Bench) -> None:
    [wait] = chain.all("mbarrier.try_wait", S_WAIT)
    [done] = [x for x in wait.args[:1] if isinstance(x, Reg)]
    changes = {wait.pc: f"setp.eq.u32 {done.name.split('@')[0]}, 0, 0"}
    found = chain.reports(changes, range(8))
    assert ("overwrite-in-use", LOAD_S, QK) in found, found


@modes
def test_missing_proxy_fence_on_p(chain: Bench, mode: str) -> None:
    fences = mutate.matching(chain.kernel.program(chain.entry), "fence.proxy.async")
    error = chain.broken({ins.pc: "" for ins in fences}, mode)
    check(error, "missing-proxy-fence", STORE_P, PK)


def test_deallocated_too_early(chain: Bench) -> None:
    [barrier] = chain.all("bar.sync", LAST_BARRIER)
    found = chain.reports({barrier.pc: ""}, range(8))
    assert ("early-dealloc", LOAD_O, DEALLOC) in found, found


# ---- operands ------------------------------------------------------------------------------------
@modes
@pytest.mark.parametrize(
    ("number", "change"),
    [
        (2, f"add.s64 n, {{}}, {BLOCK >> 4 << 16};"),  # twice the distance of blocks (LBO)
        (2, f"add.s64 n, {{}}, {BLOCK >> 4};"),  # a block further
        (3, f"xor.b32 n, {{}}, {1 << 16};"),  # B not transposed
    ],
    ids=["LBO of V", "V a block further", "transpose bit of V"],
)
def test_wrong_descriptor_of_v(chain: Bench, number: int, change: str, mode: str) -> None:
    """It reads the next stage too, of which the issuer does not know that it has been loaded."""
    mmas = chain.all("tcgen05.mma", PK)
    error = chain.broken({i.pc: with_operand(i, number, change) for i in mmas}, mode)
    if isinstance(error, softgpu.Hazard) and error.kind == "uninitialised":
        check(error, "uninitialised", PK)
    else:
        check(error, "read-before-complete", LOAD_K, PK)


@modes
def test_instruction_descriptor_of_the_other_kind(chain: Bench, mode: str) -> None:
    """bf16's codes mean e5m2 for kind::f8f6f4; the second GEMM takes the same bytes as e4m3."""
    mmas = [i for i in chain.all("tcgen05.mma", QK)]
    other = "xor.b32 n, {}, " + str(1 << 7 | 1 << 10) + ";"
    changes = {i.pc: with_operand(i, 3, other) for i in mmas}
    error = chain.broken(changes, mode)
    check(error, "operand-format", QK, PK)
    assert "operand as e5m2" in str(error) and "operand as e4m3" in str(error)


@modes
def test_lane_halves_swapped(chain: Bench, mode: str) -> None:
    [load] = chain.all("tcgen05.ld", LOAD_S)
    where = load.text.rpartition("[")[2].rstrip("]; ").partition("+")[0]
    swapped = load.text.replace(f"[{where}", "[n")
    error = chain.broken(
        {load.pc: f"{{ .reg .b32 n; xor.b32 n, {where}, {64 << 16}; {swapped}; }}"}, mode
    )
    at(error, softgpu.errors.TensorMemoryError, LOAD_S, "warp 0 reaches lanes 0 to 31")


@modes
def test_no_permit(chain: Bench, mode: str) -> None:
    [alloc] = chain.all("tcgen05.alloc", ALLOC)
    [permit] = chain.all("tcgen05.relinquish_alloc_permit", PERMIT)
    error = chain.broken({alloc.pc: f"{permit.text}; {mutate.OLD}", permit.pc: ""}, mode)
    at(error, softgpu.errors.TensorMemoryError, ALLOC, "after tcgen05.relinquish_alloc_permit")


# ---- every synchronisation -----------------------------------------------------------------------
def test_every_instruction_that_can_be_removed_is_missed(chain: Bench) -> None:
    """The permit is a hint for other CTAs on the multiprocessor: nothing here wants columns."""
    study = mutate.study(chain.kernel, chain.entry, chain.right, 3)
    outcomes = {o.site.pc: o for o in study}
    families = {o.site.family for o in outcomes.values()}
    assert families == {"wait", "arrive", "fence", "commit", "allocation", "barrier"}
    survivors = [o.site.text.split(".cta")[0] for o in outcomes.values() if not o.killed]
    assert survivors == ["tcgen05.relinquish_alloc_permit"]
