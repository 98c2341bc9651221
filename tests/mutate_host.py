"""Mutation study of the host package: one-token mistakes in ``snapmla/*.py``, and who notices them.

    python -m tests.mutate_host [FILE ...] [--record FILE.md]

The twin of ``python -m snapmla.testing mutate`` for host code.  Each mutant of ``MUTANTS`` is
applied alone to a temporary copy of the packages, never to the checkout, and must be killed by a
test of the module it is in: a test elsewhere that stumbles over it does not count.  Built variants
are those of the checkout (``SNAPMLA_VARIANT_DIR``), so nothing is compiled.

Exit status: 0 all killed; 1 a mutant survived, or its text is not in the file exactly once; 2 the
tests fail without any mutant.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tests.support import ROOT

T = TypeVar("T")
COPIED = (
    "snapmla", "dsl_kernels", "codegen", "softgpu", "profiles", "tests", "pyproject.toml",
)  # fmt: skip
SECONDS = 300  # of one test; a wedged one is no kill


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        file: in ``snapmla/``.
        old, new: the text, found exactly once, and what it becomes.
        target: pytest id of the test that must fail, below ``tests/``.
        why: what goes wrong.
    """

    file: str
    old: str
    new: str
    target: str
    why: str


# modules whose tests are named after what they serve
OTHER_HOMES = {
    "cache/byte_cache.py": ("byte_records", "ds_mla"), "cache/convert.py": ("byte_records",),
    "dense/plan.py": ("decode_plan",), "dense/workspace.py": ("decode_plan",),
    "dense/plan_decode.py": ("plan",), "dense/decode.py": ("attention",),
    "indexer/index_topk.py": ("dsa_step",), "indexer/fetch_index_k.py": ("dsa_fetch",),
    "rank/sparse_decode.py": ("sparse_plan",),
}  # fmt: skip


def homes(file: str) -> set[str]:
    """Test files whose tests may kill a mutant of ``file``: its own, and the one of all checks."""
    parts = Path(file).with_suffix("").parts
    names = (*parts, "_".join(parts[-2:]), *OTHER_HOMES.get(file, ()), "checks")
    return {f"host/test_{name}.py" for name in names}


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: killed, SURVIVED, GONE (its text) or BROKEN (no verdict)."""

    mutant: Mutant
    state: str
    by: str

    def __str__(self) -> str:
        m = self.mutant
        return f"{self.state:8} {m.file:26} {m.old!r} -> {m.new!r}: {m.why}  ({self.by})"


MUTANTS: tuple[Mutant, ...] = (
    Mutant("parallel/sharding.py", "clamp_(0, self.interleave)", "clamp_(0, self.interleave - 1)",
           "host/test_parallel.py::test_lengths_are_those_of_turns[4-16]",
           "the last token of a turn that is not over is nobody's"),
    Mutant("parallel/sharding.py", "scratch.sub_(out).add_(tokens).add_(1)",
           "scratch.sub_(out).add_(tokens)",
           "host/test_parallel.py::test_what_query_tokens_see",
           "ragged query tokens do not see the last token that they may"),
    Mutant("parallel/sharding.py", "mine &= column < block_table.shape[1]",
           "mine &= column <= block_table.shape[1]",
           "host/test_parallel.py::test_slots_of_no_token",
           "a token behind the block table is written to a page of another"),
    Mutant("parallel/sharding.py", "whole = (column // pages * self.size + self.rank) * pages",
           "whole = (column // pages * self.size + self.rank)",
           "host/test_parallel.py::test_columns_of_a_rank[2]",
           "turns of several pages take other ranks' columns"),
    Mutant("parallel/exchange.py", "-(-(row_bytes + 4) // ROW_ALIGN)", "-(-row_bytes // ROW_ALIGN)",
           "host/test_parallel.py::test_two_ranks",
           "there is no room for a row's LSE behind it"),
    Mutant("parallel/exchange.py", "top.clamp_(min=LEAST)", "top.clamp_(min=-torch.inf)",
           "host/test_parallel.py::test_two_ranks",
           "a row that no rank has a token of is NaN"),
    Mutant("parallel/exchange.py", "self._send.masked_fill_(self._spread(empty), 0.0)",
           "self._send.masked_fill_(self._spread(empty), 1.0)",
           "host/test_parallel.py::test_two_ranks",
           "what lies in an empty part's rows gets into the sum"),
    Mutant("compat/flash_mla/name.py",
           "if there is not None and hasattr(there, MARK):\n        _give_metadata(tensors)",
           "if there is not None:\n        _give_metadata(tensors)",
           "host/test_flash_mla_name.py::test_a_name_that_somebody_has_is_refused[sgl-flash-mla-True]",
           "a module of another package, imported before, is taken for ours"),
    Mutant("dense/plan.py", "tokens > self.token_tile", "tokens > 2 * self.token_tile",
           "host/test_decode_plan.py::test_a_table_at_the_edge_of_a_split[65-balanced]",
           "two pieces of a table of 65 to 128 tokens are never merged"),
    Mutant("dense/plan.py", "tokens > self.split_tiles", "tokens > 2 * self.split_tiles",
           "host/test_decode_plan.py::test_a_table_at_the_edge_of_a_split[129-fixed128]",
           "two fixed pieces are never merged"),
    Mutant("rank/sparse_decode.py", "-self.num_heads % spec.row_tile, us", "(us,)",
           "host/test_rank_sparse_decode.py::"
           "test_ties_go_to_less_padding_and_then_to_less_time",
           "noise of a table picks the row tile"),
    Mutant("rank/sparse_decode.py", "tile is not None and not min(", "not min(",
           "host/test_sparse_plan.py::"
           "test_full_lists_stay_whole_where_a_merge_costs_more_than_balance",
           "a plan of a kernel that nobody measured fails"),
    Mutant("rank/sparse_decode.py", "self.card.arch, self.card.name)", "self.card.arch)",
           "host/test_rank_sparse_decode.py::"
           "test_every_row_of_a_table_is_a_point_and_near_the_model[sparse_tiles-h100]",
           "an H100's times are an H200's, though a table has them"),
    Mutant("rank/costs.py", 'key=lambda block: block["card"] != own', "key=lambda block: 0",
           "host/test_rank_costs.py::test_a_cards_own_block_goes_first",
           "of two cards that were measured the first one's times are taken for both"),
    Mutant("rank/needs.py", "if model.flash_mla and not model.sparse:", "if model.flash_mla:",
           "host/test_needs.py::test_sparse_decode_needs_no_records",
           "kernels of dense records are packed for a model that never calls them"),
    Mutant("runtime/dump.py", "column < ends[:, None]", "column <= ends[:, None]",
           "host/test_dump.py::test_lists_keep_the_pages_that_count[True]",
           "a page behind a list's end is kept, and goes to disk"),
    Mutant("runtime/dump.py", "torch.where(inside, new, lists)", "torch.where(inside, new, -1)",
           "host/test_dump.py::test_lists_keep_the_pages_that_count[True]",
           "a dump of a fault by an entry behind the pool no longer has that entry"),
    Mutant("tools/repro.py", "counts = counts.minimum(limits[: len(counts)])", "pass",
           "host/test_repro.py::test_a_sparse_decode_from_its_file_alone[False-True]",
           "lengths of single query tokens are forgotten, and right results called wrong"),
    Mutant("sparse/plan_cache.py", "flags | LENGTHS", "flags",
           "host/test_sparse_plan_cache.py::test_a_plan_without_lengths_is_not_launched_again",
           "a plan of a step's lengths is handed out for steps without any"),
    Mutant("sparse/plan_cache.py", "flags = OWN if own else 0", "flags = 0",
           "host/test_sparse_plan_cache.py::test_lengths_of_each_query_token",
           "a plan without lengths of query tokens is handed out for a step that has some"),
    Mutant("sparse/plan_cache.py", "if s_q is not None and cu_seqlens_q is None",
           "if cu_seqlens_q is None",
           "host/test_sparse_plan_cache.py::test_ragged_queries_without_lengths_are_planned_anew",
           "ragged queries whose offsets are forgotten are those of the step before"),
    Mutant("sparse/plan_cache.py", "self._whole = {shape: x", "_ = {shape: x",
           "host/test_sparse_plan_cache.py::test_one_workspace_and_pins",
           "lengths of plans that were given up stay for ever"),
    Mutant("runtime/watch.py", "OF_ROWS.get(name, name)", "name",
           "host/test_watch.py::test_a_sparse_decode_in_one_line",
           "a line of the log has no shape of a query and a cache of rows"),
    Mutant("rank/sparse_decode.py", "* blocks <= FEW_BLOCKS", "* blocks < FEW_BLOCKS",
           "host/test_sparse_plan.py::test_fewer_parts_for_few_tokens_of_two_row_blocks[128-2-44]",
           "two tokens of 128 heads are cut into too many parts"),
    Mutant("rank/sparse_decode.py", "blocks > 1 and", "blocks > 0 and",
           "host/test_sparse_plan.py::test_fewer_parts_for_few_tokens_of_two_row_blocks[16-4-132]",
           "a token of few heads leaves SMs idle"),
    Mutant("dense/plan_decode.py",
           "num_parts + units, 2 * num_parts", "num_parts + units, num_parts",
           "host/test_plan.py::test_workspace_holds_the_worst_cuts",
           "partial results of a part are written past the workspace"),
    Mutant("dense/plan_decode.py", "-(-max_pages * page_size // token_tile)",
           "(max_pages * page_size // token_tile)",
           "host/test_plan.py::test_workspace_holds_a_broken_tile",
           "a table's last, incomplete tile has no item and no slot"),
    Mutant("dense/plan_decode.py", "if cost > MAX_COST", "if cost >= MAX_COST",
           "host/test_plan.py::test_costs_up_to_the_limit",
           "the largest batch that fits is refused"),
    Mutant("compat/sched_meta.py", "0 < value.shape[0] <= MOST_PARTS", "0 < value.shape[0]",
           "host/test_sched_meta.py::test_as_many_records_as_the_kernel_holds",
           "records beyond the kernel's shared memory are written"),
    Mutant("compat/sched_meta.py", "all_parts + sequences, ITEM_WORDS", "all_parts, ITEM_WORDS",
           "host/test_sched_meta.py::test_tables_hold_every_cut[9-2-1]",
           "items of a batch larger than the number of parts are dropped"),
    Mutant("compat/flash_mla/__init__.py", "q.shape[1] > 1", "q.shape[1] > 2",
           "host/test_flash_mla.py::test_an_object_is_for_calls_like_its_first",
           "causal calls of two query tokens share an object with others"),
    Mutant("dense/plan.py", "shape[:2], device)", "shape[:1], device)",
           "host/test_decode_plan.py::test_another_workspace",
           "a workspace of the right shape is refused"),
    Mutant("dense/workspace.py", "return batch + total_q * num_heads // unit_rows",
           "return total_q * num_heads // unit_rows + 1",
           "host/test_decode_plan.py::test_room_for_units",
           "several requests whose last unit is a short one have no room in the plan"),
    Mutant("dense/plan_decode.py", "1 if invariant or not batch", "1 if not batch",
           "host/test_plan.py::test_ragged_queries_choose_their_kernel_by_room",
           "the batch decides about a request's bits"),
    Mutant("dense/plan.py", "self.causal and self.s_q != 1", "self.causal and self.s_q == 1",
           "host/test_decode_plan.py::test_a_plan_that_may_lack_tiles",
           "calls that see all tokens run plans that leave some out"),
    Mutant("testing/reference_plan.py", "tokens[1] - 1 - last", "tokens[1] - last",
           "host/test_reference_plan.py::test_a_unit_reads_what_its_last_token_sees",
           "a unit's last tile is left out"),
    Mutant("testing/reference_plan.py", "min(1, count)", "1",
           "host/test_reference_plan.py::test_plan_is_optimal",
           "an empty sequence opens a part of its own"),
    Mutant("testing/reference_plan.py", "capacity += 1", "capacity += 2",
           "host/test_reference_plan.py::test_plan_is_optimal",
           "the largest part may be a tile longer than it must"),
    Mutant("testing/reference_plan.py", "if pieces[at] > 1", "if pieces[at] > 2",
           "host/test_reference_plan.py::test_plan_reference",
           "two pieces of a sequence both write the output directly"),
    Mutant("dense/choices.py", "(int(causal), factor, value)", "(1, factor, value)",
           "host/test_choices.py::test_what_kernels_are_told",
           "every call is causal"),
    Mutant("dense/choices.py", '"2": 1.0', '"2": 2.0',
           "host/test_choices.py::test_what_kernels_are_told",
           "LSE of base 2 is doubled"),
    Mutant("dense/decode.py", "tensors = block_table, cache_seqlens, out, lse",
           "tensors = block_table, cache_seqlens, out",
           "host/test_attention.py::test_gaps_that_the_exported_function_does_not_see",
           "an LSE with gaps is written as if it had none"),
    Mutant("dense/call_checks.py", "block_table.shape[1] != plan.max_pages",
           "block_table.shape[1] < plan.max_pages",
           "host/test_checks.py::test_wrong_argument",
           "a plan is run for a wider table, whose lengths it would clamp elsewhere"),
    Mutant("dense/decode.py", "(*tensors, q) if rows else tensors", "tensors",
           "host/test_checks.py::test_one_wrong_argument_of_a_call_that_worked[decode_rows-q-3]",
           "a query with gaps is read as if it had none"),
    Mutant("dense/decode.py", "        and cache.num_kv_heads == plan.num_kv_heads\n", "",
           "host/test_checks.py::test_one_wrong_argument_of_a_call_that_worked[decode_rows-cache-2]",
           "sequences read the KV heads of others"),
    Mutant("dense/kv_heads.py", "return rows.contiguous()", "return rows",
           "host/test_kv_heads.py::test_kv_heads_of_one_sequence",
           "tables of one sequence have stride 0"),
    Mutant("dense/kv_heads.py", "group, -1).contiguous()", "group, -1)",
           "host/test_kv_heads.py::test_kv_heads_of_one_sequence",
           "queries of one sequence are read in another order"),
    Mutant("dense/kv_heads.py", "first, row, right=True", "first, row, right=False",
           "host/test_kv_heads.py::test_ragged_queries[2]",
           "the first query token of a sequence is its neighbour's"),
    Mutant("dense/kv_heads.py", "first[owner - owner % heads]", "first[owner]",
           "host/test_kv_heads.py::test_ragged_queries[2]",
           "later KV heads read other query tokens"),
    Mutant("dense/kv_heads.py",
           "row_seqlens[order // heads]", "row_seqlens[order % len(row_seqlens)]",
           "host/test_kv_heads.py::test_row_seqlens_of_kv_heads[True]",
           "query tokens see as many tokens as others"),
    Mutant("dense/kv_heads.py", "unsqueeze(2) * share", "unsqueeze(2)",
           "host/test_kv_heads.py::test_a_page_a_sequence[192-2]",
           "pages of a large page are its neighbours'"),
    Mutant("cache/layouts.py", "if pages > 1 and kv.stride(0)", "if pages > 3 and kv.stride(0)",
           "host/test_layouts.py::test_large_pages_have_no_gaps_between_them",
           "small pages reach into another layer's"),
    Mutant("cache/fetch.py", "where.shape[1] * page_size", "where.shape[1]",
           "host/test_fetch.py::test_append_then_fetch",
           "one token a page is fetched"),
    Mutant("cache/fetch.py",
           "if tokens.seq_starts is None else", "if tokens.seq_starts is not None else",
           "host/test_fetch.py::test_chunks_into_a_workspace",
           "chunks begin at their sequences' first tokens"),
    Mutant("cache/fetch.py", 'torch.empty if mode == "indices"', 'torch.empty if mode != "pages"',
           "host/test_fetch.py::test_chunks_that_are_allocated",
           "rows behind the last sequence hold anything"),
    Mutant("indexer/index_topk.py", "min(self.max_tokens, held)", "self.max_tokens",
           "host/test_dsa_step.py::test_columns_that_no_page_fills_are_not_selected",
           "top-k reads scores that nobody wrote"),
    Mutant("indexer/index_topk.py", "None, call.s_q, out, counts", "None, 1, out, counts",
           "host/test_dsa_step.py::test_what_is_chosen[drafts]",
           "drafts look slots up in another sequence's table"),
    Mutant("indexer/index_topk.py", "if ragged or call.s_q > 1:", "if ragged:",
           "host/test_dsa_step.py::test_what_is_chosen[drafts]",
           "drafts see their sequence's last token"),
    Mutant("indexer/index_topk.py", "tables = lengths + _up(4 * rows)", "tables = lengths",
           "host/test_dsa_step.py::test_nothing_is_allocated[ragged]",
           "lengths and tables share memory"),
    Mutant("indexer/fetch_index_k.py",
           "make = torch.zeros if call.tokens.cu_seqlens is not None else",
           "make = torch.empty if call.tokens.cu_seqlens is not None else",
           "host/test_dsa_fetch.py::test_room_for_chunks",
           "rows behind the last sequence hold anything"),
    Mutant("cache/fetch.py", "index = where.dtype", "index = torch.int32",
           "host/test_fetch.py::test_indices_of_either_width",
           "int64 indices are read as int32"),
    Mutant("cache/fetch.py", "if given == (total is not None):", "if total is None and not given:",
           "host/test_checks.py::test_wrong_argument",
           "a total beside out says nothing"),
    Mutant("cache/fetch.py", "own = () if heads == 1 else (heads,)", "own = ()",
           "host/test_fetch.py::test_append_then_fetch_of_16_bits",
           "results of several KV heads have no dimension for them"),
    Mutant("cache/convert.py", "most >= cache.num_pages", "most > cache.num_pages",
           "host/test_convert.py::test_pages_end_with_the_cache",
           "a page behind the pool is written"),
    Mutant("cache/convert.py",
           "out.num_pages < source.num_pages", "out.num_pages <= source.num_pages",
           "host/test_convert.py::test_to_one_scale[split-16]",
           "a cache of as many pages is refused"),
    Mutant("cache/byte_cache.py", "if tokens > 1 and flat", "if tokens > 0 and flat",
           "host/test_ds_mla.py::test_strides_over_one_are_anything",
           "a stride that is never stepped over is asked"),
    Mutant("cache/byte_cache.py", "flat.stride(0) < tokens", "flat.stride(0) <= tokens",
           "host/test_ds_mla.py::test_fields_are_bytes_of_rows[64]",
           "pages side by side are refused"),
    Mutant("cache/byte_cache.py",
           "tokens * record.begins(field.plane)", "tokens * record.begins(0)",
           "host/test_byte_records.py::test_fields_are_bytes_of_pages[fp8_v4-64]",
           "scales of a page with planes lie over its content"),
    Mutant("cache/convert.py", "source.rope[at] != 0", "source.rope[at] > 1e9",
           "host/test_byte_records.py::test_what_has_no_place_is_not_lost",
           "k_rope is dropped where a format has no place for it"),
    Mutant("cache/paged.py", "self.page_size, self.num_kv_heads))", "self.page_size))",
           "host/test_cache.py::test_a_place_is_of_one_shape",
           "tokens of one head go to a cache of two in the same memory"),
    Mutant("cache/paged.py",
           "self.format, self.page_size, self.num_kv", "self.page_size, self.num_kv",
           "host/test_cache.py::test_a_place_is_of_one_shape",
           "a cache of the other 16-bit format in the same memory is read by a known call"),
    Mutant("cache/paged.py", "cache.content_u8), _planes(cache, cache.content)",
           "cache.content_u8), _planes(cache, cache.content_u8)",
           "host/test_cache.py::test_where_a_cache_begins",
           "content that was moved is ignored, old memory is decoded"),
    Mutant("dense/decode.py", "        and plan.stays\n", "",
           "host/test_attention.py::test_memory_that_was_freed",
           "partial results are written where other tensors are by now"),
    Mutant("dense/decode.py",
           "tensors = block_table, cache_seqlens, out, lse", "tensors = out, lse",
           "host/test_attention.py::test_a_known_table_that_becomes_its_opposite",
           "a known table whose sign changed is read without it"),
    Mutant("runtime/launch.py", "at or (NOWHERE if tensor.numel() else 0)", "at",
           "host/test_launch.py::test_where_a_tensor_begins",
           "what was freed before the first call counts as being where it was"),
    Mutant("runtime/watch.py", " and v.numel())", ")",
           "host/test_watch.py::test_a_call_with_an_empty_table_is_a_file",
           "calls with an empty table are no files"),
    Mutant("dense/plan.py", 'o_accum, {"lse_accum": lse_accum, **tables}', "o_accum, tables",
           "host/test_decode_plan.py::test_a_workspace_over_other_tensors",
           "partial results and their LSEs overwrite one another"),
    Mutant("compat/metadata_pair.py", "metadata.shape, lengths.shape)", "metadata.shape)",
           "host/test_metadata_pair.py::test_a_pair_lies_apart_from_the_lengths",
           "a larger batch at the same addresses overwrites lengths that are read"),
    Mutant("dense/plan_cache.py", "isinstance(n, bool) or not", "not",
           "host/test_plan_cache.py::test_what_equals_a_number_is_none",
           "True is a number where a plan is there"),
    Mutant("cache/quant.py", "!= heads * value.stride(1):", "< heads * value.stride(1):",
           "host/test_checks.py::test_wrong_argument",
           "heads that lie apart are read as if side by side"),
    Mutant("cache/quant.py", "scales = rows if granularity ==", "scales = rows if granularity !=",
           "host/test_quant.py::test_quantize_into_given_tensors",
           "scales of the other granularity are made"),
    Mutant("cache/fetch.py", "b > MAX_FETCHED", "b > MAX_FETCHED + 1",
           "host/test_checks.py::test_wrong_argument",
           "a grid that the driver refuses"),
    Mutant("dense/merge.py", "len(outs) > MAX_LIST", "len(outs) >= MAX_LIST",
           "host/test_merge.py::test_merge_states[8-list-stack]",
           "eight tensors are copied that the kernel would read where they are"),
    Mutant("dense/merge.py", "outs[0].shape[0] == 2", "outs[0].shape[0] == 3",
           "host/test_merge.py::test_merge_states[3-list-stack]",
           "the third part of a stack is taken for no part, or refused"),
    Mutant("dense/merge.py", "at = int(stacked)", "at = 0",
           "host/test_merge.py::test_packed_rows[5]",
           "the parts of a packed stack are taken for sequences"),
    Mutant("dense/merge.py", "if n > 1)", "if n > 0)",
           "host/test_merge.py::test_a_dimension_of_one_has_no_stride",
           "a result over a part is refused for a stride that means nothing"),
    Mutant("dense/merge.py", "for result in (out, lse):", "for result in (out,):",
           "host/test_merge.py::test_another_lse_is_asked_for",
           "an LSE that overlaps is known from a call with another one"),
    Mutant("dense/merge.py", "(form, lse_factor, len(outs),", "(lse_factor, len(outs),",
           "host/test_merge.py::test_calls_without_rows",
           "a stack of no parts passes for one part of no sequences"),
    Mutant("call/memo.py", "if kind.alike(*once):\n                    if not",
           "if True:\n                    if not",
           "host/test_call.py::test_other_strides_are_another_kind",
           "rows of no alignment are known from a call on the same memory"),
    Mutant("call/memo.py", "if kind.options != options:\n", "if False:\n",
           "host/test_call.py::test_other_options_are_another_kind",
           "a call with another scale is launched with the first one's"),
    Mutant("call/memo.py", "and (kind.form, where) in APART", "and (0, where) in APART",
           "host/test_call.py::test_addresses_are_compared_once",
           "every call compares all addresses"),
    Mutant("call/memo.py", "or _lie_apart(op, call, kind, tensors, where))", "or True)",
           "host/test_call.py::test_memory_of_another_argument",
           "results are written over what is read"),
    Mutant("call/memo.py", "groups is not None and", "groups is None or",
           "host/test_call.py::test_an_object_that_does_not_fit",
           "a cache is read by another's page size"),
    Mutant("call/memo.py",
           "if not all(t.data_ptr() or not t.numel() for t in tensors):", "if False:",
           "host/test_call.py::test_memory_that_was_freed",
           "address 0 is handed to a kernel"),
    Mutant("call/memo.py", "if k is not kind][: ROOM - 1]", "if k is not kind][:ROOM]",
           "host/test_call.py::test_kinds_that_are_kept",
           "a kind too many is kept, and asked by every call of none"),
    Mutant("call/memo.py", "if kind is not self.kinds[0]:", "if kind is self.kinds[0]:",
           "host/test_call.py::test_kinds_that_are_kept",
           "of kinds that take turns the oldest goes, not the longest unused"),
    Mutant("call/memo.py", "kind.alike(*once):\n                    return",
           "kind.alike(*once):\n                    continue",
           "host/test_call.py::test_a_kind_is_noted_once",
           "calls that are checked every time drive out those that are known"),
    Mutant("call/memo.py", 'getattr(ready, "place", 0)', "0",
           "host/test_call.py::test_a_plan_of_the_same_workspace",
           "a plan's tables are overwritten that lie elsewhere than another plan's"),
    Mutant("call/memo.py", "((t.shape, t.stride(), t.dtype) for t in tensors)",
           "(t.dtype for t in tensors)",
           "host/test_call.py::test_more_of_the_same_address",
           "more tokens at the address of fewer are read where others are written"),
    Mutant("call/memo.py",
           "    if tracing.active():\n        return op.traced(call)\n    try:\n        memo",
           "    try:\n        memo", "host/test_call.py::test_a_known_call_that_is_watched",
           "a known call is invisible to whoever records"),
    Mutant("compat/flash_mla/__init__.py", "if indices is not None:",
           "if isinstance(indices, torch.Tensor):",
           "host/test_flash_mla.py::test_indices_that_are_no_tensor",
           "a list of indices is overlooked: dense decode"),
    Mutant("call/memo.py", "    if not tracing.plain(*call):\n        return op.traced(call)\n", "",
           "host/test_call.py::test_a_stand_in_of_a_tensor",
           "a kernel is given a tensor that has no memory"),
    Mutant("call/memo.py", "checks.explain(error, op.check, call)\n            raise\n    if",
           "raise\n    if",
           "host/test_call.py::test_a_kernel_that_refuses",
           "what a known call's kernel refuses is not explained"),
    Mutant("dense/merge.py", "-3 if packed else lead + 1", "-3 if packed else lead",
           "host/test_merge.py::test_merge_states[3-list-stack]",
           "an LSE has no batch"),
    Mutant("dense/plan_cache.py", "max(rows, 2 * room)", "rows",
           "host/test_plan_cache.py::test_a_workspace_that_is_too_small_is_succeeded[ascending]",
           "each of many plans brings a workspace that is barely larger"),
    Mutant("dense/plan_decode.py",
           "fixed_overhead = spec.family.item_overhead", "fixed_overhead = 6",
           "host/test_plan.py::test_what_an_item_costs_is_its_familys",
           "items of another family are cut as FP8 decode's"),
    Mutant("dense/plan_decode.py", "FORMATS[options.format].longest_item or",
           'options.format == "f16" and 1 << 14 or',
           "host/test_plan.py::test_long_sums_are_the_formats",
           "a new format sums sequences of any length in one go"),
    Mutant("dense/workspace.py", "[FORMATS[format].partial]",
           '["f32" if format == "f16" else "f16"]',
           "host/test_decode_plan.py::test_partial_rows_are_the_formats",
           "splits of a new format lose bits that its results show"),
    Mutant("dense/plan_cache.py", "if rows > room", "if rows != room",
           "host/test_plan_cache.py::test_a_workspace_that_is_too_small_is_succeeded[descending]",
           "a plan that needs less brings a workspace of its own"),
    Mutant("dense/plan_cache.py", "while len(self._unpinned) > self._capacity",
           "while len(self._unpinned) >= self._capacity",
           "host/test_plan_cache.py::test_the_longest_unused_goes_first",
           "one plan too few is kept"),
    Mutant("dense/plan_cache.py", "plan = self._unpinned.pop(key, None)",
           "plan = self._unpinned.get(key)",
           "host/test_plan_cache.py::test_the_longest_unused_goes_first",
           "plans go by age, not by last use"),
    Mutant("dense/plan_cache.py", "if pin or key in self._pinned", "if pin",
           "host/test_plan_cache.py::test_two_threads_get_one_plan[False-True]",
           "a plan that another thread pinned is given up under its graph"),
    Mutant("dense/plan_cache.py", "total_q, row_seqlens is not None)", "total_q, False)",
           "host/test_plan_cache.py::test_what_makes_another_plan",
           "a plan without limits is handed out for a step that has some"),
    Mutant("dense/plan_cache.py", "if plan.plain:", "if True:",
           "host/test_plan_cache.py::test_stand_ins_are_not_kept",
           "a plan without memory is kept for later calls"),
    Mutant("compat/metadata_pair.py", "// (ITEM_WORDS + 1)", "// (ITEM_WORDS + 1) + 1",
           "host/test_metadata_pair.py::test_a_full_metadata_tensor",
           "the last sequence's tables lie over one another"),
    Mutant("compat/metadata_pair.py",
           "num_splits.data_ptr(), metadata.shape,", "num_splits.data_ptr(),",
           "host/test_metadata_pair.py::test_another_shape_at_the_same_address",
           "a pair of other parts is run by the kept plan of the first"),
    Mutant("dense/plan.py", "MERGE_CHECKED if self._outside else", "",
           "host/test_decode_plan.py::test_who_merges",
           "nobody asks whether a pair covers a sequence"),
    Mutant("compat/metadata_pair.py", "at >= tiles[sequence]", "at > tiles[sequence]",
           "host/test_metadata_pair.py::test_covered",
           "a sequence that is covered exactly counts as lost"),
    Mutant("compat/metadata_pair.py", "and not taken)", ")",
           "host/test_metadata_pair.py::test_covered",
           "another sequence's item may write to a sequence's slots"),
    Mutant("compat/metadata_pair.py", "first == at <= last", "first >= at",
           "host/test_metadata_pair.py::test_covered",
           "a gap between two items passes"),
    Mutant("compat/metadata_pair.py",
           "max(end_slot - first_slot, 1)", "max(end_slot - first_slot, 2)",
           "host/test_metadata_pair.py::test_covered",
           "a sequence that is not split counts as lost"),
    Mutant("compat/metadata_pair.py", "and own[-1] - own[0] == pieces - 1", "",
           "host/test_metadata_pair.py::test_covered_wants_sound_tables",
           "items of a sequence may stand apart, where the kernel wants them together"),
    Mutant("compat/metadata_pair.py", "if rows != self.rows:", "if rows > self.rows:",
           "host/test_metadata_pair.py::test_other_rows_are_refused_in_debug_mode",
           "a pair for fewer rows passes in debug mode"),
    Mutant("compat/metadata_pair.py", "min(longest, MOST_TOKENS)", "MOST_TOKENS",
           "host/test_metadata_pair.py::test_garbage_lengths_do_not_overflow_the_schedule",
           "costs of garbage lengths overflow 32 bits"),
    Mutant("compat/metadata_pair.py", "len(_plans) >= KEPT_PLANS", "len(_plans) > KEPT_PLANS",
           "host/test_metadata_pair.py::test_kept_plans_are_bounded",
           "one plan too many is kept"),
    Mutant("compat/metadata_pair.py", "and num_splits.shape == (batch + 1,)", "",
           "host/test_metadata_pair.py::test_a_kept_plan_is_for_the_very_same_view",
           "num_splits of another length passes beside a kept plan"),
    Mutant("cache/paged.py", "else memory, memory is not None)", "else memory, True)",
           "host/test_cache.py::test_other_shared_memory_is_no_block",
           "tracers are given views whose writes they cannot follow"),
    Mutant("cache/paged.py", "return self.num_pages * self.page_size", "return self.num_pages",
           "host/test_cache.py::test_allocate",
           "slots beyond the number of pages look invalid"),
    Mutant("cache/paged.py", "kv[..., :KV_LORA_RANK], kv[..., KV_LORA_RANK:]",
           "kv[..., 64:], kv[..., :64]",
           "host/test_cache.py::test_allocate_rows",
           "RoPE is taken to lie before the content"),
    Mutant("cache/layouts.py", "rows = rows[:, :, 0]", "pass",
           "host/test_layouts.py::test_the_stride_of_a_single_head",
           "the stride of a single head is what its maker happened to give"),
    Mutant("checks/__init__.py", "if value % ROWS_TILE and value not in PAGE_SIZES:",
           "if value % ROWS_TILE and value % 16:",
           "host/test_checks.py::test_wrong_argument",
           "pages of 48 tokens, which tiles of 64 do not meet"),
    Mutant("cache/layouts.py", "and page >= p * TOKEN_BYTES", "",
           "host/test_layouts.py::test_pages_that_reach_into_one_another_are_no_block",
           "pages that share bytes pass for memory of their own"),
    Mutant("cache/layouts.py", "and token >= ROW_BYTES", "",
           "host/test_layouts.py::test_rows_that_reach_into_one_another_are_no_rows",
           "rows that share bytes pass for memory of their own"),
    Mutant("cache/layouts.py", "p * sum(rows) // size", "p * row // size",
           "host/test_layouts.py::test_memory_behind_the_views",
           "layout paged is not known by its strides"),
    Mutant("checks/__init__.py", "if not 0 < value <=", "if not 0 <= value <=",
           "host/test_checks.py::test_wrong_argument",
           "a softmax scale of 0 gives the mean of the cache"),
    Mutant("checks/tensors.py", "if n >= least", "if n > least",
           "host/test_checks.py::test_a_single_page_has_an_aligned_stride",
           "a page stride that TMA refuses"),
    Mutant("checks/__init__.py", "MAX_ROWS = 2**29 - 1", "MAX_ROWS = 2**29",
           "host/test_checks.py::test_wrong_argument",
           "four counts a query row are more than 32 bits hold"),
    Mutant("rank/costs.py", "spec.row_tile) * spec.cluster))", "spec.row_tile)))",
           "host/test_rank.py::test_parts_count_clusters",
           "twice the CTAs that fit run where two make a cluster"),
    Mutant("rank/verdicts.py", "limit = (1 + TIE)", "limit = (1 - TIE)",
           "host/test_rank.py::test_ties_go_to_the_first_pipeline",
           "nothing is within the tie of the best"),
    Mutant("rank/decode.py", 'self.out_dtype != "bf16" or', "",
           "host/test_rank.py::test_measured_points_override_the_model",
           "bf16 measurements are shown for fp32 outputs"),
    Mutant("torch_ops/quantize.py", "rows if granularity ==", "rows if granularity !=",
           "host/test_torch_ops.py::test_opcheck[quantize_q-cpu]",
           "tracers see scales of another shape"),
    Mutant("torch_ops/decode_arguments.py", "if value.shape != shape",
           "if len(value.shape) != len(shape)",
           "host/test_torch_ops.py::test_a_traced_decode_checks_what_no_python_did",
           "a plan of another batch runs past its tables"),
    Mutant("runtime/variants.py", "artifact.cuda <= driver[0]", "artifact.cuda <= driver[0] + 1",
           "host/test_runtime.py::test_newer_cuda_than_the_driver",
           "the driver is handed what it cannot load"),
    Mutant("runtime/variants.py",
           "if wanted and sources is not None and", "if wanted and sources and",
           "host/test_runtime.py::test_a_decode_of_an_older_release_is_not_loaded",
           "a record that names no sources is taken for one of this release"),
    Mutant("runtime/variants.py", "other.op != spec.op", "other.op == spec.op",
           "host/test_runtime.py::test_the_nearest_variant_is_of_the_same_op",
           "the hint names a variant of another operation"),
    Mutant("runtime/variants.py", "and spec.name not in _told and", "and",
           "host/test_runtime.py::test_an_outdated_variant_that_runs_is_told_once",
           "a log line for each load of an outdated variant"),
    Mutant("rank/needs.py", "heads // model.kv_heads", "heads",
           "host/test_needs.py::test_it_needs_what_its_calls_ask_for",
           "with several KV heads a row tile is named that no call takes"),
    Mutant("runtime/env.py", '"no", "off", "n")', '"no", "n")',
           "host/test_env.py::test_words_of_a_switch",
           "SNAPMLA_CHECK_PLAN=off is refused"),
    Mutant("runtime/env.py", "if word and word not in", "if word not in",
           "host/test_env.py::test_words_of_a_switch",
           "SNAPMLA_NO_JIT= is refused"),
    Mutant("runtime/env.py",
           'found.append(Place("the package', 'found.insert(0, Place("the package',
           "host/test_env.py::test_a_bundle_comes_before_the_cache",
           "the package's own variants are preferred to those of the chosen directory"),
    Mutant("testing/comparison.py", "p_terms=plan.p_terms", "p_terms=1",
           "host/test_comparison.py::test_the_plan_tells_the_mimic_and_what_q_k_does",
           "results of two terms of P are compared with one, and called wrong"),
    Mutant("testing/comparison.py", "if plan.pipeline == WIDE:", "if False:",
           "host/test_comparison.py::test_the_plan_tells_the_mimic_and_what_q_k_does",
           "results of accuracy=high are compared with FP8 products, and called wrong"),
    Mutant("rank/decode.py", "return exact, 1", "return pipeline, 1",
           "host/test_rank.py::test_high_accuracy_is_exact_logits",
           "accuracy=high is the default kernel"),
    Mutant("rank/decode.py", "if self.exactly and pipeline != self.pipeline:", "if False:",
           "host/test_rank.py::test_explain_says_what_exact_logits_cost",
           "a plan of accuracy=high is told that it asked for a pipeline"),
    Mutant("testing/qk_bounds.py", "exponent - 1)", "exponent - 2)",
           "host/test_qk_bounds.py::test_a_query_that_equals_a_key[cpu-448 among 3.75-16]",
           "units are half of the tensor core's, and the bound of LSE is none"),
    Mutant("testing/qk_bounds.py", "torch.minimum(unit, self.most)", "0 * unit",
           "host/test_qk_bounds.py::test_one_addend_that_is_cut_reaches_the_bound",
           "the bound of LSE leaves out what the accumulator loses"),
    Mutant("testing/qk_bounds.py", "torch.minimum(products.abs(), size)", "size",
           "host/test_qk_bounds.py::test_a_query_that_equals_a_key[cpu-448 among 3.75-16]",
           "the bound lets a product lose more than itself"),
    Mutant("testing/comparison.py", "FLIPS = 1e-3", "FLIPS = 1e-2",
           "host/test_comparison.py::test_fp32_results_get_no_allowance_for_bf16",
           "fp32 results may be rounded to bf16 on the way"),
    Mutant("runtime/dump.py", "* page_size < lengths", "* page_size <= lengths",
           "host/test_dump.py::test_a_pool_is_cut_down_to_the_pages_in_use[split]",
           "a page behind a sequence's end is kept, and named"),
    Mutant("runtime/dump.py", "(slots < pages * page_size)", "(slots <= pages * page_size)",
           "host/test_dump.py::test_slots_name_pages_of_the_small_pool[indices-dtype0]",
           "a slot behind the pool becomes one inside"),
    Mutant("runtime/dump.py", "if extent > 1 and not stride", "if extent > 2 and not stride",
           "host/test_dump.py::test_a_pair_that_shares_memory",
           "a replayed tensor is filled by a copy that torch refuses"),
    Mutant("runtime/watch.py", 'self.when == "nan" and any(', 'self.when != "all" and any(',
           "host/test_watch.py::test_a_call_that_returns_leaves_nothing",
           "files of calls that nobody asked for"),
    Mutant("tools/repro.py", "end_row // heads)", "end_row // heads + 1)",
           "host/test_repro.py::test_where_ragged_queries_begin",
           "the reference takes a neighbour's query token"),
    Mutant("integrations/transformers/pool.py", "slots = torch.where(valid, count - 1 + self._base",
           "slots = torch.where(valid, count + self._base",
           "host/test_transformers.py::test_tokens_are_cached_without_pads",
           "a token lies a place behind the one that decode reads"),
    Mutant("integrations/transformers/pool.py", "indices <= self.query_positions()",
           "indices < self.query_positions()",
           "host/test_transformers.py::test_what_an_indexer_chose_becomes_slots",
           "a query token that chose itself does not see itself"),
    Mutant("integrations/transformers/pool.py", "self.lengths -= were.sum",
           "self.lengths -= (~were).sum",
           "host/test_transformers.py::test_positions_may_be_forgotten",
           "pads that are forgotten are counted as tokens"),
    Mutant("integrations/transformers/pool.py", "if self.seen + new > self.max_tokens",
           "if self.seen + new > self.max_tokens + 1",
           "host/test_transformers.py::test_what_has_no_room_changes_nothing",
           "a token behind the last place is written to another sequence's pages"),
    Mutant("integrations/sglang/refuse.py", '"page_size", lambda v: v not in (None, PAGE),',
           '"page_size", lambda v: False,',
           "host/test_sglang.py::test_settings_that_are_refused[page_size]",
           "SGLang's pages of another size are read as pages of 64"),
    Mutant("integrations/sglang/refuse.py", "if {prefill, decode} != {BACKEND}:",
           "if BACKEND not in {prefill, decode}:",
           "host/test_sglang.py::test_the_backend_stands_alone",
           "another backend of SGLang's reads our rows"),
    Mutant("integrations/vllm/refuse.py", "getattr(type(found), method, None) is not",
           "type(found) is not known and getattr(found, method, None) is",
           "host/test_vllm.py::test_layers_that_may_write_the_cache_themselves",
           "a subclass of vLLM's layer writes the cache past us"),
    Mutant("integrations/vllm/backend.py", "for name in layer_names)",
           "for name in layer_names[:1])",
           "host/test_vllm.py::test_the_builder_looks_at_all_its_layers",
           "a layer behind the first of its group writes the cache past us"),
    Mutant("integrations/vllm/__main__.py", ', index_dtype="i64"),\n        *step',
           "),\n        *step",
           "host/test_vllm.py::test_check_wants_every_kernel_that_is_called",
           "check asks for a kernel that is not called, and not for the one that is"),
)  # fmt: skip


def pytest_in(copy: Path, targets: Iterable[str], variants: Path | None) -> tuple[int, str]:
    """(exit status, output) of pytest on test ids, in a copy; -1 if it did not end."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant may have the size and second of another
    if variants is not None:
        environment["SNAPMLA_VARIANT_DIR"] = str(variants)
    ids = [f"tests/{target}" for target in targets]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *ids]
    seconds = SECONDS * len(ids)
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end in {seconds} s"
    return done.returncode, done.stdout + done.stderr


def outcome_of(copy: Path, package: str, mutant: Mutant, variants: Path | None) -> Outcome:
    """Applies a mutant to the copy, runs its test, and puts the file back."""
    path = copy / package / mutant.file
    text = path.read_text()
    found = text.count(mutant.old)
    if found != 1:
        return Outcome(mutant, "GONE", f"the text is there {found} times: update the table")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        status, output = pytest_in(copy, [mutant.target], variants)
    finally:
        path.write_text(text)
    failed = re.search(r"^FAILED tests/(.+?)(?: - (.*))?$", output, re.MULTILINE)
    if status == 1 and failed is not None:
        return Outcome(mutant, "killed", f"{failed[1]}: {(failed[2] or '')[:80]}".strip(": "))
    if status == 0:
        return Outcome(mutant, "SURVIVED", mutant.target)
    last = (output.strip().splitlines() or [""])[-1]
    return Outcome(mutant, "BROKEN", f"pytest ended with {status}: {last}")


def study(
    root: Path,
    mutants: Sequence[Mutant],
    *,
    copied: Iterable[str] = COPIED,
    package: str = "snapmla",
    variants: Path | None = None,
    jobs: int = 1,
) -> Iterator[Outcome]:
    """Outcomes, in order.

    Args:
        root: the tree that is copied.
        copied: its files and folders that tests need; ``package`` holds the mutated files.
        variants: directory of built variants, None for tests that need none.
        jobs: mutants that are tried at a time, each in a copy of its own.

    Raises:
        RuntimeError: tests fail without a mutant; what they say.
    """
    with tempfile.TemporaryDirectory(prefix="mutate_host_") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(jobs):
            copies.put(_copy(root, copied, Path(folder) / str(number)))

        def in_a_copy(work: Callable[[Path], T]) -> T:
            copy = copies.get()
            try:
                return work(copy)
            finally:
                copies.put(copy)

        targets = list(dict.fromkeys(m.target for m in mutants))
        with ThreadPoolExecutor(jobs) as pool:
            clean = pool.submit(in_a_copy, lambda copy: pytest_in(copy, targets, variants))
            found = [
                pool.submit(in_a_copy, lambda copy, m=m: outcome_of(copy, package, m, variants))
                for m in mutants
            ]
            status, output = clean.result()
            if status:
                pool.shutdown(wait=False, cancel_futures=True)
                raise RuntimeError(f"the tests fail without a mutant:\n{output}")
            for outcome in found:
                yield outcome.result()


def _copy(root: Path, names: Iterable[str], to: Path) -> Path:
    """Copies files and folders of ``root``, without what Python compiled."""
    to.mkdir()
    for name in names:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, to / name)
    return to


def record(outcomes: Sequence[Outcome], commit: str) -> str:
    """The study as a Markdown page."""
    killed = sum(o.state == "killed" for o in outcomes)
    lines = [
        "# Mutants of the host package",
        "",
        f"- commit: {commit}",
        f"- {killed} of {len(outcomes)} mutants killed, each by a test of its own module",
        "- command: python -m tests.mutate_host --record FILE",
        "",
        "| file | mutant | what it would do | outcome |",
        "|---|---|---|---|",
    ]
    for o in outcomes:
        m, by = o.mutant, o.by.split(":: ")[0].replace("|", "\\|")
        change = f"`{m.old}` → `{m.new or ' '}`".replace("|", "\\|")
        lines.append(f"| {m.file} | {change} | {m.why} | {o.state}: {by} |")
    return "\n".join(lines) + "\n"


def main(
    files: Annotated[list[str] | None, typer.Argument(help="such as plan.py; all if none")] = None,
    to: Annotated[Path | None, typer.Option("--record", help="Markdown file to write")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="mutants tried at a time")] = 2,
) -> None:
    """Apply each mutant to a copy of the packages: does a test of its module fail?"""
    from codegen.artifacts import default_dir
    from profiles.page import commit

    chosen = [m for m in MUTANTS if not files or m.file in files]
    if not chosen:
        typer.echo(f"no mutant is in {', '.join(files or [])}", err=True)
        raise typer.Exit(2)
    outcomes, at = [], commit()
    try:
        for outcome in study(ROOT, chosen, variants=default_dir().resolve(), jobs=jobs):
            outcomes.append(outcome)
            typer.echo(str(outcome))
    except RuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    killed = sum(o.state == "killed" for o in outcomes)
    typer.echo(f"{killed} of {len(outcomes)} mutants killed")
    if to is not None:
        to.write_text(record(outcomes, at))
    raise typer.Exit(int(killed < len(outcomes)))


if __name__ == "__main__":
    typer.run(main)
