"""The hazard checker and tensor memory, rule by rule: see ``tests.support.hazards``.

All programs have four warps, a matrix A of 128 x 32 and a B of 8 x 32 bytes in shared memory, and
tensor memory that warp 0 allocates before ``START`` ends and frees in ``END``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from softgpu import Hazard, Options
from softgpu.errors import TensorMemoryError
from softgpu.hazard import tensor_reports
from tests.support import hazards
from tests.support.hazards import GAP, wait

A_AT, B_AT = 2048, 6144  # addresses in shared memory: smem + 1024, smem + 5120
DESCRIPTOR = 1 << 46 | 128 >> 4 << 32  # version, SBO of 8 rows without swizzle
A = DESCRIPTOR | 2048 >> 4 << 16 | A_AT >> 4
B = DESCRIPTOR | 128 >> 4 << 16 | B_AT >> 4
F8, E5M2 = 1 << 4, 1 << 4 | 1 << 7 | 1 << 10  # f32 = e4m3 e4m3, e5m2 e5m2
F16 = E5M2  # f32 = bf16 bf16 for kind::f16


def idesc(kind: int, n: int = 8, m: int = 128) -> int:
    return kind | n >> 3 << 17 | m >> 4 << 24


# %r99 thread, %r98 warp, %r97 lane; %p50 thread 0, %p51 warp 0, %p52 the other warps,
# %p53 thread 32, %p54 thread 1; %r1 three mbarriers; %r5 A, %r7 B in shared memory; %r6 16 bytes of
# A; %r40 tensor memory, %r41 instruction descriptor; %rd20, %rd21 descriptors of A, B; %p2 true
HEAD = f"""
mov.u32 %r99, %tid.x; shr.u32 %r98, %r99, 5; and.b32 %r97, %r99, 31; mov.u32 %r1, smem;
setp.eq.s32 %p50, %r99, 0; setp.eq.s32 %p51, %r98, 0; setp.ne.s32 %p52, %r98, 0;
setp.eq.s32 %p53, %r99, 32; setp.eq.s32 %p54, %r99, 1; setp.eq.s32 %p2, %r1, %r1;
add.s32 %r5, %r1, 1024; add.s32 %r7, %r1, 5120; mad.lo.s32 %r6, %r99, 16, %r5;
mov.b64 %rd20, {A}; mov.b64 %rd21, {B}; mov.b32 %r41, {idesc(F8)};
@%p50 mbarrier.init.shared.b64 [%r1], 1; @%p50 mbarrier.init.shared.b64 [%r1+8], 128;
@%p50 mbarrier.init.shared.b64 [%r1+16], 1;
@%p50 fence.mbarrier_init.release.cluster;
st.shared.v4.b32 [%r6], {{0, 0, 0, 0}}; st.shared.v4.b32 [%r6+2048], {{0, 0, 0, 0}};
st.shared.v4.b32 [%r6+4096], {{0, 0, 0, 0}}; fence.proxy.async.shared::cta;
"""
ALLOC = "@%p51 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1+64], 64;\n"
START = HEAD + ALLOC + "bar.sync 0; ld.shared.b32 %r40, [%r1+64];\n"
DEALLOC = "@%p51 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 64;\n"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
SYNC = f"{BEFORE} bar.sync 0; {AFTER}"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;\n", "tcgen05.wait::st.sync.aligned;\n"
END = f"{WAIT_LD} {WAIT_ST} {SYNC} {DEALLOC}"
OUT = "{" + ", ".join(f"%r{120 + i}" for i in range(8)) + "}"
LD = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {OUT}, [%r40];\n"
ST = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r40], {0, 0, 0, 0, 0, 0, 0, 0};\n"
ST_A = ST.replace("%r40", "%r40+32")


def mma(
    d: str = "%r40", a: str = "%rd20", shape: str = "%r41", add: str = "!%p2", by: str = "%p50",
    kind: str = "f8f6f4", ws: str = "",
) -> str:  # fmt: skip
    return f"@{by} tcgen05.mma{ws}.cta_group::1.kind::{kind} [{d}], {a}, %rd21, {shape}, {add};\n"


def commit(barrier: str = "%r1", by: str = "%p50") -> str:
    return (
        f"@{by} tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
        f" [{barrier}];\n"
    )


MMA, ADD, COMMIT, WAIT = mma(), mma(add="%p2"), commit(), wait()
TS = mma(a="[%r40+32]")  # A in columns 32 to 39
WIDE = mma(shape=str(idesc(F8, 16)))  # the same address, another shape
HALF = mma(shape=str(idesc(F16)), add="%p2", kind="f16")
CP = "@{0} tcgen05.cp.cta_group::1.128x256b [{1}], %rd20;\n"
COPY, COPY_A = CP.format("%p50", "%r40"), CP.format("%p50", "%r40+32")
DONE, DONE_2 = f"{COMMIT} {WAIT} {AFTER}", f"{commit('%r1+16')} {wait('%r1+16')} {AFTER}"
LD_0, ST_0, ST_A_0 = ("@%p51 " + x for x in (LD, ST, ST_A))
LD_1, ST_1 = ("@%p52 " + x for x in (LD, ST))
BULK = """@%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+16], 256;
    @%p50 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r7], [%rd1], 256, [%r1+16];\n"""
REWRITE = "".join(f"st.shared.v4.b32 [%r6+{at}], {{0, 0, 0, 0}};\n" for at in (0, 2048, 4096))
MMA_T, LD_T, ST_T, CP_T = "tcgen05.mma", "tcgen05.ld", "tcgen05.st", "tcgen05.cp"
COMMIT_T, BULK_T = "tcgen05.commit", "cp.async.bulk"


@dataclass
class Case(hazards.Case):
    """A program for four warps of a Blackwell CTA."""

    head: str = START
    launch: dict[str, Any] = field(default_factory=lambda: {"target": "sm_100a", "block": 128})


COMPLETION = {  # T1: mma and cp are complete when a commit's phase is
    "load before the phase": Case(
        "read-before-complete", f"{MMA} {COMMIT} {GAP} {LD_0} {WAIT} {END}", f"{WAIT} {AFTER}",
        events=(MMA_T, LD_T),
    ),
    "load before the phase, by the other warp": Case(
        "read-before-complete",
        f"{MMA} {COMMIT} {wait(guard='%p52')} {GAP} {AFTER} {LD_1} {WAIT} {END}", "bar.sync 0;",
        events=(MMA_T, LD_T), some=True,
    ),
    "store before the phase": Case(
        "race", f"{MMA} {COMMIT} {GAP} {ST_0} {WAIT} {END}", f"{WAIT} {AFTER}", events=(MMA_T, ST_T)
    ),
    "A overwritten before the phase": Case(
        "overwrite-in-use",
        f"{ST_A} {WAIT_ST} {SYNC} {TS} {COMMIT} {GAP} {ST_A_0} {WAIT} {END}", f"{WAIT} {AFTER}",
        events=(MMA_T, ST_T),
    ),
    "commit before the last mma": Case(
        "read-before-complete", f"{MMA} {GAP} {WAIT} {AFTER} {LD} {DONE_2} {END}",
        f"{ADD} {COMMIT}", f"{COMMIT} {ADD}", events=(MMA_T, LD_T),
    ),
    "phase of an earlier commit": Case(
        "read-before-complete", f"{MMA} {COMMIT} {ADD} {commit('%r1+16')} {GAP} {AFTER} {LD}"
        f"{WAIT} {wait('%r1+16')} {END}", wait("%r1+16"), WAIT, events=(MMA_T, LD_T),
    ),
    "load of what a copy writes": Case(
        "read-before-complete", f"{COPY} {COMMIT} {GAP} {LD_0} {WAIT} {END}", f"{WAIT} {AFTER}",
        events=(CP_T, LD_T),
    ),
    "all datapaths of .ws": Case(
        "read-before-complete",
        f"{mma(shape=str(idesc(F8, 64, 64)), ws='.ws')} {COMMIT} {GAP} {LD_0} {WAIT} {END}",
        f"{WAIT} {AFTER}", events=(MMA_T, LD_T),
    ),
    "exit before the phase": Case(
        "exit-in-flight", f"{MMA} {COMMIT} {GAP}", f"{WAIT} {END}", "exit;",
        events=(MMA_T, "exit"),
    ),
}  # fmt: skip

ACCESSES = {  # T2: ld and st are complete after their wait, for others after a barrier
    "accumulates on a pending store": Case(
        "read-before-complete", f"{ST} {GAP} {SYNC} {ADD} {DONE} {END}", WAIT_ST,
        events=(ST_T, MMA_T),
    ),
    "A from a pending store": Case(
        "read-before-complete", f"{ST_A} {GAP} {SYNC} {TS} {DONE} {END}", WAIT_ST,
        events=(ST_T, MMA_T),
    ),
    "A without a barrier": Case(
        "read-before-complete", f"{ST_A} {WAIT_ST} {GAP} {TS} {DONE} {END}", SYNC,
        events=(ST_T, MMA_T), some=True,
    ),
    "D over a pending store": Case(
        "race", f"{ST} {GAP} {SYNC} {MMA} {DONE} {END}", WAIT_ST, events=(ST_T, MMA_T)
    ),
    "D over a pending load": Case(
        "overwrite-in-use",
        f"{ST} {WAIT_ST} {LD} {GAP} {SYNC} {MMA} {DONE} {END}", WAIT_LD, events=(LD_T, MMA_T),
    ),
    "D over a load of the other warp": Case(
        "overwrite-in-use",
        f"{ST} {WAIT_ST} {SYNC} {LD_1} {WAIT_LD} {GAP} {MMA} {DONE} {END}", SYNC,
        events=(LD_T, MMA_T), some=True,
    ),
    "a slot is used again": Case(
        "overwrite-in-use",
        f"{MMA} {COMMIT} {WAIT} {AFTER} {LD} {WAIT_LD} {BEFORE} bar.warp.sync -1;"
        f"mbarrier.arrive.shared.b64 _, [%r1+8]; {GAP} {AFTER} {MMA} {DONE_2} {END}",
        wait("%r1+8"), events=(LD_T, MMA_T), some=True,
    ),
    "a copy over a pending load": Case(
        "overwrite-in-use",
        f"{ST} {WAIT_ST} {LD} {GAP} {SYNC} {COPY} {DONE} {END}", WAIT_LD, events=(LD_T, CP_T),
    ),
    "a store stands for the load before it": Case(
        "overwrite-in-use",
        f"{ST} {WAIT_ST} {LD} {GAP} {WAIT_ST} {SYNC} {MMA} {DONE} {END}", ST, ST_A,
        events=(LD_T, MMA_T),
    ),
}  # fmt: skip

PIPELINES = {  # T3 to T5: what follows each other in order without a wait
    "another shape": Case(
        "unordered-mma", f"{MMA} {GAP} {WIDE} {DONE_2} {END}", DONE, events=(MMA_T, MMA_T)
    ),
    "overlapping accumulators": Case(
        "unordered-mma", f"{MMA} {GAP} {mma(d='%r40+4')} {DONE_2} {END}", DONE,
        events=(MMA_T, MMA_T),
    ),
    "another warp": Case(
        "unordered-mma",
        f"{MMA} {COMMIT} bar.sync 0; {GAP} {mma(add='%p2', by='%p53')}"
        f"{commit('%r1+16', '%p53')} {WAIT} {wait('%r1+16')} {END}",
        f"{WAIT} {AFTER}", events=(MMA_T, MMA_T),
    ),
    "D becomes A": Case(
        "unordered-mma", f"{mma(d='%r40+32')} {GAP} {TS} {DONE_2} {END}", DONE,
        events=(MMA_T, MMA_T),
    ),
    "a copy over D": Case(
        "unordered-mma", f"{MMA} {GAP} {COPY} {DONE_2} {END}", DONE, events=(MMA_T, CP_T)
    ),
    "D over a copy": Case(
        "unordered-cp", f"{COPY} {GAP} {ADD} {DONE_2} {END}", DONE, events=(CP_T, MMA_T)
    ),
    "a copy over a copy": Case(
        "unordered-cp", f"{COPY} {GAP} {COPY} {DONE_2} {END}", DONE, events=(CP_T, CP_T)
    ),
    "A over an A that no product has read": Case(
        "unordered-cp", f"{COPY_A} {GAP} {COPY_A} {DONE_2} {END}", TS, events=(CP_T, CP_T)
    ),
    "A copied by another warp": Case(
        "unordered-cp",
        f"{CP.format('%p53', '%r40+32')} {commit(by='%p53')} bar.sync 0; {GAP} {TS} {DONE_2} {WAIT}"
        f"{END}", f"{WAIT} {AFTER}", events=(CP_T, MMA_T),
    ),
    "another kind": Case(
        "mixed-kind", f"{MMA} {GAP} {HALF} {DONE_2} {END}", DONE, events=(MMA_T, MMA_T),
        options={"rules": frozenset({"mixed-kind"})},
    ),
}  # fmt: skip

OPERANDS = {  # T6: operands in shared memory
    "without a proxy fence": Case(
        "missing-proxy-fence", f"st.shared.v4.b32 [%r6], {{1, 1, 1, 1}}; {GAP} bar.sync 0; {MMA}"
        f"{DONE} {END}", "fence.proxy.async.shared::cta;", events=("st.shared", MMA_T),
    ),
    "before the copy has landed": Case(
        "read-before-complete", f"{BULK} {GAP} {MMA} {DONE} {wait('%r1+16')} {END}",
        wait("%r1+16"), events=(BULK_T, MMA_T),
    ),
    "overwritten before the phase": Case(
        "overwrite-in-use", f"{MMA} {COMMIT} {GAP} @%p51 st.shared.v4.b32 [%r6], {{1, 1, 1, 1}};"
        f"{WAIT} {END}", WAIT, events=(MMA_T, "st.shared"),
    ),
    "overwritten by a copy before the phase": Case(
        "overwrite-in-use", f"{MMA} {COMMIT} {GAP} {BULK} {wait('%r1+16')} {WAIT} {END}", WAIT,
        events=(MMA_T, BULK_T),
    ),
    "a copy's source overwritten": Case(
        "overwrite-in-use", f"{COPY} {COMMIT} {GAP} @%p51 st.shared.v4.b32 [%r6], {{1, 1, 1, 1}};"
        f"{WAIT} {END}", WAIT, events=(CP_T, "st.shared"),
    ),
    "a commit tells what its thread knew": Case(
        "race", f"{BULK} {wait('%r1+16', guard='%p52')} {MMA} {COMMIT} {GAP}"
        f"fence.proxy.async; @%p53 st.shared.b32 [%r7], 1; {WAIT} {wait('%r1+16')} {END}", WAIT,
        events=(BULK_T, "st.shared"), some=True,
    ),
    "the same bytes in two formats": Case(
        "operand-format", f"{MMA} {GAP} {DONE_2} {END}", ADD,
        mma(shape=str(idesc(E5M2)), add="%p2"), events=(MMA_T, MMA_T),
    ),
    "bytes that were written again": Case(
        "operand-format", f"{MMA} {DONE} bar.sync 0; {GAP} fence.proxy.async; bar.sync 0;"
        f"{mma(shape=str(idesc(E5M2)))} {DONE_2} {END}", REWRITE, events=(MMA_T, MMA_T),
    ),
}  # fmt: skip

# Warp 0's lanes read a word each, of which thread 32 overwrites lane 5's
READ = "@%p51 mad.lo.s32 %r91, %r97, 4, %r7; @%p51 ld.shared.b32 %r92, [%r91+1024];\n"
FREE = f"@%p50 mbarrier.arrive.shared.b64 _, [%r1+16]; {wait('%r1+16')}"
OVERWRITE = "@%p53 st.shared.b32 [%r7+1044], 0;\n"

COMMITS = {  # T7
    "by another lane": Case(
        "commit-tracks-nothing", f"{MMA} {GAP} {WAIT} {AFTER} {LD} {DONE_2} {END}", COMMIT,
        commit(by="%p54"), events=(MMA_T, COMMIT_T),
    ),
    "by another warp": Case(
        "commit-tracks-nothing", f"{MMA} bar.sync 0; {GAP} {WAIT} {AFTER} {LD} {DONE_2} {END}",
        COMMIT, commit(by="%p53"), events=(MMA_T, COMMIT_T),
    ),
    "hands on no store of its thread": Case(
        "race", f"{MMA} @%p50 st.shared.b32 [%r1+128], 1; {COMMIT} {WAIT} {GAP}"
        f"ld.shared.b32 %r10, [%r1+128]; {END}", "bar.sync 0;", events=("st.shared", "ld.shared"),
    ),
    "frees no word that the issuer's lanes have read": Case(
        "overwrite-in-use", f"{READ} {MMA} {COMMIT} {GAP} {WAIT} {OVERWRITE} {END}",
        f"bar.warp.sync -1; {FREE}", events=("ld.shared", "st.shared"),
    ),
    "nor does its arrival before the warp's barrier": Case(
        "overwrite-in-use", f"{READ} {MMA} {COMMIT} {GAP} {WAIT} {OVERWRITE} {END}",
        f"bar.warp.sync -1; {FREE}", FREE, events=("ld.shared", "st.shared"),
    ),
    "hands on what has been stored to tensor memory": Case(
        "race", f"{ST_0} {GAP} {mma('%r40+16')} {COMMIT} {WAIT} {AFTER} {mma(by='%p53')}"
        f"{commit('%r1+16', '%p53')} {wait('%r1+16')} {AFTER} {END}", "@%p51 " + WAIT_ST,
        events=(ST_T, MMA_T),
    ),
}  # fmt: skip

FENCES = {  # T8
    "after a commit's phase": Case(
        "tcgen05-fence", f"{MMA} {COMMIT} {WAIT} {GAP} {LD} {END}", AFTER, events=(MMA_T, LD_T)
    ),
    "before the stores are handed on": Case(
        "tcgen05-fence", f"{ST_A} {WAIT_ST} {GAP} bar.sync 0; {AFTER} {TS} {DONE} {END}", BEFORE,
        events=(ST_T, MMA_T),
    ),
    "too early": Case(
        "tcgen05-fence", f"{ST_A} {GAP} bar.sync 0; {AFTER} {TS} {DONE} {END}",
        f"{WAIT_ST} {BEFORE}", f"{BEFORE} {WAIT_ST}", events=(ST_T, MMA_T),
    ),
    "after the stores are taken over": Case(
        "tcgen05-fence", f"{ST_A} {WAIT_ST} {BEFORE} bar.sync 0; {GAP} {TS} {DONE} {END}", AFTER,
        events=(ST_T, MMA_T),
    ),
    "before the loads are handed on": Case(
        "tcgen05-fence",
        f"{ST} {WAIT_ST} {LD} {WAIT_LD} {GAP} bar.sync 0; {AFTER} {MMA} {DONE} {END}", BEFORE,
        events=("tcgen05", MMA_T),
    ),
    "before the deallocation": Case(
        "tcgen05-fence", f"{ST} {WAIT_ST} {GAP} bar.sync 0; {AFTER} {DEALLOC}", BEFORE,
        events=(ST_T, "tcgen05.dealloc"),
    ),
}  # fmt: skip

ALLOCATION = {  # T9, T12
    "allocation without a barrier": Case(
        "race", f"{HEAD} {ALLOC} mov.b32 %r40, 0; {GAP} {ST_1} {WAIT_ST} {SYNC} {DEALLOC}",
        "bar.sync 0;", events=("tcgen05.alloc", ST_T), some=True, head="",
    ),
    "dealloc before the phase": Case(
        "early-dealloc", f"{MMA} {COMMIT} {GAP} {DEALLOC} {WAIT}", f"{WAIT} {AFTER}",
        events=(MMA_T, "tcgen05.dealloc"),
    ),
    "dealloc before the other warp has loaded": Case(
        "early-dealloc", f"{ST} {WAIT_ST} {SYNC} {LD_1} {WAIT_LD} {GAP} {DEALLOC}", SYNC,
        events=(LD_T, "tcgen05.dealloc"), some=True,
    ),
    "dealloc before the other warp's store is complete": Case(
        "early-dealloc", f"{ST_1} {GAP} {SYNC} {DEALLOC}", WAIT_ST,
        events=(ST_T, "tcgen05.dealloc"),
    ),
    "load of nothing": Case("uninitialised", f"{GAP} {LD} {END}", ST, events=(LD_T,)),
    "load of a column of which nothing is written": Case(
        "uninitialised", f"{mma(shape=str(idesc(F8, m=64)))} {DONE} {GAP} {END}", LD,
        LD.replace("%r40]", "%r40+4]"), events=(LD_T,),
    ),
    "accumulates on nothing": Case(
        "uninitialised", f"{GAP} {DONE} {END}", MMA, ADD, events=(MMA_T,)
    ),
    "A of nothing": Case("uninitialised", f"{GAP} {TS} {DONE} {END}", COPY_A, events=(MMA_T,)),
    "what an earlier allocation held": Case(
        "uninitialised",
        f"{ST} {WAIT_ST} {SYNC} {DEALLOC} {ALLOC} bar.sync 0; {GAP} {LD} {END}", ST,
        events=(LD_T,),
    ),
}  # fmt: skip

CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("completion", COMPLETION), ("accesses", ACCESSES), ("pipelines", PIPELINES),
        ("operands", OPERANDS), ("commits", COMMITS), ("fences", FENCES),
        ("allocation", ALLOCATION),
    )
    for name, case in cases.items()
}  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_the_broken_program_is_reported(case: Case) -> None:
    case.check_broken()


@every_case
def test_the_correct_twin_is_clean(case: Case) -> None:
    case.check_correct()


def test_the_suite_covers_every_kind() -> None:
    assert set(tensor_reports.WHAT) == {case.kind for case in CASES.values()} - {
        "missing-proxy-fence", "exit-in-flight",
    }  # fmt: skip


# ---- rules that can be switched, limits, words ---------------------------------------------------
@pytest.mark.parametrize(
    ("case", "rule"),
    [
        (FENCES["after a commit's phase"], "tcgen05-fence"),
        (FENCES["before the stores are handed on"], "tcgen05-fence"),
        (OPERANDS["the same bytes in two formats"], "operand-format"),
    ],
)
def test_a_rule_is_switched_off(case: Case, rule: str) -> None:
    options = Options(hazards="raise")
    assert rule in options.rules
    case.run(case.wrong, replace(options, rules=options.rules - {rule}))


def test_mixed_kinds_are_allowed_unless_asked_for() -> None:
    case = replace(PIPELINES["another kind"], options={"rules": frozenset({"tcgen05-fence"})})
    assert "mixed-kind" not in Options().rules
    case.run(case.wrong, Options(hazards="raise"))
    with pytest.raises(ValueError, match="rules: expected one of tcgen05-fence, operand-format,"):
        Options(rules=frozenset({"mixed"}))


def test_one_batch_may_be_committed_twice() -> None:
    text = f"{MMA} {COMMIT} {commit('%r1+16')} {WAIT} {wait('%r1+16')} {AFTER} {LD} {END}"
    Case("", GAP, "").run(text, Options(hazards="raise"))


def test_a_phase_publishes_its_own_commit_and_no_later_one() -> None:
    """Two commits on their way to one mbarrier; whoever saw only the first knows only its MMAs."""
    late = Options(hazards="raise", asynchronous="late")
    body = f"{MMA} {COMMIT} {ADD} {COMMIT} {WAIT} {GAP} {AFTER} {LD_0} {wait(parity='1')} {END}"
    Case("", body, "").run(wait(parity="1"), late)
    with pytest.raises(Hazard, match="read-before-complete"):
        Case("", body, "").run("", late)


@pytest.mark.parametrize(
    "text",
    {
        "A, then D": f"{COPY_A} {TS} {mma(d='%r40+32')} {DONE}",
        "A, then a copy": f"{COPY_A} {TS} {COPY_A} {DONE}",
        "a copy, then A": f"{COPY_A} {TS} {DONE}",
        "one accumulator": f"{MMA} {ADD} {mma(add='%p2', by='%p54')} {commit(by='%p54')} {DONE_2}"
        f"{wait()}",
        "a store, then a load and a store": f"{ST} {LD} {ST}",
        "stores of the issuing warp": f"{ST_0} @%p51 {WAIT_ST} {MMA} {DONE}",
    }.values(),
)
def test_what_needs_nothing_between(text: str) -> None:
    """Implicit pipelines of one warp, and what a warp has waited for itself."""
    for mode in ("early", "late"):
        options = Options(hazards="raise", asynchronous=mode, rules=frozenset({"tcgen05-fence"}))
        Case("", f"{GAP} {END}", "").run(text, options)


def test_a_commit_hands_on_that_columns_are_allocated() -> None:
    text = f"{HEAD} bar.sync 0; {ALLOC} mov.b32 %r40, 0; {MMA} {DONE} {LD} {END}"
    for seed in (None, 1, 2):
        Case("", GAP, "", head="").run(text, Options(hazards="raise", seed=seed))


def test_a_second_commit_beside_another_warps_mma() -> None:
    other = mma("%r40+16", by="%p53")
    text = f"{MMA} {COMMIT} {other} bar.sync 0; {commit('%r1+16')} bar.sync 0; {commit(by='%p53')}"
    text += f"{wait(parity='1')} {AFTER} {END}"
    Case("", GAP, "").run(text, Options(hazards="raise"))


def test_a_report_names_cells_and_what_is_missing() -> None:
    """Layout F leaves out 16 of every 32 lanes."""
    case = Case("", f"{GAP} {LD_0.replace('%r40]', '%r40+32]')} {END}", "")
    texts = {
        "": "no tcgen05.commit of its thread has followed",
        COMMIT: "when a tcgen05.commit arrives at mbarrier at CTA 0, offset 0",
    }
    for then, note in texts.items():
        with pytest.raises(Hazard) as caught:
            case.run(
                f"{ST_A} {WAIT_ST} {SYNC} {mma('%r40+32', shape=str(idesc(F8, m=64)))} {then}",
                Options(hazards="raise"),
            )
        assert "lanes 0-15, block (0, 0, 0)" in caught.value.place
        assert caught.value.place.startswith("tensor memory, columns 32-39, ")
        assert note in str(caught.value) and "issued by lane 0" in str(caught.value)


def test_a_warp_that_forgets_to_elect() -> None:
    with pytest.raises(TensorMemoryError, match=r"more than 16 threads of a CTA .*elect\.sync"):
        Case("", GAP, "").run(mma(by="%p51"), Options(hazards="raise"))


def test_off_reports_nothing() -> None:
    for case in (COMPLETION["load before the phase"], FENCES["too early"]):
        assert case.run(case.wrong, Options(hazards="off")).hazards == []
