"""``snapmla.mha``: results through every front, views, memory given, tracers, wrong arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from snapmla.compat import flash_attention
from snapmla.compat.flash_mla import mha
from snapmla.errors import VariantError
from snapmla.mha import mha_prefill, workspace_size
from snapmla.mha import prefill as front
from snapmla.runtime import variants
from snapmla.testing.mha_job import mha_errors, offsets
from snapmla.testing.reference import merge_states_reference
from tests.support.needs import needs_kernels

pytestmark = needs_kernels
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
LQ, LK, H, H_K = (9, 0), (30, 4), 2, 1
T_Q, T_K = sum(LQ), sum(LK)


def given(**changed: Any) -> dict[str, Any]:
    """Right arguments: views of a packed projection, as a model has them; V of deviation 0.1."""
    torch.manual_seed(1)
    kv = (torch.randn(T_K, H_K, 256) * (1.0 - 0.9 * (torch.arange(256) >= 128))).to(BF16)
    return {
        "q": torch.randn(T_Q, H, 192).to(BF16), "k_nope": kv[..., :128], "v": kv[..., 128:],
        "cu_seqlens_q": offsets(LQ), "cu_seqlens_k": offsets(LK), "max_seqlen_q": max(LQ),
        "max_seqlen_k": max(LK), "k_rope": torch.randn(T_K, 1, 64).to(BF16), **changed,
    }  # fmt: skip


def whole_k(call: dict[str, Any]) -> Tensor:
    return torch.cat([call["k_nope"], call["k_rope"].expand(-1, H_K, -1)], -1)


def assert_right(call: dict[str, Any], out: Tensor, lse: Tensor, causal: bool = True) -> None:
    where = (call["cu_seqlens_q"], call["cu_seqlens_k"])
    keys = (whole_k(call), call["v"])
    errors = mha_errors(out, lse, call["q"], *keys, *where, 192**-0.5, causal)
    assert errors.right and errors.lse_error < 1e-5, str(errors)


@pytest.fixture(scope="module")
def truth() -> tuple[dict[str, Any], Tensor, Tensor]:
    """A right call and its results."""
    call = given()
    out, lse = mha_prefill(**call)
    assert_right(call, out, lse)
    assert out.shape == (T_Q, H, 128) and lse.shape == (H, T_Q)
    assert out.is_contiguous() and lse.is_contiguous()
    return call, out, lse


Truth = tuple[dict[str, Any], Tensor, Tensor]


def test_k_apart_is_k_whole(truth: Truth) -> None:
    """Bit for bit, also where RoPE channels are expanded over heads."""
    call, out, lse = truth
    whole = {**call, "k_nope": whole_k(call), "k_rope": None}
    for other in (whole, {**call, "k_rope": call["k_rope"].expand(-1, H_K, -1)}):
        got = mha_prefill(**other)
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)


def test_flash_mla_names(truth: Truth) -> None:
    """The same bits; the LSE has tokens first, over memory that has not."""
    call, out, lse = truth
    q, k, v = call["q"], whole_k(call), call["v"]
    lengths = (call["cu_seqlens_q"], call["cu_seqlens_k"], max(LQ), max(LK))
    got = mha.flash_attn_varlen_func(q, k, v, *lengths, causal=True)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse.T)
    assert got[1].shape == (T_Q, H) and got[1].stride() == (1, T_Q)
    packed = torch.cat([k, v], -1)
    got = mha.flash_attn_varlen_kvpacked_func(q, packed, *lengths, 192, causal=True)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse.T)


def test_flash_mla_qkvpacked(truth: Truth) -> None:
    call, out, _ = truth
    q, k, v = call["q"][:, :1], whole_k(call)[:T_Q], call["v"][:T_Q]
    cu = call["cu_seqlens_q"]
    want = mha_prefill(q, k, v, cu, cu, max(LQ), max(LQ), causal=False)
    packed = torch.cat([q, k, v], -1)
    got = mha.flash_attn_varlen_qkvpacked_func(packed, cu, max(LQ), 192)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1].T)
    assert not torch.equal(got[0], out[:, :1]), "another mask, other keys"


def test_a_hidden_key_reaches_no_row_through_a_merge() -> None:
    """A prefix, and the new tokens behind it, the fifth of which has a NaN in V: attention in two
    calls, merged, is that of a sound V for the tokens before."""
    call = given(cu_seqlens_q=offsets((9,)), cu_seqlens_k=offsets((9,)), max_seqlen_k=30)
    sizes = [(name, call[name][25:], call[name][:25]) for name in ("k_nope", "v", "k_rope")]
    new = {**call, **{name: rows for name, rows, _ in sizes}}
    before = {**call, **{name: rows for name, _, rows in sizes}, "cu_seqlens_k": offsets((25,))}
    wild = new["v"].clone()
    wild[4, :, 3] = math.nan
    prefix = mha_prefill(**before, causal=False)
    got, want = (mha_prefill(**{**new, "v": v}) for v in (wild, new["v"]))
    merged = [
        merge_states_reference(torch.stack([prefix[0], x[0]]), torch.stack([prefix[1], x[1]]))
        for x in (got, want)
    ]
    assert torch.equal(merged[0][0][:4], merged[1][0][:4]) and got[0][4:, :, 3].isnan().all()
    assert torch.equal(merged[0][1], merged[1][1]) and merged[1][0].isfinite().all()


def test_logits_beyond_what_fp32_tells_apart() -> None:
    """Right below 2^31 in log2 units; from there on a row is NaN, LSE too, on either side of 0."""
    call = given(softmax_scale=2.0**16)
    k = torch.zeros(T_K, H_K, 192).to(BF16)
    k[:, :, 0] = 64.0
    k[7, :, 0] = 80.0
    sizes = torch.tensor([0.0, 1.0, 200.0, 256.0, 512.0, -200.0, -512.0, 1e30, -1e30])
    q = torch.zeros(T_Q, H, 192)
    q[:, :, 0] = sizes[:, None]
    call = {**call, "q": q.to(BF16), "k_nope": k, "k_rope": None, "causal": False}
    out, lse = mha_prefill(**call)
    right, far = [0, 1, 2, 3, 5], [4, 6, 7, 8]
    largest = torch.where(sizes > 0, 80.0, 64.0) * sizes * 2.0**16
    assert ((largest[right] * 1.4427).abs() < 2**31).all() and out[right].isfinite().all()
    assert ((largest[far] * 1.4427).abs() >= 2**31).all()
    assert torch.allclose(lse[:, right], largest[right].expand(H, -1), rtol=1e-6, atol=4.0)
    assert torch.equal(out[1:4], call["v"][7].expand(3, H, -1))
    assert out[far].isnan().all() and lse[:, far].isnan().all()


@pytest.mark.whole_matrix  # its kernel is not of the test set
def test_logits_beyond_what_fp16_holds() -> None:
    """Right below 2^24 in log2 units; from there on a row is NaN, LSE too, never an infinity."""
    scale, far = 2.0**9, [3, 5, 6, 7]
    sizes = torch.tensor([1.0, 200.0, 256.0, 300.0, -200.0, -512.0, 6e4, -6e4])
    n, rows = len(sizes), offsets((len(sizes),))
    q, k, v = torch.zeros(n, 1, 128), torch.full((n, 1, 128), 64.0), torch.zeros(n, 1, 128)
    q[:, 0, 0], k[5], v[:, 0] = sizes, 80.0, torch.arange(n)[:, None]
    out, lse = mha_prefill(
        q.half(), k.half(), v.half(), rows, rows, n, n, causal=False, softmax_scale=scale
    )
    largest = torch.where(sizes > 0, 80.0, 64.0) * sizes * scale
    right = (largest * 1.4427).abs() < 2**24
    assert (~right).nonzero().flatten().tolist() == far
    assert torch.allclose(lse[0, right], largest[right], rtol=1e-6, atol=4.0)
    mean = (v.sum(0) - 5.0) / (n - 1)
    assert (out[:3] == 5.0).all() and torch.allclose(out[4].float(), mean, rtol=2e-3)
    assert out[far].isnan().all() and lse[:, far].isnan().all()


def test_flash_attention_names(truth: Truth) -> None:
    call, out, lse = truth
    common = dict(
        q=call["q"], k=whole_k(call), v=call["v"], cu_seqlens_q=call["cu_seqlens_q"],
        cu_seqlens_k=call["cu_seqlens_k"], max_seqlen_q=max(LQ), max_seqlen_k=max(LK), causal=True,
    )  # fmt: skip
    into = torch.full((T_Q, H, 128), 7.0).to(BF16)
    got = flash_attention.flash_attn_varlen_func(**common, out=into)
    assert got is into and torch.equal(into, out)
    made = flash_attention.flash_attn_varlen_func(**common, return_softmax_lse=True)
    assert torch.equal(made[0], out) and torch.equal(made[1], lse)


def test_memory_given(truth: Truth) -> None:
    """Strided results, a workspace; rows of no sequence, and what lies between, stay."""
    call, out, lse = truth
    memory = torch.full((T_Q, H, 136), 7.0).to(BF16)
    logs = torch.full((T_Q, 5), 7.0)
    work = torch.full((workspace_size(T_Q, len(LQ)) + 4,), -3, dtype=I32)
    results = {"out": memory[..., 8:], "lse": logs[:, 1:3].mT, "workspace": work}
    for _ in range(2):  # a workspace may be used again
        got = mha_prefill(**call, **results)
        assert got[0] is results["out"] and got[1] is results["lse"]
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    assert (memory[..., :8] == 7).all() and (logs[:, [0, 3, 4]] == 7).all()
    assert (work[-4:] == -3).all()


def test_nothing_is_allocated_beside_results(truth: Truth, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``workspace=`` one tensor of 16 bytes and 8 a row tile; with all given, none."""
    call, out, lse = truth
    made: list[tuple[Any, ...]] = []
    find = front.launch.allocator

    def noted(device: torch.device) -> Any:
        real = find(device)

        def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            made.append((shape, dtype))
            return real(shape, strides, dtype)

        return allocate

    monkeypatch.setattr(front.launch, "allocator", noted)
    mha_prefill(**call)
    tiles = T_Q // 128 + len(LQ)
    assert made == [((T_Q, H, 128), BF16), ((H, T_Q), F32), ((4 + 2 * tiles,), I32)]
    made.clear()
    own = torch.empty_like(out), torch.empty_like(lse)
    work = torch.empty(workspace_size(T_Q, len(LQ)), dtype=I32)
    mha_prefill(**call, out=own[0], lse=own[1], workspace=work)
    assert not made and torch.equal(own[0], out)


@pytest.mark.parametrize("total_k", [0, 5])
def test_no_keys(total_k: int) -> None:
    """Out 0 and LSE -inf, whether other sequences have keys or not."""
    lk = (0, total_k)
    call = given(cu_seqlens_k=offsets(lk), max_seqlen_k=total_k, causal=False)
    for name in ("k_nope", "k_rope", "v"):
        call[name] = call[name][:total_k]
    out, lse = mha_prefill(**call)
    assert not out.any() and torch.isneginf(lse).all()


def test_no_queries_and_no_sequences() -> None:
    call = given()
    none = {**call, "q": call["q"][:0], "cu_seqlens_q": offsets((0, 0)), "max_seqlen_q": 0}
    out, lse = mha_prefill(**none)
    assert out.shape == (0, H, 128) and lse.shape == (H, 0)
    empty = {**none, "cu_seqlens_q": offsets(()), "cu_seqlens_k": offsets(())}
    assert mha_prefill(**empty)[0].shape == (0, H, 128)


def test_fake_tensors_and_operators(truth: Truth) -> None:
    """What tracers see: shapes of fakes, the operator's own test, one node of a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    call, out, lse = truth
    names = list(call)
    trace = make_fx(
        lambda *values: mha_prefill(**dict(zip(names, values))), tracing_mode="fake"
    )  # fmt: skip
    graph = trace(*call.values())
    (node,) = [n for n in graph.graph.nodes if "mha_prefill" in str(n.target)]
    assert node.meta["val"][0].shape == out.shape and node.meta["val"][1].shape == lse.shape
    got = torch.ops.snapmla.mha_prefill(
        call["q"], call["k_nope"], call["k_rope"], call["v"], call["cu_seqlens_q"],
        call["cu_seqlens_k"], max(LQ), max(LK), 192**-0.5, True, False,
    )  # fmt: skip
    assert torch.equal(got[0], out) and torch.equal(got[1], lse)


def test_compiled(truth: Truth) -> None:
    """In a graph of torch.compile, results given and allocated."""
    call, out, lse = truth

    def body(q: Tensor, into: Tensor) -> tuple[Tensor, ...]:
        other = {**call, "q": q * 1.0}
        got, logs = mha_prefill(**other)
        _, again = mha_prefill(**other, out=into)
        return got + 0, logs, again

    into = torch.zeros_like(out)
    torch._dynamo.reset()
    got = torch.compile(body, fullgraph=True, backend="aot_eager")(call["q"], into)
    assert torch.equal(got[0], out) and torch.equal(got[1], lse) and torch.equal(got[2], lse)
    assert torch.equal(into, out)


def wider(name: str, width: int) -> Callable[[dict[str, Any]], Any]:
    return lambda call: torch.zeros(*call[name].shape[:2], width, dtype=BF16)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("q", None, TypeError, r"q: expected a torch\.Tensor, got NoneType"),
    ("q", lambda c: c["q"].float(), TypeError, "q: expected dtype bfloat16 or float16"),
    ("q", wider("q", 160), ValueError, r"q: .*shape .*192 or 128 or 256\), got .*160"),
    ("q", wider("q", 256), ValueError, r"k_nope: .*192\).*192 channels .*k_rope, or all 256"),
    ("q", wider("q", 128), ValueError, "k_rope: expected None beside queries of 128 channels"),
    ("q", lambda c: c["q"].flatten(1), ValueError, r"q: expected shape \(tokens, heads"),
    ("q", lambda c: c["q"].mT.contiguous().mT, ValueError, "q: expected innermost stride 1"),
    ("q", lambda c: torch.zeros(T_Q, H, 196, dtype=BF16)[..., :192], ValueError, "multiples of 16"),
    ("q", lambda c: torch.zeros(T_Q, H, 200, dtype=BF16)[..., 4:196], ValueError, "q: .*aligned"),
    ("q", lambda c: torch.zeros(T_Q, 3, 192, dtype=BF16), None, ""),
    ("k_nope", wider("k_nope", 192), ValueError, r"k_nope: expected shape .*128\).*beside k_rope"),
    ("k_nope", lambda c: c["k_nope"].half(), TypeError, "k_nope: expected dtype bfloat16"),
    ("k_nope", lambda c: torch.zeros(T_K, 3, 128, dtype=BF16), ValueError, "v: expected shape"),
    ("v", wider("v", 192), ValueError, r"v: expected shape \(tokens, heads, 128\)"),
    ("v", lambda c: c["v"][1:], ValueError, "v: expected shape"),
    ("v", lambda c: c["v"][:1].expand(T_K, -1, -1), ValueError, "v: expected no expanded"),
    ("k_rope", lambda c: c["k_rope"][1:], ValueError, r"k_rope: expected shape \(34, 1, 64\)"),
    ("k_rope", lambda c: c["k_rope"].half(), TypeError, "k_rope: expected dtype bfloat16"),
    ("k_rope", None, ValueError, r"k_nope: expected shape .*192\).*all 192 without"),
    ("cu_seqlens_q", lambda c: c["cu_seqlens_q"].long(), TypeError, "cu_seqlens_q: expected dtype"),
    ("cu_seqlens_q", lambda c: c["cu_seqlens_q"][:0], ValueError, "cu_seqlens_q: expected b"),
    ("cu_seqlens_k", lambda c: c["cu_seqlens_k"][1:], ValueError, r"cu_seqlens_k: .*shape \(3"),
    ("cu_seqlens_k", [0, 1], TypeError, r"cu_seqlens_k: expected a torch\.Tensor, got list"),
    ("max_seqlen_q", -1, ValueError, "max_seqlen_q: expected 0 to"),
    ("max_seqlen_k", 1.5, TypeError, "max_seqlen_k: expected an int, got float"),
    ("softmax_scale", 0.0, ValueError, "softmax_scale: expected a positive"),
    ("softmax_scale", 65537.0, ValueError, "softmax_scale: expected .* at most 65536, got 65537"),
    ("softmax_scale", torch.ones(()), TypeError, "softmax_scale: expected a Python float"),
    ("causal", "yes", TypeError, "causal: expected True or False"),
    ("out", lambda c: torch.zeros(T_Q, H, 128), TypeError, "out: expected dtype bfloat16"),
    ("out", lambda c: torch.zeros(1, H, 128, dtype=BF16).expand(T_Q, -1, -1), ValueError, "out: "),
    ("out", lambda c: c["q"][..., :128], ValueError, "out: expected memory apart from q"),
    ("lse", lambda c: torch.zeros(T_Q, H), ValueError, r"lse: expected shape \(2, 9\)"),
    ("lse", lambda c: torch.zeros(T_Q).expand(H, -1), ValueError, "lse: expected strides of"),
    ("workspace", torch.zeros(5, dtype=I32), ValueError, "workspace: expected 8 or more words"),
    ("workspace", torch.zeros(50), TypeError, "workspace: expected dtype int32"),
    (
        "workspace",
        lambda c: torch.zeros(50, 2, dtype=I32)[:, 0],
        ValueError,
        "workspace: .*contiguous",
    ),
]


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), WRONG, ids=[f"{row[0]}-{i}" for i, row in enumerate(WRONG)]
)
def test_wrong_argument(name: str, value: Any, error: type[Exception] | None, words: str) -> None:
    """Every sentence, of a first call and behind a right one."""
    for _ in range(2):
        call = given()
        call[name] = value(call) if callable(value) else value
        if error is None:
            mha_prefill(**call)
        else:
            with pytest.raises(error, match=words):
                mha_prefill(**call)
        mha_prefill(**given(q=given()["q"][:0], cu_seqlens_q=offsets((0, 0))))


def test_known_calls_are_checked_where_memory_is_new(truth: Truth) -> None:
    """A call like one before, over results that now lie on what is read."""
    call, out, _ = truth
    memory = torch.zeros(2 * T_Q, H, 192).to(BF16)
    q = memory[:T_Q].copy_(call["q"])
    first = mha_prefill(**{**call, "q": q}, out=memory[T_Q:, :, :128])
    assert torch.equal(first[0], out)
    with pytest.raises(ValueError, match="out: expected memory apart from q"):
        mha_prefill(**{**call, "q": q}, out=memory[1 : T_Q + 1, :, :128])
    off = torch.zeros(T_Q * H * 192 + 4, dtype=BF16)[4:].view(T_Q, H, 192)
    with pytest.raises(ValueError, match="q: expected storage aligned"):
        mha_prefill(**{**call, "q": off})


def test_gradients_are_fine_where_none_is_wanted(truth: Truth) -> None:
    call, out, _ = truth
    with torch.no_grad():
        assert torch.equal(mha_prefill(**{**call, "q": call["q"].clone().requires_grad_()})[0], out)


def test_names_of_others_in_messages(truth: Truth) -> None:
    """What FlashMLA does not say: dropout, other widths; arguments by its names."""
    call, *_ = truth
    k, cu = whole_k(call), (call["cu_seqlens_q"], call["cu_seqlens_k"])
    func = mha.flash_attn_varlen_func
    with pytest.raises(ValueError, match="dropout_p: expected 0, got 0.1"):
        func(call["q"], k, call["v"], *cu, 9, 30, dropout_p=0.1)
    with pytest.raises(TypeError, match="^cu_seqlens_kv: expected dtype int32"):
        func(call["q"], k, call["v"], cu[0], cu[1].long(), 9, 30)
    with pytest.raises(ValueError, match="^k: expected shape"):
        func(call["q"], k[..., :100], call["v"], *cu, 9, 30)
    with pytest.raises(TypeError, match="^max_seqlen_qo: expected an int"):
        func(call["q"], k, call["v"], *cu, None, 140)
    packed = mha.flash_attn_varlen_kvpacked_func
    with pytest.raises(ValueError, match=r"^kv: expected shape \(tokens, heads, 320\).*is 192"):
        packed(call["q"], k, *cu, 9, 30, 192)
    with pytest.raises(ValueError, match="^head_dim_qk: expected one of 192, 128, 256, got 64"):
        packed(call["q"], k, *cu, 9, 30, 64)
    with pytest.raises(ValueError, match=r"^kv: expected shape \(tokens, heads, 512\).*is 256"):
        packed(wider("q", 256)(call), k, *cu, 9, 30, 256)
    with pytest.raises(TypeError, match="^kv: expected a torch.Tensor, got NoneType"):
        packed(call["q"], None, *cu, 9, 30, 192)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^k: expected shape"):
        flash_attention.flash_attn_varlen_func(
            call["q"], k[..., :100], call["v"], *cu, 9, 30
        )  # fmt: skip


def test_workspace_size() -> None:
    """16 bytes and 8 a row tile: at most 16 a row tile from two of them on."""
    assert workspace_size(0, 0) == 4 and workspace_size(128, 1) == 8 and workspace_size(5, 40) == 14
    with pytest.raises(ValueError, match="total_q: expected 0 or more, got -1"):
        workspace_size(-1, 1)


# ------------------------------------------------------------------------- heads of 256 channels


def glm(**changed: Any) -> dict[str, Any]:
    """As ``given``, of heads as GLM has them: 192 channels and 64 of RoPE, values of 256."""
    torch.manual_seed(1)
    kv = (torch.randn(T_K, H_K, 448) * (1.0 - 0.9 * (torch.arange(448) >= 192))).to(BF16)
    wide = {"q": torch.randn(T_Q, H, 256).to(BF16), "k_nope": kv[..., :192], "v": kv[..., 192:]}
    return given(**{**wide, **changed})


def test_what_tracers_see_of_256_channels() -> None:
    """Shapes of results, and which values go beside: no kernel is asked for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        call = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in glm().items()}
        out, lse = mha_prefill(**call)
        assert out.shape == (T_Q, H, 256) and lse.shape == (H, T_Q)
        with pytest.raises(ValueError, match=r"v: .*heads, 256\).*256 channels have 256"):
            mha_prefill(**{**call, "v": call["v"][..., :128]})
    with pytest.raises(ValueError, match=r"out: expected shape \(9, 2, 256\)"):
        mha_prefill(**glm(out=torch.zeros(T_Q, H, 128, dtype=BF16)))


@pytest.mark.whole_matrix
def test_heads_of_256_channels() -> None:
    """Beside fp64; the same bits with K whole and by every front; memory that is given stays."""
    call = glm()
    out, lse = mha_prefill(**call)
    cu, v = (call["cu_seqlens_q"], call["cu_seqlens_k"]), call["v"]
    k = torch.cat([call["k_nope"], call["k_rope"].expand(-1, H_K, -1)], -1)
    errors = mha_errors(out, lse, call["q"], k, v, *cu, 256**-0.5, True)
    assert errors.right and errors.lse_error < 1e-5, str(errors)
    lengths = (*cu, max(LQ), max(LK))
    packed = torch.cat([k, v], -1)
    memory = torch.full((T_Q, H, 264), 7.0).to(BF16)
    logs = torch.full((T_Q, 5), 7.0)
    found: list[tuple[Tensor, Tensor]] = [
        mha_prefill(**{**call, "k_nope": k, "k_rope": None}),
        mha_prefill(**call, out=memory[..., 8:], lse=logs[:, 1:3].mT),
        mha.flash_attn_varlen_func(call["q"], k, v, *lengths, causal=True),
        mha.flash_attn_varlen_kvpacked_func(
            call["q"], packed, *lengths, 256, causal=True
        ),
        flash_attention.flash_attn_varlen_func(
            call["q"], k, v, *lengths, causal=True, return_softmax_lse=True
        ),
    ]  # fmt: skip
    for got, logarithms in found:
        assert torch.equal(got, out)
        assert torch.equal(logarithms if logarithms.shape == lse.shape else logarithms.T, lse)
    assert (memory[..., :8] == 7).all() and (logs[:, [0, 3, 4]] == 7).all()


def test_kernels_of_an_architecture_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, where SM100 is asked for, by any name: what serves there."""
    monkeypatch.setenv("SNAPMLA_SOFTGPU_ARCH", "sm_100a")
    variants.arch_of.cache_clear()
    variants.forget()
    try:
        call = given()
        rows = call["q"], whole_k(call), call["v"], call["cu_seqlens_q"], call["cu_seqlens_k"]
        longest = call["max_seqlen_q"], call["max_seqlen_k"]
        asked: list[Callable[[], Any]] = [
            lambda: mha_prefill(**call),
            lambda: flash_attention.flash_attn_varlen_func(*rows, *longest),
            lambda: mha.flash_attn_varlen_func(*rows, *longest),
        ]
        for function in asked:
            with pytest.raises(VariantError) as caught:
                function()
            assert str(caught.value) == (
                "sm_100a: no kernel for dense prefill exists for this architecture yet; there "
                "FlashAttention-4 (flash_attn.cute) and FlashMLA's own flash_attn_varlen_func serve"
            )
    finally:
        monkeypatch.undo()
        variants.arch_of.cache_clear()
        variants.forget()


def test_results_without_keys_merge_as_nothing(truth: Truth) -> None:
    """-inf is what ``merge_state`` reads as no tokens."""
    _, _, lse = truth
    assert math.isfinite(float(lse.max())) and lse.dtype == F32
