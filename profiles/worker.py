"""The process that touches the GPU: runs rows one by one and reports each as it is done.

``profiles.bench`` starts it, watches its event file and, should a kernel hang or take the CUDA
context down, starts another one that leaves the culprit out.  Events are JSON lines:

    {"kind": "start", "job": .., "backend": .., "stage": ..}   what is about to happen, to whom
    {"kind": "ceilings" | "machine" | "power", ...}
    {"kind": "job", "job": .., "rows": [..]}                    a finished row of all contenders
    {"kind": "end"}
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from profiles import ceilings, contenders, helper_rows, power, timing
from profiles.check import Check, Truth, check_decode, decode_truth, mimic_gate
from profiles.decode_row import SOFTMAX_SCALE, Contender, Entry, Problem
from profiles.machine import machine
from profiles.pools import CHUNK_TOKENS, Latents, Pool, fill
from profiles.roofline import FORMATS
from profiles.shapes import DecodeShape, HelperShape, Shape, parse
from profiles.supervise import RunConfig

POOL_GRAIN = 128  # tokens; a multiple of every page size


def timing_config(overrides: dict[str, float]) -> timing.TimingConfig:
    """TimingConfig with integers where it wants integers."""
    kinds = {f.name: f.type for f in dataclasses.fields(timing.TimingConfig)}
    values = {k: int(v) if kinds[k] == "int" else float(v) for k, v in overrides.items()}
    return timing.TimingConfig(**values)  # type: ignore[arg-type]


class Worker:
    """Runs a config's rows; every result goes out as an event at once."""

    def __init__(self, config: RunConfig, sink: TextIO) -> None:
        self.config, self.sink = config, sink
        self.cuda = config.device.startswith("cuda")
        self.device = torch.device(config.device)
        self.timing = timing_config(config.timing)
        self.latents = Latents(**config.latents)  # type: ignore[arg-type]
        self.shapes = [parse(label) for label in config.shapes]
        self.nvml = timing.Nvml() if self.cuda else None
        self.flush: timing.L2Flush | None = None
        self.meter: power.Meter | None = None
        self.pools: dict[tuple[Any, ...], Pool] = {}

    def emit(self, kind: str, **fields: Any) -> None:
        """Writes one event line."""
        self.sink.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.sink.flush()

    def run(self) -> None:
        """All rows, in order."""
        self.emit("machine", **machine(self.device, self.nvml))
        if self.cuda:
            torch.cuda.init()
            torch.backends.cuda.matmul.allow_tf32 = False
        if self.cuda and self.config.probe and self.nvml is not None:
            self.emit("start", job="ceilings", backend="", stage="probe")
            best, probes, notes = ceilings.probe(self.nvml, self.config.quick)
            self._emit_probes("ceilings", best, probes, notes)
        with contextlib.ExitStack() as stack:
            if self.cuda and self.config.power and self.nvml is not None:
                self._start_meter(self.nvml, stack)
            self._jobs()
        self.emit("end")

    def _start_meter(self, nvml: timing.Nvml, stack: contextlib.ExitStack) -> None:
        """Power from now on; what bytes and FLOP cost first."""
        self.emit("start", job="ceilings", backend="", stage="power")
        try:
            self.meter = stack.enter_context(power.open_meter(nvml).running())
        except ValueError as error:
            self._emit_probes("power", None, [], [str(error)])
            return
        best, probes, notes = power.probe(self.meter) if self.config.probe else (None, [], [])
        self._emit_probes("power", best, probes, [f"power: {self.meter.source}", *notes])

    def _emit_probes(
        self, kind: str, best: Any, probes: Sequence[ceilings.Probe], notes: list[str]
    ) -> None:
        self.emit(
            kind,
            best=dataclasses.asdict(best) if best else None,
            probes=[dataclasses.asdict(p) for p in probes],
            notes=notes,
        )

    def _jobs(self) -> None:
        if self.cuda:
            self.flush = timing.L2Flush(self.device)
        names = self.config.backends
        peers = Path(self.config.peers) if self.config.peers else None
        entrants = [contenders.make(n, peers) for n in names]
        self._make_pools(entrants)
        for shape in self.shapes:
            if isinstance(shape, DecodeShape):
                rows = self._decode_job(shape, entrants)
            else:
                rows = self._helper_job(shape)
            self.emit("job", job=shape.label, rows=rows)
            gc.collect()
            if self.cuda:
                torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------ decode rows

    def _buffers(self, shape: DecodeShape) -> int:
        smallest = min(f.token_bytes for f in FORMATS.values())
        return timing.buffer_count(shape.tokens * smallest, self.timing)

    def _pool_tokens(self) -> int:
        most = 0
        for shape in self.shapes:
            if isinstance(shape, DecodeShape):
                padded = sum(-(-n // POOL_GRAIN) * POOL_GRAIN for n in shape.lengths())
                most = max(most, padded * self._buffers(shape))
        return most

    def _make_pools(self, entrants: Sequence[Contender]) -> None:
        tokens = self._pool_tokens()
        if not tokens:
            return
        self.emit("start", job="pools", backend="", stage=f"fill {tokens} tokens")
        for entrant in entrants:
            banned = self.config.ban_reason("*", entrant.name)
            if banned or entrant.unavailable() or entrant.pool_key() in self.pools:
                continue
            self.pools[entrant.pool_key()] = entrant.make_pool(tokens, self.device)
        assert CHUNK_TOKENS % POOL_GRAIN == 0
        fill(self.pools.values(), tokens, self.latents, self.device)
        self._sync()

    def _problem(self, shape: DecodeShape) -> Problem:
        rng = torch.Generator(device=self.device).manual_seed(11)
        query = torch.randn(
            shape.batch, shape.s_q, shape.num_heads, 576, generator=rng, device=self.device
        ).bfloat16()
        lengths = torch.tensor(shape.lengths(), dtype=torch.int32, device=self.device)
        tables: dict[int, list[torch.Tensor]] = {}
        for page in {pool.page_size for pool in self.pools.values()}:
            pages = -(-lengths.long() // page)
            used = torch.arange(int(pages.max()), device=self.device) < pages[:, None]
            count = int(pages.sum())
            tables[page] = []
            for i in range(self._buffers(shape)):
                order = torch.randperm(count, generator=rng, device=self.device) + i * count
                table = torch.zeros(used.shape, dtype=torch.int32, device=self.device)
                table[used] = order.int()
                tables[page].append(table)
        return Problem(shape, query, lengths, tables)

    def _decode_job(
        self, shape: DecodeShape, entrants: Sequence[Contender]
    ) -> list[dict[str, Any]]:
        problem = self._problem(shape)
        rows: dict[str, dict[str, Any]] = {}
        loops: list[timing.Loop] = []
        for entrant in entrants:
            row: dict[str, Any] = {"backend": entrant.name, "peer": entrant.peer}
            rows[entrant.name] = row
            banned = self.config.ban_reason(shape.label, entrant.name)
            reason = banned or entrant.unavailable() or entrant.refuses(shape)
            if reason:
                row.update(status="failed" if banned else "skipped", note=reason)
                continue
            pool = self.pools[entrant.pool_key()]
            row.update(format=pool.fmt.name, out_bytes=entrant.out_bytes)
            try:
                self._start(shape, entrant.name, "prepare")
                entry = entrant.enter(problem, pool)
                row["kernel"] = entry.note
                self._start(shape, entrant.name, "check")
                result = self._check(problem, entrant, entry, pool)
                row.update(_check_fields(result))
                self._start(shape, entrant.name, "capture")
                loops.append(timing.make_loop(entrant.name, entry.calls, self.timing, self.cuda))
            except Exception as error:
                row.update(status="failed", note=_short(error))
                self._raise_if_context_lost()
        self._start(shape, "", "time")
        self._finish(rows, loops)
        if self.meter is not None:
            for loop in loops:
                self._start(shape, loop.name, "alone")
                rows[loop.name].update(self._alone(loop, self.meter))
        return list(rows.values())

    def _alone(self, loop: timing.Loop, meter: power.Meter) -> dict[str, Any]:
        try:
            solo = power.alone(loop, meter, power.ROW_SECONDS)
        except ValueError as error:  # no reading: the row keeps its time
            return {"note": f"power: {error}"}
        return {f"alone_{key}": value for key, value in dataclasses.asdict(solo).items()}

    def _check(self, problem: Problem, entrant: Contender, entry: Entry, pool: Pool) -> Check:
        """Runs the very calls that are timed, first and last buffer, on poisoned outputs."""
        shape, page = problem.shape, pool.page_size
        requests = sorted({0, shape.batch - 1})
        lengths, queries = shape.lengths(), shape.query_tokens()
        worst: Check | None = None
        for index in sorted({0, len(entry.calls) - 1}):
            for tensor in entry.outputs:
                tensor.fill_(float("nan"))
            out, lse = entry.calls[index]()
            self._sync()
            truths: dict[int, Truth] = {}
            gates: dict[int, float] = {}
            for request in requests:
                table = problem.tables[page][index][request].long()

                def keys(begin: int, end: int, table: torch.Tensor = table) -> torch.Tensor:
                    position = torch.arange(begin, end, device=self.device)
                    return pool.load(table[position // page] * page + position % page)

                tokens = queries[request] if entry.packed else shape.s_q
                truth = truths[request] = decode_truth(
                    entry.query[request][-tokens:], keys, lengths[request],
                    SOFTMAX_SCALE,
                )  # fmt: skip
                gates[request] = entrant.gate
                if entry.mimic is not None:
                    gates[request] = mimic_gate(entry.mimic(index, request)[-tokens:], truth)
            if entry.packed:
                result = check_decode(
                    *unpacked(out, lse, queries, requests), truths, gates, entrant.strict_lse
                )
            else:
                result = check_decode(out, lse, truths, gates, entrant.strict_lse)
            if worst is None or (not result.ok, result.error) > (not worst.ok, worst.error):
                worst = result
        assert worst is not None
        return worst

    # ------------------------------------------------------------------------------ helper rows

    def _helper_job(self, shape: HelperShape) -> list[dict[str, Any]]:
        culprit = f"snapmla {shape.op}"  # who is blamed: not the decode of the same name
        rows: dict[str, dict[str, Any]] = {}
        loops: list[timing.Loop] = []
        failed: dict[str, Any] = {"backend": "snapmla", "peer": False, "status": "failed"}
        banned = self.config.ban_reason(shape.label, culprit)
        if banned:
            return [{**failed, "note": banned}]
        self._start(shape, culprit, "prepare")
        try:
            helpers = helper_rows.build(shape, self.timing, self.device)
        except Exception as error:
            self._raise_if_context_lost()
            return [{**failed, "note": _short(error)}]
        for helper in helpers:
            row: dict[str, Any] = {"backend": helper.name, "peer": helper.peer}
            rows[helper.name] = row
            who = helper.name if helper.peer else culprit
            banned = self.config.ban_reason(shape.label, who)
            if banned:
                row.update(status="failed", note=banned)
                continue
            try:
                self._start(shape, who, "check")
                row.update(_check_fields(helper.check()))
                self._start(shape, who, "capture")
                loops.append(timing.make_loop(helper.name, helper.calls, self.timing, self.cuda))
            except Exception as error:
                row.update(status="failed", note=_short(error))
                self._raise_if_context_lost()
        self._start(shape, "", "time")
        self._finish(rows, loops)
        return list(rows.values())

    # ------------------------------------------------------------------------------ common parts

    def _finish(self, rows: dict[str, dict[str, Any]], loops: list[timing.Loop]) -> None:
        results = timing.interleave(loops, self.timing, self.nvml, self.flush)
        for name, result in results.items():
            rows[name].update(dataclasses.asdict(result))
            rows[name]["status"] = "ok" if rows[name]["check_ok"] else "wrong"

    def _start(self, shape: Shape, backend: str, stage: str) -> None:
        self.emit("start", job=shape.label, backend=backend, stage=stage)

    def _sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _raise_if_context_lost(self) -> None:
        """After an illegal access nothing works any more: leave, so that a new process goes on."""
        self._sync()


def unpacked(
    out: torch.Tensor, lse: torch.Tensor, queries: Sequence[int], requests: Sequence[int]
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Results of ``requests`` from packed ``out`` (total, h, 512) and ``lse`` (h, total)."""
    spans = {i: slice(sum(queries[:i]), sum(queries[: i + 1])) for i in requests}
    return {i: out[at] for i, at in spans.items()}, {i: lse[:, at] for i, at in spans.items()}


def _check_fields(result: Check) -> dict[str, Any]:
    return {
        "check_ok": result.ok,
        "error": result.error,
        "lse_error": result.lse_error,
        "note": result.text,
    }


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines()[:4])}"[:500]


def main(config_path: str, events_path: str) -> None:
    """Entry point of the child process."""
    config = RunConfig(**json.loads(Path(config_path).read_text()))
    with open(events_path, "a", encoding="utf-8") as sink, torch.inference_mode():
        Worker(config, sink).run()


if __name__ == "__main__":
    main(*sys.argv[1:3])
