"""Which kernels a model needs: ``needs``, the command ``snapmla needs``.

The dispatcher names the decode kernels; around them are those of the calls that every step makes,
and of those that only some engines make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dsl_kernels.dims import HEAD_DIM_QK
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.families.family import COS_SIN_DTYPE, IN_DTYPE, OUT_DTYPE, ROPE_STYLE
from dsl_kernels.families.formats import DEFAULT, FORMATS
from dsl_kernels.families.sparse_prefill import row_tile_of, split_row_tile_of
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.dispatch.calls import DECODED, choose_on, choose_sparse
from snapmla.dispatch.cards import cards, find_card
from snapmla.dispatch.decode import STANDARD
from snapmla.dispatch.sparse_decode import REFERENCE, SPARSE_OPS
from snapmla.layouts import kernel_page_size

ROWS = "bf16"  # of 16-bit caches the one that sparse attention reads
PLAIN = "applied"  # the rope style of rows that come rotated
INDICES = ("i64", "i32")
SPARSE_TOKENS = tuple(1 << i for i in range(8))  # query tokens of a step that may decide


@dataclass(frozen=True)
class Model:
    """What of a model and its engine decides which kernels run.

    Attributes:
        heads: query heads on one GPU, 1 to 128: each number that occurs.
        s_q: query tokens of a sequence in a step: each number that occurs.
        pages: tokens of a page: each size that occurs.
        dtype: format of the cache, ``fp8``, ``bf16`` or ``f16``; of a sparse one ``fp8``, ``bf16``
            or ``fp8_ds_mla``.
        kv_heads: of the cache; 1 for FP8.
        accuracy: as ``plan_decode`` takes it.
        out: results, ``bf16`` or ``f32``; of a 16-bit cache its dtype, whatever this is.
        rows: tokens and queries as they come, ``bf16``, ``f16`` or ``f32``; as ``out``.
        indices: ``i32``, ``i64``: dtypes of slots and positions.
        rope: ``applied``, or the pairing that ``rope_append_kv`` and ``rope_quantize_q`` are to
            rotate: ``neox``, ``interleaved``.
        table: dtype of ``cos_sin_cache``. norm: whether ``rope_append_kv`` normalises.
        prefill, merge, flash_mla: whether tokens are read back (``fetch_dequant``), results of
            disjoint tokens merged (``merge_states``), FlashMLA's names used.
        sparse: whether decode attends to tokens that an indexer names (DSA: DeepSeek V3.2, GLM-5).
        arch: target of the kernels. card: of the dispatcher's, None for the first of the target.
    """

    heads: tuple[int, ...]
    s_q: tuple[int, ...] = (1,)
    pages: tuple[int, ...] = (64,)
    dtype: str = DEFAULT
    kv_heads: int = 1
    accuracy: str = STANDARD
    out: str = "bf16"
    rows: str = "bf16"
    indices: tuple[str, ...] = INDICES
    rope: str = PLAIN
    table: str = "f32"
    norm: bool = False
    prefill: bool = False
    merge: bool = False
    flash_mla: bool = False
    arch: str = "sm_90a"
    card: str | None = None
    sparse: bool = False


def is_sparse(config: object) -> bool:
    """Whether a model's ``config.json`` names an indexer's ``index_topk``, at its top or in the
    part of a language model.

    Raises:
        ValueError: it is no such file's content.
    """
    if not isinstance(config, dict):
        checks.value_error("config", "a JSON object", type(config).__name__)
    parts = (config, config.get("text_config"))
    return any(isinstance(part, dict) and bool(part.get("index_topk")) for part in parts)


def needs(model: Model) -> list[VariantSpec]:
    """The kernels that a model needs, each once, decode's last.

    Raises:
        ValueError: naming what of the model is not as it can be.
        VariantError: no decode kernel fits.
    """
    _check(model)
    found = [*_helpers(model), *_decodes(model)]
    return list(dict.fromkeys(found))


def _check(model: Model) -> None:
    hint = "" if model.sparse or model.dtype not in SPARSE_OPS else "it is read by sparse decode"
    known = (*SPARSE_OPS, ROWS) if model.sparse else DECODED
    checks.choice("dtype", model.dtype, known, hint)
    checks.choice("arch", model.arch, ARCHS)
    checks.choice("out", model.out, OUT_DTYPE.values)
    checks.choice("rows", model.rows, IN_DTYPE.values)
    checks.choice("rope", model.rope, ROPE_STYLE.values)
    checks.choice("table", model.table, COS_SIN_DTYPE.values)
    for index in model.indices:
        checks.choice("index", index, INDICES)
    for heads, s_q in itertools.product(model.heads, model.s_q):
        checks.num_heads(heads)
        checks.s_q(s_q)
        checks.kv_heads(model.kv_heads, heads, model.dtype)
    for page in model.pages:
        checks.page_size_of(model.dtype, page)
    if model.rope == PLAIN and model.norm:
        checks.value_error("norm", "False without rope", True, "the calls with RoPE normalise")
    if model.sparse and model.dtype == ROWS:
        wanted = "sm_90a, where a BF16 cache has kernels of sparse decode"
        if model.arch != "sm_90a":
            checks.value_error("arch", wanted, model.arch)
        checks.choice("accuracy", model.accuracy, (STANDARD,), "P has 16 bits there")
    fmt = FORMATS[model.dtype]
    if fmt.named and model.rows != "bf16":
        checks.value_error("rows", f"bf16 with {fmt.about}", model.rows)
    if model.rope != PLAIN and fmt.rows:
        checks.value_error(
            "rope", f"{PLAIN!r} with {fmt.about}", model.rope, "its calls take rotated rows"
        )


def _helpers(model: Model) -> Iterator[VariantSpec]:
    """What runs around decode."""
    arch, fmt = model.arch, FORMATS[model.dtype]
    rows, out = model.dtype if fmt.rows else model.rows, fmt.result(model.out)
    if not (model.sparse and model.dtype == ROWS):  # whose plans no kernel makes
        yield VariantSpec(op="plan_decode", arch=arch)
    turned = {"rope_style": model.rope, "cos_sin_dtype": model.table}
    turned = turned if model.rope != PLAIN else {}
    for index in model.indices:
        yield VariantSpec(
            op="append_kv", arch=arch, in_dtype=rows, index_dtype=index, cache_dtype=model.dtype,
            norm="rms" if model.norm else "given", **turned,
        )  # fmt: skip
        if fmt.quantized_query:
            positions = {"position_dtype": index} if turned else {}
            yield VariantSpec(
                op="quantize_q", arch=arch, in_dtype=rows, mode="token_head", **positions, **turned
            )
    if model.prefill:
        axis = FAMILIES["fetch_dequant"].axis("mode")
        assert axis is not None
        for mode in axis.values:
            for index in model.indices if mode == "indices" else ("i32",):
                yield VariantSpec(
                    op="fetch_dequant", arch=arch, in_dtype=rows, mode=mode, index_dtype=index,
                    cache_dtype=model.dtype,
                )  # fmt: skip
    if model.merge:
        if out not in OUT_DTYPE.values:
            checks.value_error("merge", "results of bf16 or f32", out, "merge_states takes no f16")
        for mode in ("pair", "list", "stack"):
            yield VariantSpec(op="merge_states", arch=arch, in_dtype=out, out_dtype=out, mode=mode)
    if model.flash_mla and not model.sparse:
        yield VariantSpec(op="records_to_plan", arch=arch)
        yield VariantSpec(op="plan_to_records", arch=arch)


def _decodes(model: Model) -> Iterator[VariantSpec]:
    """What the dispatcher picks."""
    card = next(card for card in cards() if card.arch == model.arch)
    if model.card is not None:
        card = find_card(None, model.card)
    if card.arch != model.arch:
        checks.value_error("card", f"a card of {model.arch}", f"{card.name}, which is {card.arch}")
    if model.sparse and model.dtype == ROWS:
        for heads in model.heads:
            for lists, of_heads in (("one", row_tile_of), ("split", split_row_tile_of)):
                yield VariantSpec(
                    op="sparse_prefill", arch=model.arch, row_tile=of_heads(heads),
                    d_qk=HEAD_DIM_QK, lists=lists,
                )  # fmt: skip
        return
    if model.sparse:
        for heads, tokens in itertools.product(model.heads, SPARSE_TOKENS):
            yield choose_sparse(
                card, heads, out_dtype=model.out, accuracy=model.accuracy,
                cache=model.dtype, size=REFERENCE._replace(batch=tokens),
            )  # fmt: skip
        return
    for heads, s_q, page in itertools.product(model.heads, model.s_q, model.pages):
        yield choose_on(
            card, heads // model.kv_heads, s_q, kernel_page_size(page), out_dtype=model.out,
            accuracy=model.accuracy, cache=model.dtype,
        )  # fmt: skip
