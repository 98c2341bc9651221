"""profiles.engine without vLLM: pruning of libraries, cases, the model in torch, the gates."""

from __future__ import annotations

import json
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.engine import __main__ as commands
from profiles.engine import bring, case, gates, spec, study, truth, v32
from profiles.model.attention import attend_plainly


def entry(kind: int, arch: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(0x1C, b"\0")
    return (head + struct.pack("<I", arch)).ljust(64, b"\0") + code


def fat_binary(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return bring.MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


def test_only_machine_code_of_one_architecture_stays(tmp_path: Path) -> None:
    others = [entry(2, 80, b"a" * 40), entry(1, 90, b"p" * 24), entry(2, 100, b"c" * 8)]
    first = fat_binary(others[0], entry(2, 90, b"keep" * 8), others[1])
    chance = bring.MAGIC + b"\x07\0" * 6  # no header behind it
    whole = b"text" + first + chance + b"data" * 5 + fat_binary(others[2]) + b"end"
    path = tmp_path / "library.so"
    path.write_bytes(whole)
    assert bring.prune(path) == 32
    for gone in (b"a" * 40, b"p" * 24, b"c" * 8):
        whole = whole.replace(gone, bytes(len(gone)))
    assert path.read_bytes() == whole


def test_what_the_engine_imports_is_brought() -> None:
    """Sources, DeepGEMM with the headers that it compiles with, for one Python."""
    gemm = "vllm/third_party/deep_gemm"
    for needed in ("vllm/utils/deep_gemm.py", "vllm/tool_parsers/rust_tool_parser.py",
                   f"{gemm}/__init__.py", f"{gemm}/include/cute/tensor.hpp",
                   f"{gemm}/_C.cpython-312-x86_64-linux-gnu.so"):  # fmt: skip
        assert bring.wanted(needed), needed
    for other in ("vllm/vllm-rs", "vllm/_qutlass_C.abi3.so", "vllm/_rust_tool_parser.abi3.so",
                  f"{gemm}/_C.cpython-313-x86_64-linux-gnu.so"):  # fmt: skip
        assert not bring.wanted(other), other


def test_a_case_survives_its_file(tmp_path: Path) -> None:
    case = spec.Case(name="x", model="m", backend="CUSTOM", timings=("32x128",), rounds=3)
    case.write(tmp_path / "x.json")
    assert spec.Case.read(tmp_path / "x.json") == case


def test_prompts_and_weights_are_the_same_every_time() -> None:
    first = spec.prompts()
    assert first == spec.prompts() and len(first) == spec.LONG + len(spec.SHORT_LENGTHS)
    assert all(len(p) >= spec.LONG_TOKENS for p in first[: spec.LONG])
    assert max(spec.ALONE) < len(first) and min(map(min, first)) >= 2
    one, two = (spec.random_model(1, 2).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(torch.equal(x, x.bfloat16().float()) for x in one.values())


def test_truth_is_the_model_along_given_tokens() -> None:
    """The steps' rows are those of one pass over prompt and tokens; quantised ones differ."""
    model = spec.random_model(2, 2)
    prompts = [[5, 9, 2, 7] * 20, [3, 4]]
    ids = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]
    logs = truth.log_probabilities(model, prompts, ids, attend_plainly)
    for row, prompt, written in zip(logs, prompts, ids, strict=True):
        with torch.no_grad():
            whole = model(torch.tensor([prompt + written[:-1]]), last=5)[0][0].log_softmax(-1)
        torch.testing.assert_close(row, whole, rtol=1e-4, atol=1e-4)
    found = truth.references(model, prompts, ids, torch.device("cpu"))
    kl = {name: truth.divergence(values, found["fp32"])["kl"] for name, values in found.items()}
    assert kl["fp32"] == 0 < kl["bf16"] < kl["fake"] < 0.2
    assert truth.equal_until(ids, [[1, 2, 0, 4, 5], ids[1]]) == [2, 5]


def accuracy(ours: float, alone: list[bool]) -> dict[str, Any]:
    kls = {"fake": 1e-2, "snapmla-eager": ours, "snapmla-invariant": ours}
    rows: dict[str, Any] = {n: {"long": {"kl": kl, "agree": 0.9}} for n, kl in kls.items()}
    rows["snapmla-invariant"] |= {"alone": alone}
    return rows


def speed(**ms: float) -> dict[str, Any]:
    """Of engines over 16 and 128 heads alike."""
    names = {"ours": "snapmla", "bf16": "flashmla_bf16", "fp8": "flashmla_fp8"}
    times = {w.timing for w in gates.WANTED}
    return {
        f"{names[name]}-{heads}": {
            "blocks": 1, "times": {t: {"ms": [9 * x, x, x / 9], "share": {}} for t in times},
        }
        for name, x in ms.items()
        for heads in (16, 128)
    }  # fmt: skip


@pytest.mark.parametrize(
    ("data", "times", "verdicts"),
    [
        ((1.1e-2, [True]), {"ours": 1.0, "bf16": 1.7, "fp8": 1.3}, [True] * 5),
        ((1.2e-2, [True, False]), {"ours": 1.0, "bf16": 1.55, "fp8": 1.22},
         [False, False, False, True, True]),
        ((1e-2, [True]), {"ours": 1.0, "bf16": 1.7, "fp8": 0.9}, [True, True, *[False] * 3]),
        ((1e-2, [True]), {"ours": 1.0, "bf16": 1.45, "fp8": 1.3}, [True, True, False, False, True]),
        ((1e-2, [True]), {"ours": 1.0}, [True, True, *[None] * 3]),
    ],
)  # fmt: skip
def test_gates(data: tuple[float, list[bool]], times: dict[str, float], verdicts: list) -> None:
    found = gates.gates(accuracy(*data), speed(**times))
    assert [gate.passed for gate in found] == verdicts
    page = gates.page(["- here"], accuracy(*data), speed(**times))
    assert page.count("FAILS") >= verdicts.count(False) and "| snapmla-16 | 32x16384 | 1.00" in page


def test_gates_of_nothing_are_not_measured() -> None:
    assert {gate.passed for gate in gates.gates({}, {})} == {None}


# ------------------------------------------------------------------------------- sparse attention


def small(topk: int) -> v32.SparseModel:
    """A DSA model of two layers."""
    config = replace(spec.sparse_config(2, 2), index_topk=topk, index_n_heads=4)
    return spec.filled(v32.SparseModel(config))


def test_an_indexer_chooses_the_best_scores() -> None:
    """Row by row, with scores written out; rows before the first choice see all."""
    n, topk = 40, 9
    model = small(topk)
    indexer, config = model.layers[0].self_attn.indexer, model.config
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, config.hidden_size, generator=generator)
    compressed = torch.randn(n, config.q_lora_rank, generator=generator)
    seen = indexer(x, compressed, torch.arange(n))
    assert seen.sum(1).tolist() == [min(i + 1, topk) for i in range(n)]

    def turned(vector: torch.Tensor, position: int) -> torch.Tensor:
        angle = position * config.rope_theta ** (-torch.arange(32) / 32)
        a, b, rest = vector[:32], vector[32:64], vector[64:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest))

    keys = torch.nn.functional.layer_norm(x @ indexer.wk.weight.T, (128,), eps=1e-6)
    keys = torch.stack([turned(key, j) for j, key in enumerate(keys)])
    for i in (topk, n - 1):
        queries = (indexer.wq_b.weight @ compressed[i]).view(4, 128)
        products = torch.stack([turned(q, i) for q in queries]) @ keys[: i + 1].T
        scores = (indexer.weights_proj.weight @ x[i]) @ products.clamp(min=0)
        assert set(seen[i].nonzero().flatten().tolist()) == set(scores.topk(topk).indices.tolist())


def test_a_choice_of_all_tokens_is_dense_attention() -> None:
    tokens = torch.randint(2, 1024, (1, 30), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        few, (some, _), (every, _) = 8, small(8)(tokens), small(64)(tokens)
        attention = small(64).layers[0].self_attn
        x = torch.randn(1, 30, 512, generator=torch.Generator().manual_seed(6))
        positions = torch.arange(30)
        masked, latents = attention(x, positions, None, None)
        compressed = attention.q_a_layernorm(attention.q_a_proj(x))
        q = attention.q_b_proj(compressed).unflatten(-1, (2, -1))
        dense = attention.expanded(*attention.parts(q, positions), latents)
    torch.testing.assert_close(masked, attention.o_proj(dense.flatten(2)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(some[:, :few], every[:, :few], rtol=1e-4, atol=1e-4)
    assert (some[:, few:] - every[:, few:]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("kernel_cutlass_kernel_dsl_kernelssm90decodeDecode_object_at__TmaqLoaded", "attention"),
        ("kernel_cutlass__merge_tensorptrf16gmemalign16o528i64div5", "attention"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<1>", "attention"),
        ("flash_fwd_mla_combine_kernel", "attention"),
        ("kernel_cutlass_kernel_dsl_kernelssm90index_logitsIndexLogits_object", "indexer"),
        ("kernel_cutlass__select_dsl_kernelssmxxselect_topkSelect_object_at__", "indexer"),
        ("kernel_cutlass_kernel_dsl_kernelssmxxappend_index_kAppendIndexK_object", "indexer"),
        ("void deep_gemm::sm90_fp8_paged_mqa_logits<1u>", "indexer"),
        ("void vllm::persistent::persistent_topk_kernel<4>", "indexer"),
        ("kernel_cutlass__append_kv_Targetkvtensorptri8gmemalign16", "append"),
        ("void vllm::concat_and_cache_ds_mla_kernel<__nv_bfloat16>", "append"),
        ("_convert_req_index_to_global_index_kernel", "rows"),
        ("void cutlass::Kernel2<cutlass_80_wmma_SmemLayoutAtom>", "rest"),
    ],
)
def test_kernels_of_a_step_are_told_apart(kernel: str, part: str) -> None:
    assert case.part_of(kernel) == part
    share = case.share_of({kernel: 3.0, "void at::native::copy": 1.0}, indexer=True)
    assert share["all_us"] == 4.0 and share[f"{part}_us"] == (4.0 if part == "rest" else 3.0)


def sparse_results(kl: float, ratio: float, step: float, alone: list[bool]) -> tuple[Any, Any]:
    """(accuracy, speed) of engines whose attention is ``ratio`` times as fast."""
    kls = {"flashmla_sparse-eager": 1e-2, "snapmla_sparse-eager": kl, "snapmla_sparse-graphs": kl}
    rows: dict[str, Any] = {
        n: {part: {"kl": v, "agree": 0.9} for part in ("long", "short")} for n, v in kls.items()
    }
    rows["snapmla_sparse-invariant"] = rows["snapmla_sparse-eager"] | {"alone": alone}
    speed = {}
    for one in study.sparse_timings(Path(), 4):
        (timing,), ours = one.timings, one.sparse
        us = 100.0 if ours else 100.0 * ratio
        share = {f"{part}_us": us for part in (*case.SPARSE_PARTS, "rest", "all")}
        speed[one.name] = {"blocks": 7, "times": {
            timing: {"ms": [step if ours else 1.0], "share": share if one.profile else {}},
        }}  # fmt: skip
    return rows, speed


@pytest.mark.parametrize(
    ("results", "verdicts"),
    [
        ((1.1e-2, 1.9, 1.0, [True]), [True, True, True, True, True, True, True]),
        ((1.2e-2, 1.7, 1.05, [False]), [False] * 7),
    ],
)
def test_gates_of_sparse_attention(results: Any, verdicts: list[bool]) -> None:
    accuracy, times = sparse_results(*results)
    assert [g.passed for g in gates.sparse_gates(accuracy, times, (4,))] == verdicts
    page = gates.sparse_page(["- here"], accuracy, times, (4, 27))
    assert page.count("not measured") >= 4 and "| snapmla_sparse-4-share-8x131072 | 100" in page
    assert {gate.passed for gate in gates.sparse_gates({}, {}, (4, 27))} == {None}


def test_a_page_is_of_all_calls_of_a_part(tmp_path: Path) -> None:
    """Deep models are timed a shape a call, and the calls' results are one page."""
    told = {name: "x" for name in ("commit", "time", "gpu", "vllm", "torch", "python")}
    share = {f"{part}_us": 100.0 for part in (*case.SPARSE_PARTS, "rest", "all")}
    for timing in spec.SPARSE_TIMINGS:
        cases = study.sparse_timings(tmp_path, 27)
        row = lambda one: {"ms": [1.0], "share": share if one.profile else {}}
        speed = {one.name: {"blocks": 1, "times": {timing: row(one)}}
                 for one in cases if one.timings == (timing,)}  # fmt: skip
        result = {"part": f"sparse-deep-{timing}", "data": {"speed": speed}, "command": "run"}
        (tmp_path / f"sparse-deep-{timing}.json").write_text(json.dumps(result | told))
    judged = {gate.name: gate.passed for gate in commands.report(tmp_path)}
    deep = {name: passed for name, passed in judged.items() if "27 layers" in name}
    assert len(deep) == 4 and None not in deep.values()
    page = (tmp_path / "engine-sparse.md").read_text()
    assert all(f"`run:sparse-deep,--timing,{t}`" in page for t in spec.SPARSE_TIMINGS)


def test_a_case_that_takes_too_long_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine in a process of its own would keep the GPU's memory."""
    program = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); "
        "open(sys.argv[2] + '/child', 'w').write(str(child.pid)); time.sleep(60)"
    )
    monkeypatch.setattr(study, "CASE", (sys.executable, "-c", program))
    slow = spec.Case(name="slow", model="m", backend="CUSTOM")
    assert study.run([[slow]], tmp_path, 4.0) == ["slow: no time was left"]
    child = Path("/proc", (tmp_path / "child").read_text(), "stat")
    for _ in range(100):  # until whoever adopts it has seen its end
        if not child.exists() or child.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child is still there")


def test_every_case_of_a_study_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Results are files of that name, and the timed contexts fit."""
    groups = [*study.sparse_cases(tmp_path), *study.accuracy_cases(tmp_path)]
    cases = [one for group in groups for one in group] + study.speed_cases(tmp_path)
    cases += [one for layers in (4, 27) for one in study.sparse_timings(tmp_path, layers)]
    assert len({one.name for one in cases}) == len(cases)
    for one in cases:
        for timing in one.timings:
            requests, tokens = spec.shape_of(timing)
            room = one.longest - tokens - case.WARM - case.STEPS * one.rounds - case.PROFILED - 60
            assert room >= 2 * requests * tokens // case.CHUNK, one.name
            if one.indexer:
                layers = int(one.name.split("-")[1])
                needed = requests * (tokens + 512) * layers * (656 + 132)
                assert needed <= one.cache_gib * 2**30, one.name
