"""Gradients of ``mha_prefill``: by autograd, by a call, by fronts and tracers; refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsl_kernels.formats.mha_grads import PAD, stats_blocks, stats_row
from dsl_kernels.formats.mha_list import most_tiles
from snapmla.compat import flash_attention
from snapmla.compat.flash_mla import mha
from snapmla.errors import VariantError
from snapmla.mha import backward, backward_workspace_size, mha_prefill, mha_prefill_backward
from snapmla.runtime import variants
from snapmla.testing.mha_grad_job import GradJob
from snapmla.testing.mha_job import MhaJob, offsets
from tests.support.needs import needs_kernels

pytestmark = needs_kernels
whole = pytest.mark.whole_matrix
BF16, I32 = torch.bfloat16, torch.int32
LQ, LK, H, H_K, REST = (9, 3), (30, 0), 2, 1, 4  # rows of no sequence behind the last
T_Q, T_K = sum(LQ) + REST, sum(LK) + REST
NAMES = ("dq", "dk_nope", "dk_rope", "dv")
Call = dict[str, Any]


def given(d_qk: int = 192, heads: int = H, kv_heads: int = H_K, dtype: torch.dtype = BF16) -> Call:
    """Right arguments: K and V are views of kv_b_proj's output, rows of no sequence are NaN."""
    torch.manual_seed(1)
    q, kv = torch.randn(T_Q, heads, d_qk), torch.randn(T_K, kv_heads, 256)
    rope = torch.randn(T_K, 1, 64)
    kv[..., 128:] *= 0.1
    for x in (q, kv, rope):
        x[-REST:] = math.nan
    q, kv, rope = (x.to(dtype) for x in (q, kv, rope))
    call = {
        "q": q, "k_nope": kv[..., :128], "v": kv[..., 128:], "cu_seqlens_q": offsets(LQ),
        "cu_seqlens_k": offsets(LK), "max_seqlen_q": max(LQ), "max_seqlen_k": max(LK),
    }  # fmt: skip
    return {**call, "k_rope": rope} if d_qk == 192 else call


def job_of(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> GradJob:
    """The call for its fp64 reference."""
    ks = tuple(call[name].detach() for name in ("k_nope", "k_rope") if name in call)
    q, v, causal = call["q"].detach(), call["v"].detach(), call.get("causal", True)
    forward = MhaJob(q, ks, v, LQ, LK, causal, q.shape[-1] ** -0.5, 1)
    return GradJob(forward, out.detach(), lse.detach(), dout, dlse)


def assert_right(job: GradJob, grads: dict[str, Tensor]) -> None:
    """Within the gates of fp64; rows of no sequence have 0."""
    found = {}
    for name, x in grads.items():
        found[name] = x.clone()
        assert not x[-REST:].any(), name
        found[name][-REST:] = math.nan
    errors = job.errors(found)
    assert errors.right, str(errors)


def leaves_of(call: Call) -> Call:
    """The call, whose rows are leaves that require a gradient."""
    named = ("q", "k_nope", "k_rope", "v")
    rows: Call = {n: call[n].clone().requires_grad_() for n in named if n in call}
    return {**call, **rows}


def by_autograd(call: Call, dout: Tensor, dlse: Tensor | None) -> tuple[Any, dict[str, Tensor]]:
    """((out, lse), gradients by name)."""
    made = mha_prefill(**call)
    names = [n for n in ("q", "k_nope", "k_rope", "v") if n in call]
    pairs = zip(made, (dout, dlse))
    outputs, grads = zip(*[(x, g) for x, g in pairs if g is not None])
    found = torch.autograd.grad(outputs, [call[n] for n in names], grads, create_graph=True)
    return made, {f"d{n}": g for n, g in zip(names, found)}


def drawn(out: Tensor) -> tuple[Tensor, Tensor]:
    """(dout, dlse); rows of no sequence are NaN."""
    dout, dlse = torch.randn(out.shape), torch.randn(out.shape[1], out.shape[0])
    dout[-REST:], dlse[:, -REST:] = math.nan, math.nan
    return dout.to(out.dtype), dlse


def test_gradients() -> None:
    """All four and the LSE's share, GQA, rows without keys, NaN in rows of no sequence; a second
    derivative is refused."""
    call = leaves_of(given())
    dout, dlse = drawn(torch.empty(T_Q, H, 128, dtype=BF16))
    (out, lse), grads = by_autograd(call, dout, dlse)
    assert_right(job_of(call, out, lse, dout, dlse), {n: x.detach() for n, x in grads.items()})
    with pytest.raises(ValueError, match="mha_prefill: expected a first derivative, got a second"):
        grads["dq"][:9].float().sum().backward()


@whole
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(("d_qk", "heads", "kv_heads"), [(192, 4, 4), (192, 4, 2), (128, 4, 2)])
def test_each_kind(
    d_qk: int, heads: int, kv_heads: int, dtype: torch.dtype, causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With heads enough RoPE channels are summed over four by one CTA."""
    monkeypatch.setattr(backward, "MANY_HEADS", 4)
    call = leaves_of({**given(d_qk, heads, kv_heads, dtype), "causal": causal})
    dout, dlse = drawn(torch.empty(T_Q, heads, 128, dtype=dtype))
    (out, lse), grads = by_autograd(call, dout, dlse if causal else None)
    job = job_of(call, out, lse, dout, dlse if causal else None)
    assert_right(job, {n: x.detach() for n, x in grads.items()})


@whole
def test_the_call_is_autograd() -> None:
    """The same bits into strided memory that is given, with a workspace and without, of K in one
    tensor and of RoPE channels that are expanded; without ``zero_rest`` other rows stay."""
    call = leaves_of(given(kv_heads=2))
    dout, dlse = drawn(torch.empty(T_Q, H, 128, dtype=BF16))
    (out, lse), want = by_autograd(call, dout, dlse)
    rows = {n: x.detach() if isinstance(x, Tensor) else x for n, x in call.items()}
    asked = {**rows, "dout": dout, "out": out.detach(), "lse": lse.detach(), "dlse": dlse}
    words = backward_workspace_size(T_Q, T_K, len(LQ), H, 2)
    memory = {f"d{n}": torch.full((*rows[n].shape[:2], rows[n].shape[2] + 8), 7.0).to(BF16)
              for n in ("q", "k_nope", "k_rope", "v")}  # fmt: skip
    into: Call = {n: x[..., 8:] for n, x in memory.items()}
    work = torch.full((words + 4,), -3, dtype=I32)
    workspaces: list[Call] = [{}, {"workspace": work}]
    for more in workspaces:
        got = dict(zip(NAMES, mha_prefill_backward(**asked, **into, **more)))
        for name, x in got.items():
            assert x is not None and x is into[name] and torch.equal(x[:-REST], want[name][:-REST])
            assert (memory[name][..., :8] == 7).all()
            assert name == "dk_rope" or (x[-REST:] == 7).all()
    assert (work[-4:] == -3).all()
    whole_k = torch.cat([rows["k_nope"], rows["k_rope"].expand(-1, 2, -1)], -1)
    one = {**asked, "k_nope": whole_k, "k_rope": None, "zero_rest": True}
    wide = {**asked, "k_rope": rows["k_rope"].expand(-1, 2, -1), "zero_rest": True}
    dq, dk, none, dv = mha_prefill_backward(**one)
    assert none is None
    for x, y, z in zip((dq, dk[..., :128], dk[..., 128:], dv), mha_prefill_backward(**wide), NAMES):
        assert y is not None and torch.equal(x, y) and (z == "dk_rope" or torch.equal(x, want[z]))
    assert torch.allclose(dk[..., 128:].float().sum(1), want["dk_rope"][:, 0].float(), atol=3e-2)


@whole
def test_rows_before_the_first_sequence() -> None:
    """Are of none, too: gradients of 0; all others have the bits that they have without."""
    call, front = given(kv_heads=2), 3
    dout, dlse = drawn(torch.empty(T_Q, H, 128, dtype=BF16))
    _, want = by_autograd(leaves_of(call), dout, dlse)
    more = {}
    for name in ("q", "k_nope", "k_rope", "v"):
        more[name] = torch.cat([call[name][-REST:][:front], call[name]])  # NaN
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        more[name] = call[name] + front
    moved = leaves_of({**call, **more})
    rows = torch.cat([dout[-REST:][:front], dout]), torch.cat([dlse[:, -REST:][:, :front], dlse], 1)
    for name, x in by_autograd(moved, *rows)[1].items():
        assert not x[:front].any() and torch.equal(x[front:], want[name]), name


@whole
def test_sequences_and_tokens_that_are_none() -> None:
    """Gradients of 0, where there is nobody to see anything."""
    call = given()
    for changed in (
        {"cu_seqlens_q": torch.zeros(1, dtype=I32), "cu_seqlens_k": torch.zeros(1, dtype=I32)},
        {"q": call["q"][:0], "cu_seqlens_q": offsets((0, 0))},
        {"k_nope": call["k_nope"][:0], "k_rope": call["k_rope"][:0], "v": call["v"][:0],
         "cu_seqlens_k": offsets((0, 0))},
    ):  # fmt: skip
        asked = leaves_of({**call, **changed})
        out, lse = mha_prefill(**asked)
        grads = torch.autograd.grad(
            (out, lse), [asked[n] for n in ("q", "k_nope", "k_rope", "v")],
            (torch.ones_like(out), torch.ones_like(lse)),
        )  # fmt: skip
        assert not any(x.any() for x in grads)


# ------------------------------------------------------------------------ tracers and transforms


def loss(call: Call) -> Callable[..., Tensor]:
    """A function of q, kv_b_proj's output and the shared RoPE channels."""
    where = {n: x for n, x in call.items() if n not in ("q", "k_nope", "k_rope", "v")}

    def of(q: Tensor, kv: Tensor, rope: Tensor) -> Tensor:
        out, lse = mha_prefill(q, kv[..., :128], kv[..., 128:], k_rope=rope, **where)
        return (out[:9].float() ** 2).sum() + lse[:, :9].sum()

    return of


@pytest.fixture(scope="module")
def plain() -> tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]:
    """(loss, its arguments, its gradients)."""
    call = given()
    function = loss(call)
    arguments = [call["q"], torch.cat([call["k_nope"], call["v"]], -1), call["k_rope"]]
    leaves = [x.clone().requires_grad_() for x in arguments]
    return function, arguments, list(torch.autograd.grad(function(*leaves), leaves))


Plain = tuple[Callable[..., Tensor], list[Tensor], list[Tensor]]


def same(plain: Plain, function: Callable[..., Tensor]) -> None:
    _, arguments, want = plain
    leaves = [x.clone().requires_grad_() for x in arguments]
    function(*leaves).backward()
    for leaf, right in zip(leaves, want):
        assert leaf.grad is not None and torch.equal(leaf.grad, right)


@whole
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(plain: Plain, backend: str) -> None:
    """One graph, forward and backward; the same bits."""
    torch.compiler.reset()
    same(plain, torch.compile(plain[0], fullgraph=True, backend=backend))


@whole
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(plain: Plain, reentrant: bool) -> None:
    same(plain, lambda *given: checkpoint(plain[0], *given, use_reentrant=reentrant))


@whole
def test_func_grad(plain: Plain) -> None:
    """The same bits; no second derivative, no batch, no forward mode."""
    function, arguments, want = plain
    got = torch.func.grad(function, argnums=(0, 1, 2))(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(got, want))
    second = torch.func.grad(lambda q: torch.func.grad(function)(q, *arguments[1:]).float().sum())
    with pytest.raises(ValueError, match="expected a first derivative"):
        second(arguments[0])


def test_other_transforms_are_refused() -> None:
    call = given()
    function, q = loss(call), call["q"]
    rest = torch.cat([call["k_nope"], call["v"]], -1), call["k_rope"]

    def of(q: Tensor) -> Tensor:
        return function(q, *rest)

    for asked in (lambda: torch.func.vmap(of)(q[None]),
                  lambda: torch.func.vmap(torch.func.grad(of))(q[None])):  # fmt: skip
        with pytest.raises(ValueError, match="one inside of vmap"):
            asked()
    with pytest.raises(ValueError, match="one inside of jvp"):
        torch.func.jvp(of, (q,), (q,))


@whole
def test_autocast(plain: Plain) -> None:
    """Changes nothing: rows are of 16 bits already, and others are refused there, too."""

    def of(*given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return plain[0](*given)

    same(plain, of)
    with torch.autocast("cpu", dtype=BF16), pytest.raises(TypeError, match="q: expected dtype"):
        mha_prefill(**{**given(), "q": given()["q"].float()})


@whole
def test_an_operator_has_them(plain: Plain) -> None:
    """``torch.ops.snapmla.mha_prefill``, whose gradient is an operator that has none."""
    cu = offsets(LQ), offsets(LK)

    def of(q: Tensor, kv: Tensor, rope: Tensor) -> Tensor:
        out, lse = torch.ops.snapmla.mha_prefill(
            q, kv[..., :128], rope, kv[..., 128:], *cu, 9, 30, 192**-0.5, True, False
        )
        return (out[:9].float() ** 2).sum() + lse[:, :9].sum()

    same(plain, of)


@whole
def test_names_of_others() -> None:
    """FlashMLA's three, FlashAttention's: the bits of ``mha_prefill`` over the same tensors."""
    call = given()
    q, cu = call["q"], (call["cu_seqlens_q"], call["cu_seqlens_k"])
    k, v = torch.cat([call["k_nope"], call["k_rope"]], -1), call["v"]
    lengths = (*cu, max(LQ), max(LK))
    itself = (cu[0], cu[0], max(LQ), max(LQ))

    func = mha.flash_attn_varlen_func
    kv_packed = mha.flash_attn_varlen_kvpacked_func
    by_keywords: Any = flash_attention.flash_attn_varlen_func

    def gradients(function: Callable[..., Any], rows: tuple[Tensor, ...]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in rows]
        out, lse = function(*leaves)
        lse = lse if lse.shape == (H, T_Q) or len(lse) == 1 else lse.T
        return list(torch.autograd.grad(out[:9].float().square().sum() + lse[:, :9].sum(), leaves))

    want = gradients(lambda q, k, v: mha_prefill(q, k, v, *lengths), (q, k, v))
    fronts: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (lambda q, k, v: func(q, k, v, *lengths, causal=True, deterministic=True), (q, k, v)),
        (lambda q, kv: kv_packed(q, kv, *lengths, 192, causal=True), (q, torch.cat([k, v], -1))),
        (lambda q, k, v: by_keywords(q, k, v, *lengths, causal=True, deterministic=True,
                                     return_softmax_lse=True), (q, k, v)),
    ]  # fmt: skip
    for function, rows in fronts:
        got = gradients(function, rows)
        if len(got) == 2:
            got = [got[0], *got[1].split([192, 128], -1)]
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    one, k, v = q[:, :1], k[:T_Q], v[:T_Q]
    want = gradients(lambda q, k, v: mha_prefill(q, k, v, *itself, causal=False), (one, k, v))
    packed = torch.cat([one, k, v], -1)
    got = gradients(
        lambda x: mha.flash_attn_varlen_qkvpacked_func(x, cu[0], max(LQ), 192),
        (packed,),
    )
    assert torch.equal(got[0], torch.cat(want, -1))


# ------------------------------------------------------------------------------------- refusals


def test_what_has_no_gradient() -> None:
    """256 channels, and results in memory that is given; without gradients both are fine."""
    q = torch.zeros(4, 1, 256, dtype=BF16, requires_grad=True)
    cu = offsets((4,))
    with pytest.raises(ValueError, match=r"q: expected 192 or 128 .*got 256 .*no_grad\(\)"):
        mha_prefill(q, q, q, cu, cu, 4, 4)
    call = leaves_of(given())
    for name, value in (("out", torch.zeros(T_Q, H, 128, dtype=BF16)), ("lse", torch.zeros(H, T_Q)),
                        ("workspace", torch.zeros(99, dtype=I32))):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: expected None where gradients are wanted"):
            mha_prefill(**{**call, name: value})


def test_what_flash_attention_s_keywords_may_be() -> None:
    call = given()
    rows = call["q"], torch.cat([call["k_nope"], call["k_rope"]], -1), call["v"]
    rest = call["cu_seqlens_q"], call["cu_seqlens_k"], max(LQ), max(LK)
    function: Any = flash_attention.flash_attn_varlen_func
    for name, value, words in (
        ("dropout_p", 0.1, "expected 0, got 0.1"), ("window_size", (127, 0), r"\(-1, -1\)"),
        ("softcap", 30.0, "expected 0"), ("alibi_slopes", torch.ones(H), "expected None"),
        ("return_attn_probs", True, "expected False.*return_softmax_lse"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: .*{words}"):
            function(*rows, *rest, **{name: value})


def asked(**changed: Any) -> Call:
    """Right arguments of ``mha_prefill_backward``."""
    more = {"dout": torch.zeros(T_Q, H, 128, dtype=BF16), "lse": torch.zeros(H, T_Q)}
    return {**given(), **more, "out": torch.zeros(T_Q, H, 128, dtype=BF16), **changed}


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("dout", None, TypeError, r"dout: expected a torch\.Tensor, got NoneType"),
    ("dout", lambda c: c["dout"].float(), TypeError, "dout: expected dtype bfloat16"),
    ("dout", lambda c: c["dout"][1:], ValueError, r"dout: expected shape \(16, 2, 128\)"),
    ("dout", lambda c: c["dout"][:1].expand(T_Q, -1, -1), ValueError, "dout: .*no expanded"),
    ("dout", lambda c: c["dout"].mT.contiguous().mT, ValueError, "dout: expected innermost"),
    ("out", lambda c: c["out"][..., :64], ValueError, "out: expected shape"),
    ("lse", lambda c: c["lse"].T, ValueError, r"lse: expected shape \(2, 16\)"),
    ("lse", lambda c: c["lse"].double(), TypeError, "lse: expected dtype float32"),
    ("dlse", lambda c: c["lse"][:1], ValueError, "dlse: expected shape"),
    ("q", lambda c: torch.zeros(T_Q, H, 256, dtype=BF16), ValueError, "k_nope: expected shape"),
    ("zero_rest", "yes", TypeError, "zero_rest: expected True or False"),
    ("causal", None, TypeError, "causal: expected True or False"),
    ("softmax_scale", 0.0, ValueError, "softmax_scale: expected a positive"),
    ("dq", lambda c: torch.zeros(T_Q, H, 192), TypeError, "dq: expected dtype bfloat16"),
    ("dq", lambda c: c["q"], ValueError, "dq: expected memory apart from q"),
    ("dv", lambda c: torch.zeros(T_K, 2, 128, dtype=BF16), ValueError, "dv: expected shape"),
    ("dk_rope", lambda c: torch.zeros(T_K, 1, 68, dtype=BF16)[..., :64], ValueError, "multiples"),
    ("k_rope", None, ValueError, r"k_nope: expected shape .*192\)"),
    ("workspace", torch.zeros(5, dtype=I32), ValueError, "workspace: .*backward_workspace_size"),
    ("workspace", torch.zeros(50), TypeError, "workspace: expected dtype int32"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "words"), WRONG, ids=[f"{row[0]}-{i}" for i, row in enumerate(WRONG)]
)
def test_wrong_argument(name: str, value: Any, error: type[Exception], words: str) -> None:
    call = asked()
    call[name] = value(call) if callable(value) else value
    with pytest.raises(error, match=words):
        mha_prefill_backward(**call)


def test_one_tensor_of_keys_has_one_gradient() -> None:
    call = asked(k_nope=torch.zeros(T_K, H_K, 192, dtype=BF16), k_rope=None)
    with pytest.raises(ValueError, match="dk_rope: expected None without k_rope"):
        mha_prefill_backward(**call, dk_rope=torch.zeros(T_K, 1, 64, dtype=BF16))


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    variants.arch_of.cache_clear()
    variants.forget()
    yield monkeypatch
    monkeypatch.undo()
    variants.arch_of.cache_clear()
    variants.forget()


def test_variants_that_are_missing_are_named(forgetful: pytest.MonkeyPatch) -> None:
    """All that a backward takes, as ``make precompile`` wants them."""
    forgetful.setattr(variants, "find", lambda *_: None)
    forgetful.setenv("SNAPMLA_NO_JIT", "1")
    with pytest.raises(VariantError) as caught:
        mha_prefill_backward(**asked())
    assert "SNAPMLA_NO_JIT forbids compiling" in str(caught.value)
    assert str(caught.value).endswith(
        "gradients take `make precompile FILTER=mha_items_backward_sm90a,mha_delta_dbf16_sm90a,"
        "mha_dq_d192_dbf16_sm90a,mha_dkv_d192_dbf16_sm90a,mha_rope_sum_dbf16_sm90a`"
    )


def test_an_architecture_without(forgetful: pytest.MonkeyPatch) -> None:
    forgetful.setenv("SNAPMLA_SOFTGPU_ARCH", "sm_100a")
    with pytest.raises(VariantError, match="^sm_100a: no kernel for the gradients"):
        mha_prefill_backward(**asked())


def test_workspace_size() -> None:
    """Bound of 16 bytes a query row and head where sequences have 256 or more on average, and 64 a
    key and head of a shared RoPE head beside 64 heads or more, 256 beside fewer."""
    for tokens, batch in ((4096, 1), (8192, 2), (32072, 10), (512, 2), (256 * 40, 40)):
        plain = 4 * backward_workspace_size(tokens, tokens, batch, 128, 128, 128)
        assert plain <= 16 * tokens * 128
        for heads, most in ((128, 64), (16, 256)):
            words = backward_workspace_size(tokens, tokens, batch, heads, heads)
            plain = backward_workspace_size(tokens, tokens, batch, heads, heads, 128)
            assert 4 * (words - plain) <= most * tokens * heads
    for batch, length in ((40, 1), (40, 64), (9, 128), (3, 150)):  # what short sequences cost
        tokens = batch * length
        stats = 8 * PAD * stats_blocks(tokens, batch) * 128
        lists = 4 * backward_workspace_size(tokens, tokens, batch, 128, 128, 128) - stats
        assert lists <= 64 + 16 * most_tiles(tokens, batch) and lists < tokens * 128
        # no block can be spared: the last sequence's rows end with the last one
        last = stats_row(tokens - length, batch - 1) + -(-length // PAD) * PAD
        assert PAD * (stats_blocks(tokens, batch) - 1) <= last <= PAD * stats_blocks(tokens, batch)
        assert stats > 16 * tokens * 128
    own = backward_workspace_size(9, 9, 1, 64, 64, k_rope_heads=64)
    assert own == backward_workspace_size(9, 9, 1, 64, 64) + 9 * 64 * 48
    right: Call = {"total_q": 1, "total_k": 1, "batch": 1, "heads": 4, "kv_heads": 4}
    for name, value in (("heads", 0), ("d_qk", 256), ("k_rope_heads", 2), ("batch", -1)):
        with pytest.raises(ValueError, match=f"^{name}: "):
            backward_workspace_size(**{**right, name: value})
