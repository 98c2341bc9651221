"""SM100's sparse decode behind TMA's ``tile::gather4``, on the software GPU: the bits of the kernel
behind ``cp.async``, what is copied, tensor maps, planted bugs, who gets it.

The problems that it shares with the others are in test_sparse_decode.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dsl_kernels
from dsl_kernels.spec import VariantSpec
from snapmla import rank
from snapmla.rank.cards import card_named
from snapmla.testing.sparse_job import INT_MAX, LAYOUTS, SparseJob, SparseShape
from snapmla.testing.workloads import sparse_decode as work
from softgpu import Hazard, Options, SoftGpuError, mutate, using
from softgpu.ops import tma
from softgpu.ptx import Instr
from tests.kernels.test_sparse_decode import BLACKWELL, GATHER4, kernel_of
from tests.support.needs import needs_compiler
from tests.support.planting import granted, line_of

LOADS = Path(dsl_kernels.__file__).parent / "sm100/fp8/gather4_loads.py"
PITCHES = {  # (layout, page size): of content and RoPE, bytes of a row of their maps
    **{(layout, p): 128 for layout in ("split", "row640") for p in (1, 2, 53, 64)},
    ("paged", 1): 16, ("paged", 2): 16, ("paged", 53): 32, ("paged", 64): 128,
    ("packed", 1): 16, ("packed", 2): 16, ("packed", 53): 32, ("packed", 64): 128,
}  # fmt: skip


@needs_compiler
def test_nobody_gets_it_unasked() -> None:
    """The dispatcher's kernel of SM100 is the other one, which the default matrix has."""
    card = card_named("B200")
    for dtype in ("bf16", "f32"):
        chosen = rank.choose_sparse(card, 64, out_dtype=dtype)
        assert chosen.name == f"sparse_decode_ws_r64_o{dtype}_sm100a" and chosen.loads == "cp_async"
    assert VariantSpec.from_name(GATHER4).replace(loads="cp_async").name == BLACKWELL


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_the_other_loader(layout: str) -> None:
    """Equal bits for every page size, style and edge of lists, landing and schedule at random."""
    (spec, gather4), (_, other) = kernel_of(GATHER4), kernel_of(BLACKWELL)
    shapes = [*work.shapes(spec)]
    for style, page_size in (("swings", 53), ("equal", 2), ("plain", 64), ("plain", 1)):
        shapes.append(
            SparseShape(50, 200, (200, 64, 0, 1), page_size, layout=layout, style=style, parts=3)
        )
    for seed, shape in enumerate(shapes):
        job = SparseJob(spec, shape)
        want = job.run(other)
        with using(Options(asynchronous="random", seed=seed, hazards="raise")):
            got = job.run(gather4)
        assert job.errors(got).right, shape
        for mine, right in zip(got, want, strict=True):
            assert torch.equal(mine.nan_to_num(7.0), right.nan_to_num(7.0)), shape


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize(("layout", "page_size"), PITCHES)
def test_each_named_token_is_copied_once_a_row_block(
    layout: str, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 640 bytes, by copies of 128, of one block of rows or of two; nothing of a token that no
    entry names, of which -1 and INT_MAX are two.  Where strides let them, rows of a map do not
    overlap."""
    spec, kernel = kernel_of(GATHER4)
    heads = 20 if page_size % 2 else 100
    shape = SparseShape(heads, 130, (130, 70), page_size, s_q=2, layout=layout, parts=3)
    job, times, pitches = SparseJob(spec, shape), dict[int, int](), dict[int, int]()
    copied = tma._gather

    def counted(
        w: Any, t: tma.TensorMap, offset: Any, inside: Any, start: int, n: int, out: Any
    ) -> None:
        if t.gather:
            assert n == 128 and t.box == (128 // t.element, 4)
            pitches[t.element] = t.stride[0]
            for at in (t.address + offset + start)[inside].tolist():
                times[at] = times.get(at, 0) + 1
        copied(w, t, offset, inside, start, n, out)

    monkeypatch.setattr(tma, "_gather", counted)
    assert job.errors(job.run(kernel)).right
    assert {INT_MAX, -1, -(2**31)} <= set(job.indices.flatten().tolist())
    assert pitches == dict.fromkeys((1, 2), PITCHES[layout, page_size])
    content, rope, scale = job.planes
    pool, blocks = scale.numel(), -(-heads // spec.row_tile)
    named = [row[:n] for row, n in zip(job.indices, shape.counts, strict=True)]
    tokens = torch.cat(named)
    tokens = tokens[(tokens >= 0) & (tokens < pool)]
    want = blocks * torch.bincount(tokens.long(), minlength=pool)
    assert want.unique().tolist() == [0, blocks]
    for token in range(pool):
        for plane in (content, rope):
            first = plane[token // page_size, token % page_size].data_ptr()
            lines = range(first, first + plane.shape[-1] * plane.element_size(), 128)
            assert {times.pop(x, 0) for x in lines} == {int(want[token])}, token
    assert not times, "bytes of no token"


# ---------------------------------------------------------------------------------- planted bugs

# Empty lists put Q tiles alone round the ring, a long one fills it.
WORK = SparseShape(5, 400, (*6 * (0,), 400, 70), 64, style="swings", parts=1)


def of_no_bytes(ins: Instr) -> str:
    """In place of an arrival that says how many bytes will come."""
    return f"mbarrier.arrive.shared.b64 _, {ins.text.split(', ')[1]}"


def arrives_at_once(ins: Instr) -> str:
    """In place of the arrival of copies: that of the thread, whatever it still copies."""
    return f"mbarrier.arrive.shared.b64 _, {ins.text.rpartition(' ')[2].rstrip(';')}"


def none(ins: Instr) -> str:
    return ""


# Bug: opcode, (text of its line, behind which text), what stands there, kind of hazard.
BUGS: dict[str, tuple[str, tuple[str, str], Callable[[Instr], str], str]] = {
    "nobody waits for the copies' bytes": (
        "mbarrier.arrive.expect_tx", ("expect_tx(bar", "for tile in"), of_no_bytes,
        "wrong-tx-count",
    ),
    "scales arrive before their copies": (
        "cp.async.mbarrier.arrive", ("arrive_landed(bar)", "for tile in"), arrives_at_once,
        "read-before-complete",
    ),
    "a stage is filled before it is free": (
        "mbarrier.try_wait", ("sync_object_empty.wait", "for tile in"), granted,
        "race",  # of the words that say where tokens are, before MMAs' bytes
    ),
    "a lane reads where tokens are before others have said it": (
        "bar.warp.sync", ("sync_warp()", "for tile in"), none, "race",
    ),
}  # fmt: skip


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_named(bug: str) -> None:
    """Every schedule notices, and some name it; others are faults and hangs that follow from it."""
    opcode, where, change, kind = BUGS[bug]
    spec, kernel = kernel_of(GATHER4)
    place = line_of(LOADS, *where)
    found = mutate.matching(kernel.program(kernel.entry), opcode, place)
    assert found, f"no {opcode} at {place}"
    job, said = SparseJob(spec, WORK), []
    for mode, seed in (("late", None), ("early", None), ("random", 0), ("random", 1)):
        options = Options(asynchronous=mode, seed=seed, hazards="raise")
        changes = {ins.pc: change(ins) for ins in found}
        with (
            mutate.planted(kernel, kernel.entry, changes),
            using(options),
            pytest.raises(SoftGpuError) as error,
        ):
            job.run(kernel)
        said.append(error.value.kind if isinstance(error.value, Hazard) else "fault")
    assert kind in said, said
