"""Cluster launch control: PTX ISA 9.7.13.18 (clusterlaunchcontrol).

A running cluster may cancel one that has not started and do its work.  Here that is the next one on
the scheduler's list.  The response is opaque to kernels; in it, the first word says whether a
cluster was cancelled and the other three are the coordinates of its first CTA.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import B128, Decoder, Handler, Mods, op, unmodelled
from ..errors import MemoryFault, SoftGpuError
from ..memory import RANK_SHIFT
from ..ptx import Instr, Vec
from .common import first_lane, lanes_of
from .copy_async import spread
from .load_store import address
from .mbarrier import complete_tx, find

_BYTES = 16  # of a response
_CANCELLED = 1
_POISON = 0xDEADBEEF  # coordinates of a refusal: the manual leaves them undefined


@op("clusterlaunchcontrol.try_cancel")
def try_cancel(ins: Instr, k: Decoder) -> Handler:
    """[response], [mbarrier]; .multicast::cluster::all answers every CTA of the cluster."""
    mods = Mods(ins, 2)
    for name in ("async", "shared::cta", "mbarrier::complete_tx::bytes", "b128"):
        mods.flag(name)
    multicast = mods.flag("multicast::cluster::all")
    mods.done()
    to, bar = address(k, ins.args[0], "shared"), address(k, ins.args[1], "shared")

    def issue(w: Any, lane: int, d: int, b: int) -> None:
        cluster = w.block.cluster
        if cluster.cancel_refused:
            raise SoftGpuError(f"{ins.opcode}: an earlier request was refused")
        if d >> RANK_SHIFT != w.block.rank or d % _BYTES:
            raise MemoryFault(f"{ins.opcode}: response at {d:#x}, expected 16 bytes of this CTA")
        ranks = list(range(cluster.size)) if multicast else None
        targets, bars = spread(d, ranks), spread(b, ranks)
        for target, barrier in zip(targets, bars, strict=True):
            found = find(w, barrier, ins.opcode)
            w.shared.span(target, _BYTES, ins.opcode)
            if w.hazard is not None:
                w.hazard.copy_in(lane, target, _BYTES, found)

        def land() -> None:
            first = w.machine.cancel()
            words = [0] * 4 if first is None else [_CANCELLED, *first]
            data = np.array(words, np.uint32).view(np.uint8)
            for target, barrier in zip(targets, bars, strict=True):
                w.shared.span(target, _BYTES, ins.opcode)[:] = data
                complete_tx(w, barrier, _BYTES)

        w.machine.issue(land, ins.opcode)

    def run(w: Any, m: Any) -> None:
        for lane in lanes_of(m):
            issue(w, int(lane), int(to(w.v)[lane]), int(bar(w.v)[lane]))

    return run


@op("clusterlaunchcontrol.query_cancel")
def query_cancel(ins: Instr, k: Decoder) -> Handler:
    """is_canceled.pred, get_first_ctaid::{x,y,z}.b32 or get_first_ctaid.v4.b32 of a response."""
    mods = Mods(ins, 2)
    mods.flag("b128")
    what = mods.take("is_canceled", *(f"get_first_ctaid::{x}" for x in "xyz"), "get_first_ctaid")
    mods.take("pred", "b32")
    vector = mods.flag("v4")
    mods.done()
    if what is None:
        raise unmodelled(ins)
    response = k.src(ins.args[1], B128)
    if what == "is_canceled":
        flag = k.dst(ins.args[0], "pred")

        def cancelled(w: Any, m: Any) -> None:
            words = w.v[response].view(np.uint32).reshape(32, 4)
            if words[first_lane(m), 0] != _CANCELLED:
                w.block.cluster.cancel_refused = True
            np.copyto(w.v[flag], words[:, 0] == _CANCELLED, where=m)

        return cancelled
    if vector != isinstance(ins.args[0], Vec):
        raise unmodelled(ins)
    axes = range(3) if vector else ["xyz".index(what[-1])]
    targets = [k.dst(x, "u32") for x in k.items(ins.args[0])]

    def coordinates(w: Any, m: Any) -> None:
        words = w.v[response].view(np.uint32).reshape(32, 4).copy()
        # a scheduler may ask before it looks at is_canceled; only the values must not be used
        words[words[:, 0] != _CANCELLED] = _POISON
        for d, axis in zip(targets, axes, strict=False):
            np.copyto(w.v[d], words[:, axis + 1], where=m)

    return coordinates
