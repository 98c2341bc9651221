"""A softmax warpgroup of SM100's dense MHA prefill (mha_fwd.py): S -> P, its O, and rows.

A thread has one row of its turn's tiles: m_ref, row sum and O are its own.  ``m_ref`` is that of
sm90/online_softmax.py; where one moves, O is rescaled in tensor memory, behind P.V of the turn
before.  Behind a work tile's last turn both warpgroups' parts of a row become one: each writes half
of the channels, of O of both.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.experimental import primitives as prim

from ...blocks import compat
from ...blocks.rounding import fma
from ...blocks.types import F16
from ...combine.online_softmax import NEVER
from ...formats.mha_list import ROWS
from ...schedule.mha_items import key_tiles
from ...sm90.attention_parts import LARGEST, LARGEST_F16, LN2
from ...sm90.hidden_keys import any_nan, times_zero, whole_tiles
from ...sm90.online_softmax import raise_m_ref
from .. import umma
from ..b16.dense_parts import WARPGROUP, store, wait_stores
from .mha_issue import O_AT, P_AT, S_AT, TILE, TURNS, Loads100

CHUNK = 32  # columns in registers at a time
WARPS = WARPGROUP // 32
BOTH = 1  # a named barrier of the warpgroups


@compat.dsl_user_op
def store_words(address, words, *, loc=None, ip=None) -> None:
    """32-bit ``words`` to as many columns from ``address`` on of this thread's lane."""
    vector = cutlass.Vector.from_elements(tuple(words), Int32)
    prim.tcgen05_st(
        "32x32b", prim.make_tmem_ptr(address, Int32, loc=loc, ip=ip), vector, loc=loc, ip=ip
    )


class Softmax:
    """The role of warpgroup ``turn``, of tiles turn, turn + 2 ... of every work tile.

    Attributes:
        loads: rings.
        dtype: of P and of results.
        d_v: channels of O.
        largest: m_refs of rows that are right are below it.
    """

    def __init__(self, loads: Loads100, dtype):
        self.loads, self.dtype, self.d_v = loads, dtype, loads.d_v
        self.largest = LARGEST_F16 if dtype is F16 else LARGEST

    @cute.jit
    def run(self, st, tmem, results, scale, causal, turn, following):
        """The role; ``following``: the next note, as the consumers of SM90 take it."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, cute.arch.make_warp_uniform(tidx % WARPGROUP // 32)
        mine, number = warp * 32 + lane, turn * WARPS + warp
        at = umma.lanes_of(tmem, warp)
        running = cute.make_rmem_tensor((2,), Float32)  # m_ref, sum
        own, ended, done, finds = Int32(0), Int32(0), Int32(0), Int32(0)
        self.loads.hidden.reset(st, number)
        count = Int32(0)
        head, q0, s_q, s_k, m, again = self.loads.notes.read(st, count)  # none is taken again yet
        while head >= 0:
            n, row = key_tiles(s_q, s_k, m, causal, TILE), m * ROWS + mine
            whole = whole_tiles(s_q, s_k, m * ROWS, n, TILE, causal)
            limit = s_k  # keys that the row sees
            if causal != 0:
                limit = cutlass.min(s_k, row + 1 + s_k - s_q)
            running[0], running[1] = Float32(NEVER), Float32(0.0)
            for x in cutlass.range(turn, n, TURNS, unroll=1):
                tile = n - 1 - x
                masked = tile >= whole
                self.block(st, at, running, scale, limit - tile * TILE, masked, turn, own, x > turn)
                own += 1
            hides = (again != 0) & (whole < n)
            if hides:
                self.loads.found.wait_full(st, 0, finds & 1)
                finds += 1
            who = (head, q0, s_q, row, mine, limit)
            bad = self.finish(st, at, results, running, who, (turn, ended, n, done), hides)
            bad = cute.arch.vote_any_sync(bad) & (causal != 0) & (again == 0) & (whole < n)
            self.loads.hidden.tell(st, count, number, bad)
            ended = ended + Int32(turn < n)
            done = done + Int32(n > 0)
            count, head, q0, s_q, s_k, m, again = following(st, count, number)

    # ---------------------------------------------------------------- a tile

    @cute.jit
    def block(self, st, at, running, scale, limit, masked, turn, own, adds):
        """S of a tile -> P, O relative to its m_ref; ``limit``: keys of the tile that the row
        sees."""
        s_at = at + S_AT + turn * TILE
        self.loads.s.wait_full(st, turn, own & 1)
        umma.after_sync()
        t = cute.make_rmem_tensor((TILE,), Float32)
        for c in cutlass.range_constexpr(0, TILE, CHUNK):
            s = umma.load(s_at + c, CHUNK)
            for v in cutlass.range_constexpr(CHUNK):
                t[c + v] = s[v]
        umma.wait_loads()
        if masked:
            for v in cutlass.range_constexpr(TILE):
                if v >= limit:
                    t[v] = -Float32.inf
        old = running[0]
        new, gamma = raise_m_ref(_most(t) * scale, old)
        if adds & cute.arch.vote_any_sync(new != old):
            # S came behind P.V of this turn's tile before, of the same thread: O is complete
            self._rescale(at + O_AT + turn * self.d_v, gamma)
        part = [Float32(0.0) for _ in range(4)]
        for c in cutlass.range_constexpr(0, TILE, CHUNK):
            for v in cutlass.range_constexpr(CHUNK):
                t[c + v] = cute.math.exp2(fma(t[c + v], scale, -new), fastmath=True)
                part[v % 4] = part[v % 4] + t[c + v]
            words = self._narrow(cute.make_tensor(t.iterator + c, cute.make_layout(CHUNK)))
            store_words(s_at + P_AT + c // 2, words)
        wait_stores()
        umma.before_sync()
        cute.arch.sync_warp()  # one lane hands P over for all
        self.loads.p.arrive_full_if(st, turn, cute.arch.lane_idx() == 0)
        running[0] = new
        running[1] = running[1] * gamma + ((part[0] + part[1]) + (part[2] + part[3]))

    @cute.jit
    def _rescale(self, o_at, gamma):
        """O of this thread's row times ``gamma``."""
        for c in cutlass.range_constexpr(0, self.d_v, CHUNK):
            o = umma.load(o_at + c, CHUNK)
            store(o_at + c, [o[v] * gamma for v in range(CHUNK)])

    def _narrow(self, values):
        """``CHUNK`` fp32 values as words of two in 16 bits."""
        narrow = cute.make_rmem_tensor((CHUNK,), self.dtype)
        narrow.store(values.load().to(self.dtype))
        words = cute.recast_tensor(narrow, Int32)
        return [words[v] for v in range(CHUNK // 2)]

    # ---------------------------------------------------------------- rows

    @cute.jit
    def finish(self, st, at, results, running, who, counts, hides):
        """A row of both turns to memory, half of its channels; returns whether one of these is not
        finite that the row's sum does not explain."""
        head, q0, s_q, row, mine, limit = who
        turn, ended, n, done = counts
        out, _ = results
        share, looked = self.d_v // 2, Uint32(0)
        factors = cute.make_rmem_tensor((2,), Float32)
        factors.fill(0.0)
        total = Float32(0.0)
        if n > 0:
            if turn < n:  # it had tiles
                self.loads.o.wait_full(st, turn, ended & 1)
            total = self._merge(st, running, mine, turn, done & 1, limit, factors)
        self._write_lse(results, running, total, who, turn)
        for c in cutlass.range_constexpr(0, share, CHUNK):
            channel = turn * share + c
            values = cute.make_rmem_tensor((CHUNK,), Float32)
            values.fill(0.0)
            if n > 0:
                o = umma.load(at + O_AT + channel, CHUNK)
                for v in cutlass.range_constexpr(CHUNK):
                    values[v] = o[v] * factors[0]
            if n > 1:
                o = umma.load(at + O_AT + self.d_v + channel, CHUNK)
                for v in cutlass.range_constexpr(CHUNK):
                    values[v] = fma(o[v], factors[1], values[v])
            if hides:
                self._poison(st, values, channel, limit)
            words = self._narrow(values)
            for word in words:
                looked = times_zero(word, self.dtype, looked)
            if row < s_q:
                to = cute.crd2idx((q0 + row, head, channel), out.layout)
                for x in cutlass.range_constexpr(0, CHUNK // 2, 4):
                    compat.store_words((out.iterator + to + 2 * x).align(16), words[x : x + 4])
        if hides:
            cute.arch.sync_warp()
            self.loads.hidden.seen.arrive_full_if(st, 0, cute.arch.lane_idx() == 0)
        if n > 0:
            umma.wait_loads()
            umma.before_sync()
            cute.arch.sync_warp()  # one lane frees O for all
            self.loads.ofree.arrive_full_if(st, 0, cute.arch.lane_idx() == 0)
        return (row < s_q) & (total == total) & any_nan(looked)

    @cute.jit
    def _merge(self, st, running, mine, turn, buffer, limit, factors):
        """A row's m_ref and sum of both turns: to ``running``'s m_ref the common one, to
        ``factors`` those of O of each turn; returns the sum, NaN where logits are so large that
        their distance from the m_ref is not known."""
        shares = st.shares.get_tensor(cute.make_layout((ROWS, 2, TURNS, 2)))
        shares[mine, 0, turn, buffer] = running[0]
        shares[mine, 1, turn, buffer] = running[1]
        # no fence in front: its own columns a thread has handed on with P, O is the commit's
        cute.arch.barrier(barrier_id=BOTH, number_of_threads=TURNS * WARPGROUP)
        umma.after_sync()
        m_refs = [shares[mine, 0, x, buffer] for x in range(TURNS)]
        m_ref = cute.arch.fmax(m_refs[0], m_refs[1])
        for x in cutlass.range_constexpr(TURNS):
            factors[x] = cute.math.exp2(m_refs[x] - m_ref, fastmath=True)
        sums = [shares[mine, 1, x, buffer] for x in range(TURNS)]
        total = fma(factors[1], sums[1], factors[0] * sums[0])
        far = (limit > 0) & ~(cute.math.absf(m_ref) < self.largest)
        total = Float32(cutlass.select_(far, Float32(float("nan")), total))
        inverse = cute.arch.rcp_approx(total)
        for x in cutlass.range_constexpr(TURNS):
            scaled = factors[x] * inverse
            factors[x] = Float32(cutlass.select_(total == 0.0, Float32(0.0), scaled))
        running[0] = m_ref
        return total

    @cute.jit
    def _write_lse(self, results, running, total, who, turn):
        """The row's LSE, by the first turn; -inf of a row that sees no key."""
        head, q0, s_q, row, _, _ = who
        _, lse = results
        if (turn == 0) & (row < s_q):
            value = (running[0] + cute.math.log2(total, fastmath=True)) * LN2
            lse[head, q0 + row] = -Float32.inf if total == 0.0 else value

    @cute.jit
    def _poison(self, st, values, channel, limit):
        """Channels from ``channel`` on become NaN where the row sees a number of V that is not
        finite (sm90/hidden_keys.py)."""
        first = st.first.get_tensor(cute.make_layout(self.d_v))
        for v in cutlass.range_constexpr(CHUNK):
            hit = first[channel + v] < limit
            values[v] = cutlass.select_(hit, Float32(float("nan")), values[v])


def _most(t):
    """The largest value of a thread's tile."""
    most = [t[v] for v in range(4)]
    for v in range(4, TILE):
        most[v % 4] = cute.arch.fmax(most[v % 4], t[v])
    return cute.arch.fmax(cute.arch.fmax(most[0], most[1]), cute.arch.fmax(most[2], most[3]))
