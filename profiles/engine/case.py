"""One vLLM engine in this process: ``python -m profiles.engine.case CASE.json OUT``.

Continues prompts greedily, or along given tokens (teacher-forced), and keeps the log-probabilities
of every step; times decode steps with the whole batch past its prefill.  Writes ``OUT/NAME.json``,
and ``OUT/NAME.pt`` with tokens and log-probabilities.

``OUT/gate`` is a lock: engines import side by side and run one after another, so that none
disturbs another's times.  Where nothing is timed, lanes have locks of their own
(``OUT/gate-LANE``).
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from codegen.artifacts import write_atomic
from profiles import spans
from profiles.engine.spec import ALONE, NEW_TOKENS, VOCABULARY, Case, shape_of
from snapmla.runtime import env

CHUNK = 32_768  # tokens of a step's prefill
GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
WARM, STEPS, PROFILED = 6, 34, 8
# Kernels of attention over the cache in steps without prefill: ours, FlashMLA's, Triton's,
# FlashAttention-3's, which serves vLLM's FLASH_ATTN_MLA.
ATTENTION = re.compile(
    r"dsl_kernels|mla|splitkv|combine|get_mla_metadata|FlashAttnFwd", re.IGNORECASE
)
# Of a model with an indexer by part, the first that matches: appending, choosing, attention.
SPARSE_PARTS = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "append": r"append_kv|concat_and_cache",
        "indexer": r"index_logits|mqa_logits|top_?k|__rows_tensor|append_index|indexer",
        "rows": r"convert_req_index",
        "attention": r"decode|__merge|splitkv|_mla_|combine_kernel",
    }.items()
}
SETTINGS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


@contextmanager
def alone_on_the_gpu(folder: Path, lane: str = "") -> Iterator[None]:
    """Waits for its turn, in a lane."""
    with (folder / (f"gate-{lane}" if lane else "gate")).open("w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield


def drafting(case: Case) -> dict[str, Any]:
    """Settings of speculative decoding with the model's own draft layer, whose drafts count."""
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": case.drafts}
    if case.draft_backend:
        config["attention_backend"] = case.draft_backend
    return {"speculative_config": config, "disable_log_stats": False}


def connected() -> dict[str, Any]:
    """Settings of prompts that are not read."""
    from vllm.config import KVTransferConfig

    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="RandomRows", kv_role="kv_both",
            kv_connector_module_path="profiles.engine.filled",
        )
    }  # fmt: skip


class Engine:
    """vLLM's ``LLM`` of a case, and what is asked of it."""

    def __init__(self, case: Case) -> None:
        from vllm import LLM

        self.case = case
        self.rows: dict[int, dict[int, Tensor]] = {}  # log-probabilities by request and step
        processors = None if case.own_process or case.drafts else [self._recorder()]
        weights = (Path(case.model) / "model.safetensors").exists()
        self.llm = LLM(
            model=case.model, load_format="auto" if weights else "dummy",
            skip_tokenizer_init=True, dtype="bfloat16", attention_backend=case.backend,
            attention_config={"mla_prefill_backend": case.prefill} if case.prefill else None,
            kv_cache_dtype=case.cache_dtype, max_model_len=case.longest,
            max_num_batched_tokens=CHUNK, max_num_seqs=GRAPH_SIZES[-1],
            enforce_eager=not case.graphs, gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=int(case.cache_gib * 2**30), logits_processors=processors,
            async_scheduling=None if case.own_process else False,
            enable_prefix_caching=case.prefix_caching,
            generation_config="vllm", seed=0,
            compilation_config={
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY" if case.graphs else "NONE",
                "cudagraph_capture_sizes": list(GRAPH_SIZES),
            },
            **(drafting(case) if case.drafts else {"block_size": 64}),
            **(connected() if case.filled else {}),
        )  # fmt: skip

    def _recorder(self) -> type:
        """A processor that keeps the log-probabilities of marked requests, and forces tokens."""
        from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

        rows = self.rows

        class Recorder(AdapterLogitsProcessor):  # type: ignore[misc]
            def is_argmax_invariant(self) -> bool:
                return False

            def new_req_logits_processor(self, params: Any) -> Any:
                asked = params.extra_args or {}
                if "row" not in asked:
                    return None
                kept, force = rows.setdefault(asked["row"], {}), asked.get("force")

                def step(ids: Sequence[int], logits: Tensor) -> Tensor:
                    # by step: a chunk of a prompt is sampled from, too, and thrown away
                    kept[len(ids)] = logits.float().log_softmax(-1).cpu()
                    if force is not None:
                        token = force[min(len(ids), len(force) - 1)]
                        logits.fill_(-torch.inf)[token] = 0.0
                    return logits

                return step

        return Recorder

    def facts(self) -> dict[str, Any]:
        cache = self.llm.llm_engine.vllm_config.cache_config
        return {"blocks": cache.num_gpu_blocks, "block_size": cache.block_size,
                "cache_dtype": str(cache.cache_dtype)}  # fmt: skip

    def continued(
        self, prompts: Sequence[list[int]], force: Sequence[list[int]] | None = None,
        steps: int = NEW_TOKENS,
    ) -> tuple[list[list[int]], Tensor]:  # fmt: skip
        """New tokens of each prompt, and log-probabilities (prompts, steps, vocabulary)."""
        from vllm import SamplingParams, TokensPrompt

        self.rows.clear()
        asked = []
        for i in range(len(prompts)):
            extra: dict[str, Any] = {"row": i}
            if force is not None:
                extra["force"] = force[i]
            asked.append(
                SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True,
                               detokenize=False, extra_args=extra)
            )  # fmt: skip
        given = [TokensPrompt(prompt_token_ids=list(p)) for p in prompts]
        found = self.llm.generate(given, asked, use_tqdm=False)
        ids = [list(each.outputs[0].token_ids) for each in found]
        logs = [torch.stack([self.rows[i][j] for j in range(steps)]) for i in range(len(ids))]
        return ids, torch.stack(logs)

    def step_times(self, timing: str) -> tuple[list[list[float]], dict[str, float]]:
        """Seconds of steps with all requests past their prefill, the case's rounds one behind the
        other; attention's share if asked."""
        from vllm import SamplingParams, TokensPrompt

        requests, tokens = shape_of(timing)
        engine, name = self.llm.llm_engine, f"{timing}-{time.monotonic()}"
        names = [f"{name}-{i}" for i in range(requests)]
        generator = torch.Generator().manual_seed(len(timing))
        steps = WARM + STEPS * self.case.rounds
        longest = steps + PROFILED + 60 + 2 * requests * tokens // CHUNK
        for each in names:
            ids = torch.randint(2, VOCABULARY, (tokens,), generator=generator).tolist()
            engine.add_request(
                each, TokensPrompt(prompt_token_ids=ids),
                SamplingParams(
                    temperature=0.0, max_tokens=longest, ignore_eos=True, detokenize=False
                ),
            )  # fmt: skip
        seen: set[str] = set()
        times: list[float] = []
        last = time.perf_counter()
        while len(times) < steps:
            out = engine.step()
            if not self.case.own_process:
                torch.cuda.synchronize()
            if not out:
                continue
            now = time.perf_counter()
            if len(out) == requests and len(seen) == requests:
                times.append(now - last)
            seen |= {each.request_id for each in out}
            last = now
        share = self._share(engine) if self.case.profile else {}
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        kept = times[WARM:]
        return [kept[i : i + STEPS] for i in range(0, len(kept), STEPS)], share

    def _share(self, engine: Any) -> dict[str, float]:
        """Microseconds of a step by kernel, the largest, and attention's part of all; what kernels
        waited for others (``profiles.spans``) is told apart."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(PROFILED):
                engine.step()
            torch.cuda.synchronize()
        ran = spans.of_profile(profile)
        spent = {name: us / PROFILED for name, us in spans.charged(ran).items()}
        whole = sum(spans.durations(ran).values()) / PROFILED
        return share_of(spent, self.case.indexer) | {"waited_us": whole - sum(spent.values())}

    def close(self) -> None:
        if self.case.own_process:
            self.llm.llm_engine.engine_core.shutdown()


def part_of(kernel: str) -> str:
    """Part of a step that a kernel of a model with an indexer is."""
    return next((part for part, names in SPARSE_PARTS.items() if names.search(kernel)), "rest")


def share_of(spent: dict[str, float], indexer: bool) -> dict[str, float]:
    """Attention's part of a step's kernels, all of them, and the largest.

    Args:
        spent: microseconds of a step by kernel.
        indexer: also the microseconds of ``SPARSE_PARTS``, of which attention is one.
    """
    total = sum(spent.values())
    found = {"all_us": total}
    if indexer:
        for part in (*SPARSE_PARTS, "rest"):
            found[f"{part}_us"] = sum(us for name, us in spent.items() if part_of(name) == part)
        found["attention"] = found["attention_us"] / total
    else:
        attention = sum(us for name, us in spent.items() if ATTENTION.search(name))
        found["attention"] = attention / total
    largest = sorted(spent, key=lambda name: -spent[name])[: 20 if indexer else 10]
    return found | {f"us of {name[:90]}": spent[name] for name in largest}


def run(case: Case, out: Path) -> dict[str, Any]:
    """All that a case asks for."""
    begin = time.monotonic()
    engine = Engine(case)
    result: dict[str, Any] = {"case": case.name, "backend": case.backend} | engine.facts()
    result["engine_seconds"] = round(time.monotonic() - begin, 1)
    if case.study:
        result |= importlib.import_module(f"profiles.engine.{case.study}").measure(engine, out)
    elif case.prompts:
        prompts = json.loads(Path(case.prompts).read_text())
        ids, logs = engine.continued(prompts)
        kept = {"ids": ids, "logs": logs}
        again, logs_again = engine.continued(prompts)
        result["again"] = again == ids and bool(torch.equal(logs_again, logs))
        result["alone"] = []
        for i in ALONE:
            single, single_logs = engine.continued([prompts[i]])
            same = single == [ids[i]] and bool(torch.equal(single_logs[0], logs[i]))
            result["alone"].append(same)
        if case.force:
            wanted = torch.load(case.force)["ids"]
            followed, kept["forced"] = engine.continued(prompts, wanted)
            if followed != wanted:
                raise RuntimeError(f"{case.name}: the given tokens were not followed")
        torch.save(kept, out / f"{case.name}.pt")
    result["times"] = {}
    for timing in case.timings:
        rounds, share = engine.step_times(timing)
        result["times"][timing] = {
            "ms": [round(median(times) * 1e3, 4) for times in rounds],
            "least_ms": round(min(map(min, rounds)) * 1e3, 4),
            "share": share,
        }
    result["seconds"] = round(time.monotonic() - begin, 1)
    engine.close()
    return result


def inspect_here() -> None:
    """Lets vLLM look at a model's class in this process: it starts another one for that, which
    imports all of it anew, 20 to 30 seconds for the target and again for its draft.

    Where the engine has a process of its own this one must not touch the GPU, and it stays so.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def main(case_file: str, out: str) -> None:
    case, folder = Case.read(Path(case_file)), Path(out)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if case.own_process else "0"
    os.environ[env.VLLM_SPARSE.name] = "1" if case.sparse else "0"
    if (switch := getattr(env, "VLLM_FLASHMLA", None)) is not None:  # an older package has none
        os.environ[switch.name] = "1" if case.flashmla else "0"
    os.environ["VLLM_BATCH_INVARIANT"] = "1" if case.batch_invariant else "0"
    from vllm import LLM  # noqa: F401 (30 seconds, before the turn)

    if not case.own_process:
        inspect_here()
    with alone_on_the_gpu(folder, case.lane):
        result = run(case, folder)
        write_atomic(folder / f"{case.name}.json", json.dumps(result, indent=1))
        print(f"{case.name}: done in {result['seconds']} s", flush=True)
        os._exit(0)  # vLLM's threads would hold the process, and the turn


if __name__ == "__main__":
    main(*sys.argv[1:])
