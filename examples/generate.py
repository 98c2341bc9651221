"""transformers' DeepSeek-V3 over snapmla's FP8 cache, compared with its own eager attention.

    pip install transformers                   # 5.17 or later
    python examples/generate.py

Runs on a GPU if there is one, else on the software GPU.  The model is small and random, so nothing
is downloaded.  Two prompts of different length, the shorter one with pads in front, are continued
greedily three times: by transformers' eager attention, by ours through ``generate``, and by ours
with each decode step as one CUDA graph (on a CPU the same step runs eagerly).
"""

from __future__ import annotations

import sys
import time

import torch

try:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
except ImportError:
    sys.exit("this example wants transformers: pip install transformers")

from snapmla.integrations.transformers import DecodeGraph, SnapMLACache, patch, unpatch

NEW_TOKENS, ROOM = 4, 64
MOST = 0.1  # relative L2 of logits: what two layers make of an FP8 cache's error is 0.02
Tensor = torch.Tensor


def small_model(device: str) -> DeepseekV3ForCausalLM:
    """Two layers with DeepSeek-V3's latents and heads, 16 of them."""
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        first_k_dense_replace=2,               # no experts: all layers have a plain MLP
        max_position_embeddings=512, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config)
    for name, weight in model.named_parameters():  # as large as trained ones: attention matters
        if "self_attn" in name and name.endswith("_proj.weight"):
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return model.to(device, torch.bfloat16).eval()


def greedy(model: DeepseekV3ForCausalLM, inputs: dict[str, Tensor], **more: object) -> Tensor:
    return model.generate(
        **inputs, **more, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        eos_token_id=None, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


@torch.no_grad()
def greedy_by_graph(
    model: DeepseekV3ForCausalLM, inputs: dict[str, Tensor], cache: SnapMLACache
) -> Tensor:
    """A loop of one's own: the prompt by the model, then steps of a graph."""
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0)  # pads are not counted
    logits = model(**inputs, position_ids=positions, past_key_values=cache).logits
    step, tokens = DecodeGraph(model, cache), [inputs["input_ids"]]
    for _ in range(NEW_TOKENS):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = step(tokens[-1])
    return torch.cat(tokens, 1)


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"  # cpu: the software GPU
    model = small_model(device)
    ids = torch.randint(1, 256, (2, 12), device=device)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # the second prompt has 7 tokens
    inputs = {"input_ids": ids, "attention_mask": mask}

    eager = greedy(model, inputs)
    patch(model)
    cache = SnapMLACache(model.config, batch_size=2, max_tokens=ROOM, device=device)
    begin = time.perf_counter()
    ours = greedy(model, inputs, past_key_values=cache)
    seconds = time.perf_counter() - begin
    print(f"on {device}, {NEW_TOKENS} tokens in {seconds:.1f} s, cached: {cache.lengths.tolist()}")

    right = True
    for row, (theirs, own) in enumerate(zip(eager.sequences, ours.sequences)):
        print(f"eager   {theirs[-NEW_TOKENS:].tolist()}\nsnapmla {own[-NEW_TOKENS:].tolist()}")
        errors = []
        for step, (a, b) in enumerate(zip(eager.logits, ours.logits)):
            errors.append(float((a[row].float() - b[row].float()).norm() / a[row].float().norm()))
            right &= errors[-1] < MOST
            if theirs[12 + step] != own[12 + step]:  # from here on they continue other texts
                print("  the best two tokens are as good as equal here")
                break
        print(f"  logits' relative L2 {', '.join(f'{error:.3f}' for error in errors)}")

    cache.reset()
    graphed = greedy_by_graph(model, inputs, cache)
    same = torch.equal(graphed, ours.sequences)
    print(f"steps of a graph: tokens equal {same}")
    unpatch(model)
    right &= same
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
