"""vLLM's own MLA layer, metadata builder and cache spec on CPU tensors, with our backend.

    PYTHONPATH=... python -m tests.support.vllm_driver CASE...

Runs in a process of its own, whose path has an unpacked vLLM (``tests/support/fetch_vllm.py``).
Kernels run on the software GPU.  What vLLM computes with CUDA outside of our backend (prefill
attention and merging by LSE) is done by torch; that, and what is compared, is
``tests/support/vllm_engine.py``.  Prints a line a case, last ``all right``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import snapmla.reference
from dsl_kernels.families import ARCHS, FAMILIES, MHA
from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm.__main__ import needed
from snapmla.runtime import variants
from snapmla.testing import metrics
from tests.support import on_blackwell
from tests.support.vllm_engine import (
    HEADS,
    LATENT,
    LENGTHS,
    NOPE,
    PAGE,
    ROPE,
    SCALE,
    SETTINGS,
    SLACK,
    TABLE,
    Engine,
    V,
    merged,
    prefill_backend,
    refused,
    without_pinning,
)


def with_past() -> Engine:
    """An engine whose requests have cached tokens."""
    engine = Engine()
    for request, length in enumerate(LENGTHS):
        engine.write(engine.kv, *engine.append(request, length))
    return engine


def decode_rows(
    engine: Engine, q: Tensor, got: Tensor, new: list[int], requests: list[int]
) -> list[tuple[Tensor, Tensor, int, int]]:
    """Each query token, what came, its request, and how many tokens it sees."""
    rows, at = [], 0
    for count, request in zip(new, requests, strict=True):
        length = len(engine.cached[request][0])
        for j in range(count):
            rows.append((q[at], got[at], request, length - (count - 1 - j)))
            at += 1
    return rows


def decode() -> None:
    """s_q of 1 and 2, different numbers of query tokens, the same plan again, padded slots."""
    engine = with_past()
    requests = [0, 1, 2]
    for new in ([1, 1, 1], [2, 2, 2], [3, 1, 2]):
        metadata = [engine.builder.build(0, engine.step(new, requests)) for _ in range(2)]
        assert metadata[0].decode.plan is metadata[1].decode.plan
        assert metadata[1].num_decodes == 3 and metadata[1].num_prefills == 0
        assert metadata[1].decode.s_q == (None if new[0] == 3 else new[0])
        q, got = engine.run(metadata[1], sum(new))
        engine.check(f"decode of {new}", decode_rows(engine, q, got, new, requests))
    captured = engine.builder.build_for_cudagraph_capture(engine.step([1, 1], [0, 2], padding=2))
    replayed = engine.builder.build(0, engine.step([1, 1], [1, 2], padding=2))
    assert replayed.decode.plan is captured.decode.plan
    assert engine.builder.plans.stats().pinned == 1
    q, got = engine.run(replayed, 4)
    engine.check("slots that pad a graph", decode_rows(engine, q[:2], got[:2], [1, 1], [1, 2]))
    assert got[2:].isfinite().all()


def prefill() -> None:
    """One request decodes, another is a chunk of prefill over a cached prefix."""
    engine, new = with_past(), 30
    c, r, slots = engine.append(2, new)
    step = engine.step([1, new], [0, 2], is_prefilling=torch.tensor([False, True]))
    metadata = engine.builder.build(0, step)
    assert (metadata.num_decodes, metadata.num_prefills) == (1, 1)
    engine.write(engine.kv, c, r, slots)
    q = torch.randn(1 + new, HEADS, NOPE + ROPE).bfloat16()
    out = torch.empty(1 + new, HEADS * V, dtype=torch.bfloat16)
    latents = torch.cat([torch.zeros(1, LATENT).bfloat16(), c])
    ropes = torch.cat([torch.zeros(1, ROPE).bfloat16(), r]).unsqueeze(1)
    with torch.no_grad():
        engine.layer.forward_impl(q, latents, ropes, engine.kv, metadata, output=out)
    got = out.view(1 + new, HEADS, V)
    engine.check("decode beside a prefill", decode_rows(engine, q[:1], got[:1], [1], [0]))
    truth = torch.stack([engine.truth(q[1 + j], 2, LENGTHS[2] + j + 1) for j in range(new)])
    error = metrics.relative_l2(got[1:].float(), truth)
    print(f"prefill over a cached prefix: relative L2 {error:.2e}")
    assert 5e-3 < error < 4.5e-2  # e4m3 of the prefix; its own tokens are exact to bf16


def own_prefill() -> None:
    """Our prefill backend, by vLLM's registry: a chunk over a cached prefix, beside a prompt that
    has none and so no keys in the chunk of context; K as two tensors, none of them a copy."""
    from vllm.model_executor.layers.attention import mla_attention as mla

    ours = registered_prefill()
    from snapmla.integrations.vllm import prefill as module

    seen: list[dict[str, Any]] = []
    real = module.mha_prefill

    def noted(q: Tensor, k: Tensor, v: Tensor, *where: Any, **options: Any) -> Any:
        same = k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        seen.append({"one projection": same, "lengths": where[1].diff().tolist(), **options})
        return real(q, k, v, *where, **options)

    with (
        mock.patch.object(mla, "get_mla_prefill_backend", lambda *_: ours),
        mock.patch.object(mla, "mask_empty_context", emptied, create=True),
        mock.patch.object(module, "mha_prefill", noted),
    ):
        engine, new, requests = Engine(), [1, 12, 30], [0, 1, 2]
        for request in (0, 2):
            engine.write(engine.kv, *engine.append(request, LENGTHS[request]))
        q, got = mixed_step(engine, new, requests)
    assert [call["causal"] for call in seen] == [True, False]
    assert seen[0]["lengths"] == new[1:] and seen[1]["lengths"][-1] == LENGTHS[2]
    for call in seen:
        assert call["one projection"] and call["k_rope"].shape[1:] == (1, ROPE)
    print(f"prefill by {ours.get_name()}: keys {[call['lengths'] for call in seen]}")
    engine.check("decode beside it", decode_rows(engine, q[:1], got[:1], [1], [0]))
    for request, first, past in ((1, 1, 0), (2, 13, LENGTHS[2])):
        count = new[request]
        rows = [engine.truth(q[first + j], request, past + j + 1) for j in range(count)]
        error = metrics.relative_l2(got[first : first + count].float(), torch.stack(rows))
        print(f"prompt of {count} tokens over {past} that are cached: relative L2 {error:.2e}")
        assert (5e-3 < error < 4.5e-2) if past else error < 6e-3
    given_results(engine, ours)


def registered_prefill() -> type:
    """The class, as vLLM's registry and selector have it; what it refuses is said."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig

    plugin.register()
    plugin.register()
    ours = MLAPrefillBackendEnum.CUSTOM.get_class()
    if hasattr(MLAPrefillBackendEnum, "register"):
        assert MLAPrefillBackendEnum[plugin.BACKEND].get_class() is ours
    deepseek, glm = (
        MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=ROPE, v_head_dim=v)
        for nope, v in ((NOPE, V), (192, 256))
    )
    asked = lambda dtype, dims, *arch: ours.validate_configuration(
        DeviceCapability(*arch), MLAPrefillSelectorConfig(dtype=dtype, mla_dimensions=dims)
    )
    assert asked(torch.bfloat16, deepseek, 9, 0) == []
    for wrong in (
        asked(torch.bfloat16, deepseek, 10, 0), asked(torch.float32, deepseek, 9, 0),
        asked(torch.bfloat16, glm, 9, 0),
    ):  # fmt: skip
        assert len(wrong) == 1
        print(f"prefill refused: {wrong[0]}")
    return ours


def emptied(lse: Tensor, out: Tensor, query_start: Tensor, context_start: Tensor) -> None:
    """vLLM's ``mask_empty_context``: what it would make of such rows, they must be already."""
    for i, keys in enumerate(context_start.diff().tolist()):
        rows = slice(int(query_start[i]), int(query_start[i + 1]))
        if not keys:
            assert torch.isneginf(lse[:, rows]).all() and not out[rows].any()


def mixed_step(engine: Engine, new: list[int], requests: list[int]) -> tuple[Tensor, Tensor]:
    """(queries, attention) of a step whose first request decodes and whose others are prompts."""
    added = [engine.append(request, count) for request, count in zip(requests[1:], new[1:])]
    waits = torch.tensor([False, *[True] * len(added)])
    metadata = engine.builder.build(0, engine.step(new, requests, is_prefilling=waits))
    assert (metadata.num_decodes, metadata.num_prefills) == (1, len(added))
    for tokens in added:
        engine.write(engine.kv, *tokens)
    q = torch.randn(sum(new), HEADS, NOPE + ROPE).bfloat16()
    out = torch.empty(sum(new), HEADS * V, dtype=torch.bfloat16)
    decoded = torch.zeros(1, LATENT).bfloat16(), torch.zeros(1, ROPE).bfloat16()
    latents, ropes = (torch.cat([decoded[i], *(t[i] for t in added)]) for i in range(2))
    with torch.no_grad():
        engine.layer.forward_impl(q, latents, ropes.unsqueeze(1), engine.kv, metadata, output=out)
    return q, out.view(sum(new), HEADS, V)


def given_results(engine: Engine, ours: type) -> None:
    """``out=``, and K as one tensor, as vLLM's own layers have it: the same bits."""
    from snapmla.integrations.vllm.prefill import KeyParts

    backend = engine.layer.prefill_backend.clone()
    assert isinstance(backend, ours) and backend.supports_out()
    begin = torch.tensor([0, 12, 12], dtype=torch.int32)  # the second request has none
    backend.prepare_metadata(mock.Mock(query_start_loc=begin, max_query_len=12))
    q, kv = torch.randn(12, HEADS, NOPE + ROPE).bfloat16(), torch.randn(12, HEADS, 256).bfloat16()
    nope, v, rope = kv[..., :NOPE], kv[..., NOPE:], torch.randn(12, 1, ROPE).bfloat16()
    out, lse = backend.run_prefill_new_tokens(q, KeyParts(nope, rope), v, True)
    assert out.shape == (12, HEADS, V) and lse.shape == (HEADS, 12) and lse.is_contiguous()
    whole, into = torch.cat([nope, rope.expand(-1, HEADS, -1)], -1), torch.zeros_like(out)
    found = backend.run_prefill_new_tokens(q, whole, v, False, out=into)
    assert found is into and torch.equal(into, out)
    with contextlib.suppress(NotImplementedError):
        backend.run_prefill_new_tokens(q, whole, v, False, output_scale=torch.ones(1))
        raise AssertionError("an output that is quantised")


def invariant() -> None:
    """A prompt of few tokens is prefill: alone, behind a long one, and beside what decodes."""
    from vllm import envs

    prompt = {"is_prefilling": torch.tensor([True])}
    for invariant, found in ((False, (1, 0)), (True, (0, 1))):
        with mock.patch.object(envs, "VLLM_BATCH_INVARIANT", invariant, create=True):
            engine = with_past()
        engine.append(1, 3)
        metadata = engine.builder.build(0, engine.step([3], [1], **prompt))
        print(f"a short prompt, batch-invariant {invariant}: {found[0]} decode, {found[1]} prefill")
        assert (metadata.num_decodes, metadata.num_prefills) == found
    engine.append(2, 30)
    for new, requests, decodes in (([30, 3], [2, 1], 0), ([1, 3], [0, 1], 1), ([1, 1], [0, 2], 2)):
        waits = torch.tensor([count > 1 for count in new])
        metadata = engine.builder.build(0, engine.step(new, requests, is_prefilling=waits))
        assert (metadata.num_decodes, metadata.num_prefills) == (decodes, 2 - decodes)


def ranks() -> None:
    """Decode context parallelism: two ranks hold tokens in turns, one of them none of a request."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    engine = Engine()  # whose backend can be imported now
    from snapmla.integrations.vllm import backend

    for interleave, new in ((1, [2, 2]), (64, [2, 2]), (16, [1, 3])):
        parts, requests = [], [0, 1]
        engine.cached = [(torch.empty(0, LATENT), torch.empty(0, ROPE)) for _ in LENGTHS]
        tokens = [engine.append(i, (100, 5)[i])[:2] for i in requests]
        q = torch.randn(sum(new), HEADS, LATENT + ROPE).bfloat16()
        for rank in range(2):
            kv = engine.new_cache()
            for i, (c, r) in zip(requests, tokens):
                mine = torch.arange(len(c)) // interleave % 2 == rank
                at = torch.arange(int(mine.sum()))
                slots = torch.tensor(TABLE[i])[at // PAGE] * PAGE + at % PAGE
                engine.write(kv, c[mine], r[mine], slots) if len(at) else None
            group = mock.Mock(return_value=mock.Mock(rank_in_group=rank))
            builder = engine.new_builder()
            builder.dcp_world_size, builder.cp_kv_cache_interleave_size = 2, interleave
            step = engine.step(new, requests)
            step.dcp_local_seq_lens = get_dcp_local_seq_lens(step.seq_lens, 2, rank, interleave)
            with mock.patch.object(backend, "get_dcp_group", group):
                metadata = builder.build(0, step)
            parts.append(engine.layer.impl.forward_mqa(q, kv, metadata, engine.layer))
        if interleave == 64:  # request 1 has 5 tokens: all are rank 0's
            assert (parts[1][1][new[0] :] == -torch.inf).all()
        out, _ = snapmla.merge_state(
            *(t for o, lse in parts for t in (o.unsqueeze(0), lse.mT.unsqueeze(0).contiguous()))
        )
        begin = torch.tensor([0, *new]).cumsum(0)
        for i in requests:
            c, r = (part[None] for part in engine.cached[i])
            mine = q[None, begin[i] : begin[i + 1]].float()
            # tokens lie at other places of a page than on one rank, and so have other scales
            truth, mimic = (
                snapmla.reference.reference_from_unquantised(
                    mine[..., :LATENT], mine[..., LATENT:], c, r, SCALE, config=config
                )[0][0].float()
                for config in (snapmla.reference.FP64, snapmla.reference.MIMIC)
            )
            error = metrics.relative_l2(out[0, begin[i] : begin[i + 1]].float(), truth)
            expected = metrics.relative_l2(mimic, truth)
            print(
                f"two ranks, turns of {interleave}, {new}, request {i}: relative L2 {error:.2e}, "
                f"one rank's predicted {expected:.2e}"
            )
            assert error <= expected * SLACK, i


def refusals() -> None:
    """Asserts that what would go past the backend stops the engine, in a sentence."""
    engine = Engine()
    passes = engine.config.compilation_config.pass_config
    builder = engine.layer.attn_backend.get_builder_cls()
    fp8 = staticmethod(lambda *_: torch.float8_e4m3fn)
    with mock.patch.object(passes, "fuse_rope_kvcache_cat_mla", True):
        refused("fuse_rope_kvcache_cat_mla", engine.new_builder)
    with mock.patch.object(builder, "determine_prefill_query_data_type", fp8):
        refused("use_prefill_query_quantization", engine.new_builder)
    refused_layers(engine)
    sparse_models(engine)


def refused_layers(engine: Engine) -> None:
    """Layers that write the cache themselves, beside one of vLLM's own."""
    from vllm.model_executor.layers.attention import mla_attention as mla

    class MultiHeadLatentAttention(torch.nn.Module):
        """A layer as Kimi-K3's: no MLAAttention."""

    class OwnForward(mla.MLAAttention):
        """A layer as DeepSeek-V3.2's: what is called is its own."""

        def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
            raise NotImplementedError

    class OwnSpec(mla.MLAAttention):
        """One that leaves alone what writes the cache."""

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return super().get_kv_cache_spec(vllm_config)

    kinds = [("k3", MultiHeadLatentAttention), ("mine", OwnForward)]
    if engine.has_specs:  # 0.26's wants operators of CUDA's to be imported
        from vllm.models.deepseek_v32.attention import DeepseekV32Attention

        kinds.append(("v32", DeepseekV32Attention))
    q = torch.zeros(1, HEADS, LATENT + ROPE).bfloat16()
    layer, known = engine.layer, engine.config.compilation_config.static_forward_context
    for name, kind in kinds:
        known[name] = kind.__new__(kind)
        torch.nn.Module.__init__(known[name])
        refused(f"layer {name} (", lambda name=name: engine.new_builder(layer.layer_name, name))
        refused(kind.__name__, lambda name=name: engine.new_builder(name))
        layer.impl._layer_is_known = False
        refused(kind.__name__, lambda name=name: layer.impl.forward_mqa(q, q, None, known[name]))
    layer.__class__ = OwnSpec
    engine.new_builder()
    layer.__class__ = mla.MLAAttention


def sparse_models(engine: Engine) -> None:
    """DSA: refused where vLLM chooses a backend, makes a layer's impl, and makes a builder."""
    from vllm.platforms.interface import DeviceCapability

    backend, layer = engine.layer.attn_backend, engine.layer
    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": engine.dtype,
        "block_size": PAGE, "use_mla": True, "has_sink": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder",
    }  # fmt: skip
    assert backend.validate_configuration(**asked, use_sparse=False) == []
    theirs, ours = backend.validate_configuration(**asked, use_sparse=True)
    print(f"reasons against: {theirs}; {ours}")
    assert "sparse attention (DSA" in ours
    options = {
        "num_heads": HEADS, "head_size": 576, "scale": SCALE, "num_kv_heads": 1,
        "alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": engine.dtype,
        "logits_soft_cap": None, "attn_type": "decoder", "kv_sharing_target_layer_name": None,
        "q_lora_rank": None, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE, "qk_head_dim": NOPE + ROPE, "v_head_dim": V,
        "kv_b_proj": engine.kv_b_proj, "indexer": None,
    }  # fmt: skip
    backend.get_impl_cls()(**options)
    with mock.patch.object(engine.config.model_config.hf_text_config, "index_topk", 7, create=True):
        refused("index_topk = 7", engine.new_builder)
        refused("index_topk = 7", lambda: backend.get_impl_cls()(**options))
    with mock.patch.object(layer, "use_sparse", True):
        refused(f"layer {layer.layer_name} is sparse", engine.new_builder)


def blackwell() -> None:
    """Runs on SM100: vLLM's selector takes the backend, whose decode runs that card's kernels."""
    from vllm.platforms.interface import DeviceCapability

    with on_blackwell.blackwell():
        decode()
        backend = Engine().layer.attn_backend
    for capability, fits in (((10, 0), True), ((10, 3), True), ((12, 0), False), ((8, 9), False)):
        card = DeviceCapability(*capability)
        assert backend.supports_compute_capability(card) is fits, capability


CASES: dict[str, Callable[[], None]] = {
    "blackwell": blackwell, "decode": decode, "prefill": prefill, "own_prefill": own_prefill,
    "invariant": invariant, "ranks": ranks, "refusals": refusals,
}  # fmt: skip


def main(names: list[str]) -> None:
    import vllm
    from vllm.model_executor.layers.attention import mla_attention as mla

    print(f"vLLM {vllm.__version__}, torch {torch.__version__}")
    plain, loaded, load = prefill_backend(), set(), variants.kernel

    def noted(spec: Any, *more: Any) -> Any:
        loaded.add(spec)
        return load(spec, *more)

    with (
        mock.patch.object(torch, "empty", without_pinning(torch.empty)),
        mock.patch.object(torch, "zeros", without_pinning(torch.zeros)),
        mock.patch.object(torch, "tensor", without_pinning(torch.tensor)),
        mock.patch.object(mla, "get_mla_prefill_backend", lambda *_: plain),
        mock.patch.object(mla, "merge_attn_states", merged),
        mock.patch.object(variants, "kernel", noted),
        SETTINGS,
    ):
        for name in names:
            torch.manual_seed(0)  # a case has the same numbers alone
            CASES[name]()
    # ``check`` asks for what is served by default; merge_states: of ``ranks`` here
    beside = ("merge_states", *(op for op, family in FAMILIES.items() if family.kind == MHA))
    asked = {spec for arch in ARCHS for spec in needed(arch)}
    unknown = {spec.name for spec in loaded - asked if spec.op not in beside}
    assert not unknown, f"`check` does not ask for {unknown}"
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
