"""Cost without a clock: counts of small kernels against figures worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from softgpu import Options, SoftGpuError, ptx
from softgpu.cost import rates, report, sass, timeline, trace
from softgpu.cost.banks import Waves, wavefronts
from softgpu.cost.profile import Card, Figures, Profile, Role, conflicts, loads, profile, roles_of
from softgpu.cost.recorder import Event, Recorder, WarpRecord
from softgpu.tensor_memory import Cells
from softgpu.tensor_queue import TensorOp
from softgpu.testing import aligned, launch

LANES = np.arange(32)
CARD = Card("a card", 20.0, 1000.0, 100)


def recorded(body: str, args: list[Any], **how: Any) -> Recorder:
    """A launch, watched."""
    recorder = Recorder()
    launch(body, args, options=Options(observer=recorder, hazards="off"), **how)
    return recorder


def total(recorder: Recorder, what: str) -> dict[str, float]:
    """Sums of a count over all warps and instructions, by kind."""
    found: dict[str, float] = {}
    for w in recorder.warps:
        for (_, kind), n in getattr(w, what).items():
            found[kind] = found.get(kind, 0) + n
    return found


# ---------------------------------------------------------------- banks


@pytest.mark.parametrize(
    ("addresses", "nbytes", "want"),
    [
        (4 * LANES, 4, (1, 1)),
        (8 * LANES, 4, (2, 1)),  # words 0, 2, 4, ...: two of each even bank
        (12 * LANES, 4, (1, 1)),  # an odd stride
        (128 * LANES, 4, (32, 1)),
        (132 * LANES, 4, (1, 1)),  # the padded twin
        (0 * LANES, 4, (1, 1)),  # one word to all
        (LANES // 4 * 4 + LANES % 4, 1, (1, 1)),  # bytes of words that lanes share
        (8 * LANES, 8, (2, 2)),
        (0 * LANES, 8, (2, 2)),  # what an H200 takes for a broadcast too
        (128 * LANES, 8, (32, 2)),
        (16 * LANES, 16, (4, 4)),
        (0 * LANES, 16, (4, 4)),
        (32 * LANES, 16, (8, 4)),
        (128 * LANES, 16, (32, 4)),
        (144 * LANES, 16, (4, 4)),
        (32 * LANES, 32, (16, 8)),  # halves of 16 bytes, each with a stride of 32
    ],
)
def test_wavefronts(addresses: np.ndarray, nbytes: int, want: tuple[int, int]) -> None:
    assert wavefronts(addresses, nbytes) == Waves(*want)


def test_wavefronts_of_some_lanes() -> None:
    """Lanes keep their quarter: 8 and 9 read beside lane 0, in another wavefront."""
    at, lanes = np.array([0, 16, 32]), np.array([0, 8, 9])
    assert wavefronts(at, 16, lanes) == Waves(2, 2)
    assert wavefronts(at[:1], 16) == Waves(1, 1)
    assert Waves(5, 2).conflicts == 3


# ---------------------------------------------------------------- kernels of our own


def transpose(stride: int) -> tuple[str, list[Any]]:
    """32 x 32 words: rows are written, columns are read, by one warp."""
    a = np.arange(1024, dtype=np.uint32)
    out = aligned(1024, np.uint32)
    source = aligned(1024, np.uint32)
    source[...] = a
    body = f"""
    mov.u32 %r10, %tid.x; mov.u32 %r11, smem;
    mul.wide.u32 %rd10, %r10, 4; add.s64 %rd11, %rd1, %rd10; add.s64 %rd12, %rd2, %rd10;
    mad.lo.u32 %r12, %r10, 4, %r11; mad.lo.u32 %r13, %r10, {stride}, %r11;
    """
    for i in range(32):
        body += f"ld.global.b32 %r14, [%rd11+{128 * i}]; st.shared.b32 [%r12+{stride * i}], %r14;\n"
    body += "bar.sync 0;\n"
    for i in range(32):
        body += f"ld.shared.b32 %r14, [%r13+{4 * i}]; st.global.b32 [%rd12+{128 * i}], %r14;\n"
    return body, [source, out]


@pytest.mark.parametrize(("stride", "reads"), [(128, 32 * 32), (132, 32)])
def test_a_transpose_counts_its_conflicts_and_its_padded_twin_has_none(
    stride: int, reads: int
) -> None:
    body, args = transpose(stride)
    found = recorded(body, args)
    assert (args[1].reshape(32, 32) == args[0].reshape(32, 32).T).all()
    assert total(found, "waves") == {"store": 32, "load": reads}
    assert total(found, "ideal") == {"store": 32, "load": 32}
    assert total(found, "moved") == {"load": 4096, "store": 4096}
    hot = conflicts(found, "test")
    assert len(hot) == (32 if stride == 128 else 0)
    assert all(n == 31 and "PTX line" in where for n, where in hot)
    # parameters 2, body 7 + 64 + 1 + 64, ret
    assert [sum(w.fetched.values()) for w in found.warps] == [2 + 7 + 64 + 1 + 64 + 1]


def test_results_are_the_same_and_nobody_is_told_afterwards() -> None:
    body, args = transpose(128)
    recorded(body, args)
    watched, args[1][...] = args[1].copy(), 0
    stats = launch(body, args, options=Options(hazards="off"))
    assert (args[1] == watched).all() and stats.instructions == 139


def test_sectors_count_each_once() -> None:
    """4-byte loads 32 bytes apart: a sector each; the same again moves bytes, not from memory."""
    x = aligned(512, np.uint32)
    body = """
    mov.u32 %r10, %tid.x; mul.wide.u32 %rd10, %r10, 32; add.s64 %rd11, %rd1, %rd10;
    ld.global.b32 %r11, [%rd11]; ld.global.b32 %r12, [%rd11+4];
    mul.wide.u32 %rd10, %r10, 4; add.s64 %rd11, %rd1, %rd10; st.global.b32 [%rd11+1024], %r11;
    """
    found = recorded(body, [x])
    assert total(found, "moved") == {"load": 2 * 32 * 32, "store": 128}
    assert len(found.sectors["test", "read"]) == 32
    assert len(found.sectors["test", "written"]) == 4


def test_cp_async_and_its_group() -> None:
    x = aligned(256, np.uint32)
    body = """
    mov.u32 %r10, %tid.x; mov.u32 %r11, smem; mul.wide.u32 %rd10, %r10, 16;
    add.s64 %rd11, %rd1, %rd10; mad.lo.u32 %r12, %r10, {stride}, %r11;
    cp.async.cg.shared.global [%r12], [%rd11], 16; cp.async.commit_group; cp.async.wait_group 0;
    """
    for stride, waves in ((16, 4), (128, 32)):
        found = recorded(body.format(stride=stride), [x])
        assert total(found, "waves") == {"cp.async": waves}
        assert total(found, "ideal") == {"cp.async": 4}
        assert total(found, "moved") == {"cp.async": 512}
        assert len(found.sectors["test", "read"]) == 16
        kinds = [e.kind for e in found.warps[0].history()]
        assert kinds == ["work", "launch", "work", "await", "work"]


def test_bulk_copy_counts_bytes_and_what_waits_for_it() -> None:
    x = aligned(256, np.uint32)
    body = """
    mov.u32 %r10, %tid.x; mov.u32 %r11, smem; setp.eq.u32 %p1, %r10, 0;
    @%p1 mbarrier.init.shared.b64 [%r11], 1; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r11], 1024;
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes \
[%r11+128], [%rd1], 1024, [%r11];
    WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r11], 0; @!%p2 bra WAIT;
    """
    found = recorded(body, [x])
    assert total(found, "waves") == {"arrive": 1, "fill": 8}
    assert total(found, "moved") == {"TMA load": 1024}
    assert len(found.sectors["test", "read"]) == 32
    events = found.warps[0].history()
    phase = [e.keys for e in events if e.kind in ("signal", "launch") and e.keys[0][0] != "bar"]
    assert len(phase) == 2 and phase[0] == phase[1] and phase[0][0][2] == 0
    assert [e.keys for e in events if e.kind == "await"][-1] == phase[0]


WGMMA = """
    mov.u32 %r10, smem; mov.b64 %rd20, {a}; mov.b64 %rd21, {b}; setp.eq.s32 %p2, %r10, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 {{{d}}}, {left}, %rd21, %p2, 1, 1;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""


@pytest.mark.parametrize(("n", "from_shared"), [(64, True), (16, True), (64, False)])
def test_wgmma_cycles_and_operands(n: int, from_shared: bool) -> None:
    """64 x n x 32 products at 4096 a cycle; A is 64 rows of 32 bytes, B is n."""
    d = ", ".join(f"%r{100 + i}" for i in range(n // 2))
    left = "%rd20" if from_shared else "{%r80, %r81, %r82, %r83}"
    a, b = (at >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32 for at in (1024, 1024 + 8192))
    found = recorded(WGMMA.format(n=n, d=d, left=left, a=a, b=b), [], block=128)
    assert sum(sum(w.tensor.values()) for w in found.warps) == n / 2
    assert total(found, "waves") == {"operands": ((64 if from_shared else 0) + n) * 32 // 128}
    group = [e.keys for e in found.warps[2].history() if e.kind in ("launch", "await")]
    assert group == [(("wgmma", 0, 2, 0),)] * 2


@pytest.mark.parametrize(
    ("m", "n", "ws", "group", "want"),
    [(128, 256, False, 1, 128), (64, 64, True, 1, 16), (64, 64, False, 1, 32),
     (128, 256, False, 2, 64), (256, 256, False, 2, 128)],
)  # fmt: skip
def test_tcgen05_cycles(m: int, n: int, ws: bool, group: int, want: float) -> None:
    cells = (Cells(0, np.arange(1), 0, 1),)
    op = TensorOp("mma", "tcgen05.mma", group, cells, True, (), (), (m, n, ws, 0))
    assert rates.tcgen05_cycles(op) == want
    assert rates.tcgen05_cycles(TensorOp("cp", "", 1, cells, False, (), (), None)) == 0


HANDOVER = """
    mov.u32 %r10, %tid.x; mov.u32 %r11, smem; setp.eq.u32 %p1, %r10, 0; setp.eq.u32 %p3, %r10, 32;
    @%p1 mbarrier.init.shared.b64 [%r11], 1; bar.sync 0;
    setp.lt.u32 %p4, %r10, 32; @%p4 bra READ;
    mov.f32 %f1, 0f3F800000;
    {work}
    @%p3 mbarrier.arrive.shared.b64 _, [%r11]; bra END;
    READ: mbarrier.try_wait.parity.shared.b64 %p2, [%r11], 0; @!%p2 bra READ;
    END:
"""


def played(instructions: int) -> timeline.Timeline:
    """Warp 0 waits for warp 1, which first executes a chain of so many instructions."""
    body = HANDOVER.format(work="add.f32 %f1, %f1, %f1;\n" * instructions)
    found = recorded(body, [], block=64)
    kernel = found.programs["test"].kernel
    return timeline.Player(kernel, found.warps, {}, 20.0).play()


def test_a_wait_counts_once_however_often_it_is_retried() -> None:
    found = recorded(HANDOVER.format(work="add.f32 %f1, %f1, %f1;\n" * 2000), [], block=64)
    code = found.programs["test"].kernel.code
    waits = [pc for pc, ins in enumerate(code) if ins.opcode.startswith("mbarrier.try_wait")]
    assert found.warps[0].fetched[waits[0]] == 1


def test_the_timeline_waits_for_the_chain_and_names_the_handover() -> None:
    short, long = played(100), played(1100)
    assert long.cycles - short.cycles == pytest.approx(1000 * timeline.ALU, rel=0.01)
    waits = [s for s in long.warps[0, 0] if s.name.startswith("wait: mbarrier")]
    assert len(waits) == 1
    assert waits[0].end - waits[0].start == pytest.approx(1100 * timeline.ALU, rel=0.05)
    assert (
        long.path[0].key[0] == "mbarrier" and long.waits()["mbarrier that a warp arrives at"] == 1
    )
    assert [s for s in long.warps[0, 1] if s.name.startswith("wait: mbarrier")] == []


def test_units_are_busy_for_what_they_are_asked() -> None:
    """Ten MMAs of 32 cycles that one warp launches together, and a copy of 2000 bytes."""
    kernel = ptx.Kernel("k", [], [ptx.Instr("wgmma", (), None, False, 1, None)] * 2)
    record = WarpRecord("k", 0, 0, 0)
    key = ("wgmma", 0, 0, 0)
    record.events = [Event("launch", 0, (key,), "tensor", 32.0, 16)] * 10
    record.events.append(Event("launch", 0, (("bulk", 0, 0, 0),), "store", 2000))
    record.events.append(Event("await", 1, (key,)))
    play = timeline.Player(kernel, [record], {}, 20.0).play()
    assert play.busy[0, "tensor"] == 320 and play.busy[0, "copy"] == 100
    assert play.busy[0, "port"] == 160
    assert play.cycles == 320 + timeline.TENSOR + timeline.HANDOVER
    assert [(s.start, s.end) for s in play.units[0, "tensor"]] == [(0, 320)]


def test_what_never_comes_is_an_error() -> None:
    kernel = ptx.Kernel("k", [], [ptx.Instr("bar", (), None, False, 1, None)])
    one, two = WarpRecord("k", 0, 0, 0), WarpRecord("k", 0, 0, 1)
    a, b = ("bar", 0, 1, 0), ("bar", 0, 2, 0)
    one.events = [Event("await", 0, (a,)), Event("signal", 0, (b,))]
    two.events = [Event("await", 0, (b,)), Event("signal", 0, (a,))]
    with pytest.raises(SoftGpuError, match=r"warps \[0, 1\] wait for what nobody completes"):
        timeline.Player(kernel, [one, two], {}, 20.0).play()


def test_late_work_is_refused() -> None:
    body, args = transpose(128)
    for options in ({"asynchronous": "late"}, {"seed": 3}):
        with pytest.raises(SoftGpuError, match="asynchronous work must land early"):
            launch(body, args, options=Options(observer=Recorder(), **options))


# ---------------------------------------------------------------- SASS


PTX = """.version 8.8
.target sm_90a
.address_size 64
.file 1 "a/one.py"
.visible .entry k()
{
    .reg .b32 %r<9>;
    .reg .pred %p<2>;
    .loc 1 1 0
    mov.u32 %r1, 0;
    LOOP:
    .loc 1 2 0
    add.u32 %r1, %r1, 1;
    .loc 1 5 0
    add.u32 %r2, %r1, 1;
    .loc 1 3 0
    setp.lt.u32 %p1, %r1, 10;
    @%p1 bra LOOP;
    .loc 1 5 0
    add.u32 %r2, %r1, 1;
    .loc 1 4 0
    ret;
}
"""
SASS = """
.text.k:
	//## File "a/one.py", line 1
        /*0000*/                   MOV R1, RZ ;
.L_x_0:
	//## File "a/one.py", line 2
        /*0010*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0020*/                   IADD3.X R3, R1, 0x1, RZ ;
	//## File "a/one.py", line 3
        /*0030*/                   ISETP.LT.AND P1, PT, R1, 0xa, PT ;
        /*0040*/              @P1  BRA `(.L_x_0) ;
	//## File "a/one.py", line 5
        /*0050*/                   VIADD R2, R1, 0x1 ;
.L_x_1:
	//## File "a/one.py", line 4
        /*0060*/                   NOP ;
        /*0070*/                   EXIT ;
"""


def test_blocks_of_sass_run_as_often_as_their_lines() -> None:
    """Line 5 runs 10 and 1 times in two places; kept is the one behind the loop, for the mean."""
    kernel = ptx.parse(PTX).kernels["k"]
    blocks = sass.parse(SASS)["k"]
    code = [[opcode for opcode, _ in b.code] for b in blocks if b.code]
    assert code == [["MOV"], ["IADD3", "IADD3", "ISETP", "BRA"], ["VIADD"], ["EXIT"]]
    assert blocks[1].code[0][1] == ("one.py", 2)
    executed = {0: 1.0, 1: 10.0, 2: 10.0, 3: 10.0, 4: 10.0, 5: 1.0, 6: 1.0}
    estimate = sass.Estimate(kernel, blocks)
    assert estimate.times(executed) == [1, 10, 5.5, 1]
    # two copies of line 5: one in the loop, whose lines are clear; the other gets what is left
    twice = SASS.replace(
        "        /*0020*/                   IADD3.X",
        '	//## File "a/one.py", line 5\n        /*0020*/                   IADD3.X',
    )
    estimate = sass.Estimate(kernel, sass.parse(twice)["k"])
    assert estimate.times(executed) == [1, 10, 1, 1]
    assert estimate.opcodes(executed) == {
        "MOV": 1, "IADD3": 20, "ISETP": 10, "BRA": 10, "VIADD": 1, "EXIT": 1
    }  # fmt: skip


# ---------------------------------------------------------------- roles, units, words


def test_roles_are_warps_that_run_the_same_code() -> None:
    warps = [WarpRecord("k", 0, 0, i) for i in range(5)]
    for w, pcs in zip(warps, ({0: 9}, {1: 9, 2: 9}, {1: 9, 2: 8}, {0: 9}, {3: 1}), strict=True):
        w.fetched.update(pcs)
    assert roles_of(warps) == [(0, 3), (1, 2), (4,)]


def test_two_records_give_a_tile_and_the_rest() -> None:
    """A loop of n turns with one conflicted store each."""
    body = """
    mov.u32 %r10, %tid.x; mov.u32 %r11, smem; mad.lo.u32 %r12, %r10, 128, %r11; mov.u32 %r13, 0;
    LOOP: st.shared.b32 [%r12], %r13; add.u32 %r13, %r13, 1; setp.lt.u32 %p1, %r13, {n};
    @%p1 bra LOOP;
    """
    few, many = (recorded(body.format(n=n), [], grid=2) for n in (3, 7))
    found = profile(few, many, (3, 7), None)
    assert found.tile.issued == 4 and found.fixed.issued == 5 and found.ctas == 1
    assert found.tile.waves == {"store": 32} and found.tile.conflicts == {"store": 31}
    assert found.fixed.wavefronts() == 0
    whole = found.whole(10, 2)
    assert whole["issued instructions"] == 50 and whole["bank conflicts"] == 310
    assert whole["shared memory, stores"] == 320
    once = profile(few, None, (0, 0), None)
    assert once.tile.issued == 17 and once.tile.waves == {"store": 96}
    assert [str(role) for role in found.roles] == ["no steady code, warp 0"]
    with pytest.raises(ValueError, match="no kernel was launched"):
        profile(Recorder(), None, (0, 0), None)


FIGURES = Figures(
    400.0, {"FFMA": 300.0, "MUFU": 20.0, "LDS": 80.0}, {"load": 100.0, "fill": 50.0,
    "operands": 30.0, "shuffle": 7.0}, {"load": 9.0}, {"TMA load": 6400.0}, 64.0, (4000.0, 200.0)
)  # fmt: skip


def test_units_and_what_bounds() -> None:
    found = {x.unit: x for x in loads(FIGURES, 90, CARD)}
    assert found["memory"].cycles == 210 and found["memory"].share == 1
    assert found["shared memory"].cycles == 187 and found["issue"].cycles == 100
    assert found["tensor cores"].cycles == 64 and found["special functions"].cycles == 40
    assert next(iter(found)) == "memory" and FIGURES.lsu == 137


def test_the_report_says_what_is_predicted() -> None:
    roles = (
        Role("softmax", (0, 1, 2, 5), FIGURES),
        Role("idle", (3,), Figures(0, {}, {}, {}, {}, 0)),
    )

    def text(architecture: int) -> str:
        p = Profile("k", architecture, (6, 14), roles, FIGURES, FIGURES, 1)
        return report.text("v", p, CARD, 300.0, {"named barrier": 2.0}, [(14.0, "x.py:5")], True)

    hopper, blackwell = text(90), text(100)
    assert report.PREDICTED in blackwell and "predicted" not in hopper
    assert "\npredicted: bound by memory" in blackwell and "\npredicted: modelled time" in blackwell
    assert "bound by memory: 210 cycles, then shared memory (89 % of that)" in hopper
    assert "modelled time 300 cycles, 0.30 us at 1000 MHz: 70 % of it the bound" in hopper
    assert "softmax, warps 0-2, 5" in hopper and "idle" not in hopper
    assert "2.0 named barrier" in hopper and "14 at x.py:5" in hopper and "not modelled" in hopper
    assert "softmax, warps 0-2, 5: FFMA 300, LDS 80, MUFU 20" in hopper
    whole = Profile("k", 90, (0, 0), roles, FIGURES, FIGURES, 1)
    found = report.verdict(whole, CARD, 300.0, {})
    assert found[1:] == [
        "modelled time of the first cluster 300 cycles, 0.30 us at 1000 MHz",
        "handovers on its critical path: none",
    ]
    lines = report.comparison(["a", "b"], [{"x": 2.0, "y": 0.0}, {"x": 3.0, "y": 0.0}]).splitlines()
    assert [line.split() for line in lines] == [["a", "b", "ratio"], ["x", "2", "3", "1.50"]]


# ---------------------------------------------------------------- the trace


def check_trace(data: dict[str, Any]) -> None:
    """What ui.perfetto.dev asks of Chrome's JSON: fields and types by phase; slices nest."""
    json.loads(json.dumps(data))
    assert data["displayTimeUnit"] in ("ms", "ns")
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = {}
    named = set()
    for e in data["traceEvents"]:
        assert (
            isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        )
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name") and isinstance(
                e["args"]["name"], str
            )
            named.add((e["name"], e["pid"], e["tid"]))
            continue
        assert e["ph"] == "X" and e["ts"] >= 0 and e["dur"] >= 0 and isinstance(e["args"], dict)
        tracks.setdefault((e["pid"], e["tid"]), []).append(e)
    for (pid, tid), slices in tracks.items():
        assert ("thread_name", pid, tid) in named and ("process_name", pid, 0) in named
        ends = 0.0
        for e in sorted(slices, key=lambda e: e["ts"]):
            assert e["ts"] >= ends - 1e-6, f"{e} overlaps what is before it"
            ends = e["ts"] + e["dur"]


def test_trace_of_two_warps() -> None:
    play = played(100)
    roles = tuple(Role(f"role {i}", (i,), FIGURES) for i in range(2))
    data = trace.events(play, Profile("k", 90, (0, 0), roles, FIGURES, FIGURES, 1), CARD, "v")
    check_trace(data)
    names = [e["args"]["name"] for e in data["traceEvents"] if e["ph"] == "M"]
    b200 = trace.events(play, Profile("k", 100, (0, 0), roles, FIGURES, FIGURES, 1), CARD, "v")
    said = [e["args"]["name"] for e in b200["traceEvents"] if e["ph"] == "M"]
    assert all(x.endswith(("predicted, modelled, not measured", "measured)")) for x in said)
    assert all("predicted" in x for x in said)
    assert names == [
        "CTA 0 of v: time is modelled, not measured", "role 0, warp 0 (modelled, not measured)",
        "role 1, warp 1 (modelled, not measured)",
    ]  # fmt: skip
    wait = next(e for e in data["traceEvents"] if e["name"].startswith("wait: mbarrier"))
    assert wait["tid"] == 0 and wait["cat"] == "wait"
    assert wait["dur"] == pytest.approx(wait["args"]["cycles"] / CARD.mhz, rel=0.01)
    overlapping = {**data, "traceEvents": [*data["traceEvents"], {**wait, "ts": wait["ts"] + 0.01}]}
    with pytest.raises(AssertionError, match="overlaps"):
        check_trace(overlapping)
