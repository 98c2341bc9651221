"""A model and its engine, as far as they decide which kernels run; facts of a ``config.json``."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.families.family import COS_SIN_DTYPE, IN_DTYPE, OUT_DTYPE, ROPE_STYLE
from dsl_kernels.formats import rows16
from dsl_kernels.formats.index_cache import HEADS as INDEX_HEADS
from dsl_kernels.formats.mha_list import VALUES
from dsl_kernels.formats.registered import DEFAULT, ENGINES_KEEP, FORMATS
from snapmla import checks
from snapmla.rank.calls import DECODED
from snapmla.rank.decode import STANDARD
from snapmla.rank.record_decode import RECORD_OPS
from snapmla.rank.sparse_decode import SPARSE_OPS

ROWS = rows16.BF16.name  # of 16-bit caches the one that sparse attention reads
PLAIN = "applied"  # the rope style of rows that come rotated
INDICES = ("i64", "i32")
HOPPER = "sm_90a"
# Formats of the cache: of decode to every token, and of decode to named tokens.
DENSE_FORMATS = (*DECODED, *RECORD_OPS)
SPARSE_FORMATS = (*SPARSE_OPS, ROWS)
HEAD_DIMS = tuple(VALUES)  # of dense prefill, channels of q and k


@dataclass(frozen=True)
class Model:
    """A model and its engine.

    Attributes:
        heads: query heads on one GPU, 1 to 128: each number that occurs.
        s_q: query tokens of a sequence in a step: each number that occurs.
        pages: tokens of a page: each size that occurs.
        dtype: format of the cache, of ``DENSE_FORMATS``; of a sparse one of ``SPARSE_FORMATS``.
        kv_heads: of the cache; 1 but for 16 bits.
        accuracy: as ``plan_decode`` takes it.
        out: results, ``bf16`` or ``f32``; of a 16-bit cache its dtype, whatever this is.
        rows: tokens and queries as they come, ``bf16``, ``f16`` or ``f32``; as ``out``.
        indices: ``i32``, ``i64``: dtypes of slots and positions.
        rope: ``applied``, or the pairing that ``rope_append_kv`` and ``rope_quantize_q`` are to
            rotate: ``neox``, ``interleaved``.
        table: dtype of ``cos_sin_cache``. norm: whether ``rope_append_kv`` normalises.
        prefill, merge, flash_mla: whether tokens are read back (``fetch_dequant``), results of
            disjoint tokens merged (``merge_states``), FlashMLA's names used.
        arch: target of the kernels. card: of the dispatcher's, None for the first of the target.
        sparse: whether decode attends to tokens that an indexer names (DSA: DeepSeek V3.2, V4,
            GLM-5).
        indexer: whether ``snapmla.dsa`` chooses these tokens; None: as ``sparse``.
        index_heads: of the indexer: each number that occurs.
        index_rope: ``applied``, or the pairing that ``append_index_k`` is to rotate behind its
            norm: LayerNorm and the first channels, as V3.2 has it, or beside V4's and V4.1's
            formats RMSNorm and the last ones.
        hadamard: whether ``append_index_k`` transforms keys, as SGLang wants.
        index_fetch: whether index keys are read back (``fetch_index_k``).
        mha: whether prompts are attended to by ``mha_prefill``. split_keys: also with that.
        head_dims: of ``mha_prefill``, channels of q and k, 192, 128 or 256: each that occurs.
        sparse_prefill: whether prompts are attended to by ``sparse_prefill``.
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
    arch: str = HOPPER
    card: str | None = None
    sparse: bool = False
    indexer: bool | None = None
    index_heads: tuple[int, ...] = INDEX_HEADS
    index_rope: str = PLAIN
    hadamard: bool = False
    index_fetch: bool = False
    mha: bool = False
    split_keys: bool = False
    head_dims: tuple[int, ...] = HEAD_DIMS[:1]
    sparse_prefill: bool = False

    @property
    def indexed(self) -> bool:
        """True if our indexer runs."""
        return self.sparse if self.indexer is None else self.indexer

    @property
    def of_rows(self) -> str:
        """Dtype of tokens and queries: of a 16-bit cache its own."""
        return self.dtype if FORMATS[self.dtype].rows else self.rows


@dataclass(frozen=True)
class Facts:
    """Facts about a model that its ``config.json`` tells.

    Attributes:
        sparse: whether it has an indexer's ``index_topk``.
        dtype: format in which vLLM and SGLang keep such a model's FP8 cache; None: one of snapmla's
            choice (``ENGINES_KEEP``).
        index_heads: of the indexer; empty: not told.
        head_dims: of dense prefill; empty: not told, or none that ``mha_prefill`` takes.
    """

    sparse: bool = False
    dtype: str | None = None
    index_heads: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()


def facts_of(config: object) -> Facts:
    """Facts from the content of a ``config.json``; entries of its ``text_config`` win.

    Raises:
        ValueError: it is no such file's content.
    """
    if not isinstance(config, dict):
        checks.value_error("config", "a JSON object", type(config).__name__)
    inner = config.get("text_config")
    told: dict[str, Any] = {**config, **(inner if isinstance(inner, dict) else {})}
    kind = told.get("model_type")
    dtype = ENGINES_KEEP.get(kind) if isinstance(kind, str) else None
    index_heads = told.get("index_n_heads")
    parts = told.get("qk_nope_head_dim"), told.get("qk_rope_head_dim")
    channels = sum(part for part in parts if isinstance(part, int))
    fits = all(parts) and VALUES.get(channels) == told.get("v_head_dim")
    return Facts(
        sparse=bool(told.get("index_topk")),
        dtype=dtype,
        index_heads=(index_heads,) if isinstance(index_heads, int) else (),
        head_dims=(channels,) if fits else (),
    )


def check_model(model: Model) -> None:
    """Checks what can be told without a kernel.

    Raises:
        ValueError: naming what of the model is not as it can be.
    """
    checks.choice("dtype", model.dtype, SPARSE_FORMATS if model.sparse else DENSE_FORMATS)
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
    if model.sparse and FORMATS[model.dtype].lists_of_rows:
        if model.arch != HOPPER:
            wanted = f"{HOPPER}, where a BF16 cache has kernels of sparse decode"
            checks.value_error("arch", wanted, model.arch)
        checks.choice("accuracy", model.accuracy, (STANDARD,), "P has 16 bits there")
    fmt = FORMATS[model.dtype]
    if fmt.named and model.rows != "bf16":
        checks.value_error("rows", f"bf16 with {fmt.about}", model.rows)
    if model.rope != PLAIN and fmt.rows:
        checks.value_error(
            "rope", f"{PLAIN!r} with {fmt.about}", model.rope, "its calls take rotated rows"
        )
    if model.rope != PLAIN and fmt.rope is None:
        wanted, hint = f"{PLAIN!r} with {fmt.about}", "it has no RoPE channels apart"
        checks.value_error("rope", wanted, model.rope, hint)
    _check_indexer(model)
    _check_prompts(model)


def _check_indexer(model: Model) -> None:
    """Raises ValueError if the indexer's options do not go together, or a value has no kernel.

    The indexer needs ``sparse``.  Its options need the indexer.
    """
    if model.indexed and not model.sparse:
        checks.value_error("indexer", "False without sparse", True)
    checks.choice("index_rope", model.index_rope, ROPE_STYLE.values)
    for name, value, plain in (
        ("index_rope", model.index_rope, PLAIN), ("hadamard", model.hadamard, False),
        ("index_fetch", model.index_fetch, False),
    ):  # fmt: skip
        if value != plain and not model.indexed:
            checks.value_error(name, f"{plain} without the indexer", value)
    for heads in model.index_heads if model.indexed else ():
        checks.choice("index_heads", heads, INDEX_HEADS)


def _check_prompts(model: Model) -> None:
    """Raises ValueError if prefill's options do not go together, or a value has no kernel.

    ``split_keys`` needs ``mha``.  ``sparse_prefill`` needs ``sparse``.
    """
    if model.split_keys and not model.mha:
        checks.value_error("split_keys", "False without mha", True)
    if model.sparse_prefill and not model.sparse:
        checks.value_error("sparse_prefill", "False without sparse", True)
    if not model.mha:
        return
    if model.arch != HOPPER:
        wanted = f"{HOPPER}, where dense prefill has kernels"
        checks.value_error("arch", wanted, model.arch)
    axis = FAMILIES["mha_fwd"].axis("dtype")
    if axis is not None and model.of_rows not in axis.values:
        checks.value_error("rows", "bf16 or f16 with mha", model.of_rows)
    for channels in model.head_dims:
        checks.choice("head_dim", channels, HEAD_DIMS)
