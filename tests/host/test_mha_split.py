"""``mha_prefill(split_keys=True)``: results, bits, memory, operators, arguments.

What runs kernels on 1921 keys or more goes with the whole matrix; ``tests/kernels/test_mha_split``
has their parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsl_kernels.formats.mha_list import SplitRoom, pieces_of
from snapmla.mha import mha_prefill, workspace_size
from snapmla.mha import prefill as front
from snapmla.testing.mha_job import mha_errors, offsets
from softgpu import Options, using
from tests.support.needs import needs_kernels

pytestmark = needs_kernels
BF16, I32 = torch.bfloat16, torch.int32
LQ, LK = (9, 3), (1930, 30)
T_Q, T_K = sum(LQ), sum(LK)


def given(**changed: Any) -> dict[str, Any]:
    """Right arguments of a call of which the first sequence is split in two."""
    torch.manual_seed(1)
    kv = (torch.randn(T_K, 1, 256) * (1.0 - 0.9 * (torch.arange(256) >= 128))).to(BF16)
    return {
        "q": (2 * torch.randn(T_Q, 1, 192)).to(BF16), "k_nope": kv[..., :128], "v": kv[..., 128:],
        "cu_seqlens_q": offsets(LQ), "cu_seqlens_k": offsets(LK), "max_seqlen_q": max(LQ),
        "max_seqlen_k": max(LK), "k_rope": torch.randn(T_K, 1, 64).to(BF16), "split_keys": True,
        **changed,
    }  # fmt: skip


def alone(call: dict[str, Any]) -> dict[str, Any]:
    """The first sequence of a call."""
    first = {
        "q": call["q"][: LQ[0]], **{n: call[n][: LK[0]] for n in ("k_nope", "v", "k_rope")},
        "cu_seqlens_q": offsets(LQ[:1]), "cu_seqlens_k": offsets(LK[:1]),
    }  # fmt: skip
    return {**call, **first}


@pytest.mark.whole_matrix
def test_right_and_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside fp64; a split sequence alone and beside another; what is not split keeps its bits;
    memory that is given, and what is allocated."""
    call, room = given(), SplitRoom.of(T_Q, 2, T_K)
    made: list[Any] = []
    find = front.launch.allocator

    def noted(device: torch.device) -> Any:
        real = find(device)

        def allocate(shape: Any, strides: Any, dtype: torch.dtype) -> Tensor:
            made.append(shape)
            return real(shape, strides, dtype)

        return allocate

    monkeypatch.setattr(front.launch, "allocator", noted)
    with using(Options(hazards="raise", seed=2)):
        out, lse = mha_prefill(**call)
    words = workspace_size(T_Q, 2, 1, T_K)
    assert made == [(T_Q, 1, 128), (1, T_Q), (words,)] and words == room.words(1, 128)
    keys = torch.cat([call["k_nope"], call["k_rope"]], -1), call["v"]
    where = (call["cu_seqlens_q"], call["cu_seqlens_k"], 192**-0.5, True)
    errors = mha_errors(out, lse, call["q"], *keys, *where)
    assert errors.right and errors.lse_error < 1e-5, str(errors)
    whole, whole_lse = mha_prefill(**{**call, "split_keys": False})
    assert torch.equal(whole[LQ[0] :], out[LQ[0] :])
    assert torch.equal(whole_lse[:, LQ[0] :], lse[:, LQ[0] :])
    assert not torch.equal(whole[: LQ[0]], out[: LQ[0]]), "sums in another order"
    own, own_lse = mha_prefill(**alone(call))
    assert torch.equal(own, out[: LQ[0]]) and torch.equal(own_lse, lse[:, : LQ[0]])
    memory = torch.full((T_Q, 1, 136), 7.0).to(BF16)
    work = torch.full((words + 4,), -3, dtype=I32)
    results = {"out": memory[..., 8:], "lse": torch.full((1, T_Q), 7.0), "workspace": work}
    made.clear()
    for _ in range(2):  # the second is a call that is known
        got = mha_prefill(**call, **results)
        assert torch.equal(got[0], out) and torch.equal(got[1], lse) and not made
    assert (memory[..., :8] == 7).all() and (work[-4:] == -3).all()


@pytest.mark.whole_matrix
def test_heads_of_256_channels() -> None:
    """Beside fp64, in a workspace of just the words that it needs."""
    call = given()
    kv = torch.randn(T_K, 1, 448).to(BF16)
    call |= {"q": torch.randn(T_Q, 1, 256).to(BF16), "k_nope": kv[..., :192], "v": kv[..., 192:]}
    call["v"] *= 0.1
    words = workspace_size(T_Q, 2, 1, T_K, 256)
    work = torch.full((words + 4,), -3, dtype=I32)
    with using(Options(hazards="raise", seed=2)):
        out, lse = mha_prefill(**call, workspace=work)
    keys = torch.cat([call["k_nope"], call["k_rope"]], -1), call["v"]
    where = (call["cu_seqlens_q"], call["cu_seqlens_k"], 256**-0.5, True)
    errors = mha_errors(out, lse, call["q"], *keys, *where)
    assert errors.right and errors.lse_error < 1e-5, str(errors)
    assert (work[-4:] == -3).all()
    with pytest.raises(ValueError, match=f"^workspace: expected {words} or more words"):
        mha_prefill(**call, workspace=work[: words - 1])


@pytest.mark.whole_matrix
def test_one_operator() -> None:
    """What tracers see is one node, which splits as the call does."""
    call = given()
    want, want_lse = mha_prefill(**call)
    got, lse = torch.ops.snapmla.mha_prefill(
        call["q"], call["k_nope"], call["k_rope"], call["v"], call["cu_seqlens_q"],
        call["cu_seqlens_k"], max(LQ), max(LK), 192**-0.5, True, True,
    )  # fmt: skip
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


def test_kernels_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that split only where some sequence may have keys enough, by what hosts know."""
    asked: list[str] = []

    class Asked(Exception):
        pass

    def kernels(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        raise Asked

    front._MHA.memo.forget()  # a call that is known asks for none
    monkeypatch.setattr(front, "kernels", kernels)
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "split"), ({"split_keys": False}, "whole"), ({"max_seqlen_k": 1920}, "whole"),
        ({"max_seqlen_k": 1921}, "split"), ({"max_seqlen_k": 10**6}, "split"),
    ]  # fmt: skip
    for changed, keys in cases:
        with pytest.raises(Asked):
            mha_prefill(**given(**changed))
        assert asked.pop() == keys, str(changed)
    short = given()
    short |= {name: short[name][:1920] for name in ("k_nope", "v", "k_rope")}
    with pytest.raises(Asked):
        mha_prefill(**{**short, "cu_seqlens_k": offsets((1900, 20))})
    assert asked.pop() == "whole", "k has too few rows"


def test_workspace_size() -> None:
    """Lists of 16 bytes an entry; partial rows of at most 8 a query token, 1024 a sequence, and one
    for 8 keys: an eighth of the bytes of k_nope and v."""
    assert workspace_size(128, 1, 16, 1000) == workspace_size(128, 1) == 8, "too few keys"
    for total_q, batch, rows in ((128, 1, 1024), (2048, 1, 1024), (8192, 8, 4096), (3, 1, 24)):
        found = workspace_size(total_q, batch, 16, 32768)
        lists = found - rows * 16 * 129
        assert 0 < lists < 200 + 16 * (total_q // 128 + batch) and lists % 4 == 0
    keys = 32768 * 128 * 2 * 256
    assert workspace_size(8192, 8, 128, 32768) * 4 < 0.13 * keys
    assert workspace_size(8192, 64, 128, 32768) * 4 < 0.13 * keys + 64 * 16 * 128 * 516
    narrow, wide = (workspace_size(128, 1, 16, 32768, d_v) for d_v in (128, 256))
    assert wide - narrow == 1024 * 16 * 128
    with pytest.raises(ValueError, match="^d_v: expected one of 128, 256, got 192"):
        workspace_size(128, 1, 16, 32768, 192)
    for name, arguments in (("heads", (1, 1, -1, 0)), ("total_k", (1, 1, 1, -1))):
        with pytest.raises(ValueError, match=f"^{name}: expected 0 or more, got -1"):
            workspace_size(*arguments)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"split_keys": "yes"}, TypeError, "^split_keys: expected True or False"),
        (
            {"workspace": torch.zeros(40, dtype=I32)},
            ValueError,
            r"^workspace: expected \d+ or more.*\(total_q, batch, heads, total_k\)",
        ),
        (
            {
                "q": torch.zeros(T_Q, 1, 256, dtype=BF16),
                "k_nope": torch.zeros(T_K, 1, 192, dtype=BF16),
                "v": torch.zeros(T_K, 1, 256, dtype=BF16),
                "workspace": torch.zeros(40, dtype=I32),
            },
            ValueError,
            r"^workspace: expected \d+ or more.*\(total_q, batch, heads, total_k, d_v\)",
        ),
        (
            {"workspace": torch.zeros(90000, dtype=I32)[1:]},
            ValueError,
            "^workspace: expected storage aligned to 16 bytes",
        ),
    ],
)
def test_wrong_argument(changed: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mha_prefill(**given(**changed))


def test_the_call_here_is_split() -> None:
    assert [pieces_of(*pair) for pair in zip(LQ, LK)] == [2, 1]
