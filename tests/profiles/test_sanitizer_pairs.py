"""What is said of racecheck's pairs: each handover loses a part of its order, and the software GPU
reports a pair of it; and how far an explanation reaches.

Instructions are found by their source lines, and these by their text, so that tests survive edits.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import softgpu
from codegen import abi
from dsl_kernels.spec import VariantSpec
from profiles import sanitizer_pairs as pairs
from profiles.sanitizer_pairs import HANDOVERS, Handover
from snapmla.runtime import variants
from snapmla.testing import selfcheck
from snapmla.testing.mha_job import MhaJob
from snapmla.testing.paged_record_job import PagedRecordJob, PagedShape
from snapmla.testing.prefill_job import PrefillJob
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.sparse_job import SparseJob, SparseShape
from snapmla.testing.workloads.index_logits import sample_call
from snapmla.testing.workloads.mha_fwd import wild_values
from softgpu import Hazard, Options, SoftGpuError, mutate
from tests.support.needs import needs_compiler
from tests.support.planting import line_of

ETAP, DUAL = "sparse_decode_etap_r16_obf16_sm90a", "decode_dual_wg_r64_p64_obf16_sm90a"
RECORDS, MHA = "record_decode_mix16_r16_obf16_sm90a", "mha_fwd_d192_dbf16_sm90a"
F16, INDEX = "decode_f16_r16_p64_obf16_sm90a", "index_logits_h64_u2_sm90a"
PREFILL, LISTS = "sparse_prefill_r16_d512_sm90a", "sparse_decode_mix16_r64_obf16_sm90a"
LONG = (MHA, LISTS)  # whose runs are of the whole matrix
SYNC, WAIT, BARRIER = "bar.warp.sync", "mbarrier.try_wait", "bar.sync"


def by_arguments(kernel: Any, arguments: dict[str, Any]) -> None:
    kernel(*abi.ordered(kernel.names.arguments, arguments))


def call_of(spec: VariantSpec, kernel: Any) -> Callable[[], object]:
    """A call in which a CTA has several items, and more tiles than its ring has stages."""
    if spec.op == "record_decode":
        shape = PagedShape(7, 72, (70, 66, 0, 65), 3, 2, style="scales", parts=1, row_tile=16)
        return functools.partial(PagedRecordJob(spec, shape).run, kernel)
    if spec.op == "sparse_decode" and spec.cache_dtype != "fp8":
        records = RecordJob(spec, RecordShape(7, 130, (130, 66, 0, 70), 1, parts=1))
        return functools.partial(records.run, kernel)
    if spec.op == "sparse_decode":
        job = SparseJob(spec, SparseShape(7, 130, (130, 66, 0, 70), parts=1))
        return functools.partial(job.run, kernel)
    if spec.op == "mha_fwd":
        keys = (spec.key_tile + 20, 9, 5, 4)
        wild = wild_values(MhaJob.draw(spec, (20, 9, 8, 4), keys, 1, 1, ctas=1))
        return lambda: by_arguments(kernel, wild.arguments())
    if spec.op == "sparse_prefill":
        lists = PrefillJob.draw(spec, 3, spec.row_tile, 200, 300, ctas=1)
        return lambda: by_arguments(kernel, lists.arguments())
    if spec.op == "index_logits":
        many = (64 * 27 + 5, 70, 130, 3)
        return lambda: by_arguments(kernel, sample_call(spec.heads, many, 1, ctas=1))
    return functools.partial(selfcheck.DecodeJob(spec, (130, 70, 66), 1).run, kernel)


@functools.cache
def loaded(name: str) -> tuple[softgpu.LoadedKernel, Callable[[], object]]:
    """A variant, and a small call of it."""
    spec = VariantSpec.from_name(name)
    kernel = selfcheck.load(spec, variants.find_or_build(spec, need_library=False).directory)
    assert isinstance(kernel, softgpu.LoadedKernel)
    torch.manual_seed(0)
    return kernel, call_of(spec, kernel)


def line(file: str, text: str, after: str = "") -> str:
    """``file.py:12``, of SM90 or what both architectures share."""
    [path] = pairs.files_named(file)
    return line_of(path, text, after)


@dataclass(frozen=True)
class Loss:
    """What a kernel is run without, and what the software GPU then says of a handover.

    Attributes:
        lines: arguments of ``line``, of each source line.
        kind: of a hazard between the handover's writers and readers.
        last: whether of the instructions ``opcode`` of these lines the last one alone is meant.
    """

    variant: str
    opcode: str
    lines: tuple[tuple[str, ...], ...]
    kind: str = "overwrite-in-use"
    last: bool = False

    @contextmanager
    def planted(self, kernel: softgpu.LoadedKernel) -> Iterator[None]:
        """``kernel`` runs without them; a wait succeeds at once."""
        program = kernel.program(kernel.entry)
        places = [line(*words) for words in self.lines]
        found = [ins.pc for at in places for ins in mutate.matching(program, self.opcode, at)]
        assert found, f"no {self.opcode} at {places}"
        without = functools.reduce(mutate.without, found[-1:] if self.last else found, program)
        kernel.replace_program(kernel.entry, without)
        try:
            yield
        finally:
            kernel.replace_program(kernel.entry, program)


def reported(name: str) -> set[tuple[str, Handover | None]]:
    """(kind, handover) of the hazards of one call, whatever else becomes of it."""
    kernel, call = loaded(name)
    found: list[Hazard] = []
    kernel.options = Options(hazards="collect", on_hazard=found.append)
    try:
        call()
    except SoftGpuError as error:
        assert found, error
    return {(hazard.kind, handover_of(hazard)) for hazard in found}


def handover_of(hazard: Hazard) -> Handover | None:
    """What the two accesses of a hazard belong to, as of racecheck's."""
    functions = tuple(pairs.function_at(event.source) for event in hazard.events)
    actions = (event.action.rpartition(" ")[2] for event in hazard.events)
    return pairs.handover_of(functions, f"{pairs.RACE}{' ~ '.join(actions)}")


ANNOUNCED = (("gather_bytes.py", "cute.arch.sync_warp()", "on_full(kst.index"),)
WRITTEN = (("mix16_pv.py", "cute.arch.sync_warp()", "if const_expr(frees is not None)"),)
UNIT_FREED = (("index_logits.py", "cute.arch.sync_warp()  # one lane frees the slot for all"),)
LANDED = (("gather_bytes.py", "self.landed.wait_full("),)
LOSSES = {  # by a handover's ``what``
    "1 / sums of an item's rows": Loss(RECORDS, SYNC, WRITTEN),
    "slot and rows of an item": Loss(RECORDS, SYNC, WRITTEN),
    "what a warp makes of a tile's scales (sigma, log2, 1 / sigma, ratios)": Loss(
        RECORDS, SYNC, ANNOUNCED, "race"
    ),
    "zeros for content whose scale is 0": Loss(RECORDS, SYNC, ANNOUNCED, "race"),
    "factors of the rows of Q": Loss(
        RECORDS, BARRIER, (("mix16_softmax.py", "barrier(barrier_id=CONVERTED"),), "race"
    ),
    "gathered content of a tile": Loss(RECORDS, WAIT, LANDED, "read-before-complete"),
    "gathered scales of a tile": Loss(RECORDS, WAIT, LANDED, "read-before-complete"),
    "factors and flags that come with P": Loss(
        ETAP, SYNC, (("swap_ab.py", "cute.arch.sync_warp()", "flags_of(st)[wwarp, buf]"),),
        "race",
    ),
    "votes of the softmax warps for that frames move": Loss(
        LISTS, WAIT, (("mix16_overlap.py", "VOTES.wait_full("),), "race"
    ),
    "zeros for V behind a sequence's end (K of the next tile of the stage)": Loss(
        F16, WAIT, (("f16.py", "P_RING.wait_full(", "def clear"),)
    ),
    "frame factors of the other warpgroup's block": Loss(
        DUAL, BARRIER, (("dual_wg.py", "cute.arch.barrier(", "def warpgroup_meets"),), "race",
        last=True,  # which is that of ``announce``
    ),
    "row sums of both warpgroups": Loss(
        DUAL, BARRIER, (("dual_wg.py", "warps_meet(Barrier.BOTH", "def finish_work_tile"),), "race"
    ),
    "notes of work tiles": Loss(
        MHA, SYNC, (("attention_parts.py", "cute.arch.sync_warp()", "def release"),)
    ),
    "verdicts on work tiles": Loss(
        MHA, SYNC,
        (
            ("hidden_keys.py", "cute.arch.sync_warp()", "def _told"),
            ("hidden_keys.py", "cute.arch.sync_warp()", "tried[count % SLOTS] = j"),
        ),
    ),
    "the first key of each channel of V that is no finite number": Loss(
        MHA, SYNC, (("hidden_keys.py", "cute.arch.sync_warp()", "def poison"),)
    ),
    "words about a unit of index logits": Loss(INDEX, SYNC, UNIT_FREED),
    "weights of a unit of index logits, a bulk copy": Loss(INDEX, SYNC, UNIT_FREED),
    "scales of a page of index logits, a bulk copy": Loss(
        INDEX, SYNC, (("index_logits.py", "cute.arch.sync_warp()  # one lane frees the stage"),)
    ),
    "bits of the places that hold tokens": Loss(
        PREFILL, WAIT, (("sparse_prefill_parts.py", "self.landed.wait_full("),)
    ),
}  # fmt: skip


def runs() -> list[Any]:
    """Handovers that one run shows, behind one another in ``LOSSES``; the longest runs are of the
    whole matrix."""
    lost, out = lambda what: (LOSSES[what].variant, LOSSES[what].opcode, LOSSES[what].lines), []
    for (variant, *_), group in itertools.groupby(LOSSES, lost):
        marks = pytest.mark.whole_matrix if variant in LONG else ()
        out.append(pytest.param(run := [*group], id=run[0], marks=marks))
    return out


def test_each_handover_has_a_loss() -> None:
    assert sorted(LOSSES) == sorted(x.what for x in HANDOVERS)


@needs_compiler
@pytest.mark.whole_matrix  # as ``test_variants.py`` finds them with calls of its own
@pytest.mark.parametrize("name", dict.fromkeys(loss.variant for loss in LOSSES.values()))
def test_nothing_is_reported_otherwise(name: str) -> None:
    assert not reported(name)


@needs_compiler
@pytest.mark.parametrize("run", runs())
def test_the_software_gpu_notices_the_loss(run: list[str]) -> None:
    loss = LOSSES[run[0]]
    with loss.planted(loaded(loss.variant)[0]):
        found = reported(loss.variant)
    for what in run:
        [handover] = (x for x in HANDOVERS if x.what == what)
        assert (LOSSES[what].kind, handover) in found, found


# ---------------------------------------------------------------- how far an explanation reaches


PAIRS = [  # by their lines' text: the write, the read
    (
        ("across_warps.py", "inv_s[row_position(ctid"),
        ("transposed.py", "inverse = inv_s[x, lane % 4]"),
    ),
    (
        ("mix16_powers.py", "cute.autovec_copy(four, cute.make_tensor(at,"),
        ("mix16_v4_parts.py", "return [[own[g, token + 8 * e, stage]"),
    ),
    (
        ("sparse_prefill_rows_on_m.py", "compat.store_shared(st.gamma"),
        ("sparse_prefill_rows_on_m.py", "gamma = [gamma_s["),
    ),
    (
        ("sparse_prefill_rows_on_m.py", "inv[row] = finish_row("),
        ("sparse_prefill_rows_on_m.py", "head, inverse = work_tile.block"),
    ),
    (
        ("gather.py", "copy(to[2] + stage * (tile * n), source"),
        ("mix16_powers.py", "cute.autovec_copy(own, words)"),
    ),
    (
        ("dual_wg.py", "sums[local + 8 * i, me] = mine"),
        ("dual_wg.py", "total = sums[local + 8 * i, 0]"),
    ),
]
WRITE_READ, READ_WRITE = "race: write ~ read", "race: read ~ write"


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_that_a_card_reported_are_explained(pair: tuple[tuple[str, str], ...]) -> None:
    """An H100's, in either order; nothing where another one writes, or both."""
    functions = tuple(pairs.function_at(line(*side)) for side in pair)
    assert pairs.explanation(functions, WRITE_READ)
    assert pairs.explanation(functions[::-1], READ_WRITE)
    if functions[0] != functions[1]:
        assert not pairs.explanation(functions, READ_WRITE)
        assert not pairs.explanation((functions[0], functions[0]), WRITE_READ)
    for what in ("race: write ~ write", "race: read ~ read", "race: write", "", "Invalid read"):
        assert not pairs.explanation(functions, what)
    assert not pairs.explanation(functions[:1], WRITE_READ)


def test_explanations_name_functions_that_exist() -> None:
    """One that was renamed would explain nothing, or another thing."""
    for handover in HANDOVERS:
        assert handover.writers and handover.readers
        for name in handover.writers | handover.readers:
            file, _, function = name.partition(":")
            [path] = pairs.files_named(file)
            assert function in {f for _, _, f in pairs._functions(path)}, name


def test_functions_that_moved() -> None:
    """Records name them as they were called; today none is called so, and some record does."""
    results = Path(pairs.__file__).with_name("results").glob("sanitizer-*.json")
    recorded = {
        pairs.renamed(name)
        for path in results
        for name in re.findall(r'"(\w+\.py:\w+)"', path.read_text())
    }
    for old, new in pairs.MOVED.items():
        assert old in recorded, "no record needs it"
        for name, there in ((old, False), (new, True)):
            file, _, function = name.partition(":")
            [path] = pairs.files_named(file)
            assert (function in {f for _, _, f in pairs._functions(path)}) == there, name


def test_nothing_but_a_handovers_own_pairs_is_explained() -> None:
    """Of all functions that are named, each beside each."""
    known = {pair for x in HANDOVERS for pair in itertools.product(x.writers, x.readers)}
    named = sorted({f for x in HANDOVERS for f in x.writers | x.readers})
    explained = {
        pair for pair in itertools.product(named, named) if pairs.explanation(pair, WRITE_READ)
    }
    assert explained == known
    # the same functions, of other memory: scales are not content, nor the other way about
    for pair in (
        ("gather.py:_copy", "mix16_softmax.py:load_k"),
        ("gather.py:_lines", "swap_ab.py:scales_of"),
        ("mix16_parts.py:_clear", "mix16_softmax.py:facts_of"),
        ("mix16_parts.py:convert", "mix16_softmax.py:load_k"),
        ("index_scoring.py:_fill", "index_logits.py:_kept"),
        ("index_scoring.py:_announce", "index_logits.py:_tile"),
        ("work_tile_notes.py:note", "transposed.py:write_rows"),
    ):
        assert pair not in explained


def test_a_pair_has_one_explanation() -> None:
    """Two would be of different memory, of which a key knows nothing."""
    every = [pair for x in HANDOVERS for pair in itertools.product(x.writers, x.readers)]
    assert len(every) == len(set(every))
