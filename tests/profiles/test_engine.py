"""profiles.engine without vLLM: pruning of libraries, cases, the model in torch, the gates."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from profiles.engine import bring, gates, spec, truth
from profiles.fidelity.attention import attend_plainly


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


def test_python_sources_of_the_release_are_brought() -> None:
    """What is left out is libraries and one package; models import the others' names."""
    for needed in ("vllm/utils/deep_gemm.py", "vllm/tool_parsers/rust_tool_parser.py",
                   "vllm/model_executor/warmup/deep_gemm_warmup.py"):  # fmt: skip
        assert not any(word in needed for word in bring.LEFT_OUT), needed


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
