"""Blackwell's sums against recorded results of MMA-Sim, a published model of a B200."""

from __future__ import annotations

import numpy as np
import pytest

from profiles import record_mma_sim as record
from softgpu import floats
from softgpu.accumulate import blackwell

DATA = np.load(record.PATH)


def decoded(raw: np.ndarray, kind: str) -> np.ndarray:
    if kind in ("e4m3", "e5m2"):
        return {"e4m3": floats.E4M3, "e5m2": floats.E5M2}[kind][raw]
    return floats.bf16_to_f32(raw) if kind == "bf16" else raw.view(np.float16).astype(np.float32)


def test_the_inputs_are_those_that_were_recorded() -> None:
    assert record.digest() == str(DATA["digest"])


@pytest.mark.parametrize("pair", record.PAIRS, ids="-".join)
@pytest.mark.parametrize("family", record.FAMILIES)
def test_every_recorded_accumulator_has_its_bits(pair: tuple[str, str], family: str) -> None:
    expected = DATA[" ".join((*pair, family))]
    for (a, b, c), want in zip(record.inputs(pair, family), expected, strict=True):
        operands = decoded(a, pair[0]), decoded(b, pair[1])
        kind = pair[0] if pair[0] == pair[1] else "/".join(pair)
        got = blackwell(c.view(np.float32), *operands, kind)
        differ = got.view(np.uint32) != want
        assert not differ.any(), (differ.sum(), got[differ][:4], want.view(np.float32)[differ][:4])
