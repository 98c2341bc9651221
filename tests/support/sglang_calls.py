"""SGLang's own calls of FlashMLA: its text, over tensors of a step that keep their places.

``engine`` imports two of its modules from an unpacked release, the one that has FlashMLA's names
and the registry of hooks; packages above them are empty, as theirs want a GPU's libraries.
``flash_mla`` (the wheel sgl-flash-mla) is a stand-in whose kernels must not be called, unless the
installed one is asked for.

A case has a step's tensors, runs the method of SGLang that calls FlashMLA, and compares what it
returns with float64 of the bytes (``flashmla_calls``), by FlashMLA's gates.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from snapmla.compat import flash_mla
from snapmla.integrations.sglang import surface
from tests.support import flashmla_calls as calls

ATTENTION = Path("sglang/srt/layers/attention")
PACKAGES = (
    "sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.runtime_context",
    "sglang.srt.model_executor", "sglang.srt.model_executor.model_runner", "sglang.kernels",
    "sglang.kernels.ops", "sglang.kernels.ops.attention",
)  # fmt: skip
PAGE, LATENT, WIDTH = 64, 512, 576


@dataclasses.dataclass
class TheirMeta:
    """FlashMLA's dataclass: what its own kernel fills."""

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


class ModelRunner:
    """SGLang's, of a model whose attention is another backend's."""

    is_draft_worker = False

    def forward(self, forward_batch: Any) -> str:
        return "output"


def their_kernel(*given: Any, **named: Any) -> Any:
    raise AssertionError("SGLang's kernel was called")


def their_records(lengths: Tensor, rows: int, heads_k: int, *more: Any, **named: Any) -> Any:
    """Two tensors, as FlashMLA's own launch makes them."""
    return flash_mla.get_mla_metadata_tensors(lengths, rows, heads_k)


def stand_in() -> dict[str, types.ModuleType]:
    """The wheel's modules."""
    found: dict[str, Any] = {
        name: types.ModuleType(name)
        for name in ("flash_mla", "flash_mla.flash_mla_interface")
    }  # fmt: skip
    found["flash_mla"].__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    vars(found["flash_mla"]).update(
        get_mla_metadata=lambda: (TheirMeta(), None), get_mla_decoding_metadata=their_records,
        flash_mla_with_kvcache=their_kernel, flash_mla_sparse_fwd=their_kernel,
        fused_norm_rope_attn_rope_cast=None, __path__=[],
    )  # fmt: skip
    found["flash_mla.flash_mla_interface"].FlashMLASchedMeta = TheirMeta
    return found


class Found(NamedTuple):
    """SGLang's modules."""

    names: Any  # surface.FLASHMLA
    hooks: Any  # surface.HOOKS
    bound: Any  # one that has bound the names before
    runner: Any  # a model's


@contextlib.contextmanager
def engine(folder: Path, *, real: bool = False) -> Iterator[Found]:
    """SGLang's modules as a process has them before its plug-ins are loaded.

    Args:
        folder: of the release.
        real: whether FlashMLA is the one that is installed.
    """
    ours = lambda name: name.partition(".")[0] in ("sglang", "flash_mla")
    before = {name: module for name, module in sys.modules.items() if ours(name)}
    for name in before:
        del sys.modules[name]
    try:
        for name in PACKAGES:
            module: Any = types.ModuleType(name)
            sys.modules[name] = module
            module.__path__ = [str(folder.joinpath(*name.split(".")))]
        exec_ = types.SimpleNamespace(
            deterministic=types.SimpleNamespace(enable_deterministic_inference=False)
        )
        vars(sys.modules["sglang.srt.runtime_context"])["get_exec"] = lambda: exec_
        runner = type("ModelRunner", (ModelRunner,), {"forward": ModelRunner.forward})
        vars(sys.modules["sglang.srt.model_executor.model_runner"])["ModelRunner"] = runner
        sys.modules.update({} if real else stand_in())
        names = importlib.import_module(surface.FLASHMLA)
        (where,) = surface.BINDING
        bound: Any = types.ModuleType(where)
        sys.modules[where] = bound
        for each in ("flash_mla_with_kvcache", "get_mla_metadata"):
            setattr(bound, each, getattr(names, each))
        yield Found(names, importlib.import_module(surface.HOOKS), bound, runner())
    finally:
        for name in [name for name in sys.modules if ours(name)]:
            del sys.modules[name]
        sys.modules.update(before)


class Case:
    """A step of a layer.

    Attributes:
        out: (tokens, heads, 512) of the last run.
    """

    out: Tensor

    def fill(self, seed: int) -> None:
        """Lists and lengths of another step."""
        raise NotImplementedError

    def run(self) -> None:
        """One layer of it."""
        raise NotImplementedError

    def want(self) -> Tensor:
        """Truth in float64."""
        raise NotImplementedError

    def metadata(self) -> None:
        """Makes the metadata of a step, before its layers."""
        raise NotImplementedError

    def bind(self) -> None:
        """Takes the function that FlashMLA's name has now, where SGLang takes it once."""

    def follow(self, first: Any) -> None:
        """Takes the lengths and the schedule of another layer of its step."""

    def check(self) -> None:
        calls.check(self.out.cpu(), self.want())


def queries(tokens: int, heads: int, width: int, device: str) -> Tensor:
    r = torch.Generator().manual_seed(heads)
    return torch.randn(tokens, heads, width, generator=r).bfloat16().to(device)


class Sparse(Case):
    """DSA's (V3.2, GLM-5) over rows of 656 bytes; heads are padded as SGLang does."""

    def __init__(
        self, folder: Path, names: Any, heads: int = 16, padded: int = 64, tokens: int = 3,
        topk: int = 128, pages: int = 4, device: str = "cpu",
    ) -> None:  # fmt: skip
        file = folder / ATTENTION / "dsa_backend.py"
        found = calls.methods(
            file, "DeepseekSparseAttnBackend", ("_forward_flashmla_kv",), {}
        ) | calls.methods(
            file, "DeepseekSparseAttnBackend", ("_compute_flashmla_metadata",),
            {"DSAFlashMLAMetadata": types.SimpleNamespace},
        )  # fmt: skip
        self.names, self.device, self.topk = names, device, topk
        self.q = queries(tokens, heads, WIDTH, device)
        self.cache = calls.pages_656(pages, PAGE, 1)
        self.pool = self.cache.raw.to(device).flatten(0, 1)
        self.lists = torch.zeros(tokens, topk, dtype=torch.int32, device=device)
        self.lengths = torch.full((tokens,), topk, dtype=torch.int32, device=device)
        self.me = type("DeepseekSparseAttnBackend", (), dict(found))()
        vars(self.me).update(
            flashmla_kv_num_q_heads=padded, physical_page_size=PAGE, kv_cache_dim=656,
            dsa_kv_cache_store_fp8=True, dsa_index_topk=topk, flashmla_kv_format="V32",
        )  # fmt: skip
        self.layer = types.SimpleNamespace(tp_q_head_num=heads, head_dim=WIDTH, layer_id=0)
        self.step: Any = None

    def fill(self, seed: int) -> None:
        tokens = len(self.q)
        count = len(self.pool)
        self.lists.copy_(calls.lists_of(tokens, self.topk, count, seed))
        self.lists[:, 0] = seed  # no row is empty
        self.lists[-1, 1:] = -1
        self.metadata()

    def metadata(self) -> None:
        made = self.me._compute_flashmla_metadata(self.lengths, 1)
        if self.step is None:
            self.step = types.SimpleNamespace(
                dsa_cache_seqlens_int32=self.lengths, flashmla_metadata=made
            )
        else:  # a graph's, which keeps its tensors
            for name in ("flashmla_metadata", "num_splits"):
                getattr(self.step.flashmla_metadata, name).copy_(getattr(made, name))

    def run(self) -> None:
        found = self.me._forward_flashmla_kv(
            self.q, self.pool, LATENT, WIDTH**-0.5, self.layer, self.step, self.lists
        )
        self.out = found.view(*self.q.shape[:2], LATENT)

    def want(self) -> Tensor:
        listed: list[Any] = [(self.cache.values, self.lists.cpu(), None)]
        return calls.truth(self.q.cpu(), listed, WIDTH**-0.5)[0]


class Pool:
    """V4's pool: the window's pages, and a second cache's."""

    request_window = None

    def __init__(self, window: calls.Pages, more: calls.Pages, device: str) -> None:
        self.parts = window, more
        self.raw = [_flat(each.raw).to(device) for each in self.parts]

    get_swa_key_buffer_radix = lambda self, layer: self.raw[0]
    get_extra_key_buffer = lambda self, layer: self.raw[1]
    get_swa_key_page_size = lambda self: self.parts[0].raw.shape[1]
    get_extra_key_page_size = lambda self, layer: self.parts[1].raw.shape[1]
    get_swa_key_bytes_per_token = lambda self: self.parts[0].raw.shape[2]
    get_extra_key_bytes_per_token = lambda self, layer: self.parts[1].raw.shape[2]
    get_swa_key_layout = lambda self: types.SimpleNamespace(is_interleaved=False)


def _flat(raw: Tensor) -> Tensor:
    """(pages, bytes of a page), what lies between pages included."""
    return raw.as_strided((len(raw), raw.stride(0)), (raw.stride(0), 1))


class V4(Case):
    """V4's: a window of tokens, and with a ratio a second, compressed cache beside it.

    heads: of this rank, padded with what memory holds (``rest``), as SGLang does.
    """

    def __init__(
        self, folder: Path, names: Any, heads: int = 16, padded: int = 64, ratio: int = 128,
        page: int = 2, tokens: int = 3, window: int = 128, more: int = 64, pages: int = 4,
        more_pages: int = 40, device: str = "cpu",
        rest: float = torch.nan,
    ) -> None:  # fmt: skip
        self.file = file = folder / ATTENTION / "deepseek_v4_backend.py"
        self.names, self.ratio, self.heads = names, ratio, heads
        self.pool = Pool(
            calls.pages_584(pages, PAGE, 1), calls.pages_584(more_pages, page, 2), device
        )
        self.q = torch.full((tokens, padded, LATENT), rest, device=device).bfloat16()
        self.q[:, :heads] = queries(tokens, heads, LATENT, device)
        self.sink = torch.zeros(padded, device=device)
        self.sink[:heads] = torch.linspace(-2, 2, heads)
        lists = lambda topk: torch.zeros(tokens, topk, dtype=torch.int32, device=device)
        lengths = lambda: torch.ones(tokens, dtype=torch.int32, device=device)
        self.lists, self.others = lists(window), lists(more)
        self.lengths, self.other_lengths = lengths(), lengths()
        self.layer = types.SimpleNamespace(layer_id=0, v_head_dim=LATENT, tp_q_head_num=heads)
        self.step = type("DSV4AttnMetadata", (), {
            "get_flashmla_metadata": lambda me, ratio: me.scheduled,
            "sparse_page_indices": lambda me, ratio: self.others,
            "sparse_topk_lengths": lambda me, ratio: self.other_lengths,
        })()  # fmt: skip
        self.step.swa_page_indices, self.step.swa_topk_lengths = self.lists, self.lengths
        known = {
            "DeepSeekV4TokenToKVPool": Pool, "DSV4AttnMetadata": type(self.step),
            "get_platform": lambda: types.SimpleNamespace(is_sm100=False, is_sm120=False),
            "_is_xpu": False, "_pad_tensor_to_size": None, "Literal": dict, "Union": dict,
        }  # fmt: skip
        forward = calls.methods(file, "DeepseekV4AttnBackend", ("_forward_attention",), known)
        me = self.me = type("DeepseekV4AttnBackend", (), dict(forward))()
        vars(me).update(
            mtp_enabled=False, token_to_kv_pool=self.pool, trtllm_attn=False, is_dsv41=False,
            forward_metadata=types.SimpleNamespace(core_attn_metadata=self.step),
            softmax_scale=LATENT**-0.5, head_dim_v=LATENT, _swa_interleaved=False,
            _use_sparse_prefill=lambda batch, num_qo_tokens: False,
        )  # fmt: skip
        self.bind()

    def bind(self) -> None:
        space = {"self": self.me, "functools": functools, "flash_mla_interface": self.names}
        code = _assigned(self.file, "self._flash_mla_with_kvcache")
        self.me._flash_mla_with_kvcache = eval(code, space)

    def fill(self, seed: int) -> None:
        r = torch.Generator().manual_seed(seed)
        tokens = len(self.q)
        for lists, lengths, part in zip(
            (self.lists, self.others), (self.lengths, self.other_lengths), self.pool.parts
        ):
            count, most = len(part.values), lists.shape[1]
            lists.copy_(calls.lists_of(tokens, most, count, seed + most))
            lengths.copy_(torch.randint(1, most + 1, (tokens,), generator=r))
        self.lists[:, 0] = seed  # no row is empty
        self.metadata()

    def metadata(self) -> None:
        self.step.scheduled = self.names.get_mla_metadata()[0]

    def follow(self, first: Any) -> None:
        self.lengths.copy_(first.lengths)
        self.other_lengths.copy_(first.other_lengths)
        self.step.scheduled = first.step.scheduled

    def run(self) -> None:
        kv = None
        found = self.me._forward_attention(
            self.q, kv, kv, self.layer, None, self.ratio, False, self.sink
        )
        self.out = found[:, : self.heads]

    def want(self) -> Tensor:
        window, more = self.pool.parts
        listed: list[Any] = [(window.values, self.lists.cpu(), self.lengths.cpu())]
        if self.ratio:
            listed.append((more.values, self.others.cpu(), self.other_lengths.cpu()))
        q, sink = self.q[:, : self.heads].cpu(), self.sink[: self.heads].cpu()
        return calls.truth(q, listed, LATENT**-0.5, sink)[0]


def _assigned(file: Path, target: str) -> Any:
    """Compiled expression that a file assigns to ``target``, to be evaluated."""
    (value,) = (
        node.value for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == target
    )  # fmt: skip
    return compile(ast.Expression(value), file.name, "eval")


class Dense(Case):
    """The backend ``flashmla`` over a cache of 16 bits; its module has bound the names."""

    def __init__(
        self, folder: Path, bound: Any, heads: int = 16, batch: int = 2, pages: int = 6,
        width: int = 3, device: str = "cpu",
    ) -> None:  # fmt: skip
        file = folder / ATTENTION / "flashmla_backend.py"
        r = torch.Generator().manual_seed(0)
        self.kv = (torch.randn(pages * PAGE, 1, WIDTH, generator=r) / 10).bfloat16().to(device)
        self.q = queries(batch, heads, WIDTH, device)
        self.bound = bound
        order = torch.randperm(pages, generator=r)[: batch * width]
        self.table = order.int().view(batch, width).to(device)
        self.lengths = torch.ones(batch, dtype=torch.int32, device=device)
        known = {
            "paged_view": lambda flat, page: flat.view(-1, page, *flat.shape[1:]),
            "PAGE_SIZE": PAGE, "flash_mla_with_kvcache": self._now,
            "get_parallel": lambda: types.SimpleNamespace(dcp_enabled=False),
        }  # fmt: skip
        found = calls.methods(file, "FlashMLABackend", ("forward_decode",), known)
        self.me = type("FlashMLABackend", (), dict(found))()
        vars(self.me).update(
            token_to_kv_pool=types.SimpleNamespace(get_key_buffer=lambda layer: self.kv),
            is_fp8_kvcache=False, kv_lora_rank=LATENT, forward_metadata=None,
        )  # fmt: skip
        self.layer = types.SimpleNamespace(
            layer_id=0, tp_q_head_num=heads, head_dim=WIDTH, v_head_dim=LATENT, scaling=192**-0.5
        )

    def _now(self, *given: Any, **named: Any) -> Any:
        """Calls the function that the module's name has at the time of the call."""
        return self.bound.flash_mla_with_kvcache(*given, **named)

    def fill(self, seed: int) -> None:
        r = torch.Generator().manual_seed(seed)
        most = self.table.shape[1] * PAGE
        self.lengths.copy_(torch.randint(1, most + 1, self.lengths.shape, generator=r))
        self.metadata()

    def metadata(self) -> None:
        made, splits = self.bound.get_mla_metadata(self.lengths, self.q.shape[1], 1)
        if self.me.forward_metadata is None:
            self.me.forward_metadata = types.SimpleNamespace(
                flashmla_metadata=made, num_splits=splits, block_kv_indices=self.table
            )
        else:  # a graph's, which keeps its tensors
            self.me.forward_metadata.flashmla_metadata.copy_(made)
            self.me.forward_metadata.num_splits.copy_(splits)

    def run(self) -> None:
        batch = types.SimpleNamespace(batch_size=len(self.q), seq_lens=self.lengths)
        found = self.me.forward_decode(self.q.flatten(1), None, None, self.layer, batch)
        self.out = found.view(*self.q.shape[:2], LATENT)

    def want(self) -> Tensor:
        table = self.table.cpu().long()
        lists = (table[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
        listed: list[Any] = [(self.kv[:, 0].double().cpu(), lists, self.lengths.cpu())]
        return calls.truth(self.q.cpu(), listed, 192**-0.5)[0]


class Prompts(Sparse):
    """DSA's over rows of 16 bits (``flashmla_sparse``): prompts, or decode of a BF16 cache."""

    def __init__(self, folder: Path, names: Any, heads: int = 16, **sizes: Any) -> None:
        super().__init__(folder, names, heads, **sizes)
        found = calls.methods(
            folder / ATTENTION / "dsa_backend.py", "DeepseekSparseAttnBackend",
            ("_forward_flashmla_sparse",), {},
        )  # fmt: skip
        self.me._forward_flashmla_sparse = types.MethodType(
            found["_forward_flashmla_sparse"], self.me
        )
        self.me.device_sm_major, self.me._sink_pad_cache = 9, {}
        r = torch.Generator().manual_seed(5)
        self.rows = (torch.randn(len(self.pool), 1, WIDTH, generator=r) / 10).bfloat16()
        self.cache = calls.Pages(self.cache.raw, self.rows[:, 0].double())
        self.rows = self.rows.to(self.device)

    def metadata(self) -> None:
        """None."""

    def run(self) -> None:
        self.out = self.me._forward_flashmla_sparse(
            self.q, self.rows, LATENT, self.lists, WIDTH**-0.5, self.lengths
        )
