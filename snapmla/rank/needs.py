"""Kernels that a model needs: ``needs``, the command ``snapmla needs``.

The dispatcher names the decode kernels; around them are those of the calls that every step makes,
and of those that only some engines make.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from dsl_kernels.families import FAMILIES
from dsl_kernels.families.family import OUT_DTYPE
from dsl_kernels.families.index_logits import points as index_points
from dsl_kernels.families.select_topk import points as topk_points
from dsl_kernels.families.sparse_prefill import row_tile_of, split_row_tile_of
from dsl_kernels.formats.mha_list import VALUES
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import checks
from snapmla.cache.layouts import kernel_page_size
from snapmla.rank.calls import choose_on, choose_sparse
from snapmla.rank.cards import cards, find_card
from snapmla.rank.decode import Request
from snapmla.rank.model import PLAIN, Model, check_model
from snapmla.rank.sparse_decode import REFERENCE

SPARSE_TOKENS = tuple(1 << i for i in range(8))  # query tokens of a step that may decide


def needs(model: Model) -> list[VariantSpec]:
    """The kernels that a model needs, each once, decode's last.

    Raises:
        ValueError: naming what of the model is not as it can be.
        VariantError: no decode kernel fits.
    """
    check_model(model)
    decodes = list(_decodes(model))
    found = [*_helpers(model), *_indexer(model), *_prompts(model), *decodes]
    return list(dict.fromkeys(found))


def _helpers(model: Model) -> Iterator[VariantSpec]:
    """Yields the helpers around decode: plans, appends, quantize_q, fetches, merges, records."""
    arch, fmt, rows = model.arch, FORMATS[model.dtype], model.of_rows
    if not (model.sparse and fmt.lists_of_rows):  # whose plans no kernel makes
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
    if model.prefill or (model.sparse_prefill and fmt.named):  # which reads bytes by way of BF16
        yield from _fetches(model, "fetch_dequant", in_dtype=rows, cache_dtype=model.dtype)
    if model.merge:
        out = fmt.result(model.out)
        if out not in OUT_DTYPE.values:
            checks.value_error("merge", "results of bf16 or f32", out, "merge_states takes no f16")
        for mode in ("pair", "list", "stack"):
            yield VariantSpec(op="merge_states", arch=arch, in_dtype=out, out_dtype=out, mode=mode)
    if model.flash_mla and not model.sparse:
        yield VariantSpec(op="records_to_plan", arch=arch)
        yield VariantSpec(op="plan_to_records", arch=arch)


def _fetches(model: Model, op: str, **values: Any) -> Iterator[VariantSpec]:
    """Yields the variants of an op that reads tokens back: each mode, with its index dtypes."""
    axis = FAMILIES[op].axis("mode")
    assert axis is not None
    for mode in axis.values:
        for index in model.indices if mode == "indices" else ("i32",):
            yield VariantSpec(op=op, arch=model.arch, mode=mode, index_dtype=index, **values)


def _indexer(model: Model) -> Iterator[VariantSpec]:
    """The calls of ``snapmla.dsa``: shapes of prompts and contexts may be any."""
    if not model.indexed:
        return
    arch = model.arch
    turned: dict[str, str] = {}
    if model.index_rope != PLAIN:
        compressed = FORMATS[model.dtype].two_lists  # V4's indexer, V4.1's
        turned = {
            "rope_style": model.index_rope, "cos_sin_dtype": model.table,
            "norm": "rms" if compressed else "layer", "turned": "last" if compressed else "first",
        }  # fmt: skip
    for index in model.indices:
        positions = {"position_dtype": index} if turned else {}
        yield VariantSpec(
            op="append_index_k", arch=arch, in_dtype=model.of_rows, index_dtype=index,
            hadamard=int(model.hadamard), **turned, **positions,
        )  # fmt: skip
        prologue = FAMILIES["dsa_prologue"].module(arch, {"cache_dtype": model.dtype})
        if prologue and turned and model.norm and model.rope != PLAIN:  # else it is the engine's
            yield VariantSpec(
                op="dsa_prologue", arch=arch, in_dtype=model.of_rows, index_dtype=index,
                hadamard=int(model.hadamard), rope_style=model.rope, index_style=model.index_rope,
                cos_sin_dtype=model.table, cache_dtype=model.dtype, **positions,
            )  # fmt: skip
    for values in index_points(arch):
        if values["heads"] in model.index_heads:
            yield VariantSpec(op="index_logits", arch=arch, **values)
    yield VariantSpec(op="index_rows", arch=arch)
    for values in topk_points(arch):
        yield VariantSpec(op="select_topk", arch=arch, **values)
    if model.index_fetch:
        yield from _fetches(model, "fetch_index_k", key_dtype="fp8")


def _prompts(model: Model) -> Iterator[VariantSpec]:
    """Yields the variants of dense and of sparse prefill."""
    arch = model.arch
    if model.mha:
        for keys in ("whole", "split") if model.split_keys else ("whole",):
            yield VariantSpec(op="mha_items", arch=arch, keys=keys)
            for d_qk in model.head_dims:
                yield VariantSpec(
                    op="mha_fwd", arch=arch, d_qk=d_qk, dtype=model.of_rows, keys=keys
                )
                if keys == "split":
                    yield VariantSpec(
                        op="mha_merge", arch=arch, dtype=model.of_rows, d_v=VALUES[d_qk]
                    )
    for heads in model.heads if model.sparse_prefill else ():
        yield VariantSpec(
            op="sparse_prefill", arch=arch, row_tile=row_tile_of(heads),
            d_qk=FORMATS[model.dtype].channels,
        )  # fmt: skip


def _decodes(model: Model) -> Iterator[VariantSpec]:
    """Yields variants of decode that the dispatcher chooses.

    For sparse decode over BF16 rows it yields those of sparse prefill, whose kernel serves it.
    """
    card = next(card for card in cards() if card.arch == model.arch)
    if model.card is not None:
        card = find_card(None, model.card)
    if card.arch != model.arch:
        checks.value_error("card", f"a card of {model.arch}", f"{card.name}, which is {card.arch}")
    if model.sparse and FORMATS[model.dtype].lists_of_rows:
        for heads in model.heads:
            for lists, of_heads in (("one", row_tile_of), ("split", split_row_tile_of)):
                yield VariantSpec(
                    op="sparse_prefill", arch=model.arch, row_tile=of_heads(heads),
                    d_qk=FORMATS[model.dtype].channels, lists=lists,
                )  # fmt: skip
        return
    if model.sparse:
        outs = [model.out]
        if model.sparse_prefill and FORMATS[model.dtype].quantized_query:
            outs = ["bf16", *outs]  # prompts, straight from the cache
        for heads, tokens, out in itertools.product(model.heads, SPARSE_TOKENS, outs):
            request = Request(heads, out_dtype=out, accuracy=model.accuracy, format=model.dtype)
            yield choose_sparse(card, request, REFERENCE._replace(batch=tokens))
        return
    for heads, s_q, page in itertools.product(model.heads, model.s_q, model.pages):
        request = Request(
            heads // model.kv_heads, s_q, kernel_page_size(page), model.out,
            accuracy=model.accuracy, format=model.dtype,
        )  # fmt: skip
        yield choose_on(card, request)
