"""The README's support matrix: operation by cache format, and where each has a kernel.

A cell comes from the default matrix (what ``make wheels`` packs), from the kernel modules that the
families name (the rest is compiled on demand) and from the tables in ``profiles/results``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from codegen import matrix as mx
from dsl_kernels.families import ARCHS, FAMILIES
from dsl_kernels.families.family import REQUIRED, Values
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec

RESULTS = Path(__file__).resolve().parent.parent / "profiles" / "results"
ORDER = SHIPPED, ON_DEMAND, NONE = "in wheels", "on demand", "–"
HEAD = (
    "| operation | cache | SM90 | measured on | SM100, on no card yet |",
    "|---|---|---|---|---|",
)
NO_CACHE = ""  # stands for a format where an operation reads no paged KV cache


@dataclasses.dataclass(frozen=True)
class Operation:
    """A row of the matrix, before its formats are told apart.

    Attributes:
        call: as a caller writes it.
        kernels: of each of its kernels format -> (op, values): a family, and what tells its
            variants for that format; ``NO_CACHE`` where the operation reads no cache.
        tables: stem of a page in ``profiles/results`` -> formats that it has times or errors of.
        cache: what the second column says if the key is ``NO_CACHE``.
    """

    call: str
    kernels: tuple[dict[str, tuple[str, Values]], ...]
    tables: dict[str, tuple[str, ...]]
    cache: str = ""


def _dense() -> dict[str, tuple[str, Values]]:
    """Dense decode: each format's family, as it declares its formats."""
    found: dict[str, tuple[str, Values]] = {}
    for op, axis in (("decode", ""), ("dense_decode", "dtype"), ("record_decode", "cache_dtype")):
        for name in FAMILIES[op].formats:
            found[name] = (op, {axis: name} if axis else {})
    return found


def _sparse() -> dict[str, tuple[str, Values]]:
    """Sparse decode: of a format that its record says; rows of BF16 have their own."""
    found: dict[str, tuple[str, Values]] = {}
    for name, record in FORMATS.items():
        if record.sparse:
            found[name] = ("sparse_decode", {"cache_dtype": name})
        elif FAMILIES["sparse_prefill"].axis("dtype").values == (name,):  # type: ignore[union-attr]
            found[name] = ("sparse_prefill", {"lists": "split"})
    return found


def _helper(op: str) -> dict[str, tuple[str, Values]]:
    """A helper over every format, tokens beside the cache in BF16 or in the cache's 16 bits."""
    return {
        name: (op, {"cache_dtype": name, "in_dtype": name if record.rows else "bf16"})
        for name, record in FORMATS.items()
    }


BYTES = tuple(name for name, each in FORMATS.items() if each.named)
OPERATIONS = (
    Operation("`decode`", (_dense(),), {
        "h200-table": ("fp8",), "h100-table": ("fp8",), "dense-table": ("bf16",),
        "dense-accuracy": ("bf16", "f16"), "records_cost": BYTES,
    }),
    Operation("`decode(indices=)`", (_sparse(),), {
        "sparse-cost-h200": ("fp8", "fp8_ds_mla"), "sparse-cost-h100": ("fp8", "fp8_ds_mla"),
        "sparse_v4_cost": ("fp8_v4",), "sparse_rows_cost": ("bf16",),
        "sparse_528_cost": ("fp8_v41_planar", "fp8_v41_rows", "fp8_nope"),
    }),
    Operation("`sparse_prefill`", ({
        "fp8": ("sparse_decode", {"cache_dtype": "fp8"}),
        "bf16": ("sparse_prefill", {"lists": "one"}),
    },), {
        "sparse_prefill_cost": ("bf16",), "sparse_prefill_cost-h100": ("bf16",),
        "sparse_prefill_cache_cost": ("fp8",), "sparse_prefill_cache_cost-h100": ("fp8",),
    }),
    Operation("`mha_prefill`", ({NO_CACHE: ("mha_fwd", {})},), {"mha_cost": (NO_CACHE,)},
              "none: K and V of each head"),
    Operation("`dsa`, the indexer", tuple(
        {NO_CACHE: (op, {})} for op in ("append_index_k", "index_logits", "select_topk")
    ), {
        "index_cost": (NO_CACHE,), "index_cost-h100": (NO_CACHE,),
    }, "index keys, 132 bytes"),
    Operation("`append_kv`, `fetch_dequant`", (_helper("append_kv"), _helper("fetch_dequant")), {
        "append_cost": ("fp8", "fp8_ds_mla", "fp8_v4"),
    }),
)  # fmt: skip


def cell(kernel: tuple[str, Values], arch: str) -> str:
    """``SHIPPED``, ``ON_DEMAND`` or ``NONE``: how an architecture has an operation over a format.

    Args:
        kernel: of ``Operation.kernels``.
    """
    op, wanted = kernel
    for spec in mx.points(arch):
        if spec.op == op and wanted.items() <= dict(spec.values).items() and _has_kernel(spec):
            return SHIPPED
    return ON_DEMAND if any(map(_has_kernel, _specs(op, wanted, arch))) else NONE


def _has_kernel(spec: VariantSpec) -> bool:
    return mx.exclusion(spec, ask_kernels=False) is None


def _specs(op: str, wanted: Values, arch: str) -> Iterator[VariantSpec]:
    """Variants with these values, in all others the default; of axes without one, every value."""
    free = [a for a in FAMILIES[op].axes if a.default is REQUIRED and a.name not in wanted]
    for chosen in itertools.product(*(axis.values for axis in free)):
        yield VariantSpec(op=op, arch=arch, **wanted, **dict(zip((a.name for a in free), chosen)))


def cards(operation: Operation, name: str) -> str:
    """The cards of the committed tables of a format, the latest first; ``NONE`` without any."""
    found: set[str] = set()
    for stem, formats in operation.tables.items():
        path = RESULTS / f"{stem}.md"
        if name in formats and path.is_file():
            found |= set(re.findall(r"^- gpu NVIDIA (\w+)", path.read_text("utf-8"), re.M))
    return ", ".join(sorted(found, reverse=True)) or NONE


def rows(operation: Operation) -> Iterator[tuple[str, ...]]:
    """(call, formats, cells) of an operation; formats with the same cells share a row, and those
    that no architecture serves have none."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in operation.kernels[0]:
        sm90, sm100 = (
            max((cell(kernels[name], arch) for kernels in operation.kernels), key=ORDER.index)
            for arch in ARCHS
        )
        if sm90 == sm100 == NONE:
            continue
        label = f"`{name}`" if name else operation.cache
        groups.setdefault((sm90, cards(operation, name), sm100), []).append(label)
    for cells, names in groups.items():
        yield (operation.call, ", ".join(names), *cells)


def matrix() -> str:
    """The whole table, as Markdown."""
    lines = [f"| {' | '.join(row)} |" for each in OPERATIONS for row in rows(each)]
    return "\n".join([*HEAD, *lines])


# who writes a format, for the README's list
OWNERS = {
    "fp8": "SnapMLA's",
    "bf16": "a KV head",
    "f16": "a KV head",
    "fp8_ds_mla": "DeepSeek V3.2's, GLM-5's",
    "fp8_v4": "DeepSeek V4's",
    "fp8_v41_planar": "V4.1's until the end of September 2026",
    "fp8_v41_rows": "V4.1's since",
    "fp8_nope": "of models without RoPE (GLM-5.3-Flash)",
}


def formats() -> str:
    """The formats of a cache in a sentence: bytes of a token, and whose they are."""
    groups: dict[tuple[int, str], list[str]] = {}
    for name, record in FORMATS.items():
        groups.setdefault((record.token_bytes, OWNERS[name]), []).append(f"`{name}`")
    listed = [f"{', '.join(names)} {size}, {who}" for (size, who), names in groups.items()]
    sentence = f"Formats of a cache, with the bytes of a token: {'; '.join(listed)}."
    return textwrap.fill(sentence, 118, break_on_hyphens=False, break_long_words=False)
