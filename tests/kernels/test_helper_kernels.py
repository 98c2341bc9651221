"""append_kv, quantize_q, fetch_dequant, plan_decode and merge, executed from their objects.

The exported objects run on the software GPU (on the real one with ``-m gpu``); oracles are a few
lines of torch each.  Quantisation, fetch and plan are compared bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from codegen import toolchain
from dsl_kernels.spec import VariantSpec
from snapmla import runtime
from snapmla.reference_plan import plan_reference, tile_counts
from tests.support.cases import allocate_pool

# a GPU machine without the compiler runs the ``gpu`` tests on variants that were built elsewhere
pytestmark = pytest.mark.skipif(
    not toolchain.have_compiler() and not torch.cuda.is_available(),
    reason="needs nvidia-cutlass-dsl",
)

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INDEX = {"i32": torch.int32, "i64": torch.int64}
FP8 = torch.float8_e4m3fn
# objects of either architecture on the software GPU, or those of the GPU at hand
TARGETS = ["sm_90a", "sm_100a", pytest.param("cuda", marks=pytest.mark.gpu)]
LAYOUTS = ("split", "paged", "row640")


def kernel(target: str, **fields: object) -> Callable[..., None]:
    """The kernel of one variant for ``target``."""
    device = device_of(target)
    arch = runtime.arch_of(torch.device(device)) if device == "cuda" else target
    return runtime.kernel(VariantSpec(arch=arch, **fields), device)  # type: ignore[arg-type]


def device_of(target: str) -> str:
    return "cuda" if target == "cuda" else "cpu"


def quantised(c: Tensor, r: Tensor, token_dims: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """The quantisation rule in torch: (content bytes, rope bf16, scale f32).

    The scale is shared over the last ``token_dims`` dimensions.
    """
    c, r = c.float().cpu(), r.float().cpu()
    dims = tuple(range(-token_dims, 0))
    amax_c, amax_r = c.abs().amax(dims, keepdim=True), r.abs().amax(dims, keepdim=True)
    scale = torch.maximum(amax_c * torch.tensor(1 / 448), amax_r * 2.0**-40)
    scale = torch.maximum(scale, torch.tensor(2.0**-80))
    scale = torch.where(scale.isfinite(), scale, math.nan)
    inv = 1 / scale
    content = (c * inv).clamp(-448, 448).to(FP8).view(torch.uint8)
    content = torch.where(scale.isnan(), 0x7F, content)
    return content, (r * inv).to(torch.bfloat16), scale.reshape(scale.shape[: c.dim() - token_dims])


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, any NaN being as good as another."""
    actual, expected = actual.cpu(), expected.cpu()
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if actual.dtype.is_floating_point:
        assert torch.equal(actual.isnan(), expected.isnan())
        bits = {2: torch.int16, 4: torch.int32}[actual.element_size()]
        actual = torch.where(actual.isnan(), 0, actual).view(bits)
        expected = torch.where(expected.isnan(), 0, expected).view(bits)
    different = (actual != expected).nonzero()
    assert not len(different), f"{len(different)} differ, first at {different[0].tolist()}"


def latents(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of all kinds: magnitudes 1e-3 .. 1e3, outliers, zeros, huge and tiny RoPE, NaN, Inf."""
    g = torch.Generator().manual_seed(seed)
    rows = math.prod(shape)
    size = 10 ** (torch.rand(rows, 1, generator=g) * 6 - 3)
    c = torch.randn(rows, 512, generator=g) * size
    r = torch.randn(rows, 64, generator=g) * size
    big = 6e4 if dtype == torch.float16 else 1e30
    special: list[Callable[[int], None]] = [
        lambda i: c[i].zero_(),
        lambda i: (c[i].zero_(), r[i].zero_()),  # type: ignore[func-returns-value]
        lambda i: (c[i].zero_(), r[i].mul_(0).add_(1e3)),  # type: ignore[func-returns-value]
        lambda i: (c[i].zero_(), r[i].fill_(big)),  # type: ignore[func-returns-value]
        lambda i: c[i, 511:].fill_(math.nan),
        lambda i: c[i, 7:8].fill_(-math.inf),
        lambda i: r[i, 63:].fill_(math.nan),
        lambda i: r[i, :1].fill_(math.inf),
        lambda i: c[i, 300:301].fill_(-big),
        lambda i: c[i].mul_(1e-30),
        lambda i: r[i, 5:6].fill_(1000.0),
    ]
    for i, change in enumerate(special):
        change((i * 3 + 1) % rows)
    return c.view(*shape, 512).to(dtype), r.view(*shape, 64).to(dtype)


def joint(c: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The same rows as two slices of one (..., 576) tensor."""
    both = torch.cat([c, r], -1)
    return both[..., :512], both[..., 512:]


# ---------------------------------------------------------------------------------- append_kv


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("in_dtype", "index_dtype", "layout", "page_size", "strided"),
    [
        ("bf16", "i32", "split", 64, False),
        ("bf16", "i64", "paged", 16, True),
        ("bf16", "i64", "row640", 64, True),
        ("f16", "i32", "paged", 64, False),
        ("f16", "i64", "split", 16, True),
        ("f32", "i32", "row640", 16, True),
        ("f32", "i64", "paged", 128, False),
    ],
)
def test_append_kv(
    target: str,
    in_dtype: str,
    index_dtype: str,
    layout: str,
    page_size: int,
    strided: bool,
) -> None:
    device = device_of(target)
    n, pages = 41, 128 // page_size + 2
    c, r = latents((n,), DTYPES[in_dtype])
    slots = torch.randperm(pages * page_size)[:n]
    slots[5], slots[17], slots[40] = -1, pages * page_size, torch.iinfo(INDEX[index_dtype]).max
    slots[22] = torch.iinfo(INDEX[index_dtype]).min
    inputs = joint(c, r) if strided else (c, r)
    pool = allocate_pool(pages, page_size, layout, torch.device(device), 255)
    run = kernel(target, op="append_kv", in_dtype=in_dtype, index_dtype=index_dtype)
    run(
        pool[0].view(torch.uint8),
        *pool[1:],
        *(x.to(device) for x in inputs),
        slots.to(INDEX[index_dtype]).to(device),
    )

    content, rope, scale = (x.clone() for x in allocate_pool(pages, page_size, "split", "cpu", 255))
    kept = (slots >= 0) & (slots < pages * page_size)
    q8, rope_q, sigma = quantised(c, r)
    content.view(torch.uint8).view(-1, 512)[slots[kept]] = q8[kept]
    rope.view(-1, 64)[slots[kept]] = rope_q[kept]
    scale.view(-1)[slots[kept]] = sigma[kept]
    assert_same(pool[0].view(torch.uint8).contiguous(), content.view(torch.uint8))
    assert_same(pool[1].contiguous(), rope)
    assert_same(pool[2].contiguous(), scale)
    bad = c[kept].float().isfinite().all(1).logical_not() | r[kept].isfinite().all(1).logical_not()
    assert bad.sum() >= 3 and torch.equal(sigma[kept].isnan(), bad)


@pytest.mark.parametrize("n", [0, 1])
def test_append_kv_few(n: int) -> None:
    pool = allocate_pool(2, 16, "split", torch.device("cpu"), 0)
    c, r = torch.ones(n, 512).bfloat16(), torch.ones(n, 64).bfloat16()
    slots = torch.full((n,), 19, dtype=torch.int32)
    kernel("sm_90a", op="append_kv")(pool[0].view(torch.uint8), *pool[1:], c, r, slots)
    assert pool[2].count_nonzero() == n
    if n:
        assert pool[2][1, 3] == torch.tensor(1 / 448) and (pool[0][1, 3].float() == 448).all()


def far_apart(dtype: torch.dtype, *row: int) -> Tensor:
    """(2, 16, *row) whose second page lies more than 4 GiB (and 2^31 elements) behind the first.

    Only the touched parts of the allocation become resident.
    """
    page = max(2**31, 2**32 // dtype.itemsize) + 64
    try:
        memory = torch.empty(page + 16 * math.prod(row), dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    inner = (row[0], 1) if row else (1,)
    return memory.as_strided((2, 16, *row), (page, *inner))


def test_pool_beyond_4_gib() -> None:
    cache = (far_apart(torch.uint8, 512), far_apart(torch.bfloat16, 64), far_apart(torch.float32))
    c, r = latents((5,), torch.bfloat16)
    slots = torch.tensor([31, 16, 0, 17, 5], dtype=torch.int32)
    kernel("sm_90a", op="append_kv")(*cache, c, r, slots)
    expected = quantised(c, r)
    for got, want in zip(cache, expected, strict=True):
        assert_same(torch.stack([got[s // 16, s % 16] for s in slots.tolist()]), want)
    sigma = expected[2][:, None]
    content, rope = expected[0].view(FP8).float() * sigma, expected[1].float() * sigma
    out = outputs((5,), torch.bfloat16, "cpu", False)
    kernel("sm_90a", op="fetch_dequant", mode="indices")(*cache, slots, *out)
    assert_same(out[0], content.bfloat16())
    assert_same(out[1], rope.bfloat16())
    table, length = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    out = outputs((1, 2), torch.bfloat16, "cpu", False)
    kernel("sm_90a", op="fetch_dequant", mode="pages")(*cache, table, length, *out)
    assert_same(out[0][0], content[[1, 3]].bfloat16())
    assert_same(out[1][0], rope[[1, 3]].bfloat16())


def test_empty_calls_launch_nothing() -> None:
    pool = allocate_pool(1, 16, "split", torch.device("cpu"), 0)
    cache = (pool[0].view(torch.uint8), *pool[1:])
    i32, f32 = torch.int32, torch.float32
    q = [torch.empty(0, 1, 4, d).bfloat16() for d in (512, 64)]
    o = [torch.empty(0, 1, 4, 512, dtype=torch.uint8), torch.empty(0, 1, 4, 64).bfloat16()]
    for mode, scale in (("token_head", (0, 1, 4)), ("token", (0, 1))):
        run = kernel("sm_90a", op="quantize_q", mode=mode)
        run(*q, *o, torch.empty(scale, dtype=f32))
        assert not run.launches  # type: ignore[attr-defined]
    run = kernel("sm_90a", op="fetch_dequant", mode="indices")
    run(*cache, torch.empty(0, dtype=i32), *(torch.empty(0, d).bfloat16() for d in (512, 64)))
    assert not run.launches  # type: ignore[attr-defined]
    run = kernel("sm_90a", op="fetch_dequant", mode="pages")
    table, lengths = torch.zeros(2, 1, dtype=i32), torch.zeros(2, dtype=i32)
    run(*cache, table, lengths, *(torch.empty(2, 0, d).bfloat16() for d in (512, 64)))
    assert not run.launches  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------- quantize_q


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["token_head", "token"])
@pytest.mark.parametrize(
    ("in_dtype", "shape", "strided"),
    [
        ("bf16", (2, 1, 16), False),
        ("bf16", (3, 2, 7), True),
        ("f16", (1, 3, 5), True),
        ("f32", (2, 1, 11), False),
        ("bf16", (1, 1, 1), False),
    ],
)
def test_quantize_q(
    target: str, mode: str, in_dtype: str, shape: tuple[int, ...], strided: bool
) -> None:
    device = device_of(target)
    c, r = latents(shape, DTYPES[in_dtype], seed=1)
    if strided:  # heads outermost, as a transposed projection leaves them
        inputs = tuple(x.transpose(0, 2).contiguous().transpose(0, 2) for x in joint(c, r))
    else:
        inputs = (c, r)
    out_nope = torch.empty((*shape, 512), dtype=torch.uint8, device=device)
    out_rope = torch.empty((*shape, 64), dtype=torch.bfloat16, device=device)
    out_scale = torch.empty(shape if mode == "token_head" else shape[:2], device=device)
    run = kernel(target, op="quantize_q", in_dtype=in_dtype, mode=mode)
    run(*(x.to(device) for x in inputs), out_nope, out_rope, out_scale)
    q8, rope, scale = quantised(c, r, 1 if mode == "token_head" else 2)
    assert_same(out_nope, q8)
    assert_same(out_rope, rope)
    assert_same(out_scale, scale)


# ------------------------------------------------------------------------------ fetch_dequant


def random_cache(
    pages: int, page_size: int, layout: str, device: str
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """A cache with every byte value, scales over ten decades and NaN; and its fp32 contents."""
    pool = allocate_pool(pages, page_size, layout, torch.device(device), 255)
    content = torch.randint(0, 256, (pages, page_size, 512), dtype=torch.uint8)
    rope = (torch.randn(pages, page_size, 64) * 100).bfloat16()
    scale = 10 ** (torch.rand(pages, page_size) * 10 - 7)
    scale[0, 1] = math.nan
    pool[0].view(torch.uint8).copy_(content)
    pool[1].copy_(rope)
    pool[2].copy_(scale)
    nope32 = content.view(FP8).float() * scale[..., None]
    return pool, nope32, rope.float() * scale[..., None]


def outputs(shape: tuple[int, ...], dtype: torch.dtype, device: str, slices: bool) -> list[Tensor]:
    if slices:
        both = torch.full((*shape, 576), 7.0, dtype=dtype, device=device)
        return [both[..., :512], both[..., 512:]]
    return [torch.full((*shape, d), 7.0, dtype=dtype, device=device) for d in (512, 64)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size", "slices"),
    [
        ("bf16", "split", 64, True),
        ("bf16", "paged", 16, False),
        ("f16", "row640", 16, True),
        ("f32", "paged", 64, False),
    ],
)
def test_fetch_pages(target: str, dtype: str, layout: str, page_size: int, slices: bool) -> None:
    device = device_of(target)
    pages, max_len = 160 // page_size + 4, 80
    pool, nope32, rope32 = random_cache(pages, page_size, layout, device)
    lengths = torch.tensor([0, 1, page_size, page_size + 1, 75, 90, -4], dtype=torch.int32)
    width = -(-max_len // page_size)
    table = torch.stack([torch.randperm(pages)[:width] for _ in lengths]).int()
    table[3, 1] = pages + 1000  # clamped to the last page
    expected = outputs((len(lengths), max_len), DTYPES[dtype], "cpu", False)
    for i, length in enumerate(lengths.tolist()):
        for t in range(min(length, max_len)):
            page = min(int(table[i, t // page_size]), pages - 1)
            expected[0][i, t] = nope32[page, t % page_size].to(DTYPES[dtype])
            expected[1][i, t] = rope32[page, t % page_size].to(DTYPES[dtype])
    for i, length in enumerate(lengths.tolist()):  # the tail of the table must not be read
        table[i, -(-max(length, 0) // page_size) :] = 2147480000
    out = outputs((len(lengths), max_len), DTYPES[dtype], device, slices)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode="pages")
    run(pool[0].view(torch.uint8), *pool[1:], table.to(device), lengths.to(device), *out)
    assert_same(out[0], expected[0])
    assert_same(out[1], expected[1])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size", "slices"),
    [
        ("bf16", "paged", 64, True),
        ("bf16", "row640", 16, False),
        ("f16", "split", 16, False),
        ("f32", "split", 64, True),
    ],
)
def test_fetch_indices(target: str, dtype: str, layout: str, page_size: int, slices: bool) -> None:
    device = device_of(target)
    pages = 160 // page_size + 1
    pool, nope32, rope32 = random_cache(pages, page_size, layout, device)
    slots = pages * page_size
    index = torch.randint(0, slots, (45,), dtype=torch.int32)
    index[3], index[11], index[44], index[12] = -1, slots, 2147480000, 1  # 1 has a NaN scale
    valid = (index >= 0) & (index < slots)
    out = outputs((len(index),), DTYPES[dtype], device, slices)
    run = kernel(target, op="fetch_dequant", in_dtype=dtype, mode="indices")
    run(pool[0].view(torch.uint8), *pool[1:], index.to(device), *out)
    for got, values in zip(out, (nope32, rope32), strict=True):
        rows = values.flatten(0, 1)[torch.where(valid, index, 0).long()]
        assert_same(got, torch.where(valid[:, None], rows, 0).to(DTYPES[dtype]))
    assert out[0][12].isnan().all() and (out[0][3] == 0).all()


# ------------------------------------------------------------------------------------- plan


lengths_strategy = st.lists(
    st.one_of(st.integers(-5, 200), st.integers(0, 20000), st.sampled_from([0, 63, 64, 65])),
    min_size=1,
    max_size=24,
)


@settings(max_examples=300, deadline=None)
@given(
    lengths=lengths_strategy,
    parts=st.integers(1, 40),
    overhead=st.sampled_from([0, 1, 5, 20]),
    token_tile=st.sampled_from([16, 64, 128]),
    max_tokens=st.sampled_from([0, 100, 8192, 2**31 - 1]),
)
def test_plan_reference(
    lengths: list[int], parts: int, overhead: int, token_tile: int, max_tokens: int
) -> None:
    plan = plan_reference(lengths, parts, token_tile, overhead, max_tokens)
    tiles = tile_counts(lengths, token_tile, max_tokens)
    items, b = plan.work_items, len(lengths)
    # every tile once and in order; an empty sequence is one item
    assert [i[0] for i in items] == sorted(i[0] for i in items)
    for batch, count in enumerate(tiles):
        own = [i for i in items if i[0] == batch]
        assert own[0][1] == 0 and own[-1][2] == count
        assert all(x[2] == y[1] for x, y in itertools.pairwise(own))
        assert all(i[1] < i[2] for i in own) or (count == 0 and len(own) == 1)
        begin, end = plan.split_begin[batch : batch + 2]
        assert [i[3] for i in own] == ([-1] if len(own) == 1 else list(range(begin, end)))
        assert end - begin == (0 if len(own) == 1 else len(own))
    # capacity
    assert len(items) <= b + parts - 1 and plan.split_begin[-1] <= 2 * (parts - 1)
    assert plan.part_begin[0] == 0 and plan.part_begin[-1] == len(items)
    assert len(plan.part_begin) == parts + 1 and plan.part_begin == sorted(plan.part_begin)
    # balance: no part above T, and no in-order cut with a smaller T
    costs = [
        sum(e - s + overhead for _, s, e, _ in items[x:y])
        for x, y in itertools.pairwise(plan.part_begin)
    ]
    assert max(costs) <= plan.part_cost
    assert plan.part_cost <= max(-(-sum(costs) // parts), overhead + 1) + 2 * overhead + 1


@settings(max_examples=60, deadline=None)
@given(
    tiles=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    parts=st.integers(1, 4),
    overhead=st.integers(0, 3),
)
def test_plan_is_optimal(tiles: list[int], parts: int, overhead: int) -> None:
    """Against all in-order cuts, by dynamic programming over (sequence, tile) positions."""
    positions = [(b, t) for b, n in enumerate(tiles) for t in range(max(n, 1))]
    positions.append((len(tiles), 0))

    def cost(x: int, y: int) -> int:
        touched = {b for b, _ in positions[x:y]}
        return sum(tiles[b] > 0 for b, _ in positions[x:y]) + overhead * len(touched)

    last = len(positions) - 1
    best = {0: 0}
    for _ in range(parts):
        best = {y: min(max(best[x], cost(x, y)) for x in best if x <= y) for y in range(last + 1)}
    optimum = max(best[last], overhead + 1)
    assert plan_reference([64 * n for n in tiles], parts, 64, overhead).part_cost == optimum


def check_plan(
    target: str,
    lengths: list[int],
    parts: int,
    overhead: int,
    tile: int = 64,
    cap: int = 2**20,
    split: int = 0,
) -> None:
    device = device_of(target)
    expected = plan_reference(lengths, parts, tile, overhead, cap, split)
    b = len(lengths)
    capacity = max(parts + b, len(expected.work_items) + 1)
    items = torch.full((capacity, 4), -7, dtype=torch.int32, device=device)
    part_begin = torch.full((parts + 1,), -7, dtype=torch.int32, device=device)
    split_begin = torch.full((b + 1,), -7, dtype=torch.int32, device=device)
    seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    planned = torch.full((b,), -7, dtype=torch.int32, device=device)
    kernel(target, op="plan_decode")(
        seqlens, items, part_begin, split_begin, planned, cap, tile, overhead, split
    )
    assert torch.equal(planned, seqlens)
    assert part_begin.tolist() == expected.part_begin
    assert split_begin.tolist() == expected.split_begin
    n = len(expected.work_items)
    assert [tuple(i) for i in items[:n].tolist()] == expected.work_items
    assert (items[n:] == -7).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("lengths", "parts", "overhead"),
    [
        ([131072], 132, 5),
        ([1000, 0, 64, 65, 5000], 4, 5),
        ([0], 3, 5),
        ([0, 0, 0], 2, 0),
        ([64] * 7, 132, 5),
        ([-3, 2**31 - 1, 1], 33, 5),
        ([4097, 0, 1, 63, 64, 65] * 4, 66, 40),
        ([100] * 9, 1, 3),
    ],
)
def test_plan_kernel(target: str, lengths: list[int], parts: int, overhead: int) -> None:
    check_plan(target, lengths, parts, overhead)
    check_plan(target, lengths, parts, overhead, split=16)


@pytest.mark.parametrize("target", TARGETS)
def test_plan_kernel_random(target: str) -> None:
    g = torch.Generator().manual_seed(3)
    for _ in range(400 if target == "cuda" else 12):
        b = int(torch.randint(1, 24, (), generator=g))
        lengths = (torch.rand(b, generator=g) ** 4 * 20000).int().tolist()
        parts, overhead = (int(torch.randint(lo, 40, (), generator=g)) for lo in (1, 0))
        split = int(torch.randint(0, 3, (), generator=g)) * 7
        check_plan(target, lengths, parts, overhead, split=split)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_plan_kernel_many_sequences(target: str) -> None:
    """More sequences than one chunk of shared memory holds."""
    g = torch.Generator().manual_seed(4)
    lengths = (torch.rand(1030, generator=g) ** 6 * 9000).int().tolist()
    for parts, overhead, split in ((132, 5, 0), (132, 12, 0), (7, 3, 20)):
        check_plan(target, lengths, parts, overhead, split=split)


# ------------------------------------------------------------------------------------ merge


def merged(
    o: Tensor, lse: Tensor, begin: list[int], rows: int, factor: float, empty: float
) -> list[tuple[Tensor, Tensor] | None]:
    """fp64 oracle: (out (rows, 512), lse (rows,)) for every split batch, else None."""
    results: list[tuple[Tensor, Tensor] | None] = []
    for x, y in itertools.pairwise(begin):
        if x == y:
            results.append(None)
            continue
        part, logs = o[x:y, :rows].double(), lse[x:y, :rows].double()
        logs = torch.where(logs == math.inf, math.nan, logs)  # an infinite weight has no result
        top = torch.where(logs.isnan(), -math.inf, logs).amax(0)
        none = logs.eq(-math.inf).all(0)
        weight = torch.exp2(logs - torch.where(top.isinf(), 0, top))
        total = weight.sum(0)
        out = (weight[..., None] * part).sum(0) / torch.where(none, 1, total)[:, None]
        value = torch.where(none, empty, (top + total.log2()) * factor)
        results.append((out, value))
    return results


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("out_dtype", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("counts", "s_q", "h", "factor", "empty"),
    [
        ([2, 0, 3, 8], 1, 5, math.log(2), -math.inf),
        ([0, 9, 1], 2, 3, 1.0, math.inf),
        ([37], 1, 2, math.log(2), -math.inf),
        ([0, 0], 1, 2, 1.0, 0.0),
    ],
)
def test_merge(
    target: str,
    out_dtype: str,
    counts: list[int],
    s_q: int,
    h: int,
    factor: float,
    empty: float,
) -> None:
    device = device_of(target)
    rows, rows_pad, slots = s_q * h, 8, sum(counts) + 2
    o = torch.randn(slots, rows_pad, 512)
    lse = torch.randn(slots, rows_pad) * 30
    o[:, rows:], lse[:, rows:] = math.nan, math.nan
    o[sum(counts) :], lse[sum(counts) :] = math.nan, math.nan
    lse[0, 0], o[0, 0] = -math.inf, 0  # one split saw nothing
    lse[:, rows - 1], o[:, rows - 1] = -math.inf, 0  # nobody did
    if rows > 4:
        lse[1, 1] = math.nan
        lse[0, 2], o[0, 2] = math.inf, 1
    begin = [0]
    for n in counts:
        begin.append(begin[-1] + n)
    dtype = DTYPES[out_dtype]
    b = len(counts)
    out = torch.full((b, s_q, h, 512), 7.0, dtype=dtype, device=device)
    out_lse = torch.full((b, h, s_q), 7.0, device=device)
    kernel(target, op="merge", out_dtype=out_dtype)(
        o.to(device),
        lse.to(device),
        torch.tensor(begin, dtype=torch.int32, device=device),
        out,
        out_lse,
        factor,
        empty,
    )
    for i, result in enumerate(merged(o, lse, begin, rows, factor, empty)):
        got, got_lse = out[i].cpu().double().view(rows, 512), out_lse[i].cpu().double().t()
        if result is None:
            assert (got == 7).all() and (got_lse == 7).all()
            continue
        ulp = 2.0**-8 if out_dtype == "bf16" else 2e-6
        torch.testing.assert_close(got, result[0], rtol=ulp, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(
            got_lse.reshape(-1), result[1], rtol=1e-6, atol=2e-6, equal_nan=True
        )
        assert (got[rows - 1] == 0).all() and got_lse.reshape(-1)[rows - 1] == empty


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("counts", [[0, 2, 0, 0, 0, 0, 0, 11, 0], [2, 0, 3, 2, 0, 9, 2, 12, 3]])
def test_merge_units_share_a_cta(target: str, counts: list[int]) -> None:
    """So many units that a CTA owns several, also of several sequences."""
    device, h = device_of(target), 30
    counts = counts * (30 if target == "cuda" else 1)
    b, slots = len(counts), sum(counts)
    begin = [0, *itertools.accumulate(counts)]
    o, lse = torch.randn(slots, 32, 512), torch.randn(slots, 32)
    out, out_lse = (
        torch.full((b, 1, h, 512), 7.0, device=device),
        torch.zeros(b, h, 1, device=device),
    )
    table = torch.tensor(begin, dtype=torch.int32, device=device)
    kernel(target, op="merge", out_dtype="f32")(
        o.to(device), lse.to(device), table, out, out_lse, 1.0, -math.inf
    )
    for i, result in enumerate(merged(o, lse, begin, h, 1.0, -math.inf)):
        if result is None:
            assert (out[i] == 7).all()
            continue
        torch.testing.assert_close(out[i, 0].cpu().double(), result[0], rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(out_lse[i, :, 0].cpu().double(), result[1], rtol=1e-6, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [9, 132, 264])
def test_merge_is_deterministic(slots: int) -> None:
    o, lse = torch.randn(slots, 16, 512, device="cuda"), torch.randn(slots, 16, device="cuda")
    begin = torch.tensor([0, slots], dtype=torch.int32, device="cuda")
    run = kernel("cuda", op="merge", out_dtype="f32")
    seen = []
    for _ in range(20):
        out, out_lse = (
            torch.empty(1, 1, 16, 512, device="cuda"),
            torch.empty(1, 16, 1, device="cuda"),
        )
        run(o, lse, begin, out, out_lse, 1.0, -math.inf)
        seen.append((out.cpu(), out_lse.cpu()))
    assert all(torch.equal(x[0], seen[0][0]) and torch.equal(x[1], seen[0][1]) for x in seen)
