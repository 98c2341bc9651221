"""``snapmla repro``: a dumped call in a fresh process has the same bits, or says what is wrong."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import snapmla
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import dump, variants
from snapmla.sparse.plan import SparseOptions, plan_sparse
from snapmla.testing import selfcheck
from snapmla.testing.ds_mla import quantize_ds_mla_rows
from snapmla.tools import repro
from snapmla_cli import app
from tests.support import ROOT
from tests.support.dense_steps import DenseStep
from tests.support.needs import needs_compiler

SCALE = 192**-0.5
LENGTHS, HEADS = (65, 0), 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all calls of the module's fixtures are dumped."""
    folder = tmp_path_factory.mktemp("dumps")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPMLA_DUMP", str(folder))
        patch.setenv("SNAPMLA_DUMP_WHEN", "all")
        variants.forget()
        yield folder
    variants.forget()


def latest(folder: Path) -> Path:
    return max(folder.glob("*-decode_*.pt"))


@pytest.fixture(scope="module")
def even(folder: Path) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A decode's file, and its results: of a sequence of two tiles and an empty one."""
    torch.manual_seed(0)
    cache, table, lengths = selfcheck.filled_cache(LENGTHS, 64, "paged")
    q = selfcheck.sample_query(len(LENGTHS), 1, HEADS)
    plan = snapmla.plan_decode(
        lengths, HEADS, 1, page_size=64, max_pages=table.shape[1], num_parts=2
    )
    out, lse = snapmla.decode(q, cache, table, lengths, softmax_scale=SCALE, plan=plan)
    return latest(folder), out, lse


@needs_compiler
def test_the_same_bits_in_a_fresh_process(
    even: tuple[Path, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    path, out, lse = even
    saved = tmp_path / "results.pt"
    done = subprocess.run(
        [sys.executable, "-m", "snapmla", "repro", str(path), "--software", "--save", str(saved)],
        env={k: v for k, v in os.environ.items() if not k.startswith("SNAPMLA_DUMP")},
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("decode_etap_r16_p64_obf16_sm90a, snapmla ")
    assert lines[1:4] == [
        "2 of the pool's 4 pages are kept, numbered anew",
        "now, on the software GPU: returned, 0 hazards",
        "results: the bits in the file",
    ]
    assert lines[4].startswith("against the reference: right, relative L2 ") and len(lines) == 5
    found = torch.load(saved)
    assert torch.equal(found["out"], out) and torch.equal(found["lse"], lse)


@needs_compiler
@pytest.mark.whole_matrix
@pytest.mark.parametrize("limits", [False, True])
def test_ragged_queries_meet_the_reference(folder: Path, limits: bool) -> None:
    """Base-2 LSE, +inf of empty rows, room behind the last query token that nobody writes."""
    torch.manual_seed(0)
    cache, table, lengths = selfcheck.filled_cache((70, 0, 3), 64)
    q = snapmla.quantize_q(
        torch.randn(6, HEADS, 512).bfloat16(), torch.randn(6, HEADS, 64).bfloat16()
    )
    seen = torch.tensor([5, 70, 0, 2, 0, 0], dtype=torch.int32) if limits else None
    plan = snapmla.plan_decode(
        lengths, HEADS, cu_seqlens_q=torch.tensor([0, 2, 3, 4], dtype=torch.int32), total_q=6,
        row_seqlens=seen, page_size=64, max_pages=table.shape[1], num_parts=2,
    )  # fmt: skip
    snapmla.decode(
        q, cache, table, lengths, softmax_scale=SCALE, plan=plan, lse_base="2", empty_lse="+inf"
    )
    call, outcome = repro.repeat(latest(folder), "cpu")
    assert repro.ragged_begin(call).tolist() == [0, 2, 3, 4]
    assert outcome.good and outcome.compared and outcome.reference is not None, outcome
    assert bool((call.arguments["row_limits"] == seen).all() if limits else True)


@needs_compiler
@pytest.mark.parametrize(
    "tokens", [None, pytest.param((2, 0, 1), marks=pytest.mark.whole_matrix)], ids=str
)
def test_a_decode_of_rows_meets_the_reference(folder: Path, tokens: tuple[int, ...] | None) -> None:
    """With KV heads, as kernels see them; a file holds the pages in use, a wrong result shows."""
    step = DenseStep.make((20, 3, 0), 4, 1, 16, torch.float16, 2, tokens=tokens)
    seen = None if tokens is None else torch.tensor([20, 7, 3, 0, 0, 0], dtype=torch.int32)
    plan = step.plan(row_seqlens=seen, num_parts=2, row_tile=16)
    step.decode(plan, lse_base="2", empty_lse="+inf")
    call, outcome = repro.repeat(max(folder.glob("*-dense_decode_*.pt")), "cpu")
    assert call.notes == ("3 of the pool's 4 pages are kept, numbered anew",)
    assert outcome.good and outcome.compared and outcome.reference is not None, outcome
    call.arguments["out"][0, 0, 0, 3] += 0.1
    spec = VariantSpec.from_name(call.variant)
    text, right = repro.against_dense_reference(spec, call)
    assert not right and "1 outside of FlashMLA's gates" in text


def sparse_call(rows: bool, ragged: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A sparse decode with sinks over a pool of which lists name two pages: idle entries among
    them, a token of a third and INT_MAX behind their ends."""
    torch.manual_seed(1)
    pages, p, heads, topk = 9, 16, 3, 70
    c_kv, k_rope = torch.randn(pages * p, 512), torch.randn(pages * p, 64)
    if rows:
        pool = quantize_ds_mla_rows(c_kv, k_rope).view(pages, p, 1, 656)
        cache = snapmla.PagedKVCache.from_tensors(pool, format="fp8_ds_mla")
    else:
        cache = snapmla.PagedKVCache.allocate(pages, p, "row640", "cpu")
        slots = torch.arange(pages * p)
        snapmla.append_kv(cache, c_kv.bfloat16(), k_rope.bfloat16(), slots)
    shape = (5, heads) if ragged else (2, 2, heads)
    lengths = torch.tensor([70, 5, 0] if ragged else [70, 5], dtype=torch.int32)
    q = torch.randn(*shape, 576).bfloat16()
    pages_of = torch.tensor([5, 7])[torch.randint(2, (*shape[:-1], topk))]
    indices = (pages_of * p + torch.randint(p, pages_of.shape)).int()
    indices[..., ::7] = torch.tensor([-1, pages * p, 2**31 - 1, -(2**31), -1]).repeat(2).int()
    of = [0, 0, 1, 2, 2] if ragged else [0, 0, 1, 1]
    for row, i in zip(indices.view(-1, topk), of, strict=True):
        row[int(lengths[i]) :] = torch.tensor([2, 2**31 - 1]).repeat(35)[lengths[i] :]
    options = SparseOptions(num_heads=heads, num_parts=3, format=cache.format)
    begins = torch.tensor([0, 2, 3, 4], dtype=torch.int32) if ragged else None
    own = torch.tensor([70, 64, 3, 70, 9], dtype=torch.int32) if ragged else None
    plan = plan_sparse(
        options, topk, None if ragged else 2, lengths, cu_seqlens_q=begins,
        total_q=5 if ragged else None, row_lengths=own,
    )  # fmt: skip
    query = q if rows else snapmla.quantize_q(q[..., :512], q[..., 512:])
    return snapmla.decode(
        query, cache, indices=indices, topk_length=lengths, plan=plan, softmax_scale=SCALE,
        attn_sink=torch.tensor([0.5, math.inf, -math.inf]), lse_base="2", empty_lse="+inf",
    )  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(("rows", "ragged"), [(False, True), (True, False), (True, True)])
def test_a_sparse_decode_from_its_file_alone(folder: Path, rows: bool, ragged: bool) -> None:
    """The bits and the truth, from the pages that lists name (of ragged queries as far as the
    longest goes); a wrong result shows."""
    out, _ = sparse_call(rows, ragged)
    call, outcome = repro.repeat(max(folder.glob("*-sparse_decode_*.pt")), "cpu")
    kept = 3 if ragged else 2
    assert call.notes == (f"{kept} of the pool's 9 pages are kept, numbered anew",)
    assert outcome.good and outcome.compared and outcome.reference is not None, outcome
    assert repro.list_lengths(call).tolist() == ([70, 64, 3, 0] if ragged else [70, 70, 5, 5])
    n = len(repro.list_lengths(call))
    got = outcome.results["out"].view(-1, *out.shape[-2:])[:n]
    assert torch.equal(got, out.view(-1, *out.shape[-2:])[:n])
    call.arguments["out"][0, 0, 0] += 0.05
    _, right = repro.against_sparse_reference(VariantSpec.from_name(call.variant), call)
    assert not right


def changed(path: Path, target: Path, **arguments: object) -> Path:
    """A dump with other arguments."""
    call = dump.read(path)
    call.arguments |= arguments
    dump.write(target, dump.packed(call))
    return target


def command(*words: str) -> tuple[int, list[str]]:
    done = CliRunner().invoke(app, ["repro", *words, "--software"])
    return done.exit_code, done.output.splitlines()


@needs_compiler
def test_a_wrong_result_is_told(
    even: tuple[Path, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    """A plan that leaves out the last token's tile, as a stale one does."""
    items = dump.read(even[0]).arguments["work_items"].clone()
    assert items[0, :3].tolist() == [0, 0, 2], "sequence, first tile, end tile"
    items[0, 2] = 1
    path = changed(even[0], tmp_path / "a.pt", work_items=items)
    status, lines = command(str(path))
    assert status == 1, lines
    assert " values differ from those in the file, first at (0, 0, 0, " in "".join(lines)
    assert lines[-1].startswith("against the reference: WRONG, relative L2 ")


def test_where_ragged_queries_begin() -> None:
    """Read off the items in use, in any order; sequences 1 and 3 have no query token."""
    items = torch.zeros(6, 8, dtype=torch.int32)
    items[:4, 0] = torch.tensor([2, 0, 0, 2])
    items[:4, 5] = torch.tensor([20, 12, 12, 20])  # end rows, four heads
    items[4:] = 99
    call = dump.Dump("v", "decode", {
        "q_nope": torch.zeros(1, 8, 4, 512), "cache_seqlens": torch.zeros(4, dtype=torch.int32),
        "work_items": items, "part_begin": torch.tensor([0, 3, 4]),
    })  # fmt: skip
    begin = repro.ragged_begin(call)
    assert begin.tolist() == [0, 3, 3, 5, 5] and begin.dtype == torch.int32


@needs_compiler
def test_what_fails_again_is_told(
    even: tuple[Path, torch.Tensor, torch.Tensor], tmp_path: Path
) -> None:
    short = torch.zeros(1, dtype=torch.int32)
    path = changed(even[0], tmp_path / "a.pt", part_begin=short)
    status, lines = command(str(path))
    assert status == 1 and lines[2].startswith("now, on the software GPU: ")
    assert "Error" in lines[2] and not any("reference" in line for line in lines)


def test_what_cannot_be_run_is_one_sentence(tmp_path: Path) -> None:
    status, lines = command(str(tmp_path / "none.pt"))
    assert status == 2 and lines == [f"{tmp_path / 'none.pt'}: No such file or directory"]
    dump.write(tmp_path / "a.pt", dump.packed(dump.Dump("decode_etpa_sm90a", "decode", {})))
    status, (line,) = command(str(tmp_path / "a.pt"))
    assert status == 2 and "variant name 'decode_etpa_sm90a'" in line


def test_difference() -> None:
    a = torch.tensor([[1.0, math.nan], [2.0, 3.0]])
    b = torch.tensor([[1.0, math.nan], [2.0, 4.0]])
    assert repro.difference(a, a) is None
    text = "1 of 4 values differ from those in the file, first at (1, 1): 3, was 4"
    assert repro.difference(a, b) == text
