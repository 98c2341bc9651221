"""Decode problems as data: one frozen ``DecodeCase``, and what it builds on any device.

The same cases serve the software GPU (small ones) and the checks on a GPU.  Inputs look like a real
cache: log-normal token amplitudes, optional channel bias, RoPE outliers and an attention sink;
pages are shuffled; with ``poison`` whatever must not be read is NaN or an absurd page id.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dsl_kernels.families.fp8_decode import PAGE_SIZES
from snapmla.cache import layouts
from snapmla.reference import quantize_rows
from snapmla.testing import draws
from snapmla.testing.draws import D_ROPE, D_V, SINK_CHANNEL, SOFTMAX_SCALE

FP8 = torch.float8_e4m3fn
TAIL_IDS = (2147480000, -1)
LAYOUTS = tuple(layouts.LAYOUTS)
RAGGED = (0, 1, 63, 64, 65, 4097)


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One decode problem.

    Attributes:
        lengths: tokens of each sequence; their number is the batch size.
        heads, s_q: query heads and query tokens.
        page_size, layout: of the cache.
        logit_std: standard deviation of the content logits (natural units).
        rope_logit_std: the same of the RoPE logits; None: ``logit_std``.
        latent_mean: mean of the latent channels, in units of their standard deviation.
        amplitude_std: of the logarithm of the token amplitudes.
        sink: token 0 of each sequence gets about three quarters of the attention.
        rope_outlier: magnitude that some RoPE channels of the keys reach (1e3 in real caches).
        logits: None, or a function (token positions) -> logits; then content does not contribute
            to the logits, and RoPE carries them.
        content: None, or a function (token positions) -> (L, 512) latents.
        poison: NaN in every unused byte, absurd page ids in the tail of the block table.
        pool_tokens: smallest size of the pool; pages are spread over all of it.
        causal: as in decode.
        granularity: of q's scale, ``token_head`` or ``token``.
        alike: every token's largest channel at 448, as other writers of such caches have it.
        seed: of everything random.
    """

    lengths: tuple[int, ...]
    heads: int = 16
    s_q: int = 1
    page_size: int = 64
    layout: str = "split"
    logit_std: float = 1.0
    rope_logit_std: float | None = None
    latent_mean: float = 0.0
    amplitude_std: float = 0.3
    sink: bool = False
    rope_outlier: float = 0.0
    logits: Callable[[Tensor], Tensor] | None = None
    content: Callable[[Tensor], Tensor] | None = None
    poison: bool = True
    pool_tokens: int = 0
    causal: bool = True
    granularity: str = "token_head"
    alike: bool = False
    seed: int = 0

    @property
    def b(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return self.heads * self.s_q

    @property
    def id(self) -> str:
        """Short label that names what differs from the default."""
        parts = [f"h{self.heads}q{self.s_q}p{self.page_size}", self.layout]
        parts.append(f"b{self.b}L{max(self.lengths, default=0)}")
        parts.append(f"std{self.logit_std:g}mean{self.latent_mean:g}")
        parts += ["sink"] if self.sink else []
        parts += [f"rope{self.rope_outlier:g}"] if self.rope_outlier else []
        parts += [self.logits.__name__] if self.logits else []
        parts += ["full"] if not self.causal else []
        parts += [self.granularity] if self.granularity != "token_head" else []
        return "-".join(parts)


@dataclass(frozen=True)
class DecodeInputs:
    """Tensors that a case builds; shapes as in ``snapmla.decode``.

    ``stored`` are the arguments of ``mla_decode_reference`` in order, without softmax_scale.
    ``c_kv``, ``k_rope`` (all tokens of all sequences, unquantised) and ``slot_mapping`` are what
    append_kv would be given; they are None unless asked for.
    """

    case: DecodeCase
    q_nope: Tensor  # (b, s_q, h, 512) bf16
    q_rope: Tensor  # (b, s_q, h, 64) bf16
    q8: Tensor  # (b, s_q, h, 512) e4m3
    q_rope_scaled: Tensor  # (b, s_q, h, 64) bf16
    q_scale: Tensor  # (b, s_q, h) or (b, s_q) f32
    content: Tensor  # (pages, P, 512) e4m3
    rope: Tensor  # (pages, P, 64) bf16
    scale: Tensor  # (pages, P) f32
    block_table: Tensor  # (b, width) i32
    cache_seqlens: Tensor  # (b,) i32
    c_kv: Tensor | None = None
    k_rope: Tensor | None = None
    slot_mapping: Tensor | None = None
    softmax_scale: float = SOFTMAX_SCALE

    @property
    def stored(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return (
            self.q8, self.q_rope_scaled, self.q_scale, self.content, self.rope, self.scale,
            self.block_table, self.cache_seqlens,
        )  # fmt: skip


def allocate_pool(
    pages: int, page_size: int, layout: str, device: torch.device, fill: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(content, rope, scale) views over memory whose every byte is ``fill`` (255 is NaN in all)."""

    def block(*shape: int) -> Tensor:
        return torch.full(shape, fill, dtype=torch.uint8, device=device)

    if layout == "split":
        return (
            block(pages, page_size, D_V).view(FP8),
            block(pages, page_size, 2 * D_ROPE).view(torch.bfloat16),
            block(pages, 4 * page_size).view(torch.float32),
        )
    if layout == "row640":
        rows = block(pages, page_size, D_V + 2 * D_ROPE)
        rope = rows.view(torch.bfloat16)[..., D_V // 2 :]
        return rows[..., :D_V].view(FP8), rope, block(pages, 4 * page_size).view(torch.float32)
    if layout == "paged":
        page = block(pages, page_size * (D_V + 2 * D_ROPE + 4))
        content = page[:, : D_V * page_size].unflatten(1, (page_size, D_V)).view(FP8)
        rope = page.view(torch.bfloat16)[:, D_V * page_size // 2 : (D_V // 2 + D_ROPE) * page_size]
        scale = page.view(torch.float32)[:, (D_V + 2 * D_ROPE) * page_size // 4 :]
        return content, rope.unflatten(1, (page_size, D_ROPE)), scale
    raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}")


def block_tables(
    case: DecodeCase, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, int]:
    """(block table (b, width) int32 of shuffled pages, pages in the pool)."""
    used = [-(-n // case.page_size) for n in case.lengths]
    pages = max(sum(used) + 2, -(-case.pool_tokens // case.page_size))
    order = torch.randperm(pages, generator=generator)[: sum(used)].int()
    width = max([*used, 1]) + 2
    table = torch.zeros(case.b, width, dtype=torch.int32)
    if case.poison:
        table[:] = torch.tensor(TAIL_IDS, dtype=torch.int32).repeat(width)[:width]
    for i, part in enumerate(order.split(used)):
        table[i, : used[i]] = part
    return table.to(device), pages


def _tokens(
    case: DecodeCase, length: int, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Unquantised c_kv (L, 512), k_rope (L, 64) of one sequence, fp32 holding bf16 values."""

    c, rope = draws.draw_tokens(
        length, generator, device, mean=case.latent_mean, amplitude_std=case.amplitude_std,
        rope_outlier=case.rope_outlier,
    )  # fmt: skip
    positions = torch.arange(length, device=device)
    if case.sink and length:
        rope[0, SINK_CHANNEL] = math.log(length) + case.logit_std**2 + 1
    if case.content is not None:
        c = case.content(positions)
    if case.logits is not None:
        rope.zero_()
        rope[:, SINK_CHANNEL] = case.logits(positions)
    return c.bfloat16().float(), rope.bfloat16().float()


def _queries(
    case: DecodeCase, generator: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor]:
    """q_nope, q_rope in bf16; with ``case.logits`` content does not contribute."""
    nope, rope = draws.draw_queries(
        (case.b, case.s_q, case.heads), generator, device, logit_std=case.logit_std,
        rope_logit_std=case.rope_logit_std, amplitude_std=case.amplitude_std,
        rope_outlier=case.rope_outlier,
    )  # fmt: skip
    if case.logits:
        nope *= 0.0
    return nope.bfloat16(), rope.bfloat16()


def build(
    case: DecodeCase, device: torch.device | str = "cpu", keep_source: bool = False
) -> DecodeInputs:
    """Builds the inputs of ``case``; ``keep_source`` also keeps what append_kv would be given."""
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(case.seed)
    table, pages = block_tables(case, torch.Generator().manual_seed(case.seed), device)
    fill = 255 if case.poison else 0
    content, rope, scale = allocate_pool(pages, case.page_size, case.layout, device, fill)
    source, slots = [], []
    for i, length in enumerate(case.lengths):
        c, r = _tokens(case, length, generator, device)
        position = torch.arange(length, device=device)
        page, offset = table[i].long()[position // case.page_size], position % case.page_size
        stored = quantize_rows(c, r, slots=None if case.alike else offset)
        k8, rope[page, offset], scale[page, offset] = stored
        content.view(torch.uint8)[page, offset] = k8.view(torch.uint8)
        if keep_source:
            source.append((c.bfloat16(), r.bfloat16()))
            slots.append(page * case.page_size + offset)
    q_nope, q_rope = _queries(case, generator, device)
    q8, q_rope_scaled, q_scale = quantize_rows(
        q_nope, q_rope, shared=int(case.granularity == "token")
    )
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    return DecodeInputs(
        case, q_nope, q_rope, q8, q_rope_scaled, q_scale, content, rope, scale, table, lengths,
        torch.cat([c for c, _ in source]) if keep_source else None,
        torch.cat([r for _, r in source]) if keep_source else None,
        torch.cat(slots).int() if keep_source else None,
    )  # fmt: skip


# ---------------------------------------------------------------------------- lists of cases


def distributions() -> Iterator[dict[str, float | bool]]:
    """Input distributions of the correctness check: 3 logit spreads x 3 means, sink, RoPE."""
    for logit_std in (0.1, 1.0, 3.0):
        for mean in (0.0, 0.5, 2.0):
            yield {"logit_std": logit_std, "latent_mean": mean}
    yield {"logit_std": 1.0, "latent_mean": 0.5, "sink": True}
    yield {"logit_std": 1.0, "latent_mean": 0.0, "rope_outlier": 1e3}


def correctness_cases(full: bool = False) -> Iterator[DecodeCase]:
    """heads x s_q x distributions; layouts rotate, or multiply if ``full``; pages rotate."""
    index = 0
    for heads in (1, 7, 8, 16, 20, 32, 48, 64, 96, 128):
        for s_q in (1, 2, 4, 8):
            for distribution in distributions():
                for layout in LAYOUTS if full else (LAYOUTS[index % 3],):
                    yield DecodeCase(
                        lengths=(*RAGGED, 130 + 7 * (index % 61), 777),
                        heads=heads,
                        s_q=s_q,
                        layout=layout,
                        page_size=PAGE_SIZES[index // 3 % len(PAGE_SIZES)],
                        causal=index % 8 != 7,
                        granularity="token" if index % 5 == 4 else "token_head",
                        seed=index,
                        **distribution,  # type: ignore[arg-type]
                    )
                    index += 1


def alternating_logits(positions: Tensor) -> Tensor:
    """Block maxima that rise and fall by 200, with a slope inside each block."""
    level = torch.tensor([0.0, -200.0, 0.0, 100.0, -100.0, 100.0], device=positions.device)
    return level[positions // 64 % 6] - (positions % 64) * 0.05


def falling_logits(positions: Tensor) -> Tensor:
    """Every block 200 below the one before: only the first counts, nothing may overflow."""
    return -200.0 * (positions // 64).clamp_max(4).float() - (positions % 7) * 0.3


def rising_logits(positions: Tensor) -> Tensor:
    """Every block 200 above the one before."""
    return -200.0 * (4 - (positions // 64).clamp_max(4)).float() - (positions % 7) * 0.3


SWINGS = (alternating_logits, falling_logits, rising_logits)


def sink_case(length: int = 1 << 17, at: float = 0.0, **changes: object) -> DecodeCase:
    """A sink of weight 1 along channel 0, and a tail of weights around 1e-5 along channel 1.

    The sink is token ``at * length``; the tail's share of the attention is the output's channel 1.
    """
    place = int(at * length)

    def sink_and_tail(positions: Tensor) -> Tensor:
        generator = torch.Generator(positions.device).manual_seed(7)
        noise = torch.randn(len(positions), generator=generator, device=positions.device)
        return torch.where(positions == place, 0.0, math.log(1e-5) + 0.5 * noise)

    def axes(positions: Tensor) -> Tensor:
        c = torch.zeros(len(positions), D_V, device=positions.device)
        c[:, 1] = 1.0
        c[place] = 0.0
        c[place, 0] = 1.0
        return c

    base = DecodeCase(lengths=(length,), logits=sink_and_tail, content=axes)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def sweep_case(length: int, batch: int, logit_std: float, mean: float, heads: int) -> DecodeCase:
    """One point of the length sweep."""
    return DecodeCase(
        lengths=(length,) * batch, heads=heads, logit_std=logit_std, latent_mean=mean, poison=False,
        seed=length % 1000,
    )  # fmt: skip


SMALL = (
    DecodeCase(lengths=(0, 1, 65, 130), heads=16, seed=1),
    DecodeCase(lengths=(63, 200), heads=7, s_q=2, page_size=16, layout="paged", seed=2),
    DecodeCase(lengths=(64, 129), heads=32, page_size=32, layout="row640", sink=True, seed=3),
    DecodeCase(lengths=(100,), heads=64, page_size=128, layout="paged", rope_outlier=1e3, seed=4),
    DecodeCase(lengths=(3, 90), heads=20, s_q=4, logit_std=3.0, latent_mean=0.5, seed=5),
    DecodeCase(lengths=(70,), heads=8, s_q=8, latent_mean=2.0, causal=False, seed=6),
    DecodeCase(lengths=(96, 40), heads=128, layout="row640", granularity="token", seed=7),
)
