"""Bugs planted into a tcgen05 program (tests/support/ws_chain.py), and what is said about each.

As in ``tests.kernels.test_planted``; bugs between the two CTAs of a pair are in
``test_tcgen05_planted_pair``.
"""

from __future__ import annotations

import pytest
import torch

import softgpu
from softgpu import mutate
from tests.support.needs import needs_compiler
from tests.support.planting import Bench, Source, at, check, granted, with_operand

pytestmark = needs_compiler
SOURCE = Source("ws_chain")
TILES, ROWS, TOKENS, WIDTH, ROPE = 4, 64, 64, 256, 64
BLOCK = 64 * 128  # bytes from one block of 128 channels of a tile to the next

line = SOURCE.line
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


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Built for sm_100a; the oracle is a float64 matrix product, exact for these small integers."""
    kernel = SOURCE.build(tmp_path_factory.mktemp(SOURCE.name))
    generator, f8 = torch.Generator().manual_seed(3), torch.float8_e4m3fn

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-4, 5, shape, generator=generator).double()

    q, q_rope = integers(1, ROWS, WIDTH), integers(1, ROWS, ROPE)
    k, k_rope = integers(TILES, TOKENS, WIDTH), integers(TILES, TOKENS, ROPE)
    p = ((q @ k.mT + q_rope @ k_rope.mT) / 64).float().to(f8).double()
    arguments = [x.to(f8).view(torch.uint8) if x.shape[2] == WIDTH else x.bfloat16()
                 for x in (q, q_rope, k, k_rope)]  # fmt: skip
    return Bench(kernel, arguments, (p @ k).sum(0).float())


modes = pytest.mark.parametrize("mode", ["early", "late"])


def test_every_schedule_gives_one_clean_result(chain: Bench) -> None:
    chain.check_schedules()


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
    found = chain.reports({wait.pc: granted(wait)}, range(8))
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
