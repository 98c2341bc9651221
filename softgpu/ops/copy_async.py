"""cp.async (non-bulk), cp.async.bulk without tensors, st.async: PTX ISA 9.7.9.25.3-4, 9.7.9.12."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..decode import DTYPES, Decoder, Handler, Mods, op, unmodelled
from ..errors import MemoryFault
from ..in_flight import InFlight
from ..memory import OFFSET_MASK, RANK_SHIFT
from ..ptx import Instr
from .common import lanes_of
from .load_store import address, write
from .mbarrier import arrive, complete_tx, find, publish


# ---- cp.async ------------------------------------------------------------------------------------
@op("cp.async.ca", "cp.async.cg")
def cp_async(ins: Instr, k: Decoder) -> Handler:
    """[dst], [src], cp-size [, src-size] [, cache-policy]; bytes behind src-size become zero."""
    mods = Mods(ins, 2)
    mods.take("ca", "cg")
    mods.take("shared", "shared::cta")
    mods.take("global")
    hint = mods.flag("L2::cache_hint")
    mods.take("L2::64B", "L2::128B", "L2::256B")
    mods.done()
    to, source = address(k, ins.args[0], "shared"), address(k, ins.args[1], "global")
    size = k.imm(ins.args[2])
    rest = list(ins.args[3:])
    if hint:
        rest.pop()
    have = k.src(rest[0], "u32") if rest else -1
    if len(rest) > 1 or (rest and k.width(rest[0]) == 0):
        raise unmodelled(ins, "ignore-src")

    def run(w: Any, m: Any) -> None:
        v = w.v
        d, s = to(v).copy(), source(v).copy()
        n = v[have].copy() if have >= 0 else np.full(32, size)
        mask = w.lanes(m).copy()

        def land() -> None:
            for lane in np.nonzero(mask)[0]:
                count = min(int(n[lane]), size)
                target = w.shared.span(int(d[lane]), size, "cp.async", size)
                if count:
                    if int(s[lane]) & (size - 1):
                        raise MemoryFault(
                            f"misaligned cp.async source: {w.machine.memory.name(int(s[lane]))}"
                        )
                    target[:count] = w.machine.memory.read(int(s[lane]), count, "cp.async")
                target[count:] = 0

        if w.hazard is not None:
            lanes = d if m is True else d[mask]
            w.shared.check(lanes, size, w.block.rank, "cp.async", size)
            w.hazard.cp_async(m, w.hazard.owner.granules(lanes, size))
            _check_sources(w, s, np.minimum(n, size), mask)
        w.copies[-1].append(w.machine.issue(land, ins.opcode))

    return run


def _check_sources(w: Any, source: Any, counts: Any, mask: Any) -> None:
    """Tells the checker of the lanes' reads, by the bytes of each, as generic loads."""
    for count in np.unique(counts[mask]):
        if count:
            lanes = mask & (counts == count)
            w.machine.globals.read(w.hazard, source, lanes, int(count))


def _commit_cp(w: Any) -> None:
    w.copies.append([])
    if w.hazard is not None:
        w.hazard.cp_commit()


def _land_cp(w: Any, m: Any, keep: int) -> None:
    """All but the last ``keep`` committed groups are complete; -1: those not committed too."""
    if keep < 0:
        _commit_cp(w)
        keep = 0
    done = max(len(w.copies) - 1 - keep, 0)
    for group in w.copies[:done]:
        for item in group:
            item.complete()
    w.copies = w.copies[done:]
    if w.hazard is not None:
        w.hazard.cp_waited(m, keep)


@op("cp.async.commit_group")
def cp_commit(ins: Instr, k: Decoder) -> Handler:
    """Groups are kept per warp, not per thread."""

    def run(w: Any, m: Any) -> None:
        _commit_cp(w)

    return run


@op("cp.async.wait_group", "cp.async.wait_all")
def cp_wait(ins: Instr, k: Decoder) -> Handler:
    keep = k.imm(ins.args[0]) if ins.args else -1

    def run(w: Any, m: Any) -> None:
        _land_cp(w, m, keep)

    return run


@op("cp.async.mbarrier.arrive")
def cp_arrive(ins: Instr, k: Decoder) -> Handler:
    """Arrives when the lane's cp.async are done; without .noinc it counts itself in first."""
    mods = Mods(ins, 4)
    mods.type()
    noinc = mods.flag("noinc")
    mods.take("shared", "shared::cta")
    mods.done()
    where = address(k, ins.args[0], "shared")

    def run(w: Any, m: Any) -> None:
        _land_cp(w, m, -1)
        a = where(w.v)
        if w.hazard is not None and noinc:
            publish(w, a, m)
        for lane in lanes_of(m):
            if noinc:
                arrive(w, int(a[lane]), 1)
            else:
                find(w, int(a[lane]), "cp.async.mbarrier.arrive")

    return run


# ---- cp.async.bulk -------------------------------------------------------------------------------
def _check_bulk(w: Any, address_: int, size: int, space: str) -> None:
    if address_ & 15 or size & 15:
        where = w.machine.memory.name(address_) if space == "global" else hex(address_)
        raise MemoryFault(
            f"cp.async.bulk: address and size must be multiples of 16, got {where}, {size} bytes"
        )


@op("cp.async.bulk.shared", "cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta")
def bulk_to_shared(ins: Instr, k: Decoder) -> Handler:
    """[dst], [src], size, [mbar] [, ctamask] [, policy]: global or shared::cta to shared."""
    mods = Mods(ins, 3)
    target = mods.left.pop(0)
    source = mods.take("global", "shared::cta", "shared")
    mods.take("mbarrier::complete_tx::bytes")
    multicast = mods.flag("multicast::cluster")
    mods.take("L2::cache_hint")
    mods.done()
    if source is None:
        raise unmodelled(ins)
    to = address(k, ins.args[0], "shared")
    origin = address(k, ins.args[1], "global" if source == "global" else "shared")
    size, bar = k.src(ins.args[2], "u32"), address(k, ins.args[3], "shared")
    mask = k.src(ins.args[4], "u16") if multicast else -1
    own = target == "shared::cta"

    def run(w: Any, m: Any) -> None:
        v = w.v
        for lane in lanes_of(m):
            d, s, n = int(to(v)[lane]), int(origin(v)[lane]), int(v[size][lane])
            b = int(bar(v)[lane])
            ranks = ranks_of(w, int(v[mask][lane])) if multicast else None
            _check_bulk(w, d, n, "shared")
            _check_bulk(w, s, n, source)
            if own and d >> RANK_SHIFT != w.block.rank:
                raise MemoryFault(f"cp.async.bulk.shared::cta: {d:#x} is not in this CTA")
            _issue_bulk(w, int(lane), d, s, n, b, ranks, source == "global", ins.opcode)

    return run


def ranks_of(w: Any, mask: int) -> list[int]:
    """The CTAs of a multicast.  Raises MemoryFault if the cluster lacks one."""
    ranks = [r for r in range(16) if mask >> r & 1]
    if not ranks or ranks[-1] >= w.shared.ctas:
        raise MemoryFault(f"multicast mask {mask:#x}: the cluster has {w.shared.ctas} CTAs")
    return ranks


def spread(address_: int, ranks: list[int] | None) -> list[int]:
    """The same CTA-relative address in each CTA of a multicast."""
    if ranks is None:
        return [address_]
    return [(address_ & OFFSET_MASK) | (r << RANK_SHIFT) for r in ranks]


def _issue_bulk(
    w: Any, lane: int, d: int, s: int, n: int, b: int, ranks: list[int] | None,
    from_global: bool, text: str,
) -> None:  # fmt: skip
    targets, bars = spread(d, ranks), spread(b, ranks)
    for x in bars:
        find(w, x, text)
    if from_global:
        w.machine.memory.check(s, n, "cp.async.bulk")
    h = w.hazard
    if h is not None:
        if from_global:
            w.machine.globals.async_read(h, lane, [s], n)
        else:
            w.shared.span(s, n, "cp.async.bulk")
            h.copied_from(lane, h.owner.span(s, n), find(w, bars[0], text))
        for x, bar in zip(targets, bars, strict=True):
            w.shared.span(x, n, "cp.async.bulk")
            h.copy_in(lane, x, n, find(w, bar, text))

    def land() -> None:
        if from_global:
            data = w.machine.memory.read(s, n, "cp.async.bulk")
        else:
            data = w.shared.span(s, n, "cp.async.bulk").copy()
        for x, bar in zip(targets, bars, strict=True):
            w.shared.span(x, n, "cp.async.bulk")[:] = data
            complete_tx(w, bar, n)

    w.machine.issue(land, text)


@op("cp.async.bulk.global")
def bulk_to_global(ins: Instr, k: Decoder) -> Handler:
    """cp.async.bulk.global.shared::cta.bulk_group [dst], [src], size [, policy]"""
    return _bulk_store(ins, k, Mods(ins, 4), None)


@op("cp.reduce.async.bulk.global")
def bulk_add(ins: Instr, k: Decoder) -> Handler:
    """cp.reduce.async.bulk.global.shared::cta.bulk_group.add.type [dst], [src], size [, policy]

    Each element is added atomically (PTX ISA 9.7.9.25.4.2); the copy as a whole is not atomic.
    """
    mods = Mods(ins, 5)
    kind = mods.take("f32", "f64", "u32", "s32", "u64")
    if kind is None or not mods.flag("add"):
        raise unmodelled(ins)
    return _bulk_store(ins, k, mods, DTYPES[kind])


def _bulk_store(ins: Instr, k: Decoder, mods: Mods, added: Any) -> Handler:
    """A bulk copy from shared to global memory; ``added``: dtype of the elements it adds."""
    mods.take("shared::cta", "shared")
    if not mods.flag("bulk_group"):
        raise unmodelled(ins)
    mods.take("L2::cache_hint")
    mods.done()
    to, origin = address(k, ins.args[0], "global"), address(k, ins.args[1], "shared")
    size = k.src(ins.args[2], "u32")

    def run(w: Any, m: Any) -> None:
        v = w.v
        for lane in lanes_of(m):
            d, s, n = int(to(v)[lane]), int(origin(v)[lane]), int(v[size][lane])
            _check_bulk(w, d, n, "global")
            _check_bulk(w, s, n, "shared")
            w.machine.memory.check(d, n, "cp.async.bulk")

            def land(d: int = d, s: int = s, n: int = n) -> None:
                data = w.shared.span(s, n, "cp.async.bulk")
                target = w.machine.memory.read(d, n, "store")
                if added is None:
                    target[:] = data
                else:
                    target.view(added)[...] += data.view(added)
                w.machine.version += 1

            h = w.hazard
            if h is not None:
                w.shared.span(s, n, "cp.async.bulk")
                h.copy_out(int(lane), h.owner.span(s, n), s >> RANK_SHIFT)
                told = (
                    w.machine.globals.async_write if added is None else w.machine.globals.async_add
                )
                told(h, int(lane), [d], n)
            bulk_group(w, int(lane)).items.append(w.machine.issue(land, ins.opcode))

    return run


class BulkGroup:
    """Bulk stores that one thread committed together."""

    def __init__(self) -> None:
        self.number = 0  # the hazard checker's, set at the commit
        self.items: list[InFlight] = []


def bulk_group(w: Any, lane: int) -> BulkGroup:
    """The open group of a lane."""
    groups: list[BulkGroup] = w.bulk_groups.setdefault(lane, [BulkGroup()])
    return groups[-1]


@op("cp.async.bulk.commit_group")
def bulk_commit(ins: Instr, k: Decoder) -> Handler:
    """Bulk groups belong to threads."""

    def run(w: Any, m: Any) -> None:
        for lane in lanes_of(m):
            group = bulk_group(w, int(lane))
            if w.hazard is not None:
                group.number = w.hazard.bulk_commit()
            w.bulk_groups[int(lane)].append(BulkGroup())

    return run


@op("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read")
def bulk_wait(ins: Instr, k: Decoder) -> Handler:
    """Waits until at most N of a thread's last groups stay in flight."""
    keep, written = k.imm(ins.args[0]), "read" not in ins.parts

    def run(w: Any, m: Any) -> None:
        for lane in lanes_of(m):
            groups = w.bulk_groups.get(int(lane), [])
            done = groups[: max(len(groups) - 1 - keep, 0)]
            for item in (x for group in done for x in group.items):
                item.complete()
            if done:
                w.bulk_groups[int(lane)] = groups[len(done) :]
                if w.hazard is not None:
                    one = np.arange(32) == lane
                    w.hazard.bulk_waited(one, done[-1].number, written)

    return run


# ---- st.async ------------------------------------------------------------------------------------
@op("st.async")
def st_async(ins: Instr, k: Decoder) -> Handler:
    """st.async[.weak].shared::cluster.mbarrier::complete_tx::bytes[.vN].type [a], b, [mbar]"""
    mods = Mods(ins, 2)
    kind = mods.type()
    mods.take("weak", "relaxed")
    mods.take("cluster")
    if mods.take("shared::cluster") is None:
        raise unmodelled(ins)
    mods.take("mbarrier::complete_tx::bytes")
    vector = mods.take("v2", "v4")
    mods.done()
    n = int(vector[1]) if vector else 1
    where, bar = address(k, ins.args[0], "shared"), address(k, ins.args[2], "shared")
    sources = [k.src(x, kind) for x in k.items(ins.args[1])]
    size = np.dtype(DTYPES[kind]).itemsize * n

    def run(w: Any, m: Any) -> None:
        v = w.v
        data = np.stack([v[s] for s in sources], 1) if n > 1 else v[sources[0]].copy()
        a, b, mask = where(v).copy(), bar(v).copy(), w.lanes(m).copy()
        if w.hazard is not None:
            for lane in np.nonzero(mask)[0]:
                found = find(w, int(b[lane]), "st.async")
                w.hazard.copy_in(int(lane), int(a[lane]), size, found)

        def land() -> None:
            write(w, a, mask, data, n, "cluster", track=False)
            for lane in np.nonzero(mask)[0]:
                complete_tx(w, int(b[lane]), size)

        w.machine.issue(land, "st.async")

    return run
