"""Work tiles, ring of gathered KV tiles, rows of Q and rows of results of sparse prefill on SM90;
its arithmetic is in sparse_prefill.py.

    kv       announcer -> softmax, P.V    halves of a tile: full 2 stage + half; P.V frees them
    landed   gather warps -> announcer    the same halves: cp.async arrivals, a thread each
    q        warp 1 -> softmax            64 rows: slot 0 has the channels that go to registers,
                                          slot 1 the others; 32 rows and fewer: two row tiles

A *half* of a tile is half of its channels, in blocks of 64: what each P.V warpgroup reads first
(blocks 0, 1, 4, 5) and the rest, RoPE included.  The first one is freed, and so filled again, while
P.V is at the second.

An entry that is no token (negative, or behind the last row of KV), or that lies behind the query's
``topk_length``, becomes a row of zeros, and no byte is read for it.  The announcer leaves a bit for
each place of a tile, so that softmax takes its logit away.

Timeline of a tile in a gather warp: wait first half free | its lines, a copy of 16 bytes a lane,
four rows an instruction | arrive when they have landed | the same of the second half.  The entries
of the next tile, the next query's first one included, are asked for a tile ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.smem import array, one_stage, staged
from ...blocks.types import BF16, ROW_MAJOR, U32
from ...combine.epilogue import of_sink
from ...formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from ...formats.dims import TOKEN_TILE as TILE
from ...load.gather import CHUNK, GROUP, GROUPS, HALF, LINE, Q_WARP, advanced, arrive_landed, copy
from ...load.planes import Loaded
from ..attention_parts import LARGEST, LN2
from ..roles import PV_WARPS, ROWS_OF_CTA, SOFTMAX_WARPS

STAGES = 2
BLOCK = LINE // 2  # channels of a column block, a line of 128 bytes
CONTENT_BLOCKS = KV_LORA_RANK // BLOCK
BLOCK_BYTES = TILE * LINE
STAGE_BYTES = TILE * HEAD_DIM_QK * 2
FIRST_HALF = (0, 1, 4, 5)  # column blocks
REGISTER_BLOCKS = 6  # of Q
EARLY, LATE = 0, 1  # halves of a tile; of Q: to registers, in shared memory
GATHER_THREADS = 96


def second_half(d_qk: int) -> tuple[int, ...]:
    """Column blocks of the second half."""
    return tuple(x for x in range(d_qk // BLOCK) if x not in FIRST_HALF)


class Gmem(NamedTuple):
    """Tensors of a call that no TMA describes, and its numbers."""

    kv: Any  # bf16 (s_kv, 1, d_qk)
    indices: Any  # i32 (s_q, 1, topk)
    topk_length: Any  # i32 (s_q,) or (0,)
    attn_sink: Any  # f32 (h,) or (0,)
    out: Any  # bf16 (s_q, h, 512)
    max_logits: Any  # f32 (s_q, h)
    lse: Any  # f32 (s_q, h)
    heads: Int32
    by_blocks: compat.FastDivisor  # by row blocks of a query
    scale: Float32  # of the logits, to log2 units
    ctas: Int32
    lse_indexer: Any = None  # f32 (s_q, h), of the first ``indexer_tiles`` tiles of a list
    indexer_tiles: Any = None
    by_pieces: Any = None  # divisor by pieces of a list, where lists are split
    width: Any = None  # entries of a piece, a multiple of 64


class WorkTile(NamedTuple):
    """A work tile: a row block of a query, the tiles of its entries.

    Attributes:
        query, block: which query, which row block of it.  Where lists are split a piece counts as
            a query: the pieces of a token are neighbours, and have rows of ``out`` of their own.
        count: entries of the query that count.
        tiles: of 64 entries; at least one, so that every role passes every work tile alike.
    """

    query: Any
    block: Any
    count: Any
    tiles: Any


class Work:
    """Work tiles of a CTA: the one of its own number, and from there on every ``ctas``-th.

    Row blocks of a query are neighbours, so that two CTAs gather the same rows at the same time.
    """

    @staticmethod
    def total(gmem):
        """Work tiles of the call."""
        return gmem.out.shape[0] * gmem.by_blocks.divisor

    @staticmethod
    def place(gmem, j):
        """(query, block) of work tile ``j``; behind the last one, those of the last query."""
        query, block = divmod(j, gmem.by_blocks)
        return cutlass.min(query, gmem.out.shape[0] - 1), block

    @staticmethod
    @cute.jit
    def count(gmem, query):
        """Entries of a query that count, as they are told; asked for a work tile ahead.

        A value that ptxas knows to be the same in all lanes it moves to a uniform register at once,
        which waits for memory: so the address is a lane's.
        """
        told = Int32(gmem.indices.shape[2])
        query, before = Work.list_of(gmem, query)
        if gmem.topk_length.shape[0] > 0:
            nothing = compat.opaque(Int32(cute.arch.lane_idx())) >> 5
            told = gmem.topk_length[query + nothing]
        if const_expr(gmem.width is not None):
            told = cutlass.min(told, gmem.indices.shape[2]) - before
        return told

    @staticmethod
    def list_of(gmem, query):
        """(query token, entries of its list before the first one) of ``WorkTile.query``."""
        if const_expr(gmem.width is None):
            return query, 0
        token, piece = divmod(query, gmem.by_pieces)
        return token, piece * gmem.width

    @staticmethod
    def work_tile(gmem, j, told):
        """Work tile ``j``, ``told`` how many entries count."""
        query, block = Work.place(gmem, j)
        told = cute.arch.make_warp_uniform(told)
        most = gmem.indices.shape[2] if const_expr(gmem.width is None) else gmem.width
        count = cutlass.min(cutlass.max(told, 0), most)
        tiles = cutlass.max((count + (TILE - 1)) // TILE, 1)
        return WorkTile(query, block, count, tiles)


class Turn(NamedTuple):
    """Stage and phase of the ring that a tile uses."""

    stage: Any
    phase: Any

    @staticmethod
    def of(count):
        """``Turn`` of the ``count``-th tile of a CTA."""
        return Turn(count % STAGES, (count // STAGES) & 1)

    def slot(self, half: int):
        """Barrier of a half."""
        return 2 * self.stage + half


class GatheredTiles:
    """The producer warpgroup: KV tiles by index, rows of Q.

    Attributes:
        d_qk: channels of a row of Q and KV, 576 or 512; a stage has room for 576.
        rows: heads of a CTA.
        q_stages: row tiles of Q; one of 64 rows, whose parts are loaded apart.
        halves: their column blocks.
        order: of all column blocks, as Q.K takes them.
    """

    warps = 4

    def __init__(self, d_qk: int, rows: int):
        self.d_qk, self.rows = d_qk, rows
        self.q_stages = 1 if rows == ROWS_OF_CTA else 2
        self.halves = FIRST_HALF, second_half(d_qk)
        self.order = (*FIRST_HALF, *second_half(d_qk))
        slots = 2 * STAGES
        self.kv = Ring("kv", slots, {"announcer": 1}, {"P.V": PV_WARPS})
        self.landed = Ring("landed", slots, {"gather": GATHER_THREADS})
        self.q = Ring("q", 2, {"producer": 1}, {"softmax": SOFTMAX_WARPS})
        self.rings = self.kv, self.landed, self.q

    # ---------------------------------------------------------------- host half

    def source_of_q(self, *q):
        """``Loaded`` of (h, channels, s_q) of each tensor of Q, all channels or content and RoPE: a
        box is a column block of a row block."""
        return tuple(map(self._loaded, q))

    def _loaded(self, q):
        """``Loaded`` of one tensor of Q."""
        view = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[1, 2, 0]))
        shape = (TILE, self.rows, BLOCK)
        box = one_stage(sm90.make_smem_layout_b(ROW_MAJOR, shape, BF16, 1))
        op = cpasync.CopyBulkTensorTileG2SOp()
        atom = cpasync.make_tiled_tma_atom(op, view, box, (self.rows, BLOCK))
        return Loaded(*list(atom)[:2])

    @property
    def fields(self) -> dict:
        """Barriers, and the bits of the places of each stage."""
        fields: dict = dict(named=array(U32, 2 * STAGES, 8))
        for ring in self.rings:
            fields.update(ring.field)
        return fields

    def init(self, st) -> None:
        """Initialise the barriers of all rings; one thread calls this, before the fence that
        publishes all barriers."""
        for ring in self.rings:
            ring.init(st)

    # ---------------------------------------------------------------- roles

    @cute.jit
    def run(self, st, warp, layouts, tma_q, gmem, cta):
        """The role of one of the four warps."""
        if warp == 2:
            self._announce(st, gmem, cta)
        elif warp == Q_WARP:
            first, end = GROUPS[Q_WARP]
            self._fill(st, gmem, cta, (Int32(first), Int32(end)), self._q_boxes(st, layouts, tma_q))
        else:
            others = zip(GROUPS[0], GROUPS[3], strict=True)
            ends = [cutlass.select_(warp == 0, Int32(a), Int32(b)) for a, b in others]
            self._fill(st, gmem, cta, (ends[0], ends[1]), None)
            compat.pdl_launch_dependents()

    @cute.jit
    def _announce(self, st, gmem, cta):
        """Each half of a tile when it has landed; with the first one, which places hold tokens."""
        lane, s_kv = cute.arch.lane_idx(), gmem.kv.shape[0]
        bits = st.named.get_tensor(cute.make_layout((2, STAGES)))
        total, tiles = Work.total(gmem), Int32(0)  # behind us
        query, _ = Work.place(gmem, cta)
        count = Work.count(gmem, query)
        low, high = self._entry(gmem, query, 0, lane), self._entry(gmem, query, 0, lane + 32)
        for j in cutlass.range(cta, total, gmem.ctas, unroll=1):
            work_tile = Work.work_tile(gmem, j, count)
            query, _ = Work.place(gmem, j + gmem.ctas)
            count = Work.count(gmem, query)
            for tile in cutlass.range(0, work_tile.tiles, unroll=1):
                turn, left = Turn.of(tiles), work_tile.count - tile * TILE
                named = [
                    cute.arch.vote_ballot_sync(
                        (compat.unsigned(entry) < compat.unsigned(s_kv)) & (place < left)
                    )
                    for entry, place in ((low, lane), (high, lane + 32))
                ]
                more = tile + 1 < work_tile.tiles
                at = Int32(cutlass.select_(more, work_tile.query, query))
                following = Int32(cutlass.select_(more, tile + 1, Int32(0)))
                low = self._entry(gmem, at, following, lane)
                high = self._entry(gmem, at, following, lane + 32)
                for half in cutlass.range_constexpr(2):
                    self.landed.wait_full(st, turn.slot(half), turn.phase)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    if lane == 0:
                        if const_expr(half == 0):
                            for x in cutlass.range_constexpr(2):
                                bits[x, turn.stage] = Uint32(named[x])
                        self.kv.arrive_full(st, turn.slot(half))
                tiles += 1

    @cute.jit
    def _fill(self, st, gmem, cta, groups, boxes):
        """Rows ``groups`` (first, end) of 8 of each tile; with ``boxes`` Q, too.

        The next row tile of Q is asked for behind a work tile's second tile.  Its part that stays
        in shared memory is asked for behind its own first tile, which fills what the tile before
        the last of the work tile before has freed: until then that work tile's last product reads
        Q.
        """
        lane = cute.arch.lane_idx()
        first, end = groups
        ahead = first * GROUP + lane
        total, tiles, work_tiles = Work.total(gmem), Int32(0), Int32(0)  # behind us
        query, _ = Work.place(gmem, cta)
        count, entry = Work.count(gmem, query), self._entry(gmem, query, 0, ahead)
        to, base = self._target(st, first, lane), self._base(gmem, lane)
        stride = Uint32(gmem.kv.stride[0]) * Uint32(2)
        if const_expr(boxes is not None):
            self._load_q(st, gmem, boxes, cta, work_tiles, EARLY, first=True)
        for j in cutlass.range(cta, total, gmem.ctas, unroll=1):
            work_tile = Work.work_tile(gmem, j, count)
            query, _ = Work.place(gmem, j + gmem.ctas)
            count = Work.count(gmem, query)
            for tile in cutlass.range(0, work_tile.tiles, unroll=1):
                turn = Turn.of(tiles)
                named = compat.unsigned(entry) < compat.unsigned(gmem.kv.shape[0])
                named = named & (tile * TILE + ahead < work_tile.count)
                token = Int32(cutlass.select_(named, entry, Int32(-1)))
                more = tile + 1 < work_tile.tiles
                at = Int32(cutlass.select_(more, work_tile.query, query))
                following = Int32(cutlass.select_(more, tile + 1, Int32(0)))
                entry = self._entry(gmem, at, following, ahead)
                for half in cutlass.range_constexpr(2):
                    self.kv.wait_empty(st, turn.slot(half), turn.phase ^ 1)
                    self._copy(
                        to + turn.stage * STAGE_BYTES, (base, stride), token, end - first,
                        self.halves[half],
                    )  # fmt: skip
                    arrive_landed(self.landed.full_barrier(st, turn.slot(half)))
                if const_expr(boxes is not None):
                    if const_expr(self.q_stages == 1):  # noqa: SIM102 (only this at compile time)
                        if tile == 0:
                            self._load_q(st, gmem, boxes, j, work_tiles, LATE)
                    if (tile == cutlass.min(work_tile.tiles - 1, 1)) & (j + gmem.ctas < total):
                        self._load_q(st, gmem, boxes, j + gmem.ctas, work_tiles + 1, EARLY)
                tiles += 1
            work_tiles += 1

    # ---------------------------------------------------------------- rows of Q

    def _q_boxes(self, st, layouts, tma_q):
        """(descriptor, shared boxes by column block and stage, global boxes by row block, column
        block and query) of each tensor of Q."""
        tiler, found = (self.rows, BLOCK), []
        tiles = cute.local_tile(staged(st.qc, layouts.q[0]), tiler, (0, None, None))
        for loaded in tma_q:
            boxes = cute.local_tile(loaded.coords, tiler, (None, None, None))
            held, source = cpasync.tma_partition(
                loaded.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2),
                cute.group_modes(boxes, 0, 2),
            )  # fmt: skip
            found.append((loaded.atom, held, source))
        return found

    @cute.jit
    def _load_q(
        self,
        st,
        gmem,
        boxes,
        j,
        work_tiles,
        part: cutlass.Constexpr,
        first: cutlass.Constexpr = False,
    ):
        """A part of the ``work_tiles``-th row tile of the CTA, that of work tile ``j``; the
        ``first`` one finds its room free."""
        query, block = Work.place(gmem, j)
        query, _ = Work.list_of(gmem, query)
        blocks, (slot, phase) = self.blocks_of_q(part), self.slot_of_q(work_tiles, part)
        stage = 0 if const_expr(self.q_stages == 1) else slot
        if const_expr(not first):
            self.q.wait_empty(st, slot, phase ^ 1)
        barrier = self.q.full_barrier(st, slot)
        with cute.arch.elect_one():
            size = len(blocks) * self.rows * LINE
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
        for x in blocks:
            behind = len(boxes) > 1 and x >= CONTENT_BLOCKS  # of RoPE's tensor
            atom, target, source = boxes[behind]
            box = source[None, block, x - behind * CONTENT_BLOCKS, query]
            cute.copy(atom, box, target[None, x, stage], tma_bar_ptr=barrier)

    def blocks_of_q(self, part: int) -> range:
        """Column blocks of Q that are loaded together."""
        count = self.d_qk // BLOCK
        if self.q_stages > 1:
            return range(count)
        return range(REGISTER_BLOCKS) if part == EARLY else range(REGISTER_BLOCKS, count)

    def slot_of_q(self, work_tiles, part: int):
        """(slot, phase) of Q's ring for a part of the ``work_tiles``-th row tile."""
        if self.q_stages > 1:
            return work_tiles % self.q_stages, (work_tiles // self.q_stages) & 1
        return part, work_tiles & 1

    # ---------------------------------------------------------------- rows of KV

    @staticmethod
    def _entry(gmem, query, tile, ahead):
        """A lane's entry of a tile, as it is there."""
        query, before = Work.list_of(gmem, query)
        at = compat.at_most(before + (tile * TILE + ahead), gmem.indices.shape[2] - 1)
        return gmem.indices[query, 0, at]

    @staticmethod
    def _target(st, first, lane):
        """Shared address, in stage 0, of what this thread copies of its warp's first rows."""
        line, chunk = lane // 8, lane % 8
        at = st.kc.data_ptr().toint() + first * (GROUP * LINE) + line * LINE
        return compat.opaque(at + (chunk ^ line) * CHUNK)

    @staticmethod
    def _base(gmem, lane):
        """Address of the bytes that this thread copies of each line of token 0."""
        return Int64(gmem.kv.iterator.toint() + lane % 8 * CHUNK)

    @cute.jit
    def _copy(self, at, rows, token, groups, blocks: cutlass.Constexpr):
        """Column blocks of a warp's rows; each lane holds the token of one, or -1."""
        base, stride = rows
        line = cute.arch.lane_idx() // 8
        for g in cutlass.range(0, groups, unroll=1):
            for k in cutlass.range_constexpr(2):
                held = cute.arch.shuffle_sync(token, GROUP * g + 4 * k + line)
                size = Int32(cutlass.select_(held >= 0, Int32(CHUNK), Int32(0)))
                source = advanced(base, cutlass.max(held, 0), stride)
                target = at ^ (k * HALF)
                for x in blocks:
                    to = k * 4 * LINE + x * BLOCK_BYTES
                    copy(target, source, size, to=to, ahead=x * LINE)
            at += GROUP * LINE


# ---------------------------------------------------------------- results


@cute.jit
def finish_row(gmem, head, query, total, m_ref, most):
    """LSE and largest logit of a row to memory, by one lane; returns by what O is multiplied.

    Of a piece of a list the LSE alone, in log2 units as merge wants it; sinks are merge's.
    ``most`` is the largest logit, -inf of a row that names no token."""
    total, kept = known(total, most), Float32(1.0)
    empty = total == 0.0
    value = cute.math.log2(total, fastmath=True) + m_ref
    if const_expr(gmem.width is not None):
        if head < gmem.heads:
            gmem.lse[query, head] = -Float32.inf if empty else value
    elif head < gmem.heads:
        bad = total != total
        largest = Float32(cutlass.select_(bad, total, most * LN2))
        gmem.lse[query, head] = Float32.inf if empty else value * LN2
        gmem.max_logits[query, head] = -Float32.inf if empty else largest
        if gmem.attn_sink.shape[0] > 0:
            kept = of_sink(gmem.attn_sink, head, value)
    return Float32(0.0) if empty else kept / total


def known(total, most):
    """A row's sum; NaN where its largest logit, in log2 units, is so large that the distance from
    its m_ref is not known (sm90/attention_parts.py), whatever the sum is.  A row without a token
    keeps its 0, and so does one whose logits are all -inf."""
    size = cute.math.absf(most)
    far = (size >= LARGEST) & (most != -Float32.inf)
    return Float32(cutlass.select_(far, Float32(float("nan")), total))


@cute.jit
def first_lse(gmem, head, query, total, m_ref, most):
    """LSE of the entries that the indexer chose, those up to this tile, by one lane."""
    total = known(total, most)
    value = cute.math.log2(total, fastmath=True) + m_ref
    if head < gmem.heads:
        gmem.lse_indexer[query, head] = Float32.inf if total == 0.0 else value * LN2


def place_of(gmem, query, head, channel):
    """Offset of a channel of a row of ``out``."""
    out = gmem.out
    return Int64(query) * out.stride[0] + Int64(head) * out.stride[1] + channel
