"""SM100's kernels of a sparse step by their counts: what bounds them, shared memory's port."""

from __future__ import annotations

import pytest

from dsl_kernels.dims import TOKEN_TILE
from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.testing import cost
from softgpu.cost import report
from softgpu.cost.profile import loads
from tests.support.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.whole_matrix]
TOKEN = 672  # bytes of memory a token: content, RoPE, and the sector that has its scale
SPARSE = ("sparse_decode_ws_r64_obf16_sm100a", "sparse_decode_ws_r64_obf16_gather4_sm100a")
MOST = 1370  # cycles of the port a tile of 64 tokens


def measured(name: str) -> cost.Cost:
    spec = VariantSpec.from_name(name)
    directory = runtime.find_or_build(spec, need_library=False).directory
    return cost.measure(spec, directory, "B200")


@pytest.mark.parametrize("name", [*SPARSE, "index_logits_h64_u2_sm100a"])
def test_memory_bounds(name: str) -> None:
    """The report says so, as a prediction; sparse decode's port is less busy than memory is."""
    found = measured(name)
    units = {x.unit: x.cycles for x in loads(found.profile.tile, 100, found.card)}
    assert next(iter(units)) == "memory"
    said = report.verdict(found.profile, found.card, found.cycles, found.handovers)
    assert said[0].startswith(f"predicted: bound by memory: {units['memory']:,.0f} cycles")
    if name in SPARSE:
        assert found.rows == 64
        assert units["shared memory"] <= MOST < TOKEN_TILE * TOKEN / found.card.memory
