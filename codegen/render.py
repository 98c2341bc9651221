"""Text generated from records and specs with the templates beside this file.

header(record)      C header of one variant: what a C++ engine includes
variants_page()     docs/variants.md
ncu_script(name)    the Nsight Compute command of one variant (used by profiles.ncu)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from codegen import matrix as mx
from codegen.artifacts import ROOT, Record, write_atomic
from dsl_kernels import registry
from dsl_kernels.families import ARCHS, DECODE
from dsl_kernels.spec import VariantSpec

TEMPLATES = Path(__file__).resolve().parent / "templates"
PAGE = ROOT / "docs" / "variants.md"


@functools.cache
def _environment() -> Environment:
    return Environment(  # plain text and C, nothing to escape
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def text(template: str, **values: Any) -> str:
    """Renders ``templates/<template>``; a value that the template lacks raises UndefinedError."""
    return _environment().get_template(template).render(**values)


# ---------------------------------------------------------------- C header


def _is_tensor(argument: dict[str, Any]) -> bool:
    return "shape" in argument


def _scalar(argument: dict[str, Any]) -> tuple[str, str, str]:
    """(C type, type index, union member) of a scalar argument."""
    if argument["dtype"].startswith("float"):
        return "double", "kTVMFFIFloat", "v_float64"
    return "int64_t", "kTVMFFIInt", "v_int64"


def _comment(argument: dict[str, Any]) -> str:
    """dtype, shape and layout in words."""
    if not _is_tensor(argument):
        return argument["dtype"]
    shape, strides = argument["shape"], argument["strides"]
    # a static stride next to the innermost one leaves the rows nowhere to go
    packed = len(shape) > 1 and isinstance(strides[-2], int)
    layout = "contiguous" if packed else f"strides ({', '.join(map(str, strides))})"
    extents = ", ".join(map(str, shape))
    return f"{argument['dtype']} ({extents}), {layout}, {argument['align']}-byte aligned"


def header(record: Record) -> str:
    """C header of one variant: exported prototype and a typed inline function around it."""
    return text(
        "variant.h.j2",
        record=record,
        cuda=record.flavour.removeprefix("cu"),
        guard=f"{record.symbol.upper()}_H",
        smem=record.static_smem + (record.dynamic_smem or 0),
        c_type=lambda a: "DLTensor *" if _is_tensor(a) else _scalar(a)[0],
        comment=_comment,
        type_index=lambda a: "kTVMFFIDLTensorPtr" if _is_tensor(a) else _scalar(a)[1],
        member=lambda a: "v_ptr" if _is_tensor(a) else _scalar(a)[2],
    )


# ---------------------------------------------------------------- docs/variants.md


def _distinct(values: Sequence[Any]) -> str:
    return ", ".join(map(str, sorted(set(values))))


def _groups(points: Sequence[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for point in points:
        found.setdefault(key(point), []).append(point)
    return found


def _decode_row(specs: list[VariantSpec]) -> dict[str, str]:
    """One line of the decode table: variants that differ in page size and output only; those that
    are given lists of tokens take pages of any size."""
    first = specs[0]
    paged = first.family.axis("page_size") is not None
    budget, terms = registry.budget(first), dict(first.values).get("p_terms", 1)
    row = {
        "name": f"{first.op}_{first.pipeline}_r{first.row_tile}",
        "pages": _distinct([s.page_size for s in specs]) if paged else "any",
        "outs": _distinct([s.result_dtype for s in specs]),
        "note": ", ".join(
            [f"cluster of {first.cluster}"] * (first.cluster > 1)
            + [f"{terms} terms of P: `pt{terms}` in the name"] * (terms > 1)
        ),
        **dict.fromkeys(("threads", "registers", "smem"), ""),
    }
    if budget is not None:
        row["threads"] = str(budget.threads)
        row["registers"] = " / ".join(
            f"{g.name} {g.registers}" + (f" ×{g.count}" if g.count > 1 else "")
            for g in budget.groups
        )
        row["smem"] = f"≤ {budget.smem:,} B"
    return row


def _row_of(spec: VariantSpec) -> tuple[Any, ...]:
    """Key of a table's line: op, pipeline, row tile, cluster and terms of P of its variants."""
    terms = dict(spec.values).get("p_terms")
    return spec.op, spec.pipeline, spec.row_tile, spec.cluster, terms


def _arch(arch: str) -> dict[str, Any]:
    points = mx.matrix(arch)
    built = [p.spec for p in points if p.reason is None]
    decode = [s for s in built if s.family.kind == DECODE]
    others = _groups([s for s in built if s.family.kind != DECODE], lambda s: s.op)
    pruned = _groups([p for p in points if p.reason is not None], lambda p: p.reason)
    return {
        "name": arch,
        "built": len(built),
        "decode": [_decode_row(specs) for specs in _groups(decode, _row_of).values()],
        "others": [
            {"op": op, "names": ", ".join(f"`{s.name}`" for s in specs)}
            for op, specs in others.items()
        ],
        "pruned": [
            {"reason": reason, "names": _pruned_names([p.spec for p in found])}
            for reason, found in pruned.items()
        ],
    }


def _pruned_names(specs: list[VariantSpec]) -> str:
    """Decode by pipeline and row tile, others one by one."""
    rows = _groups([s for s in specs if s.family.kind == DECODE], lambda s: (s.op, s.pipeline))
    return ", ".join(
        [f"`{s.name}`" for s in specs if s.family.kind != DECODE]
        + [
            f"`{op}{'_' + pipeline if pipeline else ''}` "
            f"r{{{_distinct([s.row_tile for s in found])}}} ({len(found)})"
            for (op, pipeline), found in rows.items()
        ]
    )


def variants_page() -> str:
    """Text of docs/variants.md; asks the kernel modules, so it needs the compiler."""
    return text("variants.md.j2", archs=[_arch(arch) for arch in ARCHS])


def write_page() -> None:
    """Renews docs/variants.md."""
    write_atomic(PAGE, variants_page())


# ---------------------------------------------------------------- ncu


def ncu_script(name: str, metrics: Sequence[str], options: Sequence[str] = ()) -> str:
    """Shell script that profiles variant ``name`` with Nsight Compute into a CSV file.

    Args:
        metrics: names of ncu metrics.
        options: more arguments of ``python -m profiles.ncu NAME --workload``.
    """
    return text("ncu.sh.j2", name=name, root=ROOT, metrics=metrics, options=options)
