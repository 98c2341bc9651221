"""Loads, notes and rows of results of dense MHA prefill on SM90; its arithmetic is in mha_fwd.py.

    item     producer -> consumers         which work tile comes: head, rows, lengths
    q        producer -> consumers         rows of a work tile
    k, v     producer -> consumers         tiles of keys, the last tile first
    tail     producer -> clearing warp     a tile of V that reaches behind its sequence is asked for
    clean    clearing warp -> consumers    that tile, zeroed behind the end
    seen     consumers -> clearing warp    see sm90/hidden_keys.py, as do verdicts

Keys of the neighbour.  A sequence's last tile holds rows of whatever lies behind it: the next
sequence, or nobody's memory.  Their logits are replaced (a select, not a sum), and their V is
zeroed in shared memory, since P = 0 does not make 0 of a NaN.  A key of the sequence itself that
some rows of a work tile do not see is sm90/hidden_keys.py's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import cpasync

from ..blocks import compat
from ..blocks.barriers import Ring
from ..blocks.smem import array, staged
from ..blocks.types import F16, U32
from ..combine.epilogue import Woven
from ..formats.mha_list import HEADER, LAST_SECTION, ROWS, SECTION, TAKEN, TILE_WORDS, TILES, WIDTHS
from ..schedule.mha_items import key_tiles, length
from .hidden_keys import CONSUMER_WARPS, LINE, Hidden, any_nan, times_zero, whole_tiles

if TYPE_CHECKING:
    from ..spec import VariantSpec

STAGES = 2  # of K, and of V
LN2 = 0.6931471805599453
# m_refs below which rows are right.  A logit in fp32 is off by up to half its last place, and so is
# its distance from the m_ref: by 64 below 2^31, which fp32 sums of P' bear; by 1/2 below 2^24, so
# that P' <= 2^15.5, which fp16 holds.
LARGEST, LARGEST_F16 = 2.0**31, 2.0**24
Boxes = list[tuple[Any, Any, Any]]  # (descriptor, shared boxes by stage, global boxes by tile)


@compat.dsl_user_op
def arrive_if(barrier, chosen, *, loc=None, ip=None) -> None:
    """One arrival by the threads with ``chosen``, without a branch."""
    compat.inline_ptx(
        "{\n.reg .pred p;\nsetp.ne.s32 p, {$r0}, 0;\n"
        "@p mbarrier.arrive.shared::cta.b64 _, [{$r1}];\n}",
        read_only_args=[Int32(chosen), barrier.toint(loc=loc, ip=ip)], loc=loc, ip=ip,
    )  # fmt: skip


@cute.jit
def release(ring: cutlass.Constexpr, st, slot):
    """Free slot ``slot`` of ``ring`` for the calling warp; every warp that reads the slot calls
    this once it has read it."""
    cute.arch.sync_warp()
    arrive_if(ring.empty_barrier(st, slot), cute.arch.lane_idx() == 0)


def to_a(acc, target, count: int, dtype) -> None:
    """The first ``count`` fp32 values of an accumulator -> A of a further product, in 16 bits;
    vectors of a power of two, or else words are put together by PRMT."""
    chunk = count & -count
    layout = cute.make_layout(chunk)
    for at in range(0, count, chunk):
        values = cute.make_tensor(acc.iterator + at, layout).load().to(dtype)
        cute.make_tensor(target.iterator + at, layout).store(values)


class Notes:
    """A few words at a time, from one warp to others that read them all: two slots.

    Attributes:
        words: of a note.
        name: of the field; ``ring``: its barriers.
    """

    room = 8  # words of a slot

    def __init__(self, name: str, words: int, readers: dict[str, int]):
        self.name, self.words = name, words
        self.ring = Ring(name, 2, {"producer": 1}, readers)
        self.fields = {**self.ring.field, name: array(Int32, 2 * self.room, 16)}

    def _slot(self, st, slot):
        notes = getattr(st, self.name).get_tensor(cute.make_layout((self.room, 2)))
        return notes[None, slot]

    @cute.jit
    def write(self, st, count, note):
        """The ``count``-th note, by the producer's warp."""
        self.ring.wait_empty(st, count % 2, ((count // 2) & 1) ^ 1)
        self.put(st, count, note)

    @cute.jit
    def put(self, st, count, note):
        """``write`` where its slot is known to be free."""
        slot, lane = count % 2, cute.arch.lane_idx()
        words = self._slot(st, slot)
        if lane == 0:
            for i in cutlass.range_constexpr(self.words):
                words[i] = note[i]
        self.ring.arrive_full_if(st, slot, lane == 0)

    @cute.jit
    def read(self, st, count):
        """The ``count``-th note, by a warp that reads them all."""
        slot = count % 2
        self.ring.wait_full(st, slot, (count // 2) & 1)
        words = self._slot(st, slot)
        note = [words[i] for i in range(self.words)]
        release(self.ring, st, slot)
        return tuple([cute.arch.make_warp_uniform(word) for word in note])


class WorkTiles:
    """Base of the producers' warps: takes work tiles, and finds their TMA boxes.

    Attributes:
        widths: channels of K's tensors, side by side in the tile.
        tile: rows of a tile of what streams.
    """

    widths: tuple[int, ...]
    tile: int

    def _boxes(self, loaded, tiles, coords, tile, axis):
        """(shared boxes by stage, global boxes by tile)."""
        return cpasync.tma_partition(
            loaded.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2),
            cute.group_modes(cute.local_tile(coords, tile, axis), 0, 2),
        )  # fmt: skip

    def _k_boxes(self, tk, tiles, k0, kv_head, rope_heads, keys: int = 0) -> Boxes:
        """TMA boxes of K's tensors from key ``k0`` on, ``keys`` (0: a tile) at a time; RoPE
        channels are those of head 0 if ``rope_heads`` is 1: all heads share them."""
        keys = keys or self.tile
        out, at = [], 0
        heads = (kv_head, cutlass.select_(rope_heads > 1, kv_head, Int32(0)))
        for loaded, width, head in zip(tk, self.widths, heads):
            part = cute.local_tile(tiles, (keys, width), (0, at // width, None))
            moved = cute.domain_offset((k0, 0), loaded.coords[None, None, head])
            out.append((loaded, *self._boxes(loaded, part, moved, (keys, width), (None, 0))))
            at += width
        return out

    def taken_apart(self, gmem, j):
        """Return two tuples about work tile ``j``: its note without the last word, (head, first
        query token, query tokens, keys, row tile), and its place, (first query token, first key,
        query tokens, keys, row tile, head)."""
        *tables, heads = gmem
        tile, head = self._work_tile(j, tables[2][TILES], heads)
        _, m, q0, k0, s_q, s_k = self.entry(tables, tile)
        return (head, q0, s_q, s_k, m), (q0, k0, s_q, s_k, m, head)

    def entry(self, tables, tile):
        """Return the list's ``tile``-th entry: (sequence, tile of it, first query token, first key,
        query tokens, keys).  ``tables`` = (cu_seqlens_q, cu_seqlens_k, work)."""
        cu_q, cu_k, work = tables
        at = HEADER + TILE_WORDS * tile
        sequence, m = work[at], work[at + 1]
        q0, k0 = cu_q[sequence], cu_k[sequence]
        return sequence, m, q0, k0, length(cu_q, sequence), length(cu_k, sequence)

    @cute.jit
    def _taken(self, work):
        """Take a work tile: return how many were taken before, beyond the first of each CTA."""
        taken = Int32(0)
        if cute.arch.lane_idx() == 0:
            taken = Int32(cute.arch.atomic_add(work.iterator + TAKEN, Int32(1)))
        return cute.arch.shuffle_sync(taken, 0)

    @cute.jit
    def _work_tile(self, j, tiles, heads):
        """(place in the list, head) of work tile ``j``: mha_list.py."""
        beside = Int32(SECTION)
        last = cutlass.max(heads - LAST_SECTION, 0) // SECTION * SECTION  # its first head
        first = j // (SECTION * tiles) * SECTION
        if first >= last:
            first, beside = last, heads - last
        rest = j - first * tiles
        tile = rest // beside
        return tile, first + (rest - tile * beside)


class Loads(WorkTiles):
    """The producer's warp: takes work tiles, notes them, loads them; and the rings that it fills.

    Attributes:
        widths: channels of K's tensors, side by side in the tile.
        d_qk, d_v: channels of a row of Q and K, of V.
        tile: keys of a tile of K and V.
        note_readers, tile_readers: who reads notes of work tiles; who frees Q, K and V.
    """

    note_readers = tile_readers = {"consumers": CONSUMER_WARPS}  # noqa: RUF012 (none changes it)

    def __init__(self, spec: VariantSpec):
        self.widths, self.d_qk, self.d_v = WIDTHS[spec.d_qk], spec.d_qk, spec.d_v
        self.tile, who = spec.key_tile, self.tile_readers
        # head (-1: a pause), first query token of the sequence, query tokens, keys, row tile, is it
        # taken again
        self.notes = Notes("item", 6, self.note_readers)
        # use of V's ring (-1 ends the list), keys of the tile that are the sequence's; of a work
        # tile that is taken again the tile's first key, else -1; is it the work tile's first
        self.tails = Notes("tail", 4, {"clearing": 1})
        self.q = Ring("q", 1, {"producer": 1}, who)
        self.k = Ring("k", STAGES, {"producer": 1}, who)
        self.v = Ring("v", STAGES, {"producer": 1}, who)
        self.clean = Ring("clean", STAGES, {"clearing": 1})
        rest = (self.q, self.k, self.v, self.clean)
        self.hidden = Hidden(self.notes.ring, compat.dtype(spec.dtype), spec.d_v, spec.key_tile)
        self.rings = (self.notes.ring, self.tails.ring, *rest, self.hidden.seen)
        self.fields = {**self.notes.fields, **self.tails.fields, **self.hidden.fields}
        for ring in rest:
            self.fields.update(ring.field)

    def init(self, st) -> None:
        """Initialise the barriers of all rings; one thread calls this, before the fence that
        publishes all barriers."""
        for ring in self.rings:
            ring.init(st)

    @cute.jit
    def _fill(self, ring: cutlass.Constexpr, st, count, boxes, tile, size):
        """Load a tile of K or V into the ring's slot of use ``count``."""
        slot, phase = count % STAGES, (count // STAGES) & 1
        ring.wait_empty(st, slot, phase ^ 1)
        barrier = ring.full_barrier(st, slot)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        for loaded, target, source in boxes:
            cute.copy(loaded.atom, source[None, tile], target[None, slot], tma_bar_ptr=barrier)

    @cute.jit
    def run(self, st, layouts, tma, gmem, causal, group, rope_heads, ctas):
        """The role.  ``gmem`` = (cu_seqlens_q, cu_seqlens_k, work, query heads)."""
        work, heads = gmem[2], gmem[3]
        count, kc, done, told = Int32(0), Int32(0), Int32(0), Int32(0)
        total, going = work[TILES] * heads, Boolean(True)
        following, _, _ = cute.arch.block_idx()
        following = Int32(following)
        while going:
            j, again = self.hidden.choose(st, count, following, causal)
            if j < total:
                note, (q0, k0, s_q, s_k, m, head) = self.taken_apart(gmem, j)
                self.notes.put(st, count, (*note, again))
                n = key_tiles(s_q, s_k, m, causal, self.tile)
                if n > 0:
                    kv_head, _ = divmod(head, group)
                    where = (q0, m, head, k0, kv_head, rope_heads)
                    cleared = Int32(cutlass.select_(has_tail(s_k, n, self.tile), 1, 0))
                    if again != 0:
                        cleared = n - whole_tiles(s_q, s_k, m * ROWS, n, self.tile, causal)
                    counts = (kc, done, told)
                    valid = cutlass.min(s_k - (n - 1) * self.tile, self.tile)
                    self._load(st, layouts, tma, where, counts, n, (valid, cleared, again))
                    told += cleared
                    done += 1
                    kc += n
                if again == 0:
                    following = ctas + self._taken(work)
            else:
                self.notes.put(st, count, (Int32(-1),) * self.notes.words)
                compat.pdl_launch_dependents()
                going = self.hidden.left(st, count)
            count += 1
        self.tails.write(st, told, (Int32(-1),) * self.tails.words)

    @cute.jit
    def _load(self, st, layouts, tma, where, counts, n, look):
        """Q, then K and V of a work tile's ``n`` tiles from the last on, V a tile behind K.

        ``look``: keys of the last tile that are the sequence's, how many tiles from the last on are
        the clearing warp's, is the work tile taken again.  The clearing warp is told once V's slot
        was free: it waits for one of the ring's phases, not for each, and so must not come to the
        barrier while an earlier use is still on its way.
        """
        kc, done, told = counts
        valid, cleared, again = look
        lq, lk, lv = layouts
        tq, tv, *tk = tma
        q0, m, head, k0, kv_head, rope_heads = where
        q_tile, k_tile, v_tile = staged(st.q, lq), staged(st.k, lk), staged(st.v, lv)
        moved_q = cute.domain_offset((q0, 0), tq.coords[None, None, head])
        moved_v = cute.domain_offset((0, k0), tv.coords[None, None, kv_head])
        s_q, g_q = self._boxes(tq, q_tile, moved_q, (ROWS, self.d_qk), (m, 0))
        ks = self._k_boxes(tk, k_tile, k0, kv_head, rope_heads)
        vs = [(tv, *self._boxes(tv, v_tile, moved_v, (self.d_v, self.tile), (0, None)))]
        self.q.wait_empty(st, 0, (done & 1) ^ 1)
        barrier = self.q.full_barrier(st, 0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, 2 * ROWS * self.d_qk)
        cute.copy(tq.atom, g_q, s_q[None, 0], tma_bar_ptr=barrier)
        k_bytes, v_bytes = 2 * self.tile * self.d_qk, 2 * self.tile * self.d_v
        self._fill(self.k, st, kc, ks, n - 1, k_bytes)
        if n > 1:
            self._fill(self.k, st, kc + 1, ks, n - 2, k_bytes)
        self._fill(self.v, st, kc, vs, n - 1, v_bytes)
        if cleared > 0:
            begin = cutlass.select_(again != 0, (n - 1) * self.tile, Int32(-1))
            self.tails.write(st, told, (kc, valid, Int32(begin), Int32(1)))
        for x in cutlass.range(2, n, unroll=1):
            self._fill(self.k, st, kc + x, ks, n - 1 - x, k_bytes)
            self._fill(self.v, st, kc + x - 1, vs, n - x, v_bytes)
            if x - 1 < cleared:
                self._tell(st, told, kc, x - 1, n)
        if n > 1:
            self._fill(self.v, st, kc + n - 1, vs, 0, v_bytes)
            if n - 1 < cleared:
                self._tell(st, told, kc, n - 1, n)

    def _tell(self, st, told, kc, x, n):
        """The clearing warp of the ``x``-th tile of V, not the first, of a work tile."""
        note = (kc + x, Int32(self.tile), (n - 1 - x) * self.tile, Int32(0))
        self.tails.write(st, told + x, note)

    @cute.jit
    def clear(self, st):
        """The clearing warp's role: V behind a sequence's end, in its last tile; where a work tile
        is taken again V that is not finite, in tiles that not all of its rows see."""
        count, again = Int32(0), Int32(0)
        vc, valid, begin, fresh = self.tails.read(st, count)
        while vc >= 0:
            slot = vc % STAGES
            self.v.wait_full(st, slot, (vc // STAGES) & 1)
            self._clear(st, slot, valid)
            if begin >= 0:
                if fresh != 0:
                    self.hidden.seen.wait_full(st, 0, (again & 1) ^ 1)
                    again += 1
                self.hidden.scan(st, slot, valid, begin, fresh)
            self.clean.arrive_full_if(st, slot, cute.arch.lane_idx() == 0)
            count += 1
            vc, valid, begin, fresh = self.tails.read(st, count)

    @cute.jit
    def _clear(self, st, slot, valid):
        """Zeroes V of the keys from ``valid`` on.

        A key's 64 channels are a whole line of 128 bytes, keys side by side in a column block: no
        swizzle to mind.
        """
        zero = cute.make_rmem_tensor((4,), U32)
        zero.fill(0)
        for block in cutlass.range_constexpr(self.d_v * 2 // LINE):
            begin = st.v.data_ptr().toint() + (slot * self.d_v * 2 + block * LINE) * self.tile
            for at in cutlass.range(
                valid * LINE + cute.arch.lane_idx() * 16, self.tile * LINE, 32 * 16, unroll=1
            ):
                line = cute.make_ptr(
                    U32, Int32(begin + at), cute.AddressSpace.smem, assumed_align=16
                )
                cute.autovec_copy(zero, cute.make_tensor(line, cute.make_layout(4)))
        cute.arch.fence_proxy("async.shared", space="cta")  # WGMMA reads these, TMA writes behind
        cute.arch.sync_warp()


def has_tail(s_k, n, tile: int):
    """Return true if the last of ``n`` tiles of ``tile`` keys reaches past the sequence's ``s_k``
    keys."""
    return n * tile > s_k


class Rows:
    """Rows of results, from fragments of 64 x d_v accumulators.

    Attributes:
        dtype: of the output.
        d_v: its channels.
        largest: m_refs of rows that are right are below it.
    """

    def __init__(self, dtype, d_v: int):
        self.dtype, self.d_v = dtype, d_v
        self.largest = LARGEST_F16 if dtype is F16 else LARGEST

    @cute.jit
    def write(self, results, acc_o, m_ref, total, limit, q0, s_q, head, row):
        """Normalised rows ``row`` and ``row + 8`` of a sequence, 16 bytes a store, and their LSE;
        returns whether a row of the thread is not finite that its sum does not explain.

        The four lanes of a quad hold pairs of channels of the same row; a transpose of words gives
        each a run of 8 channels.
        """
        out, lse = results
        quad = cute.arch.lane_idx() % 4
        woven, bad = Woven((1, 2), quad, 8), Boolean(False)
        for i in cutlass.range_constexpr(2):
            s, empty = self._sum(m_ref[i], total[i], limit[i])
            inverse, looked = cute.arch.rcp_approx(s), Uint32(0)
            mine = row + 8 * i < s_q
            token = q0 + row + 8 * i
            if mine & (quad == 0):
                value = (m_ref[i] + cute.math.log2(s, fastmath=True)) * LN2
                lse[head, token] = -Float32.inf if empty else value
            for g in cutlass.range_constexpr(self.d_v // 32):
                pairs = []
                for x in cutlass.range_constexpr(4):
                    v = 4 * (4 * g + x) + 2 * i
                    pairs.append(
                        [
                            Float32(cutlass.select_(empty, Float32(0.0), acc_o[v + y] * inverse))
                            for y in range(2)
                        ]
                    )
                turned = woven.swap(pairs, self.dtype)
                for word in turned:
                    looked = times_zero(word, self.dtype, looked)
                if mine:
                    at = cute.crd2idx((token, head, 32 * g + 8 * quad), out.layout)
                    compat.store_words((out.iterator + at).align(16), turned)
            bad = bad | (mine & (s == s) & any_nan(looked))
        return bad

    def _sum(self, m_ref, own, limit):
        """(A row's sum over its lanes, does it see no key?).

        The sum is NaN where logits are so large that their distance from the m_ref is not known,
        and for keys of which none has entered the sum.
        """
        s = own
        for off in range(2):
            s = s + cute.arch.shuffle_sync_bfly(s, 1 << off)
        far = (limit > 0) & ~(cute.math.absf(m_ref) < self.largest)
        s = Float32(cutlass.select_(far, Float32(float("nan")), s))
        return s, s == 0.0
