"""``ContextGroup``: the ranks that share the tokens of sequences."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import torch
from torch import distributed

from dsl_kernels.formats.dims import HEAD_DIM_QK, KV_LORA_RANK, QK_ROPE_HEAD_DIM
from dsl_kernels.formats.registered import FORMATS
from snapmla import api, checks
from snapmla.cache import quant
from snapmla.cache.paged import PagedKVCache, expect_cache
from snapmla.call import tracing
from snapmla.dense import DecodePlan
from snapmla.dense.plan_cache import PlanCache
from snapmla.dense.plan_decode import checked_queries, plan_decode
from snapmla.dense.witness import Witness, check_witness
from snapmla.errors import SnapMLAError
from snapmla.parallel.exchange import METHODS, Arena, Collectives, Rows, make_exchange
from snapmla.parallel.plan import Buffers, ContextPlan, Lengths, Query, scratch_of
from snapmla.parallel.sharding import Sharding

Tensor = torch.Tensor
HEADS = ("gathered", "replicated")
TRANSPORTS = (torch.bfloat16, torch.float32)
_RESULTS = (torch.bfloat16, torch.float32)
_BF16, _FP32 = (torch.bfloat16,), (torch.float32,)
PATIENCE = 600.0  # seconds, where a group does not tell its timeout


class Settings(NamedTuple):
    """Settings that all ranks of a group must have in common."""

    num_heads: int
    interleave: int
    method: str
    transport: str
    heads: str


class ContextGroup:
    """Ranks of ``torch.distributed`` that share every sequence's tokens: context parallelism.

    Rank r of n holds the tokens at positions p with p // interleave % n = r, in order, in a cache
    of its own.  All ranks attend with all heads to what they hold; then the partial results are
    exchanged and merged by their LSE, and each rank gets num_heads / n heads over all tokens.

    Making one is collective: ranks tell each other their arguments, and all raise where they
    differ.  With NCCL make the rank's GPU the current one before.  ``decode`` and ``combine`` are
    collective too: all ranks make the same calls of the same shapes in the same order.  A rank that
    raises leaves the others waiting; they end with ``SnapMLAError`` when the group's timeout is
    over (gloo), or by NCCL's watchdog, which ends the process.  The watchdog does not see
    collectives inside of a replayed graph: wait for those by ``synchronize``, which does.

    CUDA graphs: call ``decode`` once before the capture (NCCL connects, kernels are loaded), keep
    the plan, and capture with ``capture_error_mode="thread_local"``, since NCCL's watchdog asks
    for events meanwhile.  All ranks capture, and replay the same graphs in the same order.

    Args:
        group: of ``torch.distributed``; None is the default group.
        num_heads: query heads of all ranks together, 1 to 128, a multiple of the group's size.
        interleave: tokens of a turn, 1 or more: 1, a page, or between.
        method: ``all_to_all``, one collective, rounded once, or ``reduce_scatter``, for fabrics
            where that is faster (an all-gather of LSEs before it).
        transport: dtype in which partial results travel, bfloat16 or float32.
        heads: ``gathered``: a rank brings the queries of its own heads, as with tensor parallelism,
            and ``decode`` gathers them; ``replicated``: every rank brings those of all heads.

    Attributes:
        rank, size: of this process in the group, of the group.
        own_heads: heads that a rank gets, num_heads / size.

    Raises:
        TypeError, ValueError: naming the argument.
        SnapMLAError: ranks differ in their arguments.

    Source: our own; the methods are those of vLLM's and SGLang's context parallelism.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        num_heads: int,
        interleave: int = 1,
        method: str = "all_to_all",
        transport: torch.dtype = torch.bfloat16,
        heads: str = "gathered",
    ) -> None:
        if not distributed.is_available() or not distributed.is_initialized():
            hint = "call torch.distributed.init_process_group first"
            checks.value_error("group", "a process group", "no torch.distributed here", hint)
        self.group, self.rank = group, distributed.get_rank(group)
        if self.rank < 0:
            checks.value_error("group", "a group with this rank", "one without it")
        self.size = distributed.get_world_size(group)
        self.num_heads = checks.num_heads(num_heads)
        if num_heads % self.size:
            hint = "each rank gets the same number of heads"
            checks.value_error("num_heads", f"a multiple of {self.size} ranks", num_heads, hint)
        self.interleave = checks.integer("interleave", interleave, 1, 2**30 // self.size)
        checks.choice("method", method, METHODS)
        checks.choice("transport", transport, TRANSPORTS)
        checks.choice("heads", heads, HEADS)
        self.method, self.transport, self.heads = method, transport, heads
        self.own_heads = num_heads // self.size
        self.sharding = Sharding(self.rank, self.size, self.interleave)
        self.collectives = Collectives(group, self.rank, self.size)
        self._agree()

    def _agree(self) -> None:
        """Raises on all ranks where their arguments differ."""
        mine = Settings(
            self.num_heads, self.interleave, self.method, checks.dtype_name(self.transport),
            self.heads,
        )  # fmt: skip
        every: list[Any] = [None] * self.size
        distributed.all_gather_object(every, tuple(mine), group=self.group)
        for rank, theirs in enumerate(every):
            for name, first, other in zip(Settings._fields, every[0], theirs):
                if first != other:
                    raise SnapMLAError(
                        f"ContextGroup: ranks differ in {name}: {first!r} on rank 0, {other!r} on "
                        f"rank {rank}; give all ranks the same arguments"
                    )

    def __repr__(self) -> str:
        name = checks.dtype_name(self.transport)
        return (
            f"ContextGroup(rank {self.rank} of {self.size}, {self.num_heads} heads "
            f"{self.heads}, turns of {self.interleave}, {self.method} in {name})"
        )

    # ------------------------------------------------------------------- who holds what

    def local_lengths(self, cache_seqlens: Tensor) -> Tensor:
        """Number of tokens of each sequence that this rank holds.

        Args:
            cache_seqlens: int32, any shape: tokens from the start of a sequence; below 0 as 0.

        Returns:
            int32, the same shape.

        Raises:
            TypeError, ValueError: naming the argument.

        Source: our own.
        """
        value = cache_seqlens
        checks.tensor("cache_seqlens", value, (torch.int32,), getattr(value, "shape", ()))
        return self.sharding.owned_(value.clone(), torch.empty_like(value))

    def local_slots(
        self,
        positions: Tensor,
        block_table: Tensor,
        sequences: Tensor | None = None,
        *,
        page_size: int,
    ) -> Tensor:
        """Slots of tokens in this rank's cache, for ``append_kv``; -1 for other ranks' tokens.

        Args:
            positions: int32 or int64 (t,), places of tokens in their whole sequences; negative:
                no token.
            block_table: int32 (b, width), pages of the rank's own tokens.
            sequences: int32 or int64 (t,), which sequence each token is of; a number without a
                row in the table: no token.  None: one a sequence.
            page_size: of the cache, in tokens.

        Returns:
            int64 (t,): page * page_size + offset, or -1.

        Raises:
            TypeError, ValueError: naming the argument.

        Source: our own.
        """
        ints = torch.int32, torch.int64
        checks.tensor("positions", positions, ints, ("t",))
        checks.block_table(block_table, "b", positions.device)  # type: ignore[arg-type]
        checks.integer("page_size", page_size, 1)
        if sequences is None:
            if len(positions) != len(block_table):
                hint = "sequences says which sequence each token is of"
                wanted = f"one for each of {len(block_table)} sequences"
                checks.value_error("positions", wanted, len(positions), hint)
        else:
            checks.tensor("sequences", sequences, ints, (len(positions),), positions.device)
        return self.sharding.slots(positions, block_table, sequences, page_size)

    def local_block_table(self, block_table: Tensor, *, page_size: int) -> Tensor:
        """The columns of this rank, of a table that lists every page of the whole sequences.

        For turns of whole pages: column j is page j of the sequence, in the cache of the rank that
        holds it.  With shorter turns no page is one rank's part of a page of the sequence, and
        tables list the pages of the rank's own tokens from the start.

        Args:
            block_table: int32 (b, width), a column for each page of the whole sequences.
            page_size: of the cache, in tokens; ``interleave`` is a multiple of it.

        Returns:
            int32 (b, local width), the same width on every rank.

        Raises:
            TypeError, ValueError: naming the argument.

        Source: our own.
        """
        checks.integer("page_size", page_size, 1)
        checks.tensor("block_table", block_table, (torch.int32,), ("b", "width"))
        checks.block_table(block_table, block_table.shape[0], block_table.device)
        return self.sharding.block_table(block_table, page_size)

    # --------------------------------------------------------------------------- a step

    def workspace_bytes(self, *tokens: int, cache_dtype: str | torch.dtype = "fp8") -> int:
        """Bytes of the buffers of a step of this shape, beside its decode plan.

        Args:
            tokens: (b, s_q), or one number, total_q, with ragged queries.
            cache_dtype: ``fp8``, or torch.bfloat16.

        Returns:
            The least ``workspace`` for ``plan_decode``; of a smaller step it is smaller.

        Raises:
            TypeError, ValueError: naming the argument.

        Source: our own.
        """
        for count in tokens:
            checks.integer("tokens", count, 0)
        if len(tokens) not in (1, 2):
            checks.value_error("tokens", "b and s_q, or total_q alone", tokens)
        arena = Arena()
        Buffers(self, self._rows(tokens), self._kind(cache_dtype), arena)
        return arena.used

    def _rows(self, tokens: tuple[int, ...]) -> Rows:
        return Rows(tokens, self.size, self.own_heads, self.transport)

    def _kind(self, cache_dtype: str | torch.dtype) -> str:
        record = FORMATS.get(cache_dtype) if isinstance(cache_dtype, str) else None
        if record is None or not record.named:  # else it is none of ours
            name = checks.format_named(checks.cache_dtype(cache_dtype))
            if name in ("fp8", "bf16"):
                return name
        checks.value_error("cache_dtype", "'fp8' or torch.bfloat16", cache_dtype)

    def plan_decode(
        self,
        cache_seqlens: Tensor,
        s_q: int | None = None,
        *,
        page_size: int,
        max_pages: int,
        cu_seqlens_q: Tensor | None = None,
        total_q: int | None = None,
        plans: PlanCache | None = None,
        workspace: Tensor | None = None,
        cache_dtype: str | torch.dtype = "fp8",
        **options: Any,
    ) -> ContextPlan:
        """Plans a step of this rank's decode and takes its buffers; no collective.

        With several query tokens a sequence, query token s of s_q sees the first length - (s_q - 1
        - s) tokens of the whole sequence (the causal rule), as ``row_seqlens`` of the decode.

        Args:
            cache_seqlens: int32 (b,), tokens of the *whole* sequences, the new ones included.
            s_q: query tokens of every sequence; None with ``cu_seqlens_q``.
            page_size: of the cache, in tokens.
            max_pages: width of this rank's block table.
            cu_seqlens_q: ragged queries, int32 (b + 1,), as in ``snapmla.plan_decode``.
            total_q: room for ragged query tokens.
            plans: a ``PlanCache`` for all heads to take the decode plan from, pinned there; its
                plan is then shared by all plans of this shape.  None makes one.
            workspace: uint8 (bytes,), ``workspace_bytes`` or more, 256-byte aligned; steps that
                follow each other on one stream may share it.  None allocates.
            cache_dtype: ``fp8``, or torch.bfloat16.
            options: of ``snapmla.plan_decode`` (``fixed_split_tokens``, ``accuracy`` and so on),
                without ``plans``.

        Returns:
            The plan, for all layers; ``update_`` it when lengths change.

        Raises:
            TypeError, ValueError: naming the argument.
            VariantError: no decode kernel fits.

        Source: our own.
        """
        checks.lengths(cache_seqlens, "b")
        kind, device, batch = self._kind(cache_dtype), cache_seqlens.device, len(cache_seqlens)
        queries = checked_queries(batch, self.num_heads, s_q, cu_seqlens_q, total_q)
        tokens = (queries.total_q,) if queries.s_q is None else (batch, queries.s_q)
        if cu_seqlens_q is not None:
            checks.vector("cu_seqlens_q", cu_seqlens_q, (batch + 1,), device)
        buffers = self._buffers(tokens, kind, device, workspace)
        local = torch.zeros_like(cache_seqlens)
        limits = None
        if tokens[1:] != (1,):
            limits = torch.zeros(tokens, dtype=torch.int32, device=device)
        lengths = Lengths(self.sharding, local, limits, *scratch_of(local, tokens))
        lengths.update_(cache_seqlens, cu_seqlens_q)
        shape: dict[str, Any] = dict(
            max_pages=max_pages, cu_seqlens_q=cu_seqlens_q, total_q=total_q, row_seqlens=limits
        )
        made: DecodePlan
        if plans is None:
            made = plan_decode(
                local, self.num_heads, s_q, page_size=page_size, cache_dtype=cache_dtype,
                **shape, **options,
            )  # fmt: skip
        else:
            made = _of_cache(plans, options).get(local, s_q, pin=True, **shape)
        self._check_plan(made, page_size, kind)
        plan = ContextPlan(self, made, local, limits, lengths, buffers)
        plan._watch(cache_seqlens)
        return plan

    def _check_plan(self, plan: DecodePlan, page_size: int, kind: str) -> None:
        """Raises an error if a plan from a ``PlanCache`` does not fit this group's calls."""
        for name, want, got in (
            ("num_heads", self.num_heads, plan.num_heads),
            ("page_size", page_size, plan.page_size),
            ("cache_dtype", kind, plan.cache_dtype),
            ("num_kv_heads", 1, plan.num_kv_heads),
        ):
            if want != got:
                wanted = f"one made with {name} = {want}"
                checks.value_error("plans", wanted, f"{name} = {got}")

    def _buffers(
        self, tokens: tuple[int, ...], kind: str, device: torch.device, workspace: Tensor | None
    ) -> Buffers:
        rows, counted = self._rows(tokens), Arena()
        Buffers(self, rows, kind, counted)
        if workspace is None:
            workspace = torch.empty(max(1, counted.used), dtype=torch.uint8, device=device)
        checks.tensor("workspace", workspace, (torch.uint8,), ("bytes",), device)
        checks.contiguous("workspace", workspace)
        checks.aligned("workspace", workspace, 256 if device.type == "cuda" else 16)
        if workspace.numel() < counted.used:
            wanted = f"{counted.used} bytes or more"
            hint = "ContextGroup.workspace_bytes tells how many"
            checks.value_error("workspace", wanted, workspace.numel(), hint)
        return Buffers(self, rows, kind, Arena(workspace))

    def decode(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        cache: PagedKVCache,
        block_table: Tensor,
        plan: ContextPlan,
        *,
        softmax_scale: float,
        empty_lse: str = "-inf",
        out: Tensor | None = None,
        lse: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of all ranks' tokens for this rank's heads: ``snapmla.decode`` and an exchange.

        Collective.  With ``out`` and ``lse`` given nothing is allocated, and nothing is waited for
        beside what the collectives wait for.  An FP8 cache's queries are quantised here, by token
        and head.

        Args:
            q_nope: bfloat16 (b, s_q, heads, 512) or (total_q, heads, 512): queries absorbed into
                the latent space, of own_heads or, where they are replicated, of num_heads.
            q_rope: bfloat16, the same rows of 64.
            cache: of this rank's tokens, FP8 or bfloat16.
            block_table: int32 (b, max_pages), pages of this rank's tokens.
            plan: of this step.
            softmax_scale: factor of the logits.
            empty_lse: LSE of a row that sees no token on any rank, ``-inf`` or ``+inf``.
            out: bfloat16 or float32 (*tokens, own_heads, 512), contiguous; None allocates bfloat16.
            lse: float32 (b, own_heads, s_q) or (own_heads, total_q), contiguous; None allocates.
            cu_seqlens_q: a witness of ragged queries, as of ``snapmla.decode``: int32 (b + 1,),
                this step's own offsets.  Query tokens that the plan knows otherwise get NaN.

        Returns:
            (out, lse) of this rank's heads: rank r has heads r * own_heads to (r + 1) * own_heads.

        Raises:
            TypeError, ValueError: naming the argument.  Queries, results, plan and the cache's
                format are checked before anything is sent, its other arguments behind the gather.
            SnapMLAError: a collective failed, or took longer than the group's timeout.

        Source: as ``snapmla.decode`` and ``merge_states``.
        """
        if tracing.by_dynamo():
            return tracing.between_graphs(
                self.decode, q_nope, q_rope, cache, block_table, plan, softmax_scale=softmax_scale,
                empty_lse=empty_lse, out=out, lse=lse, cu_seqlens_q=cu_seqlens_q,
            )  # fmt: skip
        if not isinstance(plan, ContextPlan) or plan.group is not self:
            got = "another group's" if isinstance(plan, ContextPlan) else type(plan).__name__
            checks.value_error(
                "plan", "a ContextPlan of this group", got, "ContextGroup.plan_decode"
            )
        self._check_query(q_nope, q_rope, plan.tokens)
        out, lse = self._results(plan.tokens, q_nope.device, out, lse)
        checks.apart("out", out, {"q_nope": q_nope, "q_rope": q_rope})
        check_witness(plan.plan, Witness.of(cu_seqlens_q, None), "row_seqlens")
        expect_cache(cache)
        if cache.format != plan.plan.cache_dtype:
            wanted = f"one of format {plan.plan.cache_dtype!r}, as plan"
            hint = "ContextGroup.plan_decode(cache_dtype=) is 'fp8' or torch.bfloat16"
            checks.value_error("cache", wanted, repr(cache.format), hint)
        if not math.prod(plan.tokens):
            return out, lse
        plan._expect_fresh()
        buffers = plan._buffers
        query = self._query(q_nope, q_rope, buffers)
        api.decode(
            query, cache, block_table, plan.cache_seqlens, softmax_scale=softmax_scale,
            plan=plan.plan, empty_lse=empty_lse, out=buffers.part, lse=buffers.part_lse,
            cu_seqlens_q=cu_seqlens_q, row_seqlens=plan.row_seqlens,
        )  # fmt: skip
        buffers.exchange(buffers.part, buffers.part_lse, out, lse)
        return out, lse

    def _check_query(self, q_nope: Tensor, q_rope: Tensor, tokens: tuple[int, ...]) -> None:
        heads = self.own_heads if self.heads == "gathered" else self.num_heads
        said = f"this rank's {heads} of {self.num_heads} heads, or a group of heads='replicated'"
        if self.heads != "gathered":
            said = f"all {heads} heads, or a group of heads='gathered'"
        if isinstance(q_nope, Tensor) and q_nope.shape[-2:-1] == (heads,):
            said = ""  # it is not the heads
        checks.tensor("q_nope", q_nope, _BF16, (*tokens, heads, KV_LORA_RANK), advice=said)
        shape = (*tokens, heads, QK_ROPE_HEAD_DIM)
        checks.tensor("q_rope", q_rope, _BF16, shape, q_nope.device, said)

    def _query(self, q_nope: Tensor, q_rope: Tensor, buffers: Buffers) -> Query:
        """All heads' queries as the decode takes them; collective where they are gathered."""
        send, gathered, joint = buffers.send, buffers.gathered, buffers.joint
        if send is not None and gathered is not None and joint is not None:
            send[..., :KV_LORA_RANK].copy_(q_nope)
            send[..., KV_LORA_RANK:].copy_(q_rope)
            self.collectives.gather("queries", gathered, send)
            if not buffers.joined:
                joint.unflatten(-2, (self.size, -1)).copy_(gathered.movedim(0, -3))
            q_nope, q_rope = joint.split([KV_LORA_RANK, HEAD_DIM_QK - KV_LORA_RANK], -1)
        elif joint is not None:
            joint[..., :KV_LORA_RANK].copy_(q_nope)
            joint[..., KV_LORA_RANK:].copy_(q_rope)
        if buffers.quantized is None:
            assert joint is not None
            return joint
        return quant.quantize_q(q_nope, q_rope, out=buffers.quantized)

    def _results(
        self, tokens: tuple[int, ...], device: torch.device, out: Tensor | None, lse: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The results, checked, or made where they were not given."""
        shape = (*tokens, self.own_heads, KV_LORA_RANK)
        lse_shape = self._rows(tokens).lse_shape(self.own_heads)
        if out is None:
            out = torch.empty(shape, dtype=torch.bfloat16, device=device)
        else:
            checks.output("out", out, _RESULTS, shape, device)
        if lse is None:
            lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        else:
            checks.output("lse", lse, _FP32, lse_shape, device, 4)
        return out, lse

    def combine(
        self,
        part: Tensor,
        part_lse: Tensor,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The exchange alone, behind a decode that the caller has made.  Collective.

        It allocates its buffers: ``decode`` has them in its plan.

        Args:
            part: bfloat16 or float32 (b, s_q, num_heads, 512) or (total_q, num_heads, 512): all
                heads' attention to this rank's tokens.  Of a row whose LSE is infinite, of either
                sign, it may be anything.
            part_lse: float32 (b, num_heads, s_q) or (num_heads, total_q), natural.
            out: bfloat16 or float32 (*tokens, own_heads, 512), contiguous; None allocates bfloat16.
            lse: float32, heads before query tokens, contiguous; None allocates.

        Returns:
            (out, lse) of this rank's heads.  Of a row that is empty everywhere 0 and rank 0's LSE.

        Raises:
            TypeError, ValueError: naming the argument, before anything is sent.
            SnapMLAError: as ``decode``.

        Source: as ``merge_states``.
        """
        if tracing.by_dynamo():
            return tracing.between_graphs(self.combine, part, part_lse, out=out, lse=lse)
        ragged = isinstance(part, Tensor) and part.ndim == 3
        free = ("total_q",) if ragged else ("b", "s_q")
        checks.tensor("part", part, _RESULTS, (*free, self.num_heads, KV_LORA_RANK))
        tokens = tuple(part.shape[:-2])
        rows = self._rows(tokens)
        shape = rows.lse_shape(self.num_heads)
        checks.tensor("part_lse", part_lse, _FP32, shape, part.device)
        out, lse = self._results(tokens, part.device, out, lse)
        if not math.prod(tokens):
            return out, lse

        def take(*extents: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(extents, dtype=dtype, device=part.device)

        exchange = make_exchange(self.method, rows, self.collectives, take)
        exchange(part, part_lse.contiguous(), out, lse)
        return out, lse

    # --------------------------------------------------------------------------- waiting

    def synchronize(self, device: torch.device | str | int, timeout: float | None = None) -> None:
        """Waits on the host for what the current stream of a device holds, not longer than a
        timeout: a replayed graph whose collectives wait for a rank that has raised never ends.

        Args:
            device: of the tensors; on ``cpu`` collectives have ended when they return.
            timeout: seconds; None: that of the group.

        Returns:
            Nothing.

        Raises:
            TypeError, ValueError: naming the argument.
            SnapMLAError: it is not over.  The device cannot be used any more: end the process.

        Source: our own.
        """
        where = checks.device("device", device)
        if where.type != "cuda":
            return
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            checks.value_error("timeout", "seconds, a positive number, or None", repr(timeout))
        limit = self._patience(where) if timeout is None else float(timeout)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(where))
        end, pause = time.monotonic() + limit, 1e-5
        while not event.query():
            if time.monotonic() > end:
                raise SnapMLAError(
                    f"rank {self.rank} of {self.size}: {where} is not done after {limit:g} s: "
                    "another rank has raised, stopped or is in another call; end this process"
                )
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)

    def _patience(self, device: torch.device) -> float:
        """Seconds of the group's timeout."""
        group: Any = self.group or distributed.group.WORLD
        try:
            options = group._get_backend(device).options
            return float(options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # not told by this torch
            return PATIENCE


def _of_cache(plans: PlanCache, options: dict[str, Any]) -> PlanCache:
    """The cache, checked: its plans have the options that it was made with."""
    if not isinstance(plans, PlanCache):
        checks.type_error("plans", "a snapmla.PlanCache or None", type(plans).__name__)
    if options:
        hint = "give them to the PlanCache"
        checks.value_error("plans", "no other options beside it", ", ".join(options), hint)
    return plans
