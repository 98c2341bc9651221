"""``merge_state`` and ``merge_states``: kernels that serve calls, shapes, results given, places."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import snapmla
from snapmla.dense import merge
from snapmla.testing.reference import merge_states_reference
from tests.support.bits import assert_same_bits
from tests.support.needs import DEVICES, needs_kernels

pytestmark = needs_kernels
B, S_Q, H = 2, 2, 3


def states(n: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """n results of which one row is empty in the first and one in all; NaN where nothing counts."""
    outs, lses = torch.randn(n, B, S_Q, H, 512), torch.randn(n, B, H, S_Q) * 3
    lses[0, 0, 0, 0], outs[0, 0, 0, 0] = math.inf, math.nan
    lses[:, 1, 2, 1], outs[:, 1, 1, 2] = -math.inf, math.nan
    return outs.to(device, dtype), lses.to(device)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modes of the kernels that calls have asked for."""
    asked: list[str] = []
    found = merge._kernel

    def noted(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return found(*arguments)

    monkeypatch.setattr(merge, "_kernel", noted)
    return asked


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("base", ["e", "2"])
def test_merge_state(dtype: torch.dtype, base: str, device: str) -> None:
    outs, lses = states(2, dtype, device)
    out, lse = snapmla.merge_state(outs[0], lses[0], outs[1], lses[1], lse_base=base)
    want, want_lse = merge_states_reference(outs.cpu(), lses.cpu(), lse_base=base)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    torch.testing.assert_close(out.cpu().double(), want, rtol=step, atol=2.0**-20)
    torch.testing.assert_close(lse.cpu().double(), want_lse, rtol=2.0**-22, atol=2.0**-20)


@pytest.mark.parametrize(
    ("n", "of_list", "of_stack"),
    [(1, "list", "stack"), (2, "pair", "pair"), (3, "list", "stack"), (8, "list", "stack"),
     (9, "stack", "stack")],
)  # fmt: skip
def test_merge_states(modes: list[str], n: int, of_list: str, of_stack: str) -> None:
    """Lists and stacks by the kernel that reads them where they are; the same bits of both."""
    outs, lses = states(n)
    of_parts = snapmla.merge_states(list(outs), tuple(lses))
    stacked = snapmla.merge_states(outs, lses)
    assert modes == [of_list, of_stack]
    for got, want in zip(of_parts, merge_states_reference(outs, lses), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2.0**-20, atol=2.0**-20)
    assert_same_bits(stacked, of_parts)
    if n == 2:
        assert_same_bits(snapmla.merge_state(outs[0], lses[0], outs[1], lses[1]), of_parts)


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_packed_rows(n: int) -> None:
    """(total, h, 512) and (h, total): the rows of one sequence."""
    outs, lses = states(n)
    packed, logs = outs.flatten(1, 2), lses.mT.flatten(1, 2).mT
    assert packed.shape == (n, B * S_Q, H, 512) and logs.shape == (n, H, B * S_Q)
    want, want_lse = snapmla.merge_states(outs, lses)
    for parts in ((packed, logs), (list(packed), list(logs))):
        out, lse = snapmla.merge_states(*parts)
        assert_same_bits([out, lse.mT], [want.flatten(0, 1), want_lse.mT.flatten(0, 1)])
        given = torch.zeros_like(out), torch.zeros_like(lse)
        returned = snapmla.merge_states(*parts, out=given[0], lse=given[1])
        assert returned[0] is given[0] and returned[1] is given[1]
        assert_same_bits(given, (out, lse))


def test_rows_of_heads() -> None:
    """As dense prefill gives them: (total, h, 128) beside (h, total), merged in place."""
    outs, lses = states(2, torch.bfloat16)
    packed, logs = outs[..., :128].flatten(1, 2).contiguous(), lses.mT.flatten(1, 2).mT.contiguous()
    want, want_lse = merge_states_reference(packed, logs)
    over = packed[0].clone(), logs[0].clone()
    got = snapmla.merge_state(*over, packed[1], logs[1], out=over[0], lse=over[1])
    assert got[0] is over[0] and got[1] is over[1]
    torch.testing.assert_close(over[0].double(), want, rtol=2.0**-8, atol=2.0**-20)
    torch.testing.assert_close(over[1].double(), want_lse, rtol=2.0**-22, atol=2.0**-20)


def test_results_of_another_dtype() -> None:
    outs, lses = states(2)
    for parts, result in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        given = torch.zeros(B, S_Q, H, 512, dtype=result)
        rounded = outs.to(parts)
        out, lse = snapmla.merge_states(rounded, lses, out=given)
        want, _ = merge_states_reference(rounded, lses)
        assert out is given and lse.dtype == torch.float32
        step = 2.0**-8 if result == torch.bfloat16 else 2.0**-20
        torch.testing.assert_close(out.double(), want, rtol=step, atol=2.0**-20)


def test_calls_without_rows() -> None:
    for shape, logs in (((0, 1, 4, 512), (0, 4, 1)), ((0, 4, 512), (4, 0)), ((3, 0, 512), (0, 3))):
        outs, lses = torch.zeros(3, *shape), torch.zeros(3, *logs)
        for parts in ((outs, lses), (list(outs), list(lses))):
            out, lse = snapmla.merge_states(*parts)
            assert out.shape == shape and lse.shape == logs
    for lead, tokens in (((), 5), ((), 0), ((B,), 5)):
        if not lead:  # of the same shapes: no sequence, and then no part
            given = [torch.zeros(0, tokens, H, 512)], [torch.zeros(0, H, tokens)]
            for _ in range(2):  # the first is checked, and the second's addresses are kept
                snapmla.merge_states(*given)
        with pytest.raises(ValueError, match=r"^outs: expected 1 part or more, got 0 \(a list"):
            snapmla.merge_states(
                torch.zeros(0, *lead, tokens, H, 512), torch.zeros(0, *lead, H, tokens)
            )


# ---------------------------------------------------------------------------- places


@pytest.mark.parametrize("n", [2, 4, 9])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_over_a_part(n: int, stacked: bool, packed: bool) -> None:
    """``out`` and ``lse`` may be those of any one part, and not of the same one."""
    outs, lses = states(n)
    if packed:
        outs, lses = outs.flatten(1, 2), lses.mT.flatten(1, 2).mT
    want = [t.clone() for t in snapmla.merge_states(outs, lses)]
    for at, lse_at in ((0, 0), (n - 1, 0)):
        new, logs = outs.clone(), lses.clone()
        given = (new, logs) if stacked else (list(new), list(logs))
        snapmla.merge_states(*given, out=new[at], lse=logs[lse_at])
        assert_same_bits((new[at], logs[lse_at]), want)
        assert_same_bits([new[1:-1], logs[1:]], [outs[1:-1], lses[1:]])


def test_memory_that_is_a_part_only_in_part() -> None:
    """The same bytes under other strides, another dtype or from another row on are refused."""
    size = B * S_Q * H * 512
    memory = torch.randn(3 * size)

    def rows(first: int) -> Tensor:
        return memory[first : first + size].view(B, S_Q, H, 512)

    lses = torch.randn(3, B, H, S_Q)
    call = {"out_a": rows(0), "lse_a": lses[0], "out_b": rows(size), "lse_b": lses[1]}
    before = memory.clone(), lses.clone()
    halves = memory.view(torch.bfloat16)[:size].view(B, S_Q, H, 512)
    for name, over, other in (
        ("out", rows(512), "out_a"),
        ("out", rows(size - 512), "out_a"),
        ("out", rows(size + 512), "out_b"),
        ("out", rows(0).transpose(0, 1), "out_a"),
        ("out", halves, "out_a"),
        ("lse", lses[0].as_strided(lses[0].shape, (1, B * S_Q, B)), "lse_a"),
        ("lse", memory[: lses[0].numel()].view_as(lses[0]), "out_a"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected memory apart from {other}, got"):
            snapmla.merge_state(**call, **{name: over})
    both = torch.zeros(size + 8)
    out, lse = both[:size].view_as(rows(0)), both[size - 4 :].view_as(lses[0])
    with pytest.raises(ValueError, match="^lse: expected memory apart from out, got"):
        snapmla.merge_state(**call, out=out, lse=lse)
    stack = memory.view(3, B, S_Q, H, 512)
    with pytest.raises(ValueError, match=r"^out: expected memory apart from outs\[1\], got"):
        snapmla.merge_states(stack, lses, out=rows(size + 512))
    assert_same_bits((memory, lses), before)


def test_a_dimension_of_one_has_no_stride() -> None:
    """The same memory, whatever stride is written down where nothing is stepped over."""
    outs, lses = torch.randn(2, B, 1, H, 512), torch.randn(2, B, H, 1)
    want = snapmla.merge_states(outs, lses)
    out = outs[0].as_strided((B, 1, H, 512), (H * 512, 8, 512, 1))
    lse = lses[1].as_strided((B, H, 1), (H, 1, 77))
    assert out.stride() != outs[0].stride() and lse.stride() != lses[1].stride()
    snapmla.merge_states(list(outs), list(lses), out=out, lse=lse)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_calls_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same memory; nothing is remembered of a call that was refused."""
    outs, lses = states(3)
    out = torch.zeros(B, S_Q, H, 512)
    with pytest.raises(ValueError, match="^lse: expected shape"):
        snapmla.merge_states(outs, lses, out=out, lse=lses[0].mT)
    with pytest.raises(ValueError, match="^lse: expected shape"):
        snapmla.merge_states(outs, lses, out=out, lse=lses[0].mT)
    want, _ = snapmla.merge_states(outs, lses)
    snapmla.merge_states(outs, lses, out=out)
    monkeypatch.setattr(merge, "_check", lambda *_: pytest.fail("checked anew"))
    got, _ = snapmla.merge_states(outs, lses)
    snapmla.merge_states(outs, lses, out=out)
    assert_same_bits((got, out), (want, want))


def test_other_strides_are_asked_for() -> None:
    """The same addresses, shapes and dtypes."""
    memory = torch.zeros(B * S_Q * H * 516)
    (other,), (lse,) = states(1)
    right = memory[: other.numel()].view_as(other)
    odd = memory.as_strided(other.shape, (S_Q * H * 513, H * 513, 513, 1))
    snapmla.merge_states([right, other], [lse, lse])
    with pytest.raises(ValueError, match=r"^outs\[0\]: expected outer strides that are multiples"):
        snapmla.merge_states([odd, other], [lse, lse])
    same = other[:1].expand(B, S_Q, H, 512)
    snapmla.merge_states([right, other], [lse, lse], out=right)
    with pytest.raises(ValueError, match="^out: expected memory apart from outs"):
        snapmla.merge_states([right, other], [lse, lse], out=right.transpose(0, 1))
    snapmla.merge_states([same, other], [lse, lse])
    with pytest.raises(ValueError, match="^out: expected strides of distinct rows"):
        snapmla.merge_states([right, other], [lse, lse], out=same)
    with pytest.raises(ValueError, match="negative bit"):
        snapmla.merge_states([torch._neg_view(right), other], [lse, lse])


def test_another_lse_is_asked_for() -> None:
    """Also where the call on the same ``out`` and the rightful ``lse`` is known."""
    outs, lses = states(3)
    out, lse = torch.zeros(B, S_Q, H, 512), torch.zeros(B, H, S_Q)
    for _ in range(2):  # the first is checked, and the second's addresses are kept
        snapmla.merge_states(outs, lses, out=out, lse=lse)
    over = out.view(-1)[: lse.numel()].view_as(lse)
    with pytest.raises(ValueError, match="^lse: expected memory apart from out, got"):
        snapmla.merge_states(outs, lses, out=out, lse=over)


def test_parts_may_overlap_one_another() -> None:
    """They are only read."""
    outs, lses = states(1)
    same, logs = outs.expand(5, -1, -1, -1, -1), lses.expand(5, -1, -1, -1)
    out, lse = snapmla.merge_states(same, logs)
    want, want_lse = merge_states_reference(same, logs)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-20, atol=2.0**-20)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2.0**-22, atol=2.0**-20)
