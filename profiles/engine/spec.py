"""What an engine is asked: a case, as JSON between processes; the models and prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

from codegen.artifacts import write_atomic
from profiles.engine.v32 import SparseConfig, SparseModel
from profiles.model.config import MlaConfig
from profiles.model.model import MlaModel

VOCABULARY = 1024
LONG, SHORT = 16, 16  # prompts of at least LONG_TOKENS, and shorter ones
LONG_TOKENS = 4096
SHORT_LENGTHS = (3, 7, 8, 63, 64, 65, 127, 128, 129, 200, 500, 777, 1000, 1500, 2100, 3000)
NEW_TOKENS = 64
ALONE = (0, 5, 16, 19, 20, 27)  # prompts that are also run by themselves
SPARSE_TIMINGS = ("32x32768", "8x131072")  # steps of DSA models that are timed
SEED = 7
# Deviations of random weights times sqrt(inputs), such that attention chooses and logits differ.
SPREAD = {"q_proj": 2.5, "q_b_proj": 2.5, "o_proj": 2.0, "embed_tokens": 2.0}

Model = TypeVar("Model", bound=MlaModel)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine.

    Attributes:
        name: of its files.
        model: folder of a Hugging Face model; without weights in it they are vLLM's random ones.
        backend, cache_dtype: vLLM's ``attention_backend`` and ``kv_cache_dtype``.
        graphs: CUDA graphs of decode steps.
        own_process: the engine in a process of its own, scheduled ahead: vLLM's default.
        batch_invariant: ``VLLM_BATCH_INVARIANT``.
        sparse: ``SNAPMLA_VLLM_SPARSE``, which gives the backend FLASHMLA_SPARSE to ours.
        flashmla: ``SNAPMLA_VLLM_FLASHMLA``, which gives FlashMLA's names to ours.
        indexer: the model has one.
        prefill: vLLM's ``mla_prefill_backend``; empty: its own choice.
        study: module of this package whose ``measure`` takes the place of all below but sizes.
        prefix_caching: prompts that begin alike share what is cached.
        filled: prompts are not read: the cache of a DSA model holds random rows (``filled.py``).
        drafts: tokens that the model's own draft layer writes a step; 0: none.  The block size is
            vLLM's own choice then.
        draft_backend: the draft's ``attention_backend``; empty: vLLM's choice.
        prompts: file of token lists to continue, none if empty.
        force: file of a result whose tokens are to be followed, none if empty.
        timings: ``BxTOKENS`` each.
        rounds: of steps that are timed, behind one prefill.
        profile: also tell attention's share of a step.
        cache_gib: memory of the cache.
        longest: ``max_model_len``.
        lane: cases of one lane take turns on the GPU, lanes run side by side; empty: the lane of
            cases that are timed.
        beside: all cases of a study whose rounds are timed in turn, this one among them.
    """

    name: str
    model: str
    backend: str
    cache_dtype: str = "auto"
    graphs: bool = True
    own_process: bool = False
    batch_invariant: bool = False
    sparse: bool = False
    flashmla: bool = False
    indexer: bool = False
    prefill: str = ""
    study: str = ""
    prefix_caching: bool = False
    filled: bool = False
    drafts: int = 0
    draft_backend: str = ""
    prompts: str = ""
    force: str = ""
    timings: tuple[str, ...] = ()
    rounds: int = 3
    profile: bool = False
    cache_gib: float = 8.0
    longest: int = 8192
    lane: str = ""
    beside: tuple[str, ...] = ()

    def write(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Case:
        values = json.loads(path.read_text())
        lists = {name: tuple(values[name]) for name in ("timings", "beside")}
        return cls(**values | lists)


def shape_of(timing: str) -> tuple[int, int]:
    """(requests, tokens) of ``BxTOKENS``."""
    requests, tokens = timing.split("x")
    return int(requests), int(tokens)


def config(layers: int, heads: int) -> MlaConfig:
    """A DeepSeek-V3 of dense layers, narrow but for attention."""
    return MlaConfig(
        vocab_size=VOCABULARY, hidden_size=512, num_hidden_layers=layers,
        num_attention_heads=heads, intermediate_size=1024, rope_theta=10_000.0,
        max_position_embeddings=131_072,
    )  # fmt: skip


def sparse_config(layers: int, heads: int) -> SparseConfig:
    """A DeepSeek-V3.2 of dense layers, narrow but for attention and indexer."""
    of_dense = asdict(config(layers, heads)) | {"max_position_embeddings": 163_840}
    return SparseConfig(**of_dense)


def random_model(layers: int, heads: int) -> MlaModel:
    """Random weights from a fixed seed, rounded to bf16."""
    return filled(MlaModel(config(layers, heads)))


def sparse_model(layers: int, heads: int) -> SparseModel:
    """Like ``random_model``, of DeepSeek-V3.2's architecture."""
    return filled(SparseModel(sparse_config(layers, heads)))


def filled(model: Model) -> Model:
    """The model with random weights; norms keep theirs."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(SEED)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            spread = next((s for part, s in SPREAD.items() if part in name), 1.0)
            values = torch.randn(parameter.shape, generator=generator)
            parameter.copy_((values * spread * parameter.shape[1] ** -0.5).bfloat16())
    return model.eval()


def write_config(folder: Path, made: MlaConfig) -> None:
    """``config.json`` as engines read it; the output has weights of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    values = made.deepseek_v3() | {
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "num_nextn_predict_layers": 0,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 256, "eos_token_id": 1,
    }  # fmt: skip
    write_atomic(folder / "config.json", json.dumps(values, indent=1))


def write_model(folder: Path, model: MlaModel) -> None:
    """A Hugging Face folder of a model."""
    from safetensors.torch import save_file

    write_config(folder, model.config)
    weights = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


def prompts() -> list[list[int]]:
    """Random tokens: ``LONG`` prompts of ``LONG_TOKENS`` and more, then ``SHORT`` short ones."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = [LONG_TOKENS + 61 * i for i in range(LONG)] + list(SHORT_LENGTHS)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
