"""SGLang's own pool, layers, forward batches and hooks, with our plugin, on CPU tensors.

    PYTHONPATH=... python -m tests.support.sglang_driver [--device=cuda] CASE...

Runs in a process of its own, whose path has an unpacked SGLang (``tests/support/fetch_sglang.py``);
modules that it imports for a GPU are shells.  Kernels run on the software GPU, or on a real one.
Multi-head attention, which SGLang computes by FlashAttention 3, is done by torch here.  What the
cases run on, and what is compared, is ``tests/support/sglang_engine.py``.  Prints a line a case,
last ``all right``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from snapmla.integrations import sglang as plugin
from snapmla.testing import metrics
from tests.support import fetch_sglang, on_blackwell, shells
from tests.support.sglang_engine import (
    DRAFTS,
    HEADS,
    LATENT,
    LAYERS,
    LENGTHS,
    NOPE,
    PAGE,
    ROPE,
    SCALE,
    Engine,
    MultiHead,
    V,
    device,
    settings,
)

MODEL = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 256,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "num_hidden_layers": LAYERS,
    "kv_lora_rank": LATENT, "q_lora_rank": None, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": V, "intermediate_size": 512,
    "moe_intermediate_size": 128, "n_routed_experts": 4, "first_k_dense_replace": LAYERS,
    "vocab_size": 512, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
}  # fmt: skip


def decode() -> None:
    """Q and K in two parts or joined; one plan for a shape; slots that pad a batch."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, new = Engine(), [1, 1, 1]
    plans = []
    for joined in (False, True):
        batch = engine.batch(ForwardMode.DECODE, new)
        engine.backend.init_forward_metadata(batch)
        engine.run(f"decode, joined {joined}", batch, new, joined=joined)
        plans.append(engine.backend.forward_metadata.plan)
        engine.advance(1)
    assert plans[0] is plans[1]
    batch = engine.batch(ForwardMode.DECODE, new, padding=2)
    engine.backend.init_forward_metadata(batch)
    engine.run("decode beside two slots that pad the batch", batch, new)
    idle = engine.batch(ForwardMode.IDLE, [0, 0, 0])
    idle.batch_size = 0
    engine.backend.init_forward_metadata(idle)
    q = torch.zeros(0, HEADS * LATENT, dtype=torch.bfloat16)
    assert engine.backend.forward(q, None, None, engine.layers[0], idle).shape == q.shape


def graphs() -> None:
    """The calls around a capture and its replays: what a graph reads keeps its place."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, new, backend = Engine(), [1, 1, 1], None
    backend = engine.backend
    backend.init_cuda_graph_state(5, 5)
    assert backend.get_cuda_graph_seq_len_fill_value() == 0
    captured = engine.batch(ForwardMode.DECODE, new, padding=2)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    backend.init_forward_metadata_in_graph(captured)
    held = backend.forward_metadata
    places = [held.lengths.data_ptr(), held.block_table.data_ptr()]
    big = engine.batch(ForwardMode.DECODE, new, padding=9)  # outside of graphs, and larger
    backend.init_forward_metadata(big)
    assert backend.forward_metadata.lengths.data_ptr() not in places
    engine.run("decode outside of graphs", big, new)
    engine.advance(1)
    replayed = engine.batch(ForwardMode.DECODE, new, padding=2)
    backend.init_forward_metadata_out_graph(replayed)
    step = backend.forward_metadata
    assert step.plan is held.plan and backend.plans.stats().pinned == 1
    assert [step.lengths.data_ptr(), step.block_table.data_ptr()] == places
    # a graph calls with what it was captured with
    backend.forward_metadata = held
    engine.run("decode as a graph replays it", replayed, new)
    try:
        backend.init_forward_metadata_out_graph(engine.batch(ForwardMode.DECODE, new, padding=3))
    except RuntimeError as error:
        print(f"refused: {error}")
    else:
        raise AssertionError("a graph larger than its tables")


def capture() -> None:
    """A graph of decode, captured once and replayed for three steps; on a real GPU only."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, new = Engine(), [1, 1, 1]
    backend, layer = engine.backend, engine.layers[0]
    backend.init_cuda_graph_state(5, 5)
    batch = engine.batch(ForwardMode.DECODE, new, padding=2)
    q = torch.zeros(5, HEADS, LATENT + ROPE).bfloat16()
    k, k_rope = (torch.zeros(5, 1, n).bfloat16() for n in (LATENT, ROPE))
    call = lambda: backend.forward(
        q[..., :LATENT], k, k, layer, batch, q_rope=q[..., LATENT:], k_rope=k_rope
    )
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    call()  # what is loaded at a first call is not captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for step in range(3):
        now = engine.batch(ForwardMode.DECODE, new, padding=2)
        batch.seq_lens.copy_(now.seq_lens)
        batch.out_cache_loc.copy_(now.out_cache_loc)
        q.copy_(torch.randn(q.shape))
        for i, n in enumerate(engine.lengths):
            fresh = engine.new(layer, i, n, n + 1)
            k[i], k_rope[i] = fresh[0][0], fresh[1][0]
        backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        rows = out.view(-1, HEADS, LATENT)
        seen = [(q[i], rows[i], 0, i, n + 1) for i, n in enumerate(engine.lengths)]
        engine.check(f"replay {step} of a graph", seen)
        assert not rows[3:].any(), "a slot that pads a batch sees no token"
        engine.advance(1)


def verify() -> None:
    """Three drafts of each request, of which accepted ones move."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, new = Engine(), [DRAFTS] * 3
    for padding in (0, 1):
        batch = engine.batch(ForwardMode.TARGET_VERIFY, new, padding, counted=False)
        engine.backend.init_forward_metadata(batch)
        engine.run(f"verify of {DRAFTS} drafts, padding {padding}", batch, new)
    n = engine.lengths[0]
    of, to = engine.slots(0, n + 2, n + 3), engine.slots(0, n, n + 1)
    moved(engine, of, to)


def drafts() -> None:
    """A draft model: its extend by a window of tokens, its steps."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from snapmla.integrations.sglang.backend import SnapMLAMultiStepBackend

    engine, new = Engine(), [DRAFTS] * 3
    batch = engine.batch(ForwardMode.DRAFT_EXTEND_V2, new)  # the window is counted
    engine.backend.init_forward_metadata(batch)
    engine.run("draft extend", batch, new)
    steps = SnapMLAMultiStepBackend(engine.runner, 1, DRAFTS)
    batch = engine.batch(ForwardMode.DECODE, [1, 1, 1], counted=False)
    steps.init_forward_metadata(batch)
    first = [each.forward_metadata.plan for each in steps.attn_backends]
    assert len(first) == DRAFTS - 1 and first[0] is not first[1]
    for each in steps.attn_backends:
        batch.out_cache_loc = torch.cat([engine.slots(i, n, n + 1)
                                         for i, n in enumerate(engine.lengths)])  # fmt: skip
        engine.run(f"draft step {each.draft_step}", batch, [1, 1, 1], backend=each)
        engine.advance(1)


def moved(engine: Engine, of: Tensor, to: Tensor) -> None:
    """Rows and scales go together: within the pool, and to the CPU and back."""
    layer, pool = engine.layers[0], engine.pool
    before = pool.get_mla_kv_buffer(layer, of)
    assert all(part.isfinite().all() for part in before)
    pool.move_kv_cache(to, of)
    same(before, pool.get_mla_kv_buffer(layer, to))
    saved = pool.get_cpu_copy(of)
    for rows, scale in zip(pool.kv_buffer, pool.kv_scale_buffer, strict=True):
        rows[of], scale[of] = 0, 0
    pool.load_cpu_copy(saved, of)
    same(before, pool.get_mla_kv_buffer(layer, of))
    print("rows and scales move together")


def same(one: Any, other: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def extend() -> None:
    """Absorbed extends of as many tokens as they like; the same in any chunks if asked for."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, new = Engine(), [5, 40, 2]
    batch = engine.batch(ForwardMode.EXTEND, new)
    engine.backend.init_forward_metadata(batch)
    assert engine.backend.forward_metadata is None, "only an absorbed layer needs it"
    engine.run(f"absorbed extend of {new}", batch, new)
    with settings(enable_deterministic_inference=True):
        invariant()


def invariant() -> None:
    """Deterministic inference: a request's rows do not depend on its batch or on its chunks."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, chunks = Engine(), ([40], [7, 33])
    layer, queries = engine.layers[0], torch.randn(40, HEADS, LATENT + ROPE).bfloat16()
    found = []
    for of_request in chunks:
        engine.lengths, rows = list(LENGTHS), []
        for m in of_request:
            new = [m, 1, 3] if len(of_request) == 1 else [m, 0, 0]  # beside others, or alone
            batch = engine.batch(ForwardMode.EXTEND, new)
            q = torch.randn(sum(new), HEADS, LATENT + ROPE).bfloat16()
            at = engine.lengths[0] - LENGTHS[0]
            q[:m] = queries[at : at + m]
            parts = [engine.new(layer, i, engine.lengths[i], engine.lengths[i] + n)
                     for i, n in enumerate(new)]  # fmt: skip
            k, k_rope = (torch.cat(each) for each in zip(*parts, strict=True))
            engine.backend.init_forward_metadata(batch)
            out = engine.backend.forward(
                q[..., :LATENT], k, k, layer, batch, q_rope=q[..., LATENT:], k_rope=k_rope
            )
            rows.append(out[:m])
            engine.lengths = [n + more for n, more in zip(engine.lengths, new, strict=True)]
        found.append(torch.cat(rows))
    assert torch.equal(*found)
    print(f"deterministic inference: chunks of {chunks[0]} and {chunks[1]} give the same bits")


def prefix() -> None:
    """A cached prefix for multi-head attention, which is another backend's."""
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine, new = Engine(), [5, 40, 2]
    layer = engine.layers[1]
    where = torch.cat([engine.slots(i, 0, n) for i, n in enumerate(LENGTHS)])
    cached = torch.cat([engine.latents[1, i, :n] for i, n in enumerate(LENGTHS)])
    for dtype in (torch.int32, torch.int64):
        c, r = engine.pool.get_mla_kv_buffer(layer, where.to(dtype), torch.bfloat16)
        assert c.shape == (len(where), 1, LATENT) and r.shape == (len(where), 1, ROPE)
        errors = [metrics.relative_l2(got[:, 0].float(), cached[:, part].float())
                  for got, part in ((c, slice(LATENT)), (r, slice(LATENT, None)))]  # fmt: skip
        print(f"prefix fetched by {dtype}: relative L2 {errors[0]:.2e} and {errors[1]:.2e}")
        assert 1e-2 < errors[0] < 4e-2 and errors[1] < 8e-3
    heads = RadixAttention(
        num_heads=HEADS, head_dim=NOPE + ROPE, scaling=SCALE, num_kv_heads=HEADS, layer_id=1,
        v_head_dim=V,
    )  # fmt: skip
    up = torch.randn(LATENT, HEADS, NOPE + V).bfloat16() * LATENT**-0.5
    batch = engine.batch(ForwardMode.EXTEND, new)
    batch.mha_return_lse = True
    engine.backend.init_forward_metadata(batch)
    q = torch.randn(sum(new), HEADS, NOPE + ROPE).bfloat16()

    def attend(latent: Tensor, rope: Tensor, of_prefix: bool) -> Any:
        k, v = torch.einsum("nr,rhd->nhd", latent, up).split([NOPE, V], -1)
        k = torch.cat([k, rope[:, None].expand(-1, HEADS, -1)], -1)
        batch.set_attn_attend_prefix_cache(of_prefix)
        return engine.backend.forward(q, k, v, heads, batch, save_kv_cache=False)

    fresh = torch.cat([engine.latents[1, i, n : n + m]
                       for i, (n, m) in enumerate(zip(LENGTHS, new, strict=True))])  # fmt: skip
    own = attend(*fresh.split([LATENT, ROPE], -1), False)
    past = attend(c[:, 0], r[:, 0], True)
    exact = attend(*cached.split([LATENT, ROPE], -1), True)
    total = torch.logaddexp(own[1], past[1])
    out = sum(o.float() * (lse - total).exp()[..., None] for o, lse in (own, past))
    total = torch.logaddexp(own[1], exact[1])
    want = sum(o.float() * (lse - total).exp()[..., None] for o, lse in (own, exact))
    error = metrics.relative_l2(out, want)
    print(f"multi-head extend over it: relative L2 {error:.2e}")
    assert 2e-3 < error < 4e-2


def hooks() -> None:
    """Checks what SGLang asks of its own functions: names, bytes of a token, classes."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.mem_cache import kv_cache_configurator as configurators
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MLATokenToKVPool
    from sglang.srt.model_executor import pool_configurator
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    from snapmla.integrations.sglang.pool import SnapMLATokenToKVPool

    for names in (
        choices.ATTENTION_BACKEND_CHOICES, choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
        forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS,
    ):  # fmt: skip
        assert names.count(plugin.BACKEND) == 1
    made = configurator()
    resolve = lambda kind, default: made._resolve_kv_pool_class(kind=kind, default=default)
    count = lambda dtype: configurators.calculate_mla_kv_cache_dim(
        model_config=made.model_config, kv_cache_dtype=dtype
    )
    assert resolve("mla", MLATokenToKVPool) is SnapMLATokenToKVPool
    assert resolve("dsa", DSATokenToKVPool) is DSATokenToKVPool
    assert (count(torch.float8_e4m3fn), count(torch.bfloat16)) == (644, 576)
    sizer = pool_configurator.DefaultPoolConfigurator.__new__(
        pool_configurator.DefaultPoolConfigurator
    )
    size = sizer._compute_cell_size(made, LAYERS)
    pool = made._build_mla_kv_pool(
        max_total_num_tokens=10 * PAGE, mla_pool_class=resolve("mla", MLATokenToKVPool)
    )
    assert type(pool) is SnapMLATokenToKVPool
    assert pool.get_kv_size_bytes() == 11 * PAGE * size == 11 * PAGE * LAYERS * 644
    print(f"bytes of a token: {size} in {LAYERS} layers")
    with settings(attention_backend="triton"):
        assert resolve("mla", MLATokenToKVPool) is MLATokenToKVPool
        assert count(torch.float8_e4m3fn) == 576
    forms_of_attention()
    draft_backends()


def configurator() -> Any:
    """SGLang's, of a small model."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_server_args

    made = KVCacheConfigurator.__new__(KVCacheConfigurator)
    fields = dict(
        use_mla_backend=True, mambaish_config=None, is_hybrid_swa=False, is_draft_worker=False,
        server_args=get_server_args(), kv_cache_dtype=torch.float8_e4m3fn, kv_shard_rank=None,
        layer_info=SimpleNamespace(num_effective_layers=LAYERS, start_layer=0, end_layer=LAYERS),
        device=device(),
        model_config=SimpleNamespace(
            kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
            hf_config=SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]),
        ),
    )  # fmt: skip
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def forms_of_attention() -> None:
    """Multi-head for prompts and long prefixes, absorbed for the rest."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    handler = AttentionBackendRegistry.get_handler(plugin.BACKEND)
    layer = SimpleNamespace(
        chunked_prefix_cache_threshold=8192, disable_chunked_prefix_cache=False,
        qk_rope_head_dim=ROPE, flashinfer_mla_disable_ragged=False,
    )  # fmt: skip
    engine, found = Engine(), []
    for mode, prefix in (
        (ForwardMode.DECODE, 100), (ForwardMode.TARGET_VERIFY, 100), (ForwardMode.EXTEND, 0),
        (ForwardMode.EXTEND, 100), (ForwardMode.EXTEND, 10**6),
    ):  # fmt: skip
        batch = engine.batch(mode, [3, 3, 3])
        batch.extend_prefix_lens_cpu = [prefix, 0, 0]
        batch.seq_lens_cpu = torch.tensor([prefix + 3, 3, 3])
        found.append(handler(layer, batch).name)
    assert found == ["MLA", "MLA", "MHA_ONE_SHOT", "MLA", "MHA_CHUNKED_KV"], found
    with settings(enable_deterministic_inference=True):
        assert handler(layer, batch).name == "MLA"


def draft_backends() -> None:
    """SGLang's factory makes ours, of a draft model's steps and of its extend."""
    from sglang.srt.speculative import draft_utils

    from snapmla.integrations.sglang import backend

    runner = Engine(draft_attention_backend=None).runner
    factory = draft_utils.DraftBackendFactory(runner, 1, DRAFTS)
    with mock.patch.object(draft_utils, "_assert_draft_needs_no_conv_sidecar"):
        steps = factory._create_backend(
            "decode_attention_backend", {}, "{backend_type}", stamps_children=True
        )
    assert type(steps) is backend.SnapMLAMultiStepBackend
    assert {each.decode_attention_backend_str for each in steps.attn_backends} == {plugin.BACKEND}
    assert type(factory._create_backend("prefill_attention_backend", {}, "")) is (
        backend.SnapMLABackend
    )


def refusals() -> None:
    """A server's settings, resolved and checked by SGLang; models, layers and calls."""
    from sglang.srt.arg_groups.model_override_base import resolved_view
    from sglang.srt.server_args import ServerArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))

        def server(**fields: Any) -> Any:
            given = {
                "model_path": folder, "device": device(), "skip_tokenizer_init": True,
                "kv_cache_dtype": "fp8_e4m3", "attention_backend": plugin.BACKEND, **fields,
            }  # fmt: skip
            found = ServerArgs(**given)
            found.resolve_once()
            found.check_server_args()
            return resolved_view(found)

        assert server().page_size == PAGE
        assert server(attention_backend="triton", kv_cache_dtype="auto").page_size != PAGE
        for fields in (
            {"kv_cache_dtype": "auto"}, {"page_size": 32}, {"disaggregation_mode": "decode"},
            {"enable_hierarchical_cache": True},
            {"attention_backend": "triton", "decode_attention_backend": plugin.BACKEND},
        ):  # fmt: skip
            refused(lambda fields=fields: server(**fields))
    made = configurator()
    resolve = lambda: made._resolve_kv_pool_class(kind="mla", default=object)
    for change in (
        {"is_hybrid_swa": True},
        {"model_config": SimpleNamespace(kv_lora_rank=256, qk_rope_head_dim=32, hf_config=None)},
    ):
        with mock.patch.multiple(made, **change):
            refused(resolve)
    made.model_config.hf_config = SimpleNamespace(
        architectures=["DeepseekV32ForCausalLM"], index_topk=2048
    )
    refused(resolve)
    engine = Engine()
    for call in (
        lambda: engine.pool.get_key_buffer(0), lambda: engine.pool.get_value_buffer(0),
        engine.pool.get_contiguous_buf_infos, engine.pool.get_device_pool_infos,
    ):  # fmt: skip
        refused(call, NotImplementedError)


def refused(call: Callable[[], Any], kind: type[Exception] = ValueError) -> None:
    try:
        call()
    except kind as error:
        assert str(error).startswith("snapmla: "), error
        print(f"refused: {error}")
    else:
        raise AssertionError("not refused")


def blackwell() -> None:
    """Runs on SM100: its kernels, and multi-head prompts by SGLang's fa4."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    there = {"fa3": None, "fa4": MultiHead}
    with on_blackwell.blackwell(), mock.patch.dict(ATTENTION_BACKENDS, there):
        decode()
        assert isinstance(Engine().backend.multi_head, MultiHead)


CASES: dict[str, Callable[[], None]] = {
    "blackwell": blackwell, "decode": decode, "graphs": graphs, "verify": verify,
    "drafts": drafts, "extend": extend, "prefix": prefix, "hooks": hooks, "refusals": refusals,
}  # fmt: skip


def main(words: list[str]) -> None:
    names = [word for word in words if not word.startswith("--")] or list(CASES)
    if "--device=cuda" in words:
        torch.set_default_device("cuda")
        names += ["capture"]
    shells.install(fetch_sglang.ABSENT)
    import sglang
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    print(f"SGLang {sglang.__version__}, torch {torch.__version__}")
    plugin.register()
    plugin.register()  # every process does, some twice
    HookRegistry.apply_hooks()
    failed = []
    with mock.patch.dict(ATTENTION_BACKENDS, {"fa3": MultiHead}), settings():
        for name in names:
            torch.manual_seed(0)  # a case has the same numbers alone
            try:
                (CASES | {"capture": capture})[name]()
            except Exception:  # one run on a machine that is lent says what is wrong with each
                print(f"case {name}:\n{traceback.format_exc()}", flush=True)
                failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1:])
