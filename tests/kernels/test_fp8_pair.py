"""SM100's decode, pipeline ``pair``, on the software GPU.

``make prove`` runs both pipelines over a sample of all their axes (tests/support/sample_fp8.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from dsl_kernels.spec import decode_spec
from snapmla.testing import selfcheck
from softgpu import Options, exact, mutate, using
from softgpu.ops import tma
from tests.kernels.test_variants import up_to_date
from tests.support import cases, on_blackwell
from tests.support.needs import needs_compiler
from tests.support.pairwise import assert_all_meet
from tests.support.sample_fp8 import AXES, SAMPLE

pytestmark = needs_compiler


def test_every_two_values_meet() -> None:
    assert_all_meet(AXES, SAMPLE)
    assert len(SAMPLE) <= 250


def loaded(pipeline: str) -> tuple[Any, Any]:
    spec = decode_spec(pipeline, on_blackwell.ROW_TILES[pipeline], 64, "f32", "sm_100a")
    return spec, selfcheck.load(spec, up_to_date(spec))


def test_scores_are_those_of_ws() -> None:
    """With exact sums, bit for bit: every row attends to one token of a whole tile, by so much that
    no other has weight, so its LSE is that token's logit and its output that token's latent."""
    case = cases.DecodeCase(lengths=(128,), heads=64, s_q=2, causal=False, logit_std=3.0, seed=5)
    inputs = cases.build(case)
    rows = torch.arange(128)
    token = rows * 37 % 128  # all of them, in other places than the rows
    page, at = inputs.block_table[0].long()[token // 64], token % 64
    channel = 64.0 * torch.eye(64)[token % 64] * torch.where(token < 64, 1.0, -1.0)[:, None]
    inputs.rope[page, at] = channel.bfloat16()
    inputs.q_rope_scaled.view(128, 64)[:] = (3e3 * channel).bfloat16()
    found = {}
    for pipeline in on_blackwell.ROW_TILES:
        with on_blackwell.blackwell(), using(Options(accumulate=exact)):
            _, out, lse = on_blackwell.decode(inputs, pipeline, 1)
        found[pipeline] = out, lse
    truth = inputs.content[page, at].float() * inputs.scale[page, at][:, None]
    (out, lse), (ws_out, ws_lse) = found["pair"], found["ws"]
    assert torch.equal(lse, ws_lse) and len(lse.unique()) > 100
    torch.testing.assert_close(out.view(128, 512), truth, rtol=1e-6, atol=0.0)
    assert torch.equal(out, ws_out)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_bytes_cross_once_or_twice(
    page_size: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Content twice, as K and as V, RoPE once; of no other page any."""
    spec = decode_spec("pair", 128, page_size, "f32", "sm_100a")
    job = selfcheck.DecodeJob(spec, (256, 128), 1, layout=layout)
    kernel = selfcheck.load(spec, up_to_date(spec))
    times: dict[int, int] = {}
    load = tma.load

    def counted(w: Any, t: Any, coords: list[int], targets: list[int]) -> None:
        rows, nbytes = tma.rows_inside(t, coords)
        for row in rows.tolist():
            for chunk in range(0, nbytes, 16):
                times[row + chunk] = times.get(row + chunk, 0) + 1
        load(w, t, coords, targets)

    monkeypatch.setattr(tma, "load", counted)
    assert job.errors(job.run(kernel)).right

    def seen(plane: torch.Tensor, page: int, token: int) -> set[int]:
        first = plane[page, token].data_ptr()
        nbytes = plane.shape[-1] * plane.element_size()
        return {times.get(at, 0) for at in range(first, first + nbytes, 16)}

    used = {
        int(job.table[b, t // page_size])
        for b, length in enumerate(job.lengths)
        for t in range(length)
    }
    for page in range(job.cache.content.shape[0]):
        for token in range(page_size):
            content = seen(job.cache.content_u8, page, token)
            rope = seen(job.cache.rope, page, token)
            assert (content, rope) == (({2}, {1}) if page in used else ({0}, {0})), (page, token)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("which", [3, 15, 18, 21, 25])
def test_a_missing_product_is_noticed(which: int) -> None:
    """A K step of the content, of RoPE, of either half of P.V left out: the comparison sees it."""
    spec, kernel = loaded("pair")
    found = mutate.matching(kernel.program(kernel.entry), "tcgen05.mma.cta_group::2")
    assert len(found) == 16 + 4 + 2 * 4
    job = selfcheck.DecodeJob(spec, (128, 40))
    with mutate.planted(kernel, kernel.entry, {found[which].pc: ""}):
        assert not job.errors(job.run(kernel)).right


def test_a_sink_keeps_the_tail() -> None:
    """A sink of weight 1 in a block of 128 tokens, and a tail 1e-5 below it: the maxima of the
    blocks behind are their own, so the tail's share is as exact as P."""
    case = cases.sink_case(640, heads=3, causal=False)
    inputs = cases.build(case)
    with on_blackwell.blackwell(), using(Options(hazards="raise")):
        _, out, lse = on_blackwell.decode(inputs, "pair", 1)
        found = on_blackwell.errors(inputs, "pair", out, lse)
    assert found.right, str(found)
    weights = np.exp(case.logits(torch.arange(640)).numpy().astype(np.float64))
    assert out[0, 0, 0, 1].item() == pytest.approx(weights[1:].sum() / weights.sum(), rel=3e-2)


def test_an_lse_far_below_zero() -> None:
    """At -800 fp32 numbers are 6e-5 apart, so it counts where the kernel rounds: its error is that
    of the mimic, which rounds there too, and within the bound of docs/numerics.md."""
    case = cases.DecodeCase(lengths=(65,), heads=2, s_q=2, logits=cases.rising_logits)
    inputs = cases.build(case)
    with on_blackwell.blackwell(), using(Options(hazards="raise")):
        _, out, lse = on_blackwell.decode(inputs, "pair", 1)
        found = on_blackwell.errors(inputs, "pair", out, lse)
    assert found.right, str(found)
    assert -800 < lse.min() < -790
    assert found.lse_error <= 7.3 * 2.0**-24 * 800 + 2e-6


@pytest.mark.parametrize("pipeline", ["ws", "pair"])
def test_items_without_tiles_in_a_row(pipeline: str) -> None:
    """Four of ``ws``'s row blocks see no token before the first that does: Q tiles alone take
    stages round the KV ring, whose parity must not be mistaken (copies as late as they may be)."""
    inputs = cases.build(cases.DecodeCase(lengths=(0, 1), heads=96, s_q=2, seed=1))
    options = Options(hazards="raise", asynchronous="late", seed=1)
    with on_blackwell.blackwell(), using(options):
        _, out, lse = on_blackwell.decode(inputs, pipeline, 1)
        found = on_blackwell.errors(inputs, pipeline, out, lse)
    assert found.right, str(found)
