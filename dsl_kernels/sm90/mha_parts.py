"""What dense MHA prefill on SM90 is composed of, beside its arithmetic (mha_fwd.py).

    item     producer -> consumers         which work tile comes: head, rows, lengths
    q        producer -> consumers         rows of a work tile
    k, v     producer -> consumers         tiles of keys, the last tile first
    tail     producer -> clearing warp     a tile of V that reaches behind its sequence is asked for
    clean    clearing warp -> consumers    that tile, zeroed behind the end

Keys of the neighbour.  A sequence's last tile holds rows of whatever lies behind it: the next
sequence, or nobody's memory.  Their logits are replaced (a select, not a sum), and their V is
zeroed in shared memory, since P = 0 does not make 0 of a NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from .. import compat
from ..common.barriers import Ring
from ..common.epilogue import Woven
from ..common.smem import array, staged
from ..common.types import U32
from ..mha_list import HEADER, LAST_SECTION, ROWS, SECTION, TAKEN, TILE_WORDS, TILES, WIDTHS
from ..smxx.mha_items import key_tiles, length

if TYPE_CHECKING:
    from ..spec import VariantSpec

STAGES = 2  # of K, and of V
CONSUMER_WARPS = 8
LINE = 128  # bytes of a swizzled row in shared memory
LN2 = 0.6931471805599453
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
    """By every warp that reads a slot: it has read it."""
    cute.arch.sync_warp()
    arrive_if(ring.empty_barrier(st, slot), cute.arch.lane_idx() == 0)


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
        slot, lane = count % 2, cute.arch.lane_idx()
        self.ring.wait_empty(st, slot, ((count // 2) & 1) ^ 1)
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


class Loads:
    """The producer's warp: takes work tiles, notes them, loads them; and the rings that it fills.

    Attributes:
        widths: channels of K's tensors, side by side in the tile.
        d_qk, d_v: channels of a row of Q and K, of V.
        tile: keys of a tile of K and V.
    """

    def __init__(self, spec: VariantSpec):
        self.widths, self.d_qk, self.d_v = WIDTHS[spec.d_qk], spec.d_qk, spec.d_v
        self.tile = spec.key_tile
        who = {"consumers": CONSUMER_WARPS}
        # head (-1 ends the list), first query token of the sequence, query tokens, keys, row tile
        self.notes = Notes("item", 5, who)
        # use of V's ring, keys of the tile that are the sequence's; -1 and 0 end the list
        self.tails = Notes("tail", 2, {"clearing": 1})
        self.q = Ring("q", 1, {"producer": 1}, who)
        self.k = Ring("k", STAGES, {"producer": 1}, who)
        self.v = Ring("v", STAGES, {"producer": 1}, who)
        self.clean = Ring("clean", STAGES, {"clearing": 1})
        rest = (self.q, self.k, self.v, self.clean)
        self.rings = (self.notes.ring, self.tails.ring, *rest)
        self.fields = {**self.notes.fields, **self.tails.fields}
        for ring in rest:
            self.fields.update(ring.field)

    def init(self, st) -> None:
        """By one thread, before the fence that publishes all barriers."""
        for ring in self.rings:
            ring.init(st)

    @cute.jit
    def _fill(self, ring: cutlass.Constexpr, st, count, boxes, tile, size):
        """One tile of K or V into the ring's slot of use ``count``."""
        slot, phase = count % STAGES, (count // STAGES) & 1
        ring.wait_empty(st, slot, phase ^ 1)
        barrier = ring.full_barrier(st, slot)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        for loaded, target, source in boxes:
            cute.copy(loaded.atom, source[None, tile], target[None, slot], tma_bar_ptr=barrier)

    def _boxes(self, loaded, tiles, coords, tile, axis):
        """(shared boxes by stage, global boxes by tile)."""
        return cpasync.tma_partition(
            loaded.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2),
            cute.group_modes(cute.local_tile(coords, tile, axis), 0, 2),
        )  # fmt: skip

    def _k_boxes(self, tk, tiles, k0, kv_head, rope_heads) -> Boxes:
        """Of K's tensors; RoPE channels may be those of one head that all share."""
        out, at = [], 0
        heads = (kv_head, cutlass.select_(rope_heads > 1, kv_head, Int32(0)))
        for loaded, width, head in zip(tk, self.widths, heads):
            part = cute.local_tile(tiles, (self.tile, width), (0, at // width, None))
            moved = cute.domain_offset((k0, 0), loaded.coords[None, None, head])
            out.append((loaded, *self._boxes(loaded, part, moved, (self.tile, width), (None, 0))))
            at += width
        return out

    @cute.jit
    def run(self, st, layouts, tma, gmem, causal, group, rope_heads, ctas):
        """The role.  ``gmem`` = (cu_seqlens_q, cu_seqlens_k, work, query heads)."""
        cu_q, cu_k, work, heads = gmem
        count, kc, done, told = Int32(0), Int32(0), Int32(0), Int32(0)
        total = work[TILES] * heads
        j, _, _ = cute.arch.block_idx()
        j = Int32(j)
        while j < total:
            tile, head = self._work_tile(j, work[TILES], heads)
            at = HEADER + TILE_WORDS * tile
            sequence, m = work[at], work[at + 1]
            q0, k0 = cu_q[sequence], cu_k[sequence]
            s_q, s_k = length(cu_q, sequence), length(cu_k, sequence)
            self.notes.write(st, count, (head, q0, s_q, s_k, m))
            count += 1
            n = key_tiles(s_q, s_k, m, causal, self.tile)
            if n > 0:
                kv_head, _ = divmod(head, group)
                where = (q0, m, head, k0, kv_head, rope_heads)
                counts = (kc, done, told)
                self._load(st, layouts, tma, where, counts, n, s_k - (n - 1) * self.tile)
                if has_tail(s_k, n, self.tile):
                    told += 1
                done += 1
                kc += n
            taken = Int32(0)
            if cute.arch.lane_idx() == 0:
                taken = Int32(cute.arch.atomic_add(work.iterator + TAKEN, Int32(1)))
            j = ctas + cute.arch.shuffle_sync(taken, 0)
        none = Int32(-1)
        self.notes.write(st, count, (none, none, none, none, none))
        self.tails.write(st, told, (none, Int32(0)))

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

    @cute.jit
    def _load(self, st, layouts, tma, where, counts, n, valid):
        """Q, then K and V of a work tile's ``n`` tiles from the last on, V a tile behind K.

        The last tile has ``valid`` keys of the sequence.  If that is not all, the clearing warp is
        told once V's slot was free: it waits for one of the ring's phases, not for each, and so
        must not come to the barrier while an earlier use is still on its way.
        """
        kc, done, told = counts
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
        if valid < self.tile:
            self.tails.write(st, told, (kc, valid))
        for x in cutlass.range(2, n, unroll=1):
            self._fill(self.k, st, kc + x, ks, n - 1 - x, k_bytes)
            self._fill(self.v, st, kc + x - 1, vs, n - x, v_bytes)
        if n > 1:
            self._fill(self.v, st, kc + n - 1, vs, 0, v_bytes)

    @cute.jit
    def clear(self, st):
        """The clearing warp's role: V behind a sequence's end, in its last tile."""
        count = Int32(0)
        vc, valid = self.tails.read(st, count)
        while vc >= 0:
            slot = vc % STAGES
            self.v.wait_full(st, slot, (vc // STAGES) & 1)
            self._clear(st, slot, valid)
            self.clean.arrive_full_if(st, slot, cute.arch.lane_idx() == 0)
            count += 1
            vc, valid = self.tails.read(st, count)

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
    """Whether the last of ``n`` tiles of ``tile`` keys reaches behind the sequence."""
    return n * tile > s_k


class Rows:
    """Rows of results, from fragments of 64 x d_v accumulators.

    Attributes:
        dtype: of the output.
        d_v: its channels.
    """

    def __init__(self, dtype, d_v: int):
        self.dtype, self.d_v = dtype, d_v

    @cute.jit
    def write(self, results, acc_o, frame, total, q0, s_q, head, row):
        """Normalised rows ``row`` and ``row + 8`` of a sequence, 16 bytes a store, and their LSE.

        The four lanes of a quad hold pairs of channels of the same row; a transpose of words gives
        each a run of 8 channels.
        """
        out, lse = results
        quad = cute.arch.lane_idx() % 4
        woven = Woven((1, 2), quad, 8)
        for i in cutlass.range_constexpr(2):
            s = total[i]
            for off in cutlass.range_constexpr(2):
                s = s + cute.arch.shuffle_sync_bfly(s, 1 << off)
            empty = s == 0.0
            inverse = cute.arch.rcp_approx(s)
            mine = row + 8 * i < s_q
            token = q0 + row + 8 * i
            if mine & (quad == 0):
                value = (frame[i] + cute.math.log2(s, fastmath=True)) * LN2
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
                if mine:
                    at = cute.crd2idx((token, head, 32 * g + 8 * quad), out.layout)
                    compat.store_words((out.iterator + at).align(16), turned)
