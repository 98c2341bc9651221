"""Tensor copies through a tensor map: PTX ISA 5.5 (tensors), 9.7.9.25.5 (cp.async.bulk.tensor).

The tensor map's 128 bytes are decoded as the hardware's tiled format, version 2; the layout was
read off maps that the exported host code encodes (element types, ranks 1-5, all swizzles).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..decode import Decoder, Handler, Mods, op, unmodelled
from ..errors import DescriptorError, MemoryFault, SoftGpuError
from ..memory import RANK_SHIFT
from ..ptx import Instr, Mem, Operand
from .common import lanes_of
from .copy_async import bulk_group, ranks_of, spread
from .load_store import address
from .mbarrier import complete_tx, find

# 5 stands between its neighbours: the encoder whose maps were read writes 4 for both signs
_ELEMENT = {0: ("u8", 1), 1: ("u16", 2), 2: ("u32", 4), 3: ("s32", 4), 4: ("u64", 8),
            5: ("s64", 8), 6: ("f16", 2), 7: ("f32", 4), 9: ("f64", 8),
            10: ("bf16", 2)}  # fmt: skip
_SWIZZLE_BITS = {0: 0, 1: 1, 2: 3, 3: 7}  # mask of the XOR: none, 32, 64, 128 bytes
_GATHERED = 4  # rows of a tile::gather4
_SWIZZLE_SPAN = {0: 256, 1: 32, 2: 64, 3: 128}


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map.

    Attributes:
        address: of element 0.  rank: 1 to 5.  element: bytes of an element.
        extent: elements of each dimension, innermost first.
        stride: bytes of dimensions 1 .. rank-1.
        box: elements of each dimension of a copy.
        swizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes.
        kind: element type.
        gather: the rows of the box are named one by one (tile::gather4).
    """

    address: int
    rank: int
    element: int
    extent: tuple[int, ...]
    stride: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    kind: str
    gather: bool = False

    @property
    def box_bytes(self) -> int:
        n = self.element
        for b in self.box:
            n *= b
        return n


def decode_map(raw: bytes) -> TensorMap:
    """Decodes 128 bytes.  Raises DescriptorError for what is not understood."""
    w = np.frombuffer(raw, np.uint64)
    words = [int(x) for x in w]
    flags = words[1] & 0xFFFFFFFF
    if flags & 0xF != 2:
        raise DescriptorError(f"tensor map: flags {flags:#x} are not those of a tiled map")
    rank, kind = (flags >> 4 & 7) + 1, flags >> 7 & 15
    if kind not in _ELEMENT:
        raise DescriptorError(f"tensor map: element type {kind} is not understood")
    if flags >> 11 & 3:
        raise DescriptorError("tensor map: interleaved layouts are not modelled")
    extent = [words[4] & 0xFFFFFFFF, words[4] >> 32, words[5] & 0xFFFFFFFF, words[5] >> 32,
              words[6] & 0xFFFFFFFF]  # fmt: skip
    high = words[3] >> 32
    stride = [words[1] >> 32, words[2] & 0xFFFFFFFF, words[2] >> 32, words[3] & 0xFFFFFFFF]
    stride = [(s | (high >> (4 * i) & 15) << 32) << 4 for i, s in enumerate(stride)]
    box = [words[6] >> 56, *(words[7] >> (8 * i) & 255 for i in range(4))]
    return TensorMap(
        words[0], rank, _ELEMENT[kind][1], tuple(e + 1 for e in extent[:rank]),
        tuple(stride[: rank - 1]), tuple(b + 1 for b in box[:rank]), flags >> 13 & 3,
        _ELEMENT[kind][0],
    )  # fmt: skip


def check_map(t: TensorMap, shared: int) -> None:
    """Raises an error if a map or a shared address breaks the hardware's rules."""
    inner = t.box[0] * t.element
    if t.address & 15 or any(s & 15 for s in t.stride):
        raise DescriptorError(f"tensor map: address and strides must be multiples of 16: {t}")
    if inner & 15:
        raise DescriptorError(f"tensor map: inner box of {inner} bytes, expected a multiple of 16")
    if t.swizzle and inner > _SWIZZLE_SPAN[t.swizzle]:
        raise DescriptorError(
            f"tensor map: inner box of {inner} bytes exceeds the {_SWIZZLE_SPAN[t.swizzle]}-byte "
            "swizzle"
        )
    if shared & 127:
        raise MemoryFault(f"tensor copy: shared address {shared:#x} is not a multiple of 128")


def shared_index(shared: int, rows: int, inner: int, swizzle: int) -> NDArray[np.int64]:
    """16-byte chunk indices (rows, chunks) of a dense box whose rows have ``inner`` bytes."""
    chunk = (shared >> 4) + np.arange(rows * (inner >> 4), dtype=np.int64)
    if swizzle:
        chunk ^= (chunk >> 3) & _SWIZZLE_BITS[swizzle]
    return chunk.reshape(rows, inner >> 4)


def _rows(t: TensorMap, coords: list[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(byte offset, inside) of every row of the box: all dimensions but the innermost."""
    if t.gather:
        at = np.array(coords[1:], np.int64)
        return at * t.stride[0], (at >= 0) & (at < t.extent[1])
    offset, inside = np.zeros(1, np.int64), np.ones(1, bool)
    for d in range(1, t.rank):
        at = coords[d] + np.arange(t.box[d], dtype=np.int64)
        ok = (at >= 0) & (at < t.extent[d])
        offset = (at[:, None] * t.stride[d - 1] + offset[None, :]).reshape(-1)
        inside = (ok[:, None] & inside[None, :]).reshape(-1)
    return offset, inside


def _inner(t: TensorMap, x: int) -> tuple[int, int]:
    """Elements of the innermost dimension that are inside: [first, last) of the box."""
    return max(0, -x), min(t.box[0], t.extent[0] - x)


def load(w: Any, t: TensorMap, coords: list[int], targets: list[int]) -> None:
    """Copies the box to every target; elements outside the tensor become zero."""
    offset, inside = _rows(t, coords)
    inner = t.box[0] * t.element
    data = np.zeros((len(offset), inner), np.uint8)
    first, last = _inner(t, coords[0])
    if last > first:
        start, n = (coords[0] + first) * t.element, (last - first) * t.element
        _gather(w, t, offset, inside, start, n, data[:, first * t.element : last * t.element])
    chunks = data.view(np.uint64).reshape(len(offset), inner >> 4, 2)
    for target in targets:
        w.shared.check(np.array([target], np.uint32), data.size, None, "tensor load", 16)
        index = shared_index(target, len(offset), inner, t.swizzle)
        w.shared.view(np.uint64, 2)[index] = chunks


def _gather(
    w: Any, t: TensorMap, offset: Any, inside: Any, start: int, n: int, out: NDArray[np.uint8]
) -> None:
    at = t.address + offset + start
    if not inside.any():
        return
    low, high = int(at[inside].min()), int(at[inside].max())
    region = w.machine.memory.find(low)
    if region is not None and high + n <= region.end:
        index = np.where(inside, at - region.base, low - region.base)[:, None] + np.arange(n)
        out[inside] = region.bytes[index][inside]
        return
    for i in np.nonzero(inside)[0]:
        out[i] = w.machine.memory.read(int(at[i]), n, "tensor load")


def store(w: Any, t: TensorMap, coords: list[int], source: int, add: bool) -> None:
    """Copies the box from shared memory, or adds it; elements outside the tensor are dropped."""
    offset, inside = _rows(t, coords)
    inner = t.box[0] * t.element
    w.shared.check(np.array([source], np.uint32), len(offset) * inner, None, "tensor store", 16)
    index = shared_index(source, len(offset), inner, t.swizzle)
    data = w.shared.view(np.uint64, 2)[index].reshape(len(offset), -1).view(np.uint8)
    first, last = _inner(t, coords[0])
    if last <= first:
        return
    start, n = (coords[0] + first) * t.element, (last - first) * t.element
    for i in np.nonzero(inside)[0]:
        to = w.machine.memory.read(t.address + int(offset[i]) + start, n, "tensor store")
        row = data[i, first * t.element : last * t.element]
        if add:
            to.view(np.float32)[...] += row.view(np.float32)
        else:
            to[:] = row


def rows_inside(t: TensorMap, coords: list[int]) -> tuple[Any, int]:
    """(addresses of the box's rows that lie in the tensor, bytes of a row that do)."""
    offset, inside = _rows(t, coords)
    first, last = _inner(t, coords[0])
    start = t.address + (coords[0] + first) * t.element
    return offset[inside] + start, max(last - first, 0) * t.element


def _box(w: Any, t: TensorMap, shared: int) -> Any:
    """Granules of a dense box in shared memory; a swizzle permutes within 128 bytes."""
    nbytes = t.box_bytes
    if nbytes % 128 == 0 and shared % 128 == 0:
        return w.hazard.owner.span(shared, nbytes)
    inner = t.box[0] * t.element
    chunks = shared_index(shared, nbytes // inner, inner, t.swizzle).reshape(-1)
    return w.hazard.owner.granules(chunks << 4, 16).reshape(-1)


def _track_load(
    w: Any, lane: int, t: TensorMap, coords: list[int], targets: list[int], bars: list[Any]
) -> None:
    rows, nbytes = rows_inside(t, coords)
    if nbytes:
        w.machine.globals.async_read(w.hazard, lane, rows, nbytes)
    for target, bar in zip(targets, bars, strict=True):
        w.shared.check(np.array([target], np.uint32), t.box_bytes, None, "tensor load", 16)
        w.hazard.copy_in(lane, target, _box(w, t, target), bar, t.box_bytes)


def _track_store(
    w: Any, lane: int, t: TensorMap, coords: list[int], source: int, add: bool
) -> None:
    w.shared.check(np.array([source], np.uint32), t.box_bytes, None, "tensor store", 16)
    w.hazard.copy_out(lane, _box(w, t, source), source >> RANK_SHIFT)
    rows, nbytes = rows_inside(t, coords)
    if nbytes:
        told = w.machine.globals.async_add if add else w.machine.globals.async_write
        told(w.hazard, lane, rows, nbytes)


def gathered(t: TensorMap) -> TensorMap:
    """The map of a tile::gather4: its box is one row, of which four are copied."""
    if t.rank != 2 or t.box[1] != 1:
        raise DescriptorError(f"tile::gather4: expected a map of rank 2 with a box of one row: {t}")
    return replace(t, box=(t.box[0], _GATHERED), gather=True)


class _Tensor:
    """The operand ``[map, {coordinates}]`` of a copy of ``rank`` dimensions."""

    def __init__(
        self, ins: Instr, k: Decoder, operand: Operand, rank: int, gather: bool = False
    ) -> None:
        if not isinstance(operand, Mem) or operand.coords is None:
            raise unmodelled(ins, "[map, {coordinates}] expected")
        self.base, self.offset = k.mem(Mem(operand.base, operand.offset))
        self.coords = [k.src(c, "s32") for c in operand.coords]
        self.rank, self.gather = rank, gather
        if len(self.coords) != (_GATHERED + 1 if gather else rank):
            raise unmodelled(ins, f"{len(self.coords)} coordinates")
        self._decoded: dict[bytes, TensorMap] = {}

    def of(self, w: Any, lane: int) -> tuple[TensorMap, list[int]]:
        """The map and the coordinates that a lane names.  Raises DescriptorError, MemoryFault."""
        at = int(w.v[self.base][lane]) + self.offset
        if at & 63:
            raise DescriptorError(f"tensor map at {at:#x}: must be aligned to 64 bytes")
        raw = w.machine.memory.read(at, 128, "tensor map load").tobytes()
        t = self._decoded.get(raw)
        if t is None:
            t = decode_map(raw)
            if self.gather:
                t = gathered(t)
            self._decoded[raw] = t
        if t.rank != self.rank:
            raise DescriptorError(f"{self.rank}d copy through a tensor map of rank {t.rank}")
        return t, [int(w.v[c][lane]) for c in self.coords]


@op("cp.async.bulk.tensor")
def tensor(ins: Instr, k: Decoder) -> Handler:
    """cp.async.bulk.tensor.Nd.dst.global.tile.mbarrier: [dst], [map, {coords}], [mbar] [, mask]

    With .cta_group::2 the mbarrier may be the peer's; a multicast signals, in the pair of every
    target, the CTA of the mbarrier's parity.
    """
    mods = Mods(ins, 4)
    dim = mods.take("1d", "2d", "3d", "4d", "5d")
    gather = mods.take("tile", "tile::gather4") == "tile::gather4"
    if dim is None:
        raise unmodelled(ins)
    if mods.left and mods.left[0] == "global" and not gather:
        return _tensor_store(ins, k, mods, int(dim[0]), False)
    target = mods.take("shared::cluster", "shared::cta", "shared")
    mods.take("global")
    mods.take("mbarrier::complete_tx::bytes")
    multicast = mods.flag("multicast::cluster")
    mods.take("L2::cache_hint")
    pair = mods.take("cta_group::1", "cta_group::2") == "cta_group::2"
    mods.done()
    if target is None:
        raise unmodelled(ins)
    to, bar = address(k, ins.args[0], "shared"), address(k, ins.args[2], "shared")
    source = _Tensor(ins, k, ins.args[1], int(dim[0]), gather)
    mask = k.src(ins.args[3], "u16") if multicast else -1

    def run(w: Any, m: Any) -> None:
        v = w.v
        for lane in lanes_of(m):
            t, at = source.of(w, lane)
            d, b = int(to(v)[lane]), int(bar(v)[lane])
            check_map(t, d)
            if target == "shared::cta" and d >> RANK_SHIFT != w.block.rank:
                raise MemoryFault(f"tensor load to shared::cta: {d:#x} is not in this CTA")
            ranks = ranks_of(w, int(v[mask][lane])) if multicast else None
            bars = spread(b, ranks)
            if pair and ranks is not None:
                bars = spread(b, [r & ~1 | b >> RANK_SHIFT & 1 for r in ranks])
            _issue_load(w, lane, t, at, spread(d, ranks), bars, ins.opcode)

    return run


def _issue_load(
    w: Any, lane: int, t: TensorMap, coords: list[int], targets: list[int], bars: list[int],
    text: str,
) -> None:  # fmt: skip
    found = [find(w, x, "tensor load") for x in bars]
    if w.hazard is not None:
        _track_load(w, int(lane), t, coords, targets, found)

    def land() -> None:
        load(w, t, coords, targets)
        for x in bars:
            complete_tx(w, x, t.box_bytes)

    w.machine.issue(land, text)


@op("cp.reduce.async.bulk.tensor")
def reduction(ins: Instr, k: Decoder) -> Handler:
    """cp.reduce.async.bulk.tensor.Nd.global.shared::cta.add.tile.bulk_group: of f32."""
    mods = Mods(ins, 5)
    dim = mods.take("1d", "2d", "3d", "4d", "5d")
    mods.take("tile")
    if dim is None or not mods.flag("add"):
        raise unmodelled(ins)
    return _tensor_store(ins, k, mods, int(dim[0]), True)


def _tensor_store(ins: Instr, k: Decoder, mods: Mods, rank: int, add: bool) -> Handler:
    """cp.async.bulk.tensor.Nd.global.shared::cta.tile.bulk_group [map, {coords}], [src]"""
    mods.take("global")
    mods.take("shared::cta", "shared")
    if not mods.flag("bulk_group"):
        raise unmodelled(ins)
    mods.take("L2::cache_hint")
    mods.done()
    target = _Tensor(ins, k, ins.args[0], rank)
    source = address(k, ins.args[1], "shared")

    def run(w: Any, m: Any) -> None:
        for lane in lanes_of(m):
            t, at = target.of(w, lane)
            s = int(source(w.v)[lane])
            check_map(t, s)
            if add and t.kind != "f32":
                raise SoftGpuError(f"{ins.opcode}: elements of type {t.kind} are not modelled")

            def land(t: TensorMap = t, at: Any = at, s: int = s) -> None:
                store(w, t, at, s, add)
                w.machine.version += 1

            if w.hazard is not None:
                _track_store(w, int(lane), t, at, s, add)
            bulk_group(w, int(lane)).items.append(w.machine.issue(land, ins.opcode))

    return run
