"""SM100's kernels of a sparse step by their counts: what bounds them, shared memory's port."""

from __future__ import annotations

import pytest

from dsl_kernels.formats.dims import TOKEN_TILE
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants
from snapmla.testing import cost
from softgpu.cost import report
from softgpu.cost.profile import loads
from tests.support.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.whole_matrix]
TOKEN = 672  # bytes of memory a token: content, RoPE, and the sector that has its scale
# Cycles of the port that a tile of 64 tokens takes at most.
SPARSE = {
    "sparse_decode_ws_r64_obf16_sm100a": 1360,
    "sparse_decode_ws_r64_obf16_gather4_sm100a": 1370,
}
# The same of decode over pages: what it took when softmax read each token's scale in every warp,
# less 128.
PAGES = {
    "decode_ws_r64_p64_obf16_sm100a": 1461 - 128,
    "decode_pair_r128_p64_obf16_sm100a": 2804 - 128,
}


def measured(name: str) -> cost.Cost:
    spec = VariantSpec.from_name(name)
    directory = variants.find_or_build(spec, need_library=False).directory
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
        assert units["shared memory"] <= SPARSE[name] < TOKEN_TILE * TOKEN / found.card.memory


@pytest.mark.parametrize("name", PAGES)
def test_the_port_of_decode_over_pages(name: str) -> None:
    """Scales are read once a tile, as in sparse decode: counts, which only a new design moves."""
    found = measured(name)
    units = {x.unit: x.cycles for x in loads(found.profile.tile, 100, found.card)}
    assert units["shared memory"] <= PAGES[name]
