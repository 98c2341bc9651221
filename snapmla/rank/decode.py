"""Decode calls as problems of the ranking; what is peculiar to one cache is a ``DecodeOp``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dsl_kernels import registry
from dsl_kernels.families import Family
from dsl_kernels.families.family import OUT_DTYPE
from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK
from dsl_kernels.formats.registered import DEFAULT, FORMATS, Format, Names
from dsl_kernels.spec import VariantSpec
from snapmla.cache.layouts import kernel_page_size
from snapmla.rank.cards import Card
from snapmla.rank.costs import Costs, costs_of, parts_of, unit_rows
from snapmla.rank.load import Share
from snapmla.rank.verdicts import Size, judge

STANDARD, HIGH, FAST = ACCURACIES = ("standard", "high", "fast")  # as users name them
OUT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
REFERENCE = Size(32, 16384)  # at which candidates are compared


@dataclass(frozen=True)
class Features:
    """Features that a decode pipeline declares.

    Attributes:
        row_tiles, page_sizes, out_dtypes: the variants that can be built.
        why_tiles: the reason behind ``row_tiles``, for messages.
        about: one line for people.
        two_terms: those of ``row_tiles`` that are there with two terms of P.
        why_two_terms: the reason behind ``two_terms``.
        asked: whether it serves only calls that name it, and no message offers it.
        longest_item: tokens of a sequence that its kernels sum in one go, about (``Record``); 0:
            any number.
    """

    row_tiles: tuple[int, ...]
    why_tiles: str
    about: str
    page_sizes: tuple[int, ...]
    out_dtypes: Sequence[str] = OUT_DTYPE.values
    two_terms: tuple[int, ...] = ()
    why_two_terms: str = "it sums one"
    asked: bool = False
    longest_item: int = 0

    def tiles(self, p_terms: int) -> tuple[int, ...]:
        """Row tiles with so many terms of P."""
        return self.row_tiles if p_terms == 1 else self.two_terms


class OfFormats(Mapping[str, Any]):
    """Facts about formats, by name: made of a record when they are asked for, once.

    Attributes:
        names: of the formats that have such.
    """

    def __init__(self, names: Names, make: Callable[[Format], Any]) -> None:
        self.names, self._make = names, make
        self._made: dict[str, tuple[Format, Any]] = {}

    def __getitem__(self, name: str) -> Any:
        record = FORMATS[name]
        found = self._made.get(name)
        if found is not None and found[0] is record:
            return found[1]
        if name not in self.names:
            raise KeyError(name)
        made = self._make(record)
        self._made[name] = record, made
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, eq=False)
class DecodeOp:
    """Decode over one kind of cache, as the dispatcher knows it.

    Attributes:
        family: whose variants are the candidates: all row tiles of the pipelines of an arch.
        features: by pipeline; one without cannot be chosen.
        token_bytes: of one cached token, and of one row of the query.
        tensor_cycles: in which an H100's tensor core does a tile of a variant.
        effective_tflops: attainable rate of a card on the op's mix of formats.
        about: its cache, for messages; ``reference`` is what computes it anywhere.
        kernels: one of its kernels, for messages.
        assumed: costs on an architecture where no table has any, if others stand in for them.
        tile_ns: nanoseconds of a tile, by pipeline and row tile, where memory does not bound it.
        exact: by architecture the pipeline with exact logits, which accuracy ``high`` means where
            no other is asked for.
        fast: by architecture the pipeline that accuracy ``fast`` lets take part: it rounds the
            query.
        elsewhere: of architectures that have none of its kernels, what serves there.
    """

    family: Family
    features: Mapping[str, Features]
    token_bytes: int
    tensor_cycles: Callable[[VariantSpec], float]
    effective_tflops: Callable[[Card], float]
    about: str = "an FP8 cache"
    reference: str = "snapmla.reference.mla_decode_reference"
    kernels: str = "decode kernel"
    assumed: Callable[[str], Costs | None] | None = None
    tile_ns: Mapping[tuple[str, int], int] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)
    fast: Mapping[str, str] = field(default_factory=dict)

    def wished(self, arch: str, accuracy: str, pipeline: str | None) -> tuple[str | None, int]:
        """(pipeline, terms of P) of a wish: ``high`` is exact logits, and two terms of P where a
        pipeline without them is asked for, or none has them."""
        exact = self.exact.get(arch)
        if accuracy == HIGH and exact is not None and pipeline in (None, exact):
            return exact, 1
        return pipeline, 2 if accuracy == HIGH else 1

    def ns_of_tile(self, spec: VariantSpec, card: str) -> int:
        """Nanoseconds of a tile on the card that was measured; 0 if the kernel was not."""
        return self.tile_ns.get((spec.pipeline, spec.row_tile), 0)

    def costs(self, arch: str) -> tuple[Costs | None, bool]:
        """(costs of its kernels on an architecture, or None; True if they were measured)."""
        found = costs_of(self.family.op, arch)
        if found is not None or self.assumed is None:
            return found, found is not None
        return self.assumed(arch), False

    def values(self, axis: str) -> Sequence[Any]:
        """Values of an axis of the family."""
        found = self.family.axis(axis)
        assert found is not None
        return found.values

    def spec(
        self,
        arch: str,
        pipeline: str,
        row_tile: int,
        page_size: int,
        out_dtype: str,
        p_terms: int = 1,
    ) -> VariantSpec:
        """The variant of these choices; ``page_size`` as kernels see it."""
        more: dict[str, Any] = {self.family.result_axis: out_dtype}
        if p_terms > 1:  # not every op has the axis
            more["p_terms"] = p_terms
        return VariantSpec(
            op=self.family.op, arch=arch, pipeline=pipeline, row_tile=row_tile,
            page_size=page_size, **more,
        )  # fmt: skip

    def exists(self, pipeline: str, arch: str) -> bool:
        """True if a kernel module builds the pipeline."""
        spec = VariantSpec(op=self.family.op, arch=arch, pipeline=pipeline)
        return registry.module_name(spec) is not None

    def pipelines(self, arch: str, *wishes: str | None) -> list[str]:
        """Pipelines of an architecture; one that must be asked for only if ``wishes`` names it."""
        own = [pipeline for pipeline in self.values("pipeline") if self.exists(pipeline, arch)]
        return [name for name in own if name in wishes or not self.is_asked(name)]

    def is_asked(self, pipeline: str) -> bool:
        """True if a pipeline serves only calls that name it."""
        return pipeline in self.features and self.features[pipeline].asked

    def page_size_seen(self, page_size: int) -> int:
        """Page size of its kernels that serves a cache's."""
        return kernel_page_size(page_size)

    def longest_item(self, spec: VariantSpec) -> int:
        """``Features.longest_item`` of a variant's pipeline."""
        return self.features[spec.pipeline].longest_item


@dataclass(frozen=True, eq=False)
class OneFormat(DecodeOp):
    """A ``DecodeOp`` over one format, whose kernels take any page size.

    Attributes:
        cache_dtype: format of the cache.
    """

    cache_dtype: str = ""

    def spec(
        self,
        arch: str,
        pipeline: str,
        row_tile: int,
        page_size: int,
        out_dtype: str,
        p_terms: int = 1,
    ) -> VariantSpec:
        """The variant of these choices, for any ``page_size``."""
        return VariantSpec(
            op=self.family.op, arch=arch, pipeline=pipeline, row_tile=row_tile,
            out_dtype=out_dtype, p_terms=p_terms, cache_dtype=self.cache_dtype,
        )  # fmt: skip


class Request(NamedTuple):
    """A decode as a caller asks for it, on whatever card.

    Attributes:
        num_heads: query heads.
        s_q: query tokens of a sequence; of sparse decode 1, as each is a sequence of its own.
        page_size: tokens of a page; of sparse decode any.
        out_dtype: of results, ``bf16``, ``f16`` or ``f32``; a 16-bit cache has but its own.
        pipeline, row_tile: what the caller insists on, None for no wish.
        accuracy: as ``plan_decode`` takes it.
        format: of the cache, by name.
    """

    num_heads: int
    s_q: int = 1
    page_size: int = 64
    out_dtype: str = "bf16"
    pipeline: str | None = None
    row_tile: int | None = None
    accuracy: str = STANDARD
    format: str = DEFAULT


@dataclass(frozen=True)
class Problem:
    """A decode call, as the host knows it (``verdicts.Problem``).

    Attributes:
        op: over which cache.
        card: where it runs.
        request: the call; its ``pipeline`` and ``p_terms`` are what its accuracy means there.
        p_terms: e4m3 terms of P.
        num_kv_heads: of the cache, which query heads share evenly.
    """

    op: DecodeOp
    card: Card
    request: Request
    p_terms: int = 1
    num_kv_heads: int = 1

    @property
    def exactly(self) -> bool:
        """True if it is exact logits that make its accuracy high."""
        return self.request.accuracy == HIGH and self.p_terms == 1

    @property
    def pipelines(self) -> list[str]:
        """Pipelines that may take part.

        One that must be asked for takes part if the caller names it.  The one that rounds the query
        also does with accuracy ``fast``.
        """
        arch = self.card.arch
        fast = self.op.fast.get(arch) if self.request.accuracy == FAST else None
        return self.op.pipelines(arch, self.request.pipeline, fast)

    @property
    def rows(self) -> int:
        """Query rows of a sequence that read one KV head."""
        return self.request.num_heads // self.num_kv_heads * self.request.s_q

    def _sequences(self, size: Size) -> Size:
        """The size as a kernel sees it: each (sequence, KV head) is a sequence."""
        return size._replace(batch=size.batch * self.num_kv_heads)

    def _costs(self) -> tuple[Costs | None, bool]:
        """(costs of the kernels on the card's architecture, or None; True if measured)."""
        return self.op.costs(self.card.arch)

    @property
    def reference(self) -> Size:
        return REFERENCE

    def order(self, spec: VariantSpec, us: float) -> tuple[float, ...]:
        """(us, row blocks, row tile): the smaller time wins, however close.

        If no time is known, fewer row blocks win, then the smaller row tile, which pads less.
        """
        return us, -(-self.rows // spec.row_tile), spec.row_tile

    def candidates(self) -> list[VariantSpec]:
        arch, page_size = self.card.arch, self.op.page_size_seen(self.request.page_size)
        out_dtype = self.request.out_dtype
        return [
            self.op.spec(arch, pipeline, row_tile, page_size, out_dtype, self.p_terms)
            for pipeline in self.pipelines
            for row_tile in self.op.values("row_tile")
        ]

    def rejection(self, spec: VariantSpec) -> str | None:
        pipeline, row_tile, asked = spec.pipeline, spec.row_tile, self.request
        features = self.op.features.get(pipeline)
        if features is None:
            return f"{pipeline} declares no features yet"
        if row_tile not in features.row_tiles:
            return f"{pipeline} has no row tile of {row_tile}: {features.why_tiles}"
        if row_tile not in features.tiles(self.p_terms):
            return (
                f"{pipeline} has no two terms of P with a row tile of {row_tile}: "
                f"{features.why_two_terms}"
            )
        if self.op.page_size_seen(asked.page_size) not in features.page_sizes:
            return f"{pipeline} has no page size of {asked.page_size}"
        if asked.out_dtype not in features.out_dtypes:
            return f"{pipeline} writes {' or '.join(features.out_dtypes)}, not {asked.out_dtype}"
        if self.exactly and pipeline != asked.pipeline:
            return f"its logits are not exact, as accuracy={asked.accuracy!r} wants them"
        if asked.pipeline not in (None, pipeline):
            return f"pipeline={asked.pipeline!r} was asked for"
        if asked.row_tile not in (None, row_tile):
            return f"row_tile={asked.row_tile} was asked for"
        return None

    def model_us(self, spec: VariantSpec, size: Size) -> float | None:
        costs, _ = self._costs()
        if costs is None:
            return None
        cycles = self.op.tensor_cycles(spec)
        # what was measured is one term: what the second adds is assumed to be hidden by nothing
        more = 0.0 if self.p_terms == 1 else cycles - self.op.tensor_cycles(spec.replace(p_terms=1))
        return costs.model_us(
            spec, self._sequences(size), self.card, shares=self._shares(spec, size),
            tensor_cycles=cycles, more_cycles=more, token_bytes=self._read_bytes(spec),
        )  # fmt: skip

    def _shares(self, spec: VariantSpec, size: Size) -> tuple[Share, ...]:
        """Ways in which a plan may share the work out: equally, where lengths are not known."""
        sms, sequences = self.card.sms, self._sequences(size)
        own = unit_rows(sms, self.rows, spec)
        units = -(-self.rows // own) * sequences.batch
        tiles = units * -(-sequences.seqlen // spec.token_tile)
        return (Share(tiles / parts_of(sms, own, spec), False),)

    def _read_bytes(self, spec: VariantSpec) -> float:
        """Bytes of a token, where memory bounds a kernel."""
        return self.op.token_bytes

    def measured_us(self, spec: VariantSpec, size: Size) -> float | None:
        costs, _ = self._costs()
        if costs is None or self.card.name != costs.card.name:
            return None
        # as the tables are
        if self.request.out_dtype != "bf16" or self.p_terms > 1 or self.num_kv_heads > 1:
            return None
        return costs.measured_us(spec, self.rows, self._sequences(size))

    def roof_us(self, size: Size) -> float:
        """max(bytes / read rate, FLOP / effective peak)"""
        size = self._sequences(size)
        tokens = size.batch * size.seqlen
        results = KV_LORA_RANK * OUT_BYTES[self.request.out_dtype] + 4  # out, lse
        per_row = self.op.token_bytes + results
        nbytes = tokens * self.op.token_bytes + size.batch * self.rows * per_row
        flops = 2.0 * tokens * self.rows * (HEAD_DIM_QK + KV_LORA_RANK)
        peak = self.op.effective_tflops(self.card)
        return max(nbytes / self.card.read_gbs * 1e-3, flops / peak * 1e-6)

    def describe(self, size: Size) -> tuple[str, str]:
        asked = self.request
        text = (
            f"decode: batch {size.batch} x {size.seqlen} tokens, {asked.num_heads} heads, "
            f"s_q {asked.s_q} ({self.rows} rows), pages of {asked.page_size}, {asked.out_dtype} "
            f"out, on {self.card.name}"
        )
        text += "" if self.p_terms == 1 else f", {self.p_terms} terms of P"
        text += f", accuracy {asked.accuracy}" if self.exactly else ""
        text += "" if self.num_kv_heads == 1 else f", {self.num_kv_heads} KV heads"
        peak = self.op.effective_tflops(self.card)
        return text, f"{self.card.read_gbs:.0f} GB/s, {peak:.0f} TFLOP/s"

    def remarks(self, size: Size) -> list[str]:
        """Lines on the source of times if kernels were not measured; else on accuracy's price."""
        costs, measured = self._costs()
        if costs is not None and costs.card.source == "datasheet":
            return [
                f"no {costs.card.name} has run decode over {self.op.about} yet: times are predicted"
                " from counted clocks and its datasheet"
            ]
        if costs is not None and not measured:
            return [f"no table was fitted for decode over {self.op.about} yet: times are estimates"]
        if self.p_terms == 1 and not self.exactly:
            return []
        pipeline = None if self.exactly else self.request.pipeline
        usual_request = self.request._replace(accuracy=STANDARD, pipeline=pipeline)
        plain = replace(self, p_terms=1, request=usual_request)
        (best, _), (usual, _) = judge(self), judge(plain)
        us = None if best is None else self.model_us(best, size)
        usual_us = None if usual is None else plain.model_us(usual, size)
        if usual is None or us is None or usual_us is None:
            return []
        what, beside = "the second term of P", "of one"
        if self.exactly:
            what, beside = "exact logits", "of accuracy 'standard'"
        return [
            f"{what}: {us / usual_us:.2f}x the time {beside} ({usual_us:.1f} us, "
            f"{usual.pipeline} row_tile {usual.row_tile}), both by the model"
        ]
