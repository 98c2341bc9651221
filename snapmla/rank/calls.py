"""The kernel for a call, and the reasons for the choice, for hosts and for people."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NoReturn

import torch

from dsl_kernels.families import record_decode, sparse_decode
from dsl_kernels.formats.registered import DEFAULT, FORMATS, ROWS_OF_BYTES
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.errors import VariantError
from snapmla.rank import verdicts
from snapmla.rank.cards import Card, card_of, cards, find_card
from snapmla.rank.decode import ACCURACIES, FAST, HIGH, REFERENCE, STANDARD, DecodeOp, Problem
from snapmla.rank.dense_decode import DENSE_DECODE
from snapmla.rank.fp8_decode import FP8_DECODE
from snapmla.rank.record_decode import RECORD_OPS
from snapmla.rank.sparse_decode import ANY_PAGE, SPARSE_OPS, SparseProblem
from snapmla.rank.sparse_decode import REFERENCE as SPARSE_REFERENCE
from snapmla.rank.verdicts import Explanation, Size

# What is known of each op that decodes; all of them are kinds of attention to every token of a
# sequence, so the cache's format alone picks one.  Formats of bytes have an op each, whose kernels
# are built when they are asked for.
OPS: dict[str, DecodeOp] = {each.family.op: each for each in (FP8_DECODE, DENSE_DECODE)}
DECODED: dict[str, DecodeOp] = {name: each for each in OPS.values() for name in each.family.formats}
BY_CACHE = {sparse_decode.FAMILY.op: SPARSE_OPS, record_decode.FAMILY.op: RECORD_OPS}
TILES_OF = "H200"  # card of ``DecodeOp.ns_of_tile``
NOT_FAST = f"'fast' is sparse decode over {ROWS_OF_BYTES} rows on SM90"
READ_FRACTION = 0.93  # of a card's read rate, that short contexts reach


def choose(
    device: torch.device,
    num_heads: int,
    s_q: int,
    page_size: int,
    *,
    out_dtype: str = "bf16",
    pipeline: str | None = None,
    row_tile: int | None = None,
    accuracy: str = STANDARD,
    cache: str = DEFAULT,
) -> VariantSpec:
    """The decode kernel for a call.

    Depends on rows, page size and card only, never on batch or lengths (see the package).

    Args:
        device: where it runs; ``cpu`` is the software GPU, which decides as an H200 would, or a
            B200 (``SNAPMLA_SOFTGPU_ARCH``).
        num_heads, s_q, page_size: checked already; heads that read one KV head.
        out_dtype: ``bf16`` or ``f32``; of a 16-bit cache its dtype, whatever this is.
        pipeline, row_tile: the caller's wish, None for the best.
        accuracy: as ``plan_decode`` takes it; more rows than its kernels take are several blocks.
        cache: name of its format: ``fp8``, ``bf16``, ``f16``, or one of bytes.

    Raises:
        ValueError: the wishes do not go together, or not with the device's architecture; names the
            argument and the nearest choice.
        VariantError: no decode kernel exists for the device's architecture, or none for such pages.
    """
    card = card_of(device)
    wishes = out_dtype, pipeline, row_tile, accuracy, cache
    try:
        return choose_known(card, num_heads, s_q, page_size, *wishes)
    except TypeError:  # of what is no key, a traced size or a list: the checks say what is wrong
        pass
    return _choose(card, num_heads, s_q, page_size, *wishes)


def choose_on(
    card: Card,
    num_heads: int,
    s_q: int,
    page_size: int,
    *,
    out_dtype: str = "bf16",
    pipeline: str | None = None,
    row_tile: int | None = None,
    accuracy: str = STANDARD,
    cache: str = DEFAULT,
) -> VariantSpec:
    """``choose`` for a card, which need not be here."""
    return _choose(
        card, num_heads, s_q, page_size, out_dtype, pipeline, row_tile, accuracy, cache
    )  # fmt: skip


def _choose(
    card: Card,
    num_heads: int,
    s_q: int,
    page_size: int,
    out_dtype: str,
    pipeline: str | None,
    row_tile: int | None,
    accuracy: str,
    cache: str,
) -> VariantSpec:
    """``choose_on``."""
    op = op_of(cache)
    pipeline, p_terms = _check_wishes(op, card.arch, pipeline, row_tile, accuracy)
    problem = Problem(
        op, num_heads, s_q, page_size, FORMATS[cache].result(out_dtype), card,
        pipeline, row_tile, p_terms, accuracy=accuracy,
    )  # fmt: skip
    best, reasons = verdicts.judge(problem)
    if best is None:
        _refuse(problem, reasons)
    return best


# by type as well: True is no row tile
choose_known = functools.lru_cache(maxsize=1024, typed=True)(_choose)


def choose_sparse(
    card: Card,
    num_heads: int,
    *,
    out_dtype: str = "bf16",
    pipeline: str | None = None,
    row_tile: int | None = None,
    accuracy: str = STANDARD,
    cache: str = DEFAULT,
    size: Size | None = None,
) -> VariantSpec:
    """The kernel for a sparse decode on a card; arguments and errors as of ``choose``.

    Args:
        cache: name of its format, ``fp8`` or ``fp8_ds_mla``.
        size: query tokens, and entries of each one's row at most; None: as many as
            ``sparse_decode.REFERENCE``.  Few tokens of many heads are faster on smaller row tiles,
            although these read each token more often: an item's fixed time is most of theirs.
    """
    op = SPARSE_OPS[cache]
    pipeline, p_terms = _check_wishes(op, card.arch, pipeline, row_tile, accuracy)
    problem = SparseProblem(
        op, num_heads, 1, ANY_PAGE, FORMATS[cache].result(out_dtype), card,
        pipeline, row_tile, p_terms, accuracy=accuracy,
        size=size or SPARSE_REFERENCE,
    )  # fmt: skip
    best, reasons = verdicts.judge(problem)
    if best is None:
        _refuse(problem, reasons)
    return best


def tile_times(device: torch.device, spec: VariantSpec) -> tuple[int, int]:
    """(nanoseconds of a tile of a kernel where memory does not bound it, of reading a tile); 0, 0
    of a kernel that nobody measured.

    Other cards than the one that was measured scale by clocks, nominal ones as contexts are short,
    and by their tensor cores.  The software GPU has no times: it cuts whatever there is to cut.
    """
    op = _op_of(spec)
    tile = 0 if op is None else op.ns_of_tile(spec, TILES_OF)
    if device.type != "cuda" or op is None or not tile:
        return 0, 0
    card = card_of(device)
    measured = next(known for known in cards() if known.name == TILES_OF)
    tensor = 1e3 * op.tensor_cycles(spec) * card.tensor_slowdown / card.boost_mhz
    read_gbs = READ_FRACTION * card.read_gbs
    return (
        round(max(tile * measured.boost_mhz / card.boost_mhz, tensor)),
        round(spec.token_tile * op.token_bytes / read_gbs),
    )


def longest_item(spec: VariantSpec) -> int:
    """Tokens that a kernel sums in one go, about; 0: any number."""
    op = _op_of(spec)
    return 0 if op is None else op.longest_item(spec)


def _op_of(spec: VariantSpec) -> DecodeOp | None:
    """The dispatcher's op for a variant's op and cache; None if the variant is no decode."""
    of_format = BY_CACHE.get(spec.op)
    return OPS.get(spec.op) if of_format is None else of_format[spec.cache_dtype]


def op_of(cache: str) -> DecodeOp:
    """Decode over a cache of a format: ``fp8``, ``bf16``, ``f16``, or one of bytes."""
    return DECODED[cache] if cache in DECODED else RECORD_OPS[cache]


def cache_name(cache_dtype: str | torch.dtype) -> str:
    """The format that a checked ``cache_dtype`` means."""
    return checks.format_named(cache_dtype)


def _check_wishes(
    op: DecodeOp, arch: str, pipeline: str | None, row_tile: int | None, accuracy: str
) -> tuple[str | None, int]:
    """(pipeline, terms of P) that a caller insists on."""
    checks.choice("accuracy", accuracy, ACCURACIES)
    known = op.values("pipeline")
    if pipeline is not None and pipeline not in known:  # another architecture's is told apart later
        here = op.pipelines(arch)
        checks.choice("pipeline", pipeline, [each for each in known if each in here] or known)
    if row_tile is not None:
        checks.choice("row_tile", row_tile, op.values("row_tile"))
    if accuracy == FAST and arch not in op.fast:
        wanted = f"{STANDARD!r} or {HIGH!r}" if arch in op.exact else repr(STANDARD)
        checks.value_error("accuracy", f"{wanted} with {op.about} on {arch}", accuracy, NOT_FAST)
    if accuracy != STANDARD and op.family.axis("p_terms") is None:
        hint = "its P has 16 bits"
        checks.value_error("accuracy", f"{STANDARD!r} with {op.about}", accuracy, hint)
    return op.wished(arch, accuracy, pipeline)


def _refuse(problem: Problem, reasons: Mapping[VariantSpec, str]) -> NoReturn:
    """Raises what tells the caller how to change the call."""
    op, arch = problem.op, problem.card.arch
    pipelines = problem.pipelines
    if not pipelines:
        there = [card for card in cards() if op.pipelines(card.arch)]
        archs, names = ", ".join(sorted({card.arch for card in there})), [c.name for c in there]
        today = f"{op.elsewhere[arch]}; " if arch in op.elsewhere else ""
        raise VariantError(
            f"{arch}: no {op.kernels} exists for this architecture yet; {today}decode runs on "
            f"{archs} ({', '.join(names)}) and on cpu tensors (software GPU); "
            f"{op.reference} runs anywhere"
        )
    pipeline, row_tile = problem.pipeline, problem.row_tile
    if pipeline is not None and pipeline not in pipelines:
        checks.value_error(
            "pipeline", f"{' or '.join(map(repr, pipelines))} on {arch}", pipeline,
            "or leave pipeline out",
        )  # fmt: skip
    asked = pipelines if pipeline is None else [pipeline]
    tiles = sorted({tile for each in asked for tile in op.features[each].tiles(problem.p_terms)})
    where = f"on {arch}" if pipeline is None else f"with pipeline {pipeline!r}"
    features = op.features[asked[0]]
    if not tiles:
        checks.value_error(
            "accuracy", f"{STANDARD!r} {where}", problem.accuracy,
            f"two terms of P: {features.why_two_terms}",
        )  # fmt: skip
    if row_tile is not None and row_tile not in tiles:
        near = min(tiles, key=lambda tile: abs(tile - row_tile))
        why = features.why_tiles if problem.p_terms == 1 else features.why_two_terms
        where += "" if problem.accuracy == STANDARD else f" and accuracy {problem.accuracy!r}"
        checks.value_error(
            "row_tile", f"{' or '.join(map(str, tiles))} {where}", row_tile,
            f"{why}; the nearest is row_tile={near}, or leave row_tile out",
        )  # fmt: skip
    near_miss = (why for spec, why in reasons.items() if spec.row_tile in tiles)
    raise VariantError(f"no decode kernel fits: {next(near_miss)}")


def explain(
    num_heads: int,
    s_q: int = 1,
    *,
    page_size: int = 64,
    batch: int = REFERENCE.batch,
    seqlen: int = REFERENCE.seqlen,
    out_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    card: str | None = None,
    pipeline: str | None = None,
    row_tile: int | None = None,
    accuracy: str = STANDARD,
    cache_dtype: str | torch.dtype = DEFAULT,
    num_kv_heads: int = 1,
    topk: int | None = None,
) -> Explanation:
    """Every candidate for a decode call: predicted time, roof, and why it is used or not.

    Args:
        num_heads: 1 to 128.
        s_q: query tokens of a sequence, 1 or more.
        page_size: 16, 32, 64 or 128 tokens; of a 16-bit cache also any multiple of 64, of
            bytes any number.
        batch, seqlen: the size that times are for (sequences, tokens each); they do not change the
            choice, except of sparse decode.
        out_dtype: torch.bfloat16 (None) or torch.float32; of a 16-bit cache its dtype.
        device: whose card to ask about; None takes the current CUDA device, or an H200 without one.
        card: a card on file instead: ``H200``, ``H100 SXM``, ``H800 SXM``, ``H20`` or ``B200``;
            ``H100`` and ``H800`` are the same two.
        pipeline, row_tile: as given to ``plan_decode``.
        accuracy: ``standard``, or ``high`` for kernels with exact logits; the text then says what
            they cost.  Of sparse decode over ``fp8_ds_mla`` also ``fast``.
        cache_dtype, num_kv_heads: of the cache, as given to ``plan_decode``.
        topk: of sparse decode, entries of a query token's row of ``indices``: the call is then
            ``decode(..., indices=)`` by a plan of ``plan_sparse_decode``, ``cache_dtype`` is
            ``fp8`` or ``fp8_ds_mla``, ``page_size`` and ``seqlen`` count for nothing, and the
            result's ``batch`` is that of query tokens, its ``seqlen`` this.

    Returns:
        An ``Explanation``; print it.

    Raises:
        TypeError, ValueError: naming the argument.
        UnsupportedDeviceError: no kernels are built for the device.

    Example:
        found = snapmla.explain(16, 1, batch=64, seqlen=8192, card="H200")
        print(found)  # all candidates; found.chosen is the one that is used

    Source: roof and tile counts follow the SnapMLA paper's Eq. 7.
    """
    checks.num_heads(num_heads)
    checks.s_q(s_q)
    if topk is not None:
        checks.integer("num_kv_heads", num_kv_heads, 1, 1)
        tokens = checks.integer("batch", batch, 1) * s_q
        size = Size(tokens, checks.integer("topk", topk, 1))
        sparse = _sparse_problem(
            num_heads, out_dtype, find_card(device, card), pipeline, row_tile, accuracy,
            cache_dtype, size,
        )  # fmt: skip
        return verdicts.explain(sparse, size)
    cache_dtype = checks.cache_dtype(cache_dtype, more=tuple(RECORD_OPS))
    cache = cache_name(cache_dtype)
    checks.page_size_of(cache, page_size)
    checks.kv_heads(num_kv_heads, num_heads, cache)
    checks.integer("batch", batch, 1)
    checks.integer("seqlen", seqlen, 1)
    out = _out_name(cache, out_dtype)
    op = op_of(cache)
    where = find_card(device, card)
    pipeline, p_terms = _check_wishes(op, where.arch, pipeline, row_tile, accuracy)
    problem = Problem(
        op, num_heads, s_q, page_size, out, where,
        pipeline, row_tile, p_terms, num_kv_heads, accuracy,
    )  # fmt: skip
    return verdicts.explain(problem, Size(batch, seqlen))


def _out_name(cache: str, out_dtype: torch.dtype | None) -> str:
    """Name of a checked dtype of results."""
    names = {checks.DTYPES[name]: name for name in FORMATS[cache].results}
    out = next(iter(names)) if out_dtype is None else out_dtype
    if out not in names:
        checks.type_error("out_dtype", " or ".join(map(str, names)), out_dtype)
    return names[out]


def _sparse_problem(
    num_heads: int,
    out_dtype: torch.dtype | None,
    card: Card,
    pipeline: str | None,
    row_tile: int | None,
    accuracy: str,
    cache_dtype: str | torch.dtype,
    size: Size,
) -> SparseProblem:
    """Checks ``explain``'s arguments for a sparse decode; returns the call that they describe."""
    cache = sparse_cache_name(cache_dtype)
    op, out = SPARSE_OPS[cache], _out_name(cache, out_dtype)
    pipeline, p_terms = _check_wishes(op, card.arch, pipeline, row_tile, accuracy)
    return SparseProblem(
        op, num_heads, 1, ANY_PAGE, out, card, pipeline, row_tile, p_terms, accuracy=accuracy,
        size=size,
    )  # fmt: skip


def sparse_cache_name(given: str | torch.dtype, name: str = "cache_dtype") -> str:
    """Name of the format that argument ``name`` means for sparse attention; ValueError if none."""
    value = DEFAULT if given is checks.FP8 else given
    checks.choice(name, value, tuple(SPARSE_OPS), "the cache's attribute format says it")
    return str(value)
