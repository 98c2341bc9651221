"""Bugs planted into shipped decode kernels, and what the software GPU says about each.

A test changes one synchronisation of a built kernel's PTX (drops it, moves it, gives it another
operand) and expects the report: its kind, the Python source line of both events, and where.  The
instruction to change is found by what it is and by its source line, and source lines are found by
their text, so that the tests survive edits of the kernels.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import dsl_kernels
import softgpu
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from softgpu import mutate
from softgpu.ptx import Imm, Instr, Reg, Vec
from tests.support.needs import needs_compiler
from tests.support.planting import error_of, granted, line_of

pytestmark = needs_compiler
SOURCES = Path(dsl_kernels.__file__).parent
ETAP, PAGED, DUAL = (
    "decode_etap_r16_p64_obf16_sm90a",
    "decode_etap_r16_p16_obf16_sm90a",
    "decode_dual_wg_r64_p64_obf16_sm90a",
)
TILES = {ETAP: (380,), PAGED: (140,), DUAL: (200,)}  # tokens: two laps of etap's ring of 4 stages


def line(file: str, text: str, after: str = "") -> str:
    """``file.py:12``: the first line with ``text``, behind the first line with ``after``."""
    return line_of(source(file), text, after)


def source(file: str) -> Path:
    """A file of SM90's kernels; SM100's may have the same name."""
    [path] = (path for path in SOURCES.rglob(file) if "sm100" not in path.parts)
    return path


@dataclass
class Bench:
    """A loaded kernel with a small decode for it."""

    kernel: softgpu.LoadedKernel
    job: selfcheck.DecodeJob
    entry: str = field(init=False)

    def __post_init__(self) -> None:
        self.entry = self.kernel.entry

    @property
    def code(self) -> list[Instr]:
        return self.kernel.program(self.entry).kernel.code

    def all(self, opcode: str, source: str | None = None) -> list[Instr]:
        found = mutate.matching(self.kernel.program(self.entry), opcode, source)
        assert found, f"no {opcode} at {source}"
        return found

    def one(self, opcode: str, source: str | None = None) -> Instr:
        return self.all(opcode, source)[0]

    def run(self, mode: str = "early", seed: int | None = None, hazards: str = "raise") -> bool:
        """True if the result of one decode is right."""
        self.kernel.options = softgpu.Options(hazards=hazards, asynchronous=mode, seed=seed)
        return self.job.errors(self.job.run(self.kernel)).right

    def broken(
        self, changes: dict[int, str], mode: str = "early", seed: int | None = None
    ) -> softgpu.SoftGpuError:
        """The error that the kernel reports with these changes."""
        return error_of(self.kernel, self.entry, changes, lambda: self.run(mode, seed))

    def unwaited(
        self, ins: Instr, mode: str = "early", seed: int | None = None
    ) -> softgpu.SoftGpuError:
        """The error that it reports without the mbarrier wait ``ins``."""
        return self.broken({ins.pc: granted(ins)}, mode, seed)


@functools.cache
def _bench(name: str) -> Bench:
    spec = VariantSpec.from_name(name)
    artifact = variants.find_or_build(spec, need_library=False)
    torch.manual_seed(0)
    loaded = variants.load(artifact, "cpu")
    assert isinstance(loaded, softgpu.LoadedKernel)
    return Bench(loaded, selfcheck.DecodeJob(spec, TILES[name], 1))


@pytest.fixture
def etap() -> Bench:
    return _bench(ETAP)


@pytest.fixture
def paged() -> Bench:
    return _bench(PAGED)


@pytest.fixture
def dual() -> Bench:
    return _bench(DUAL)


KV_CONTENT = line("paged_tma.py", "cute.copy(cache.source[x].atom, source, at[x]")
KV_SCALES = line("fp8_per_token.py", "cute.copy(bulk, src, dst")
ACQUIRE = line("paged_tma.py", "k_pipe.producer_acquire(kst)")
GEMM = line("wgmma.py", "cute.gemm(atom, acc,")
K_WAIT = line("swap_ab.py", "k_pipe.consumer_wait(kst)")
READ_SCALE = line("swap_ab.py", "sigma = [s_ks[", "def scales_of")
READ_V = line("transpose.py", "cute.copy(ldsm,")
STORE_P = line("swap_ab.py", "cute.copy(stsm,", "def store_p")
PV_WAIT = line("transposed.py", "warpgroup.wait_group(0)", "def pv_block")
FREE_P = line("transposed.py", "P_RING.arrive_empty(", "def pv_block")
modes = pytest.mark.parametrize("mode", ["early", "late"])


def check(error: softgpu.SoftGpuError, kind: str, first: str, second: str) -> None:
    """``error`` is a hazard of that kind between instructions of these two source lines."""
    assert isinstance(error, softgpu.Hazard), error
    assert (error.kind, [e.source for e in error.events]) == (kind, [first, second]), error
    for event in error.events:  # and the text shows both
        assert f"{event.source} (PTX line {event.ptx_line})" in str(error)
        assert event.text.split()[0] in str(error)


@pytest.mark.parametrize("name", [ETAP, PAGED, DUAL])
def test_the_kernels_themselves_are_clean(name: str) -> None:
    bench = _bench(name)
    for mode, seed in (("early", None), ("late", None), ("random", 1), ("late", 2)):
        assert bench.run(mode, seed), (mode, seed)


@pytest.mark.parametrize("name", [ETAP, DUAL])
def test_waits_have_their_own_source_line(name: str) -> None:
    """Inside inline assembly the compiler counts lines on; the reports must not."""
    bench = _bench(name)
    for ins in bench.all("mbarrier.try_wait"):
        file, _, number = bench.kernel.program(bench.entry).kernel.source_of(ins).partition(":")
        text = source(file).read_text().splitlines()[int(number) - 1]
        assert re.search(r"_wait\(|_acquire\(|\.wait_(full|empty)\(", text), (
            f"{file}:{number}: {text}"
        )


@modes
def test_missing_full_barrier_wait(etap: Bench, mode: str) -> None:
    error = etap.unwaited(etap.one("mbarrier.try_wait", K_WAIT), mode)
    check(error, "read-before-complete", KV_CONTENT, GEMM)
    assert "completes phase 0 of mbarrier" in str(error)


def test_missing_empty_barrier_wait(etap: Bench) -> None:
    wait = etap.one("mbarrier.try_wait", ACQUIRE)
    check(etap.unwaited(wait), "race", KV_CONTENT, KV_CONTENT)  # nobody had read it yet
    found = set()
    for seed in range(12):
        error = etap.unwaited(wait, "early", seed)
        assert isinstance(error, softgpu.Hazard) and error.events[1].source == KV_CONTENT
        assert error.events[0].source in (KV_CONTENT, READ_V, GEMM)
        found.add(error.kind)
    assert found == {"race", "overwrite-in-use"}


def test_missing_empty_barrier_wait_with_late_copies(etap: Bench) -> None:
    error = etap.unwaited(etap.one("mbarrier.try_wait", ACQUIRE), "late")
    assert isinstance(error, softgpu.BarrierError)
    assert "1 more arrivals than pending (0 of 1) in phase 0" in str(error)
    assert f"at {ACQUIRE} (PTX line" in str(error) and "block (0, 0, 0), warp 0" in str(error)


def _expecting(bench: Bench, extra: int, mode: str) -> softgpu.SoftGpuError:
    """The error of a kernel that expects ``extra`` bytes too many of each K tile."""
    arrive = bench.one("mbarrier.arrive.expect_tx", ACQUIRE)
    where, _, count = arrive.text.rpartition(", ")
    [constant] = [i for i in bench.all("mov.b32") if i.args[0] == Reg(count)]
    assert isinstance(constant.args[1], Imm)
    return bench.broken({arrive.pc: f"{where}, {constant.args[1].bits + extra}"}, mode)


def test_too_few_bytes_expected(etap: Bench) -> None:
    """The scales are forgotten: read too early, or on their way when the phase completes."""
    scales = -4 * 64
    error = _expecting(etap, scales, "early")
    check(error, "read-before-complete", KV_SCALES, READ_SCALE)
    error = _expecting(etap, scales, "late")
    check(error, "wrong-tx-count", ACQUIRE, KV_SCALES)
    assert "while 256 bytes of copies" in str(error) and "mbarrier at CTA 0" in error.place


@modes
def test_too_many_bytes_expected(etap: Bench, mode: str) -> None:
    error = _expecting(etap, 256, mode)
    assert isinstance(error, softgpu.Deadlock)
    waiting = [x for x in str(error).splitlines() if f"{K_WAIT} (PTX line" in x]
    assert len(waiting) == 4 and all("pending 0 of 1, tx 256" in x for x in waiting)


def _with_count(bench: Bench, extra: int, mode: str) -> softgpu.SoftGpuError:
    """The error of a kernel whose K stages wait for ``extra`` more readers than there are."""
    create = line("loader.py", "return pipeline.PipelineTmaAsync.create(")  # Q's ring, then K's
    inits = bench.all("mbarrier.init", create)
    changes, last = {}, inits[-1].text.rpartition(", ")[2]
    for ins in inits:
        where, _, count = ins.text.rpartition(", ")
        if count != last:  # the full barriers come first
            continue
        changes[ins.pc] = f"{{ .reg .b32 n; add.s32 n, {count}, {extra}; {where}, n; }}"
    return bench.broken(changes, mode)


@modes
def test_arrival_count_too_small(etap: Bench, mode: str) -> None:
    check(_with_count(etap, -1, mode), "overwrite-in-use", READ_V, KV_CONTENT)


@modes
def test_arrival_count_too_large(etap: Bench, mode: str) -> None:
    error = _with_count(etap, 1, mode)
    assert isinstance(error, softgpu.Deadlock)
    [producer] = [x for x in str(error).splitlines() if f"{ACQUIRE} (PTX line" in x]
    assert "warp 0" in producer and "in phase 0, pending 1 of 13, tx 0" in producer


@modes
def test_missing_proxy_fence_before_wgmma_reads_p(etap: Bench, mode: str) -> None:
    source = line("swap_ab.py", "fence_proxy(")
    error = etap.broken({etap.one("fence.proxy.async", source).pc: ""}, mode)
    check(error, "missing-proxy-fence", STORE_P, GEMM)


@modes
def test_missing_proxy_fence_before_wgmma_reads_transposed_v(dual: Bench, mode: str) -> None:
    source = line("dual_wg.py", "fence_proxy(", "def announce")
    error = dual.broken({i.pc: "" for i in dual.all("fence.proxy.async", source)}, mode)
    check(error, "missing-proxy-fence", line("dual_wg.py", "cute.copy(stsm,"), GEMM)


@modes
def test_one_lane_arrives_before_its_warp(etap: Bench, mode: str) -> None:
    """The factors that four lanes store, handed over by the first without a ``bar.warp.sync``."""
    after = line("swap_ab.py", "cute.arch.sync_warp()", "flags_of(st)[wwarp, buf]")
    error = etap.broken({etap.one("bar.warp.sync", after).pc: ""}, mode)
    assert isinstance(error, softgpu.Hazard) and error.kind in ("race", "missing-proxy-fence")
    assert error.events[0].source.startswith("swap_ab.py")


@modes
def test_missing_wgmma_wait(etap: Bench, mode: str) -> None:
    """Without the wait its own thread reads the product too early, before anyone reuses P."""
    error = etap.broken({etap.all("wgmma.wait_group", PV_WAIT)[-1].pc: ""}, mode)
    check(error, "register-in-flight", GEMM, line("transposed.py", "+ tmp[v] * beta["))


@modes
def test_wgmma_wait_only_after_p_is_free(etap: Bench, mode: str) -> None:
    wait, free = etap.all("wgmma.wait_group", PV_WAIT)[-1], etap.one("mbarrier.arrive", FREE_P)
    branch = next(i for i in reversed(etap.code[: free.pc]) if i.pred is not None)
    assert branch.pred is not None and branch.target is not None and branch.target > free.pc
    where = free.text.split(",")[1]
    arrive = f"@!{branch.pred.name} mbarrier.arrive.shared.b64 _, {where}, 1;"
    error = etap.broken({wait.pc: f"{arrive} {mutate.OLD}", free.pc: ""}, mode)
    check(error, "overwrite-in-use", GEMM, STORE_P)
    assert "in flight until a wgmma.wait_group covers it" in str(error)


@modes
def test_a_registers_overwritten_in_flight(etap: Bench, mode: str) -> None:
    mma = next(i for i in etap.all("wgmma.mma_async") if isinstance(i.args[1], Vec))
    assert isinstance(mma.args[1], Vec) and isinstance(mma.args[1].items[0], Reg)
    a = mma.args[1].items[0].name
    wait = next(i for i in etap.all("wgmma.wait_group", PV_WAIT) if i.pc > mma.pc)
    error = etap.broken({wait.pc: f"mov.b32 {a}, 0; {mutate.OLD}"}, mode)
    check(error, "register-in-flight", GEMM, PV_WAIT)
    assert isinstance(error, softgpu.Hazard) and error.place == f"registers {a}"


@modes
def test_missing_wgmma_fence(dual: Bench, mode: str) -> None:
    """The third product of a tile reuses the accumulators that the FFMAs have just read."""
    wait = dual.one("wgmma.wait_group", line("dual_wg.py", "wait_group(1 if d < 3 else 0)"))
    fence = next(i for i in dual.all("wgmma.fence") if i.pc > wait.pc)
    error = dual.broken({fence.pc: ""}, mode)
    ffma = line("dual_wg.py", "acc_O[d][v] = acc_O[d][v] * factors[2 + i] + tmp")
    check(error, "missing-wgmma-fence", ffma, GEMM)


@modes
def test_wait_in_a_branch_of_one_warp(etap: Bench, mode: str) -> None:
    """The first wait of P.V runs twice in one warp; in all warps that is right."""
    wait = etap.one("wgmma.wait_group", PV_WAIT)

    def planted(warps: str) -> str:
        vote = f"mov.u32 w, %tid.x; shr.u32 w, w, 5; setp.{warps} p, w, 8;"
        return f"{{ .reg .pred p; .reg .b32 w; {vote} @p {wait.text}; }} {mutate.OLD}"

    with mutate.planted(etap.kernel, etap.entry, {wait.pc: planted("ge.u32")}):
        assert etap.run(mode)  # warps 8 to 15: both P.V warpgroups
    error = etap.broken({wait.pc: planted("eq.u32")}, mode)
    check(error, "warpgroup-divergence", PV_WAIT, PV_WAIT)
    assert isinstance(error, softgpu.Hazard)
    one, other = sorted(e.warp for e in error.events)
    assert one == 8 and other in (9, 10, 11)


@modes
def test_wait_for_another_stage(etap: Bench, mode: str) -> None:
    wait = etap.one("mbarrier.try_wait", K_WAIT)
    error = etap.broken({wait.pc: wait.text.replace("]", "+8]")}, mode)
    check(error, "read-before-complete", KV_CONTENT, GEMM)


def test_read_of_another_stage(etap: Bench) -> None:
    load = etap.one("ld.shared", READ_SCALE)
    other = re.sub(r"\+(\d+)\]", lambda m: f"+{int(m[1]) + 4 * 64}]", load.text)
    assert other != load.text
    check(etap.broken({load.pc: other}), "read-before-complete", KV_SCALES, READ_SCALE)


@modes
def test_missing_barrier_between_warpgroups(dual: Bench, mode: str) -> None:
    """Each warpgroup has a barrier of its own where they should share one; all reports kept."""
    source = line("dual_wg.py", "warps_meet(Barrier.BOTH", "def finish_work_tile")
    number = "mov.u32 own, %tid.x; shr.u32 own, own, 7; add.s32 own, own, 8;"
    own = f"{{ .reg .b32 own; {number} bar.sync own, 128; }}"
    alone = {dual.one("bar.sync", source).pc: own}
    # an overwrite needs one warpgroup to overtake the other, which is up to the schedule
    with mutate.planted(dual.kernel, dual.entry, alone):
        dual.run(mode, 1 if mode == "late" else None, hazards="collect")
    stored = line("dual_wg.py", "sums[local + 8 * i, me] = mine")
    read = line("dual_wg.py", "total = sums[local + 8 * i, 0]")
    found = dual.kernel.last_stats[0].hazards
    for kind, first, second in (("overwrite-in-use", read, stored), ("race", stored, read)):
        pairs = [h for h in found if h.kind == kind]
        assert pairs, [h.kind for h in found]
        for hazard in pairs:
            check(hazard, kind, first, second)
            assert {e.warp // 4 for e in hazard.events} == {1, 2}


@modes
def test_page_id_out_of_bounds_without_the_clamp(paged: Bench, mode: str) -> None:
    table, pages = paged.job.table, paged.job.cache.scale.shape[0]
    paged.job.table = torch.where((table < 0) | (table >= pages), pages, table)
    assert paged.run(mode)
    changes = {}
    for load in paged.all("ld.global", line("work_list.py", "page = row[")):
        [low] = [i for i in paged.all("max.s32") if i.args[1] == load.args[0]]
        [high] = [i for i in paged.all("min.s32") if i.args[1] == low.args[0]]
        for ins in (low, high):
            assert isinstance(ins.args[0], Reg) and isinstance(ins.args[1], Reg)
            changes[ins.pc] = f"mov.b32 {ins.args[0].name}, {ins.args[1].name}"
    try:
        error = paged.broken(changes, mode)
    finally:
        paged.job.table = table
    assert isinstance(error, softgpu.MemoryFault)
    assert "out-of-bounds global cp.async.bulk of 64 bytes" in str(error)
    assert f"at {KV_SCALES} (PTX line" in str(error)
    assert f"float32[{pages}, 16] + {4 * 16 * pages} ({4 * 16 * pages} bytes)" in str(error)


@modes
def test_deadlock_by_phase_error(etap: Bench, mode: str) -> None:
    wait = etap.one("mbarrier.try_wait", ACQUIRE)
    head, where, parity, limit = wait.text.split(",")
    flip = f"{{ .reg .b32 other; xor.b32 other, {parity}, 1; {head},{where}, other,{limit}; }}"
    error = etap.broken({wait.pc: flip}, mode)
    assert isinstance(error, softgpu.Deadlock)
    lines = str(error).splitlines()
    [producer] = [x for x in lines if f"{ACQUIRE} (PTX line" in x]
    assert "warp 0" in producer and "to complete phase parity 0; it is in phase 0" in producer
    assert "mbarrier at CTA 0, k_bar.empty[0] (offset " in producer
    pv_wait = line("transposed.py", "k_pipe.consumer_wait(kst)", "def pv_loop")
    for source, first, last in ((K_WAIT, 4, 7), (pv_wait, 8, 15)):
        waiting = [x for x in lines if f"{source} (PTX line" in x]
        assert len(waiting) == last - first + 1
        assert all(f"warp {i} " in x for i, x in enumerate(waiting, first))


def test_deadlock_by_a_missing_arrival_names_the_ring(etap: Bench) -> None:
    """Nobody frees P: the softmax warps wait for it, and the report says for which of its slots."""
    [free] = etap.all("mbarrier.arrive", FREE_P)
    error = etap.broken({free.pc: ""})
    assert isinstance(error, softgpu.Deadlock)
    wait = line("swap_ab.py", "P_RING.wait_empty(")
    waiting = [x for x in str(error).splitlines() if f"{wait} (PTX line" in x]
    assert len(waiting) == 4
    assert all("mbarrier at CTA 0, p_bar.empty[0] (offset " in x for x in waiting)
    assert "  mbarrier at CTA 0, p_bar.empty[1] (offset " in str(error)
    first = str(error).splitlines()[0]
    assert first.endswith("kernel kernel_dsl_kernelssm90decodeDecode")


@pytest.mark.softgpu(seeds=(None, 5), asynchronous=("early", "late"))
def test_the_fixture_turns_the_check_on(etap: Bench, software_gpu: softgpu.Options) -> None:
    assert etap.run(hazards="off")
    fence = etap.one("fence.proxy.async", line("swap_ab.py", "fence_proxy("))
    with (
        mutate.planted(etap.kernel, etap.entry, {fence.pc: ""}),
        pytest.raises(softgpu.Hazard) as error,
    ):
        etap.run(hazards="off")
    check(error.value, "missing-proxy-fence", STORE_P, GEMM)
