"""The fastest call for a prompt: sparse prefill, dense decode or dense prefill.

A prompt whose query tokens each see no more tokens than top-k chooses is dense attention: lists
name all that the causal mask shows, and dense calls give the same result without a gather, over
tiles that all rows share.  No kernel finds that out, as lists are on the device; a caller knows it
by the prompt's length.

Times are models by what was measured on an H200 (profiles/results/sparse_prefill_cost.md,
mha_cost.md, and the tables of ``snapmla.explain``), scaled by SMs and clock to other cards: they
are good for which is faster by a quarter or more.  What surrounds a call is not in them: the
absorbed products with the query and of the result cost as many FLOP as ``kv_b_proj`` of dense
prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsl_kernels.formats.dims import TOKEN_TILE
from snapmla import checks
from snapmla.mha.backward import backward_workspace_size
from snapmla.rank import calls as dispatch
from snapmla.rank.cards import Card, card_named, find_card
from snapmla.sparse.plan import MAX_TOPK
from snapmla.sparse.prefill import MAX_HEADS, MAX_TOKENS
from snapmla.sparse.rows_kernel import row_tile_of

# Of an H200, by heads of a CTA: cycles at CLOCK_MHZ for a tile of 64 tokens that lie in L2, and
# those of the tensor core in them; 32 heads as 16, whose bound is the gather, too.  From the FP8
# cache with 16 heads an H100's, whose L2 is the same (sparse_prefill_cache_cost-h100.md).
ROWS_CYCLES = {16: (2480, 272), 32: (2480, 544), 64: (3590, 2176)}
FP8_CYCLES = {16: (2580, 144), 32: (2580, 288), 64: (2980, 1152)}
CLOCK_MHZ, LAUNCH_US = 1700, 3.0
# Dense prefill, 192/128 channels: rate where it is long, and what a short one takes beside.
MHA_FLOP, MHA_TFLOPS, MHA_US = 2 * (192 + 128), 640.0, 8.0
MEASURED = "h200"  # the word by which that card is found


@dataclass(frozen=True)
class Candidate:
    """A call that could serve.

    Attributes:
        call: its name.
        us: predicted microseconds.
        same: whether it gives what sparse attention gives.
    """

    call: str
    us: float
    same: bool


@dataclass(frozen=True)
class PrefillExplanation:
    """Times that each call would take for one prompt; ``print`` it.

    Attributes:
        tokens, topk, num_heads: the prompt; all of its tokens are query tokens, none was cached.
        card: name of the card that times are for.
        covers: whether every query token's list names all that it may see.
        candidates: by time.
    """

    tokens: int
    topk: int
    num_heads: int
    card: str
    covers: bool
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest of those with the result of sparse attention."""
        return next(c for c in self.candidates if c.same)

    @property
    def gradients_bytes(self) -> int:
        """Workspace of ``mha_prefill_backward``, 192/128 channels, a RoPE head that all share."""
        heads = self.num_heads
        return 4 * backward_workspace_size(self.tokens, self.tokens, 1, heads, heads)

    def __str__(self) -> str:
        lines = [
            f"prompt of {self.tokens} tokens, topk {self.topk}, {self.num_heads} heads, "
            f"on {self.card}: lists {'cover' if self.covers else 'do not cover'} it"
        ]
        for c in self.candidates:
            what = "fastest" if c is self.best else "" if c.same else "another result: dense"
            lines.append(f"  {c.call:<34} {c.us:9.1f} us model  {what}".rstrip())
        megabytes = self.gradients_bytes / 2**20
        lines.append(f"  gradients of mha_prefill: {megabytes:.1f} MiB of workspace beside them")
        return "\n".join(lines)


def seen_by_lists(tokens: int, topk: int) -> int:
    """Entries of all lists of a causal prompt."""
    full = max(tokens - topk, 0)
    short = tokens - full
    return full * topk + short * (short + 1) // 2


def explain_prefill(
    tokens: int,
    topk: int,
    num_heads: int,
    *,
    device: torch.device | str | None = None,
    card: str | None = None,
) -> PrefillExplanation:
    """Names the fastest call for a causal prompt, where none of it was cached before.

    Args:
        tokens: of the prompt.
        topk: entries of a query token's list.
        num_heads: 1 to 128, of this rank.
        device, card: as of ``snapmla.explain``; cards of SM90.

    Returns:
        A ``PrefillExplanation``; print it.

    Raises:
        TypeError, ValueError: naming the argument.

    Example:
        print(snapmla.explain_prefill(8192, 2048, 128, card="H200"))

    Source: our own measurements, as named above.
    """
    tokens = checks.integer("tokens", tokens, 1, MAX_TOKENS)
    topk = checks.integer("topk", topk, 1, MAX_TOPK)
    heads = checks.integer("num_heads", num_heads, 1, MAX_HEADS)
    where = find_card(device, card)
    if where.arch != "sm_90a":
        checks.value_error("card", "a card of SM90, where sparse prefill is", where.name)
    covers, asked = tokens <= topk, (tokens, topk, heads)
    found = [
        Candidate("sparse_prefill, BF16 rows", _sparse_us(asked, where, ROWS_CYCLES), True),
        Candidate("sparse_prefill, FP8 cache", _sparse_us(asked, where, FP8_CYCLES), True),
        Candidate("decode, FP8 cache, no indices", _decode_us(tokens, heads, where), covers),
        Candidate("mha_prefill, 192/128 channels", _mha_us(tokens, heads, where), covers),
    ]
    found.sort(key=lambda c: c.us)
    return PrefillExplanation(tokens, topk, heads, where.name, covers, tuple(found))


def _clock(card: Card) -> float:
    """Factor by which SMs are clocked faster than those that were measured."""
    known = card_named(MEASURED)
    assert known is not None  # on file
    return card.boost_mhz / known.boost_mhz


def _sparse_us(
    asked: tuple[int, int, int], card: Card, cycles: dict[int, tuple[int, int]]
) -> float:
    tokens, topk, heads = asked
    row_tile = row_tile_of(heads)
    measured, tensor = cycles[row_tile]
    of_tile = max(measured, tensor * card.tensor_slowdown)
    tiles = seen_by_lists(tokens, topk) / TOKEN_TILE + tokens  # half of the last, an epilogue
    rounds = tiles * -(-heads // row_tile) / card.sms
    return LAUNCH_US + rounds * of_tile / (CLOCK_MHZ * _clock(card))


def _decode_us(tokens: int, heads: int, card: Card) -> float:
    """Microseconds of a decode of one sequence, half of which a query token sees in the mean."""
    asked = dispatch.explain(heads, tokens, batch=1, seqlen=(tokens + 1) // 2, card=card.name)
    times = [v.us for v in asked.verdicts if v.us is not None and v.chosen]
    return times[0] if times else float("inf")


def _mha_us(tokens: int, heads: int, card: Card) -> float:
    known = card_named(MEASURED)
    assert known is not None  # on file
    slower = known.sms / card.sms * card.tensor_slowdown / _clock(card)
    pairs = tokens * (tokens + 1) / 2 * heads
    return MHA_US + MHA_FLOP * pairs / (MHA_TFLOPS * 1e6) * slower
