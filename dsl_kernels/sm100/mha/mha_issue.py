"""Loads, barriers and issued products of dense MHA prefill on SM100: all of it but softmax.

Loads, clearing of V and the list of work are SM90's (sm90/attention_parts.py, sm90/hidden_keys.py)
with other readers: a commit frees Q, K and V.

    item     producer -> softmax warps, issuer       which work tile comes
    q, k, v  producer -> MMAs
    clean    clearing warp -> issuer                 V of a tile, with what must not be multiplied
    found    issuer -> softmax warps                 of a work tile that is taken again: the
                                                     clearing warp has noted what it found in V
    seen     softmax warps -> clearing warp          likewise: they have read it
    s        MMAs -> softmax of the turn             2, a warpgroup each
    p        its 4 warps -> issuer                   2: P is stored, O is relative to its m_ref
    o        MMAs -> the same softmax                2: the turn's last P.V is complete
    ofree    softmax warps -> issuer                 O of a work tile is read

Issue order is S x, P.V x - 1, S x + 1 ...: S x lies where P x - 2 was, and comes behind P.V x - 2
in the order in which the tensor core takes what one thread issues.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.smem import array
from ...blocks.types import BF16
from ...formats.mha_list import ROWS
from ...schedule.mha_items import key_tiles
from ...sm90.attention_parts import STAGES, Loads, has_tail
from ...sm90.hidden_keys import CONSUMER_WARPS, SLOTS, Hidden, whole_tiles
from .. import umma

if TYPE_CHECKING:
    from ...spec import VariantSpec

TILE = 128  # keys
TURNS = 2  # softmax warpgroups, which take tiles of keys in turn
FORM = umma.Form(ROWS)
KIND = BF16  # of the instructions; their descriptors say which 16-bit type it is
STEP = 16  # keys of an instruction of P.V
COMMIT = {"MMA commit": 1}
# Tensor memory: first columns of S and of O, by turn; of P, in 16 bits, in S.
S_AT, O_AT, P_AT, ALLOCATED = 0, TURNS * TILE, TILE // 2, 512


class Hidden100(Hidden):
    """SM90's, whose reads of verdicts need no barrier of their own.

    The next verdict in such a slot is told four notes later.  By then every reading warp has met
    elsewhere: the producer in ``choose``, softmax and issuer as they read the note behind a pause,
    whose work tile has keys, so that softmax's barrier and the issuer's commits lie in between.
    """

    @cute.jit
    def _told(self, st, count):
        word = self._verdicts(st)[cute.arch.lane_idx() % CONSUMER_WARPS, count % SLOTS]
        return cute.arch.vote_any_sync(word != 0)


class Loads100(Loads):
    """The producer's and the clearing warp's roles, and all barriers."""

    note_readers = {"softmax": CONSUMER_WARPS, "issuer": 1}  # noqa: RUF012 (none changes it)
    tile_readers = COMMIT

    def __init__(self, spec: VariantSpec):
        super().__init__(spec)
        dtype = compat.dtype(spec.dtype)
        self.hidden = Hidden100(self.notes.ring, dtype, self.d_v, self.tile)  # of the same fields
        self.s, self.o = Ring("s", TURNS, COMMIT), Ring("o", TURNS, COMMIT)
        self.p = Ring("p", TURNS, {"softmax": CONSUMER_WARPS // TURNS})
        self.ofree = Ring("ofree", 1, {"softmax": CONSUMER_WARPS})
        self.found = Ring("found", 1, {"issuer": 1})
        own = (self.s, self.p, self.o, self.ofree, self.found)
        self.rings = (*self.rings, *own)
        for ring in own:
            self.fields.update(ring.field)
        self.fields.update(
            tmem=array(Int32, 4, 16),
            shares=array(Float32, 2 * TURNS * 2 * ROWS, 128),  # m_ref, sum; by turn; two work tiles
        )

    @cute.jit
    def cleared(self, s_q, s_k, m, n, causal, again):
        """Tiles of V, from the last on, that the clearing warp has to see to."""
        tail = Int32(cutlass.select_(has_tail(s_k, n, self.tile), 1, 0))
        hidden = n - whole_tiles(s_q, s_k, m * ROWS, n, self.tile, causal)
        return Int32(cutlass.select_(again != 0, hidden, tail))


class Products:
    """The issuing warp: it waits, one lane issues.

    Attributes:
        loads: rings.
        dtype: of q, k, v and P.
        d_qk, d_v: channels.
    """

    def __init__(self, loads: Loads100, dtype):
        self.loads, self.dtype, self.d_qk, self.d_v = loads, dtype, loads.d_qk, loads.d_v

    @cute.jit
    def run(self, st, tmem, causal):
        """The role."""
        operands = (
            tmem, umma.k_major(umma.address_of(st.q.data_ptr())),
            umma.k_major(umma.address_of(st.k.data_ptr())),
            umma.mn_major(umma.address_of(st.v.data_ptr()), TILE * umma.LINE),
        )  # fmt: skip
        kc, done, phases = Int32(0), Int32(0), Int32(0)  # phases: of p, of clean
        count = Int32(0)
        head, _, s_q, s_k, m, again = self.loads.notes.read(st, count)  # none is taken again yet
        while head >= 0:
            n = key_tiles(s_q, s_k, m, causal, TILE)
            if n > 0:
                cleared = self.loads.cleared(s_q, s_k, m, n, causal, again)
                self.loads.q.wait_full(st, 0, done & 1)
                for x in cutlass.range(0, n + 1, unroll=1):
                    if x < n:
                        self._scores(st, operands, kc + x, x, n)
                    if x > 0:
                        at = x - 1, n, kc, done
                        phases = self._products(st, operands, at, cleared, phases)
                if (again != 0) & (cleared > 0):
                    self.loads.found.arrive_full_if(st, 0, cute.arch.lane_idx() == 0)
                kc += n
                done += 1
            count, head, s_q, s_k, m, again = self._next(st, count)

    @cute.jit
    def _next(self, st, count):
        """The note behind ``count``, as the consumers take it (sm90/mha/mha_fwd.py): its number,
        and head (-1 behind the last), query tokens, keys, row tile, whether it is taken again."""
        count += 1
        head, _, s_q, s_k, m, again = self.loads.notes.read(st, count)
        pause = head < 0
        while pause:
            pause = Boolean(False)
            if self.loads.hidden.left(st, count):
                count += 1
                head, _, s_q, s_k, m, again = self.loads.notes.read(st, count)
                pause = head < 0
        return count, head, s_q, s_k, m, again

    @cute.jit
    def _scores(self, st, operands, use, x, n):
        """S of a work tile's ``x``-th tile of ``n``; K's ring is used for the ``use``-th time."""
        tmem, q, k, _ = operands
        slot = use % STAGES
        self.loads.k.wait_full(st, slot, (use // STAGES) & 1)
        # what softmax did with the columns that S takes, the wait for that turn's P has ordered
        if umma.elected():
            at = umma.advance(k, slot * (2 * TILE * self.d_qk))
            self.multiply_keys(tmem + S_AT + x % TURNS * TILE, q, at)
            FORM.commit(self.loads.s.full_barrier(st, x % TURNS))
            FORM.commit(self.loads.k.empty_barrier(st, slot))
            if x == n - 1:
                FORM.commit(self.loads.q.empty_barrier(st, 0))

    @cute.jit
    def _products(self, st, operands, at, cleared, phases):
        """P.V of the ``done``-th work tile's ``y``-th tile of ``n``; the phases behind it.

        Softmax waits for the turn's last alone: a phase that nobody waited for would let it read O
        one product early, where commits arrive out of order.
        """
        (tmem, _, _, v), (y, n, kc, done) = operands, at
        turn, use = y % TURNS, kc + y
        slot = use % STAGES
        self.loads.v.wait_full(st, slot, (use // STAGES) & 1)
        if y < cleared:
            self.loads.clean.wait_full(st, slot, (phases >> (TURNS + slot)) & 1)
            phases = phases ^ (1 << (TURNS + slot))
        if y == 0:
            self.loads.ofree.wait_full(st, 0, (done & 1) ^ 1)  # at once, the first time
        self.loads.p.wait_full(st, turn, (phases >> turn) & 1)
        phases = phases ^ (1 << turn)
        umma.after_sync()
        if umma.elected():
            self.multiply_values(
                tmem + O_AT + turn * self.d_v, tmem + S_AT + turn * TILE + P_AT,
                umma.advance(v, slot * (2 * TILE * self.d_v)), y >= TURNS,
            )  # fmt: skip
            if y + TURNS >= n:
                FORM.commit(self.loads.o.full_barrier(st, turn))
            FORM.commit(self.loads.v.empty_barrier(st, slot))
        return phases

    def multiply_keys(self, s, q, k) -> None:
        """S = Q K^T, by one thread."""
        idesc = FORM.instruction(self.dtype, TILE)
        for x in range(2 * self.d_qk // umma.K_BYTES):
            at = umma.k_step(x, ROWS)
            FORM.mma(KIND, s, umma.advance(q, at), umma.advance(k, at), idesc, x > 0)

    def multiply_values(self, o, p, v, adds) -> None:
        """O = P V (+ O), by one thread; ``adds``: whether O has a value."""
        idesc = FORM.instruction(self.dtype, self.d_v, b_transposed=True)
        for x in range(TILE // STEP):
            FORM.mma(
                KIND, o, p + x * umma.CELLS, umma.advance(v, x * STEP * umma.LINE), idesc,
                True if x else adds, a_in_tmem=True,
            )  # fmt: skip
