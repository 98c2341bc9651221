"""The ring of KV tiles, gathered token by token with ``cp.async``: a loader (loader.py).

A sequence here is one query token, and its row of the table names *tokens*, an entry each:
page * P + offset, any P, pages and tokens of a page at any stride.  An entry that is no token
(negative, or behind the pool), or that lies behind the sequence's end, becomes a row of zeros with
scale 0: log2 of that is -inf, so the place masks itself, and no byte is read for it.

    warps 0, 1, 3   copy 3 + 2 + 3 groups of 8 rows of each tile; warp 1 has Q's tiles copied, too
    warp 2          waits until a tile has landed, announces it, does what the kernel wants done
                    about it

    landed   gather warps -> warp 2          (cp.async arrivals, a thread each)
    k_pipe   warp 2 -> who reads the KV tile (full: one arrival behind a proxy fence, empty: warps)

Shared memory: ``k_bar`` and the barriers of ``landed``; the tiles are fields ``k<plane>`` of the
kernel's plan, and the field of scales.

Timeline of a tile in a gather warp: the raw entries of the next tile are asked for, a lane each;
this one's, asked for a tile ago, become (page, offset) | wait until the stage is free | four rows
at a time: page and offset from their lane by shuffle, each row's five lines of 128 bytes by eight
lanes; or (``by_lines`` False) a row's 512 bytes of content by 32 lanes, four rows' RoPE as before |
scales | arrive when these copies have landed.

Entries are loaded a tile ahead because to decode one right behind its load is to wait for memory
once a tile: 14 % of the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from ..blocks import budget as bud
from ..blocks import compat
from ..blocks.barriers import Ring
from ..blocks.smem import array
from ..formats.dims import ITEM_WORDS
from ..formats.dims import KV_LORA_RANK as D
from ..formats.dims import QK_ROPE_HEAD_DIM as R
from .loader import Feed, Readers, ring_barriers, ring_pipe
from .work_list import Rows, WorkList

GATHER_WARPS = 3
Q_WARP, ANNOUNCER = 1, 2
GROUP = 8  # rows of an unrolled body
# First and last group of a tile, by warp; the one that has Q's tiles copied takes fewer.
GROUPS = {0: (0, 3), Q_WARP: (3, 5), 3: (5, 8)}
LINE = 128  # bytes of a swizzled row in shared memory
CHUNK = 16  # bytes of a copy
HALF = LINE // 2  # what the swizzle moves rows 4 to 7 of eight by, against rows 0 to 3
SCALE = 4  # bytes of a token's scale


class TokenLists(WorkList):
    """The work list of units that are one query token each, whose row of the table names tokens.

    The table is (b_q, s_q, width), as queries are (b_q, s_q, heads, ...), with any strides of the
    first two; ``cache_seqlens`` says, for each sequence of query tokens, how many entries of their
    rows count, and ``row_limits`` for each query token, if it is there.
    """

    def __init__(self, tile: int):
        super().__init__(1, tile)

    @cute.jit
    def rows_at(self, work, call, i, batch, rows_cta: cutlass.Constexpr):
        """``Rows`` of work tile ``i``: of the token whose first row the work tile names, or, where
        each sequence has one, of that."""
        words = compat.load_words(work.work_items.iterator + (i * ITEM_WORDS + 4), 4)
        of_split = cute.arch.block_idx()[0] * rows_cta
        first, hidden_from = Int32(words[0]), Int32(words[2])
        each = call.rows_each
        first = Int32(cutlass.select_(each > 0, batch * each, first))
        end = compat.at_most(first + call.by_heads.divisor, call.rows)
        return Rows(first + of_split, end, of_split, hidden_from)

    def room(self, work):
        """Entries of a row."""
        return work.block_table.shape[2]

    @cute.jit
    def row_of_table(self, work, call, i, batch):
        """(this work tile's row of the table, how many of its entries count)."""
        rows = self.rows_at(work, call, i, batch, 0)
        token, _ = divmod(compat.at_most(rows.first, call.rows - 1), call.by_heads)
        b, s = self.place_of(work, token, batch)
        count = self.seqlen_of(work, batch)
        if work.row_limits.shape[0] > 0:
            count = cutlass.min(work.row_limits[token], count)
        return work.block_table[b, s, None], count

    def entry(self, row, tile, ahead):
        """This lane's entry of the table for a tile, as it is there."""
        return row[compat.at_most(tile * self.tile + ahead, row.shape[0] - 1)]

    @cute.jit
    def place(self, entry, tile, ahead, count, tokens):
        """(page, offset) of the token that an entry names; page -1 if it names none."""
        page, offset = divmod(cutlass.max(entry, 0), tokens.by_page)
        named = self.is_named(entry, tile, ahead, count, tokens)
        return Int32(cutlass.select_(named, page, Int32(-1))), offset

    def is_named(self, entry, tile, ahead, count, tokens):
        """Return true if ``entry`` is a token of the pool and its place in the row is below
        ``count``."""
        named = compat.unsigned(entry) < compat.unsigned(tokens.count)
        return named & (tile * self.tile + ahead < count)

    def walk(self, row, tile, lane):
        """State of an announcer that begins at a tile: entries of the lane's two places, and 0."""
        return *self.two_entries(row, tile, lane), Float32(0.0)

    def walked(self, state, row, count, tile, lane, tokens, wait, on_full):
        """The state behind a tile: ``wait()`` returns when the tile has landed, ``on_full(named,
        top)`` is told which of the lane's two places hold tokens, and returns the next ``top``.

        The next tile's entries are asked for in front of the wait.
        """
        low, high, top = state
        named = (
            self.is_named(low, tile, 2 * lane, count, tokens),
            self.is_named(high, tile, 2 * lane + 1, count, tokens),
        )
        following = self.two_entries(row, tile + 1, lane)
        wait()
        return *following, on_full(named, top)

    def two_entries(self, row, tile, lane):
        """Entries of the lane's two places of a tile."""
        return self.entry(row, tile, 2 * lane), self.entry(row, tile, 2 * lane + 1)

    def pool(self, tensors):
        """``Pool`` of the one tensor of a cache of bytes."""
        (rows,) = tensors
        pages, page_size, _ = rows.shape
        return Pool(rows, pages * page_size, compat.fast_divisor(page_size))

    def place_of(self, work, token, batch):
        """(b, s) of a query token of sequence ``batch`` in the table, inside it whatever the work
        tile says: without the division, which is in front of a work tile's first load."""
        b_q, s_q, _ = work.block_table.shape
        b = Int32(cutlass.select_(Int32(b_q) > 1, batch, Int32(0)))  # ragged ones are one row
        return b, compat.at_most(token - b * s_q, s_q - 1)


class Pool(NamedTuple):
    """A cache of bytes as a work list's ``pool`` gives it to the kernel.

    Attributes:
        rows: u8 (pages, P, bytes of a token): 656 of ``fp8_ds_mla``.
        count: how many an entry can name: tokens of the pool, or its pages (``AnyPages``).
        by_page: divisor by P.
    """

    rows: Any
    count: Int32
    by_page: compat.FastDivisor

    def memory(self, _second):
        """(address, bytes from a page to the next, P) of the cache."""
        return Int64(self.rows.iterator.toint()), Uint32(self.rows.stride[0]), self.rows.shape[1]


class Tokens(NamedTuple):
    """The cache's tensors as ``GatherRows.source`` gives them to the kernel.

    Attributes:
        content: u8 (pages, P, 512).
        rope: bf16 (pages, P, 64).
        count: tokens of the pool.
        by_page: divisor by P.
    """

    content: Any
    rope: Any
    count: Int32
    by_page: compat.FastDivisor


@compat.dsl_user_op
def copy(target, source, size, *, n: int = CHUNK, to: int = 0, ahead: int = 0, loc=None, ip=None):
    """``n`` bytes of global memory to shared memory, of which those behind ``size`` are zeros; from
    ``ahead`` behind ``source`` to ``to`` behind ``target``."""
    cache = "cg" if n == CHUNK else "ca"
    compat.inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}+{to}], [{{$r1}}+{ahead}], {n}, {{$r2}};",
        read_only_args=[target, source, size], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def arrive_landed(bar, *, loc=None, ip=None) -> None:
    """Arrives at ``bar`` when this thread's copies are there."""
    compat.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared.b64 [{$r0}];",
        read_only_args=[bar.toint(loc=loc, ip=ip)], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def advanced(base, count, stride, *, loc=None, ip=None):
    """base + count * stride, 32 x 32 -> 64 bits unsigned, in one instruction."""
    return compat.inline_ptx(
        "mad.wide.u32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Int64], read_only_args=[count, stride, base], loc=loc, ip=ip,
    )  # fmt: skip


class Plane(NamedTuple):
    """One tensor of the cache as a thread copies it.

    Attributes:
        base: address of the bytes that this thread copies of token 0.
        page, token: bytes from a page to the next, from a token of a page to the next.
    """

    base: Any
    page: Uint32
    token: Uint32

    @classmethod
    def of(cls, tensor, element_bytes: int, ahead):
        """``ahead``: bytes from a token's first to this thread's first."""
        page, token = (Uint32(tensor.stride[x]) * Uint32(element_bytes) for x in range(2))
        return cls(Int64(tensor.iterator.toint() + ahead), page, token)

    def at(self, page, offset):
        """Address for a token of the pool."""
        return advanced(advanced(self.base, page, self.page), offset, self.token)


class GatherRows:
    """Barriers and warps of a loader of tokens (``loader.Loader``), for the FP8 cache.

    Attributes:
        work: the work list, which says what names tokens (``TokenLists.entry``, ``place``).
        stages, q_stages: KV tiles, Q tiles in flight; 0: Q tiles are in the KV ring.
        readers: who frees a KV stage.
        by_lines: whether an instruction copies 128 bytes of four rows instead of 512 of one.
        rope: whether tokens have RoPE beside content.
    """

    warps = 4
    rope = True
    scale_bytes, of_warps = SCALE, GROUPS

    def __init__(
        self, work: TokenLists, *, stages: int, q_stages: int, readers: Readers, by_lines: bool
    ):
        self.work, self.stages, self.q_stages, self.readers = work, stages, q_stages, readers
        self.by_lines = by_lines
        self.landed = Ring("landed", stages, {"gather": 32 * GATHER_WARPS})

    # ---------------------------------------------------------------- host half

    def source(self, tensors, layouts):
        """``Tokens`` of (content, RoPE), as a tuple."""
        content, rope = tensors
        pages, page_size, _ = content.shape
        return Tokens(content, rope, pages * page_size, compat.fast_divisor(page_size))

    @staticmethod
    def descriptors(source):
        """None: nothing is loaded by TMA."""
        return ()

    # ---------------------------------------------------------------- barriers

    @property
    def fields(self) -> dict:
        """Storage of the barriers."""
        return dict(k_bar=array(Int64, 2 * self.stages), **self.landed.field)

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """All of them in a budget."""
        return (*ring_barriers("k", self.stages, "announcer", self.readers), *self.landed.budget())

    def init(self, st) -> None:
        """Initialise the barriers of ``landed``; one thread calls this, before ``pipe``."""
        self.landed.init(st)

    def pipe(self, st):
        """The ring: warp 2 fills a stage, one lane of each reading warp frees it."""
        return ring_pipe(st.k_bar, self.stages, self.readers, 0)

    # ---------------------------------------------------------------- roles

    @cute.jit
    def run(self, warp, feed, tile_of_q, on_full):
        """The role of one of the four warps (``Loader.run``)."""
        if warp == ANNOUNCER:
            self._announce(feed, on_full)
        elif warp == Q_WARP:
            first, end = self.of_warps[Q_WARP]
            self._fill(feed, (Int32(first), Int32(end)), tile_of_q)
        else:
            others = zip(self.of_warps[0], self.of_warps[3], strict=True)
            ends = [cutlass.select_(warp == 0, Int32(a), Int32(b)) for a, b in others]
            self._fill(feed, (ends[0], ends[1]), None)
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _announce(self, feed: Feed, on_full):
        """Each tile when it has landed: to its readers, behind a proxy fence, and ``on_full``."""
        span = self.work.work_tiles_of(feed.work, feed.part)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        for i in cutlass.range(span[0], span[1], unroll=1):
            _, first, last, _ = self.work.work_tile_at(feed.work, i)
            for _ in cutlass.range(first, last, unroll=1):
                self.landed.wait_full(feed.st, kst.index, kst.phase)
                cute.arch.fence_proxy("async.shared", space="cta")
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(feed.k_pipe.producer_get_barrier(kst))
                if const_expr(on_full is not None):
                    on_full(kst)
                kst.advance()

    @cute.jit
    def _fill(self, feed: Feed, groups, tile_of_q):
        """Rows ``groups`` (first, end) of 8 of each tile; by the warp of Q that, too.

        Q's tile of a work tile is asked for at once where Q has two stages; else when the ring is
        full of the work tile's tiles: the work tile before frees Q's stage, and must have been fed.
        Without stages of its own Q is the work tile's first stage of the ring, where the other
        warps copy nothing.
        """
        st, _, k_pipe, cache, work, call, part, mark = feed
        lane = cute.arch.lane_idx()
        tokens = cache.source
        late = const_expr(tile_of_q is not None and self.q_stages == 1)
        own = const_expr(tile_of_q is not None and self.q_stages > 0)  # a ring of Q's own
        first, end = groups
        to, planes = self._targets(st, first, lane), self._planes(cache, lane)
        kst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        qst = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        ahead = first * GROUP + lane
        span = self.work.work_tiles_of(work, part)
        for i in cutlass.range(span[0], span[1], unroll=1):
            batch, begin, last, _ = self.work.work_tile_at(work, i)
            row, count = self.work.row_of_table(work, call, i, batch)
            entry = self.work.entry(row, begin, ahead)
            if const_expr(self.q_stages == 0):
                if const_expr(tile_of_q is not None):
                    tile_of_q(i, batch, kst)
                else:
                    self._wait_free(st, k_pipe, kst, first)
                arrive_landed(self.landed.full_barrier(st, kst.index))
                kst.advance()
            if const_expr(own):
                if const_expr(not late):  # noqa: SIM114 (at compile time)
                    tile_of_q(i, batch, qst)
                elif i == span[0]:
                    tile_of_q(i, batch, qst)
            for tile in cutlass.range(begin, last, unroll=1):
                page, offset = self.work.place(entry, tile, ahead, count, tokens)
                entry = self.work.entry(row, tile + 1, ahead)
                if const_expr(late):  # noqa: SIM102 (only this is at compile time)
                    if (i != span[0]) & (tile == begin + self.stages):
                        tile_of_q(i, batch, qst)
                self._wait_free(st, k_pipe, kst, first)
                self._copy(to, planes, kst.index, page, offset, end - first, lane)
                arrive_landed(self.landed.full_barrier(st, kst.index))
                if const_expr(mark is not None):
                    mark(kst.count == 0)
                kst.advance()
            if const_expr(own):
                if const_expr(late):  # noqa: SIM102 (likewise)
                    if (i != span[0]) & (last - begin <= self.stages):
                        tile_of_q(i, batch, qst)
                qst.advance()

    # ---------------------------------------------------------------- rows

    def _wait_free(self, st, k_pipe, kst, first):
        """Wait until a stage may be filled, from its group ``first`` on."""
        k_pipe.sync_object_empty.wait(kst.index, kst.phase)

    def _targets(self, st, first, lane):
        """Shared addresses, in stage 0, of what this thread copies of its warp's first rows: of
        content, of RoPE of four rows (without, anything), of a scale."""
        line, chunk = lane // 8, lane % 8
        rows = first * (GROUP * LINE)
        to_r = rows + line * LINE + (chunk ^ line) * CHUNK
        to_c = to_r
        if not self.by_lines:  # a row's line in one of four column blocks
            to_c = rows + line * (self.work.tile * LINE) + chunk * CHUNK
        to = [to_c + st.kc.data_ptr().toint()]
        if self.rope:
            to.append(to_r + st.kr.data_ptr().toint())
        to.append(st.ks.data_ptr().toint() + (first * GROUP + lane) * self.scale_bytes)
        to = [compat.opaque(x) for x in to]
        return to if self.rope else [to[0], *to]

    def _planes(self, cache, lane):
        """``Plane`` of content, RoPE, scale."""
        tokens, of_line = cache.source, lane % 8 * CHUNK
        return (
            Plane.of(tokens.content, 1, of_line if self.by_lines else lane * CHUNK),
            Plane.of(tokens.rope, 2, of_line),
            Plane.of(cache.scale, SCALE, 0),
        )

    @cute.jit
    def _copy(self, to, planes, stage, page, offset, groups, lane):
        """A warp's rows of a tile: the lanes hold (page, offset) of theirs."""
        tile = const_expr(self.work.tile)
        at_c, at_r = to[0] + stage * (tile * D), to[1] + stage * (tile * R * 2)
        for g in cutlass.range(0, groups, unroll=1):
            if const_expr(self.by_lines):
                self._lines(planes, at_c, at_r, page, offset, GROUP * g + lane // 8)
            else:
                self._rows(planes, at_c, at_r, page, offset, GROUP * g, lane // 8)
            at_c += GROUP * LINE
            at_r += GROUP * LINE
        if lane < groups * GROUP:
            n = const_expr(self.scale_bytes)
            source, size = self._source(planes[2], page, offset, n)
            copy(to[2] + stage * (tile * n), source, size, n=n)

    def _rows(self, planes, at_c, at_r, page, offset, first, line):
        """Eight rows: a row of content an instruction, RoPE of four."""
        for j in range(GROUP):
            source, size = self._source(planes[0], *self._held(page, offset, first + j), CHUNK)
            copy(at_c ^ (j * CHUNK), source, size, to=j * LINE)
        for k in range(2 if self.rope else 0):
            of = self._held(page, offset, first + 4 * k + line)
            source, size = self._source(planes[1], *of, CHUNK)
            copy(at_r ^ (k * HALF), source, size, to=k * 4 * LINE)

    def _lines(self, planes, at_c, at_r, page, offset, first):
        """The same, a line of four rows an instruction: addresses serve a row's four lines."""
        for k in range(2):
            of = self._held(page, offset, first + 4 * k)
            source, size = self._source(planes[0], *of, CHUNK)
            target = at_c ^ (k * HALF)
            for block in range(D // LINE):
                to = k * 4 * LINE + block * (self.work.tile * LINE)
                copy(target, source, size, to=to, ahead=block * LINE)
            if self.rope:
                source, size = self._source(planes[1], *of, CHUNK)
                copy(at_r ^ (k * HALF), source, size, to=k * 4 * LINE)

    @staticmethod
    def _held(page, offset, lane):
        """(page, offset) that a lane holds."""
        return [cute.arch.shuffle_sync(x, lane) for x in (page, offset)]

    @staticmethod
    def _source(plane, page, offset, n: int):
        """(address, bytes) of ``n`` bytes of a token; none of them if it is none."""
        size = Int32(cutlass.select_(page >= 0, Int32(n), Int32(0)))
        return plane.at(cutlass.max(page, 0), offset), size
