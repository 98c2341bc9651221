"""The hazard checker, rule by rule: small programs that break one, each with a correct twin.

See ``tests.support.hazards``; tensor memory is in ``test_tcgen05_hazards.py``.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import softgpu.hazard
import softgpu.testing
from softgpu import BarrierError, Hazard, Options, SoftGpuError
from softgpu.hazard import Footprint
from softgpu.hazard.global_memory import GlobalHazards
from softgpu.machine import Machine
from softgpu.pytest_plugin import schedules
from softgpu.testing import aligned, launch
from tests.support import hazards
from tests.support.hazards import GAP, SCHEDULES, wait

# %r99 thread, %r98 warp, %r97 lane; %p50 thread 0, %p51 warp 0, %p52 the other warps;
# %r1 two mbarriers; %r2 the thread's word, %r3 its word in the other warp, %r4 its neighbour's;
# %r5 the first of the words; %r6 the thread's 16 bytes; %rd61 the thread's word of argument 0
HEAD = """
mov.u32 %r99, %tid.x; shr.u32 %r98, %r99, 5; and.b32 %r97, %r99, 31; mov.u32 %r1, smem;
setp.eq.s32 %p50, %r99, 0; setp.eq.s32 %p51, %r98, 0; setp.ne.s32 %p52, %r98, 0;
add.s32 %r5, %r1, 1024; mad.lo.s32 %r2, %r99, 4, %r5; xor.b32 %r3, %r99, 32;
mad.lo.s32 %r3, %r3, 4, %r5; xor.b32 %r4, %r99, 1; mad.lo.s32 %r4, %r4, 4, %r5;
mad.lo.s32 %r6, %r99, 16, %r5; mul.wide.u32 %rd60, %r99, 4; add.s64 %rd61, %rd1, %rd60;
"""
INIT = """
@%p50 mbarrier.init.shared.b64 [%r1], 1; @%p50 mbarrier.init.shared.b64 [%r1+8], 32;
@%p50 fence.mbarrier_init.release.cluster; bar.sync 0;
"""
EXPECT = "@%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;\n"
COPY = """@%p50 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
    [%r5], [%rd1], 256, [%r1];\n"""
CP = "cp.async.ca.shared.global [%r2], [%rd61], 4;"
STORE = "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r5], 128;"
ADD = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r5], 128;"


@dataclass
class Case(hazards.Case):
    """A program for 64 threads that begins with ``HEAD``."""

    head: str = HEAD


ST, LD = "st.shared.b32", "ld.shared.b32"
CLUSTER = "barrier.cluster.arrive; barrier.cluster.wait;\n"
REMOTE = f"""mov.u32 %r20, %cluster_ctarank; xor.b32 %r21, %r20, 1; {CLUSTER}
    mapa.shared::cluster.u32 %r22, %r2, %r21; setp.eq.s32 %p1, %r20, <rank>;
    @%p1 st.shared::cluster.b32 [%r22], %r99;\n"""

MEMORY = {
    "bar.sync": Case(
        "race", f"@%p51 {ST} [%r2], %r99; {GAP} @%p52 {LD} %r10, [%r3];", "bar.sync 0;",
        events=(ST, LD),
    ),
    "write after write": Case(
        "race", f"@%p51 {ST} [%r2], 1; {GAP} @%p52 {ST} [%r3], 2;", "bar.sync 0;",
        events=(ST, ST),
    ),
    "write after read": Case(
        "overwrite-in-use",
        f"{ST} [%r2], 1; bar.sync 0; @%p52 {LD} %r10, [%r3]; {GAP} @%p51 {ST} [%r2], 2;",
        "bar.sync 0;", events=(LD, ST),
    ),
    "named barrier": Case(
        "race", f"@%p51 {ST} [%r2], %r99; {GAP} @%p52 {LD} %r10, [%r3];",
        "@%p51 bar.arrive 1, 64; @%p52 bar.sync 1, 64;", events=(ST, LD),
    ),
    "named barrier of its own": Case(
        "race", f"@%p51 {ST} [%r2], %r99; {GAP} @%p52 {LD} %r10, [%r3];",
        "bar.sync 1, 64;", "@%p51 bar.sync 1, 32; @%p52 bar.sync 2, 32;", events=(ST, LD),
    ),
    "arrival before the wait": Case(
        "race",
        f"{INIT} @%p52 {ST} [%r2], %r99; @%p52 mbarrier.arrive.shared.b64 _, [%r1+8];"
        f"{GAP} @%p51 {LD} %r10, [%r3];",
        wait("%r1+8", guard="%p52"), events=(ST, LD),
    ),
    "store before the arrival": Case(
        "race", f"{INIT} {GAP} {wait('%r1+8', guard='%p51')} @%p52 {LD} %r10, [%r3];",
        f"@%p51 {ST} [%r2], 1; @%p51 mbarrier.arrive.shared.b64 _, [%r1+8];",
        f"@%p51 mbarrier.arrive.shared.b64 _, [%r1+8]; @%p51 {ST} [%r2], 1;", events=(ST, LD),
    ),
    "lanes of a warp": Case(
        "race", f"{ST} [%r2], %r99; {GAP} {LD} %r10, [%r4];", "bar.warp.sync -1;",
        events=(ST, LD), launch={"block": 32},
    ),
    "lanes of a warp, without the writer": Case(
        "race", f"setp.lt.s32 %p1, %r97, 16; @%p1 {ST} [%r2], 1; {GAP}"
        f"xor.b32 %r7, %r2, 64; @!%p1 {LD} %r10, [%r7];",
        "bar.warp.sync -1;", "@!%p1 bar.warp.sync 0xffff0000;", events=(ST, LD),
        launch={"block": 32},
    ),
    "uninitialised": Case(
        "uninitialised", f"{GAP} {LD} %r10, [%r2];", f"{ST} [%r2], 1;", events=(LD,)
    ),
    "uninitialised, another byte": Case(
        "uninitialised", f"st.shared.b8 [%r2], 1; {GAP} ld.shared.b16 %rs1, [%r2];",
        "st.shared.b8 [%r2+1], 1;", events=("ld.shared.b16",),
    ),
    "stmatrix to ldmatrix of another warp": Case(
        "race",
        f"@%p51 stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r6], {{%r99}}; {GAP}"
        "add.s32 %r7, %r6, -512;"
        "@%p52 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r10}, [%r7];", "bar.sync 0;",
        events=("stmatrix", "ldmatrix"),
    ),
}  # fmt: skip

COPIES = {
    "bulk copy read before its phase": Case(
        "read-before-complete", f"{INIT} {EXPECT} {COPY} {GAP} @%p51 {LD} %r10, [%r2];", wait(),
        events=("cp.async.bulk", LD),
    ),
    "a wait for the phase before": Case(
        "read-before-complete", f"{INIT} {EXPECT} {COPY} {GAP} @%p51 {LD} %r10, [%r2];", wait(),
        wait(parity="1"), events=("cp.async.bulk", LD), some=True,
    ),
    "one warp waits for the other": Case(
        "read-before-complete",
        f"{INIT} {EXPECT} {COPY} {wait(guard='%p52')} {GAP} {LD} %r10, [%r2]; {wait()}",
        "bar.sync 0;", events=("cp.async.bulk", LD), some=True,
    ),
    "stage overwritten while read": Case(
        "overwrite-in-use",
        f"{INIT} {EXPECT} {COPY} {wait()} @%p52 {LD} %r10, [%r2]; bar.warp.sync -1;"
        f"@%p52 mbarrier.arrive.shared.b64 _, [%r1+8]; {GAP} {EXPECT} {COPY} {wait(parity='1')}",
        wait("%r1+8", guard="%p52"), events=(LD, "cp.async.bulk"),
        some=True,
    ),
    "stage filled twice": Case(
        "race",
        f"{INIT} @%p52 bra END; {EXPECT} {COPY} {GAP} {EXPECT} {COPY} {wait(parity='1')} END:",
        wait(),
        events=("cp.async.bulk", "cp.async.bulk"),
    ),
    "copy over a generic write": Case(
        "missing-proxy-fence", f"{ST} [%r2], 1; {INIT} {GAP} {EXPECT} {COPY} {wait()}",
        "fence.proxy.async.shared::cta;", events=(ST, "cp.async.bulk"),
    ),
    "fence on the writer's side": Case(
        "missing-proxy-fence",
        f"@%p51 {ST} [%r2], 1; {GAP} bar.sync 0; @!%p50 bra END;"
        f"{STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        "fence.proxy.async.shared::cta;", events=(ST, "cp.async.bulk.global"),
    ),
    "fence on the reader's side": Case(
        "missing-proxy-fence",
        f"@%p51 {ST} [%r2], 1; bar.sync 0; @!%p50 bra END; {GAP}"
        f"{STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        "fence.proxy.async;", events=(ST, "cp.async.bulk.global"),
    ),
    "cp.async is generic": Case(
        "missing-proxy-fence",
        f"@%p51 {CP} cp.async.wait_all; {GAP} bar.sync 0; @!%p50 bra END;"
        f"{STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        "fence.proxy.async.shared::cta;", events=("cp.async.ca", "cp.async.bulk.global"),
    ),
    "cp.async that lands on a barrier": Case(
        "missing-proxy-fence",
        f"{INIT} @%p51 {CP} @%p51 cp.async.mbarrier.arrive.noinc.shared.b64 [%r1+8];"
        f"@!%p50 bra END; {wait('%r1+8')} {GAP}"
        f"{STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        "fence.proxy.async.shared::cta;", events=("cp.async.ca", "cp.async.bulk.global"),
    ),
    "a proxy fence of global memory": Case(
        "missing-proxy-fence", f"{ST} [%r2], 1; {INIT} {GAP} {EXPECT} {COPY} {wait()}",
        "fence.proxy.async.shared::cta;", "fence.proxy.async.global;",
        events=(ST, "cp.async.bulk"),
    ),
    "a proxy fence is no barrier": Case(
        "race",
        f"@%p52 {ST} [%r3], 1; fence.proxy.async; {GAP} @!%p50 bra END;"
        f"{STORE} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:",
        "bar.sync 0;", events=(ST, "cp.async.bulk.global"),
        some=True,
    ),
    "fence.mbarrier_init before a copy": Case(
        "mbarrier-init",
        f"@%p50 mbarrier.init.shared.b64 [%r1], 1; {GAP} bar.sync 0; {EXPECT} {COPY} {wait()}",
        "fence.mbarrier_init.release.cluster;", events=("mbarrier.init", "cp.async.bulk"),
    ),
    "barrier after mbarrier.init": Case(
        "mbarrier-init",
        "@%p50 mbarrier.init.shared.b64 [%r1+8], 32; @%p50 fence.mbarrier_init.release.cluster;"
        f"{GAP} @%p52 mbarrier.arrive.shared.b64 _, [%r1+8];",
        "bar.sync 0;", events=("mbarrier.init", "mbarrier.arrive"),
    ),
    "cp.async": Case(
        "read-before-complete",
        "cp.async.cg.shared.global [%r6], [%rd1], 16; cp.async.commit_group;"
        f"{GAP} {LD} %r10, [%r6];", "cp.async.wait_group 0;", "cp.async.wait_group 1;",
        events=("cp.async.cg", LD),
    ),
    "cp.async of another warp": Case(
        "read-before-complete",
        "@%p51 cp.async.cg.shared.global [%r6], [%rd1], 16; @%p51 cp.async.wait_all;"
        f"{GAP} add.s32 %r7, %r6, -512; @%p52 {LD} %r10, [%r7];", "bar.sync 0;",
        events=("cp.async.cg", LD),
    ),
    "bulk store reads its source": Case(
        "overwrite-in-use",
        f"@%p51 {ST} [%r2], 1; fence.proxy.async; bar.sync 0; @%p50 {STORE}"
        f"@%p50 cp.async.bulk.commit_group; {GAP} bar.sync 0; @%p52 {ST} [%r3], 2;"
        "@%p50 cp.async.bulk.wait_group.read 0;",
        "@%p50 cp.async.bulk.wait_group.read 0;", events=("cp.async.bulk.global", ST),
    ),
    "exit with a bulk store in flight": Case(
        "exit-in-flight",
        f"@%p51 {ST} [%r2], 1; fence.proxy.async; bar.sync 0; @%p50 {STORE}"
        f"@%p50 cp.async.bulk.commit_group; {GAP}",
        "@%p50 cp.async.bulk.wait_group.read 0;", events=("cp.async.bulk.global", "ret"),
    ),
    "exit with a copy on its way": Case(
        "exit-in-flight", f"{INIT} {EXPECT} {COPY} {GAP}", wait(), events=("cp.async.bulk", "ret")
    ),
    "phase complete with a copy on its way": Case(
        "wrong-tx-count",
        f"""{INIT} @%p50 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {GAP}; {COPY}
        add.s32 %r7, %r5, 256; {COPY.replace("%r5", "%r7")} {wait()} {LD} %r10, [%r2+256];""",
        "512", "256", events=("mbarrier.arrive.expect_tx", "cp.async.bulk"),
        some=True,
    ),
    "an mbarrier armed at the end": Case(
        "armed-exit", f"{INIT} {EXPECT} {GAP}", f"{COPY} {wait()}",
        events=("mbarrier.arrive.expect_tx",),
    ),
}  # fmt: skip

CLUSTERS = {
    "two arrivals at the barrier of a cluster": Case(
        "cluster-arrive-twice",
        f"barrier.cluster.arrive; {GAP} barrier.cluster.arrive; barrier.cluster.wait;",
        "barrier.cluster.wait;", events=("barrier.cluster.arrive",),
        launch={"grid": 2, "cluster": 2},
    ),
    "access to a block that may have ended": Case(
        "exit-in-flight", REMOTE.replace("<rank>", "1") + GAP, CLUSTER,
        events=("st.shared::cluster", "ret"), launch={"grid": 2, "cluster": 2, "block": 32},
    ),
    "access to a block that has ended": Case(
        "exited-block", REMOTE.replace("<rank>", "0") + GAP, CLUSTER,
        events=("ret", "st.shared::cluster"), launch={"grid": 2, "cluster": 2, "block": 32},
    ),
    "remote write, local read": Case(
        "race",
        REMOTE.replace("<rank>", "1") + f"{GAP} @!%p1 {LD} %r10, [%r2]; {CLUSTER}", CLUSTER,
        events=("st.shared::cluster", LD), launch={"grid": 2, "cluster": 2, "block": 32},
    ),
    "relaxed cluster barrier": Case(
        "race",
        REMOTE.replace("<rank>", "1") + f"{GAP} @!%p1 {LD} %r10, [%r2]; {CLUSTER}", CLUSTER,
        "barrier.cluster.arrive.relaxed; barrier.cluster.wait;",
        events=("st.shared::cluster", LD), launch={"grid": 2, "cluster": 2, "block": 32},
    ),
}  # fmt: skip
MMA = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
D, E = "{%r100, %r101, %r102, %r103}", "{%r110, %r111, %r112, %r113}"
A_AT, B_AT = 2048, 5120  # addresses in shared memory: smem + 1024, smem + 4096
DESCRIPTOR = 128 >> 4 << 16 | 256 >> 4 << 32
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT0, WAIT1 = "wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"
OPERANDS = f"""
st.shared.v4.b32 [%r6], {{0, 0, 0, 0}}; st.shared.v4.b32 [%r6+3072], {{0, 0, 0, 0}};
fence.proxy.async.shared::cta; bar.sync 0; setp.eq.s32 %p2, %r1, %r1;
mov.b64 %rd20, {DESCRIPTOR | A_AT >> 4}; mov.b64 %rd21, {DESCRIPTOR | B_AT >> 4};
mov.b32 %r80, 0; mov.b32 %r81, 0; mov.b32 %r82, 0; mov.b32 %r83, 0;
""" + "".join(f"mov.b32 %r{base + i}, 0;" for base in (100, 110) for i in range(4))
SS = f"{MMA} {D}, %rd20, %rd21, %p2, 1, 1;\n"
OTHER = f"{MMA} {E}, %rd20, %rd21, %p2, 1, 1;\n"
RS = f"{MMA} {D}, {{%r80, %r81, %r82, %r83}}, %rd21, %p2, 1, 1;\n"
HALF = f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {D}, %rd20, %rd21, %p2, 1, 1, 0, 0;\n"
TAKE = "add.f32 %f1, %f2, %f2; mov.b32 %r120, %r100;"
FOUR = {"block": 128}

WGMMA = {
    "fence before the first": Case(
        "missing-wgmma-fence", f"{OPERANDS} {GAP} {SS} {COMMIT} {WAIT0}", FENCE,
        events=("mov.b32", "wgmma"), launch=FOUR,
    ),
    "fence after an access": Case(
        "missing-wgmma-fence",
        f"{OPERANDS} {FENCE} {SS} {COMMIT} {WAIT0} mov.b32 %r101, 0; {GAP} {SS} {COMMIT} {WAIT0}",
        FENCE, events=("mov.b32", "wgmma"), launch=FOUR,
    ),
    "a chain needs no fence between": Case(
        "missing-wgmma-fence", f"{OPERANDS} {GAP} {SS} {SS} {SS} {COMMIT} {WAIT0} {TAKE}", FENCE,
        events=("mov.b32", "wgmma"), launch=FOUR,
    ),
    "fence before another shape": Case(
        "missing-wgmma-fence",
        f"{OPERANDS} {FENCE} {SS} {GAP} {HALF} {HALF} {COMMIT} {WAIT0} {TAKE}", FENCE,
        events=("wgmma", "wgmma"), launch=FOUR,
    ),
    "accumulators before the wait": Case(
        "register-in-flight", f"{OPERANDS} {FENCE} {SS} {COMMIT} {GAP} {TAKE} {WAIT0}", WAIT0,
        events=("wgmma", "mov.b32"), launch=FOUR,
    ),
    "accumulators of the newest group": Case(
        "register-in-flight",
        f"{OPERANDS} {FENCE} {OTHER} {COMMIT} {SS} {COMMIT} {GAP} {TAKE} {WAIT0}", WAIT0, WAIT1,
        events=("wgmma", "mov.b32"), launch=FOUR,
    ),
    "accumulators of an older group": Case(
        "register-in-flight",
        f"{OPERANDS} {FENCE} {SS} {COMMIT} {OTHER} {COMMIT} {GAP} {TAKE} {WAIT0}", WAIT1,
        events=("wgmma", "mov.b32"), launch=FOUR,
    ),
    "no commit": Case(
        "register-in-flight", f"{OPERANDS} {FENCE} {SS} {GAP} {WAIT0} {TAKE} {COMMIT} {WAIT0}",
        COMMIT, events=("wgmma", "mov.b32"), launch=FOUR,
    ),
    "A registers": Case(
        "register-in-flight", f"{OPERANDS} {FENCE} {RS} {COMMIT} {GAP}",
        f"{WAIT0} mov.b32 %r82, 1;", f"mov.b32 %r82, 1; {WAIT0}", events=("wgmma", "mov.b32"),
        launch=FOUR,
    ),
    "operand overwritten": Case(
        "overwrite-in-use", f"{OPERANDS} {FENCE} {SS} {COMMIT} {GAP}",
        f"{WAIT0} bar.sync 0; st.shared.v4.b32 [%r6], {{1, 1, 1, 1}};",
        f"bar.sync 0; st.shared.v4.b32 [%r6], {{1, 1, 1, 1}}; {WAIT0}",
        events=("wgmma", "st.shared"), launch=FOUR,
    ),
    "operand of the other warps": Case(
        "overwrite-in-use", f"{OPERANDS} {FENCE} {RS} {COMMIT} {WAIT0} {GAP}"
        "st.shared.v4.b32 [%r6+3072], {1, 1, 1, 1};", "bar.sync 0;",
        events=("wgmma", "st.shared"), launch=FOUR,
    ),
    "operand without a proxy fence": Case(
        "missing-proxy-fence",
        f"{OPERANDS} st.shared.v4.b32 [%r6], {{1, 1, 1, 1}}; {GAP} bar.sync 0;"
        f"{FENCE} {SS} {COMMIT} {WAIT0}", "fence.proxy.async;", events=("st.shared", "wgmma"),
        launch=FOUR,
    ),
}  # fmt: skip

OWN = "mov.u32 %r20, %ctaid.x; mul.wide.u32 %rd10, %r20, 256; add.s64 %rd61, %rd61, %rd10;"
GLOBAL = {
    "blocks": Case(
        "global-race", f"{GAP} st.global.b32 [%rd61], %r99;", OWN,
        events=("st.global", "st.global"), launch={"grid": 2},
    ),
    "write of one block, read of another": Case(
        "global-race",
        f"mov.u32 %r20, %ctaid.x; setp.eq.s32 %p1, %r20, 0; @%p1 st.global.b32 [%rd61], 1;"
        f"{GAP} @!%p1 ld.global.b32 %r10, [%rd61];", "add.s64 %rd61, %rd61, 512;",
        events=("st.global", "ld.global"), launch={"grid": 2},
    ),
    "warps of a block": Case(
        "global-race",
        f"@%p51 st.global.b32 [%rd61], 1; {GAP} @%p52 ld.global.b32 %r10, [%rd61+-128];",
        "bar.sync 0;", events=("st.global", "ld.global"),
    ),
    "read, then written by the other warp": Case(
        "global-race",
        f"@%p51 ld.global.b32 %r10, [%rd61]; {GAP} @%p52 st.global.b32 [%rd61+-128], 1;",
        "bar.sync 0;", events=("ld.global", "st.global"),
    ),
    "bulk copy of what the other warp wrote": Case(
        "global-race",
        f"{INIT} @%p52 st.global.b32 [%rd61], 1; {GAP} {EXPECT} {COPY} {wait()}",
        "fence.proxy.async; bar.sync 0;", events=("st.global", "cp.async.bulk"), order_matters=True,
    ),
    "bulk copy behind a fence of shared memory": Case(
        "global-race",
        f"{INIT} @%p52 st.global.b32 [%rd61+-128], 1; {GAP} {EXPECT} {COPY} {wait()}",
        "fence.proxy.async.global; bar.sync 0;", "fence.proxy.async.shared::cta; bar.sync 0;",
        events=("st.global", "cp.async.bulk"),
    ),
    "bulk copy behind a fence that comes before the barrier": Case(
        "global-race",
        f"{INIT} @%p52 st.global.b32 [%rd61+-128], 1; {GAP} {EXPECT} {COPY} {wait()}",
        "bar.sync 0; @%p50 fence.proxy.async.global;",
        "@%p50 fence.proxy.async.global; bar.sync 0;", events=("st.global", "cp.async.bulk"),
    ),
    "bulk copy of a store behind the fence": Case(
        "global-race",
        f"{INIT} @%p52 st.global.b32 [%rd61+-128], 1; fence.proxy.async.global; bar.sync 0;"
        f"@%p52 st.global.b32 [%rd61+-64], 2; {GAP} bar.sync 0; {EXPECT} {COPY} {wait()}",
        "fence.proxy.async;", events=("st.global", "cp.async.bulk"),
    ),
    "cp.async of what the other warp wrote": Case(
        "global-race",
        f"@%p51 st.global.b32 [%rd61], 1; {GAP}"
        "@%p52 cp.async.ca.shared.global [%r2], [%rd61+-128], 4; cp.async.wait_all;",
        "bar.sync 0;", events=("st.global", "cp.async.ca"),
    ),
    "cp.async of what another block wrote": Case(
        "global-race",
        f"mov.u32 %r20, %ctaid.x; setp.eq.s32 %p1, %r20, 0; @%p1 st.global.b32 [%rd61], 1;"
        f"{GAP} @!%p1 {CP} cp.async.wait_all;", "add.s64 %rd61, %rd61, 512;",
        events=("st.global", "cp.async.ca"), launch={"grid": 2},
    ),
    "cp.async of the narrow half that is read": Case(
        "global-race",
        f"mov.b32 %r21, 4; @%p51 st.global.b32 [%rd61], 1; {GAP} and.b32 %r22, %r2, -8;"
        "and.b64 %rd62, %rd61, -8; setp.ne.s32 %p2, %r97, 0; and.pred %p2, %p52, !%p2;"
        "@%p2 cp.async.ca.shared.global [%r22], [%rd62+-128], 8, %r21; cp.async.wait_all;",
        "mov.b32 %r21, 0;", events=("st.global", "cp.async.ca"),
    ),
}  # fmt: skip
CASES = {
    f"{family}: {name}": case
    for family, cases in (
        ("memory", MEMORY), ("copies", COPIES), ("clusters", CLUSTERS), ("wgmma", WGMMA),
        ("global", GLOBAL),
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


def test_a_race_names_the_blocks_of_both_sides() -> None:
    case = GLOBAL["blocks"]
    with pytest.raises(Hazard) as caught:
        case.run(case.wrong, Options(hazards="raise"))
    assert sorted(event.block for event in caught.value.events) == [(0, 0, 0), (1, 0, 0)]


def test_the_suite_covers_every_kind() -> None:
    """Each kind that the checker can report has a case here, a test below or a file of its own."""
    modules = Path(softgpu.hazard.__file__).parent.glob("*.py")
    source = "".join(p.read_text() for p in modules if not p.name.startswith("tensor"))
    kinds = set(re.findall(r'hazard\(\s*"([a-z-]+)"', source))
    assert len(kinds) > 8
    elsewhere = {"early-dependent-access", "warpgroup-divergence"}  # test_warpgroup.py
    assert kinds - {case.kind for case in CASES.values()} == elsewhere


# ---- what the machine itself refuses at the end of a block ---------------------------------------
def test_transaction_count_left_at_the_end() -> None:
    """Expected and not copied: a rule, an error without the check.  The other way round an error
    in any case."""
    case = Case("", f"{INIT} @%p50 mbarrier.{GAP};", "")
    expect, complete = (f"{x}_tx.relaxed.cta.shared.b64 [%r1], " for x in ("expect", "complete"))
    case.run(f"{expect} 0", Options(hazards="raise"))
    text = "mbarrier at CTA 0.*transaction count of {} in phase 0"
    with pytest.raises(BarrierError, match=text.format(64) + ".*armed-exit"):
        case.run(f"{expect} 64", Options())
    for hazards_ in ("off", "raise"):
        case.run(f"{expect} 64", Options(hazards=hazards_, rules=frozenset()))
        with pytest.raises(BarrierError, match=text.format(-64)):
            case.run(f"{complete} 64", Options(hazards=hazards_, rules=frozenset()))
    [found] = case.run(f"{expect} 64", Options(hazards="collect")).hazards
    assert found.kind == "armed-exit" and "expects 64 bytes" in found.what


def test_named_barrier_left_half_arrived() -> None:
    case = Case("", f"@%p51 bar.arrive 1, 64; {GAP}", "")
    case.run("@%p52 bar.sync 1, 64;", Options(hazards="raise"))
    with pytest.raises(BarrierError, match=r"barrier 1 of block .0, 0, 0.: .* 32 of 64 threads"):
        case.run("", Options(hazards="raise"))


def test_so_many_mbarriers_and_no_more() -> None:
    body = """
    mov.u32 %r1, smem; mov.u32 %r2, 0; mov.u32 %r3, %tid.x; setp.ne.s32 %p1, %r3, 0; @%p1 bra END;
    AGAIN: mbarrier.init.shared.b64 [%r1], 1; add.s32 %r1, %r1, 8; add.s32 %r2, %r2, 1;
    setp.lt.s32 %p1, %r2, COUNT; @%p1 bra AGAIN; END:
    """
    launch(body.replace("COUNT", "256"), [], options=Options(hazards="raise"))
    with pytest.raises(BarrierError, match="too many mbarriers.*room for 256"):
        launch(body.replace("COUNT", "257"), [], options=Options(hazards="raise"))


def test_a_warp_that_initialises_an_mbarrier_with_all_lanes_makes_one() -> None:
    """Every lane knows of it, the other warp does not."""
    inits = "".join(f"@%p51 mbarrier.init.shared.b64 [%r1+{8 * i}], 32;" for i in range(96))
    use = "mbarrier.arrive.shared.b64 _, [%r1+760];"
    case = Case(
        "mbarrier-init", f"{inits} @%p51 {use} {GAP} @%p52 {use}",
        "bar.sync 0;", events=("mbarrier.init", "mbarrier.arrive"),
    )  # fmt: skip
    case.check_broken()
    case.check_correct()


@pytest.mark.parametrize("count", [96, 97, 300])
def test_a_kernel_that_shows_its_mbarriers_has_room_for_them(count: int) -> None:
    """The last one works as any other: the copy is known behind its wait, and not without."""
    inits = "".join(f"@%p50 mbarrier.init.shared.b64 [%r1+{8 * i}], 1;" for i in range(count))
    last = f"%r1+{8 * count - 8}"
    case = Case(
        "read-before-complete",
        f"""{inits} @%p50 fence.mbarrier_init.release.cluster; bar.sync 0;
        add.s32 %r5, %r5, 4096; add.s32 %r2, %r2, 4096;
        {EXPECT.replace("%r1", last)} {COPY.replace("[%r1]", f"[{last}]")}
        {GAP} @%p51 {LD} %r10, [%r2];""",
        wait(last), events=("cp.async.bulk", LD),
    )  # fmt: skip
    case.check_broken()
    case.check_correct()


# ---- modes ---------------------------------------------------------------------------------------
TWICE = f"""
mov.u32 %r20, 0; AGAIN: @%p51 {ST} [%r2], %r99; {GAP} @%p52 {LD} %r10, [%r3];
@%p51 {ST} [%r2+256], %r99; @%p52 {LD} %r10, [%r3+256]; bar.sync 0;
add.s32 %r20, %r20, 1; setp.lt.s32 %p1, %r20, 5; @%p1 bra AGAIN;
"""


def test_collect_keeps_one_report_for_a_pair_of_instructions() -> None:
    """Five rounds; in the first the writer comes first, behind a barrier the reader does."""
    case = Case("", TWICE, "")
    kinds = lambda text: sorted(h.kind for h in case.run(text, Options(hazards="collect")).hazards)
    assert kinds("") == 2 * ["overwrite-in-use"] + 2 * ["race"]
    assert kinds("bar.sync 0;") == ["overwrite-in-use", "uninitialised"]


def test_off_reports_nothing() -> None:
    for case in (MEMORY["bar.sync"], WGMMA["fence before the first"], GLOBAL["blocks"]):
        assert case.run(case.wrong, Options(hazards="off")).hazards == []


def test_reads_do_not_conflict() -> None:
    body = f"{ST} [%r2], 1; bar.sync 0; {GAP}"
    text = f"{LD} %r10, [%r3]; {LD} %r10, [%r4]; {LD} %r10, [%r5]; ld.global.b32 %r11, [%rd1];"
    for mode, seed in SCHEDULES:
        Case("", body, "", launch={"grid": 3}).run(
            text, Options(hazards="raise", asynchronous=mode, seed=seed)
        )


def test_atomics_of_many_blocks_do_not_race() -> None:
    body = "red.global.add.u32 [%rd1], 1; atom.global.add.u32 %r10, [%rd1+64], 1;"
    for seed in range(3):
        options = Options(hazards="raise", seed=seed, resident=2)
        Case("", GAP, "", launch={"grid": 4}).run(body, options)


RING = """
@%p50 mbarrier.init.shared.b64 [%r1], 1; @%p50 mbarrier.init.shared.b64 [%r1+8], 1;
@%p50 mbarrier.init.shared.b64 [%r1+16], 1; @%p50 mbarrier.init.shared.b64 [%r1+24], 1;
@%p50 fence.mbarrier_init.release.cluster; bar.sync 0;
mov.u32 %r20, 0; mov.u32 %r21, 0; setp.ne.s32 %p3, %r97, 0;
NEXT: and.b32 %r22, %r20, 1; shl.b32 %r23, %r22, 3; add.s32 %r24, %r1, %r23;
shl.b32 %r25, %r22, 7; add.s32 %r26, %r5, %r25; xor.b32 %r27, %r21, 1;
@%p52 bra CONSUMER; @%p3 bra ON;
<empty>
mbarrier.arrive.expect_tx.shared.b64 _, [%r24], 128;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r26], [%rd1], 128, [%r24];
bra ON;
CONSUMER:
<full>
mad.lo.s32 %r28, %r97, 4, %r26; ld.shared.b32 %r29, [%r28]; <converge>
@!%p3 mbarrier.arrive.shared.b64 _, [%r24+16];
ON: bar.warp.sync -1;
shr.u32 %r30, %r20, 0; and.b32 %r30, %r30, 1; xor.b32 %r21, %r21, %r30;
add.s32 %r20, %r20, 1; setp.lt.s32 %p4, %r20, 8; @%p4 bra NEXT;
"""
PARTS = {
    "<empty>": wait("%r24+16", "%r27"),
    "<full>": wait("%r24", "%r21"),
    "<converge>": "bar.warp.sync -1;",
}


@pytest.mark.parametrize("missing", [None, *PARTS])
def test_a_ring_of_two_stages(missing: str | None) -> None:
    """A producer and a consumer warp over four laps, without each of the waits in turn."""
    body = RING
    for name, text in PARTS.items():
        body = body.replace(name, "" if name == missing else text)
    for mode, seed in [(m, s) for m in ("early", "late", "random") for s in (None, *range(8))]:
        options = Options(hazards="raise", asynchronous=mode, seed=seed)
        if missing is None:
            Case("", body, "").run("", options)
        else:
            with pytest.raises(SoftGpuError) as error:
                Case("", body, "").run("", options)
            assert isinstance(error.value, Hazard | BarrierError), error.value


# ---- dependent launches --------------------------------------------------------------------------
class Chain:
    """Launches that depend on each other; each may start before the one before it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prior: list[Footprint] = []
        self.buffer = aligned(64, np.uint32)
        chain = self

        class Dependent(Machine):
            def __init__(self, program: Any, config: Any, memory: Any, options: Any) -> None:
                config = dataclasses.replace(config, pdl=True)
                super().__init__(program, config, memory, options, chain.prior)
                chain.machine = self

        monkeypatch.setattr(softgpu.testing, "Machine", Dependent)
        self.machine: Machine

    def run(self, body: str) -> None:
        launch(HEAD + body, [self.buffer], block=32, options=Options(hazards="raise"))
        assert self.machine.globals is not None
        kept = [] if self.machine.prior_waited else self.machine.prior
        self.prior = self.machine.globals.footprints() + kept


WRITE, READ = "st.global.b32 [%rd61], %r99;", "ld.global.b32 %r10, [%rd61];"


ACCESSES = [
    READ,
    WRITE,
    "st.global.b32 [%rd61], 9;",
    "st.b32 [%rd61], 9;",
    "st.global.v2.b32 [%rd1], {%r99, %r98};",
    "red.global.add.u32 [%rd61], 1;",
    "atom.global.exch.b32 %r10, [%rd61], 9;",
    CP,
]


@pytest.mark.parametrize("access", ACCESSES)
def test_a_dependent_launch_must_wait(monkeypatch: pytest.MonkeyPatch, access: str) -> None:
    chain = Chain(monkeypatch)
    chain.run("st.global.b32 [%rd61], 7;")
    with pytest.raises(Hazard) as error:
        chain.run(access + "griddepcontrol.wait;")
    assert error.value.kind == "early-dependent-access"
    assert error.value.place.startswith("argument 0 + ") and "the writer is test" in str(
        error.value
    )
    assert [e.text for e in error.value.events] == [" ".join(access.rstrip(";").split())]
    chain.run("griddepcontrol.wait;" + access + "cp.async.wait_all;")
    chain.run("ld.global.b32 %r10, [%rd61+128];")  # nobody writes there


@pytest.mark.parametrize("access", [STORE, ADD])
def test_a_bulk_store_of_a_dependent_launch_must_wait(
    monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    chain = Chain(monkeypatch)
    chain.run("st.global.b32 [%rd61], 7;")
    ready = "st.shared.b32 [%r2], 9; fence.proxy.async.shared::cta; bar.warp.sync -1;"
    done = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    with pytest.raises(Hazard) as error:
        chain.run(f"{ready} @%p50 {access} griddepcontrol.wait; {done}")
    assert error.value.kind == "early-dependent-access"
    chain.run(f"{ready} griddepcontrol.wait; @%p50 {access} {done}")


def test_a_launch_that_does_not_wait_hands_on_what_it_could_overtake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chain = Chain(monkeypatch)
    chain.run("st.global.b32 [%rd61], 7;")
    chain.run("mov.u32 %r10, 1;")
    with pytest.raises(Hazard, match="early-dependent-access"):
        chain.run(READ)
    chain.run("griddepcontrol.wait;" + READ)
    chain.run(READ)  # the writer is complete: the launch before waited for it


def test_parameters_may_lie_where_the_launch_before_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory that held a result once: nobody writes parameters while a kernel runs."""
    run = Machine.run

    def written_before(machine: Machine) -> Any:
        begin, end = machine.parameter_span
        region = machine.memory.find(begin)
        assert region is not None
        content = region.bytes[begin - region.base : end - region.base].copy()
        machine.prior.append(Footprint(begin, 0, np.ones(end - begin, bool), content, "before"))
        machine.globals = GlobalHazards(machine)
        return run(machine)

    monkeypatch.setattr(Machine, "run", written_before)
    Chain(monkeypatch).run(READ + "griddepcontrol.wait;")


# ---- the pytest fixture --------------------------------------------------------------------------
PLUGIN_TESTS = """
import numpy as np, pytest, softgpu
from softgpu.testing import aligned, launch
from tests.support import hazards
from tests.support.hazards import GAP, SCHEDULES, wait

RACE = "mov.u32 %r1, %tid.x; mov.u32 %r2, smem; st.shared.b32 [%r2], %r1;"

def test_default(software_gpu):
    with pytest.raises(softgpu.Hazard):
        launch(RACE, [aligned(4, np.uint32)], block=64, options=software_gpu)
    assert softgpu.loader._override.options is software_gpu

@pytest.mark.softgpu(seeds=range(3), asynchronous=["random"], hazards="collect", accumulate="exact")
def test_marked(software_gpu):
    assert (software_gpu.asynchronous, software_gpu.hazards) == ("random", "collect")
    assert software_gpu.accumulate is softgpu.exact
    assert launch(RACE, [aligned(4, np.uint32)], block=64, options=software_gpu).hazards

def test_without():
    assert getattr(softgpu.loader._override, "options", None) is None
"""


def test_fixture_runs_every_schedule(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=PLUGIN_TESTS)
    result = pytester.runpytest_inprocess(
        "-v", "-p", "softgpu.pytest_plugin", "--strict-markers", "-p", "no:cacheprovider"
    )
    result.assert_outcomes(passed=6)
    names = re.findall(r"::(\S+) PASSED", result.stdout.str())
    assert names == [
        "test_default[early]", "test_default[late]", "test_marked[random-seed0]",
        "test_marked[random-seed1]", "test_marked[random-seed2]", "test_without",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"asynchronous": ("soon",)},
            "asynchronous: expected one of early, late, random, got 'soon'",
        ),
        ({"asynchronous": "late"}, "are sequences"),
        ({"seeds": 3}, "are sequences"),
        ({"seeds": ()}, "at least one"),
        ({"hazards": "loud"}, "hazards: expected one of off, raise, collect, got 'loud'"),
        ({"accumulate": "fast"}, "accumulate is one of"),
    ],
)
def test_fixture_refuses_bad_schedules(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules(**words)
