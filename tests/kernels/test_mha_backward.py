"""The backward of dense prefill on the software GPU, hazard check on: fp64 autograd, awkward
numbers, neighbours, what the causal rule hides, bits, planted bugs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsl_kernels
from dsl_kernels.formats.mha_grads import DELTAS, READY
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import variants as runtime
from snapmla.testing import selfcheck
from snapmla.testing.mha_grad_job import GradJob, variants
from snapmla.testing.mha_job import MhaJob
from snapmla.testing.workloads.mha_backward import forward_spec
from softgpu import Hazard, Options, SoftGpuError, mutate, using
from softgpu.ptx import Instr
from tests.kernels.test_mha_fwd import equals, swings
from tests.support.needs import needs_compiler
from tests.support.planting import granted, line_of

pytestmark = needs_compiler
whole = pytest.mark.whole_matrix
CHECKED = Options(hazards="raise", seed=3)
MAIN = VariantSpec.from_name("mha_dq_d192_dbf16_sm90a")
SPECS = [VariantSpec(op="mha_dq", d_qk=d, dtype=t) for d in (192, 128) for t in ("bf16", "f16")]
of_each = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
# MAIN every day, as it is compiled for other tests; the others in the whole matrix
main_first = pytest.mark.parametrize(
    "spec", [pytest.param(s, marks=[] if s == MAIN else whole, id=s.name) for s in SPECS]
)
SOURCES = Path(dsl_kernels.__file__).parent / "sm90" / "mha"


def loaded(spec: VariantSpec) -> Any:
    return selfcheck.load(spec, runtime.find_or_build(spec, need_library=False).directory)


def caller(spec: VariantSpec, **given: Any) -> Callable[[str, Mapping[str, Any]], None]:
    """Calls kernels by op and arguments; some may be ``given``."""
    kernels: dict[str, Any] = {op: kernel for op, kernel in given.items() if kernel is not None}

    def call(op: str, given: Mapping[str, Any]) -> None:
        if op not in kernels:
            kernels[op] = loaded(variants(spec)[op])
        kernels[op](*(given[name] for name in kernels[op].names.arguments))

    return call


def run(spec: VariantSpec, job: GradJob, options: Options = CHECKED) -> dict[str, Tensor]:
    """Gradients by name."""
    with using(options):
        return job.run(caller(spec)).each


def drawn(spec: VariantSpec, *lengths: Any, seed: int = 1, **options: Any) -> MhaJob:
    torch.manual_seed(seed)
    return MhaJob.draw(forward_spec(spec), *lengths, **options)


def right(spec: VariantSpec, job: GradJob) -> None:
    errors = job.errors(run(spec, job))
    assert errors.right, str(errors)


def test_small() -> None:
    """All kernels: rows without keys, NaN behind, two heads in a sum, an LSE's gradient."""
    forward = drawn(MAIN, (40, 0), (37, 5), 2, 2, ctas=1)
    right(MAIN, GradJob.of(forward, lse_too=True, together=2))


@whole
@pytest.mark.parametrize("name", [
    *(f"{op}_d{t}_sm90a" for op in ("mha_delta", "mha_rope_sum") for t in ("bf16", "f16")),
    *(f"{op}_d{d}_d{t}_sm90a" for op in ("mha_dq", "mha_dkv") for d in (192, 128)
      for t in ("bf16", "f16")),
    "mha_items_backward_sm90a",
])  # fmt: skip
def test_workload(name: str) -> None:
    spec = VariantSpec.from_name(name)
    workload = selfcheck.Workload(
        spec, runtime.find_or_build(spec, need_library=False).directory
    )  # fmt: skip
    with using(mutate.schedule(0)):
        result = workload.run()
    assert result.passed, result.summary


@whole
@pytest.mark.parametrize("causal", [True, False])
@of_each
def test_ragged(spec: VariantSpec, causal: bool) -> None:
    """Lengths at and beside the edges of tiles; GQA; NaN of neighbours behind every end."""
    lq, lk = (0, 1, 127, 128, 129, 300), (5, 1, 300, 128, 64, 300)
    right(spec, GradJob.of(drawn(spec, lq, lk, 2, 1, causal=causal, ctas=3), lse_too=True))


def neighbour(job: MhaJob) -> MhaJob:
    """A job whose second sequence is NaN throughout."""
    q, v, ks = job.q.clone(), job.v.clone(), tuple(k.clone() for k in job.ks)
    rows = slice(job.lq[0], job.lq[0] + job.lq[1])
    q[rows] = math.nan
    keys = slice(job.lk[0], job.lk[0] + job.lk[1])
    for x in (v, *ks):
        x[keys] = math.nan
    return replace(job, q=q, v=v, ks=ks)


@whole
@of_each
def test_a_neighbour_of_nan_does_not_arrive(spec: VariantSpec) -> None:
    """And is NaN itself; tiles of rows and keys are shared with it on either side."""
    for causal in (True, False):
        sound = GradJob.of(drawn(spec, (70, 40, 90), (75, 40, 100), 2, 1, causal=causal))
        sick = GradJob.of(neighbour(sound.forward))
        want, got = run(spec, sound), run(spec, replace(sick, dout=sound.dout))
        for name in want:
            first, end = (70, 110) if name == "dq" else (75, 115)
            for rows in (slice(0, first), slice(end, end + 90)):
                assert torch.equal(got[name][rows], want[name][rows]), (causal, name)
            assert got[name][first:end].isnan().all(), (causal, name)


STYLES: dict[str, Callable[[VariantSpec], MhaJob]] = {
    "std 3": lambda s: drawn(s, (129,), (300,), 1, 1, spread=3.0),
    "std 30": lambda s: drawn(s, (129,), (300,), 1, 1, spread=30.0),
    "swings of 200 nats": lambda s: swings(drawn(s, (129,), (300,), 1, 1, causal=False)),
    "queries that are keys": lambda s: equals(drawn(s, (129,), (300,), 1, 1)),
}


def by_its_forward(spec: VariantSpec, job: GradJob) -> GradJob:
    """With output and LSE of the forward's kernel.

    Tensor cores cut sums, at 420 nats by 3.5e-4 of P.  Against float64's LSE P is then not 1 where
    a row is all on one token, and in fp16 the next number below 1 is 4.9e-4 off; the forward's LSE
    is of the same sums.
    """
    given, kernel = job.forward.arguments(), loaded(forward_spec(spec))
    with using(CHECKED):
        kernel(*(given[name] for name in kernel.names.arguments))
    return replace(job, out=given["out"], lse=given["lse"])


@whole
@pytest.mark.parametrize("style", STYLES)
@of_each
def test_logits(spec: VariantSpec, style: str) -> None:
    job = GradJob.of(STYLES[style](spec))
    right(spec, by_its_forward(spec, job) if style == "queries that are keys" else job)


@whole
@of_each
def test_one_huge_row_of_dout(spec: VariantSpec) -> None:
    """Row as large as the sums of its products leave dS finite."""
    job = GradJob.of(drawn(spec, (129,), (200,), 2, 1))
    dout = job.dout.clone()
    dout[77] *= 1000.0
    right(spec, replace(job, dout=dout))


HIDDEN = ("a key", "a value", "a query", "a dO", "an output's gradient of an LSE")


def sick_of(job: GradJob, what: str, at: int) -> GradJob:
    """A job in which a key (of whatever part) or a query row is NaN."""
    f = job.forward
    q, v, dout, ks = f.q.clone(), f.v.clone(), job.dout.clone(), [k.clone() for k in f.ks]
    dlse = torch.zeros_like(job.lse)
    if what == "a key":
        ks[-1][at, 0, 7] = math.nan
    elif what == "a value":
        v[at, 0, 100] = math.nan
    elif what == "a query":
        q[at, :, 3] = math.nan
    elif what == "a dO":
        dout[at, :, 90] = math.nan
    else:
        dlse[:, at] = math.nan
    made = GradJob.of(replace(f, q=q, v=v, ks=tuple(ks)), together=job.together)
    return replace(made, dout=dout, dlse=dlse)


@whole
@pytest.mark.parametrize("at", [5, 100, 131])
@pytest.mark.parametrize("what", HIDDEN)
@pytest.mark.parametrize("spec", SPECS[::3], ids=lambda s: s.name)
def test_a_nan_that_the_causal_rule_hides_reaches_nobody(
    spec: VariantSpec, what: str, at: int
) -> None:
    """Rows before it, and keys behind it, have the bits of a sound call; the others are NaN."""
    hides(spec, what, at, GradJob.of(drawn(spec, (150,), (150,), 2, 1)))


# The other two specs; more heads than one CTA sums, RoPE channels of each KV head's own, K alone.
LAYOUTS = {
    "two of four KV heads in a sum": ((4, 4), {}, 2),
    "each head's own RoPE channels": ((2, 2), {"rope_heads": 2}, 1),
    "GQA, four query heads a KV head": ((4, 1), {}, 1),
}


@whole
@pytest.mark.parametrize("what", ("a key", "a value", "a dO"))
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS[1:3], ids=lambda s: s.name)
def test_a_hidden_nan_in_other_layouts(spec: VariantSpec, layout: str, what: str) -> None:
    """The test above in other layouts: fp16 with 192 channels, BF16 with 128."""
    heads, options, together = LAYOUTS[layout]
    if spec.d_qk == 128 and options:
        pytest.skip("128 channels have no RoPE channels apart")
    sound = GradJob.of(drawn(spec, (150,), (150,), *heads, **options), together=together)
    hides(spec, what, 100, sound)


def hides(spec: VariantSpec, what: str, at: int, sound: GradJob) -> None:
    """Holds gradients of a job with a NaN, of a key or value in head 0's, against a sound one."""
    sound = replace(sound, dlse=torch.zeros_like(sound.lse))
    want, got = run(spec, sound), run(spec, sick_of(sound, what, at))
    of_row = what not in ("a key", "a value")  # else it is in every row from ``at`` on
    clean = [row for row in range(150) if (row != at if of_row else row < at)]
    sick = [row for row in range(150) if row not in clean]
    kv_heads, group = sound.forward.v.shape[1], got["dq"].shape[1] // sound.forward.v.shape[1]
    all_sick = of_row or (what == "a key" and sound.forward.ks[-1].shape[1] == 1)
    for head in range(group * kv_heads):
        rows, whole_rows = got["dq"][:, head], want["dq"][:, head]
        if all_sick or head < group:
            assert torch.equal(rows[clean], whole_rows[clean])
            assert rows[sick].isnan().all()
        else:
            assert torch.equal(rows[:150], whole_rows[:150])
    last = at if of_row else 149  # of the rows that are sick, the last one sees keys up to it
    for name in ("dk_nope", "dk_rope", "dv"):
        for head in range(got[name].shape[1] if name in got else 0):
            keys, whole_keys = got[name][:150, head], want[name][:150, head]
            assert torch.equal(keys[last + 1 :], whole_keys[last + 1 :]), name
            summed = name == "dv" and what in ("a value", "an output's gradient of an LSE")
            if summed or not (all_sick or head == 0):  # P is of no V, nor dLSE
                assert torch.equal(keys, whole_keys), name
            else:
                assert keys[: last + 1].isnan().all(), name


def cut(job: GradJob, which: int) -> GradJob:
    """One sequence of a job, alone."""
    f = job.forward
    rows = slice(sum(f.lq[:which]), sum(f.lq[: which + 1]))
    keys = slice(sum(f.lk[:which]), sum(f.lk[: which + 1]))
    forward = replace(
        f, q=f.q[rows].clone(), v=f.v[keys].clone(), ks=tuple(k[keys].clone() for k in f.ks),
        lq=(f.lq[which],), lk=(f.lk[which],), ctas=1,
    )  # fmt: skip
    return replace(
        job,
        forward=forward,
        out=job.out[rows].clone(),
        lse=job.lse[:, rows].clone(),
        dout=job.dout[rows].clone(),
    )


@whole
@of_each
def test_bits_do_not_depend_on_batch_or_ctas(spec: VariantSpec) -> None:
    job = GradJob.of(drawn(spec, (30, 90, 20), (40, 150, 7), 4, 2, ctas=3), together=2)
    found = run(spec, job)
    few = run(spec, replace(job, forward=replace(job.forward, ctas=1)))
    alone = run(spec, cut(job, 1))
    for name, x in found.items():
        rows = slice(30, 120) if name == "dq" else slice(40, 190)
        assert torch.equal(few[name].nan_to_num(7.0), x.nan_to_num(7.0)), name
        assert torch.equal(alone[name], x[rows]), name


@whole
def test_heads_of_a_sum_change_its_order_alone() -> None:
    """1, 2, 3 and 4 of four KV heads in a CTA; RoPE channels of each head's own."""
    job = GradJob.of(drawn(MAIN, (70,), (80,), 4, 4))
    found = [run(MAIN, replace(job, together=n)) for n in (1, 2, 3, 4)]
    for each, together in zip(found, (1, 2, 3, 4)):
        errors = replace(job, together=together).errors(each)
        assert errors.right, str(errors)
        for name in ("dq", "dk_nope", "dv"):
            assert torch.equal(each[name].nan_to_num(7.0), found[0][name].nan_to_num(7.0))
    right(MAIN, GradJob.of(drawn(MAIN, (70,), (80,), 4, 2, rope_heads=2)))


@whole
@pytest.mark.parametrize("spec", SPECS[::3], ids=lambda s: s.name)
def test_schedules(spec: VariantSpec) -> None:
    """Every role ahead of and behind the others; the same bits."""
    job = GradJob.of(drawn(spec, (140, 0, 30), (150, 5, 70), 2, 2, ctas=2), together=2)
    found = []
    for seed in range(8):
        with using(mutate.schedule(seed)):
            found.append(job.run(caller(spec)).each)
    errors = job.errors(found[0])
    assert errors.right, str(errors)
    for each in found[1:]:
        for name, x in each.items():
            assert torch.equal(x.nan_to_num(7.0), found[0][name].nan_to_num(7.0)), name


@whole
def test_stats_of_another_padding_are_refused() -> None:
    """Objects that were compiled with another one would read other rows, and say nothing."""
    job = GradJob.of(drawn(MAIN, (9,), (9,), 1, 1))
    other = torch.zeros(1, 3, 128, 2)
    for op, given in (("mha_delta", {**job.of_delta(), "stats": other}),
                      ("mha_dq", job.of_dq(other)), ("mha_dkv", job.of_dkv(other))):  # fmt: skip
        with pytest.raises(Exception, match="192"):
            caller(MAIN)(op, given)


def early(
    spec: VariantSpec, job: GradJob, behind_dq: int, deltas: int | None = None, kernel: Any = None
) -> None:  # fmt: skip
    """mha_dkv right behind mha_delta, whose count of CTAs may be replaced."""
    call, delta = caller(spec, mha_dkv=kernel), job.of_delta()
    with using(CHECKED):
        call("mha_delta", delta)
        assert delta["key_work"][DELTAS] == READY
        work = delta["key_work"] if deltas is None else delta["key_work"].clone()
        if deltas is not None:
            work[DELTAS] = deltas
        call("mha_dkv", {**job.of_dkv(delta["stats"]), "work": work, "behind_dq": behind_dq})


@whole
def test_keys_wait_for_the_statistics_that_they_read() -> None:
    """Only told ``behind_dq`` and that all CTAs of mha_delta have stored they begin early: with
    that kernel right in front of them, a hazard.  Of any other count they wait."""
    job = GradJob.of(drawn(MAIN, (140, 9), (37, 5), 2, 2, ctas=2))
    early(MAIN, job, 0)
    for deltas in (0, READY - 1, READY + 1):
        early(MAIN, job, 1, deltas)
    for counted in (None, READY):  # the count itself, or what stands behind it
        with pytest.raises(Hazard, match="griddepcontrol.wait must come first"):
            early(MAIN, job, 1, counted)


@main_first
def test_the_count_is_released_and_acquired(spec: VariantSpec) -> None:
    """Order of instructions, which no run here depends on: mha_delta's release behind the barrier
    behind its stores, mha_dkv's acquire and proxy fence in front of all else that it reads."""
    delta, keys = (
        [x.opcode for x in kernel.program(kernel.entry).kernel.code]
        for kernel in (loaded(variants(spec)[op]) for op in ("mha_delta", "mha_dkv"))
    )
    (count,) = (i for i, x in enumerate(delta) if x.startswith("atom."))
    (barrier,) = (i for i, x in enumerate(delta) if x.startswith("bar.sync"))
    stores = [i for i, x in enumerate(delta) if x.startswith("st.global")]
    assert "release" in delta[count] and max(stores) < barrier < count
    (acquired,) = (i for i, x in enumerate(keys) if x.startswith("ld.acquire.gpu"))
    (fence,) = (i for i, x in enumerate(keys) if x == "fence.proxy.async.global")
    reads = [
        i for i, x in enumerate(keys)
        if i != acquired and x.startswith(("ld.global", "atom.", "cp.async.bulk."))
    ]  # fmt: skip
    assert acquired < fence < min(reads)


@whole
@of_each
def test_each_wait_for_a_grid_is_needed(spec: VariantSpec) -> None:
    """mha_dq's, that of mha_dkv's producer at its begin and that of its consumers before they
    store, by a hazard; the producer's at its end by its place."""
    job = GradJob.of(drawn(spec, (40, 9), (37, 5), 1, 1, ctas=1))
    kernel = loaded(variants(spec)["mha_dkv"])
    program = kernel.program(kernel.entry)
    places = [
        line_of(SOURCES / "mha_dkv.py", "compat.pdl_wait()", after)
        for after in ("def _wait", "self.end(st, count)", "self._note(st, count)")
    ]
    waits = mutate.matching(program, "griddepcontrol.wait")
    assert [program.kernel.source_of(x) for x in waits] == places
    with (
        mutate.planted(kernel, kernel.entry, {waits[0].pc: none(waits[0])}),
        pytest.raises(Hazard, match="griddepcontrol.wait must come first"),
    ):
        early(spec, job, 0, kernel=kernel)
    stored_behind_itself(job, kernel)
    with (
        mutate.planted(kernel, kernel.entry, {waits[2].pc: none(waits[2])}),
        pytest.raises(Hazard, match="write of what the grid launched before"),
    ):
        stored_behind_itself(job, kernel)
    queries = loaded(variants(spec)["mha_dq"])
    (wait,) = mutate.matching(queries.program(queries.entry), "griddepcontrol.wait")
    with (
        mutate.planted(queries, queries.entry, {wait.pc: none(wait)}),
        using(CHECKED),
        pytest.raises(Hazard, match="griddepcontrol.wait must come first"),
    ):
        job.run(caller(spec, mha_dq=queries))
    opcodes = {x.pc: x.opcode for x in program.kernel.code}
    (launch,) = (pc for pc, x in opcodes.items() if x == "griddepcontrol.launch_dependents")
    between = [opcodes[pc] for pc in sorted(opcodes) if waits[1].pc < pc < launch]
    assert waits[1].pc < launch and not any(x.startswith(("bra", "st.", "ret")) for x in between)
    stores = [pc for pc, x in opcodes.items() if x.startswith("st.global")]
    assert waits[2].pc < min(stores)


def stored_behind_itself(job: GradJob, kernel: Any) -> None:
    """mha_dkv, told that all it reads is there, and again into the same memory: a hazard if it
    stores what the grid before stored, and has not waited for it."""
    first = {**job.of_dkv(job.want_stats().float()), "behind_dq": 1}
    first["work"][DELTAS] = READY
    with using(CHECKED):
        for given in (first, {**first, "work": first["work"].clone()}):
            given["work"][0] = 0
            kernel(*(given[name] for name in kernel.names.arguments))


# op -> whether the mutation study misses each of its waits for a grid: that at mha_dkv's end
MISSED = {
    "mha_rope_sum": [False], "mha_delta": [False], "mha_dq": [False],
    "mha_dkv": [False, True, False],
}  # fmt: skip


@whole
@pytest.mark.parametrize("op", MISSED)
def test_the_mutation_study_notices_waits(op: str) -> None:
    """Under any schedule, by a grid before that wrote what is read or written too early."""
    spec = variants(MAIN)[op]
    workload = selfcheck.Workload(
        spec, runtime.find_or_build(spec, need_library=False).directory
    )  # fmt: skip
    workload.again = True
    kernel: Any = workload.kernel
    waits = [
        site for site in mutate.sites(kernel.program(kernel.entry))
        if site.text.startswith("griddepcontrol.wait")
    ]  # fmt: skip
    found = list(mutate.study(kernel, kernel.entry, lambda: workload.run().passed, 1, waits))
    assert [not outcome.killed for outcome in found] == MISSED[op]
    assert {outcome.how for outcome in found if outcome.killed} == {"early-dependent-access"}


def none(_ins: Instr) -> str:
    """In place of an instruction that is left out."""
    return ""


PARTS = "mha_bwd_parts.py"
# Bug: op, opcode, (file, text of its line, behind which text), what stands there, kind of hazard.
Bug = tuple[str, str, tuple[str, ...], Callable[[Instr], str], str]
BUGS: dict[str, Bug] = {
    "a tile is multiplied before it is cleared, dQ": (
        "mha_dq", "mbarrier.try_wait", (PARTS, "self.clean.wait_full"), granted, "race",
    ),
    "a tile is multiplied before it is cleared, dK": (
        "mha_dkv", "mbarrier.try_wait", (PARTS, "self.clean.wait_full"), granted, "race",
    ),
    "what stays is not waited for, dQ": (
        "mha_dq", "mbarrier.try_wait", ("mha_dq.py", "self.still.wait_full"), granted,
        "read-before-complete",
    ),
    "what stays is not waited for, dK": (
        "mha_dkv", "mbarrier.try_wait", ("mha_dkv.py", "self.still.wait_full"), granted,
        "read-before-complete",
    ),
    "a slot is filled before it is free": (
        "mha_dkv", "mbarrier.try_wait", (PARTS, "self.moving.wait_empty"), granted, "race",
    ),
    "S is read before it is there": (
        "mha_dq", "wgmma.wait_group", ("mha_dq.py", "warpgroup.wait_group(1)"), none,
        "register-in-flight",
    ),
    "what is cleared is not fenced": (
        "mha_dkv", "fence.proxy", ("mha_dkv.py", 'fence_proxy("async.shared"'), none,
        "missing-proxy-fence",
    ),
    "accumulators are not fenced": (
        "mha_dkv", "wgmma.fence", ("mha_dkv.py", "compat.wgmma_fence()", "def _tile"), none,
        "missing-wgmma-fence",
    ),
}  # fmt: skip


@whole
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_named(bug: str) -> None:
    """Each schedule notices, or most do, and some name it."""
    op, opcode, (file, *where), change, kind = BUGS[bug]
    kernel = loaded(variants(MAIN)[op])
    place = line_of(SOURCES / file, *where)
    found = mutate.matching(kernel.program(kernel.entry), opcode, place)
    assert found, f"no {opcode} at {place}"
    job = GradJob.of(drawn(MAIN, (150, 9), (130, 70), 1, 1, ctas=1))
    stats = job.want_stats().float()
    said: list[str] = []
    for mode, seed in (("late", None), ("early", None), ("random", 0), ("random", 1)):
        changes = {ins.pc: change(ins) for ins in found}
        given = job.of_dq(stats) if op == "mha_dq" else job.of_dkv(stats)
        try:
            with (
                mutate.planted(kernel, kernel.entry, changes),
                using(Options(asynchronous=mode, seed=seed, hazards="raise")),
            ):
                kernel(*(given[name] for name in kernel.names.arguments))
        except SoftGpuError as error:
            said.append(error.kind if isinstance(error, Hazard) else "fault")
    assert kind in said, said


# Of mha_dq, with a key that is NaN and hidden from some rows, in a tile that is not the first.
HIDDEN_BUGS: dict[str, tuple[str, tuple[str, ...], Callable[[Instr], str], str]] = {
    "a tile is not waited for to be clean": (
        "mbarrier.try_wait", (PARTS, "self.clean.wait_full"), granted,
        "race overwrite-in-use",
    ),
    "what is cleared is not fenced": (
        "fence.proxy", ("mha_dq.py", "cute.arch.fence_proxy", "def _look"), none,
        "missing-proxy-fence",
    ),
    "a slot is filled before it is free": (
        "mbarrier.try_wait", (PARTS, "self.moving.wait_empty"), granted, "race",
    ),
}  # fmt: skip


@whole
@pytest.mark.parametrize("bug", HIDDEN_BUGS)
def test_bugs_that_the_workload_misses_are_named(bug: str) -> None:
    """Each instruction by itself; six tiles of keys, two times as many as there are slots."""
    opcode, (file, *where), change, kind = HIDDEN_BUGS[bug]
    job = sick_of(GradJob.of(drawn(MAIN, (150,), (330,), 1, 1, ctas=1)), "a key", 200)
    given = job.of_dq(job.want_stats().float())
    kernel = loaded(variants(MAIN)["mha_dq"])
    place = line_of(SOURCES / file, *where)
    found = mutate.matching(kernel.program(kernel.entry), opcode, place)
    assert found
    for ins in found:
        said = []
        for mode, seed in (("late", None), ("early", None), ("random", 0), ("random", 1)):
            options = Options(asynchronous=mode, seed=seed, hazards="raise")
            try:
                with mutate.planted(kernel, kernel.entry, {ins.pc: change(ins)}), using(options):
                    kernel(*(given[name] for name in kernel.names.arguments))
            except SoftGpuError as error:
                said.append(error.kind if isinstance(error, Hazard) else "fault")
                if said[-1] in kind.split():
                    break
        assert set(said) & set(kind.split()), (ins.text, said)


def numeric(function: Callable[[Tensor], Tensor], x: Tensor, at: Iterable[int]) -> list[float]:
    """Central differences of a scalar function."""
    out = []
    for i in at:
        sides = []
        for step in (1e-5, -1e-5):
            moved = x.clone()
            moved.view(-1)[i] += step
            sides.append(float(function(moved).detach()))
        out.append((sides[0] - sides[1]) / 2e-5)
    return out


def test_the_reference_is_finite_differences() -> None:
    """The truth's own check, once: of q, both parts of K, and v."""
    forward = drawn(MAIN, (5, 3), (7, 2), 2, 2)
    forward = replace(
        forward, q=forward.q[:8].double(), v=forward.v[:9].double(),
        ks=tuple(k[:9].double() for k in forward.ks),
    )  # fmt: skip
    job = GradJob.of(forward)
    job = replace(job, dout=job.dout.double(), dlse=torch.randn(2, 8).double())
    grads = job.truth()
    inputs = {"dq": forward.q, "dk_nope": forward.ks[0], "dk_rope": forward.ks[1], "dv": forward.v}

    def value(name: str) -> Callable[[Tensor], Tensor]:
        def of(x: Tensor) -> Tensor:
            ks = {"dk_nope": (x, forward.ks[1]), "dk_rope": (forward.ks[0], x)}
            changed = replace(
                forward, q=x if name == "dq" else forward.q, v=x if name == "dv" else forward.v,
                ks=ks.get(name, forward.ks),
            )  # fmt: skip
            return job.value(changed)

        return of

    for name, x in inputs.items():
        at = range(0, x.numel(), max(1, x.numel() // 9))
        exact = grads.each[name].reshape(-1)[list(at)].tolist()
        assert numeric(value(name), x.contiguous(), at) == pytest.approx(exact, abs=1e-7), name
