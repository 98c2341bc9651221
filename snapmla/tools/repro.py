"""``snapmla repro``: a dumped call (``snapmla.runtime.dump``) run again, on a GPU or on the
software GPU.

Results are compared with those in the file, if it has any, and a decode's with the reference, whose
tolerance follows from the rounding (``snapmla.selfcheck.decode_errors``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsl_kernels import registry
from dsl_kernels.formats.dims import QK_ROPE_HEAD_DIM
from dsl_kernels.spec import VariantSpec
from snapmla.cache.paged import PagedKVCache
from snapmla.cache.quant import QuantizedQuery
from snapmla.runtime import variants
from snapmla.runtime.dump import Dump, DumpError, read

LN2 = math.log(2.0)


@dataclass
class Outcome:
    """Result of running a call again.

    Attributes:
        results: what it wrote, by name; empty if it raised.
        error: the exception, or None.
        hazards: what the software GPU's checker found, each once.
        differs: one sentence for each result that differs from the one in the file.
        compared: whether the file had results.
        reference: figures of the comparison with the reference; None where there is none.
        right: whether those are within what rounding explains.
    """

    results: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    hazards: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    compared: bool = False
    reference: str | None = None
    right: bool = True

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return self.error is None and not self.hazards and not self.differs and self.right


def repeat(path: Path, device: str, *, reference: bool = True) -> tuple[Dump, Outcome]:
    """Runs the call in a file again.

    Args:
        device: ``cuda`` or ``cpu`` (the software GPU, with its hazard check).
        reference: compare a decode with the reference, which may take minutes if it is large.

    Returns:
        The call, in whose arguments the results are by now, and what came of it.

    Raises:
        DumpError: the file cannot be read.
        VariantError: the variant is not here and cannot be compiled.
    """
    call = read(path, device)
    try:
        spec = VariantSpec.from_name(call.variant)
    except (TypeError, ValueError) as error:
        raise DumpError(f"{path}: {error}") from None
    outcome = Outcome()
    # Not runtime.kernel, which would watch this call as well.
    artifact = variants.find_or_build(spec, need_library=device == "cuda")
    kernel = variants.load(artifact, device)
    names = variants.argument_names(spec)
    if tuple(call.arguments) != names:
        raise DumpError(f"{path}: {call.variant} takes other arguments here: {', '.join(names)}")
    arguments = call.arguments.values()
    try:
        with _hazards(outcome.hazards) if device == "cpu" else contextlib.nullcontext():
            kernel(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # the one that is looked for, of whatever kind
        outcome.error = error
        return call, outcome
    written = (name for name in spec.family.results if name in call.arguments)
    outcome.results = {name: call.arguments[name] for name in written}
    outcome.compared = bool(call.results)
    outcome.differs = [
        f"{name}: {text}"
        for name, want in call.results.items()
        if (text := difference(call.arguments[name], want)) is not None
    ]
    if reference and (compare := _reference_of(spec)) is not None:
        outcome.reference, outcome.right = compare(spec, call)
    return call, outcome


def _reference_of(spec: VariantSpec) -> Callable[[VariantSpec, Dump], tuple[str, bool]] | None:
    """Function that compares a variant's results with the truth; None if there is none."""
    if spec.op == "sparse_decode":
        return against_sparse_reference
    return registry.named(spec.family.reference) if spec.family.reference else None


@contextlib.contextmanager
def _hazards(found: list[str]) -> Iterator[None]:
    """Collects what the hazard check of the software GPU finds in the block."""
    import softgpu

    seen: list[Any] = []
    options = dataclasses.replace(softgpu.Options(), hazards="collect", on_hazard=seen.append)
    try:
        with softgpu.using(options):
            yield
    finally:
        found += dict.fromkeys(map(str, seen))


def difference(got: Tensor, want: Tensor) -> str | None:
    """Number of bits that differ and the first place, None if none do; any NaN equals any NaN."""
    same = got == want
    if got.is_floating_point():
        same |= got.isnan() & want.isnan()
    if bool(same.all()):
        return None
    at = tuple((~same).nonzero()[0].tolist())
    return (
        f"{int((~same).sum())} of {same.numel()} values differ from those in the file, first at "
        f"{at}: {got[at].item():.6g}, was {want[at].item():.6g}"
    )


def against_reference(spec: VariantSpec, call: Dump) -> tuple[str, bool]:
    """A decode's results against fp64 on its stored inputs: figures, and whether they are right."""
    from snapmla.testing import comparison

    given = call.arguments
    out, lse = _results(given)
    query = [given[name].contiguous() for name in ("q_nope", "q_rope", "q_scale")]
    limits, begin = given["row_limits"], None
    if given["units"].numel() and len(query[0]) == 1:  # packed, or one sequence, which is the same
        begin = ragged_begin(call)
        query, out, lse = [t[0] for t in query], out[0], lse[0]
    query[0] = query[0].view(torch.float8_e4m3fn)
    if limits.numel() and begin is None:
        limits = limits.view(query[0].shape[:2])
    cache = PagedKVCache.from_tensors(given["content"], given["rope"], given["scale"])
    errors = comparison.decode_errors(
        out, lse, QuantizedQuery(*query), cache, given["block_table"], given["cache_seqlens"],
        given["softmax_scale"], causal=bool(given["causal"]), cu_seqlens_q=begin,
        row_seqlens=limits if limits.numel() else None,
        config=comparison.mimic_of(spec),
    )  # fmt: skip
    return str(errors), errors.right


def _results(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out, and the LSE as the references have it: natural, -inf of rows that see no token."""
    lse = given["lse"] * (LN2 / given["lse_factor"])
    if given["empty_lse"] == math.inf:
        lse = torch.where(torch.isposinf(lse), -math.inf, lse)
    return given["out"], lse


def against_dense_reference(_spec: VariantSpec, call: Dump) -> tuple[str, bool]:
    """``against_reference`` of a 16-bit cache, by FlashMLA's gates."""
    from snapmla.testing import dense_job

    given = call.arguments
    (out, lse), q, limits = _results(given), given["q"], given["row_limits"]
    begin = None
    if given["units"].numel() and len(q) == 1:  # packed, or one sequence, which is the same
        begin = ragged_begin(call)
        q, out, lse = q[0], out[0], lse[0]
    elif limits.numel():
        limits = limits.view(q.shape[:2])
    errors = dense_job.decode_errors(
        out, lse, q, given["cache"], given["block_table"], given["cache_seqlens"],
        given["softmax_scale"], causal=bool(given["causal"]), cu_seqlens_q=begin,
        row_seqlens=limits if limits.numel() else None, by_sequence=True,
    )  # fmt: skip
    return str(errors), errors.right


def against_sparse_reference(spec: VariantSpec, call: Dump) -> tuple[str, bool]:
    """``against_reference`` of sparse decode over either cache.

    Rows of 656 bytes by the rounding of their kernel and the LSE's gate alone: FlashMLA's gate of
    single elements is made for numbers of its own tests.
    """
    from snapmla.testing import comparison, sparse_reference
    from snapmla.testing.record_job import RecordCall, record_errors

    given = call.arguments
    counts = list_lengths(call)
    n, sink = len(counts), given["attn_sink"] if given["attn_sink"].numel() else None
    out, lse = _results(given)
    if not n:
        return "no query token", True
    out, lse = out.flatten(0, 1)[:n], lse.transpose(0, 1).flatten(1)[:, :n]
    indices, scale = given["indices"].flatten(0, 1)[:n], given["softmax_scale"]
    if "q" in given:
        query, record = given["q"], spec.format
        if "q_rope" in given and record is not None and record.rope is not None:
            rope = given["q_rope"][..., -QK_ROPE_HEAD_DIM:]  # of that tensor or of one of its own
            query = torch.cat([query[..., : record.content.count], rope], -1)
        rows = RecordCall(query.flatten(0, 1)[:n], given["cache"], indices, counts, scale, sink)
        found = record_errors(spec, rows, out, lse, plain=False, powers=False)
        return str(found), found.right
    q_nope, q_rope, q_scale = (given[x].flatten(0, 1)[:n] for x in ("q_nope", "q_rope", "q_scale"))
    run = functools.partial(
        sparse_reference.sparse_decode_reference, q_nope.view(torch.float8_e4m3fn), q_rope, q_scale,
        given["content"].view(torch.float8_e4m3fn), given["rope"], given["scale"], indices, counts,
        scale, attn_sink=sink,
    )  # fmt: skip
    errors = comparison.errors_of(run, out, lse, comparison.mimic_of(spec))
    return str(errors), errors.right


def list_lengths(call: Dump) -> Tensor:
    """Number of entries that count of each query token's row in a sparse decode's sequences; int32
    (tokens,), without room that no sequence takes."""
    given = call.arguments
    query = next(given[name] for name in ("q_nope", "q") if name in given)
    lengths, limits = given["topk_length"], given["row_limits"]
    if query.shape[0] == len(lengths) and len(lengths) != 1:
        each = lengths.new_full((len(lengths),), query.shape[1])
    else:  # packed, or one sequence, which is the same
        each = ragged_begin(call).diff()
    counts = lengths.repeat_interleave(each)
    if limits.numel():
        counts = counts.minimum(limits[: len(counts)])
    return counts.clamp(0, given["indices"].shape[-1])


def ragged_begin(call: Dump) -> Tensor:
    """``cu_seqlens_q`` of a plan with ragged queries: int32 (b + 1,).

    It is the call's witness, or else made of the plan's items: a sequence's first and last rows
    stand in its items, and a sequence of no query token has none.
    """
    given = call.arguments
    witness = given.get("cu_seqlens_q")
    if witness is not None and witness.numel():
        return witness
    query = next(given[name] for name in ("q_nope", "q") if name in given)
    lengths = next(given[name] for name in ("cache_seqlens", "topk_length") if name in given)
    heads, batch = query.shape[2], len(lengths)
    items = given["work_items"][: int(given["part_begin"][-1])].tolist()
    ends = [0] * batch
    for sequence, _, _, _, _, end_row, *_ in items:
        ends[sequence] = max(ends[sequence], end_row // heads)
    for i in range(1, batch):
        ends[i] = max(ends[i], ends[i - 1])
    return lengths.new_tensor([0, *ends])
