"""The gates of ``tests/gpu/check_decode.py`` can fail: references with one fault for a kernel."""

from __future__ import annotations

from dataclasses import replace

import torch

from snapmla import metrics
from snapmla.reference import FP64, MIMIC_HW, MIMIC_HW_FULL
from tests.gpu import check_decode as check
from tests.support import cases


def test_faults_of_a_tenth_of_fp8s_own_error_are_seen() -> None:
    """What stays far below the error to fp64 shows against the mimic and the model."""
    inputs = cases.build(cases.sweep_case(1024, 1, 1.0, 2.0, 16))
    truth, mimic, model = (check.reference(inputs, c)[0] for c in (FP64, MIMIC_HW, MIMIC_HW_FULL))
    flips = check.flips_of(check.SWEEP_BATCH * 16 * 1024)
    to_mimic = check.model_gate(model, mimic, flips)
    assert flips < 4e-4 and to_mimic < 7e-4 and metrics.relative_l2(model, mimic) < 0.75 * to_mimic
    to_fp64 = check.truth_gate(model, truth, torch.float32)

    worse = mimic + 1.5 * (model - mimic)  # accumulates P.V half as badly again
    assert metrics.relative_l2(worse, mimic) > to_mimic
    assert metrics.relative_l2(worse, truth) < to_fp64
    for fault in ({"normaliser": "quantised"}, {"promote_tokens": 256}):
        found = check.reference(inputs, replace(MIMIC_HW_FULL, **fault))[0]
        assert metrics.relative_l2(found, mimic) > to_mimic
        assert metrics.relative_l2(found, model) > flips

    rounded = check.model_gate(model.bfloat16(), model, check.FLIPS_RAGGED)
    assert metrics.relative_l2(model.bfloat16(), model) < rounded < 4e-3
    twice = model + 2.0 * (model.bfloat16() - model)
    assert metrics.relative_l2(twice, model) > rounded
    assert check.truth_gate(model, truth, torch.bfloat16) > to_fp64
