"""profiles.engine.chunk without vLLM: prompts, the step that counts, the model in torch, pages."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
from profiles.engine import chunk, spec, study, truth
from profiles.model.attention import attend_plainly
from profiles.model.model import Latents


def test_prompts_of_a_step_begin_with_what_is_cached() -> None:
    first, second = chunk.prompts(0), chunk.prompts(1)
    assert first == chunk.prompts(0) and len(first) == chunk.REQUESTS
    assert all(len(prompt) == chunk.CACHED + chunk.NEW for prompt in first)
    assert [p[: chunk.CACHED] for p in first] == [p[: chunk.CACHED] for p in second]
    tails = [tuple(p[chunk.CACHED :][:8]) for p in (*first, *second)]
    assert len(set(tails)) == len(tails)
    assert chunk.CACHED % 64 == 0, "whole pages are found again"
    assert chunk.REQUESTS * chunk.NEW <= 32_768 and chunk.LONGEST >= chunk.CACHED + chunk.NEW + 64


class Scheduler:
    """Gives out one step of these (cached, new) requests."""

    def __init__(self, *requests: tuple[int, int]) -> None:
        self.requests = requests

    def schedule(self, throttle: bool = False) -> Any:
        new = [types.SimpleNamespace(req_id=str(i), num_computed_tokens=cached)
               for i, (cached, _) in enumerate(self.requests)]  # fmt: skip
        counts = {str(i): tokens for i, (_, tokens) in enumerate(self.requests)}
        return types.SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens=counts)


def engine_of(scheduler: Scheduler) -> Any:
    make = types.SimpleNamespace
    core = make(engine_core=make(scheduler=scheduler))
    return make(llm=make(llm_engine=make(engine_core=core)))


def test_a_step_of_another_kind_does_not_count() -> None:
    wanted = [(chunk.CACHED, chunk.NEW)] * chunk.REQUESTS
    scheduler = Scheduler(*wanted)
    with chunk.scheduled(engine_of(scheduler)) as steps:
        scheduler.schedule(False)
    chunk.check(steps)
    assert "schedule" not in vars(scheduler), "the class has its own again"
    for other in (wanted[:-1], [*wanted[:-1], (0, chunk.NEW)], [*wanted[:-1], (chunk.CACHED, 7)]):
        scheduler = Scheduler(*other)
        with chunk.scheduled(engine_of(scheduler)) as steps:
            scheduler.schedule()
        with pytest.raises(RuntimeError, match="8192 cached and 2048 new"):
            chunk.check(steps)
    with pytest.raises(RuntimeError, match="expected"):
        chunk.check([])


def test_the_model_sees_the_prefix_as_it_is_stored() -> None:
    """With nothing rounded it is one pass over all; what is stored otherwise is seen."""
    model = spec.random_model(2, 2)
    given, ids = [chunk.tokens(40, 1), chunk.tokens(33, 2)], [[5, 6, 7], [8, 9, 2]]
    whole = truth.log_probabilities(model, given, ids, attend_plainly)
    parts = (model, given, ids, attend_plainly)
    exact = chunk.log_probabilities(*parts, lambda latents: latents, cached=24)
    torch.testing.assert_close(exact, whole, rtol=1e-4, atol=1e-4)
    rounded = chunk.log_probabilities(*parts, chunk.as_ours, cached=24)
    kl = truth.divergence(rounded, whole)["kl"]
    assert 1e-5 < kl < 0.2
    empty = lambda x: Latents(torch.zeros_like(x.c_kv), torch.zeros_like(x.k_rope))
    nothing = chunk.log_probabilities(*parts, empty, cached=24)
    assert truth.divergence(nothing[:, :1], whole[:, :1])["kl"] > 10 * kl
    # tokens behind the prompt go through ``attend``, over the prefix as it was
    assert truth.divergence(nothing[:, 1:], whole[:, 1:])["kl"] > 0
    one = chunk.log_probabilities(model, given, [[0], [0]], attend_plainly, lambda x: x, cached=24)
    torch.testing.assert_close(one, whole[:, :1], rtol=1e-4, atol=1e-4)


def test_what_is_stored_is_what_kernels_give_back() -> None:
    torch.manual_seed(0)
    latents = Latents(torch.randn(1, 70, 512).bfloat16(), torch.randn(1, 70, 64).bfloat16())
    cache = snapmla.PagedKVCache.allocate(2, 64, device="cpu")
    slots = torch.arange(70)
    snapmla.append_kv(cache, latents.c_kv[0], latents.k_rope[0], slots)
    c_kv, k_rope = snapmla.fetch_dequant(cache, slots.int())
    found = chunk.as_ours(latents)
    assert found.c_kv.dtype == torch.bfloat16
    assert torch.equal(found.c_kv[0], c_kv) and torch.equal(found.k_rope[0], k_rope)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("kernel_cutlass__append_kv_Targetkvtensorptri8gmemalign16", "append"),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>", "append"),
        ("kernel_cutlass__ragged_Fp8Cachecontenttensorptri8gmemalign16", "prefix"),
        ("void vllm::gather_and_maybe_dequant_cache<__nv_bfloat16>", "prefix"),
        ("kernel_cutlass_kernel_dsl_kernelssm90mha_fwdMhaFwd_object_at__CopyAtom", "attention"),
        ("kernel_cutlass__list_tensorptri32gmemo1", "attention"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("void vllm::merge_attn_states_kernel<__nv_bfloat16>", "merge"),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_TNT", "projections"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel>", "copies"),
        ("void vllm::rms_norm_kernel<c10::BFloat16>", "rest"),
    ],
)
def test_kernels_of_the_step_are_told_apart(kernel: str, part: str) -> None:
    found = chunk.shares({kernel: 3.0, "other": 1.0})
    assert found["all"] == 4.0 and found[part] == (4.0 if part == "rest" else 3.0)


def results(kl: float) -> dict[str, Any]:
    """Of all engines; ours at ``kl``, fake at 1e-2."""
    row = lambda value: {p: {"kl": value, "agree": 0.9} for p in ("first", "decode")}
    parts = dict.fromkeys((*chunk.PARTS, "rest", "all"), 7.0)
    timed = {"prefill": "FLASH_ATTN 3", "ms": 12.5, "range_ms": [12.0, 13.0], "again": True,
             "parts": parts}  # fmt: skip
    engines = {f"chunk-{name}": row(kl) | timed for name in chunk.ENGINES}
    return {"fp32": row(0.0), "fake": row(1e-2)} | engines


def test_gates_and_page() -> None:
    assert [gate.passed for gate in chunk.gates(results(1.1e-2))] == [True, True]
    assert [gate.passed for gate in chunk.gates(results(1.2e-2))] == [False, False]
    assert [gate.passed for gate in chunk.gates({"fp32": results(1.0)["fp32"]})] == [None, None]
    page = chunk.page(["- here"], results(1.1e-2))
    assert "| chunk-snapmla-mha | FLASH_ATTN 3 | 12.50 | 12.00, 13.00 | yes |" in page
    assert page.count("| chunk-flashmla_bf16-fa3 |") == 2


def test_cases_have_names_of_their_own(tmp_path: Path) -> None:
    cases = [*chunk.cases(tmp_path), study.why_case(tmp_path)]
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.study in ("chunk", "why") for case in cases)
    assert {case.prefill for case in chunk.cases(tmp_path)} == {"CUSTOM", "FLASH_ATTN"}
