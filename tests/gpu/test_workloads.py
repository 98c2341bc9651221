"""Every kernel that is there runs the small calls of its op on a real GPU.

The calls, their poison and their judges are those of the software GPU's self-check
(``snapmla.testing.workloads``); only the memory is the card's.  What is wider than that (lengths,
layouts, distributions, graphs) has files of its own here.
"""

from __future__ import annotations

import pytest
import torch

from dsl_kernels.spec import VariantSpec
from snapmla.runtime import env, variants
from snapmla.testing import on_card

pytestmark = pytest.mark.gpu
# RoPE of V3.2's first channels and V4's last ones, behind LayerNorm, RMSNorm or none; nobody builds
# them by default
FORMS_OF_INDEX_KEYS = (
    "bf16_ii64_neox", "bf16_ii64_hd1_neox_layer_csbf16", "bf16_ii64_interleaved_layer",
    "bf16_ii64_interleaved_rms_last", "f32_ii64_neox_rms", "f16_ii32_hd1_neox_last",
)  # fmt: skip


def there() -> list[str]:
    """Names of the variants that were built and linked, of all architectures."""
    folders = env.variant_dirs()
    return sorted({path.stem for folder in folders for path in folder.glob("*_sm*a.so")})


def test_small_calls_of_every_kernel() -> None:
    arch, wrong, seen = variants.arch_of(torch.device("cuda")), {}, 0
    for name in there():
        spec = VariantSpec.from_name(name)
        values = dict(spec.values)
        # builds that record events write into the workspace
        if spec.arch != arch or values.get("stamps", 0):
            continue
        result = on_card.check(spec)
        seen += 1
        if not result.passed:
            wrong[name] = result.summary
    assert seen and not wrong, wrong


@pytest.mark.parametrize("form", FORMS_OF_INDEX_KEYS)
def test_index_keys_behind_norm_and_rope(form: str) -> None:
    """By name, so that a record says whether they ran: the test above runs what it finds."""
    spec = VariantSpec.from_name(f"append_index_k_x{form}_sm90a")
    if variants.find(spec) is None and variants.jit_refusal():
        pytest.skip(f"{spec.name} is compiled when it is asked for, and nothing compiles here")
    result = on_card.check(spec)
    assert result.passed, result.summary
