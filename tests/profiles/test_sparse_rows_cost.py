"""The comparisons of the table of sparse decode over BF16 rows; its times need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from profiles import table
from profiles.tables.sparse_prefill_cost import Problem, Shape
from profiles.tables.sparse_rows_cost import BATCHES, GATES, Decode, shape_of
from tests.support.needs import needs_kernels

CPU = torch.device("cpu")
# As the peer's library states it.
SCHEMA = """fwd(
Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out,
Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q,
Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx,
Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal,
int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved,
Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux,
int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]""".replace("\n", " ")
NAMES = [argument.split()[-1] for argument in SCHEMA[4:].split(")")[0].split(",")]
# What a call on pages of one token says beside its tensors.
WORDS = dict(
    max_seqlen_q=1, is_causal=True, window_size_left=-1, window_size_right=-1, softcap=0.0,
    is_rotary_interleaved=True, num_splits=0, sm_margin=0, cp_world_size=1, cp_rank=0,
)  # fmt: skip
TENSORS = {"q", "k", "v", "q_v", "cu_seqlens_q", "seqused_k", "page_table"}


def attend(*given: Any) -> list[Tensor]:
    """The operator as FlashAttention-3 documents it, of one query token a sequence."""
    named = dict(zip(NAMES, given, strict=True))
    assert {name for name, value in named.items() if isinstance(value, Tensor)} == TENSORS
    assert {name: named[name] for name in WORDS} == WORDS
    q, k, v, q_v, table = (named[name] for name in ("q", "k", "v", "q_v", "page_table"))
    tokens = len(k)
    assert k.shape == (tokens, 1, 1, 64) and v.shape == (tokens, 1, 1, 512)
    assert k.stride() == v.stride() == (576, 576, 576, 1) and v.data_ptr() + 1024 == k.data_ptr()
    assert q.is_contiguous() and q_v.is_contiguous()
    starts, lengths = named["cu_seqlens_q"], named["seqused_k"]
    assert table.dtype == starts.dtype == lengths.dtype == torch.int32
    assert starts.tolist() == list(range(len(q) + 1)) and named["max_seqlen_k"] == table.shape[1]
    out, lse = torch.empty_like(q_v), torch.empty(q.shape[1], len(q))
    for i, (pages, length) in enumerate(zip(table.long(), lengths.tolist(), strict=True)):
        keys, values = k[pages[:length], 0, 0].double(), v[pages[:length], 0, 0].double()
        logits = q[i].double() @ keys.T + q_v[i].double() @ values.T
        logits *= named["softmax_scale"]
        out[i], lse[:, i] = (logits.softmax(-1) @ values).bfloat16(), logits.logsumexp(-1)
    return [out, lse, torch.empty(0), torch.empty(0)]


@pytest.fixture
def peer() -> Iterator[None]:
    """The operator under the name that the library gives it."""
    library = torch.library.Library("_vllm_fa3_C", "FRAGMENT")
    library.define(SCHEMA)
    library.impl("fwd", attend, "CPU")
    yield
    library._destroy()


def drawn() -> Decode:
    """Two sequences of 64 rows; no plans, which the peers have no use for."""
    torch.manual_seed(0)
    problem = Problem.draw(Shape(2, 128, 5, 30, 1.0, span=64), CPU)
    return Decode(problem, None, None, None)  # type: ignore[arg-type]


def largest(problem: Problem) -> Tensor:
    """The heads' largest logits."""
    rows = problem.kv[problem.indices[:, 0].long(), 0].double()
    logits = torch.einsum("bhd,btd->bht", problem.q.double(), rows) * problem.scale
    return logits.amax(-1).float()


def test_the_lists_are_block_tables_of_the_peer(peer: None) -> None:
    """Pages of one token, RoPE as K, content as V and q_v: right by ``Problem.error``, which a
    wrong row of either would not be."""
    made = drawn()
    problem, most = made.problem, largest(made.problem)
    out, lse = made.fa3()()[:2]
    assert 1e-4 < problem.error((out, most, lse.T)) < 4e-3
    for wrong in ((out * 1.05, most, lse.T), (out, most, lse.T + 1e-3)):
        with pytest.raises(ValueError, match="token 0"):
            problem.error(wrong)


@pytest.mark.whole_matrix
@needs_kernels
def test_every_contender_is_right(peer: None) -> None:
    """On the software GPU, split and unsplit."""
    torch.manual_seed(0)
    made = Decode.draw(Shape(2, 384, 5, 130, 1.0, span=192), CPU)
    calls = made.contenders()
    assert set(calls) == {"ours", "unsplit", "FA3", "FlashMLA"} and made.plan.pieces == 2
    assert all(1e-4 < made.check(name, calls[name]) < 4e-3 for name in ("ours", "unsplit", "FA3"))


def test_rows_of_the_table() -> None:
    shapes = [shape_of(b, heads) for b in BATCHES for heads in GATES]
    assert {(s.s_q, s.heads) for s in shapes} == {
        (b, heads) for b in (128, 2) for heads in (8, 16, 64, 128)
    }
    assert all(s.s_kv == s.s_q * s.span and s.topk == 2048 for s in shapes)
    for theirs, gate, told in (
        (2.2, 1.1, ["1.100", "1.1 met"]), (2.1, 1.1, ["1.050", "1.1 missed"]),
        (1.0, None, ["0.500", "–"]),
    ):  # fmt: skip
        row = {"rounds": {"ours": [2.0] * 4, "FA3": [theirs] * 4}, "gate": gate}
        cells = (table.speed("FA3", "ours"), table.met("FA3", "ours"))
        assert [cell(row) for _, cell in cells] == told
