"""Host time of eager calls: what a layer costs before the GPU has anything to do.

    python -m profiles.host_time --out profiles/results
    python -m profiles.host_time --against DIR        # beside another checkout, in turn
    python -m profiles.host_time --gradients          # dense prefill, recorded by autograd or not

Medians over many calls, each timed alone.  Kinds of calls take turns, because the host's clock and
caches settle for a while.  The device is drained between groups of calls, outside the timed spans,
so that a full launch queue never makes the host wait.

A *step* is what an engine does: each of 61 layers decodes once, over a cache of its own, with a
query object that was just made and a block table that is new with the step; two batch sizes take
turns.  Of its calls the mean counts, as the first ones of a step may take longer, but for the
slowest hundredth.

``--against`` has both checkouts in one process, where their calls of a kind take turns, and starts
five such processes: one process differs from the next by more than a small change costs.  The
difference is the median of the processes' own differences.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from profiles.device import require_cuda

if __name__ == "__main__":
    require_cuda(sys.argv[1:])  # before torch is imported: an answer at once

import torch
import typer

from codegen.artifacts import write_atomic
from profiles import checkouts, contenders, page, timing
from profiles.machine import machine
from profiles.peer_libraries import PeerLibrary

ROUNDS = 10  # turns of every kind of call, after one that is not counted
BATCH, HEADS, LENGTH, PAGE = 32, 16, 1024, 64
PROMPT = 64  # tokens of a dense prefill
GROUP = 8  # calls between two drains
LAYERS, POOL = 61, 64  # of a step: layers, and pages of the cache of each
STEP = "a step of 61 layers, "  # how names of its kinds of calls begin
Call = Callable[[], object]


def timed(call: Call, calls: int) -> list[float]:
    """The host's time in each of ``calls`` calls, in microseconds."""
    times, before = [], getattr(call, "before", None)
    for i in range(calls):
        if before is not None:
            before()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
        if i % GROUP == GROUP - 1:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return times


class Step:
    """The next layer's call of steps that follow one another; ``before`` makes what it is given."""

    def __init__(self, make: Callable[[], Iterator[Call]]) -> None:
        """``make`` gives the calls of a step, each when it is asked for."""
        self._make = make
        self._left: Iterator[Call] = iter(())
        self._next: Call | None = None

    def before(self) -> None:
        """Makes the arguments of the next call, outside of its time."""
        self._next = next(self._left, None)
        if self._next is None:
            self._left = self._make()
            self._next = next(self._left)

    def __call__(self) -> object:
        assert self._next is not None  # ``before`` was called
        return self._next()


def usual(name: str, times: list[float]) -> float:
    """What stands for all calls of a kind: the median; of a step's the mean of all but the slowest
    hundredth, in which the host did something else."""
    if not name.startswith(STEP):
        return statistics.median(times)
    return statistics.fmean(sorted(times)[: -(-len(times) * 99 // 100)])


def cpu_name() -> str:
    """The host processor, as the kernel of the operating system names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"


def calls_to_time(
    snapmla: Any, device: torch.device, inner: bool, peers: Path | None
) -> dict[str, Call]:
    """Name -> call of a ``snapmla`` package; every one runs on the same small problem.

    Args:
        inner: also what another checkout may spell otherwise, such as the exported function alone.
        peers: folder of FlashMLA's library, or None.
    """
    flash_mla_fp8 = importlib.import_module("snapmla.flash_mla_fp8")
    pages = LENGTH // PAGE
    cache = snapmla.PagedKVCache.allocate(BATCH * pages, PAGE, device=device)
    rows = torch.randn(BATCH * LENGTH, 576, device=device).bfloat16()
    slots = torch.arange(BATCH * LENGTH, device=device)
    snapmla.append_kv(cache, rows[:, :512], rows[:, 512:], slots)
    table = torch.arange(BATCH * pages, dtype=torch.int32, device=device).view(BATCH, pages)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device=device)
    x = torch.randn(BATCH, 1, HEADS, 576, device=device).bfloat16()
    nope, rope = x[..., :512], x[..., 512:]
    q = snapmla.quantize_q(nope, rope)
    plan = snapmla.plan_decode(lengths, HEADS, 1, page_size=PAGE, max_pages=pages)
    whole = snapmla.plan_decode(lengths, HEADS, 1, page_size=PAGE, max_pages=pages, num_parts=1)
    out = torch.empty(BATCH, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(BATCH, HEADS, 1, device=device)
    new_c, new_r, new_slots = rows[:BATCH, :512], rows[:BATCH, 512:], slots[:BATCH]

    def decode(**given: Any) -> Call:
        arguments = {"softmax_scale": 0.07, "plan": plan, "out": out, "lse": lse, **given}
        return lambda: snapmla.decode(q, cache, table, lengths, **arguments)

    def bare(split: bool) -> Call:
        query = (q.nope_u8, q.rope, q.row_scale)
        return lambda: snapmla.dense.decode.launch_decode(
            query, cache.arguments, table, lengths, plan.variant, plan.arguments, int(split),
            (out, lse), (0.07, 1, 0.69, 0.0),
        )  # fmt: skip

    alone = {
        "only the exported function (2 launches)": bare(True),
        "only the exported function (1 launch)": bare(False),
    }
    metadata = flash_mla_fp8.get_mla_metadata(lengths, HEADS, 1)
    pool = (cache.content.unsqueeze(2), cache.rope.unsqueeze(2))
    scales = q.scale.unsqueeze(3), cache.scale.view(-1, PAGE, 1, 1)

    def snapmla_name() -> object:
        return flash_mla_fp8.flash_mla_ckv_fp8_per_token(
            q.nope, q.rope, *pool, *scales, table, lengths, 512, *metadata, 0.07, out=out, lse=lse
        )

    return {
        "decode, plan and results given (2 launches)": decode(),
        "the same, of a plan that cannot split (1 launch)": decode(plan=whole),
        "the same, results allocated": decode(out=None, lse=None),
        **(alone if inner else {}),
        **fronts_of_rows(device, peers if inner else None, inner),
        **(decode_rows(snapmla, device) if inner else {}),
        "SnapMLA's name of decode, results given (2 launches)": snapmla_name,
        "plan.update_": lambda: plan.update_(lengths),
        "quantize_q into given tensors": lambda: snapmla.quantize_q(nope, rope, out=q),
        "quantize_q": lambda: snapmla.quantize_q(nope, rope),
        "append_kv": lambda: snapmla.append_kv(cache, new_c, new_r, new_slots),
        "merge_state into given tensors": merge(snapmla, out, lse),
        **steps(snapmla, device),
        "torch: empty kernel launch (out.zero_())": lambda: lse.zero_(),
    }


def merge(snapmla: Any, out: torch.Tensor, lse: torch.Tensor) -> Call:
    """A merge of two results of a decode."""
    parts = [t.clone() for t in (out, lse, out, lse)]
    given = {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}
    return lambda: snapmla.merge_state(*parts, **given)


def steps(snapmla: Any, device: torch.device) -> dict[str, Call]:
    """Steps of an engine, two batch sizes in turn; results are given, or allocated."""
    pages = LENGTH // PAGE
    caches = [snapmla.PagedKVCache.allocate(POOL, PAGE, device=device) for _ in range(LAYERS)]
    for cache in caches:
        cache.content_u8.zero_()
        cache.scale.fill_(1.0)
    shapes = []
    for batch in (BATCH, BATCH * 3 // 4):
        lengths = torch.full((batch,), LENGTH, dtype=torch.int32, device=device)
        plan = snapmla.plan_decode(lengths, HEADS, 1, page_size=PAGE, max_pages=pages)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device) % POOL
        x = torch.randn(batch, 1, HEADS, 576, device=device).bfloat16()
        out = torch.empty(batch, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
        given = {"out": out, "lse": torch.empty(batch, HEADS, 1, device=device)}
        shapes.append((lengths, plan, table.view(batch, pages), x, given))

    def made(results: bool) -> Call:
        turn = itertools.cycle(shapes)

        def calls() -> Iterator[Call]:
            lengths, plan, rows, x, given = next(turn)
            plan.update_(lengths)
            table, options = rows.clone(), given if results else {}
            for cache in caches:
                q = snapmla.quantize_q(x[..., :512], x[..., 512:])
                yield functools.partial(
                    snapmla.decode, q, cache, table, lengths, softmax_scale=0.07, plan=plan,
                    **options,
                )  # fmt: skip

        return Step(calls)

    return {
        STEP + "results given, mean a call": made(True),
        STEP + "results allocated, mean a call": made(False),
    }


def fronts_of_rows(device: torch.device, peers: Path | None, inner: bool) -> dict[str, Call]:
    """FlashMLA's name over a 16-bit cache.

    Args:
        inner: also FlashMLA itself, if ``peers`` has it, and rarer calls.
    """
    pages = LENGTH // PAGE
    kv = torch.randn(BATCH * pages, PAGE, 1, 576, device=device).bfloat16()
    table = torch.arange(BATCH * pages, dtype=torch.int32, device=device).view(BATCH, pages)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device=device)
    q = torch.randn(BATCH, 1, HEADS, 576, device=device).bfloat16()
    out = torch.empty(BATCH, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(BATCH, HEADS, 1, device=device)
    flash_mla = importlib.import_module("snapmla.flash_mla")
    step = (q, kv, table, lengths, 512)
    # a page a sequence: nothing to split, whatever the lengths
    short = (q, kv, table[:, :1].contiguous(), torch.full_like(lengths, PAGE), 512)

    def planned(
        step: tuple[Any, ...], out: torch.Tensor | None = None, lse: torch.Tensor | None = None
    ) -> Call:
        call = flash_mla.flash_mla_with_kvcache
        metadata, _ = flash_mla.get_mla_metadata()  # its own: a step's layers are all of one kind
        return lambda: call(*step, metadata, None, 0.07, out=out, lse=lse)

    found = {
        "FlashMLA's name, a planned object, results given (2 launches)": planned(step, out, lse),
        "FlashMLA's name, a planned object, out given": planned(step, out),
        "FlashMLA's name, a planned object, results allocated": planned(step),
    }
    if not inner:
        return found
    records, splits = flash_mla.get_mla_metadata_tensors(lengths, HEADS, 1)
    return {
        **flashmla_itself(q, kv, table, lengths, peers),
        **found,
        "FlashMLA's name, a planned object of one page a sequence, out given (1 launch)": planned(
            short, out
        ),
        "FlashMLA's name, two tensors, out given (3 launches)": lambda: (
            flash_mla.flash_mla_with_kvcache(*step, records, splits, 0.07, out=out)
        ),
    }


def decode_rows(snapmla: Any, device: torch.device) -> dict[str, Call]:
    """The same problem over a 16-bit cache by our own name."""
    pages = LENGTH // PAGE
    kv = torch.randn(BATCH * pages, PAGE, 1, 576, device=device).bfloat16()
    cache = snapmla.PagedKVCache.from_tensors(kv)
    table = torch.arange(BATCH * pages, dtype=torch.int32, device=device).view(BATCH, pages)
    lengths = torch.full((BATCH,), LENGTH, dtype=torch.int32, device=device)
    q = torch.randn(BATCH, 1, HEADS, 576, device=device).bfloat16()
    plan = snapmla.plan_decode(
        lengths, HEADS, 1, page_size=PAGE, max_pages=pages, cache_dtype=torch.bfloat16
    )
    out = torch.empty(BATCH, 1, HEADS, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(BATCH, HEADS, 1, device=device)
    given = {"softmax_scale": 0.07, "plan": plan}
    return {
        "decode of a 16-bit cache, plan and results given (2 launches)": lambda: snapmla.decode(
            q, cache, table, lengths, out=out, lse=lse, **given
        ),
        "the same of 16 bits, results allocated": lambda: snapmla.decode(
            q, cache, table, lengths, **given
        ),
    }


def flashmla_itself(
    q: torch.Tensor,
    kv: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    peers: Path | None,
) -> dict[str, Call]:
    """FlashMLA's own call, planned before, which allocates; none, and why, if it is not there."""
    flashmla = contenders.make("flashmla_bf16", peers)
    assert isinstance(flashmla, PeerLibrary)
    if (reason := flashmla.unavailable()) is not None:
        typer.echo(f"FlashMLA itself is left out: {reason}")
        return {}
    flashmla.load()
    op = torch.ops._flashmla_C.dense_decode_fwd
    step = (q, kv, 512, lengths, table, 0.07, False)
    _, _, records, splits = op(*step, None, None, None)
    return {"FlashMLA's own operator, planned": lambda: op(*step, records, splits, None)}


def prefill_calls(device: torch.device) -> dict[str, Call]:
    """Dense prefill of a short prompt, and gradients of it, by name; autograd must be on.

    A backward has a forward of its own, which is called and recorded outside of its time.
    """
    mha: Any = importlib.import_module("snapmla.mha")
    tokens, bf16 = PROMPT, torch.bfloat16
    q, kv = (torch.randn(tokens, HEADS, x, device=device, dtype=bf16) for x in (192, 256))
    rope = torch.randn(tokens, 1, 64, device=device, dtype=bf16)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    where, named = (cu, cu, tokens, tokens), {"k_rope": rope}
    rows = (q, kv[..., :128], kv[..., 128:])
    leaves = [x.detach().clone().requires_grad_() for x in (*rows, rope)]

    def recorded() -> Any:
        return mha.mha_prefill(*leaves[:3], *where, k_rope=leaves[3])

    out, lse = mha.mha_prefill(*rows, *where, **named)
    dout = torch.randn_like(out)
    given = (dout, *rows, out, lse, *where)
    names = ("dq", "dk_nope", "dk_rope", "dv")
    into = dict(zip(names, mha.mha_prefill_backward(*given, **named)))
    words = mha.backward_workspace_size(tokens, tokens, 1, HEADS, HEADS)
    into["workspace"] = torch.empty(words, dtype=torch.int32, device=device)

    def backwards() -> Iterator[Call]:
        while True:
            made, _ = recorded()
            yield functools.partial(torch.autograd.grad, made, leaves, dout)

    return {
        "mha_prefill (2 launches)": lambda: mha.mha_prefill(*rows, *where, **named),
        "mha_prefill, recorded by autograd": recorded,
        "its backward by autograd (9 launches)": Step(backwards),
        "mha_prefill_backward (5 launches)": lambda: mha.mha_prefill_backward(*given, **named),
        "mha_prefill_backward, all memory given": lambda: mha.mha_prefill_backward(
            *given, **named, **into
        ),
        "torch: empty kernel launch (lse.zero_())": lambda: lse.zero_(),
    }


def measure(
    calls: int, peers: Path | None = None, gradients: bool = False
) -> dict[str, list[float]]:
    """Name -> times of all its calls, of our package."""
    device = torch.device("cuda")
    with torch.inference_mode(not gradients):
        package: Any = importlib.import_module("snapmla")
        kinds = (
            prefill_calls(device) if gradients else calls_to_time(package, device, True, peers)
        )  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name in kinds}
        for turn in range(ROUNDS + 1):
            for name, call in kinds.items():
                new = timed(call, calls // ROUNDS)
                times[name] += new if turn else []
    return times


def measure_both(calls: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Name -> (old, new), what stands for all calls of a kind that both packages have."""
    device, times = torch.device("cuda"), {}
    with torch.inference_mode():
        with checkouts.Checkout(folder).active() as package:
            old = calls_to_time(package, device, False, None)
            for call in old.values():
                timed(call, 1)  # imports and loads
        new = calls_to_time(importlib.import_module("snapmla"), device, False, None)
        for turn in range(ROUNDS + 1):
            for name in (name for name in new if name in old):
                pair = times.setdefault(name, ([], []))
                for side in (0, 1) if turn % 2 else (1, 0):
                    found = timed((old, new)[side][name], calls // ROUNDS)
                    pair[side].extend(found if turn else [])
    return {name: (usual(name, a), usual(name, b)) for name, (a, b) in times.items()}


def _both_apart(calls: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Name -> (old, new), measured by a fresh process."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "medians.json"
        command = [sys.executable, "-m", "profiles.host_time", "--calls", str(calls)]
        command += ["--child", str(target), "--against", str(folder)]
        subprocess.run(command, check=True)
        return {name: tuple(pair) for name, pair in json.loads(target.read_text()).items()}


def alternate(calls: int, folder: Path, turns: int) -> list[str]:
    """Rows of the table of both checkouts: medians over ``turns`` processes."""
    runs = [_both_apart(calls, folder) for _ in range(turns)]
    head = "| eager call | old, host µs | new, host µs | new - old | of the processes |"
    lines = [head, "|---|---|---|---|---|"]
    for name in runs[0]:
        old, new = (statistics.median(run[name][side] for run in runs) for side in (0, 1))
        more = sorted(run[name][1] - run[name][0] for run in runs)
        spread = f"{more[0]:+.2f} to {more[-1]:+.2f}"
        lines.append(
            f"| {name} | {old:.2f} | {new:.2f} | {statistics.median(more):+.2f} | {spread} |"
        )
    return lines


def _rows(calls: int, peers: Path | None, gradients: bool) -> list[str]:
    lines = ["| eager call | host µs, median | 90th percentile |", "|---|---|---|"]
    for name, values in measure(calls, peers, gradients).items():
        late = sorted(values)[len(values) * 9 // 10]
        lines.append(f"| {name} | {usual(name, values):.2f} | {late:.2f} |")
    return lines


def main(
    out: Annotated[Path, typer.Option(help="Folder of the table.")] = Path("build/bench"),
    calls: Annotated[int, typer.Option(help="Calls timed of each kind.")] = 2000,
    against: Annotated[Path | None, typer.Option(help="Another checkout, timed in turn.")] = None,
    turns: Annotated[int, typer.Option(help="Processes with both checkouts.")] = 5,
    peers: Annotated[
        Path | None, typer.Option(envvar="SNAPMLA_PEERS", help="Folder of the peers' libraries.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option(help="Dense prefill and its gradients instead.")
    ] = False,
    child: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Times the calls and writes ``host_time.md`` (``host_time_against.md``; of gradients a page of
    their own)."""
    if child is not None:
        assert against is not None  # ``_both_apart`` gave it
        write_atomic(child, json.dumps(measure_both(calls, against)))
        return
    if gradients and against is not None:
        raise typer.BadParameter("expected no --against beside it", param_hint="--gradients")
    rows = _rows(calls, peers, gradients) if against is None else alternate(calls, against, turns)
    facts = machine(torch.device("cuda"), timing.Nvml())
    named = ("gpu", "driver", "cuda", "torch", "tvm_ffi", "python")
    problem = f"b {BATCH}, {HEADS} heads, {LENGTH} tokens"
    if gradients:
        problem = f"a prompt of {PROMPT} tokens, {HEADS} heads of 192/128 channels"
    notes = [f"{problem}; {calls} calls of each kind, one by one"]
    if against is not None:
        other = checkouts.Checkout(against).commit
        notes.append(f"old: commit {other}; medians of {turns} processes, in each both in turn")
    where = f"{page.told(facts, named)}, {cpu_name()}"
    lines = page.head("host_time", "profiles.host_time", where, *notes)
    typer.echo("\n".join(rows))
    name = f"host_time{'_gradients' if gradients else '' if against is None else '_against'}.md"
    write_atomic(out / name, "\n".join([*lines, *rows, ""]))


if __name__ == "__main__":
    typer.run(main)
