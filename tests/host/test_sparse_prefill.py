"""``sparse_prefill``: results through every front, memory given, tracers, wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsl_kernels.spec import VariantSpec
from snapmla.compat.flash_mla.sparse_prefill import flash_mla_sparse_fwd
from snapmla.errors import VariantError
from snapmla.runtime import variants
from snapmla.sparse import prefill as front
from snapmla.sparse.prefill import sparse_prefill
from snapmla.testing.prefill_job import PrefillJob
from tests.support.needs import needs_kernels

pytestmark = needs_kernels
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
S_Q, H, S_KV, TOPK = 2, 3, 20, 9
SCALE = 576**-0.5


def given(**changed: Any) -> dict[str, Any]:
    """Right arguments."""
    torch.manual_seed(1)
    return {
        "q": torch.randn(S_Q, H, 576).to(BF16), "kv": torch.randn(S_KV, 1, 576).to(BF16),
        "indices": torch.randint(-2, S_KV + 2, (S_Q, 1, TOPK), dtype=I32), "softmax_scale": SCALE,
        "attn_sink": torch.randn(H), "topk_length": torch.tensor([TOPK, 4], dtype=I32), **changed,
    }  # fmt: skip


def job_of(call: dict[str, Any]) -> PrefillJob:
    return PrefillJob(
        call["q"], call["kv"], call["indices"], call["topk_length"], call["attn_sink"], SCALE
    )


Truth = tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]


@pytest.fixture(scope="module")
def truth() -> Truth:
    """A right call and its results."""
    call = given()
    made = sparse_prefill(**call)
    errors = job_of(call).errors(made)
    assert errors.error <= errors.allowed and errors.lse_error < 1e-5, str(errors)
    assert [x.shape for x in made] == [(S_Q, H, 512), (S_Q, H), (S_Q, H)]
    assert all(x.is_contiguous() for x in made) and [x.dtype for x in made] == [BF16, F32, F32]
    return call, made


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_options_that_are_left_out(truth: Truth) -> None:
    """Without sinks, the LSE is as with; without lengths, as of lists of full length."""
    call, (_, most, lse) = truth
    assert same(sparse_prefill(**{**call, "attn_sink": None})[1:], (most, lse))
    whole = {**call, "topk_length": torch.full((S_Q,), TOPK, dtype=I32)}
    assert same(sparse_prefill(**{**call, "topk_length": None}), sparse_prefill(**whole))


def test_logits_beyond_what_fp32_tells_apart() -> None:
    """Right below 2^31 in log2 units; from there on a row is NaN in all results, whatever the side
    of 0; a row that names no token still says so."""
    sizes = (1.0, 256.0, 512.0, -200.0, -512.0, -1e28)
    q, kv = torch.zeros(2, len(sizes), 576), torch.zeros(3, 1, 576)
    q[..., 575], kv[:, 0, 575] = torch.tensor(sizes), torch.tensor([64.0, 80.0, 64.0])
    kv[..., 0] = torch.tensor([[1.0], [2.0], [3.0]])
    indices = torch.tensor([[[0, 1, 2]], [[-1, -1, 7]]], dtype=I32)
    out, most, lse = sparse_prefill(q.to(BF16), kv.to(BF16), indices, 2.0**16)
    largest = torch.tensor([80.0 if x > 0 else 64.0 for x in sizes]) * torch.tensor(sizes) * 2**16
    right = (largest * 1.4427).abs() < 2**31
    assert right.tolist() == [True, True, False, True, False, False]
    assert torch.allclose(lse[0, right], largest[right], rtol=1e-6, atol=2.0)
    assert torch.allclose(most[0, right], largest[right], rtol=1e-6)
    assert out[0, :2, 0].tolist() == [2.0, 2.0] and out[0, 3, 0] == 2.0
    assert all(x[0, ~right].isnan().all() for x in (out, most, lse))
    assert torch.isposinf(lse[1]).all() and torch.isneginf(most[1]).all() and not out[1].any()


def test_flash_mla_names(truth: Truth) -> None:
    """vLLM's call: heads padded with NaN, topk padded with -1, ``out=``; errors by its names."""
    call, made = truth
    q = torch.full((S_Q, 64, 576), math.nan).to(BF16)
    q[:, :H] = call["q"]
    indices = torch.full((S_Q, 1, 128), -1, dtype=I32)
    indices[..., :TOPK] = call["indices"]
    sink, out = torch.zeros(64), torch.zeros(S_Q, 64, 512).to(BF16)
    sink[:H] = call["attn_sink"]
    got = flash_mla_sparse_fwd(
        q, call["kv"], indices, SCALE, attn_sink=sink, topk_length=call["topk_length"], out=out
    )
    assert got[0] is out and same((x[:, :H] for x in got), made)
    with pytest.raises(ValueError, match="^sm_scale: expected a positive"):
        flash_mla_sparse_fwd(q, call["kv"], indices, 0.0)


WHOLE = pytest.mark.whole_matrix


@pytest.mark.parametrize(
    "engine", ["sglang", pytest.param("lmdeploy", marks=WHOLE), pytest.param("v4", marks=WHOLE)]
)
def test_calls_of_engines(truth: Truth, engine: str) -> None:
    """Lists of 128 with -1 behind what counts, heads padded by what memory holds, no lengths;
    LMDeploy's strided rows; V4's chunks of queries into a larger ``out``, with
    lengths and sinks."""
    call, made = truth
    heads, counts = 64, call["topk_length"]
    q = call["q"].new_empty(S_Q, heads, 576).fill_(math.nan)
    q[:, :H] = call["q"]
    page_table = torch.full((S_Q, 128), -1, dtype=I32)
    page_table[:, :TOPK] = call["indices"][:, 0]
    page_table[torch.arange(128) >= counts[:, None]] = -1
    kv = call["kv"]
    if engine == "v4":
        out, sink = torch.full((S_Q + 2, heads, 512), 7.0).to(BF16), torch.zeros(heads)
        sink[:H] = call["attn_sink"]
        for i in range(S_Q):
            flash_mla_sparse_fwd(
                q=q[i : i + 1], kv=kv.view(-1, 1, q.shape[-1]),
                indices=page_table[i : i + 1].unsqueeze(1), sm_scale=SCALE, attn_sink=sink,
                topk_length=counts[i : i + 1], out=out[i + 1 : i + 2],
            )  # fmt: skip
        assert torch.equal(out[1:-1, :H], made[0]) and (out[[0, -1]] == 7).all()
        return
    if engine == "lmdeploy":  # rows lie 128 bytes apart
        kv = torch.full((S_KV, 1, 640), math.nan).to(BF16)[..., :576].copy_(kv)
    out, *_, lse = flash_mla_sparse_fwd(
        q=q, kv=kv, indices=page_table.unsqueeze(1), sm_scale=SCALE, d_v=512
    )
    without = sparse_prefill(**{**call, "attn_sink": None})
    assert torch.equal(out[:, :H], without[0]) and torch.equal(lse[:, :H], without[2])


@pytest.mark.whole_matrix
def test_lse_of_what_the_indexer_chose(truth: Truth) -> None:
    """Automodel's call: a fourth result; memory given, errors, a list that it covers, no rows."""
    call, made = truth
    for _ in range(2):
        *three, first = flash_mla_sparse_fwd(
            call["q"], call["kv"], call["indices"], SCALE, 512, call["attn_sink"],
            call["topk_length"], indexer_topk=64,
        )  # fmt: skip
        assert same(three, made) and torch.equal(first, made[2])
    into = torch.full((H, S_Q), 7.0).T
    long = {**call, "indices": call["indices"].repeat(1, 1, 20), "topk_length": None}
    *_, lse, first = sparse_prefill(**long, indexer_topk=64, lse_indexer=into)
    of_64 = {**long, "indices": long["indices"][..., :64]}
    assert first is into and torch.equal(first, sparse_prefill(**of_64)[2]) and (lse > first).all()
    with pytest.raises(ValueError, match="lse_indexer: expected memory apart from lse"):
        sparse_prefill(**long, indexer_topk=64, lse=into, lse_indexer=into)
    *_, first = sparse_prefill(**{**call, "kv": call["kv"][:0]}, indexer_topk=64)
    assert torch.isposinf(first).all()


def test_the_indexer_where_calls_are_recorded() -> None:
    """torch.compile breaks its graph; what else records is told so."""
    call = given()
    with (
        FakeTensorMode(),
        pytest.raises(ValueError, match="indexer_topk: expected 0 where a call is recorded"),
    ):
        sparse_prefill(**call, indexer_topk=64)


def test_memory_given(truth: Truth) -> None:
    """Strided results; what lies between stays."""
    call, made = truth
    memory = torch.full((S_Q, H, 520), 7.0).to(BF16)
    logs = torch.full((2, H, 5), 7.0)
    results = {
        "out": memory[..., 8:], "max_logits": logs[0, :, 1:3].mT, "lse": logs[1, :, 2:4].mT,
    }  # fmt: skip
    for _ in range(2):
        got = sparse_prefill(**call, **results)
        assert all(a is b for a, b in zip(got, results.values(), strict=True)) and same(got, made)
    assert (memory[..., :8] == 7).all()
    assert (logs[0][:, [0, 3, 4]] == 7).all() and (logs[1][:, [0, 1, 4]] == 7).all()


def test_nothing_is_allocated_beside_results(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three results; with all given, none."""
    call, made = truth
    asked: list[tuple[Any, ...]] = []
    find = front.launch.allocator

    def noted(device: torch.device) -> Any:
        real = find(device)

        def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            asked.append((shape, dtype))
            return real(shape, strides, dtype)

        return allocate

    monkeypatch.setattr(front.launch, "allocator", noted)
    sparse_prefill(**call)
    assert asked == [((S_Q, H, 512), BF16), ((S_Q, H), F32), ((S_Q, H), F32)]
    asked.clear()
    own = [torch.empty_like(x) for x in made]
    sparse_prefill(**call, out=own[0], max_logits=own[1], lse=own[2])
    assert not asked and same(own, made)


def test_no_rows_and_no_queries() -> None:
    """Out 0, max_logits -inf, LSE +inf; nothing at all."""
    out, most, lse = sparse_prefill(**given(kv=torch.zeros(0, 1, 576).to(BF16)))
    assert not out.any() and torch.isneginf(most).all() and torch.isposinf(lse).all()
    none = given()
    for name in ("q", "indices", "topk_length"):
        none[name] = none[name][:0]
    assert [x.shape for x in sparse_prefill(**none)] == [(0, H, 512), (0, H), (0, H)]


@pytest.mark.whole_matrix
def test_rows_of_512_channels() -> None:
    call = given()
    call.update(q=call["q"][..., :512].contiguous(), kv=call["kv"][..., :512])
    made = sparse_prefill(**call)
    errors = job_of(call).errors(made)
    assert errors.error <= errors.allowed and errors.lse_error < 1e-5, str(errors)


def test_fake_tensors_and_operators(truth: Truth) -> None:
    """What tracers see: shapes of fakes, one node of a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    call, made = truth
    names = [name for name, x in call.items() if isinstance(x, Tensor)]
    trace = make_fx(
        lambda *values: sparse_prefill(**{**call, **dict(zip(names, values))}), tracing_mode="fake"
    )
    graph = trace(*(call[name] for name in names))
    (node,) = [n for n in graph.graph.nodes if "sparse_prefill" in str(n.target)]
    assert [x.shape for x in node.meta["val"]] == [x.shape for x in made]
    got = torch.ops.snapmla.sparse_prefill(
        call["q"], call["kv"], call["indices"], SCALE, 512, call["attn_sink"], call["topk_length"]
    )
    assert same(got, made)


def test_compiled(truth: Truth) -> None:
    """In a graph of torch.compile, results given and allocated."""
    call, made = truth

    def body(q: Tensor, into: Tensor) -> tuple[Tensor, ...]:
        other = {**call, "q": q * 1.0}
        got = sparse_prefill(**other)
        again, *_ = sparse_prefill(**other, out=into)
        return got[0] + 0, *got[1:], again

    into = torch.zeros_like(made[0])
    torch._dynamo.reset()
    got = torch.compile(body, fullgraph=True, backend="aot_eager")(call["q"], into)
    assert same(got, (*made, made[0])) and torch.equal(into, made[0])


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Callable[[dict[str, Any]], Tensor]:
    return lambda _call: torch.zeros(shape, dtype=dtype)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("q", None, TypeError, r"q: expected a torch\.Tensor, got NoneType"),
    ("q", lambda c: c["q"].half(), TypeError, "q: expected dtype bfloat16"),
    ("q", zeros(S_Q, H, 192), ValueError, r"q: expected shape \(s_q, h, 576 or 512\)"),
    ("q", zeros(S_Q, 129, 576), ValueError, "q: expected 1 to 128 heads, got 129"),
    ("q", zeros(S_Q, 0, 576), ValueError, "q: expected 1 to 128 heads, got 0"),
    ("q", lambda c: c["q"].requires_grad_(), ValueError, "q: expected no gradients .*no backward"),
    ("q", lambda c: c["q"].mT.contiguous().mT, ValueError, "q: expected innermost stride 1"),
    ("q", lambda c: c["q"][:, :1].expand(-1, H, -1), ValueError, "q: expected no expanded"),
    ("q", lambda c: torch.zeros(S_Q, H, 580, dtype=BF16)[..., :576], ValueError, "multiples of 16"),
    ("q", lambda c: torch.zeros(S_Q, H, 584, dtype=BF16)[..., 4:580], ValueError, "q: .*aligned"),
    ("kv", lambda c: c["kv"][..., :512], ValueError, r"kv: expected shape \(s_kv, 1, 576\)"),
    ("kv", lambda c: c["kv"][:, 0], ValueError, r"kv: expected shape \(s_kv, 1, 576\)"),
    ("kv", lambda c: c["kv"].float(), TypeError, "kv: expected dtype bfloat16"),
    (
        "kv",
        lambda c: torch.empty(2**31 + 576, dtype=BF16).as_strided((2, 1, 576), (2**31, 576, 1)),
        ValueError, "kv: expected rows less than 4294967296 bytes apart",
    ),
    ("indices", lambda c: c["indices"].long(), TypeError, "indices: expected dtype int32"),
    ("indices", lambda c: c["indices"][:, 0], ValueError, r"indices: expected shape \(2, 1, topk"),
    ("indices", lambda c: c["indices"][:1], ValueError, r"indices: expected shape \(2, 1, topk"),
    ("indices", lambda c: c["indices"][..., :0], ValueError, "indices: expected 1 to .* entries"),
    ("indices", lambda c: c["indices"][..., ::2], ValueError, "indices: expected innermost stride"),
    ("softmax_scale", None, TypeError, "softmax_scale: expected a Python float"),
    ("softmax_scale", -1.0, ValueError, "softmax_scale: expected a positive"),
    ("softmax_scale", 2.0**17, ValueError, "softmax_scale: expected .* at most 65536, got 131072"),
    ("d_v", 128, ValueError, "d_v: expected one of 512, got 128|d_v: expected 512, got 128"),
    ("attn_sink", zeros(H + 1, dtype=F32), ValueError, r"attn_sink: expected shape \(3,\)"),
    ("attn_sink", zeros(H), TypeError, "attn_sink: expected dtype float32"),
    ("topk_length", zeros(S_Q, dtype=torch.int64), TypeError, "topk_length: expected dtype int32"),
    ("indexer_topk", 100, ValueError, "indexer_topk: expected a multiple of 64, got 100"),
    ("indexer_topk", True, TypeError, "indexer_topk: expected an int"),
    ("lse_indexer", zeros(S_Q, H, dtype=F32), ValueError, "lse_indexer: expected None without"),
    ("topk_length", zeros(1, dtype=I32), ValueError, r"topk_length: expected shape \(2,\)"),
    ("out", zeros(S_Q, H, 512, dtype=F32), TypeError, "out: expected dtype bfloat16"),
    ("out", zeros(S_Q, H, 576), ValueError, r"out: expected shape \(2, 3, 512\)"),
    ("out", lambda c: c["q"][..., :512], ValueError, "out: expected memory apart from q"),
    (
        "out", lambda c: torch.zeros(1, H, 512, dtype=BF16).expand(S_Q, -1, -1), ValueError,
        "out: expected strides of distinct rows",
    ),
    ("lse", zeros(H, S_Q, dtype=F32), ValueError, r"lse: expected shape \(2, 3\)"),
    ("max_logits", lambda c: c["attn_sink"].expand(S_Q, -1), ValueError, "max_logits: expected"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), WRONG, ids=[f"{row[0]}-{i}" for i, row in enumerate(WRONG)]
)
def test_wrong_argument(name: str, value: Any, error: type[Exception], words: str) -> None:
    """Every sentence, of a first call and behind a right one."""
    right = given()
    for tensor in ("q", "indices", "topk_length"):
        right[tensor] = right[tensor][:0]
    for _ in range(2):
        call = given()
        call[name] = value(call) if callable(value) else value
        with pytest.raises(error, match=words):
            sparse_prefill(**call)
        sparse_prefill(**right)


def test_known_calls_are_checked_where_memory_is_new(truth: Truth) -> None:
    """A call like one before, over results that now lie on what is read."""
    call, made = truth
    memory = torch.zeros(2 * S_Q, H, 576).to(BF16)
    q = memory[:S_Q].copy_(call["q"])
    first = sparse_prefill(**{**call, "q": q}, out=memory[S_Q:, :, :512])
    assert torch.equal(first[0], made[0])
    with pytest.raises(ValueError, match="out: expected memory apart from q"):
        sparse_prefill(**{**call, "q": q}, out=memory[1 : S_Q + 1, :, :512])
    off = torch.zeros(S_Q * H * 576 + 4, dtype=BF16)[4:].view(S_Q, H, 576)
    with pytest.raises(ValueError, match="q: expected storage aligned"):
        sparse_prefill(**{**call, "q": off}, out=memory[S_Q:, :, :512])


def test_gradients_are_fine_where_none_is_wanted(truth: Truth) -> None:
    call, made = truth
    with torch.no_grad():
        assert same(sparse_prefill(**{**call, "q": call["q"].clone().requires_grad_()}), made)


def test_an_architecture_without() -> None:
    with pytest.raises(VariantError, match="no sm_100a sparse_prefill kernel exists yet"):
        variants.kernel(
            VariantSpec(op="sparse_prefill", arch="sm_100a", row_tile=64, d_qk=576), "cpu"
        )
