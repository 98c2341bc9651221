"""The indexer of vLLM's DSA models on ``snapmla.dsa``, in the place of vLLM's operator.

vLLM has one function for it, ``sparse_attn_indexer``: it writes the step's index keys, scores
cached tokens and leaves the best of each query token in a buffer, as positions in the sequence.
Models reach it as the operator ``vllm::sparse_attn_indexer``, at which compiled graphs are cut, and
the layer that CUDA builds of DeepSeek-V3.2 use calls it as a function.  ``serve`` puts one function
in the place of both.  It asks whose indexer is called: of layers of our sparse backend ours
chooses, all others get vLLM's.

Where a step goes::

    decode and drafts     index_topk, once; query tokens of different numbers are ragged
    chunks of prompts     index_topk a chunk, straight from the pages: vLLM's copies keys first
    context parallelism   index_logits, select_topk over the rank's tokens; then the ranks' best are
                          gathered and the best of all chosen: the tokens that one rank would choose

Choices are exact, in ascending order of position, the same in any batch (docs/dsa.md).  Rows are
written whole, -1 behind what was chosen, so nothing is cleared before.

vLLM's buffer is of positions.  Where the step's attention is ours and has the indexer's pages it
gets slots instead, and how many (``Counts``), so nobody turns positions into them.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.distributed import get_dcp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as theirs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _resolve_layer_name

from snapmla.dsa import append_index_k, index_logits, index_topk, select_topk
from snapmla.integrations.vllm import refuse

NAME = "sparse_attn_indexer"
# modules of layers that call the function by a name of their own, by release
LAYERS = ("vllm.models.deepseek_v32.attention", "vllm.models.deepseek_v32.nvidia.attention")
MIB, ROOM = 1 << 20, 65 / 64  # what a workspace has beside its scores
_served: set[str] = set()  # prefixes of the index caches of our layers
_lock = threading.Lock()
Arguments = Mapping[str, Any]


def serve(indexer: Any) -> None:
    """Lets ours choose from now on the tokens of this layer's indexer, in this process.

    Raises:
        ValueError: its keys or choices are of another kind.
    """
    refuse.indexer(indexer)
    with _lock:
        _served.add(indexer.k_cache.prefix)
        _install()


def _install() -> None:
    """Puts one function in the place of vLLM's, wherever it is called; the lock is held."""
    ours = getattr(theirs, NAME)
    if not isinstance(ours, _Chosen):
        ours = _Chosen(ours)
        with warnings.catch_warnings():  # that a kernel of that name is overridden: it is meant
            warnings.simplefilter("ignore", UserWarning)
            _library().impl(NAME, ours, current_platform.dispatch_key, allow_override=True)
        setattr(theirs, NAME, ours)
    for name in LAYERS:
        module = sys.modules.get(name)
        if module is not None and getattr(module, NAME, ours) is not ours:
            setattr(module, NAME, ours)


@functools.cache
def _library() -> torch.library.Library:
    """Kept, as an implementation goes when its library does."""
    return torch.library.Library("vllm", "IMPL")


class _Chosen:
    """vLLM's function, or ours for the layers of our backend."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.theirs = function
        self.names = tuple(inspect.signature(function).parameters)
        self.ours = eager_break_during_capture(choose)  # graphs that break there run it eagerly
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any, **named: Any) -> torch.Tensor:
        told = dict(zip(self.names, given), **named)
        prefix = _resolve_layer_name(told["k_cache_prefix"])
        if prefix not in _served:
            return self.theirs(*given, **named)
        return self.ours(**told | {"k_cache_prefix": prefix})


# ------------------------------------------------------------------------------------- a step's


def choose(**given: Any) -> torch.Tensor:
    """Chooses tokens in the place of vLLM's function, whose arguments it takes by name.

    Returns:
        ``topk_indices_buffer``, of which the step's rows are written.

    Raises:
        ValueError: if candidate blocks, FP4 or prefill context parallelism is asked for.
    """
    _check(given)
    buffer = given["topk_indices_buffer"]
    steps = get_forward_context().attn_metadata
    if not isinstance(steps, dict):  # memory is profiled: what scores will take
        size = int(envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * MIB * ROOM)
        torch.empty(size, dtype=torch.uint8, device=given["hidden_states"].device)
        return buffer
    step = steps[given["k_cache_prefix"]]
    if not given["skip_k_cache_insert"]:
        slots = step.slot_mapping
        scale = "ue8m0" if given["scale_fmt"] == "ue8m0" else "free"
        append_index_k(given["kv_cache"], given["k"][: slots.shape[0]], slots, scale=scale)
    if _nobody_reads(given, steps):
        return buffer
    ranks = Ranks.of(given)
    counts = None if ranks is not None else Counts.of(given, step, steps)
    if step.num_prefills:
        for chunk in step.prefill.chunks:
            _prompt(Rows.of(given, chunk.token_start, chunk.token_end, counts), chunk, ranks)
    if step.num_decodes:
        _decode(Rows.of(given, 0, step.num_decode_tokens, counts), step, ranks)
    return buffer


def _check(given: Arguments) -> None:
    if given.get("candidate_blocks") is not None:
        raise ValueError(
            "snapmla: an indexer of two levels (candidate blocks, DeepSeek-V4.1) is not served: "
            f"{refuse.INSTEAD}"
        )
    if given["q_scale"] is not None or given.get("use_fp4_cache") or given.get("use_pcp"):
        raise ValueError(
            "snapmla: index queries of FP4 and prefill context parallelism are not served: "
            f"{refuse.INSTEAD}"
        )


def _nobody_reads(given: Arguments, steps: Mapping[str, Any]) -> bool:
    """True if the step's prompts are short enough for dense attention, which needs no choice.

    vLLM says so of a layer where that is the way of the whole step; never in a graph, whose replays
    may be of other steps.
    """
    name = given.get("dense_mha_metadata_layer_name")
    if not name or _is_full_graph():
        return False
    step = steps.get(_resolve_layer_name(name))
    dense = getattr(getattr(step, "prefill", None), "use_dense_mha", False)
    return bool(dense) and getattr(step, "num_decode_tokens", -1) == 0


def _is_full_graph() -> bool:
    mode = get_forward_context().cudagraph_runtime_mode
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return captured or getattr(mode, "name", "") == "FULL"


class Counts(NamedTuple):
    """Numbers of slots that each query token has, if a step's choices are slots.

    Attributes:
        memory: int32 (tokens,) or more; None: choices are positions.
        readers: metadata of the step's attention, which is told.
    """

    memory: torch.Tensor | None
    readers: tuple[Any, ...]

    @classmethod
    def of(cls, given: Arguments, step: Any, steps: Mapping[str, Any]) -> torch.Tensor | None:
        """The memory of a call; looked for once a step."""
        found = getattr(step, "_snapmla", None)
        if found is None:
            found = step._snapmla = cls._found(given, step, steps)
        for each in found.readers:
            each.chosen = found.memory
        return found.memory

    @classmethod
    def _found(cls, given: Arguments, step: Any, steps: Mapping[str, Any]) -> Counts:
        """Caches that share slots share their block tables, as each kind of page has its own."""
        ours = {id(each): each for each in steps.values() if hasattr(each, "chosen")}
        readers = tuple(ours.values())
        slots, page = step.slot_mapping.data_ptr(), given["kv_cache"].shape[1]
        same = [r.slots and r.slot_mapping.data_ptr() == slots and r.block_size == page
                for r in readers]  # fmt: skip
        if not readers or not all(same):
            return cls(None, ())
        return cls(readers[0].plans.counts, readers)


class Rows(NamedTuple):
    """Query tokens of one call, what they are scored against, and where choices go.

    Attributes:
        q: float8_e4m3fn (n, h, 128).
        weights: float32 (n, h).
        pages: uint8 (pages, 64, 132).
        out: int32 (n, topk).
        most: tokens that a sequence can have.
        counts: int32 (n,) beside slots; None: positions.
    """

    q: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    out: torch.Tensor
    most: int
    counts: torch.Tensor | None = None

    @classmethod
    def of(cls, given: Arguments, begin: int, end: int, counts: torch.Tensor | None = None) -> Rows:
        """Tokens ``begin`` to ``end`` of a step."""
        out = given["topk_indices_buffer"][begin:end, : given["topk_tokens"]]
        return cls(
            given["q_quant"][begin:end], given["weights"][begin:end], given["kv_cache"], out,
            given["max_model_len"], None if counts is None else counts[begin:end],
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    def choose(
        self, table: torch.Tensor, lengths: torch.Tensor, s_q: int | None,
        begins: torch.Tensor | None = None, most: int | None = None,
    ) -> None:  # fmt: skip
        """``index_topk`` of ``s_q`` query tokens a sequence, or of ragged ones."""
        q, w = self.q, self.weights
        if s_q is not None:
            q, w = q.unflatten(0, (-1, s_q)), w.unflatten(0, (-1, s_q))
        index_topk(
            q, w, self.pages, table, lengths, self.out.shape[1], cu_seqlens_q=begins,
            slots=self.counts is not None, max_tokens=self.most if most is None else most,
            out=self.out, counts=self.counts,
        )  # fmt: skip


def _decode(rows: Rows, step: Any, ranks: Ranks | None) -> None:
    """Requests that decode, each with as many query tokens as it drafts.

    Those that decode come first in a step, so lengths of the step's requests are theirs.  Where
    vLLM has made a sequence of each query token (``seq_lens`` has as many), it is taken so.
    """
    decode, n = step.decode, rows.tokens
    if not n:
        return
    table, lengths = decode.block_table, decode.seq_lens
    requests = lengths.shape[0]
    even = not decode.requires_padding and n % requests == 0
    if ranks is not None:
        each = n // requests if even else decode.decode_lens
        if not even:
            raise ValueError(
                "snapmla: different numbers of drafts are not served beside context parallelism: "
                "leave --decode-context-parallel-size at 1"
            )
        if each > 1:
            table = table[:requests].repeat_interleave(each, 0)
        _of_ranks(rows, table[:n], lengths.reshape(-1)[:n].contiguous(), ranks)
    elif even and n == requests:
        rows.choose(table[:n], lengths[:, -1].contiguous(), 1)
    elif even:
        rows.choose(table[:requests], step.seq_lens[:requests], n // requests)
    else:
        begins = torch.nn.functional.pad(decode.decode_lens[:requests].cumsum(0), (1, 0)).int()
        rows.choose(table[:requests], step.seq_lens[:requests], None, begins)


def _prompt(rows: Rows, chunk: Any, ranks: Ranks | None) -> None:
    """Query tokens of prompts: all of some requests, or some of one."""
    if not rows.tokens:
        return
    if ranks is not None:
        request = _requests(chunk)
        seen = (chunk.cu_seqlen_ke - chunk.cu_seqlen_ks).int()
        _of_ranks(rows, chunk.block_table[request], seen, ranks)
        return
    known = getattr(chunk, "_snapmla", None)
    if known is None:  # once a step: all layers have the chunk
        known = chunk._snapmla = _bounds(chunk)
    begins, lengths = known
    longest = getattr(chunk, "max_seqlen_k", chunk.total_seq_lens)
    rows.choose(chunk.block_table, lengths, None, begins, max(min(longest, rows.most), 1))


def _requests(chunk: Any) -> torch.Tensor:
    """Request of the chunk that each of its query tokens belongs to, int64."""
    begins = chunk.cu_seq_lens if chunk.local_cu_seq_lens is None else chunk.local_cu_seq_lens
    if chunk.num_reqs == 1:
        return torch.zeros(len(chunk.cu_seqlen_ks), dtype=torch.long, device=begins.device)
    return torch.searchsorted(begins[:-1], chunk.cu_seqlen_ks, right=True) - 1


def _bounds(chunk: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(first query token of each request, and the end; tokens that its last one sees).

    vLLM gives a query token the range [ks, ke) of keys that were copied side by side: all of a
    request have the ks where its keys begin, and ke - ks counts what they see, one more each.
    """
    begins = torch.searchsorted(chunk.cu_seqlen_ks, chunk.cu_seq_lens)
    begins[-1] = len(chunk.cu_seqlen_ks)
    last = (begins[1:] - 1).clamp(min=0)
    seen = chunk.cu_seqlen_ke[last] - chunk.cu_seqlen_ks[last]
    return begins.int(), torch.where(begins[1:] > begins[:-1], seen, 0).int()


# ------------------------------------------------------------------------- context parallelism


class Ranks(NamedTuple):
    """Ranks that share sequences: token t is rank ``t // turn % ranks``'s.

    Attributes:
        gather: (rows, k, 2) of each rank -> (rows, ranks * k, 2), ranks one behind another.
    """

    rank: int
    ranks: int
    turn: int
    gather: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(cls, given: Arguments) -> Ranks | None:
        """Ranks of a call, by its arguments; None if each rank has all tokens."""
        count = given.get("dcp_world_size", 1)
        if count == 1:
            return None
        turn = given.get("cp_kv_cache_interleave_size", 1)
        gather = lambda best: get_dcp_group().all_gather(best, dim=1)
        return cls(given["dcp_rank"], count, turn, gather)


def _of_ranks(rows: Rows, table: torch.Tensor, seen: torch.Tensor, ranks: Ranks) -> None:
    """Positions in the whole sequence, where this rank has every ``ranks``-th turn of it.

    Args:
        table: int32 (n, width), the pages of each query token's sequence on this rank.
        seen: int32 (n,), how many of the rank's tokens each query token sees.
    """
    k = rows.out.shape[1]
    columns = min(rows.most, table.shape[1] * rows.pages.shape[1])
    scores = index_logits(
        rows.q.unsqueeze(1), rows.weights.unsqueeze(1), rows.pages, table, seen, max_tokens=columns
    )
    mine, _ = select_topk(scores, seen, k)
    best = scores.gather(1, mine.clamp(0, columns - 1).long())
    rows.out.copy_(best_of_ranks(best, mine, ranks))


def best_of_ranks(scores: torch.Tensor, mine: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The k best of what the ranks' own k best are, as one rank with all tokens would choose.

    A token among the best of all is among its rank's own, as fewer than k are before it there.

    Args:
        scores: float32 (n, k) of this rank's choices.
        mine: int32 (n, k), their positions among the rank's tokens; -1: none.

    Returns:
        int32 (n, k): positions in the sequence, ascending, -1 behind them.
    """
    k, turn = mine.shape[1], ranks.turn
    place = mine // turn * (turn * ranks.ranks) + ranks.rank * turn + mine % turn
    place = torch.where(mine >= 0, place, NOWHERE).int()
    told = torch.stack((scores, place.view(torch.float32)), -1)
    scores, place = ranks.gather(told).unbind(-1)
    place, order = place.contiguous().view(torch.int32).sort(dim=1)  # ties go to the lowest
    scores = scores.gather(1, order)
    chosen, _ = select_topk(scores, (place != NOWHERE).sum(1, dtype=torch.int32), k)
    return torch.where(chosen >= 0, place.gather(1, chosen.clamp(min=0).long()), -1)


NOWHERE = 2**31 - 1  # behind every position
