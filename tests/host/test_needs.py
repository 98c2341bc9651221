"""Which kernels a model needs: those that its calls ask for, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import snapmla
from codegen import matrix
from dsl_kernels.spec import VariantSpec
from snapmla import __main__ as commands
from snapmla import dispatch, flash_mla, runtime
from snapmla.dispatch import Model
from snapmla.dispatch.needs import SPARSE_TOKENS
from snapmla.dispatch.sparse_decode import REFERENCE

BATCH, TOKENS = 2, 3
TABLE = torch.zeros(BATCH, 2, dtype=torch.int32)
LENGTHS = torch.tensor([1, 2], dtype=torch.int32)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
INTS = {"i32": torch.int32, "i64": torch.int64}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the variants that calls ask for; what they get does nothing."""
    found: set[str] = set()

    def kernel(spec: VariantSpec, device_type: str) -> Any:
        found.add(spec.name)
        return lambda *arguments: None

    runtime.forget()
    monkeypatch.setattr(runtime, "kernel", kernel)
    yield found
    runtime.forget()


def step(model: Model) -> None:
    """The calls of a model's steps, over CPU tensors."""
    fp8, dtype = model.dtype in ("fp8", "fp8_ds_mla"), DTYPES[model.rows]
    held = "fp8" if fp8 else DTYPES[model.dtype]
    for page in model.pages:
        if model.dtype == "fp8_ds_mla":
            pool = torch.zeros(4, page, 1, 656, dtype=torch.uint8)
            cache = snapmla.PagedKVCache.from_tensors(pool, format=model.dtype)
        else:
            cache = snapmla.PagedKVCache.allocate(
                4, page, device="cpu", dtype=held, num_kv_heads=model.kv_heads
            )
        for index in map(INTS.__getitem__, model.indices):
            append(model, cache, dtype if fp8 else held, index)
        if model.prefill:
            fetch(model, cache, dtype if fp8 else held)
        for heads in model.heads:
            for s_q, batch in itertools.product(
                model.s_q, SPARSE_TOKENS if model.sparse else (BATCH,)
            ):
                q = torch.zeros(batch, s_q, heads, 576, dtype=dtype if fp8 else held)
                decode(model, cache, q)


def turning(model: Model, count: int, index: torch.dtype) -> tuple[Any, ...]:
    return torch.zeros(count, dtype=index), torch.zeros(8, 64, dtype=DTYPES[model.table])


def append(model: Model, cache: Any, dtype: torch.dtype, index: torch.dtype) -> None:
    rows = torch.zeros(TOKENS, model.kv_heads, 576, dtype=dtype)
    rows = rows if model.kv_heads > 1 else rows[:, 0]
    c_kv, k_rope = rows[..., :512], rows[..., 512:]
    slots = torch.arange(TOKENS, dtype=index)
    if model.rope == dispatch.PLAIN:
        snapmla.append_kv(cache, c_kv, k_rope, slots)
        return
    weight = torch.ones(512, dtype=dtype) if model.norm else None
    snapmla.rope_append_kv(
        cache, c_kv, k_rope, slots, *turning(model, TOKENS, index), norm_weight=weight,
        is_neox=model.rope == "neox",
    )  # fmt: skip


def fetch(model: Model, cache: Any, dtype: torch.dtype) -> None:
    snapmla.fetch_dequant(cache, TABLE, LENGTHS, dtype=dtype)
    begin = torch.tensor([0, 1, 3], dtype=torch.int32)
    snapmla.fetch_dequant(cache, TABLE, cu_seqlens=begin, total=3, dtype=dtype)
    for index in map(INTS.__getitem__, model.indices):
        snapmla.fetch_dequant(cache, torch.arange(2, dtype=index), dtype=dtype)


def decode(model: Model, cache: Any, q: torch.Tensor) -> None:
    s_q, heads = q.shape[1:3]
    query: Any = q
    if model.dtype == "fp8" and model.rope == dispatch.PLAIN:
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    elif model.dtype == "fp8":
        for index in map(INTS.__getitem__, model.indices):
            given = turning(model, len(q) * s_q, index)
            neox = model.rope == "neox"
            query = snapmla.rope_quantize_q(q[..., :512], q[..., 512:], *given, is_neox=neox)
    if model.sparse:
        sparse_decode(model, cache, query)
        return
    held = "fp8" if model.dtype == "fp8" else DTYPES[model.dtype]
    plan = snapmla.plan_decode(
        LENGTHS, heads, s_q, page_size=cache.page_size, max_pages=2, accuracy=model.accuracy,
        cache_dtype=held, num_kv_heads=model.kv_heads,
    )  # fmt: skip
    out_dtype = DTYPES[model.out] if model.dtype == "fp8" else None
    out, lse = snapmla.decode(
        query, cache, TABLE, LENGTHS, softmax_scale=1.0, plan=plan, out_dtype=out_dtype
    )
    merge(model, out, lse)


def sparse_decode(model: Model, cache: Any, query: Any) -> None:
    batch, s_q, heads = (query if isinstance(query, torch.Tensor) else query.rope).shape[:3]
    topk = REFERENCE.seqlen
    if model.dtype == "bf16":
        for width in (64, 128):  # pieces, and none
            plan = snapmla.plan_sparse_decode(
                heads, s_q, topk=128, batch=batch, device="cpu", cache_dtype="bf16",
                fixed_split_tokens=width,
            )  # fmt: skip
            indices = torch.zeros(batch, s_q, 128, dtype=torch.int32)
            found = snapmla.decode(query, cache, indices=indices, softmax_scale=1.0, plan=plan)
            merge(model, *found)
        return
    plan = snapmla.plan_sparse_decode(
        heads, s_q, topk=topk, batch=batch, device="cpu", accuracy=model.accuracy,
        cache_dtype=cache.format,
    )  # fmt: skip
    indices = torch.zeros(batch, s_q, topk, dtype=torch.int32)
    out, lse = snapmla.decode(
        query, cache, indices=indices, softmax_scale=1.0, plan=plan, out_dtype=DTYPES[model.out]
    )
    merge(model, out, lse)


def merge(model: Model, out: torch.Tensor, lse: torch.Tensor) -> None:
    if model.merge:
        snapmla.merge_state(out, lse, out.clone(), lse.clone())
        snapmla.merge_states([out, out.clone(), out.clone()], [lse, lse.clone(), lse.clone()])
        snapmla.merge_states(torch.stack([out] * 3), torch.stack([lse] * 3))


@pytest.mark.parametrize(
    "model",
    [
        Model((16, 128), s_q=(1, 2)),
        Model((64,), pages=(16, 128), out="f32", rows="f16", merge=True),
        Model((8,), accuracy="high", pages=(32,), prefill=True, merge=True),
        Model((16,), rope="neox", norm=True, table="bf16", indices=("i64",)),
        Model((16,), rope="interleaved", rows="f32", indices=("i32",)),
        Model((16, 32), s_q=(3,), dtype="bf16", pages=(64, 320), prefill=True),
        Model((64,), dtype="bf16", kv_heads=4, indices=("i64",)),
        Model((128,), dtype="f16", pages=(16,), indices=("i32",)),
        Model((16, 128), s_q=(1, 2), sparse=True, prefill=True),
        Model((64,), sparse=True, accuracy="high", out="f32", rope="neox", indices=("i64",)),
        Model((8, 20), dtype="fp8_ds_mla", pages=(53,), sparse=True, prefill=True, merge=True),
        Model((16, 20, 128), dtype="bf16", sparse=True, merge=True),
        Model(
            (128,),
            dtype="fp8_ds_mla",
            sparse=True,
            rope="interleaved",
            norm=True,
            indices=("i64",),
        ),
    ],
    ids=lambda model: f"{model.dtype}-{model.heads}-{model.rope}{'-sparse' * model.sparse}",
)
def test_it_needs_what_its_calls_ask_for(asked: set[str], model: Model) -> None:
    step(model)
    names = [spec.name for spec in dispatch.needs(model)]
    assert set(names) == asked and len(names) == len(asked)
    pattern = ",".join(names)
    assert matrix.no_match("sm_90a", pattern) is None
    found = matrix.matrix("sm_90a", pattern, ask_kernels=False)
    assert {point.spec.name for point in found} == asked, "what FILTER= builds of it"


def test_flash_mla_needs_its_records(asked: set[str]) -> None:
    model = Model((16,), dtype="bf16", flash_mla=True)
    step(model)
    metadata, splits = flash_mla.get_mla_metadata(LENGTHS, 16, 1)
    cache = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)
    q = torch.zeros(BATCH, 1, 16, 576, dtype=torch.bfloat16)
    flash_mla.flash_mla_with_kvcache(q, cache, TABLE, LENGTHS, 512, metadata.clone(), splits)
    assert {spec.name for spec in dispatch.needs(model)} == asked


def test_sparse_decode_needs_no_records() -> None:
    """FlashMLA's names plan it without any."""
    model = Model((16,), dtype="fp8_ds_mla", flash_mla=True, sparse=True)
    assert not [spec for spec in dispatch.needs(model) if "records" in spec.name]


def test_another_architecture() -> None:
    names = [spec.name for spec in dispatch.needs(Model((16,), arch="sm_100a"))]
    assert names[-1] == "decode_ws_r64_p64_obf16_sm100a"
    assert all(name.endswith("_sm100a") for name in names)
    dense = [spec.name for spec in dispatch.needs(Model((16,), dtype="f16", arch="sm_100a"))]
    assert dense[-1] == "dense_decode_ws_r64_p64_df16_sm100a"


def command(*words: str) -> Any:
    return CliRunner().invoke(commands.app, ["needs", *words])


def test_the_command() -> None:
    done = command("--heads", "16", "--heads", "128", "--page", "64", "--index", "i64")
    assert done.exit_code == 0 and done.output.splitlines() == [
        "plan_decode_sm90a", "append_kv_xbf16_ii64_sm90a", "quantize_q_xbf16_token_head_sm90a",
        "decode_etap_r16_p64_obf16_sm90a", "decode_etap_r128_p64_obf16_sm90a",
    ]  # fmt: skip
    line = command("--heads", "16", "--heads", "128", "--index", "i64", "--filter").output
    assert line == ",".join(done.output.splitlines()) + "\n"
    neox = command("--heads", "16", "--rope", "neox").output
    assert "ii64_neox" in neox and "ii32" not in neox, "what engines call RoPE with"


def test_a_config_says_whether_decode_is_sparse(tmp_path: Path) -> None:
    """By the indexer's topk, wherever the language model's part is."""
    path, words = tmp_path / "config.json", ("--heads", "128", "--index", "i64", "--config")
    want = command("--heads", "128", "--index", "i64", "--sparse").output
    assert want.splitlines()[-1] == "sparse_decode_etap_r64_obf16_sm90a"
    for text, sparse in (
        ('{"index_topk": 2048}', True), ('{"text_config": {"index_topk": 2048}}', True),
        ('{"index_topk": null}', False), ("{}", False),
    ):  # fmt: skip
        path.write_text(text)
        done = command(*words, str(path))
        assert done.exit_code == 0 and (done.output == want) == sparse, text
    for text, message in (("{", "is no JSON: "), ("[]", "config: expected a JSON object, got")):
        path.write_text(text)
        done = command(*words, str(path))
        assert done.exit_code == 2 and message in done.stderr and not done.stdout
    done = command(*words, str(tmp_path / "none"))
    assert done.exit_code == 2 and done.stderr.endswith("none: No such file or directory\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 0", "num_heads: expected 1 to 128, got 0"),
        ("--heads 16 --page 48", "page_size: expected one of 16, 32, 64, 128, got 48"),
        ("--heads 16 --dtype fp16", "dtype: expected one of 'fp8', 'bf16', 'f16', got 'fp16'"),
        ("--heads 16 --arch sm90", "arch: expected one of 'sm_90a', 'sm_100a', got 'sm90'"),
        ("--heads 16 --index int64", "index: expected one of 'i64', 'i32', got 'int64'"),
        ("--heads 16 --card B200", "card: expected a card of sm_90a, got B200, which is sm_100a"),
        ("--heads 16 --kv-heads 2", "num_kv_heads: expected 1"),
        ("--heads 16 --norm", "norm: expected False without rope, got True"),
        ("--heads 16 --rope neox --dtype bf16", "rope: expected 'applied' with a 16-bit cache"),
        ("--heads 16 --dtype f16 --merge", "merge: expected results of bf16 or f32, got f16"),
        (
            "--heads 16 --sparse --dtype f16",
            "dtype: expected one of 'fp8', 'fp8_ds_mla', 'fp8_v4'",
        ),
        (
            "--heads 16 --sparse --dtype bf16 --arch sm_100a",
            "arch: expected sm_90a, where",
        ),
        ("--heads 16 --sparse --dtype bf16 --accuracy high", "accuracy: expected one of"),
        ("--heads 16 --dtype fp8_ds_mla", "dtype: expected one of 'fp8', 'bf16', 'f16', got"),
        ("--heads 16 --sparse --dtype fp8_ds_mla --rows f16", "rows: expected bf16 with a cache"),
        ("--heads 16 --sparse --dtype fp8_ds_mla --accuracy high", "accuracy: expected 'standard"),
        ("--heads 16 --sparse --arch sm_100a", "sm_100a: no kernel for sparse decode exists"),
    ],
)
def test_what_is_no_model_is_one_sentence(words: str, message: str) -> None:
    done = command(*words.split())
    assert done.exit_code == 2 and not done.stdout
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
