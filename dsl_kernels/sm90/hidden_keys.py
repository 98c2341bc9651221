"""Dense MHA prefill beside a V that holds a NaN or an infinity, of a key that some rows of a work
tile see and others do not.

A hidden key has P = 0, and 0 times a NaN or an infinity is NaN.  Where the mask cuts a tile of keys
the same line of V is hidden to one row and seen by the next, so that clearing lines does not do;
and numbers are looked at only where something has gone wrong.  So:

    consumers   vote at a work tile's end: did a row whose logits are sound come out with a NaN?
    producer    takes such a work tile *again*, as the next one: as before, but each tile of keys
                that some row of the work tile does not see as a whole goes by the clearing warp
    clearing    makes zeros of V's NaNs and infinities there, and notes of each channel the first
                key that has one; the other channels of that key stay
    consumers   before rows are written: a channel of a row that sees that first key becomes NaN

What a row sees is a range of keys from the first one on, so that one number a channel is enough.
Rows that do not see it have the bits that they would have beside a sound V: the same products in
the same order, of the same P and a finite V.

Verdicts have four slots, a word for each consumer warp.  The producer asks for that of work tile
``count - 3`` when it notes ``count``: it has waited until all have read the note of ``count - 2``,
before which they told it.  What is left at the end of the list is found behind a note without a
head (-1), a *pause*: once all consumers have read it they have told every verdict, and all of them
and the producer come to the same conclusion, that this was the end or that other notes follow.

Cost where V is finite: an instruction for two channels of a row at a work tile's end, a word to
shared memory and one out of it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..blocks import compat
from ..blocks.barriers import Ring
from ..blocks.smem import array
from ..blocks.types import BF16, U32

CONSUMER_WARPS = 8
SLOTS = 4  # of verdicts
LINE = 128  # bytes of a swizzled row in shared memory
NOWHERE = 2**31 - 1  # number of a channel's first bad key where there is none


@compat.dsl_user_op
def times_zero(word, dtype, total, *, loc=None, ip=None):
    """``total`` + 0 * word, of two 16-bit numbers each: 0, or NaN once a word was not finite."""
    kind = "bf16x2" if dtype is BF16 else "f16x2"
    return compat.inline_ptx(
        "{\n.reg .b32 word, zero, total;\n"
        "mov.b32 word, {$r0};\nmov.b32 zero, 0;\nmov.b32 total, {$r1};\n"
        f"fma.rn.{kind} {{$w0}}, word, zero, total;\n}}",
        write_only_types=[Uint32], read_only_args=[Uint32(word), Uint32(total)], loc=loc, ip=ip,
    )  # fmt: skip


def any_nan(total):
    """Return true if ``times_zero`` has met a number that is not finite."""
    return (total & Uint32(0x7FFF7FFF)) != 0


@cute.jit
def whole_tiles(s_q, s_k, row, n, tile: cutlass.Constexpr, causal):
    """Number of leading tiles, at most ``n``, all of whose keys ``row`` of a sequence and every row
    behind it see."""
    seen = s_k
    if causal != 0:
        seen = cutlass.max(cutlass.min(s_k, row + 1 + s_k - s_q), 0)
    return cute.arch.make_warp_uniform(cutlass.min(seen // tile, n))


class Hidden:
    """Verdicts, and what the clearing warp finds in V.

    Attributes:
        dtype: of V.
        d_v: its channels.
        tile: keys of a tile.
        notes: the ring of the notes of work tiles.
        seen: consumers have read ``first`` of a work tile that was taken again.
    """

    def __init__(self, notes: Ring, dtype, d_v: int, tile: int):
        self.notes, self.dtype, self.d_v, self.tile = notes, dtype, d_v, tile
        self.seen = Ring("seen", 1, {"consumers": CONSUMER_WARPS})
        self.fields = {
            **self.seen.field,
            "verdict": array(Int32, CONSUMER_WARPS * SLOTS, 16),
            "tried": array(Int32, SLOTS, 16),  # the producer's: which work tile that was
            "first": array(Int32, d_v, 16),  # of a channel: the first key with no finite number
        }

    def _verdicts(self, st):
        return st.verdict.get_tensor(cute.make_layout((CONSUMER_WARPS, SLOTS)))

    # ---------------------------------------------------------------- verdicts

    @cute.jit
    def reset(self, st, warp):
        """Clear the verdicts of consumer warp ``warp``, which calls this before it reads the first
        note."""
        words, lane = self._verdicts(st), cute.arch.lane_idx()
        if lane < SLOTS:
            words[warp, lane] = Int32(0)

    @cute.jit
    def tell(self, st, count, warp, bad):
        """Store ``bad``, the verdict of consumer warp ``warp`` on the work tile of note
        ``count``."""
        words = self._verdicts(st)
        if cute.arch.lane_idx() == 0:
            words[warp, count % SLOTS] = Int32(cutlass.select_(bad, Int32(1), Int32(0)))

    @cute.jit
    def _told(self, st, count):
        """Return true if some consumer warp has found note ``count``'s work tile bad."""
        word = self._verdicts(st)[cute.arch.lane_idx() % CONSUMER_WARPS, count % SLOTS]
        bad = cute.arch.vote_any_sync(word != 0)
        cute.arch.sync_warp()
        return bad

    @cute.jit
    def left(self, st, count):
        """Return true if work tiles are left that are to be taken again; called behind a pause,
        note ``count``."""
        self.notes.wait_empty(st, count % 2, (count // 2) & 1)
        return self._told(st, count + SLOTS - 1) | self._told(st, count + SLOTS - 2)

    @cute.jit
    def choose(self, st, count, following, causal):
        """(work tile of note ``count``, is it taken again?); ``following``: the list's next."""
        self.notes.wait_empty(st, count % 2, ((count // 2) & 1) ^ 1)
        tried = st.tried.get_tensor(cute.make_layout(SLOTS))
        j, again = following, Int32(0)
        if (causal != 0) & (count > 2):  # noqa: SIM102 (verdicts before the third there are none)
            if self._told(st, count + SLOTS - 3):
                j, again = Int32(tried[(count + SLOTS - 3) % SLOTS]), Int32(1)
        if cute.arch.lane_idx() == 0:
            tried[count % SLOTS] = j
        cute.arch.sync_warp()
        return cute.arch.make_warp_uniform(j), again

    # ---------------------------------------------------------------- V

    @cute.jit
    def scan(self, st, slot, valid, begin, fresh):
        """Makes zeros of what is not finite in the tile of V in ``slot``, ``valid`` keys from key
        ``begin`` of the sequence on, and notes where it was; ``fresh``: of a work tile's first.

        By one warp: a line, 64 channels of a key, at a time, from the last key on.
        """
        first = st.first.get_tensor(cute.make_layout(self.d_v))
        lane = cute.arch.lane_idx()
        exponent = 0x7F80 if self.dtype is BF16 else 0x7C00
        for block in cutlass.range_constexpr(self.d_v * 2 // LINE):
            base = st.v.data_ptr().toint() + (slot * self.d_v * 2 + block * LINE) * self.tile
            low, high = Int32(NOWHERE), Int32(NOWHERE)
            for x in cutlass.range(valid, unroll=1):
                key = valid - 1 - x
                at = Int32(base + key * LINE + ((lane // 4) ^ (key % 8)) * 16 + lane % 4 * 4)
                place = cute.make_ptr(U32, at, cute.AddressSpace.smem, assumed_align=4)
                word = cute.make_tensor(place, cute.make_layout(1))
                held = Uint32(word[0])
                bad_low = (held & Uint32(exponent)) == exponent
                bad_high = (held & Uint32(exponent << 16)) == exponent << 16
                if bad_low | bad_high:
                    if bad_low:
                        low, held = begin + key, held & Uint32(0xFFFF0000)
                    if bad_high:
                        high, held = begin + key, held & Uint32(0xFFFF)
                    word[0] = held
            channel = 64 * block + 2 * lane
            if (fresh != 0) | (low != NOWHERE):
                first[channel] = low
            if (fresh != 0) | (high != NOWHERE):
                first[channel + 1] = high
        cute.arch.fence_proxy("async.shared", space="cta")  # WGMMA reads these, TMA writes behind
        cute.arch.sync_warp()

    @cute.jit
    def poison(self, st, acc_o, limit):
        """Channels of the thread's rows become NaN where the row sees a number that is not finite;
        ``limit``: how many keys a row sees."""
        first = st.first.get_tensor(cute.make_layout(self.d_v))
        lane = cute.arch.lane_idx()
        for g in cutlass.range_constexpr(self.d_v // 8):
            for y in cutlass.range_constexpr(2):
                key = first[8 * g + lane % 4 * 2 + y]
                for i in cutlass.range_constexpr(2):
                    v = 4 * g + 2 * i + y
                    acc_o[v] = cutlass.select_(key < limit[i], Float32(float("nan")), acc_o[v])
        cute.arch.sync_warp()
        self.seen.arrive_full_if(st, 0, lane == 0)
