"""State spaces (PTX ISA section 5.1).  One class a space, one entry point a direction.

Addresses are what kernels see: global addresses are the host's own, shared addresses are
``cta_rank << 24 | offset`` (so a CTA's addresses are valid in the shared::cluster window as they
stand), generic addresses of shared and local memory carry a window bit no host pointer has.
"""

from __future__ import annotations

import bisect
import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import MemoryFault

Mask = Any  # True (all 32 lanes) or a bool array of 32
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_BASE = 1024  # the first KiB belongs to the system on sm_90
SHARED_MAX = 232448
SHARED_WINDOW = 1 << 60
LOCAL_WINDOW = 1 << 61
WINDOW_MASK = SHARED_WINDOW | LOCAL_WINDOW
WIDEST = 32  # bytes that one lane can load or store at once
KNOWN = 4096  # accesses by a warp whose places a memory keeps
POISON = 0xFF  # uninitialised shared memory reads as NaN in every format


def _view_of(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class Region:
    """A contiguous range of global memory that the kernel may touch."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.base = start & ~(WIDEST - 1)
        self.bytes = _view_of(self.base, ((end + WIDEST - 1) & ~(WIDEST - 1)) - self.base)
        self._views: dict[tuple[Any, int], NDArray[Any]] = {}

    def view(self, dtype: Any, n: int) -> NDArray[Any]:
        key = (dtype, n)
        if key not in self._views:
            flat = self.bytes.view(dtype)
            self._views[key] = flat if n == 1 else flat.reshape(-1, n)
        return self._views[key]


class GlobalMemory:
    """The buffers registered for a launch; everything else faults."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int, str]] = []
        self.regions: list[Region] = []
        self._starts: list[int] = []
        self._known: dict[tuple[bytes, int], tuple[Region, NDArray[Any]]] = {}

    def add(self, name: str, address: int, nbytes: int) -> None:
        """Registers ``nbytes`` at ``address``; overlapping buffers share a region."""
        if nbytes <= 0:
            return
        if address == 0:  # numpy would give a null pointer memory of its own
            raise MemoryFault(
                f"{name}: {nbytes} bytes at address 0: the tensor has no memory (its storage was "
                "freed, or it is a FakeTensor)"
            )
        self.buffers.append((address, address + nbytes, name))
        spans = sorted([(address, address + nbytes)] + [(r.start, r.end) for r in self.regions])
        merged: list[list[int]] = []
        for start, end in spans:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        self.regions = [Region(s, e) for s, e in merged]
        self._starts = [r.start for r in self.regions]
        self._known.clear()

    def find(self, address: int) -> Region | None:
        i = bisect.bisect_right(self._starts, address) - 1
        if i >= 0 and address < self.regions[i].end:
            return self.regions[i]
        return None

    def name(self, address: int) -> str:
        """``buffer + offset`` for reports."""
        best = None
        for start, end, name in self.buffers:
            if start <= address < end:
                return f"{name} + {address - start}"
            gap = start - address if address < start else address - end + 1
            if best is None or gap < best[0]:
                best = (gap, start, end, name)
        if best is None:
            return f"{address:#x} (no buffer is registered)"
        _, start, end, name = best
        if address < start:
            return f"{address:#x}, {start - address} bytes before {name} ({end - start} bytes)"
        return f"{address:#x}, at {name} + {address - start} ({end - start} bytes)"

    def check(self, address: int, nbytes: int, what: str) -> Region:
        """The region of an access, or MemoryFault."""
        region = self.find(address)
        if region is None or address + nbytes > region.end:
            raise MemoryFault(
                f"out-of-bounds global {what} of {nbytes} bytes: {self.name(address)}"
            )
        return region

    def _uniform(self, a: NDArray[Any], nbytes: int, what: str) -> Region | None:
        """Checks all addresses; the common region if there is one."""
        low, high = int(a.min()), int(a.max())
        if int(np.bitwise_or.reduce(a)) & (nbytes - 1):
            bad = next(int(x) for x in a if int(x) & (nbytes - 1))
            raise MemoryFault(f"misaligned global {what} of {nbytes} bytes: {self.name(bad)}")
        region = self.find(low)
        if region is not None and high + nbytes <= region.end:
            return region
        for x in a:
            self.check(int(x), nbytes, what)
        return None

    def _places(
        self, a: NDArray[Any], raw: bytes, nbytes: int, what: str
    ) -> tuple[Region, NDArray[Any]] | None:
        """The common region of accesses and their indices in it; what was asked once is known.

        Args:
            raw: the bytes of ``a``.
        """
        found = self._known.get((raw, nbytes))
        if found is None:
            region = self._uniform(a, nbytes, what)
            if region is None:
                return None
            if len(self._known) == KNOWN:
                self._known.clear()
            found = region, (a - np.uint64(region.base)) // np.uint64(nbytes)
            self._known[raw, nbytes] = found
        return found

    def load(self, addr: NDArray[Any], m: Mask, dtype: Any, n: int) -> NDArray[Any]:
        """Values of all lanes, (32,) or (32, n); lanes outside the mask are zero."""
        size = np.dtype(dtype).itemsize * n
        a = addr if m is True else addr[m]
        raw = a.tobytes()
        if n == 1 and raw == raw[:8] * len(a):  # as most are: parameters, tables, what is polled
            at = int.from_bytes(raw[:8], "little")
            region = self.find(at)
            if region is not None and at + size <= region.end and not at & (size - 1):
                value = region.view(dtype, 1)[(at - region.base) // size]
                if m is True:
                    return np.full(32, value, dtype)
                out = np.zeros(32, dtype)
                out[m] = value
                return out
        places = self._places(a, raw, size, "load")
        if places is not None:
            region, index = places
            got = region.view(dtype, n)[index]
        else:
            got = np.empty((len(a), n) if n > 1 else len(a), dtype)
            for i, x in enumerate(a):
                r = self.check(int(x), size, "load")
                got[i] = r.view(dtype, n)[(int(x) - r.base) // size]
        if m is True:
            return got
        out = np.zeros((32, n) if n > 1 else 32, dtype)
        out[m] = got
        return out

    def store(self, addr: NDArray[Any], m: Mask, data: NDArray[Any], n: int) -> None:
        """Stores (32,) or (32, n); of lanes with one address the highest wins."""
        size = data.dtype.itemsize * n
        a, d = (addr, data) if m is True else (addr[m], data[m])
        places = self._places(a, a.tobytes(), size, "store")
        if places is not None:
            region, index = places
            region.view(data.dtype, n)[index] = d
            return
        for i, x in enumerate(a):
            r = self.check(int(x), size, "store")
            r.view(data.dtype, n)[(int(x) - r.base) // size] = d[i]

    def read(self, address: int, nbytes: int, what: str = "load") -> NDArray[np.uint8]:
        """A view of ``nbytes`` bytes (asynchronous copies)."""
        region = self.check(address, nbytes, what)
        return region.bytes[address - region.base : address - region.base + nbytes]


class SharedMemory:
    """The shared memory of all CTAs of a cluster, in one lazily mapped array."""

    def __init__(self, ctas: int, limit: int) -> None:
        self.ctas, self.limit = ctas, limit  # limit: end offset of a CTA's allocation
        self.bytes = np.zeros(ctas << RANK_SHIFT, np.uint8)
        self.poison()
        self._views: dict[tuple[Any, int], NDArray[Any]] = {}
        self._known: dict[tuple[bytes, int, int | None], NDArray[np.uint32]] = {}

    def poison(self) -> None:
        """Fills shared memory with ``POISON``, as new CTAs find it."""
        for rank in range(self.ctas):
            base = rank << RANK_SHIFT
            self.bytes[base + SHARED_BASE : base + self.limit] = POISON

    def view(self, dtype: Any, n: int) -> NDArray[Any]:
        key = (dtype, n)
        if key not in self._views:
            flat = self.bytes.view(dtype)
            self._views[key] = flat if n == 1 else flat.reshape(-1, n)
        return self._views[key]

    def check(self, a: NDArray[Any], nbytes: int, rank: int | None, what: str, align: int) -> None:
        """``rank`` None: any CTA of the cluster may be addressed."""
        if rank is None:
            if int(a.max()) >> RANK_SHIFT >= self.ctas:
                bad = int(a.max())
                raise MemoryFault(
                    f"shared::cluster {what}: address {bad:#x} names CTA {bad >> RANK_SHIFT} of a "
                    f"cluster of {self.ctas}"
                )
            off = a & np.uint32(OFFSET_MASK)
        else:
            off = a - np.uint32(rank << RANK_SHIFT)
        if int(off.max()) + nbytes > self.limit or int(off.min()) < SHARED_BASE:
            bad = int(off.max()) if int(off.max()) + nbytes > self.limit else int(off.min())
            raise MemoryFault(
                f"out-of-bounds shared {what} of {nbytes} bytes at offset {bad}: the CTA owns "
                f"[{SHARED_BASE}, {self.limit})"
            )
        if int(np.bitwise_or.reduce(off)) & (align - 1):
            bad = next(int(x) for x in off if int(x) & (align - 1))
            raise MemoryFault(f"misaligned shared {what} of {nbytes} bytes at offset {bad}")

    def places(
        self, a: NDArray[Any], nbytes: int, rank: int | None, what: str
    ) -> NDArray[np.uint32]:
        """Checks accesses of ``nbytes``, aligned to as many: which of all such pieces they are.

        Kernels come back to the same places all the time: what was checked once is known.
        """
        key = a.tobytes(), nbytes, rank
        found = self._known.get(key)
        if found is None:
            self.check(a, nbytes, rank, what, nbytes)
            if len(self._known) == KNOWN:
                self._known.clear()
            found = self._known[key] = a // np.uint32(nbytes)
        return found

    def load(
        self, addr: NDArray[Any], m: Mask, dtype: Any, n: int, rank: int | None
    ) -> NDArray[Any]:
        """Like ``GlobalMemory.load``."""
        size = np.dtype(dtype).itemsize * n
        a = addr if m is True else addr[m]
        got = self.view(dtype, n)[self.places(a, size, rank, "load")]
        if m is True:
            return got
        out = np.zeros((32, n) if n > 1 else 32, dtype)
        out[m] = got
        return out

    def store(
        self, addr: NDArray[Any], m: Mask, data: NDArray[Any], n: int, rank: int | None
    ) -> None:
        size = data.dtype.itemsize * n
        a, d = (addr, data) if m is True else (addr[m], data[m])
        self.view(data.dtype, n)[self.places(a, size, rank, "store")] = d

    def span(self, address: int, nbytes: int, what: str, align: int = 16) -> NDArray[np.uint8]:
        """A view of consecutive bytes of one CTA (bulk copies, matrix rows)."""
        self.check(np.array([address], np.uint32), nbytes, None, what, align)
        return self.bytes[address : address + nbytes]


class LocalMemory:
    """Per-thread memory of one warp; addresses are offsets from 0."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.bytes = np.full((32, max((size + 15) & ~15, 16)), POISON, np.uint8)

    def _index(self, addr: NDArray[Any], m: Mask, nbytes: int, what: str) -> NDArray[Any]:
        a = addr.astype(np.int64) & (LOCAL_WINDOW - 1)
        b = a if m is True else a[m]
        if int(b.max()) + nbytes > self.size or int(np.bitwise_or.reduce(b)) & (nbytes - 1):
            raise MemoryFault(
                f"local {what} of {nbytes} bytes at offset {int(b.max())}: out of bounds "
                f"({self.size} bytes) or misaligned"
            )
        return a if m is True else np.where(m, a, 0)

    def load(self, addr: NDArray[Any], m: Mask, dtype: Any, n: int) -> NDArray[Any]:
        size = np.dtype(dtype).itemsize * n
        a = self._index(addr, m, size, "load")
        view: NDArray[Any] = self.bytes.view(dtype)
        view = view if n == 1 else view.reshape(32, -1, n)
        return view[np.arange(32), a // size]

    def store(self, addr: NDArray[Any], m: Mask, data: NDArray[Any], n: int) -> None:
        size = data.dtype.itemsize * n
        a = self._index(addr, m, size, "store")
        view: NDArray[Any] = self.bytes.view(data.dtype)
        view = view if n == 1 else view.reshape(32, -1, n)
        lanes = np.arange(32) if m is True else np.nonzero(m)[0]
        view[lanes, (a // size)[lanes]] = data[lanes]
