"""``snapmla.integrations.vllm.sparse`` over stand-ins for vLLM's modules: plans, pieces, rows of a
pool that layers share, and one call of both kinds of release.

vLLM's own classes drive it in ``tests/host/test_vllm.py``, where they are there.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from snapmla.integrations import vllm as plugin
from snapmla.integrations.vllm import surface
from snapmla.testing.ds_mla import quantize_ds_mla_rows
from snapmla.testing.record_reference import RecordCall, record_decode_reference
from tests.support.needs import needs_compiler

HEADS, TOPK, SCALE = 3, 64, 192**-0.5
NEWER, OLDER = "0.33", "0.26"
OURS = ("sparse", "indexer", "backend", "prefill")


class Base:
    """A base class of vLLM's, which takes anything."""

    need_to_return_lse_for_decode = True
    kv_lora_rank = 512
    scale = SCALE

    def __class_getitem__(cls, item: Any) -> type:
        return cls

    def __init__(self, *given: Any, **named: Any) -> None: ...


class NewerImpl(Base):
    """Turns positions into rows and asks for a kernel, as newer releases do."""

    def forward_mqa(self, q: Any, kv: Any, step: Any, layer: Any) -> Any:
        return self._forward_mqa_kernel(
            q, kv, step.rows, step.counts, layer=layer, block_size=64, is_decode=True
        )

    def _forward_mqa_kernel(self, *_: Any, **__: Any) -> Any: ...


class OlderImpl(Base):
    def forward_mqa(self, q: Any, kv: Any, step: Any, layer: Any) -> Any: ...


@pytest.fixture(params=[NEWER, OLDER])
def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module over the names of vLLM that it imports, of either kind of release."""
    make = types.SimpleNamespace
    convert = lambda req, table, chosen, **_: (chosen, (chosen >= 0).sum(1, dtype=torch.int32))
    impl = NewerImpl if request.param == NEWER else OlderImpl
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"envs": make(VLLM_BATCH_INVARIANT=False)},
        "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda f: f},
        "vllm.distributed": {"get_dcp_group": None},
        "vllm.distributed.parallel_state": {"get_dcp_group": None},
        "vllm.forward_context": {"get_forward_context": None},
        "vllm.model_executor.layers": {"sparse_attn_indexer": make(sparse_attn_indexer=max)},
        "vllm.model_executor.layers.attention": {
            "mla_attention": make(
                **dict.fromkeys(
                    ("MLACommonBackend", "MLACommonMetadata", "MLACommonImpl", "MLAAttention",
                     "MLACommonMetadataBuilder", "MLACommonDecodeMetadata"), Base,
                ),
                QueryLenSupport=make(VARLEN=1), ops=make(),
            ),
            "sparse_mla_attention": make(
                SparseMLACommonImpl=impl, SparseMLACommonMetadataBuilder=Base
            ),
        },
        "vllm.platforms": {"current_platform": make(dispatch_key="CPU")},
        "vllm.utils.torch_utils": {"_resolve_layer_name": None},
        "vllm.v1.attention.backend": {
            "AttentionBackend": Base, "AttentionMetadata": Base,
            "AttentionCGSupport": make(UNIFORM_BATCH=1), "AttentionType": make(DECODER="decoder"),
        },
        "vllm.v1.attention.backends.mla": {
            "sparse_utils": make(triton_convert_req_index_to_global_index=convert)
        },
        "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": None},
        "vllm.v1.attention.backends.mla.prefill.base": {
            "MLADimensions": make, "MLAPrefillBackend": Base
        },
    }  # fmt: skip
    for name, content in contents.items():
        module = types.ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    for part in OURS:
        monkeypatch.delitem(sys.modules, f"{plugin.__name__}.{part}", raising=False)
    module = importlib.import_module(f"{plugin.__name__}.sparse")
    assert (request.param == NEWER) == module.ASKS_FOR_KERNEL
    yield module
    for part in OURS:
        sys.modules.pop(f"{plugin.__name__}.{part}", None)
        vars(plugin).pop(part, None)


def new_impl(ours: Any, **change: Any) -> Any:
    known = {"head_size": 576, "kv_cache_dtype": "fp8_ds_mla", "indexer": None} | change
    return ours.SnapMLASparseImpl(
        HEADS, known["head_size"], SCALE, 1, None, None, known["kv_cache_dtype"], None, "decoder",
        None, indexer=known["indexer"],
    )  # fmt: skip


def test_names(ours: Any) -> None:
    newer = ours.ASKS_FOR_KERNEL
    backend = ours.SnapMLASparseBackend
    assert backend.get_name() == (plugin.SPARSE_BACKEND if newer else "FLASHMLA_SPARSE")
    assert backend.get_impl_cls() is ours.SnapMLASparseImpl and backend.supports_dcp() == newer
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8_ds_mla"):
        new_impl(ours, kv_cache_dtype="auto")
    with pytest.raises(ValueError, match="has None heads"):
        new_impl(ours, indexer=types.SimpleNamespace())
    asked = lambda dtype: (576, torch.bfloat16, dtype, 64, True, False, True, False, None)
    assert backend.supports_combination(*asked("fp8_ds_mla")) is None
    assert str(backend.supports_combination(*asked("snapmla"))).endswith(
        "start vLLM with --kv-cache-dtype fp8_ds_mla"
    )


def test_a_draft_layer_on_vllms_backend_is_told_once(
    ours: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 0.33; in 0.26 a draft finds ours by the name of vLLM's own."""
    config = types.SimpleNamespace(
        attention_config=types.SimpleNamespace(backend=types.SimpleNamespace(name="X_SPARSE")),
        speculative_config=types.SimpleNamespace(method="mtp", attention_backend=None),
    )
    monkeypatch.setattr(ours, "get_current_vllm_config_or_none", lambda: config)
    with caplog.at_level(logging.WARNING, surface.LOGGER):
        new_impl(ours), new_impl(ours)
    lines = [each.getMessage() for each in caplog.records if each.name == surface.LOGGER]
    assert len(lines) == (1 if ours.ASKS_FOR_KERNEL else 0)
    assert all('add "attention_backend": "X_SPARSE" to' in line for line in lines)


@pytest.mark.parametrize(
    ("capability", "pages", "rows"),
    [((9, 0), True, True), ((10, 0), True, False), ((10, 3), True, False), ((8, 9), False, False),
     ((12, 0), False, False)],
)  # fmt: skip
def test_cards_that_a_backend_serves(
    ours: Any, capability: tuple[int, int], pages: bool, rows: bool
) -> None:
    """Our own cache wherever there are kernels; rows of 656 bytes on SM90."""
    asked = types.SimpleNamespace(major=capability[0], minor=capability[1])
    dense = sys.modules[f"{plugin.__name__}.backend"].SnapMLABackend
    assert dense.supports_compute_capability(asked) is pages
    assert ours.SnapMLASparseBackend.supports_compute_capability(asked) is rows


@needs_compiler
def test_pieces(ours: Any) -> None:
    """One call, but where lists are cut at fixed places, whose partial rows take memory."""
    plain = ours.Plans(HEADS, TOPK, torch.device("cpu"), False)
    assert list(plain.pieces(7)) == [slice(0, 7)] and list(plain.pieces(0)) == []
    assert plain.get(7) is plain.get(7) and plain.get(7).topk == TOPK and plain.pinned == 0
    cut = ours.Plans(128, TOPK, torch.device("cpu"), True)
    assert list(cut.pieces(300)) == [slice(0, 128), slice(128, 256), slice(256, 300)]
    cut.pin(140)
    assert cut.pinned == 2  # of 128 and of 12


def test_rows_of_a_pool_that_layers_share(ours: Any) -> None:
    """Numbered through the pool, those of other layers between; pages keep their slots."""
    pool = torch.zeros(3, 2, 64, 656, dtype=torch.uint8)
    mine, impl = pool[:, 1], new_impl(ours)
    rows, pages = impl._cache(mine, rows=True), impl._cache(mine, rows=False)
    assert rows is impl._cache(mine, rows=True) and rows is not pages
    assert rows.kv.shape == (2 * 128 + 64, 1, 1, 656) and pages.kv.shape == (3, 64, 1, 656)
    mine[2, 5] = 7
    assert (rows.kv[2 * 128 + 5] == 7).all() and int((rows.kv == 7).sum()) == 656
    odd = torch.zeros(3, 64 * 656 + 16, dtype=torch.uint8)[:, : 64 * 656].unflatten(1, (64, 656))
    with pytest.raises(ValueError, match="42000 bytes apart, which is no multiple of 656"):
        impl._cache(odd, rows=True)


@needs_compiler
def test_a_step(ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query tokens in two parts, lists of all, some and no entries; two pieces, as in one call."""
    impl, newer = new_impl(ours), ours.ASKS_FOR_KERNEL
    impl.topk_indices_buffer = torch.full((9, TOPK), -1, dtype=torch.int32)
    pool = torch.full((2, 2, 64, 656), 0xFF, dtype=torch.uint8)
    kv = pool[:, 0]
    tokens = torch.randn(1, 64, 576)
    kv[0] = quantize_ds_mla_rows(tokens[..., :512], tokens[..., 512:])[0]
    rows, counts = impl.topk_indices_buffer[:3], torch.tensor([64, 5, 0], dtype=torch.int32)
    for row, count in zip(rows, counts):
        row[:count] = torch.randperm(64)[:count].sort().values
        if newer:  # which gives numbers: what is behind them is nobody's
            row[count:] = 1
    parts = torch.randn(3, HEADS, 512).bfloat16(), torch.randn(3, HEADS, 64).bfloat16()
    step = types.SimpleNamespace(
        rows=rows, counts=counts, req_id_per_token=torch.zeros(3), block_table=None, block_size=64,
        plans=ours.Plans(HEADS, TOPK, torch.device("cpu"), True), chosen=None,
    )  # fmt: skip
    out, lse = impl.forward_mqa(parts, kv, step, None)
    call = RecordCall(torch.cat(parts, -1), kv, rows, counts, SCALE)
    want, want_lse = record_decode_reference(call)
    assert ((out.double() - want).abs() <= 0.01 * want.abs().clamp(min=1)).all()
    assert torch.isneginf(lse[2]).all() and not out[2].any() and lse.shape == (3, HEADS)
    assert torch.allclose(lse[:2].double(), want_lse.T[:2], atol=1e-3)
    step.plans.piece = 2
    by_head = parts[0].transpose(0, 1).contiguous().transpose(0, 1), parts[1]
    for chosen, query in ((None, parts), (counts, parts), (counts, by_head)):
        step.chosen, step.rows, step.counts = chosen, rows, counts
        again = impl.forward_mqa(query, kv, step, None)
        assert all(torch.equal(a, b) for a, b in zip(again, (out, lse)))
    impl.sinks = torch.tensor([0.5, -1.0, 8.0])  # weighs in results alone
    sunk, same = impl.forward_mqa(parts, kv, step, None)
    assert torch.equal(same, lse)
    weighed = out[:2].float() / (1 + (impl.sinks - lse[:2]).exp())[..., None]
    assert torch.allclose(sunk[:2].float(), weighed, rtol=0.01, atol=1e-3) and not sunk[2].any()
    assert newer == hasattr(ours.sparse.SparseMLACommonImpl, "_forward_mqa_kernel")


def test_where_choices_are_slots(ours: Any) -> None:
    """Where all of the step's attention is ours and has the indexer's pages; else positions."""
    counts = sys.modules[f"{plugin.__name__}.indexer"].Counts
    slots, other = torch.zeros(3, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    pages = torch.zeros(2, 64, 132, dtype=torch.uint8)
    memory = torch.zeros(8, dtype=torch.int32)

    def reader(**change: Any) -> Any:
        known = {"slots": True, "slot_mapping": slots, "block_size": 64, "chosen": None}
        plans = types.SimpleNamespace(counts=memory)
        return types.SimpleNamespace(**known | change, plans=plans)

    def told(*readers: Any) -> Any:
        step = types.SimpleNamespace(slot_mapping=slots)
        steps = {str(i): each for i, each in enumerate((*readers, step, *readers))}
        found = counts.of({"kv_cache": pages}, step, steps)
        assert counts.of({"kv_cache": pages}, step, {}) is found  # known once a step
        assert all(each.chosen is found for each in readers)
        return found

    assert told(reader()) is memory and told(reader(), reader()) is memory
    assert told() is None and told(reader(), reader(slot_mapping=other)) is None
    assert told(reader(slots=False)) is None and told(reader(block_size=128)) is None


def test_absorbed_queries_by_token() -> None:
    """A layer's product with and without a result given; other functions as before."""
    from snapmla.integrations.vllm import absorbed

    layer = torch.nn.Module()
    layer.W_UK_T = torch.nn.Parameter(torch.randn(HEADS, 128, 512), requires_grad=False)
    q, plain = torch.randn(HEADS, 5, 128), layer.W_UK_T
    want = torch.bmm(q, plain)
    absorbed.keep(layer)
    absorbed.keep(layer)
    kept = layer.W_UK_T
    assert kept.data_ptr() == plain.data_ptr() and dict(layer.named_parameters())["W_UK_T"] is kept
    room = torch.empty(HEADS, 5, 512)
    for made in (torch.bmm(q, kept), torch.bmm(q, kept, out=room)):
        assert torch.allclose(made, want) and made.transpose(0, 1).is_contiguous()
    assert room.transpose(0, 1).is_contiguous() and kept.shape == (HEADS, 128, 512)
    by_token = torch.empty(5, HEADS, 512)  # as newer releases give it
    torch.bmm(q, kept, out=by_token.transpose(0, 1))
    assert torch.allclose(by_token.transpose(0, 1), want)
    assert type(kept.transpose(0, 1)) is type(torch.relu(kept)) is torch.Tensor
    assert torch.equal(kept.float(), plain) and torch.equal(q @ kept, q @ plain)
    absorbed.keep(torch.nn.Module())  # a layer without one


def test_sinks(ours: Any) -> None:
    """What of them is not served stops the engine with a sentence."""
    from snapmla.integrations.vllm import refuse

    def config(ranks: int = 1, force: bool = True) -> Any:
        return types.SimpleNamespace(
            parallel_config=types.SimpleNamespace(decode_context_parallel_size=ranks),
            attention_config=types.SimpleNamespace(sparse_mla_force_mqa=force),
        )

    sinks = torch.zeros(HEADS)
    assert ours.SnapMLASparseBackend.supports_sink() and new_impl(ours).sinks is None
    for fine in ((None, None), (sinks, None), (sinks, config())):
        refuse.sinks(fine[0], HEADS, fine[1])
    for found, settings, said in (
        (sinks.bfloat16(), None, r"sinks are float32 \(3,\).* bfloat16 \(3,\)"),
        (sinks[:2], None, r"are float32 \(2,\)"),
        (sinks, config(ranks=2), "leave --decode-context-parallel-size at 1"),
        (sinks, config(force=False), "set attention_config.sparse_mla_force_mqa = True"),
    ):
        with pytest.raises(ValueError, match=said):
            refuse.sinks(found, HEADS, settings)
