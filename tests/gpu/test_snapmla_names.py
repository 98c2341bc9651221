"""SnapMLA's host names on a real GPU: graphs with static metadata, allocation, streams.

The bits are compared with the primary API's; whether those are right is ``test_graphs``'s question.
"""

from __future__ import annotations

import pytest
import torch

import snapmla
from snapmla import rank
from snapmla.compat import flash_mla_fp8, metadata_pair
from tests.support.bits import assert_same_bits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SCALE = 192**-0.5
PAGE, WIDTH, BATCH, HEADS, REPLAYS = 64, 40, 5, 16, 20


class Layer:
    """A layer's static buffers and pool, as the host framework keeps them."""

    def __init__(self, s_q: int = 1, batch: int = BATCH, heads: int = HEADS) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        slots = batch * WIDTH * PAGE

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

        self.s_q, self.batch, self.heads = s_q, batch, heads
        self.lora = torch.empty((slots, 1, 512), dtype=torch.uint8, device=DEVICE)
        self.scale = torch.empty((slots, 1, 1), device=DEVICE)
        self.rope = torch.empty((slots, 1, 64), dtype=torch.bfloat16, device=DEVICE)
        every = torch.arange(slots, dtype=torch.int32, device=DEVICE)
        flash_mla_fp8.quantize_and_cache_k(
            random(slots, 1, 576), self.lora, self.scale, self.rope, every, 512
        )
        pages = torch.randperm(batch * WIDTH, generator=generator, device=DEVICE)
        self.table = pages.int().view(batch, WIDTH)
        self.lengths = torch.full((batch,), 100, dtype=torch.int32, device=DEVICE)
        self.q = random(batch, s_q, heads, 576)
        self.out = torch.empty((batch, s_q, heads, 512), dtype=torch.bfloat16, device=DEVICE)
        self.lse = torch.empty((batch, heads, s_q), device=DEVICE)

    def decode(self, pair: flash_mla_fp8.Pair, **extra: object) -> flash_mla_fp8.Pair:
        q_nope, q_scale, q_rope = flash_mla_fp8.quantize_ckv_per_token_head(self.q, 512)
        return flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            q_nope, q_rope, self.lora.view(torch.float8_e4m3fn).view(-1, PAGE, 1, 512),
            self.rope.view(-1, PAGE, 1, 64), q_scale, self.scale.view(-1, PAGE, 1, 1), self.table,
            self.lengths, 512, *pair, SCALE, True, **extra,  # type: ignore[arg-type]
        )  # fmt: skip

    def primary(self) -> flash_mla_fp8.Pair:
        cache = snapmla.PagedKVCache.from_tensors(
            self.lora.view(-1, PAGE, 512), self.rope.view(-1, PAGE, 64), self.scale.view(-1, PAGE)
        )
        q = snapmla.quantize_q(self.q[..., :512], self.q[..., 512:])
        return snapmla.decode(
            q, cache, self.table, self.lengths, softmax_scale=SCALE, empty_lse="+inf"
        )

    def metadata(self, **extra: object) -> flash_mla_fp8.Pair:
        rows = self.s_q * self.heads
        return flash_mla_fp8.get_mla_metadata(self.lengths, rows, 1, **extra)  # type: ignore[arg-type]


def random_lengths(layer: Layer, seed: int) -> torch.Tensor:
    """Zero, one, full and anything between."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, WIDTH * PAGE + 1, (layer.batch,), generator=generator)
    lengths[seed % layer.batch] = (0, 1, layer.s_q, WIDTH * PAGE)[seed % 4]
    return lengths.int().to(DEVICE)


@pytest.mark.parametrize("s_q", [1, 3])
def test_eager(s_q: int) -> None:
    layer = Layer(s_q)
    for seed in range(4):
        layer.lengths.copy_(random_lengths(layer, seed))
        assert_same_bits(layer.decode(layer.metadata()), layer.primary())


@pytest.mark.parametrize("how", ["copy_", "out="])
def test_graph_over_static_metadata(how: str) -> None:
    """The framework's own scheme (fresh pair, ``copy_``), and ours (``out=``)."""
    layer = Layer()
    static, splits = flash_mla_fp8.get_mla_metadata(
        torch.ones(64, dtype=torch.int32, device=DEVICE), HEADS, 1
    )
    pair = (static, splits[: BATCH + 1])

    def renew() -> None:
        if how == "out=":
            layer.metadata(out=pair)
            return
        fresh = layer.metadata()
        pair[0].copy_(fresh[0])
        pair[1].copy_(fresh[1])

    renew()
    layer.decode(pair, out=layer.out, lse=layer.lse)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.decode(pair, out=layer.out, lse=layer.lse)
    for seed in range(REPLAYS):
        layer.lengths.copy_(random_lengths(layer, seed))
        renew()
        layer.out.fill_(torch.nan)
        layer.lse.fill_(torch.nan)
        graph.replay()
        assert_same_bits((layer.out, layer.lse), layer.primary())


def test_metadata_can_be_captured_too() -> None:
    layer = Layer()
    pair = layer.metadata()
    layer.decode(pair, out=layer.out, lse=layer.lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.metadata(out=pair)
        layer.decode(pair, out=layer.out, lse=layer.lse)
    for seed in range(4):
        layer.lengths.copy_(random_lengths(layer, seed))
        graph.replay()
        assert_same_bits((layer.out, layer.lse), layer.primary())


def test_no_allocation_once_warm() -> None:
    """With ``out=`` and a quantised query kept, a call allocates nothing."""
    layer = Layer()
    pair = layer.metadata()
    query = snapmla.quantize_q(layer.q[..., :512], layer.q[..., 512:])

    def call() -> None:
        layer.metadata(out=pair)
        flash_mla_fp8.quantize_ckv_per_token_head(layer.q, 512, out=query)
        flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            query.nope, query.rope, layer.lora.view(-1, PAGE, 1, 512),
            layer.rope.view(-1, PAGE, 1, 64), query.scale.unsqueeze(-1),
            layer.scale.view(-1, PAGE, 1, 1), layer.table, layer.lengths, 512, *pair, SCALE, True,
            out=layer.out, lse=layer.lse,
        )  # fmt: skip

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        call()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_streams_have_workspaces_of_their_own() -> None:
    """Two streams decode at the same time, many times; neither disturbs the other."""
    layers = [Layer(), Layer()]
    layers[1].lengths.fill_(WIDTH * PAGE)
    want = [layer.primary() for layer in layers]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    results: list[list[flash_mla_fp8.Pair]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(layers[i].decode(layers[i].metadata()))
    torch.cuda.synchronize()
    for i in (0, 1):
        for got in results[i]:
            assert_same_bits(got, want[i])


def test_the_card_is_known() -> None:
    """On a card that is on file the dispatcher uses its ceilings; on others it says so."""
    device = torch.device("cuda", torch.cuda.current_device())
    card = rank.card_of(device)
    properties = torch.cuda.get_device_properties(device)
    assert card.sms == properties.multi_processor_count
    known = rank.card_named(properties.name)
    assert (known is not None and card.name == known.name) or "assumed" in card.source
    assert snapmla.explain(HEADS).problem.card == card


# ---------------------------------------------------------------- pairs that do not fit their call

EVERY = [(h, s_q) for h in (8, 16, 64, 128) for s_q in (1, 2)]
MISFITS = (1000, 40, 2000, 64)  # cut into several parts, whatever the rows


def right_rows(made: flash_mla_fp8.Pair, want: flash_mla_fp8.Pair) -> list[bool]:
    """Which sequences are right; the others must be NaN, all of out and lse."""
    found = []
    for out, lse, right_out, right_lse in zip(*made, *want):
        nan = bool(out.isnan().all() and lse.isnan().all())
        if not nan:
            error = (out.float() - right_out.float()).norm() / right_out.float().norm()
            assert error <= 5e-3, float(error)
            torch.testing.assert_close(lse, right_lse, atol=1e-3, rtol=0)
        found.append(not nan)
    return found


@pytest.mark.parametrize("called", EVERY, ids=str)
def test_pairs_that_do_not_fit(called: tuple[int, int]) -> None:
    """Made for every other number of rows, for other batches and lengths, halves of two pairs,
    slices, random words: a row is right or NaN, and which is what ``covered`` says."""
    heads, s_q = called
    layer = Layer(s_q, len(MISFITS), heads)
    layer.lengths.copy_(torch.tensor(MISFITS))
    want = layer.primary()

    def made_for(lengths: tuple[int, ...], rows: int = heads * s_q) -> flash_mla_fp8.Pair:
        seqlens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        return flash_mla_fp8.get_mla_metadata(seqlens, rows, 1)

    def decoded(metadata: torch.Tensor, splits: torch.Tensor) -> list[bool]:
        layer.out.fill_(7.0)
        layer.lse.fill_(7.0)
        made = layer.decode((metadata, splits), out=layer.out, lse=layer.lse)
        found = right_rows(made, want)
        tables = metadata_pair.tables_of(metadata, layer.batch)
        listed = tables.work_items.tolist(), tables.part_begin.tolist(), splits.tolist()
        tiles = [-(-n // 64) for n in MISFITS]
        assert found == metadata_pair.covered(*listed, tiles, 2 * len(metadata))
        return found

    for h, s in EVERY:
        assert decoded(*made_for(MISFITS, h * s)) == [True] * 4, (h, s)
    metadata, splits = made_for(MISFITS)
    small, few = made_for(MISFITS[:3])
    assert decoded(small, torch.cat([few, few[-1:]])) == [True, True, True, False]
    large, many = made_for((*MISFITS, 700))
    assert decoded(large, many[:5].clone())[0]
    decoded(metadata, made_for((40, 1000, 64, 2000))[1])
    assert decoded(*made_for((1000, 40, 2000, 200))) == [True] * 4
    assert decoded(*made_for((900, 40, 2000, 64))) == [False, True, True, True]
    assert not any(decoded(metadata, splits + 1))
    decoded(metadata[: len(metadata) // 2].contiguous(), splits)
    generator = torch.Generator(DEVICE).manual_seed(0)
    items = 8 * (len(metadata) + 4)
    for case in range(60):
        broken, slots = metadata.clone(), splits.clone()
        table = (broken.view(-1)[:items], broken.view(-1)[-(len(metadata) + 1) :], slots)[case % 3]
        at = torch.randint(0, len(table), (1 + case % 4,), generator=generator, device=DEVICE)
        low, high = (-2, 70) if case % 2 else (-(2**31), 2**31 - 1)
        words = torch.randint(low, high, at.shape, generator=generator, device=DEVICE)
        table[at] = words.int()
        decoded(broken, slots)
    assert decoded(metadata, splits) == [True] * 4


@pytest.mark.parametrize("batch", [100, 300])
def test_pairs_of_many_sequences_that_do_not_fit(batch: int) -> None:
    """More sequences than merge has CTAs to spare, split and whole; replayed with a bad pair."""
    layer = Layer(1, batch)
    lengths = torch.randint(1, 200, (batch,), generator=torch.Generator().manual_seed(0))
    lengths[::17] = WIDTH * PAGE
    layer.lengths.copy_(lengths)
    want = layer.primary()
    metadata, splits = layer.metadata()
    pair = metadata.clone(), splits.clone()
    layer.decode(pair, out=layer.out, lse=layer.lse)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.decode(pair, out=layer.out, lse=layer.lse)

    def replayed() -> list[bool]:
        layer.out.fill_(7.0)
        layer.lse.fill_(7.0)
        graph.replay()
        return right_rows((layer.out, layer.lse), want)

    assert replayed() == [True] * batch
    longer = layer.lengths + 64 * (torch.arange(batch, device=DEVICE) % 3 == 0).int()
    layer.lengths.copy_(longer.clamp(max=WIDTH * PAGE))
    want = layer.primary()
    grown = [i % 3 == 0 and lengths[i] < WIDTH * PAGE for i in range(batch)]
    assert replayed() == [not x for x in grown]
    pair[0].copy_(layer.metadata()[0])  # of this step, beside the splits of the last
    assert any(replayed())
    pair[1].add_(1)
    assert not any(replayed())
    pair[1].copy_(layer.metadata()[1])
    assert replayed() == [True] * batch
