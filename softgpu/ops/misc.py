"""Fences, griddepcontrol, setmaxnreg, trap, hints: PTX ISA 9.7.13.4-6, 9.7.13.13, 9.7.19.

Execution here is sequentially consistent, so fences order nothing; their meaning is what the hazard
checker makes of them (``hazard``).
"""

from __future__ import annotations

from typing import Any

from ..decode import Decoder, Handler, op, unmodelled
from ..errors import SoftGpuError
from ..ptx import Instr
from .common import nothing

_FENCE_WORDS = {
    "fence", "membar", "mbarrier_init", "release", "acquire", "acq_rel", "sc", "cta", "cluster",
    "gpu", "sys", "gl", "proxy", "async", "async::generic", "alias", "tensormap::generic", "global",
    "shared::cta", "shared::cluster", "async.shared::cta", "sync_restrict::shared::cta",
    "sync_restrict::shared::cluster", "relaxed",
}  # fmt: skip


@op("fence", "membar")
def fence(ins: Instr, k: Decoder) -> Handler:
    if set(ins.parts) - _FENCE_WORDS:
        raise unmodelled(ins)
    proxy, barriers = "proxy" in ins.parts, "mbarrier_init" in ins.parts
    if proxy and "async" not in ins.parts and "async::generic" not in ins.parts:
        return nothing  # alias, tensormap: other proxies, not tracked
    # a suffix restricts the fence to a state space; without one it covers all of them
    of_shared = any("shared::" in part for part in ins.parts)
    of_global = "global" in ins.parts
    shared, outside = of_shared or not of_global, of_global or not of_shared

    def run(w: Any, m: Any) -> None:
        if w.hazard is None:
            return
        if proxy:
            w.hazard.fence_proxy(m, shared, outside)
        elif barriers:
            w.hazard.clock.fence_mbarriers(m)

    return run


@op("griddepcontrol.wait", "griddepcontrol.launch_dependents")
def griddepcontrol(ins: Instr, k: Decoder) -> Handler:
    """Launches run one after the other, so the grids waited for have always finished.

    The hazard checker knows which of their results may not be touched before the wait.
    """
    if ins.parts[1] != "wait":
        return nothing

    def run(w: Any, m: Any) -> None:
        w.machine.prior_waited = True
        if w.hazard is not None:
            w.hazard.prior_complete(m)

    return run


@op("setmaxnreg.inc", "setmaxnreg.dec")
def setmaxnreg(ins: Instr, k: Decoder) -> Handler:
    count, way = k.imm(ins.args[0]), ins.parts[1]

    def run(w: Any, m: Any) -> Any:
        if not 24 <= count <= 256 or count % 8:
            raise SoftGpuError(f"setmaxnreg {count}: expected a multiple of 8 from 24 to 256")
        had = w.registers
        if had is not None and (count < had if way == "inc" else count > had):
            raise SoftGpuError(
                f"setmaxnreg.{way} {count}: the warp has {had} registers a thread; a GPU calls "
                "this an illegal instruction"
            )
        w.registers = count
        wait = w.join(m, -1, "setmaxnreg.sync")
        if wait is None and w.hazard is not None:
            w.hazard.warpgroup.execute(w.hazard)
        return wait

    return run


@op("nanosleep", "pmevent", "prefetch", "prefetchu", "applypriority", "discard",
    "cp.async.bulk.prefetch", "cp.async.bulk.prefetch.tensor")  # fmt: skip
def hint(ins: Instr, k: Decoder) -> Handler:
    """Time and caches are not modelled."""
    return nothing


@op("trap", "brkpt")
def trap(ins: Instr, k: Decoder) -> Handler:
    def run(w: Any, m: Any) -> None:
        raise SoftGpuError(f"the kernel executed {ins.opcode}")

    return run
