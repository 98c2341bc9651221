"""Pairs of accesses that racecheck reports although they are ordered, and why they are.

A ``Handover`` is shared memory that some functions write and others read.  It says what orders them
in both directions: the writers before the readers, and these before the next writers.  racecheck
names two lines, but not the direction that it could not follow.

A pair is known by the functions that its two lines are in, so that edits move nothing, and by which
of the two writes.  That is all that an explanation goes by: the *memory* is not part of the key.
If the same two functions come to exchange something else, which the same one writes, a pair about
that is taken for explained as well.  So a handover names functions that touch little else, and
whoever lets one of them read or write more shared memory looks at what is said of it here.  Two
writes are never explained, nor is a read in a writer beside a write in a reader.

``tests/profiles/test_sanitizer_pairs.py`` takes a part of each handover's order away and expects
that the software GPU reports its pair.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import dsl_kernels

SOURCES = Path(dsl_kernels.__file__).parent
RACE = "race: "  # what a pair begins with, in findings


@dataclass(frozen=True)
class Means:
    """Means of order pairs that racecheck does not follow.

    Attributes:
        title: heading of the page.
        text: why that is an order, what racecheck makes of it, and what the software GPU does.
    """

    title: str
    text: str


ONE_LANE = Means(
    "One lane arrives for its warp",
    "One lane arrives at an mbarrier for its warp.  The other lanes' accesses come before that by "
    "`bar.warp.sync` or a named barrier, which order memory among the threads that take part; the "
    "arrival releases, the wait acquires, and causality order is transitive.  racecheck, as its "
    "reports look, does not put this together.  The software GPU's hazard check follows every "
    "lane: it finds these kernels clean under every schedule that was run, and reports pairs of "
    "each of these handovers once the `bar.warp.sync` in front of the arrival is taken out, or, "
    "where another barrier or wait orders them beside it, once that is.",
)
LANDED = Means(
    "Copies of `cp.async` that arrive by themselves",
    "Lanes that gather copy with `cp.async`, and `cp.async.mbarrier.arrive.noinc` arrives for each "
    "of them at `landed` when its copies are there.  racecheck's manual says that it follows such "
    "copies by pipelines and async-groups, and nothing of mbarriers.  To the software GPU a copy "
    "is complete with the phase that it arrives in: it finds these kernels clean under every "
    "schedule that was run, and reports pairs of each of these handovers where the announcing warp "
    "does not wait for `landed`.",
)
MEETING = Means(
    "Named barriers of several warpgroups",
    "A named barrier of two or three of the CTA's warpgroups orders memory among all threads that "
    "take part, those that only arrive included.  racecheck reports these pairs, and none that a "
    "named barrier of one warpgroup orders alone; why, it does not say.  The software GPU finds "
    "these kernels clean under every schedule that was run, and reports the pairs where that "
    "barrier is taken out.",
)


@dataclass(frozen=True)
class Handover:
    """Shared memory that some functions write and others read.

    Attributes:
        what: lies there.
        there: what orders the writers before the readers.
        back: what orders the readers before the next writers.
        writers, readers: ``file.py:function``.
        means: what racecheck does not follow of it.
    """

    what: str
    there: str
    back: str
    writers: frozenset[str]
    readers: frozenset[str]
    means: Means = ONE_LANE

    @property
    def why(self) -> str:
        """Reason, as a sentence."""
        return f"{self.what}: written, then {self.there}; read, then {self.back}"

    def covers(self, functions: tuple[str, ...], accesses: tuple[str, ...]) -> bool:
        """True if a pair is one of it: a write in a writer and a read in a reader."""
        if len(functions) != 2 or sorted(accesses) != ["read", "write"]:
            return False
        side = dict(zip(accesses, functions, strict=True))
        return side["write"] in self.writers and side["read"] in self.readers


HANDOVERS = (
    Handover(
        "1 / sums of an item's rows",
        "`bar.warp.sync` or the softmax warps' named barrier, one lane arrives at INV_RING's full",
        "`bar.warp.sync`, one lane arrives at INV_RING's empty, which the next writers wait for",
        frozenset((
            "across_warps.py:finish_rows", "rows_on_m.py:finish_rows",
            "mix16_m_ref.py:finish_rows", "dense_rows_on_m.py:finish_rows",
            "sparse_prefill_swap_ab.py:finish", "sparse_prefill_rows_on_m.py:finish",
        )),
        frozenset((
            "transposed.py:write_rows", "mix16_pv.py:write_rows", "mix16_v4_pv.py:write_rows",
            "dense_swap_ab.py:write_rows", "dense_rows_on_m.py:write_rows",
            "sparse_prefill_swap_ab.py:write", "sparse_prefill_rows_on_m.py:write",
        )),
    ),
    Handover(
        "factors and flags that come with P",
        "`bar.warp.sync`, one lane arrives at the full barrier of P",
        "`bar.warp.sync`, one lane frees P, or the tile's stage, whose next tile's P comes behind "
        "a wait for that tile",
        frozenset((
            "swap_ab.py:block", "rows_on_m.py:block", "rows_on_m.py:hand_over",
            "dense_swap_ab.py:block", "dense_rows_on_m.py:block", "mix16_softmax.py:hand_over",
            "mix16_overlap.py:give", "mix16_m_ref.py:move_m_refs",
            "sparse_prefill_swap_ab.py:tile", "sparse_prefill_rows_on_m.py:tile",
        )),
        frozenset((
            "transposed.py:pv_block", "softmax_role.py:any_flag", "mix16.py:pv_block",
            "dense_swap_ab.py:pv_block", "dense_rows_on_m.py:pv_block",
            "sparse_prefill_swap_ab.py:product", "sparse_prefill_rows_on_m.py:product",
        )),
    ),
    Handover(
        "votes of the softmax warps for that frames move",
        "the lane that writes arrives at the votes' barrier, which the readers wait for",
        "`bar.warp.sync`, one lane arrives at that barrier for the next tile, which the lane that "
        "writes again waits for, or, where frames move, all meet at a named barrier",
        frozenset(("mix16_overlap.py:send_vote",)),
        frozenset(("mix16_overlap.py:votes_heard",)),
    ),
    Handover(
        "what a warp makes of a tile's scales (sigma, log2, 1 / sigma, ratios)",
        "`bar.warp.sync`, one lane arrives at the tile's full barrier (of the ring, or of the "
        "triples)",
        "`bar.warp.sync`, one lane of each reading warp frees the stage, which the next copy, and "
        "behind it whoever makes these, waits for",
        frozenset((
            "scale_triples.py:_make", "mix16_powers.py:_make", "mix16_powers.py:_make_ratios",
            "mix16_parts.py:_make",
        )),
        frozenset((
            "block_softmax.py:logits", "mix16_softmax.py:facts_of", "mix16_softmax.py:load_ratio",
            "mix16_v4_parts.py:load_ratio", "mix16_v41.py:load_ratio", "mix16_pv.py:load_ratio",
        )),
    ),
    Handover(
        "zeros for content whose scale is 0",
        "`bar.warp.sync`, the announcer's lane arrives at the tile's full barrier",
        "`bar.warp.sync`, one lane of each reading warp frees the stage (or the first half of its "
        "rows), which the gathering lanes wait for; the announcer writes again when the next "
        "tile's copies have landed",
        frozenset(("mix16_parts.py:_clear",)),
        frozenset(("mix16_softmax.py:load_k", "mix16_pv.py:load_v")),
    ),
    Handover(
        "zeros for V behind a sequence's end (K of the next tile of the stage)",
        "the P.V warpgroup's named barrier and `bar.warp.sync`, one lane of each warp frees the "
        "stage, and the bytes of the next copy, which waits for that, complete the full barrier "
        "that the readers wait for",
        "`bar.warp.sync`, one lane arrives at the full barrier of P, which the writers wait for",
        frozenset(("fp8_per_token.py:zero_values",)),
        frozenset(("mix16_softmax.py:load_k",)),
    ),
    Handover(
        "frame factors of the other warpgroup's block",
        "the warpgroup's named barrier, one lane a warp arrives at `ready`",
        "the next announcement of the readers' own block, which the writers wait for before they "
        "write the buffer again",
        frozenset(("dual_wg.py:own_m_ref",)),
        frozenset(("dual_wg.py:peer_m_ref",)),
    ),
    Handover(
        "slot and rows of an item",
        "`bar.warp.sync`, one lane arrives at INV_RING's full",
        "`bar.warp.sync`, one lane arrives at INV_RING's empty, which the softmax warps wait for "
        "at the end of the next item, before the one whose note takes the same of two slots",
        frozenset(("work_tile_notes.py:note",)),
        frozenset(("work_tile_notes.py:noted",)),
    ),
    Handover(
        "notes of work tiles",
        "the lane that writes arrives at the slot's full barrier",
        "`bar.warp.sync`, one lane of each reading warp arrives at the slot's empty barrier, which "
        "the producer waits for before it writes",
        frozenset(("attention_parts.py:put",)),
        frozenset(("attention_parts.py:read",)),
    ),
    Handover(
        "verdicts on work tiles",
        "`bar.warp.sync`, one lane arrives at the empty barrier of the next note, which the "
        "producer waits for, and behind a pause each consumer",
        "`bar.warp.sync`, one lane arrives: the producer's at the full barrier of the note that it "
        "gives next, a consumer's behind a pause at the empty barrier of the next note and of Q.  "
        "Without these no work tile is taken whose verdict has the same slot",
        frozenset(("hidden_keys.py:tell", "hidden_keys.py:reset")),
        frozenset(("hidden_keys.py:_told",)),
    ),
    Handover(
        "the first key of each channel of V that is no finite number",
        "`bar.warp.sync`, one lane arrives at the tile's `clean`",
        "`bar.warp.sync`, one lane of each consumer warp arrives at `seen`, which the clearing "
        "warp waits for before it scans the next such work tile's first tile",
        frozenset(("hidden_keys.py:scan",)),
        frozenset(("hidden_keys.py:poison",)),
    ),
    Handover(
        "words about a unit of index logits",
        "the lane that writes arrives at the slot's full barrier",
        "`bar.warp.sync`, one lane of each maths warp arrives at the slot's empty barrier, which "
        "the producer waits for",
        frozenset(("index_scoring.py:_announce", "index_scoring.py:_produce")),
        frozenset(("index_logits.py:_compute", "index_logits.py:_targets")),
    ),
    Handover(
        "weights of a unit of index logits, a bulk copy",
        "its bytes complete the slot's full barrier",
        "`bar.warp.sync`, one lane of each maths warp arrives at the slot's empty barrier, which "
        "the producer waits for",
        frozenset(("index_scoring.py:_announce",)),
        frozenset(("index_logits.py:_kept", "index_logits.py:weights")),
    ),
    Handover(
        "scales of a page of index logits, a bulk copy",
        "its bytes complete the stage's full barrier",
        "`bar.warp.sync`, one lane of each warp of the maths warpgroup whose turn it is arrives at "
        "the stage's empty barrier, which the producer waits for",
        frozenset(("index_scoring.py:_fill",)),
        frozenset(("index_logits.py:_tile",)),
    ),
    Handover(
        "gathered content of a tile",
        "the copies arrive at `landed`, which the announcer waits for; behind it one of its lanes "
        "arrives at the tile's full barrier",
        "`bar.warp.sync`, one lane of each reading warp frees the stage, or the first half of its "
        "rows, which each gathering lane waits for (`transposed.py:pv_block` does without the "
        "`bar.warp.sync`: `ldmatrix.sync` is an instruction of the whole warp, which no lane is "
        "through with before all have executed it)",
        frozenset((
            "gather.py:_lines", "gather.py:_rows", "gather_pages.py:_lines",
            "gather_v4.py:_token_lines",
        )),
        frozenset((
            "mix16_softmax.py:load_k", "mix16_v41.py:load_k", "mix16_v4_parts.py:load_k",
            "mix16_pv.py:load_v", "mix16_v4_pv.py:load_unit", "transpose.py:_load",
        )),
        LANDED,
    ),
    Handover(
        "gathered scales of a tile",
        "the copies arrive at `landed`, which the announcer waits for; behind it one of its lanes "
        "arrives at the tile's full barrier, for readers of other warps",
        "`bar.warp.sync`, the announcer's lane arrives at the tile's full barrier, or at the "
        "triples'; `bar.warp.sync`, one lane of each reading warp frees the stage, which each "
        "gathering lane waits for",
        frozenset(("gather.py:_copy", "gather_v4.py:_copy")),
        frozenset((
            "f16_softmax.py:scales_of", "swap_ab.py:scales_of", "mix16_softmax.py:scales_of",
            "mix16_parts.py:_make", "mix16_powers.py:words_of_lane", "mix16_powers.py:words_at",
            "mix16_pages.py:_bits", "scale_triples.py:_make",
        )),
        LANDED,
    ),
    Handover(
        "bits of the places that hold tokens",
        "the announcer's lane that writes arrives at the full barrier of the tile's first half",
        "the softmax warps' named barrier and `bar.warp.sync`, one lane arrives at the full "
        "barrier of P; behind it one lane of each P.V warp frees the first half, which each "
        "gathering lane waits for; the announcer writes again when the next copies have landed",
        frozenset(("sparse_prefill_parts.py:_announce",)),
        frozenset(("sparse_prefill_form.py:places",)),
        LANDED,
    ),
    Handover(
        "row sums of both warpgroups",
        "a named barrier of both warpgroups (`bar.sync 3, 256`)",
        "the same barrier once more, at the item's end",
        frozenset(("dual_wg.py:finish_work_tile",)),
        frozenset(("dual_wg.py:finish_work_tile",)),
        MEETING,
    ),
    Handover(
        "factors of the rows of Q",
        "a named barrier of the softmax and P.V warps (`bar.arrive 4, 384` of P.V, `bar.sync 4, "
        "384` of softmax)",
        "`bar.warp.sync`, one lane arrives at the full barrier of P, which P.V's warps wait for "
        "before they convert the next Q; of an item without tiles nothing is read",
        frozenset(("mix16_parts.py:convert", "mix8.py:convert")),
        frozenset(("mix16_softmax.py:block",)),
        MEETING,
    ),
)  # fmt: skip

# What functions of committed records are called today, if they have moved since.
MOVED = {
    f"index_logits.py:{name}": f"index_scoring.py:{name}"
    for name in ("_announce", "_produce", "_fill")
} | {
    "dual_wg.py:finish_item": "dual_wg.py:finish_work_tile",
    "dual_wg.py:own_frame": "dual_wg.py:own_m_ref",
    "dual_wg.py:peer_frame": "dual_wg.py:peer_m_ref",
}


# Files of records that have another name by now.
RENAMED = {
    "dense_few.py": "dense_swap_ab.py",
    "dense_frames.py": "online_softmax.py",
    "dense_many.py": "dense_rows_on_m.py",
    "fp8_dual_wg.py": "dual_wg.py",
    "fp8_etap.py": "transposed.py",
    "gather_records.py": "gather_bytes.py",
    "item_notes.py": "work_tile_notes.py",
    "mha_hidden.py": "hidden_keys.py",
    "mha_parts.py": "attention_parts.py",
    "mix16_frames.py": "mix16_m_ref.py",
    "softmax_few.py": "swap_ab.py",
    "softmax_many.py": "rows_on_m.py",
    "sparse_prefill_few.py": "sparse_prefill_swap_ab.py",
    "sparse_prefill_many.py": "sparse_prefill_rows_on_m.py",
}


def renamed(function: str) -> str:
    """``file.py:function`` of an older record, by the file's name today."""
    file, _, name = function.partition(":")
    return f"{RENAMED.get(file, file)}:{name}"


@functools.cache
def _functions(path: Path) -> list[tuple[int, int, str]]:
    """(first line, last line, name) of the functions of a file."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(n.lineno, n.end_lineno or 0, n.name) for n in ast.walk(tree) if isinstance(n, kinds)]


def files_named(name: str, arch: str = "sm_90a") -> list[Path]:
    """Our files of that name that are compiled into kernels of ``arch``: none of the other
    architecture's, nor a family's, which declares variants on the host."""
    others = {"families", {"sm_90a": "sm100", "sm_100a": "sm90"}.get(arch)}
    found = SOURCES.rglob(name) if name else ()
    return [path for path in found if not others & {*path.relative_to(SOURCES).parts}]


def function_at(place: str, arch: str = "sm_90a") -> str:
    """``file.py:function`` of ``path/file.py:12``: the innermost one of our kernels' file of that
    name; ``file.py:?`` where there is none."""
    path, _, line = place.rpartition(":")
    name, number = Path(path).name, int(line) if line.isdigit() else 0
    around = [
        (last - first, function)
        for file in files_named(name, arch)
        for first, last, function in _functions(file)
        if first <= number <= last
    ]
    return f"{name}:{min(around)[1] if around else '?'}"


def handover_of(functions: tuple[str, ...], what: str) -> Handover | None:
    """The handover that a pair is one of, ``what`` in racecheck's words: ``race: write ~ read``."""
    functions = tuple(MOVED.get(name, name) for name in map(renamed, functions))
    accesses = tuple(what.removeprefix(RACE).split(" ~ ")) if what.startswith(RACE) else ()
    return next((x for x in HANDOVERS if x.covers(functions, accesses)), None)


def explanation(functions: tuple[str, ...], what: str) -> str:
    """Reason why a pair is ordered, as ``handover_of`` takes it; empty where nothing is known."""
    handover = handover_of(functions, what)
    return "" if handover is None else handover.why
