"""Components of pipeline ``mix16`` (mix16.py): queries, loader, scales in the ring,
conversions.

Scales (announcer warp, a tile at a time).  sigma of a token is its largest scale, but at least
2^-40 of the largest that the work tile has seen so far: a token whose content is nothing beside
that of others, zeros with a scale of 0 or 2^-126 above all, would else leave the range in which row
sums are kept.  A group's *ratio* is its scale / sigma, at most 1, in f16.  A place without a token
has log2 sigma -inf, which masks it.

Queries (by P.V's warps, before they write the rows of the work tile before).  A row of Q is
multiplied by 2^p, so that its largest content channel is in [2^15, 2^16): in f16 all of bf16's bits
are kept down to 2^-32 of that.  RoPE, which stays bf16, is multiplied by the same; where it is more
than 2^30 times as large, by the power that takes it to 2^46.  The channels of 16
take the places ``CHANNEL``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...blocks import budget as bud
from ...blocks import compat
from ...blocks.barriers import Ring
from ...blocks.smem import array, one_stage
from ...blocks.stamps import Stamps
from ...blocks.types import BF16, F8, F16, ROW_MAJOR, U32
from ...formats.dims import KV_LORA_RANK as D
from ...formats.dims import QK_ROPE_HEAD_DIM as R
from ...formats.dims import TOKEN_TILE as TILE
from ...formats.ds_mla import GROUPS, LEAST_SCALE, ROW_BYTES
from ...load.gather import TokenLists
from ...load.gather_bytes import GatherBytes
from ...load.loader import Cache
from ...load.planes import CacheFormat, Loaded, Plane
from ...load.q_tiles import QTiles
from ...load.work_list import LOG2E
from ..fp8.softmax_role import P_STAGES
from ..fragments import padded_size, row_position
from ..roles import K_READERS, PV_WARPS, Q_READERS, SOFTMAX_WARPS, Layouts

if TYPE_CHECKING:
    from ...entry.launch import Tma
    from ...spec import VariantSpec

Q_FORMAT = CacheFormat((Plane("c", BF16, D), Plane("r", BF16, R)))
# Place in the 16 channels of a k step -> channel: what the four bytes of a thread become, in order.
CHANNEL = [4 * (k % 8 // 2) + k % 2 + 2 * (k // 8) for k in range(16)]
APART = 2.0**-40  # of a work tile's largest scale: the least sigma
LEAST_KEY_SIGMA = 2.0**-40
# Row sums are kept times 2^-40, since 1 / sigma may be 2^126.
SUM_LOG2 = 40
SUM_FACTOR = 2.0**-SUM_LOG2
Q_TOP = 15  # log2 of the binade of a row's largest content channel
Q_ROPE_ABOVE = 30  # binades by which RoPE may be larger before it decides
STAGE_BYTES = TILE * (ROW_BYTES + 4 * (4 + GROUPS + GROUPS // 2))  # with what is made of scales
HALF = 4  # chunks of 16 bytes of half a column block's line
BLOCK, FIRST_BLOCKS = 64, 4  # channels of a column block of Q; blocks of its first half
CONVERTED = 4  # named barrier: P.V's warps have converted Q for softmax
CONVERTED_THREADS = 32 * (SOFTMAX_WARPS + PV_WARPS)
LINE = 128  # bytes of a token's channels of a group in the ring
EXPONENT_BIAS, LEAST_FIELD = 127, 42  # of an fp32 exponent; 2^p is at most 2^100
INFINITE = 0x7F800000  # of an fp32's bits


@compat.dsl_user_op
def unpack(word, *, loc=None, ip=None):
    """Four e4m3 -> two words of two f16, exactly."""
    return compat.inline_ptx(
        "{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 {$w0}, lo;\ncvt.rn.f16x2.e4m3x2 {$w1}, hi;\n}",
        write_only_types=[Uint32, Uint32], read_only_args=[word], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def times(a, b, *, loc=None, ip=None):
    """Two f16 products."""
    return compat.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32], read_only_args=[a, b], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def times_bf16(a, b, *, loc=None, ip=None):
    """Two bf16 products."""
    return compat.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32], read_only_args=[a, b], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def pack_f16(low, high, *, loc=None, ip=None):
    """Two fp32 -> a word of two f16."""
    return compat.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32], read_only_args=[low, high], loc=loc, ip=ip,
    )  # fmt: skip


@compat.dsl_user_op
def larger_halves(a, b, *, loc=None, ip=None):
    """The larger of two 16-bit numbers, twice."""
    return compat.inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32], read_only_args=[a, b], loc=loc, ip=ip,
    )  # fmt: skip


def largest_of_warp(x):
    """The largest of the lanes' numbers, 0 if there is none that is not negative: as integers, for
    which there is one instruction."""
    bits = x.bitcast(Int32)
    bits = Int32(cutlass.select_(bits > INFINITE, Int32(0), bits))  # NaN
    return Int32(cutlass.max(cute.arch.warp_redux_sync(bits, "max"), Int32(0))).bitcast(Float32)


class BytesQueries(QTiles):
    """Queries in one tensor (b, s_q, h, 576), or content and RoPE in one each; they come to L2 when
    they are asked for: ``tile_of_q.ahead(i)``.

    Where there is one stage, its first half is free as soon as the last tile's Q.K is behind it:

        first_half   softmax -> who has Q copied   (warps; beside the stage's own empty barrier)

    Attributes:
        first_half: None with more stages.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.first_half = Ring("q_half", 1, self.readers) if self.stages == 1 else None

    @property
    def fields(self) -> dict:
        """Storage of the barriers."""
        return {**super().fields, **(self.first_half.field if self.first_half else {})}

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """All of them in a budget."""
        return *super().barriers(), *(self.first_half.budget() if self.first_half else ())

    def init(self, st) -> None:
        """Initialise ``first_half``, if there is one; one thread calls this, before the fence that
        publishes all barriers."""
        if self.first_half:
            self.first_half.init(st)

    def free_first_half(self, st, chosen) -> None:
        """Free the first half of Q's stage, if it is freed apart.  All threads of softmax call
        this; those with ``chosen`` arrive, one a warp, without a branch."""
        if self.first_half:
            self.first_half.arrive_full_if(st, 0, chosen)

    def source(self, tensors, layouts):
        """``Loaded`` of content and RoPE, the CTA's rows each.

        Args:
            tensors: (q,), rows side by side; or (q, q_rope, elements from row to row of either),
                where content is the first channels of ``q`` and RoPE the last of ``q_rope``, which
                may be one tensor.
        """
        q, *others = tensors
        b, s_q, h, width = q.shape
        planes, out, first = self.format.planes, [], 0
        for n, (plane, layout) in enumerate(zip(planes, layouts, strict=True)):
            at, stride = q.iterator + first, width
            if others:
                rope, *strides = others
                at = rope.iterator + (rope.shape[3] - plane.width) if n else q.iterator
                stride = cute.assume(strides[n], divby=compat.VECTOR_BYTES // 2)
            rows = cute.make_layout((b * s_q * h, plane.width), stride=(stride, 1))
            atom = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileG2SOp(), cute.make_tensor(at, rows), one_stage(layout),
                (self.rows, plane.width),
            )  # fmt: skip
            out.append(Loaded(*list(atom)[:2]))
            first += plane.width
        return tuple(out)

    def issuer(self, st, pipe, layouts, source, work, call):
        planes = self._planes(st, source, layouts)

        def tile_of_q(i, batch, stage):
            rows = self.work.rows_at(work, call, i, batch, self.rows)
            bar = self._claimed(st, pipe, stage)
            if self.first_half is None:
                self._copy(planes, rows, stage.index, bar)
                return
            self._copy_blocks(planes, rows, stage.index, bar, True)
            pipe.sync_object_empty.wait(stage.index, stage.phase)
            self._copy_blocks(planes, rows, stage.index, bar, False)

        def ahead(i):
            batch, *_ = self.work.work_tile_at(work, i)
            rows = self.work.rows_at(work, call, i, batch, self.rows)
            for plane, loaded, tiles in self._planes(st, source, layouts):
                moved = cute.domain_offset((rows.first, 0), loaded.coords)
                _, tile = cpasync.tma_partition(
                    loaded.atom, 0, cute.make_layout(1), cute.group_modes(tiles, 0, 2),
                    cute.group_modes(
                        cute.local_tile(moved, (self.rows, plane.width), (0, 0)), 0, 2
                    ),
                )  # fmt: skip
                cute.prefetch(loaded.atom, tile)

        tile_of_q.ahead = ahead
        return tile_of_q

    def _claimed(self, st, pipe, stage):
        """Arm and return a stage's barrier once its first half is free; if halves are not freed
        apart, once the whole stage is free."""
        if self.first_half is None:
            return self._acquired(pipe, stage)
        self.first_half.wait_full(st, 0, stage.phase)
        bar = pipe.producer_get_barrier(stage)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.bytes)
        return bar

    def _copy_blocks(self, planes, rows, stage, bar, first: bool) -> None:
        """Copy like ``_copy``, but only the four column blocks of the first half if ``first``, else
        only the others: the rest of content, and RoPE."""
        for n, (plane, loaded, tiles) in enumerate(planes):
            moved = cute.domain_offset((rows.first, 0), loaded.coords)
            box = (self.rows, BLOCK)
            for block in range(plane.width // BLOCK):
                if (n == 0 and block < FIRST_BLOCKS) != first:
                    continue
                held = cute.local_tile(tiles, box, (0, block, None))
                target, source = cpasync.tma_partition(
                    loaded.atom, 0, cute.make_layout(1), cute.group_modes(held, 0, 2),
                    cute.group_modes(cute.local_tile(moved, box, (0, block)), 0, 2),
                )  # fmt: skip
                cute.copy(loaded.atom, source, target[None, stage], tma_bar_ptr=bar)


class QueryRows:
    """Row tiles of Q: bf16 as they come -> f16 content, bf16 RoPE, and the rows' factors, field
    ``factors``.

    P.V's warps convert them, half a column block at a time: beside O they have few registers, and a
    short loop is soon fetched, which each work tile finds cold.

    Attributes:
        channels: of content.
        rope: whether there is RoPE beside it.
        rows: of a CTA.
    """

    channels = D

    def __init__(self, rows: int, rope: bool = True):
        self.rows, self.rope = rows, rope

    @property
    def fields(self) -> dict:
        """Storage."""
        return dict(factors=array(Float32, padded_size(self.rows), 128))

    @cute.jit
    def convert(self, st, stage, call, group):
        """In place, rows from 8 ``group`` on, by a warp, which then has a proxy fence to make and
        others to tell.

        Four lanes a row; lane 8 i + r of row r has column blocks i and i + 4 of 64 channels, so
        that eight lanes read eight swizzled rows.  Two passes: a row's words are more registers
        than there are.
        """
        lane = cute.arch.lane_idx()
        row, part = group * 8 + lane % 8, lane // 8
        block = const_expr(self.rows * 128)
        at = st.qc.data_ptr().toint() + stage * (self.rows * self.channels * 2) + row * 128
        at = at + part * block
        largest = Uint32(compat.opaque(Int32(0)))
        for x in cutlass.range(4, unroll=1):
            line = self._line(at, x // 2, part, block)
            largest = larger_halves(largest, self._largest(self._half(line, x % 2, lane)))
        at_r, rope = self._rope_words(st, stage, row, part, lane)
        field = self._exponent(largest, self._largest(rope))
        power = (Uint32(2 * EXPONENT_BIAS + Q_TOP) - field) << Uint32(7)  # of bf16
        power = power | (power << Uint32(16))
        self._store_rope(at_r, lane, rope, 2 * part, power)
        if part == 0:
            factors = st.factors.get_tensor(cute.make_layout(padded_size(self.rows)))
            back = ((field - Uint32(Q_TOP)) << Uint32(23)).bitcast(Float32)  # 2^-p
            factors[row_position(row, self.rows)] = call.softmax_scale * LOG2E * back
        for x in cutlass.range(4, unroll=1):
            line = self._line(at, x // 2, part, block)
            self._convert(line, x // 2, part, x % 2, lane, power)

    def _rope_words(self, st, stage, row, part, lane):
        """(address of a row's RoPE, a lane's words of it); of none there are no words."""
        if not self.rope:
            return None, []
        at = st.qr.data_ptr().toint() + stage * (self.rows * R * 2) + row * 128
        return at, self._words(at, lane, 2, 2 * part)

    def _line(self, at, x, part, block):
        """Address of a lane's column block of turn ``x``, which is the (4 x + ``part``)-th."""
        return at + x * (4 * block)

    def _half(self, line, half, lane):
        """A lane's words of half a column block."""
        return self._words(line, lane, HALF, half * HALF)

    def _convert(self, line, x, part, half, lane, power):
        """Half of a lane's column block of turn ``x`` to f16."""
        self._to_f16(line, half, lane, power)

    def _chunk(self, line, lane, chunk):
        """Tensor of the four words of a 16-byte chunk of a swizzled line, row lane % 8."""
        at = line + ((chunk ^ (lane % 8)) * 16)
        return cute.make_tensor(
            cute.make_ptr(U32, at, cute.AddressSpace.smem, assumed_align=16), cute.make_layout(4)
        )

    def _words(self, line, lane, n: int, first=0):
        """Register tensors of four words, of ``n`` chunks from ``first`` on."""
        out = []
        for c in range(n):
            four = cute.make_rmem_tensor((4,), U32)
            cute.autovec_copy(self._chunk(line, lane, first + c), four)
            out.append(four)
        return out

    @staticmethod
    def _largest(chunks):
        """The largest magnitudes of even and of odd channels: bf16 bits order like them."""
        sizes = [four[w] & Uint32(0x7FFF7FFF) for four in chunks for w in range(4)]
        while len(sizes) > 1:
            sizes = [larger_halves(*pair) for pair in zip(sizes[::2], sizes[1::2], strict=True)]
        return sizes[0] if sizes else Uint32(0)

    @staticmethod
    def _exponent(content, rope):
        """The exponent field that decides about the row's power, in all of its lanes."""
        fields = []
        for top in (content, rope):
            top = cutlass.max(top & Uint32(0xFFFF), top >> Uint32(16))
            for bit in (8, 16):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, bit))
            fields.append(top >> Uint32(7))
        least = cutlass.max(fields[1], Uint32(LEAST_FIELD + Q_ROPE_ABOVE)) - Uint32(Q_ROPE_ABOVE)
        return cutlass.max(fields[0], least)

    def _to_f16(self, line, half, lane, power):
        """32 channels times 2^p, exactly: of two chunks of 8 the even words, then the odd ones.

        All loads come first: behind a store they would wait for each other.
        """
        words = [
            times_bf16(four[w], power) for four in self._half(line, half, lane) for w in range(4)
        ]
        for c in range(HALF):
            four = cute.make_rmem_tensor((4,), U32)
            for i in range(4):
                word = words[8 * (c // 2) + 2 * i + c % 2]
                low = (word << Uint32(16)).bitcast(Float32)
                four[i] = pack_f16(low, (word & Uint32(0xFFFF0000)).bitcast(Float32))
            cute.autovec_copy(four, self._chunk(line, lane, half * HALF + c))

    def _store_rope(self, line, lane, chunks, first, power):
        """RoPE times 2^p."""
        for c, four in enumerate(chunks):
            for w in range(4):
                four[w] = times_bf16(four[w], power)
            cute.autovec_copy(four, self._chunk(line, lane, first + c))


class GroupScales:
    """Scales of the tokens in the ring, field ``ks``, and what the announcer makes of them:

    facts    fp32 (4, token): log2 sigma, -inf if there is no token; 2^-40 / sigma; sigma of K, at
             least 2^-40, since what is less is nothing in a logit; 1 if the tile has some token,
             else 0
    own      (group, token): the ratio to sigma of K, twice in a word
    ratios   (8, 4, group): words of two neighbouring tokens' ratios, those of a quad lane of V^T's
             fragments together: word i of lane c is tokens 8 i + 2 c and the next

    Attributes:
        groups: of a token.
        words: from a token's ratios for K to the next one's.
        quiet: whose ``clear(st, stage)`` clears V of what is not finite, for tokens that not all
            rows see; made of a class, with the scales.  None: all rows see the same.
    """

    groups = words = GROUPS

    def __init__(self, stages: int, quiet: Any = None):
        self.stages = stages
        self.quiet = None if quiet is None else quiet(self)

    @property
    def fields(self) -> dict:
        """Storage."""
        n = TILE * self.stages
        return dict(
            ks=array(Float32, GROUPS * n, 128),
            facts=array(Float32, 4 * n, 128),
            own=array(U32, self.words * n, 128),
            ratios=array(U32, self.groups * n // 2, 128),
        )

    def of_tokens(self, st):
        """(group, token, stage) of the scales."""
        return st.ks.get_tensor(cute.make_layout((GROUPS, TILE, self.stages)))

    def facts(self, st):
        """(fact, token, stage)"""
        return st.facts.get_tensor(cute.make_layout((4, TILE, self.stages)))

    def own(self, st):
        """(group, token, stage)"""
        return st.own.get_tensor(cute.make_layout((self.words, TILE, self.stages)))

    def ratios(self, st):
        """(word of a quad lane, quad lane, group, stage)"""
        return st.ratios.get_tensor(cute.make_layout((8, 4, self.groups, self.stages)))

    def maker(self, st):
        """``on_full`` of the loader (gather_bytes.py)."""

        def make(stage, named, top):
            top = self._make(st, stage, named, top)
            if self.quiet is not None:
                self.quiet.clear(st, stage)
            return top

        return make

    @cute.jit
    def _make(self, st, stage, named, top):
        lane = cute.arch.lane_idx()
        scales, facts = self.of_tokens(st), self.facts(st)
        own, ratios = self.own(st), self.ratios(st)
        s, largest = [], []
        for e in cutlass.range_constexpr(2):
            four = cute.make_rmem_tensor((GROUPS,), Float32)
            cute.autovec_copy(scales[None, 2 * lane + e, stage], four)
            s.append(four)
            largest.append(
                cute.arch.fmax(cute.arch.fmax(four[0], four[1]), cute.arch.fmax(four[2], four[3]))
            )
        top = cute.arch.fmax(top, largest_of_warp(cute.arch.fmax(largest[0], largest[1])))
        least = cute.arch.fmax(top * APART, Float32(LEAST_SCALE))
        least_of = [
            cute.arch.fmin(cute.arch.fmin(x[0], x[1]), cute.arch.fmin(x[2], x[3])) for x in s
        ]
        if (named[0] & (least_of[0] == 0.0)) | (named[1] & (least_of[1] == 0.0)):
            self._clear(st, stage, s)
        some = cute.arch.vote_any_sync(named[0] | named[1])
        some = Float32(cutlass.select_(some, Float32(1.0), Float32(0.0)))
        inverse = []
        for e in cutlass.range_constexpr(2):
            sigma = cute.arch.fmax(largest[e], least)
            log = cute.math.log2(sigma, fastmath=True)
            # of the rounded log2, which P' has: in row sums it cancels
            inverse.append(cute.math.exp2(-log, fastmath=True))
            four = cute.make_rmem_tensor((4,), Float32)
            four[0] = Float32(cutlass.select_(named[e], log, -Float32.inf))
            key_sigma = cute.arch.fmax(sigma, Float32(LEAST_KEY_SIGMA))
            four[1], four[2], four[3] = inverse[e] * SUM_FACTOR, key_sigma, some
            cute.autovec_copy(four, facts[None, 2 * lane + e, stage])
            twice = cute.make_rmem_tensor((GROUPS,), U32)
            key_inverse = cute.arch.rcp_approx(key_sigma)
            for g in cutlass.range_constexpr(GROUPS):
                ratio = s[e][g] * key_inverse
                twice[g] = pack_f16(ratio, ratio)
            cute.autovec_copy(twice, own[None, 2 * lane + e, stage])
        for g in cutlass.range_constexpr(GROUPS):
            both = pack_f16(s[0][g] * inverse[0], s[1][g] * inverse[1])
            ratios[lane // 4, lane % 4, g, stage] = both
        return top

    @cute.jit
    def _clear(self, st, stage, s):
        """Zeros for the content of groups with scale 0: who writes such scales may leave 0 / 0.

        Nobody reads content but by ldmatrix, so that no proxy fence is missing.
        """
        zero = cute.make_rmem_tensor((LINE // 4,), U32)
        zero.fill(0)
        for e in cutlass.range_constexpr(2):
            token = 2 * cute.arch.lane_idx() + e
            for g in cutlass.range_constexpr(GROUPS):
                if s[e][g] == 0.0:
                    at = stage * (TILE * D) + g * (TILE * LINE) + token * LINE
                    line = cute.recast_ptr((st.kc.data_ptr() + at).align(LINE), dtype=U32)
                    cute.autovec_copy(zero, cute.make_tensor(line, cute.make_layout(LINE // 4)))


class Parts:
    """Components that the roles share (``decode.Parts``).

    Attributes:
        rows, cluster: query rows of a CTA; CTAs that share their K tiles: none do.
        stages, q_stages: KV tiles, Q tiles in flight.
        work, q_tiles, loads, scales, queries: work list, Q, KV tiles, scales in the ring, rows of
            Q.
        stamps: recorder of events, off in ordinary builds.
        content: channels of K's rows and Q's that scales multiply.
        q_format: planes of Q.
        whole_lines: whether a copy takes a line of four rows whatever ``lines`` says.
        limits: ``RowLimits`` where rows see more or less of a sequence; None: all see the same.
    """

    cluster, limits = 1, None
    content, q_format = D, Q_FORMAT
    whole_lines = False

    def __init__(
        self, spec: VariantSpec, *, stages: int, q_stages: int, work: Any = TokenLists,
        loader: Any = GatherBytes, queries: Any = QueryRows, scales: Any = GroupScales,
        quiet: Any = None, limits: Any = None,
    ):  # fmt: skip
        """Classes of the members; ``quiet``: what ``scales`` have; ``limits``: made."""
        self.rows, self.stages, self.q_stages = spec.row_tile, stages, q_stages
        self.work = work(TILE)
        self.q_tiles = BytesQueries(
            self.q_format, self.work, rows=self.rows, stages=q_stages, readers=Q_READERS
        )
        self.loads = loader(
            self.work, format=spec.format, stages=stages, q_stages=q_stages, readers=K_READERS,
            by_lines=self.whole_lines or bool(spec.lines), halves=bool(spec.halves),
        )  # fmt: skip
        self.scales, self.queries = scales(stages, quiet), queries(self.rows)
        self.limits, self.stamps = limits, Stamps(bool(spec.stamps))

    def cache(self, tma: Tma, gmem: Any) -> Cache:
        """The cache as the loader's warps read it: ``tma.kv``, whose bytes hold the scales."""
        return Cache(tma.kv, tma.kv.rows.shape[0])

    def on_full(self, st):
        """Function that makes facts and ratios of a full stage's scales, for the announcer."""
        return self.scales.maker(st)

    def free_first_half(self, st, stage) -> None:
        """Free the first half of a stage's rows, if halves are freed apart; all lanes of a warp
        call this once they have read it."""
        self.loads.free_first_half(st, stage)

    @property
    def barrier_fields(self) -> dict:
        """Barriers of Q and the ring."""
        return {**self.q_tiles.fields, **self.loads.fields}

    def barriers(self) -> tuple[bud.Barrier, ...]:
        """The same in a budget."""
        return *self.q_tiles.barriers(), *self.loads.barriers()

    def layouts(self) -> Layouts:
        """Shared-memory layouts: Q and K in 16 bits, the ring's content in 8, P."""
        a, b, shape = sm90.make_smem_layout_a, sm90.make_smem_layout_b, (TILE, self.rows)
        return Layouts(
            tuple(b(ROW_MAJOR, (*shape, n), BF16, self.q_stages) for n in (self.content, R)),
            (
                a(ROW_MAJOR, (*shape, self.content), F8, self.stages),
                a(ROW_MAJOR, (*shape, R), BF16, self.stages),
            ),
            b(ROW_MAJOR, (*shape, TILE), F16, P_STAGES),
        )

    def tile_fields(self, layouts: Layouts) -> dict:
        """Scales, Q, K ring; the tiles start at multiples of the 1024-byte swizzle period."""
        size = cute.cosize
        return dict(
            **self.fields_of_rows(),
            qc=array(BF16, size(layouts.q[0]), 1024),
            kc=array(F8, size(layouts.k[0]), 1024),
            kr=array(BF16, size(layouts.k[1]), 1024),
            qr=array(BF16, size(layouts.q[1]), 1024),
        )

    def fields_of_rows(self) -> dict:
        """Scales, what the rows of Q have, and their limits."""
        limits = {} if self.limits is None else self.limits.fields
        return {**self.scales.fields, **self.queries.fields, **limits}
