"""vLLM's own classes for DSA models (DeepSeek-V3.2) on CPU tensors, with our backend and indexer.

    PYTHONPATH=... python -m tests.support.vllm_sparse_driver CASE...

As ``tests/support/vllm_driver.py``, with the stand-ins of its engine for what vLLM computes by CUDA
outside of our backend; those of sparse attention are ``vllm_sparse_ops``, what cases run on is
``vllm_sparse_engine``.  Prints a line a case, last ``all right``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import snapmla
from snapmla.integrations.vllm.__main__ import needed_sparse
from snapmla.runtime import variants
from snapmla.testing import metrics
from tests.support import vllm_engine as dense
from tests.support.vllm_engine import LATENT, NOPE, PAGE, ROPE
from tests.support.vllm_sparse_engine import HEADS, HIDDEN, LENGTHS, Engine, Layers
from tests.support.vllm_sparse_ops import CONVERTED, fused_norm_rope, fused_q, replacements


def with_past(**options: Any) -> Engine:
    """An engine whose requests have cached tokens, all but the last three."""
    engine = Engine(**options)
    from snapmla.integrations.vllm import indexer as choosing  # vLLM is there now

    with mock.patch.object(choosing, "index_topk"):  # keys are written, nothing is chosen
        for request, length in enumerate(LENGTHS):
            tokens = engine.grow([length - 3], [request])
            engine.choose(engine.step([length - 3], [request]), tokens)
    return engine


@contextlib.contextmanager
def queries() -> Iterator[list[bool]]:
    """Per call of sparse decode, true if its query came in two tensors."""
    from snapmla.integrations.vllm import sparse

    seen, call = [], sparse.sparse_decode

    def noted(q: Any, *given: Any, **named: Any) -> Any:
        seen.append(isinstance(q, tuple))
        return call(q, *given, **named)

    with mock.patch.object(sparse, "sparse_decode", noted):
        yield seen


def decode() -> None:
    """s_q of 1 and 2; what is chosen does not depend on the batch.  Slots straight from the
    indexer, but beside drafts; queries in two tensors from the second step on, the same bits."""
    for s_q in (1, 2):
        engine = with_past(drafts=s_q - 1, apart=2)
        requests = [0, 1, 2]
        tokens = engine.grow([s_q] * 3, requests)
        step = engine.step([s_q] * 3, requests)
        chosen = engine.choose(step, tokens)
        built = engine.index_builder.build(0, step)
        assert (built.num_decodes, built.num_prefills) == (3, 0)
        assert (engine.built.chosen is not None) == (s_q == 1)
        q, first = engine.attend(step, tokens)
        CONVERTED.clear()
        with queries() as two:
            _, got = engine.attend(step, tokens, q)
        assert two == [True] and len(CONVERTED) == s_q - 1
        assert torch.equal(got, first)
        engine.check(f"decode of {s_q} query tokens", q, got, tokens, chosen)
        for i in requests:
            alone = engine.step([s_q], [i])
            part = slice(i * s_q, (i + 1) * s_q)
            assert torch.equal(engine.choose(alone, tokens[part]), chosen[part]), i


def graphs() -> None:
    """Slots that pad a graph; its plan is kept, and lists of nothing give zeros."""
    engine, requests = with_past(), [0, 2]
    tokens = engine.grow([1, 1], requests)
    captured = engine.builder.build_for_cudagraph_capture(engine.step([1, 1], [1, 2], padding=2))
    assert captured.plans is engine.builder.plans and engine.builder.plans.pinned == 1
    plan = captured.plans.get(4)
    step = engine.step([1, 1], requests, padding=2)
    chosen = engine.choose(step, tokens)
    assert (chosen[2:] == -1).all()
    q, got = engine.attend(step, tokens)
    engine.check("slots that pad a graph", q, got, tokens, chosen)
    assert not got[2:].any() and engine.builder.plans.get(4) is plan
    assert engine.builder.plans.pinned == 1


def prompts() -> None:
    """Batch-invariant: a prompt in chunks, with single tokens, and beside a request that decodes,
    has the bits of one prefill; what is chosen, too.  Else a short one may be dense attention."""
    engine = with_past(invariant=True)
    assert engine.config.attention_config.sparse_mla_force_mqa
    begin, count = engine.lengths[2], 32
    q = torch.randn(count, HEADS, NOPE + ROPE).bfloat16()
    waits = {"is_prefilling": torch.tensor([True])}

    def run(sizes: list[int], beside: bool) -> tuple[Tensor, Tensor]:
        parts, at = [], 0
        engine.lengths[2] = begin
        for size in sizes:
            tokens = engine.grow([size], [2])
            rows, others = q[at : at + size], 0
            if beside:  # request 0 decodes, and comes first
                others = 1
                tokens = engine.tokens([1, size], [0, 2])
                rows = torch.cat([torch.randn(1, HEADS, NOPE + ROPE).bfloat16(), rows])
                step = engine.step(
                    [1, size], [0, 2], is_prefilling=torch.tensor([False, size > 1])
                )  # fmt: skip
            else:
                step = engine.step([size], [2], **waits)
            chosen = engine.choose(step, tokens)
            _, got = engine.attend(step, tokens, rows)
            parts.append((chosen[others:], got[others:]))
            at += size
        return tuple(torch.cat(part) for part in zip(*parts))  # type: ignore[return-value]

    CONVERTED.clear()
    whole = run([count], beside=False)
    tokens = engine.tokens([count], [2])
    engine.check("one prefill", q, whole[1], tokens, whole[0])
    for sizes, beside in (([18, 1, 1, 12], False), ([20, 12], True)):
        again = run(sizes, beside)
        same = [torch.equal(a, b) for a, b in zip(whole, again)]
        print(f"chunks of {sizes}, beside a decode {beside}: the same choice and bits {same}")
        assert same == [True, True]
    assert not CONVERTED  # slots, of a prompt and of a decode beside it
    short_prompt(engine)


def short_prompt(engine: Engine) -> None:
    """Dense attention of a chunk over a cached prefix, which our rows are fetched for."""
    engine.config.attention_config.sparse_mla_force_mqa = False
    engine.builder.reorder_batch_threshold = 8
    tokens = engine.grow([30], [1])
    step = engine.step([30], [1], is_prefilling=torch.tensor([True]))
    built = engine.builder.build(0, step)
    assert (built.num_decodes, built.num_prefills) == (0, 1)
    assert built.prefill_max_seq_len == LENGTHS[1] + 27
    q, got = engine.attend(step, tokens)
    truth = torch.stack([engine.truth(x, i, torch.arange(at + 1)) for x, (i, at) in zip(q, tokens)])
    error = metrics.relative_l2(got.float(), truth)
    print(f"dense attention of a short prompt over 37 cached tokens: relative L2 {error:.2e}")
    assert 5e-3 < error < 4.5e-2  # e4m3 of the prefix; its own tokens are exact to bf16


def ranks() -> None:
    """Context parallelism: both ranks choose what one would; an empty shard is (0, -inf)."""
    from snapmla.integrations.vllm import indexer as choosing

    engine = with_past()
    one = engine.kv.clone(), engine.index_pages.clone()
    for turn, new, requests in (
        (1, [1, 1, 1], [0, 1, 2]),
        (64, [1, 1, 1], [0, 1, 2]),
        (16, [6], [0]),
    ):
        tokens = engine.grow(new, requests)
        step = engine.step(new, requests)
        chosen = engine.choose(step, tokens)
        q = torch.randn(len(tokens), HEADS, LATENT + ROPE).bfloat16()
        built = engine.built
        want, _ = engine.layer.impl.forward_mqa(q, engine.kv, built, engine.layer)
        one = engine.kv.clone(), engine.index_pages.clone()
        told: list[Tensor] = []
        for stage in ("told", "merged"):
            parts = []
            for rank in range(2):
                engine.shard = (rank, 2, turn)
                fill(engine, choosing, requests, new)
                gather = told.append if stage == "told" else None
                found = rank_step(engine, choosing, new, requests, tokens, told, gather)
                if stage == "merged":
                    assert torch.equal(found, chosen), f"rank {rank} of 2, turns of {turn}"
                    parts.append(rank_attend(engine, new, requests, q))
        lse_of = [lse for _, lse in parts]
        if turn == 64:  # request 1 has 38 tokens: all are rank 0's
            at = requests.index(1)
            assert torch.isneginf(lse_of[1][at]).all() and not parts[1][0][at].any()
        out, _ = snapmla.merge_state(
            *(t for o, lse in parts for t in (o.unsqueeze(0), lse.mT.unsqueeze(0).contiguous()))
        )
        error = metrics.relative_l2(out[0].float(), want.float())
        print(
            f"two ranks, turns of {turn}, {new}: one rank's choice, relative L2 to it {error:.1e}"
        )
        assert error < 6e-3  # of bfloat16 results and partial results
        engine.shard = (0, 1, 1)
        engine.layer.impl.dcp_world_size = 1
        engine.kv.copy_(one[0])
        engine.index_pages.copy_(one[1])


def fill(engine: Engine, choosing: Any, requests: list[int], new: list[int]) -> None:
    """The rank's tokens of some requests into caches that were empty; new index keys come later."""
    engine.kv.fill_(255)
    engine.index_pages.fill_(255)
    before = dict(zip(requests, new))
    for i in requests:
        every = engine.tokens([engine.lengths[i]], [i])
        engine.write(every)
        past = engine.lengths[i] - before[i]
        now, engine.lengths[i] = engine.lengths[i], past
        with mock.patch.object(choosing, "index_topk"):  # keys are written, nothing is chosen
            engine.choose(engine.step([past], [i]), engine.tokens([past], [i]))
        engine.lengths[i] = now


def rank_step(
    engine: Engine, choosing: Any, new: list[int], requests: list[int],
    tokens: list[tuple[int, int]], told: list[Tensor], gather: Any,
) -> Tensor:  # fmt: skip
    """Positions that a rank's indexer chooses; ``told``: what the ranks tell one another."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    rank, count, turn = engine.shard
    step = engine.step(new, requests)
    step.dcp_local_seq_lens = get_dcp_local_seq_lens(step.seq_lens, count, rank, turn)

    def all_gather(best: Tensor, dim: int) -> Tensor:
        if gather is not None:
            gather(best.clone())
            return torch.cat([best] * count, dim)
        return torch.cat(told, dim)

    op, builder = engine.indexer.indexer_op, engine.index_builder
    group = mock.Mock(all_gather=all_gather, rank_in_group=rank)
    rank_of = torch.tensor(rank, dtype=torch.int32)
    config = mock.Mock(cp_kv_cache_interleave_size=turn)
    with (
        mock.patch.object(choosing, "get_dcp_group", lambda: group),
        mock.patch.multiple(op, dcp_rank=rank, dcp_world_size=count, _parallel_config=config),
        mock.patch.multiple(
            builder, dcp_rank=rank, dcp_world_size=count, dcp_rank_tensor=rank_of,
            cp_kv_cache_interleave_size=turn, compressed_cp_interleave_size=turn,
        ),
    ):  # fmt: skip
        return engine.choose(step, tokens)


def rank_attend(
    engine: Engine, new: list[int], requests: list[int], q: Tensor
) -> tuple[Tensor, Tensor]:
    """(out, LSE (tokens, h)) of the rank's share of what is in the buffer."""
    rank, count, turn = engine.shard
    impl = engine.layer.impl
    impl.dcp_world_size, impl.dcp_rank, impl.need_to_return_lse_for_decode = count, rank, True
    with mock.patch.object(engine.builder, "cp_kv_cache_interleave_size", turn):
        built = engine.builder.build(0, engine.step(new, requests))
    out, lse = impl.forward_mqa(q, engine.kv, built, engine.layer)
    assert lse.shape == out.shape[:2]
    impl.dcp_world_size, impl.need_to_return_lse_for_decode = 1, False
    return out, lse


def layer() -> None:
    """The layer that CUDA builds use, which writes both caches itself and calls the indexer as a
    function: chunks have the bits of one prefill, and a group's layers share decode's rows."""
    layers, hidden, past = Layers(), torch.randn(150, HIDDEN).bfloat16(), 130
    nothing = lambda _, q, *__: (torch.zeros_like(q[0]), None)
    update = type(layers.layers[0].impl).do_kv_cache_update
    with (
        mock.patch.object(layers.module, "fused_norm_rope", fused_norm_rope),
        mock.patch.object(layers.module, "fused_q", fused_q),
        mock.patch.object(type(layers.layers[0].impl), "do_kv_cache_update") as updates,
    ):
        with mock.patch.object(type(layers.layers[0].impl), "forward_mqa", nothing):
            layers.run(hidden, 0, past)  # what is cached; its results are nobody's
        whole = layers.run(hidden, past, 150)
        sizes, parts, converted_by = [12, 1, 1, 6], [], []
        for size in sizes:
            at = past + sum(part.shape[1] for part in parts)
            CONVERTED.clear()
            parts.append(layers.run(hidden, at, at + size))
            converted_by.append(len(CONVERTED))
    assert update is not None and not updates.called
    again = torch.cat(parts, 1)
    same = torch.equal(whole, again)
    print(f"two layers, chunks of {sizes}: the bits of one prefill {same}", flush=True)
    print(f"positions were turned into rows {converted_by} times by both layers")
    assert whole.isfinite().all() and same
    assert converted_by == [0, 0, 0, 0], "both layers take the slots of one indexer"


def refusals() -> None:
    """Asserts that unserved setups stop the engine with a sentence; the selector takes the rest."""
    from vllm.platforms.interface import DeviceCapability

    engine = Engine()
    asked = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8_ds_mla",
        "block_size": PAGE, "use_mla": True, "has_sink": False, "use_mm_prefix": False,
        "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 0),
        "attn_type": "decoder", "use_sparse": True,
    }  # fmt: skip
    backend, parallel = engine.backend, engine.config.parallel_config
    assert backend.validate_configuration(**asked) == []
    assert backend.validate_configuration(**asked | {"has_sink": True}) == []
    for change in (
        {"head_size": 512}, {"kv_cache_dtype": "auto"}, {"use_sparse": False},
        {"device_capability": DeviceCapability(10, 0)},
    ):  # fmt: skip
        reasons = backend.validate_configuration(**asked | change)
        print(f"{change}: {reasons}")
        assert len(reasons) == 1
    with mock.patch.object(parallel, "prefill_context_parallel_size", 2):
        dense.refused("prefill context parallelism", engine.new_builder)
    from snapmla.integrations.vllm import indexer as choosing

    with mock.patch.object(engine.indexer, "n_head", 48):
        dense.refused("48 heads", lambda: choosing.serve(engine.indexer))
    others(choosing)


def others(choosing: Any) -> None:
    """An indexer of a layer that is not ours gets vLLM's own function, and all its arguments."""
    ours, seen = choosing.theirs.sparse_attn_indexer, []
    with mock.patch.object(ours, "theirs", lambda *given, **named: seen.append((given, named))):
        ours("hidden", "another.layer", 3, scale_fmt="ue8m0")
    assert seen == [(("hidden", "another.layer", 3), {"scale_fmt": "ue8m0"})]


CASES: dict[str, Callable[[], None]] = {
    "decode": decode, "graphs": graphs, "prompts": prompts, "ranks": ranks, "layer": layer,
    "refusals": refusals,
}  # fmt: skip
NEWER = ("ranks", "layer")  # cases of 0.33 alone


def main(names: list[str]) -> None:
    import vllm

    print(f"vLLM {vllm.__version__}, torch {torch.__version__}")
    loaded, load = set(), variants.kernel

    def noted(spec: Any, *more: Any) -> Any:
        loaded.add(spec)
        return load(spec, *more)

    with contextlib.ExitStack() as stack:
        for name in ("empty", "zeros", "tensor"):
            free = dense.without_pinning(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, free))
        for module, name, value in replacements():
            stack.enter_context(mock.patch.object(sys.modules[module], name, value))
        stack.enter_context(mock.patch.object(variants, "kernel", noted))
        stack.enter_context(dense.SETTINGS)
        for name in names:
            torch.manual_seed(0)  # a case has the same numbers alone
            CASES[name]()
    beside = ("merge_states", "quantize_q")  # of ``ranks``; of nobody
    known = {spec.name for spec in needed_sparse()}
    unknown = {s.name for s in loaded if s.name not in known and s.op not in beside}
    if "layer" not in names:  # whose fused operators stand for vLLM's
        assert not unknown, f"`check --sparse` does not ask for {unknown}"
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
