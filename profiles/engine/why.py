"""The first tensor of a request that has other bits in a batch than alone, in batch-invariant mode.

Within one engine hooks note a hash of each token's row of what a layer computes: norms,
projections, what goes into attention and comes out, index scores of the tokens that a query token
sees, choices.  A request's rows alone are held against its rows in a batch, in the order in which
they are computed: over the tokens of its prompt first, then token by token.

Both are done with the norm that vLLM brings, and with the one that the plugin puts in its place
(``snapmla.integrations.vllm.invariant``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from profiles.engine.spec import ALONE
from profiles.engine.within import replaced, watched
from profiles.gate import Gate
from profiles.gate import page as gates_page
from snapmla.dsa import index_logits

LAYER = re.compile(r"layers\.(\d+)\.")
# Modules whose results are noted, by the last part of their names; the last is behind all layers.
MODULES = (
    "input_layernorm", "fused_qkv_a_proj", "q_a_layernorm", "kv_a_layernorm", "q_b_proj", "wq_b",
    "wk_weights_proj", "k_norm", "o_proj", "post_attention_layernorm", "mlp", "norm",
)  # fmt: skip
AT_ONCE = 1 << 26  # elements whose hash is made at once
BLOCK = 1 << 13  # factors that are made at once
LAST = 1 << 20  # the layer behind all

Key = tuple[int, str]  # layer, name


class Hash:
    """Of a row's bits: a sum of its words times odd random numbers, modulo 2**64.

    Zeros behind a row do not change it: index scores have as many columns as a step needs.
    """

    def __init__(self) -> None:
        self._factors = torch.empty(0, dtype=torch.int64, device="cpu")

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, ...) -> int64 (rows,)."""
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
        flat = x.reshape(x.shape[0], -1).contiguous().view(words)
        factors = self._of(flat.shape[1], flat.device)
        rows = max(1, AT_ONCE // max(flat.shape[1], 1))
        return torch.cat([(part.long() * factors).sum(1) for part in flat.split(rows)])

    def _of(self, width: int, device: torch.device) -> Tensor:
        while len(self._factors) < width:
            generator = torch.Generator().manual_seed(len(self._factors))
            made = torch.randint(1 << 61, (BLOCK,), generator=generator, device="cpu") * 2 + 1
            self._factors = torch.cat((self._factors.to(device), made.to(device)))
        return self._factors[:width]


class Trace:
    """Hashes of the marked requests of a run, by request, layer and name, by position.

    Attributes:
        found: request -> (layer, name) -> (first position, hashes) of each step.
        order: (layer, name) -> when it first came.
    """

    def __init__(self, where: Callable[[], list[tuple[int, int, int, int]]]) -> None:
        """``where``: (request, its first row, rows, position of the first) of the current step."""
        self.where, self.hash = where, Hash()
        self.marked: set[int] = set()
        self.found: dict[int, dict[Key, list[tuple[int, Tensor]]]] = {}
        self.order: dict[Key, int] = {}

    def note(self, layer: int, name: str, x: Tensor, begin: int = 0) -> None:
        """Rows of the step from number ``begin`` on."""
        if not self.marked:
            return
        self.order.setdefault((layer, name), len(self.order))
        for request, first, rows, position in self.where():
            at = max(first, begin), min(first + rows, begin + x.shape[0])
            if request in self.marked and at[0] < at[1]:
                hashes = self.hash(x[at[0] - begin : at[1] - begin])
                kept = self.found.setdefault(request, {}).setdefault((layer, name), [])
                kept.append((position + at[0] - first, hashes))

    @contextmanager
    def of(self, *marked: int) -> Iterator[None]:
        self.marked, self.found = set(marked), {}
        try:
            yield
        finally:
            self.marked = set()

    def taken(self, request: int) -> dict[Key, Tensor]:
        """int64 (positions,) by layer and name."""
        return {
            key: torch.cat([hashes for _, hashes in sorted(kept, key=lambda each: each[0])]).cpu()
            for key, kept in self.found[request].items()
        }


def first_difference(
    alone: dict[Key, Tensor], batch: dict[Key, Tensor], order: dict[Key, int], prompt: int
) -> dict[str, Any] | None:
    """What comes first of what differs; None if nothing does.

    Args:
        order: of the keys within a layer's computation.
        prompt: tokens of the prompt, which are computed before all others.
    """
    if alone.keys() != batch.keys():
        raise ValueError(f"not in both: {sorted(alone.keys() ^ batch.keys())}")
    ways = [key for key in alone if alone[key].shape != batch[key].shape]
    if ways:
        raise ValueError(f"of other numbers of tokens: {sorted(ways)}")
    unlike = {key: (alone[key] != batch[key]).nonzero().flatten() for key in alone}
    unlike = {key: places for key, places in unlike.items() if len(places)}
    if not unlike:
        return None
    in_prompt = {k: p[p < prompt] for k, p in unlike.items() if int(p[0]) < prompt}
    if in_prompt:
        key = min(in_prompt, key=lambda k: (k[0], order[k]))
    else:
        key = min(unlike, key=lambda k: (int(unlike[k][0]), k[0], order[k]))
    return {
        "layer": key[0], "name": key[1], "position": int(unlike[key][0]),
        "tokens": len(unlike[key]), "of": len(alone[key]),
        "in_prompt": bool(in_prompt), "tensors": len(unlike), "of_tensors": len(alone),
    }  # fmt: skip


# ---------------------------------------------------------------------------- within the engine


def layer_of(name: str) -> int:
    found = LAYER.search(name)
    return int(found.group(1)) if found else LAST


def rows_of(runner: Any, scheduled: list[Any]) -> Callable[[], list[tuple[int, int, int, int]]]:
    """Of the current step: requests in the order of the runner's batch.

    Args:
        scheduled: whose last is what the scheduler gave out.
    """

    def where() -> list[tuple[int, int, int, int]]:
        batch, counts, first = runner.input_batch, scheduled[-1].num_scheduled_tokens, 0
        found = []
        for i, name in enumerate(batch.req_ids):
            told = runner.requests[name].sampling_params.extra_args or {}
            position = int(batch.num_computed_tokens_cpu[i])
            found.append((told.get("row", -1), first, counts[name], position))
            first += counts[name]
        return found

    return where


def hook(trace: Trace, model: torch.nn.Module) -> None:
    """Notes what the model's modules give, and what its attention takes."""
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    def noted(layer: int, name: str) -> Callable[..., None]:
        def after(module: Any, given: Any, result: Any) -> None:
            for i, each in enumerate(result if isinstance(result, tuple) else (result,)):
                if isinstance(each, Tensor):
                    trace.note(layer, name if i == 0 else f"{name}[{i}]", each)

        return after

    def before(layer: int) -> Callable[..., None]:
        def taken(module: Any, given: Any) -> None:
            for name, each in zip(("q", "kv_c", "k_pe"), given):
                trace.note(layer, f"attention takes {name}", each)

        return taken

    for name, module in model.named_modules():
        part = name.rpartition(".")[2]
        if part in MODULES:
            module.register_forward_hook(noted(layer_of(name), part))
        elif isinstance(module, MLAAttention):
            module.register_forward_pre_hook(before(layer_of(name)))
            module.register_forward_hook(noted(layer_of(name), "attention"))


class Indexer:
    """Notes what the indexer takes, scores and chooses."""

    def __init__(self, trace: Trace, module: Any) -> None:
        self.trace, self.module = trace, module
        self._call, self._topk = module._Chosen.__call__, module.index_topk
        self._layer, self._q = 0, torch.empty(0)

    def patches(self) -> list[Any]:
        noted = self

        def call(chosen: Any, *given: Any, **named: Any) -> Any:
            return noted.call(chosen, *given, **named)

        return [replaced(self.module._Chosen, "__call__", call),
                replaced(self.module, "index_topk", self.topk)]  # fmt: skip

    def call(self, chosen: Any, *given: Any, **named: Any) -> Any:
        told = dict(zip(chosen.names, given), **named)
        self._layer = layer_of(self.module._resolve_layer_name(told["k_cache_prefix"]))
        self._q = told["q_quant"]
        for name in ("q_quant", "weights", "k"):
            self.trace.note(self._layer, f"indexer takes {name}", told[name])
        found = self._call(chosen, *given, **named)
        rows = told["topk_indices_buffer"][: self._q.shape[0], : told["topk_tokens"]]
        self.trace.note(self._layer, "choices", rows)
        return found

    def topk(
        self, q: Tensor, w: Tensor, pages: Tensor, table: Tensor, lengths: Tensor, k: int, *,
        cu_seqlens_q: Tensor | None, max_tokens: int, **named: Any,
    ) -> Any:  # fmt: skip
        found = self._topk(
            q, w, pages, table, lengths, k, cu_seqlens_q=cu_seqlens_q, max_tokens=max_tokens,
            **named,
        )  # fmt: skip
        if self.trace.marked:
            columns = min(max_tokens, table.shape[1] * pages.shape[1])
            scores = index_logits(
                q, w, pages, table, lengths, cu_seqlens_q=cu_seqlens_q, max_tokens=columns
            )
            seen = tokens_seen(lengths, cu_seqlens_q, scores.shape[0])
            for part, limits in zip(scores.split(4096), seen.split(4096)):
                part.masked_fill_(torch.arange(columns, device=q.device) >= limits[:, None], 0.0)
            begin = (q.data_ptr() - self._q.data_ptr()) // self._q[:1].nbytes
            self.trace.note(self._layer, "index scores", scores, begin)
        return found


def tokens_seen(lengths: Tensor, begins: Tensor | None, rows: int) -> Tensor:
    """int64 (rows,): how many tokens each query token sees; its sequence's last one sees all."""
    row = torch.arange(rows, device=lengths.device)
    if begins is None:
        each = rows // len(lengths)
        return lengths[row // each].long() - (each - 1 - row % each)
    request = torch.searchsorted(begins[1:].long(), row, right=True).clamp(max=len(lengths) - 1)
    return lengths[request].long() - (begins[request + 1].long() - 1 - row)


@contextmanager
def traced(engine: Any) -> Iterator[Trace]:
    """An engine whose marked requests are noted."""
    from snapmla.integrations.vllm import indexer
    from snapmla.integrations.vllm.sparse import SnapMLASparseImpl

    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    steps: list[Any] = []
    trace = Trace(rows_of(runner, steps))
    hook(trace, runner.get_model())
    kernel = SnapMLASparseImpl._forward_mqa_kernel

    def attend(impl: Any, q: Any, *given: Any, layer: Any, **named: Any) -> Any:
        layer_number = layer_of(layer.layer_name)
        whole = torch.cat(q, -1) if isinstance(q, tuple) else q
        trace.note(layer_number, "kernel takes q", whole)
        out, lse = kernel(impl, q, *given, layer=layer, **named)
        trace.note(layer_number, "kernel gives", out)
        if lse is not None:
            trace.note(layer_number, "kernel gives lse", lse)
        return out, lse

    with ExitStack() as stack:
        for each in (
            replaced(SnapMLASparseImpl, "_forward_mqa_kernel", attend),
            watched(engine, steps.append),
            *Indexer(trace, indexer).patches(),
        ):
            stack.enter_context(each)
        yield trace


def compared(engine: Any, trace: Trace, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Of each marked request: its prompt's length, whether its results are the same bits, and the
    first tensor that is not."""
    with trace.of(*ALONE):
        ids, logs = engine.continued(prompts)
        batch = {i: trace.taken(i) for i in ALONE}
    found = []
    for i in ALONE:
        with trace.of(0):
            single, single_logs = engine.continued([prompts[i]])
            alone = trace.taken(0)
        found.append({
            "request": i, "tokens": len(prompts[i]),
            "same": single == [ids[i]] and bool(torch.equal(single_logs[0], logs[i])),
            "first": first_difference(alone, batch[i], trace.order, len(prompts[i])),
        })  # fmt: skip
    return found


def measure(engine: Any, out: Path) -> dict[str, Any]:
    """All of a case."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import layernorm

    from snapmla.integrations.vllm import invariant

    device, current = torch.device("cuda"), getattr(layernorm, invariant.NAME)
    needed = invariant.depends_on_rows(ops.fused_add_rms_norm, device)
    theirs = current.theirs if isinstance(current, invariant.RowByRow) else current
    prompts = json.loads(Path(engine.case.prompts).read_text())
    found: dict[str, Any] = {"norm depends on rows": needed, "alone": []}
    with traced(engine) as trace:
        for name, norm in (("vLLM's norm", theirs), ("rows", invariant.RowByRow(theirs))):
            setattr(layernorm, invariant.NAME, norm)
            found[name] = compared(engine, trace, prompts)
    ids, logs = engine.continued(prompts)
    for i, prompt in enumerate(prompts):
        single, single_logs = engine.continued([prompt])
        found["alone"].append(single == [ids[i]] and bool(torch.equal(single_logs[0], logs[i])))
    return found


# -------------------------------------------------------------------------------------- the page


def said(first: dict[str, Any] | None) -> str:
    """A difference as a sentence."""
    if first is None:
        return "nothing"
    layer = "the last norm" if first["layer"] == LAST else f"layer {first['layer']}"
    where = "prompt" if first["in_prompt"] else "new tokens"
    return (
        f"`{first['name']}` of {layer}, in its {where}, from position {first['position']}, "
        f"{first['tokens']} of {first['of']} tokens; {first['tensors']} of {first['of_tensors']} "
        "tensors"
    )


def gates(data: dict[str, Any]) -> list[Gate]:
    """The same bits alone and in a batch, with the norm that the plugin puts in."""
    alone = data.get("alone", [])
    claim = "each of 32 requests alone and in their batch: the same bits in batch-invariant mode"
    figures = (f"{sum(alone)} of {len(alone)}",) if alone else ()
    return [Gate("invariance", claim, all(alone) if alone else None, figures)]


def page(header: Sequence[str], data: dict[str, Any]) -> str:
    """What differs, as Markdown."""
    depends = "depends" if data["norm depends on rows"] else "does not depend"
    lines = ["# vLLM with sparse attention: a request alone and in a batch", "", *header, "",
             gates_page(gates(data)).rstrip(), "",
             f"vLLM's norm with a residual {depends} on the number of rows.", "",
             "| norm | request | tokens of its prompt | same bits | what differs first |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, text in (("vLLM's norm", "vLLM's"), ("rows", "row by row")):
        lines += [f"| {text} | {row['request']} | {row['tokens']} | "
                  f"{'yes' if row['same'] else 'no'} | {said(row['first'])} |"
                  for row in data[name]]  # fmt: skip
    return "\n".join(lines) + "\n"
