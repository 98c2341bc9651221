"""transformers' own models on CPU tensors, over a ``SnapMLACache``.

    PYTHONPATH=... python -m tests.support.transformers_driver CASE...

Runs in a process of its own, whose path has a release of transformers
(``tests/support/fetch_transformers.py``).  Kernels run on the software GPU.  Models are small and
random.  Prints a line a check, last ``all right``.

What is compared: greedy tokens with those of transformers' eager attention; and attention of every
layer and query token, by the ``indices`` that it was given where there are any, with attention in
fp32 over the latents before they were quantised.  The error of decode may be what the reference
that rounds as the kernels do predicts, and 15 % more or less.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

import snapmla.reference
from snapmla.integrations.transformers import DecodeGraph, SnapMLACache, patch, unpatch
from snapmla.integrations.transformers.attention import attention
from snapmla.integrations.transformers.patching import NAME
from snapmla.integrations.transformers.pool import MOST
from snapmla.testing import metrics

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
SLACK = 1.15
PROMPT, MORE, ROOM = 20, 3, 64  # tokens of a prompt, new ones, positions of a cache
EXACT, OVER_FP8 = 1e-2, 4.5e-2  # prompts: without old tokens, and over some out of the cache
GROSS = 0.15  # of logits, behind two layers over an FP8 cache; anything misplaced gives 1 or so
CACHE = "cache" if RELEASE >= (5, 24) else "past_key_values"
SIZES = {
    "vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "max_position_embeddings": 512,
}  # fmt: skip
DENSE = {"qk_nope_head_dim": 128, "v_head_dim": 128}
WIDE = {"qk_nope_head_dim": 192, "v_head_dim": 256, "q_lora_rank": 64}  # GLM
INDEXER = {"q_lora_rank": 64, "index_n_heads": 4, "index_head_dim": 128}


def model_of(kind: str, **settings: Any) -> Any:
    """A random model whose attention is transformers' eager one; weights as large as trained ones.

    With transformers' own small weights all logits of attention are nearly 0, and what is attended
    to hardly matters.
    """
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("_proj.weight") and "mlp" not in name:
                weight.copy_(torch.randn_like(weight) * weight.shape[-1] ** -0.5)
    return made.to(torch.bfloat16).eval()


def inputs(pads: tuple[int, ...] = (0, 0)) -> dict[str, Tensor]:
    """Prompts with so many pads in front."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 256, (len(pads), PROMPT), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, given: dict[str, Tensor], **more: Any) -> Tensor:
    return model.generate(
        **given, max_new_tokens=MORE, do_sample=False, pad_token_id=0, eos_token_id=None, **more
    )


class Watch:
    """Our attention function, which keeps what it was given and what it gave."""

    def __init__(self) -> None:
        self.latents: dict[int, Tensor] = {}  # layer -> (b, positions, 576)
        self.calls: list[dict[str, Any]] = []
        self.sparse = 0
        AttentionInterface.register(NAME, self)

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float,
        indices: Tensor | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        pool, layer = key.snapmla_layer.pool, module.layer_idx  # type: ignore[attr-defined]
        old = pool.seen - pool.new
        joint = torch.cat([key[:, 0], value[:, 0]], -1).float()
        past = self.latents[layer][:, :old] if old else joint[:, :0]
        self.latents[layer] = torch.cat([past, joint], 1)
        result = attention(module, query, key, value, mask, scaling, indices=indices, **more)
        may = pool.allowed()[..., : pool.seen].clone()
        if indices is not None:
            chosen = may.new_zeros(*may.shape[:2], pool.extent)
            may &= chosen.scatter_(-1, indices.long(), True)[..., : pool.seen]
            self.sparse += int(indices.shape[-1] < pool.extent and pool.new <= MOST)
        pads = pool.slot_of[:, : pool.seen] < 0
        c, r = self.latents[layer].split([512, 64], -1)
        self.calls.append({
            "module": module, "q": query.float(), "c": c, "r": r, "may": may, "pads": pads,
            "out": result[0].float(), "scale": scaling, "old": old,
        })  # fmt: skip
        return result

    def check(self, what: str) -> None:
        """Decode's error is the predicted one; that of prompts is small."""
        decoded, prompts = [], []
        for call in self.calls:
            n = call["q"].shape[2]
            for b in range(len(call["q"])):
                for i in range(n):
                    if not call["pads"][b, call["old"] + i]:  # a pad's row is nobody's
                        (decoded if n <= MOST else prompts).append((call, b, i))
        for name, rows in (("prompt", prompts), ("decode", decoded)):
            if not rows:
                continue
            got = torch.stack([call["out"][b, i].flatten() for call, b, i in rows])
            truth = torch.stack([self.truth(*row) for row in rows])
            error = metrics.relative_l2(got, truth)
            if name == "prompt":
                limit = OVER_FP8 if any(call["old"] for call, *_ in rows) else EXACT
                print(f"{what}, {name}: relative L2 {error:.2e}", flush=True)
                assert error < limit, what
                continue
            mimic = torch.stack([self.predicted(*row) for row in rows])
            expected = metrics.relative_l2(mimic, truth)
            print(f"{what}, {name}: relative L2 {error:.2e}, predicted {expected:.2e}", flush=True)
            assert expected / SLACK <= error <= expected * SLACK, what

    def weights(self, module: Any) -> tuple[Tensor, Tensor]:
        weight = module.kv_b_proj.weight.float()
        heads = weight.view(module.num_heads, -1, weight.shape[-1])
        return heads[:, : module.qk_nope_head_dim], heads[:, module.qk_nope_head_dim :]

    def truth(self, call: dict[str, Any], b: int, i: int) -> Tensor:
        """fp32 multi-head attention of one query token over what it may see."""
        up, down = self.weights(call["module"])
        nope, q, may = up.shape[1], call["q"][b, :, i], call["may"][b, i]
        c, r = call["c"][b][may], call["r"][b][may]
        k, v = torch.einsum("nr,hdr->hnd", c, up), torch.einsum("nr,hdr->hnd", c, down)
        logits = torch.einsum("hd,hnd->hn", q[:, :nope], k) + q[:, nope:] @ r.T
        p = (logits * call["scale"]).softmax(-1)
        return torch.einsum("hn,hnd->hd", p, v).flatten()

    def predicted(self, call: dict[str, Any], b: int, i: int) -> Tensor:
        """The same with the kernels' rounding, of bf16 queries that were absorbed."""
        up, down = self.weights(call["module"])
        nope, q, may = up.shape[1], call["q"][b, :, i], call["may"][b, i]
        c, r = call["c"][b][may][None], call["r"][b][may][None]
        latent = torch.einsum("hd,hdr->hr", q[:, :nope], up).bfloat16().float()
        out, _ = snapmla.reference.reference_from_unquantised(
            latent[None, None], q[None, None, :, nope:], c, r, call["scale"],
            config=snapmla.reference.MIMIC,
        )  # fmt: skip
        return torch.einsum("hr,hdr->hd", out[0, 0].float(), down).flatten()


def over_ours(model: Any, batch: int = 2, **settings: Any) -> tuple[Watch, SnapMLACache]:
    """The model patched and watched, and a cache for it."""
    patch(model)
    settings = {"device": "cpu", "prefill": "torch", **settings}
    return Watch(), SnapMLACache(model.config, batch, ROOM, **settings)


def generated(what: str, model: Any, equal: bool = True, pads: tuple[int, ...] = (0, 7)) -> Watch:
    """``generate`` of two requests, the second with pads in front, against eager."""
    given = inputs(pads)
    want = generate(unpatch(model), given)
    watch, cache = over_ours(model)
    got = generate(model, given, **{CACHE: cache})
    same = torch.equal(got, want)
    print(f"{what}: tokens equal {same}, cached {cache.lengths.tolist()}", flush=True)
    assert same or not equal
    assert cache.lengths.tolist() == [PROMPT - n + MORE - 1 for n in pads]
    watch.check(what)
    return watch


# ------------------------------------------------------------------------------------------ cases


def v3() -> None:
    generated("DeepSeek-V3", model_of("DeepseekV3", **DENSE, q_lora_rank=None))


def v2() -> None:
    model = model_of("DeepseekV2", **DENSE, q_lora_rank=None, topk_method="greedy", n_group=None)
    generated("DeepSeek-V2", model)


def v32() -> None:
    """topk is not less than there are tokens: dense attention, over an indexer's model."""
    watch = generated("DeepSeek-V3.2", model_of("DeepseekV32", **DENSE, **INDEXER, index_topk=32))
    assert not watch.sparse


def v32_sparse() -> None:
    """12 of up to 22 tokens: other latents may choose other tokens, so tokens may differ."""
    model = model_of("DeepseekV32", **DENSE, **INDEXER, index_topk=12)
    watch = generated("DeepSeek-V3.2, 12 tokens", model, equal=False)
    assert watch.sparse == (MORE - 1) * 2


def glm() -> None:
    generated("GLM-4 MoE Lite", model_of("Glm4MoeLite", **WIDE))


def glm_dsa() -> None:
    """The second layer takes the first one's choice."""
    settings = {**INDEXER, **WIDE, "indexer_types": ["full", "shared"]}
    watch = generated("GLM-5", model_of("GlmMoeDsa", **settings, index_topk=32))
    assert not watch.sparse
    model = model_of("GlmMoeDsa", **settings, index_topk=12)
    assert generated("GLM-5, 12 tokens", model, equal=False).sparse == (MORE - 1) * 2


def chunks() -> None:
    """A prompt in pieces of 10, 9 and 1; then drafts, a crop and a turn of another user."""
    model = model_of("DeepseekV3", **DENSE, q_lora_rank=None)
    given = inputs((0, 12))  # the first piece of the second request is pads alone
    ids, mask = given["input_ids"], given["attention_mask"]
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        whole = model(**given, position_ids=places).logits
    watch, cache = over_ours(model)

    def piece(first: int, end: int) -> Tensor:
        with torch.no_grad():
            return model(
                input_ids=ids[:, first:end], attention_mask=mask[:, :end],
                position_ids=places[:, first:end], **{CACHE: cache},
            ).logits  # fmt: skip

    parts = [piece(0, 10), piece(10, 19), piece(19, 20)]
    real = mask.bool()
    compare("a prompt in pieces", torch.cat(parts, 1)[real], whole[real])
    cache.crop(-3)
    assert cache.lengths.tolist() == [17, 5] and cache.get_seq_length() == 17
    compare("three drafts", piece(17, 20), whole[:, 17:])
    cache.crop(-10)
    assert cache.lengths.tolist() == [10, 0]
    late = real[:, 10:]
    compare("a long piece over a short past", piece(10, 20)[late], whole[:, 10:][late])
    watch.check("pieces and drafts")


def compare(what: str, got: Tensor, want: Tensor) -> None:
    """Asserts that results land where they belong; the watch judges how exact they are."""
    error = metrics.relative_l2(got.float(), want.float())
    print(f"{what}: logits' relative L2 {error:.2e}", flush=True)
    assert error < GROSS, what


def holes() -> None:
    """Pads behind a prompt and inside of it: what the mask hides is not cached, and not seen."""
    model = model_of("DeepseekV3", **DENSE, q_lora_rank=None)
    given = inputs((0, 0))
    given["attention_mask"][0, -4:] = 0
    given["attention_mask"][1, 5:9] = 0
    want = generate(unpatch(model), given)
    for size in (None, 6):  # pieces of 6 are decoded
        watch, cache = over_ours(model)
        got = generate(model, given, prefill_chunk_size=size, **{CACHE: cache})
        same = torch.equal(got, want)
        print(f"pads behind and inside, pieces of {size}: tokens equal {same}")
        assert same and cache.lengths.tolist() == [18, 18]
        watch.check(f"pads behind and inside, pieces of {size}")


def chunked_generate() -> None:
    """``generate``'s own chunks of a prompt."""
    model, given = model_of("DeepseekV3", **DENSE, q_lora_rank=None), inputs((0, 7))
    want = generate(unpatch(model), given)
    watch, cache = over_ours(model)
    got = generate(model, given, prefill_chunk_size=9, **{CACHE: cache})
    print(f"prefill_chunk_size: tokens equal {torch.equal(got, want)}")
    assert torch.equal(got, want)
    ids = torch.cat([got, given["input_ids"][:, :5]], 1)  # the next turn, over the same cache
    mask = torch.nn.functional.pad(given["attention_mask"], (0, MORE + 5), value=1)
    turn = {"input_ids": ids, "attention_mask": mask}
    got = generate(model, turn, **{CACHE: cache})
    watch.check("prefill_chunk_size, two turns")
    want = generate(unpatch(model), turn)
    print(f"a second turn: tokens equal {torch.equal(got, want)}")
    assert torch.equal(got, want)


def kernels() -> None:
    """Prompts by our dense kernel, in one piece and over a cached past; and by the sparse one."""
    model = model_of("DeepseekV3", **DENSE, q_lora_rank=None, num_hidden_layers=1)
    given = inputs((0, 7))
    want = generate(unpatch(model), given)
    for size in (None, 9):
        watch, cache = over_ours(model, prefill="kernels")
        got = generate(model, given, prefill_chunk_size=size, **{CACHE: cache})
        assert torch.equal(got, want)
        watch.check(f"prompts by mha_prefill, pieces of {size}")
    if RELEASE < (5, 18):
        return
    model = model_of("DeepseekV32", **DENSE, **INDEXER, index_topk=12, num_hidden_layers=1)
    watch, cache = over_ours(model, prefill="kernels")
    generate(model, given, prefill_chunk_size=9, **{CACHE: cache})
    watch.check("prompts by sparse_prefill, pieces of 9")


def graph() -> None:
    """``DecodeGraph``'s step, which runs eagerly here: tokens of generate, memory that stays."""
    for kind, settings in (
        ("DeepseekV3", {"q_lora_rank": None}), ("DeepseekV32", {**INDEXER, "index_topk": 12}),
    ):  # fmt: skip
        if kind == "DeepseekV32" and RELEASE < (5, 18):
            continue
        model, given = model_of(kind, **DENSE, **settings), inputs((0, 7))
        _, cache = over_ours(model)
        want = generate(model, given, **{CACHE: cache})
        cache.reset()
        pool = cache.pool
        static = ("block_table", "lengths", "before", "slot_of", "position")
        where = [getattr(pool, name).data_ptr() for name in static]
        places = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            logits = model(**given, position_ids=places, **{CACHE: cache}).logits[:, -1]
        step, got = DecodeGraph(model, cache), [given["input_ids"]]
        for _ in range(MORE):
            got.append(logits.argmax(-1, keepdim=True))
            logits = step(got[-1])[:, -1]
        same = torch.equal(torch.cat(got, 1), want)
        print(f"{kind}, steps of fixed extents: tokens equal {same}")
        assert same and where == [getattr(pool, name).data_ptr() for name in static]
        assert int(pool.position) == pool.seen == PROMPT + MORE and not pool.fixed


def refused(what: str, call: Callable[[], Any], kind: type[Exception] = ValueError) -> None:
    """``call`` raises, in one sentence that has ``what``."""
    try:
        call()
    except kind as error:
        print(f"refused: {error}")
        assert what in str(error) and "\n" not in str(error)
    else:
        raise AssertionError(what)


def refusals() -> None:
    """Asserts that what would go wrong is refused before anything is written."""
    model, given = model_of("DeepseekV3", **DENSE, q_lora_rank=None), inputs()
    ids = given["input_ids"]
    _, cache = over_ours(model)
    assert patch(model) is model
    with torch.no_grad():
        run = lambda **more: model(**{"input_ids": ids, CACHE: cache, **more})
        refused("wants past_key_values=SnapMLACache", lambda: model(ids))
        refused("wants past_key_values=SnapMLACache", lambda: generate(model, given))
        refused("3 sequences", lambda: run(input_ids=ids[[0, 1, 0]]))
        refused("(2, 20)", lambda: run(attention_mask=torch.ones(2, 19)))
        refused("attention_mask is wanted as", lambda: run(attention_mask=torch.ones(2, 1, 20, 20)))
        refused("output_attentions", lambda: run(output_attentions=True))
        refused("at most 64 positions", lambda: run(input_ids=ids.repeat(1, 4)))
        beams = lambda: generate(model, {"input_ids": ids[:1]}, num_beams=2, **{CACHE: cache})
        refused("beam search", beams, NotImplementedError)
        cache.reset()
        assert cache.get_seq_length() == 0
        refused("a negative number", lambda: cache.crop(3))
        refused("tokens_to_remove", lambda: cache.crop(-3))
        refused("a model that is patched", lambda: cache.update(ids, ids, 0))
        broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
        refused("division", lambda: run(), ZeroDivisionError)
        broken.remove()
        refused("stopped half way", lambda: run())
        cache.reset()
        run()
    refused("there are no gradients", lambda: model(ids, **{CACHE: cache}))
    refused("prefill", lambda: SnapMLACache(model.config, 2, 8, prefill="flash", device="cpu"))
    glm = transformers.Glm4MoeLiteConfig(**{**SIZES, **WIDE})
    wrong = lambda: SnapMLACache(glm, 2, 8, prefill="kernels", device="cpu")
    refused("for heads of other channels", wrong)
    unpatch(model)
    assert model.config._attn_implementation == "eager" and unpatch(model) is model
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)
    refused_models(model)


def refused_models(model: Any) -> None:
    refused("latents of (256, 64) channels", lambda: patch(
        model_of("DeepseekV3", **DENSE, q_lora_rank=None, kv_lora_rank=256)))  # fmt: skip
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size")}
    llama = LlamaForCausalLM(LlamaConfig(**small, num_hidden_layers=1, num_attention_heads=4))
    refused("models of type llama are not served", lambda: patch(llama))
    layer = model.model.layers[1].self_attn
    layer.kv_b_proj = torch.nn.Sequential(layer.kv_b_proj)
    refused("kv_b_proj of layer 1 is a Sequential", lambda: patch(model))
    assert model.config._attn_implementation == "eager"
    if RELEASE < (5, 18):
        old = model_of("DeepseekV32", **DENSE, **INDEXER, index_topk=32)
        _, cache = over_ours(old)
        refused("below 5.18 expands", lambda: generate(old, inputs(), **{CACHE: cache}))


CASES: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        v3, v2, v32, v32_sparse, glm, glm_dsa, chunks, holes, chunked_generate, kernels, graph,
        refusals,
    )
}  # fmt: skip
DSA = ("v32", "v32_sparse", "glm_dsa")  # cases that 5.17 has not


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    for name in names:
        CASES[name]()
    print("all right")


if __name__ == "__main__":
    main(sys.argv[1:] or [name for name in CASES if RELEASE >= (5, 18) or name not in DSA])
