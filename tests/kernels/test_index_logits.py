"""``index_logits`` on the software GPU: right, with hazards; the same bits however rows are called.

One variant is everyday's, the others run with ``--whole-matrix``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from codegen import abi
from dsl_kernels import registry
from dsl_kernels.index_cache import PAGE, PAGE_BYTES
from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.testing import index_reference as reference
from snapmla.testing import selfcheck
from snapmla.testing.workloads import index_logits as work
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
EVERYDAY = (64, 2)
VARIANTS = [(64, 1), (64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (32, 8)]
whole = pytest.mark.whole_matrix
each_variant = pytest.mark.parametrize(
    ("heads", "rows"), [pytest.param(*v, marks=() if v == EVERYDAY else whole) for v in VARIANTS]
)


def spec_of(heads: int, rows: int) -> VariantSpec:
    return VariantSpec(op="index_logits", heads=heads, unit_rows=rows)


def run(heads: int, rows: int, given: dict[str, Any]) -> Tensor:
    """``out`` of a call, every hazard an error."""
    spec = spec_of(heads, rows)
    directory = runtime.find_or_build(spec, need_library=False).directory
    kernel = selfcheck.load(spec, directory)
    with using(Options(hazards="raise")):
        kernel(*abi.ordered(kernel.names.arguments, given))
    return given["out"]


def judged(heads: int, rows: int, given: dict[str, Any]) -> selfcheck.Result:
    """A call against the model of the tensor core."""
    call = work.made(spec_of(heads, rows), given, "call")
    run(heads, rows, given)
    return work.judge(spec_of(heads, rows), [call])


@whole  # some run in test_variants.py
@each_variant
def test_clean_and_right(heads: int, rows: int) -> None:
    """Out of order, with copies landing at random: no hazard, no wrong score, none too many."""
    spec = spec_of(heads, rows)
    workload = selfcheck.Workload(spec, runtime.find_or_build(spec, need_library=False).directory)
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


def test_what_is_wrong_is_noticed() -> None:
    """A score off by a part in 10^5, and one that is written behind a row's last token."""
    given = work.sample_call(64, (70, 3), 1)
    call = work.made(spec_of(64, 1), given, "call")
    given["out"].copy_(call.want["out"])
    assert work.judge(spec_of(64, 1), [call]).passed
    given["out"][0, 69] += 2e-6 * float(call.job[0, 69])
    assert not work.judge(spec_of(64, 1), [call]).passed
    given["out"].copy_(call.want["out"])
    given["out"][1, 3] = 0.0
    assert "1 elements written" in work.judge(spec_of(64, 1), [call]).summary


def alone(given: Mapping[str, Any], ctas: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each row of a call that sees a token, as a decode of one query token."""
    for r, (sequence, seen) in enumerate(reference.rows_of(given)):
        if seen:
            yield r, {
                **given, "q": given["q"][r : r + 1], "w": given["w"][r : r + 1],
                "block_table": given["block_table"][sequence : sequence + 1],
                "cache_seqlens": torch.tensor([seen], dtype=torch.int32),
                "cu_seqlens_q": torch.empty(0, dtype=torch.int32), "s_q": 1, "ctas": ctas,
                "out": torch.full((1, given["out"].shape[1]), work.UNTOUCHED),
            }  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "prompt", "decode"),
    [
        (64, 2, 2),
        *[pytest.param(64, u, 1, marks=whole) for u in (1, 2, 4)],
        *[pytest.param(32, u, 1, marks=whole) for u in (2, 4, 8)],
    ],
)
def test_decode_is_prefill(heads: int, prompt: int, decode: int) -> None:
    """The same bits for a query token in a ragged prompt and alone, in other CTAs."""
    given = work.sample_call(heads, (67, 130), (2, 3), ctas=2)
    together = run(heads, prompt, given)
    for r, single in alone(given, 1):
        assert torch.equal(run(heads, decode, single)[0], together[r]), r


@pytest.mark.parametrize("b", [33, pytest.param(64, marks=whole), pytest.param(170, marks=whole)])
def test_runs_among_many_sequences(b: int) -> None:
    """A lane counts two sequences and more, among them ones without tokens or without queries."""
    draw = random.Random(b)
    lengths = [draw.choice((0, 0, 1, 64, 65)) for _ in range(b)]
    tokens = [draw.choice((0, 1, 1, 2)) for _ in range(b)]
    given = work.sample_call(64, tuple(lengths), tuple(tokens), ctas=7)
    result = judged(64, 2, given)
    assert result.passed, result.summary


@whole
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("heads", "rows"), VARIANTS)
def test_drafts(heads: int, rows: int, s_q: int) -> None:
    """Query tokens that fill no unit, one, several; sequences with fewer tokens than those."""
    given = work.sample_call(heads, (129, 0, s_q, 1, 64), s_q, gap=16 * s_q, ctas=3)
    result = judged(heads, rows, given)
    assert result.passed, result.summary


@whole
@pytest.mark.parametrize("ctas", [1, 3, 16])
@pytest.mark.parametrize(("heads", "rows"), [(64, 4), (32, 8), (64, 1)])
def test_prompts(heads: int, rows: int, ctas: int) -> None:
    """Hundreds of query tokens, behind a context and without one; 40 sequences, most of them
    empty, so that a warp counts tiles in two rounds."""
    given = work.sample_call(heads, (300, 65, 90), (90, 65, 7), ctas=ctas)
    result = judged(heads, rows, given)
    assert result.passed, result.summary
    lengths = [0] * 33 + [1, 0, 70, 0, 5, 64, 0]
    result = judged(heads, rows, work.sample_call(heads, lengths, 1, ctas=ctas))
    assert result.passed, result.summary


@whole
@pytest.mark.parametrize(
    ("lengths", "starts"), [((2**31 - 1, -5), (0, 1, 2)), ((90, 9), (0, 5, 3))]
)
def test_tables_that_are_wrong_stay_inside(
    lengths: tuple[int, int], starts: tuple[int, int, int]
) -> None:
    """Lengths and starts that cannot be: no access outside of tensors, which the software GPU would
    report; nothing hangs."""
    given = work.sample_call(64, (90, 9), (1, 1))
    given["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    given["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32)
    given["cache"][:] = 0
    assert run(64, 2, given).shape == given["out"].shape


@whole
@pytest.mark.parametrize("active", [1, 64])
def test_errors_beside_fp64(active: int) -> None:
    """What an FP8 chain of 128 channels costs: with queries equal to a key 1.2e-3 of the sum of
    products, on normal ones 3e-4 of the sum of scores."""
    given = work.sample_call(64, (200,), 2)
    given["w"][:, active:] = 0.0
    found = run(64, 2, given)
    for r, want in enumerate(reference.scores(given, exact=True)):
        error = (found[r, : len(want.values)].double() - want.values).abs()
        if active == 64:
            assert float((error / want.size).max()) <= 3e-4
    keys, _ = reference.pages_of(given["cache"])
    page = given["block_table"][0, 1].long()
    given["q"][:] = keys[page, 5].view(torch.uint8)
    given["out"].fill_(work.UNTOUCHED)
    found = run(64, 2, given)
    sizes = reference.magnitudes(given)
    for r, want in enumerate(reference.scores(given, exact=True)):
        error = (found[r, : len(want.values)].double() - want.values).abs()
        assert float((error / sizes[r]).max()) <= 1.2e-3
        assert len(want.values) > PAGE + 5


def test_nan_keys_have_nan_scores() -> None:
    """And no other token's score is one."""
    given = work.sample_call(64, (70,), 1)
    page = int(given["block_table"][0, 0])
    given["cache"][page, 128 * 7 + 3] = 0x7F
    found = run(64, 2, given)[0, :70]
    assert found.isnan().nonzero().flatten().tolist() == [7]


def test_what_cannot_be_built_says_why() -> None:
    assert registry.feasible(spec_of(64, 8)) == (
        "64 heads of 8 rows are 512 columns, more than 256"
    )
    assert all(registry.feasible(spec_of(*v)) is None for v in VARIANTS)
    assert PAGE_BYTES == 8448
