"""``VariantSpec``: the one noun of the project.

A spec names one compiled kernel.  Object files, exported symbols, test ids, benchmark labels,
compile keys and ncu scripts all derive from it, so a name seen in one place can be pasted into any
other.  This module imports nothing but the standard library: hosts without the compiler read it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

KV_LORA_RANK = 512  # d_v: content channels of the latent, c_kv
QK_ROPE_HEAD_DIM = 64  # channels of k_rope
HEAD_DIM_QK = KV_LORA_RANK + QK_ROPE_HEAD_DIM  # 576
E4M3_MAX = 448.0
TOKEN_TILE = 64

Op = Literal["decode", "plan_decode", "merge", "append_kv", "quantize_q", "fetch_dequant"]
Arch = Literal["sm_90a", "sm_100a"]

OPS: tuple[str, ...] = (
    "decode",
    "plan_decode",
    "merge",
    "append_kv",
    "quantize_q",
    "fetch_dequant",
)
ARCHS: tuple[str, ...] = ("sm_90a", "sm_100a")
OUT_DTYPES: tuple[str, ...] = ("bf16", "f32")
PIPELINES: tuple[str, ...] = ("etap", "dual_wg")
ROW_TILES: tuple[int, ...] = (16, 32, 64, 128)
PAGE_SIZES: tuple[int, ...] = (16, 32, 64, 128)
PREFIX = "snapmla_"


@dataclass(frozen=True, kw_only=True)
class VariantSpec:
    """One kernel instance.

    Only fields that an op declares in ``AXES`` take part in its name and may differ from their
    default.  ``rows`` below means query rows of one sequence, ``num_heads * s_q``.

    Attributes:
        op: which kernel family.
        arch: compilation target.
        pipeline: decode only; ``etap`` (V^T is the register operand) or ``dual_wg`` (the SnapMLA
            paper's Algorithm 1).
        q_dtype, kv_dtype: of the content channels; RoPE is bf16.
        row_tile: query rows that one CTA (or one cluster) owns.
        page_size: tokens in a cache page.
        out_dtype: ``bf16`` or ``f32``; of ``out`` for decode, merge.
        in_dtype: dtype of the floating-point input of append_kv, quantize_q (``bf16``, ``f16``,
            ``f32``), and of the output of fetch_dequant.
        index_dtype: ``i32`` or ``i64``; of ``slot_mapping``.
        mode: quantize_q: ``token_head`` or ``token``; fetch_dequant: ``pages`` or ``indices``.
        token_tile: tokens of one softmax block, which share one scale of P.
        stages: KV tiles in flight; 0 picks the pipeline's default.
        cluster: CTAs that share KV by multicast.
        kv_scale_groups: scales per token in the cache (4 is one per 128 channels).
        p_scale: ``tile``: P is quantised per row and token tile.
        p_terms: e4m3 terms that represent P.
        promote_tokens: tokens whose P.V stays in the tensor core's accumulator before it is added
            to the fp32 one (two-level accumulation).
        num_heads, s_q: static values for tuned pairs; None means run-time values.
        causal: ``runtime``: an argument of the call decides.
        ragged: per-request s_q (not built yet).
        sparse: top-k token indices instead of a block table (not built yet).
    """

    op: str
    arch: str = "sm_90a"
    pipeline: str | None = None
    q_dtype: str = "e4m3"
    kv_dtype: str = "e4m3"
    row_tile: int = 64
    page_size: int = 64
    out_dtype: str = "bf16"
    in_dtype: str = "bf16"
    index_dtype: str = "i32"
    mode: str | None = None
    token_tile: int = TOKEN_TILE
    stages: int = 0
    cluster: int = 1
    kv_scale_groups: int = 1
    p_scale: str = "tile"
    p_terms: int = 1
    promote_tokens: int = 64
    num_heads: int | None = None
    s_q: int | None = None
    causal: str = "runtime"
    ragged: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise ValueError(f"op: expected one of {OPS}, got {self.op!r}")
        if self.arch not in ARCHS:
            raise ValueError(f"arch: expected one of {ARCHS}, got {self.arch!r}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (
                field.name in ("op", "arch")
                or field.name in AXES[self.op]
                or value == field.default
            ):
                continue
            raise ValueError(f"{field.name}: op {self.op!r} has no such axis, got {value!r}")

    @property
    def name(self) -> str:
        """Short unique name, such as ``decode_etap_r64_p64_obf16_sm90a``.

        Always-named axes come first; the others appear only where they differ from the default.
        """
        parts = [self.op]
        for axis in AXES[self.op]:
            value = getattr(self, axis)
            default = type(self).__dataclass_fields__[axis].default
            if axis in ALWAYS_NAMED or value != default:
                parts.append(_encode(axis, value))
        parts.append(self.arch.replace("_", ""))
        return "_".join(p for p in parts if p)

    @property
    def symbol(self) -> str:
        """The exported function's C name."""
        return PREFIX + self.name

    @classmethod
    def from_name(cls, name: str) -> VariantSpec:
        """Inverse of ``name``.  Raises ValueError that says which part was not understood."""
        op = next((o for o in sorted(OPS, key=len, reverse=True) if name.startswith(o + "_")), None)
        if op is None:
            raise ValueError(f"variant name {name!r}: expected to start with one of {OPS}")
        *parts, arch = name[len(op) + 1 :].split("_")
        fields: dict[str, object] = {"op": op, "arch": arch.replace("sm", "sm_")}
        text = "_".join(parts)
        while text:
            axis, value, text = _decode(op, name, text)
            fields[axis] = value
        spec = cls(**fields)  # type: ignore[arg-type]
        if spec.name != name:
            raise ValueError(f"variant name {name!r}: did you mean {spec.name!r}?")
        return spec


AXES: dict[str, tuple[str, ...]] = {
    "decode": (
        "pipeline", "row_tile", "page_size", "out_dtype", "token_tile", "stages", "cluster",
        "kv_scale_groups", "p_scale", "p_terms", "promote_tokens", "num_heads", "s_q", "q_dtype",
        "kv_dtype", "causal", "ragged", "sparse",
    ),
    "plan_decode": (),
    "merge": ("out_dtype",),
    "append_kv": ("in_dtype", "index_dtype"),
    "quantize_q": ("in_dtype", "mode"),
    "fetch_dequant": ("in_dtype", "mode"),
}  # fmt: skip
ALWAYS_NAMED = {"pipeline", "row_tile", "page_size", "out_dtype", "in_dtype", "index_dtype", "mode"}
TEXT_AXES = {
    "out_dtype", "in_dtype", "index_dtype", "p_scale", "q_dtype", "kv_dtype", "causal",
}  # fmt: skip
_WORDS: dict[str, tuple[str, ...]] = {
    "pipeline": PIPELINES,
    "mode": ("token_head", "token", "pages", "indices"),
}
_LETTERS = {
    "row_tile": "r", "page_size": "p", "out_dtype": "o", "in_dtype": "x", "index_dtype": "i",
    "token_tile": "t", "stages": "st", "cluster": "c", "kv_scale_groups": "g", "p_scale": "ps",
    "p_terms": "pt", "promote_tokens": "pr", "num_heads": "h", "s_q": "q", "q_dtype": "qt",
    "kv_dtype": "kt", "causal": "causal", "ragged": "ragged", "sparse": "sparse",
}  # fmt: skip


def cluster_of(row_tile: int) -> int:
    """CTAs per row tile: 128 rows are two CTAs that share KV by multicast."""
    return 2 if row_tile == 128 else 1


def decode_spec(
    pipeline: str, row_tile: int, page_size: int, out_dtype: str, arch: str = "sm_90a"
) -> VariantSpec:
    """The decode variant of the default matrix, and of the dispatcher, for these choices."""
    return VariantSpec(
        op="decode",
        arch=arch,
        pipeline=pipeline,
        row_tile=row_tile,
        page_size=page_size,
        out_dtype=out_dtype,
        cluster=cluster_of(row_tile),
    )


def _encode(axis: str, value: object) -> str:
    if axis in _WORDS:
        return str(value)
    return _LETTERS[axis] if value is True else f"{_LETTERS[axis]}{value}"


def _decode(op: str, name: str, text: str) -> tuple[str, object, str]:
    """Reads one axis off the front of ``text``; returns (axis, value, rest)."""
    for axis in (a for a in AXES[op] if a in _WORDS):
        for word in sorted(_WORDS[axis], key=len, reverse=True):
            if text == word or text.startswith(word + "_"):
                return axis, word, text[len(word) + 1 :]
    head, _, rest = text.partition("_")
    for axis in sorted((a for a in AXES[op] if a in _LETTERS), key=lambda a: -len(_LETTERS[a])):
        letters = _LETTERS[axis]
        if head == letters and axis in ("ragged", "sparse"):
            return axis, True, rest
        if head.startswith(letters) and len(head) > len(letters):
            value = head[len(letters) :]
            if axis in TEXT_AXES:
                return axis, value, rest
            if value.isdigit():
                return axis, int(value), rest
    raise ValueError(f"variant name {name!r}: {head!r} names no axis of op {op!r}")
