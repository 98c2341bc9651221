"""``index_logits`` on the software GPU: right, with hazards; the same bits however rows are called.

Both architectures have the same problems.  One variant is everyday's, and of SM100 one small call
of it; the others run with ``--whole-matrix``.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import softgpu
from codegen import abi
from dsl_kernels import registry
from dsl_kernels.families import ARCHS
from dsl_kernels.formats.index_cache import INDEX_DIM, PAGE, PAGE_BYTES, SCALES_AT
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import accumulate, selfcheck
from snapmla.testing import index_reference as reference
from snapmla.testing.workloads import index_logits as work
from softgpu import Options, mutate, using
from tests.support.needs import needs_compiler

pytestmark = needs_compiler
EVERYDAY = ("sm_90a", 64, 2)
VARIANTS = [(64, 1), (64, 2), (64, 4), (32, 1), (32, 2), (32, 4), (32, 8)]
SCHEDULES = 12
whole = pytest.mark.whole_matrix
each_arch = pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=whole)])
both_archs = pytest.mark.parametrize("arch", ARCHS)
each_variant = pytest.mark.parametrize(
    ("arch", "heads", "rows"),
    [
        pytest.param(arch, *v, marks=() if (arch, *v) == EVERYDAY else whole)
        for arch in ARCHS
        for v in VARIANTS
    ],
)


def spec_of(arch: str, heads: int, rows: int) -> VariantSpec:
    return VariantSpec(op="index_logits", arch=arch, heads=heads, unit_rows=rows)


def run(
    arch: str, heads: int, rows: int, given: dict[str, Any], options: Options | None = None
) -> Tensor:
    """``out`` of a call, every hazard an error."""
    spec = spec_of(arch, heads, rows)
    directory = variants.find_or_build(spec, need_library=False).directory
    kernel = selfcheck.load(spec, directory)
    with using(Options(hazards="raise") if options is None else options):
        kernel(*abi.ordered(kernel.names.arguments, given))
    return given["out"]


def judged(
    arch: str, heads: int, rows: int, given: dict[str, Any], options: Options | None = None
) -> selfcheck.Result:
    """A call against the model of the tensor core, on SM100 also against fp64."""
    spec = spec_of(arch, heads, rows)
    call = work.made(spec, given, "call")
    run(arch, heads, rows, given, options)
    return work.judge(spec, [call])


@whole  # some run in test_variants.py
@each_variant
def test_clean_and_right(arch: str, heads: int, rows: int) -> None:
    """Out of order, with copies landing at random, of SM100 also late and early: no hazard, no
    wrong score, none too many."""
    spec = spec_of(arch, heads, rows)
    workload = selfcheck.Workload(spec, variants.find_or_build(spec, need_library=False).directory)
    for seed in range(SCHEDULES if arch == "sm_100a" else 1):  # SM90's have cards
        with using(mutate.schedule(seed)):
            result = workload.run()
        assert result.passed, (seed, result.summary)


def test_sm100_lands_early_late_and_at_random() -> None:
    """A small call under each, the same bits: odd runs of pages, a sequence without tokens, one
    without queries, a prompt of more tokens than a unit, two CTAs."""
    spec, given = spec_of("sm_100a", 64, 2), work.sample_call(64, (9, 70, 0, 130), (3, 0, 1, 2))
    call, before, found = work.made(spec, given, "call"), given["out"].clone(), []
    for seed in range(3):
        given["out"].copy_(before)
        found.append(run("sm_100a", 64, 2, given, mutate.schedule(seed)).clone())
    result = work.judge(spec, [call])
    assert result.passed, result.summary
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


@both_archs
def test_what_is_wrong_is_noticed(arch: str) -> None:
    """A score off by a part in 10^5, and one that is written behind a row's last token."""
    spec, given = spec_of(arch, 64, 1), work.sample_call(64, (70, 3), 1)
    call = work.made(spec, given, "call")
    given["out"].copy_(call.want["out"])
    assert work.judge(spec, [call]).passed
    given["out"][0, 69] += 2e-6 * float(call.job.sizes[0, 69])
    assert not work.judge(spec, [call]).passed
    given["out"].copy_(call.want["out"])
    given["out"][1, 3] = 0.0
    assert "1 elements written" in work.judge(spec, [call]).summary


@whole
@pytest.mark.parametrize(
    ("arch", "sums", "figures"),
    [
        ("sm_90a", softgpu.blackwell, 1), ("sm_90a", softgpu.exact, 1),
        ("sm_100a", softgpu.hopper, 2),
    ],
)  # fmt: skip
def test_another_tensor_core_is_noticed(arch: str, sums: Any, figures: int) -> None:
    """Its sums are wrong by hundreds of what is allowed; of SM100 beside both."""
    given = work.sample_call(64, (70, 130), 2)
    result = judged(arch, 64, 2, given, Options(accumulate=sums))
    assert not result.passed
    found = [float(word) for word in re.findall(r"\d\.\de-\d+", result.summary)]
    assert len(found) == figures and min(found) > 20 * work.SLACK, result.summary


def step_by_step(q: Tensor, keys: Tensor) -> Tensor:
    """q . k^T in steps of 32 channels, each rounded to fp32: as ``softgpu.exact`` adds."""
    total = torch.zeros(len(q), len(keys))
    for k in range(0, INDEX_DIM, 32):
        part = slice(k, k + 32)
        total = (total.double() + q[:, part].double() @ keys[:, part].double().T).float()
    return total


@whole
@pytest.mark.parametrize(("heads", "rows"), VARIANTS)
def test_sm100_has_the_bits_of_blackwells_model(heads: int, rows: int) -> None:
    """And with exact sums those of exact sums: of keys and queries of all magnitudes, whose sums
    the models cut at different bits, neither is the other's."""
    given = work.sample_call(heads, (200, 65), rows)
    draw = torch.randint(0, 0x7F, given["cache"].shape).byte()
    sign = torch.randint(0, 2, draw.shape).byte() << 7
    given["cache"][:, :SCALES_AT] = (draw | sign)[:, :SCALES_AT]
    pages, scales = reference.pages_of(given["cache"])
    reference.fill_pages(given["cache"], pages, torch.rand_like(scales))
    given["q"] = torch.randint(0, 0x7F, given["q"].shape).byte()
    given["q"] |= torch.randint(0, 2, given["q"].shape).byte() << 7
    wants, models = {}, {"blackwell": accumulate.blackwell_fp8_dot, "exact": step_by_step}
    for name, products in models.items():
        again = {**given, "out": given["out"].clone()}
        sums = {"blackwell": softgpu.blackwell, "exact": softgpu.exact}[name]
        found = run("sm_100a", heads, rows, again, Options(accumulate=sums, hazards="raise"))
        wants[name] = reference.bits_on_blackwell(given, products)
        for row, want in zip(found, wants[name], strict=True):
            assert torch.equal(row[: len(want)], want), name
    assert not any(map(torch.equal, *wants.values()))


def test_fma_is_rounded_once() -> None:
    """Cases where a sum in fp64, rounded again, is the other neighbour; and fp32's own, of many."""
    small = torch.tensor([2.0**-23])
    x, y, z = 2.0**-24 * (1 + small), 1 - small, 1 + small  # x y is 2^-24 - 2^-70
    assert (x.double() * y.double() + z.double()).float() == 1 + 2 * small
    assert reference.fma(x, y, z) == 1 + small
    assert reference.fma(-x, y, z) == 1 + small
    x, y = torch.randn(2, 10000)
    assert torch.equal(reference.fma(x, y, torch.zeros_like(x)), x * y)


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


@each_arch
@pytest.mark.parametrize(
    ("heads", "prompt", "decode"),
    [
        (64, 2, 2),
        *[pytest.param(64, u, 1, marks=whole) for u in (1, 2, 4)],
        *[pytest.param(32, u, 1, marks=whole) for u in (2, 4, 8)],
    ],
)
def test_decode_is_prefill(arch: str, heads: int, prompt: int, decode: int) -> None:
    """The same bits for a query token in a ragged prompt and alone, in other CTAs."""
    given = work.sample_call(heads, (67, 130), (2, 3), ctas=2)
    together = run(arch, heads, prompt, given)
    for r, single in alone(given, 1):
        assert torch.equal(run(arch, heads, decode, single)[0], together[r]), r


def batch_of(given: Mapping[str, Any], chosen: Sequence[int], ctas: int) -> dict[str, Any]:
    """A call of some sequences of a ragged call, in that order, over the same pages."""
    starts = given["cu_seqlens_q"].tolist()
    rows = [r for i in chosen for r in range(starts[i], starts[i + 1])]
    counts = [starts[i + 1] - starts[i] for i in chosen]
    return {
        **given, "q": given["q"][rows].clone(), "w": given["w"][rows].clone(),
        "block_table": given["block_table"][list(chosen)],
        "cache_seqlens": given["cache_seqlens"][list(chosen)], "ctas": ctas,
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
        "out": torch.full((len(rows), given["out"].shape[1]), work.UNTOUCHED),
    }  # fmt: skip


@whole
@both_archs
@pytest.mark.parametrize(("heads", "rows"), VARIANTS)
def test_bits_follow_from_row_and_token(arch: str, heads: int, rows: int) -> None:
    """Over schedules, CTAs, and which sequences stand in the batch in which order."""
    given = work.sample_call(heads, (70, 9, 0, 321), (3, 1, 2, 9), ctas=2)
    want = run(arch, heads, rows, given).clone()
    starts = given["cu_seqlens_q"].tolist()
    batches = [(0, 1, 2, 3), (3, 2, 1, 0), (3,), (1, 0)]
    for (seed, chosen), ctas in itertools.product(enumerate(batches), (1, 2, 7)):
        found = run(
            arch, heads, rows, batch_of(given, chosen, ctas), mutate.schedule(3 * ctas + seed)
        )
        kept = [r for i in chosen for r in range(starts[i], starts[i + 1])]
        assert torch.equal(found, want[kept]), (seed, chosen, ctas)


@each_arch
@pytest.mark.parametrize("b", [33, pytest.param(64, marks=whole), pytest.param(170, marks=whole)])
def test_runs_among_many_sequences(arch: str, b: int) -> None:
    """A lane counts two sequences and more, among them ones without tokens or without queries."""
    draw = random.Random(b)
    lengths = [draw.choice((0, 0, 1, 64, 65)) for _ in range(b)]
    tokens = [draw.choice((0, 1, 1, 2)) for _ in range(b)]
    given = work.sample_call(64, tuple(lengths), tuple(tokens), ctas=7)
    result = judged(arch, 64, 2, given)
    assert result.passed, result.summary


@whole
@both_archs
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("heads", "rows"), VARIANTS)
def test_drafts(arch: str, heads: int, rows: int, s_q: int) -> None:
    """Query tokens that fill no unit, one, several; sequences with fewer tokens than those."""
    given = work.sample_call(heads, (129, 0, s_q, 1, 64), s_q, gap=16 * s_q, ctas=3)
    result = judged(arch, heads, rows, given)
    assert result.passed, result.summary


@whole
@both_archs
@pytest.mark.parametrize("ctas", [1, 2, 7])
@pytest.mark.parametrize(("heads", "rows"), VARIANTS)
def test_runs_of_every_length(arch: str, heads: int, rows: int, ctas: int) -> None:
    """Odd and even runs of pages, whole and cut by CTAs, rows that end with one and within it."""
    lengths = (64, 65, 128, 129, 192, 193, 256, 1)
    result = judged(arch, heads, rows, work.sample_call(heads, lengths, rows, ctas=ctas))
    assert result.passed, result.summary


@whole
@both_archs
@pytest.mark.parametrize(("heads", "rows"), VARIANTS)
def test_lengths_beyond_the_table_and_strided_rows(arch: str, heads: int, rows: int) -> None:
    """A sequence counts as long as its pages or its columns; rows of ``out`` begin anywhere;
    entries that no row sees are far below and above all pages."""
    for columns, length in ((140, 10**6), (100, 10**6), (100, 128)):
        given = work.sample_call(heads, (128, 70, 0), rows, columns=columns)
        given["block_table"] = given["block_table"][:, :2].clone()
        given["block_table"][2] = torch.tensor([-(2**31), 2**31 - 1])
        given["cache_seqlens"][0] = length
        memory = torch.full((3 * rows + 2, 157), work.UNTOUCHED)
        given["out"] = memory[1:-1, 5 : 5 + columns]
        result = judged(arch, heads, rows, given)
        assert result.passed, result.summary
        memory[1:-1, 5 : 5 + columns] = work.UNTOUCHED
        assert bool((memory == work.UNTOUCHED).all()), "outside of the columns"


@whole
@both_archs
@pytest.mark.parametrize("ctas", [1, 3, 16])
@pytest.mark.parametrize(("heads", "rows"), [(64, 4), (32, 8), (64, 1)])
def test_prompts(arch: str, heads: int, rows: int, ctas: int) -> None:
    """Hundreds of query tokens, behind a context and without one; 40 sequences, most of them
    empty, so that a warp counts tiles in two rounds."""
    given = work.sample_call(heads, (300, 65, 90), (90, 65, 7), ctas=ctas)
    result = judged(arch, heads, rows, given)
    assert result.passed, result.summary
    lengths = [0] * 33 + [1, 0, 70, 0, 5, 64, 0]
    result = judged(arch, heads, rows, work.sample_call(heads, lengths, 1, ctas=ctas))
    assert result.passed, result.summary


@whole
@both_archs
@pytest.mark.parametrize(
    ("lengths", "starts"), [((2**31 - 1, -5), (0, 1, 2)), ((90, 9), (0, 5, 3))]
)
def test_tables_that_are_wrong_stay_inside(
    arch: str, lengths: tuple[int, int], starts: tuple[int, int, int]
) -> None:
    """Lengths and starts that cannot be: no access outside of tensors, which the software GPU would
    report; nothing hangs."""
    given = work.sample_call(64, (90, 9), (1, 1))
    given["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32)
    given["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32)
    given["cache"][:] = 0
    assert run(arch, 64, 2, given).shape == given["out"].shape


@whole
@pytest.mark.parametrize("active", [1, 64])
@pytest.mark.parametrize(
    ("arch", "of_scores", "of_products"), [("sm_90a", 3e-4, 1.2e-3), ("sm_100a", 1e-6, 1e-6)]
)
def test_errors_beside_fp64(arch: str, of_scores: float, of_products: float, active: int) -> None:
    """Error of a chain of 128 channels: Hopper's with queries equal to a key 1.2e-3 of the sum of
    products, on normal ones 3e-4 of the sum of scores; Blackwell's no more than its sums."""
    given = work.sample_call(64, (200,), 2)
    given["w"][:, active:] = 0.0
    found = run(arch, 64, 2, given)
    for r, want in enumerate(reference.scores(given, reference.EXACT)):
        error = (found[r, : len(want.values)].double() - want.values).abs()
        if active == 64:
            assert float((error / want.size).max()) <= of_scores
    keys, _ = reference.pages_of(given["cache"])
    page = given["block_table"][0, 1].long()
    given["q"][:] = keys[page, 5].view(torch.uint8)
    given["out"].fill_(work.UNTOUCHED)
    found = run(arch, 64, 2, given)
    sizes = reference.magnitudes(given)
    for r, want in enumerate(reference.scores(given, reference.EXACT)):
        error = (found[r, : len(want.values)].double() - want.values).abs()
        assert float((error / sizes[r]).max()) <= of_products
        assert len(want.values) > PAGE + 5


@each_arch
def test_nan_keys_have_nan_scores(arch: str) -> None:
    """And no other token's score is one."""
    given = work.sample_call(64, (70,), 1)
    page = int(given["block_table"][0, 0])
    given["cache"][page, 128 * 7 + 3] = 0x7F
    found = run(arch, 64, 2, given)[0, :70]
    assert found.isnan().nonzero().flatten().tolist() == [7]


@both_archs
def test_what_cannot_be_built_says_why(arch: str) -> None:
    assert registry.feasible(spec_of(arch, 64, 8)) == (
        "64 heads of 8 rows are 512 columns, more than 256"
    )
    assert all(registry.feasible(spec_of(arch, *v)) is None for v in VARIANTS)
    assert PAGE_BYTES == 8448
