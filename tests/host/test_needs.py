"""Which kernels a model needs: those that its calls ask for, and no others."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import snapmla
from codegen import matrix
from dsl_kernels.formats.mha_list import VALUES
from dsl_kernels.formats.registered import FORMATS
from dsl_kernels.spec import VariantSpec
from snapmla import dsa, rank
from snapmla.compat import flash_mla
from snapmla.errors import VariantError
from snapmla.rank import Model
from snapmla.rank.needs import SPARSE_TOKENS
from snapmla.rank.sparse_decode import REFERENCE
from snapmla.runtime import env, variants
from snapmla_cli import app
from tests.support.model_configs import CONFIGS

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

    variants.forget()
    monkeypatch.setattr(variants, "kernel", kernel)
    yield found
    variants.forget()


def held_as(model: Model) -> Any:
    """The cache's dtype, as ``allocate`` and plans take it."""
    return DTYPES.get(model.dtype, model.dtype)


def step(model: Model) -> None:
    """The calls of a model's steps, over CPU tensors."""
    fmt, dtype = FORMATS[model.dtype], DTYPES[model.of_rows]
    for page in model.pages:
        cache = snapmla.PagedKVCache.allocate(
            4, page, device="cpu", dtype=held_as(model), num_kv_heads=model.kv_heads
        )
        for index in map(INTS.__getitem__, model.indices):
            append(model, cache, dtype, index)
            if model.indexed and model.norm and rank.PLAIN not in (model.rope, model.index_rope):
                prologue(model, cache, dtype, index)
        if model.prefill or (model.sparse_prefill and fmt.named):
            fetch(model, cache, dtype)
        for heads in model.heads:
            for s_q, batch in itertools.product(
                model.s_q, SPARSE_TOKENS if model.sparse else (BATCH,)
            ):
                q = torch.zeros(batch, s_q, heads, fmt.channels, dtype=dtype)
                decode(model, cache, q)
            if model.sparse_prefill:
                prefill_sparse(model, cache, heads)
            if model.mha:
                prefill_dense(model, heads)
    if model.indexed:
        choose(model)


def prologue(
    model: Model, cache: snapmla.PagedKVCache, dtype: torch.dtype, index: torch.dtype
) -> None:
    """Both appends, and the indexer's queries."""
    zeros = lambda *shape: torch.zeros(TOKENS, *shape, dtype=dtype)
    positions, table = turning(model, TOKENS, index)
    dsa.prologue(
        cache, zeros(512), zeros(64), torch.arange(TOKENS, dtype=index),
        torch.zeros(2, 64, 132, dtype=torch.uint8), zeros(128), zeros(64, 128), zeros(64),
        positions, table, norm_weight=torch.ones(512, dtype=dtype),
        index_norm_weight=torch.ones(128), index_norm_bias=torch.ones(128),
        is_neox=model.rope == "neox", index_is_neox=model.index_rope == "neox",
        hadamard=model.hadamard,
    )  # fmt: skip


def choose(model: Model) -> None:
    """An indexer's steps: keys, scores of few and many query tokens, rows of every length."""
    keys = torch.zeros(2, 64, 132, dtype=torch.uint8)
    for index in map(INTS.__getitem__, model.indices):
        slots, options = torch.arange(TOKENS, dtype=index), {}
        if model.index_rope != rank.PLAIN:
            positions, table = turning(model, TOKENS, index)
            v4 = model.dtype.startswith("fp8_v4")  # RMSNorm, the last channels
            options = dict(
                positions=positions, cos_sin_cache=table, norm_weight=torch.ones(128),
                norm_bias=None if v4 else torch.ones(128), rope_last=v4,
                is_neox=model.index_rope == "neox",
            )  # fmt: skip
        rows = torch.zeros(TOKENS, 128, dtype=DTYPES[model.of_rows])
        dsa.append_index_k(keys, rows, slots, hadamard=model.hadamard, **options)
        if model.index_fetch:
            dsa.fetch_index_k(keys, slots)
    if model.index_fetch:
        begin = torch.tensor([0, 1, 3], dtype=torch.int32)
        dsa.fetch_index_k(keys, TABLE, cu_seqlens=begin, total=3)
    for heads, s_q in itertools.product(model.index_heads, (1, 2, 3, 8)):
        q = torch.zeros(BATCH, s_q, heads, 128).to(torch.float8_e4m3fn)
        dsa.index_topk(q, torch.zeros(BATCH, s_q, heads), keys, TABLE, LENGTHS, 8)
    for rows, columns in itertools.product((1, 20, 50, 100), (64, 9000, 40000, 200_000, 400_000)):
        logits = torch.empty(rows, columns)  # nobody touches it
        dsa.select_topk(logits, torch.ones(rows, dtype=torch.int32), 8)


def prefill_dense(model: Model, heads: int) -> None:
    begin = torch.tensor([0, 100, 2000], dtype=torch.int32)
    for d_qk in model.head_dims:
        d_v = VALUES[d_qk]
        q, k, v = (
            torch.zeros(2000, heads, d, dtype=DTYPES[model.of_rows]) for d in (d_qk, d_qk, d_v)
        )
        for split in {False, model.split_keys}:
            given = (q[:128], k, v, torch.tensor([0, 128]).int(), torch.tensor([0, 2000]).int())
            if not split:
                given = (q, k, v, begin, begin.clone())
            snapmla.mha_prefill(*given, 2000, 2000, causal=True, split_keys=split)


def prefill_sparse(model: Model, cache: Any, heads: int) -> None:
    channels = FORMATS[model.dtype].channels
    q = torch.zeros(TOKENS, heads, channels, dtype=torch.bfloat16)
    indices = torch.zeros(TOKENS, 1, 128, dtype=torch.int32)
    snapmla.sparse_prefill(q, torch.zeros(9, 1, channels).bfloat16(), indices, 1.0)
    if model.dtype == "fp8":
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
        plan = snapmla.plan_sparse_prefill(
            heads, TOKENS, topk=128, device="cpu", accuracy=model.accuracy
        )
        snapmla.sparse_prefill(query, cache, indices, 1.0, plan=plan)


def turning(model: Model, count: int, index: torch.dtype) -> tuple[Any, ...]:
    return torch.zeros(count, dtype=index), torch.zeros(8, 64, dtype=DTYPES[model.table])


def append(model: Model, cache: Any, dtype: torch.dtype, index: torch.dtype) -> None:
    fmt = FORMATS[model.dtype]
    rows = torch.zeros(TOKENS, model.kv_heads, fmt.channels, dtype=dtype)
    rows = rows if model.kv_heads > 1 else rows[:, 0]
    c_kv, k_rope = rows[..., : fmt.content.count], rows[..., fmt.content.count :]
    slots = torch.arange(TOKENS, dtype=index)
    if model.rope == rank.PLAIN:
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
    if model.dtype == "fp8" and model.rope == rank.PLAIN:
        query = snapmla.quantize_q(q[..., :512], q[..., 512:])
    elif model.dtype == "fp8":
        for index in map(INTS.__getitem__, model.indices):
            given = turning(model, len(q) * s_q, index)
            neox = model.rope == "neox"
            query = snapmla.rope_quantize_q(q[..., :512], q[..., 512:], *given, is_neox=neox)
    if model.sparse:
        sparse_decode(model, cache, query)
        return
    plan = snapmla.plan_decode(
        LENGTHS, heads, s_q, page_size=cache.page_size, max_pages=2, accuracy=model.accuracy,
        cache_dtype=held_as(model), num_kv_heads=model.kv_heads,
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
        Model((16, 64), dtype="fp8_ds_mla", pages=(53,)),
        Model((8, 64), dtype="fp8_v4", s_q=(1, 2), indices=("i32",), prefill=True),
        Model((20,), dtype="fp8_nope", sparse=True, index_heads=(32,), hadamard=True),
        Model((16,), sparse=True, indexer=False, sparse_prefill=True, out="f32"),
        Model((16,), sparse=True, index_rope="interleaved", table="bf16", index_fetch=True),
        Model((128,), dtype="fp8_v4", sparse=True, index_rope="interleaved", indices=("i64",)),
        Model((16,), rows="f16", mha=True, split_keys=True, head_dims=(128, 192)),
        Model((32,), dtype="bf16", mha=True, head_dims=(256,)),
    ],
    ids=lambda model: (
        f"{model.dtype}-{model.heads}-{model.rope}{'-sparse' * model.sparse}{'-mha' * model.mha}"
    ),
)
def test_it_needs_what_its_calls_ask_for(asked: set[str], model: Model) -> None:
    step(model)
    names = [spec.name for spec in rank.needs(model)]
    assert set(names) == asked and len(names) == len(asked)
    pattern = ",".join(names)
    assert matrix.no_match("sm_90a", pattern) is None
    found = matrix.matrix("sm_90a", pattern, ask_kernels=False)
    assert {point.spec.name for point in found} == asked, "what FILTER= builds of it"


def model_of(name: str, **options: Any) -> Model:
    """A public model on eight GPUs, or on one with 16 heads, all of whose calls are made."""
    config = CONFIGS[name]
    told = rank.facts_of(config)
    given: dict[str, Any] = {"index_heads": told.index_heads, "head_dims": told.head_dims}
    return Model(
        (max(config["num_attention_heads"] // 8, 16),), dtype=told.dtype or "fp8",
        indices=("i64",), sparse=told.sparse, mha=bool(told.head_dims),
        sparse_prefill=told.sparse, **{name: value for name, value in given.items() if value},
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_it_needs_what_the_steps_of_public_models_ask_for(asked: set[str], name: str) -> None:
    model = model_of(name)
    step(model)
    assert asked == {spec.name for spec in rank.needs(model)}
    more = asked & {"index_rows_sm90a", "mha_items_sm90a"}
    assert more == {"index_rows_sm90a" for _ in range(model.sparse)} | {
        "mha_items_sm90a" for _ in range("V4" not in name)
    }


@pytest.mark.parametrize(
    "name",
    [
        "DeepSeek-V2-Lite",
        *(pytest.param(n, marks=pytest.mark.whole_matrix) for n in list(CONFIGS)[1:]),
    ],
)
def test_a_step_runs_with_what_is_named_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A folder of these kernels, and nothing may be compiled: a server's."""
    model = model_of(name)
    for spec in rank.needs(model):
        built = variants.find_or_build(spec, need_library=False)
        for path in built.directory.glob(f"{built.name}.*"):
            (tmp_path / path.name).symlink_to(path)
    variants.forget()
    monkeypatch.setenv("SNAPMLA_NO_JIT", "1")
    monkeypatch.setattr(env, "variant_dirs", lambda: [tmp_path])
    monkeypatch.setattr(variants, "_kernels", {})
    whole_step(model)
    with pytest.raises(VariantError, match="SNAPMLA_NO_JIT forbids compiling"):
        merge(
            replace(model, merge=True), torch.zeros(1, 1, 1, 512).bfloat16(), torch.zeros(1, 1, 1)
        )
    variants.forget()


def whole_step(model: Model) -> None:
    """A step on the software GPU, whose cached tokens are all alike: so is what attention gives."""
    fmt, heads, tokens, page = FORMATS[model.dtype], model.heads[0], 70, model.pages[0]
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    lengths = torch.tensor([tokens], dtype=torch.int32)
    slots = (table.long() * page)[0].repeat_interleave(page)[:tokens] + torch.arange(tokens) % page
    torch.manual_seed(0)
    one = torch.randn(fmt.channels)
    row = one.expand(tokens, -1).bfloat16().contiguous()
    cache = snapmla.PagedKVCache.allocate(4, page, device="cpu", dtype=held_as(model))
    snapmla.append_kv(cache, row[:, : fmt.content.count], row[:, fmt.content.count :], slots)
    q = torch.randn(1, 1, heads, fmt.channels).bfloat16()
    query: Any = snapmla.quantize_q(q[..., :512], q[..., 512:]) if fmt.quantized_query else q
    if model.sparse:
        out = chosen(model, cache, query, table, lengths, slots)
        prompt = q[0].expand(2, -1, -1).contiguous()
        indices = torch.arange(tokens, dtype=torch.int32).expand(2, 1, -1).contiguous()
        made, *_ = snapmla.sparse_prefill(prompt, row.unsqueeze(1), indices, 0.1)
        torch.testing.assert_close(made[1, 0].float(), row[0, :512].float(), atol=0.02, rtol=0.02)
    else:
        plan = snapmla.plan_decode(lengths, heads, 1, page_size=page, max_pages=2)
        out, _ = snapmla.decode(query, cache, table, lengths, softmax_scale=0.1, plan=plan)
    assert ((out - one[:512]).norm(dim=-1) < 0.05 * one[:512].norm()).all()
    for d_qk in model.head_dims if model.mha else ():
        k, v = torch.randn(tokens, 1, d_qk).bfloat16(), row[:, None, : VALUES[d_qk]]
        begin = torch.tensor([0, tokens], dtype=torch.int32)
        out, _ = snapmla.mha_prefill(k, k, v, begin, begin.clone(), tokens, tokens, causal=True)
        torch.testing.assert_close(out.float(), v.float(), atol=0.02, rtol=0.02)


def chosen(
    model: Model, cache: Any, query: Any, table: torch.Tensor, lengths: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Attention to what the indexer chooses, of V4 by FlashMLA's name, beside a second cache."""
    keys = torch.zeros(4, 64, 132, dtype=torch.uint8)
    dsa.append_index_k(keys, torch.randn(len(slots), 128).bfloat16(), slots)
    heads = model.index_heads[0]
    q, w = torch.randn(1, 1, heads, 128).to(torch.float8_e4m3fn), torch.rand(1, 1, heads)
    picked, counts = dsa.index_topk(q, w, keys, table, lengths, 64)
    assert counts.tolist() == [64] and set(picked[0].tolist()) <= set(slots.tolist())
    picked = picked.unsqueeze(1)
    if FORMATS[model.dtype].two_lists:
        made, _ = flash_mla.flash_mla_with_kvcache(
            query, cache.kv, None, None, 512, flash_mla.get_mla_metadata()[0],
            is_fp8_kvcache=True, indices=picked, topk_length=counts, extra_k_cache=cache.kv,
            extra_indices_in_kvcache=picked,
        )  # fmt: skip
        return made
    plan = snapmla.plan_sparse_decode(
        model.heads[0], 1, topk=64, batch=1, device="cpu", cache_dtype=model.dtype
    )
    made, _ = snapmla.decode(
        query, cache, indices=picked, topk_length=counts, softmax_scale=0.1, plan=plan
    )
    return made


def test_flash_mla_needs_its_records(asked: set[str]) -> None:
    model = Model((16,), dtype="bf16", flash_mla=True)
    step(model)
    metadata, splits = flash_mla.get_mla_metadata_tensors(LENGTHS, 16, 1)
    cache = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)
    q = torch.zeros(BATCH, 1, 16, 576, dtype=torch.bfloat16)
    flash_mla.flash_mla_with_kvcache(q, cache, TABLE, LENGTHS, 512, metadata.clone(), splits)
    assert {spec.name for spec in rank.needs(model)} == asked


def test_sparse_decode_needs_no_records() -> None:
    """FlashMLA's names plan it without any."""
    model = Model((16,), dtype="fp8_ds_mla", flash_mla=True, sparse=True)
    assert not [spec for spec in rank.needs(model) if "records" in spec.name]


def test_another_architecture() -> None:
    names = [spec.name for spec in rank.needs(Model((16,), arch="sm_100a"))]
    assert names[-1] == "decode_ws_r64_p64_obf16_sm100a"
    assert all(name.endswith("_sm100a") for name in names)
    dense = [spec.name for spec in rank.needs(Model((16,), dtype="f16", arch="sm_100a"))]
    assert dense[-1] == "dense_decode_ws_r64_p64_df16_sm100a"
    sparse = [spec.name for spec in rank.needs(Model((16, 128), sparse=True, arch="sm_100a"))]
    assert [name for name in sparse if "decode_" in name and "plan" not in name] == [
        "sparse_decode_ws_r64_obf16_sm100a"
    ]


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["needs", *words])


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


def test_a_config_names_format_indexer_and_heads(tmp_path: Path) -> None:
    """What engines keep of a model, said on stderr; what is given goes first."""
    path = tmp_path / "config.json"
    for name, config in CONFIGS.items():
        path.write_text(json.dumps(config))
        model = model_of(name)
        words = ["--heads", str(model.heads[0]), "--index", "i64", "--config", str(path)]
        words += ["--mha"] * model.mha + ["--sparse-prefill"] * model.sparse_prefill
        done = command(*words)
        assert done.stdout.splitlines() == [spec.name for spec in rank.needs(model)], name
        said = f"kernels over {model.dtype}, " if model.sparse else ""
        assert done.stderr.startswith(said) and bool(done.stderr) == model.sparse
    assert "656 bytes a token" in done.stderr or not model.sparse
    path.write_text(json.dumps(CONFIGS["GLM-5"]))
    own = command("--heads", "8", "--config", str(path), "--dtype", "fp8", "--index-heads", "64")
    assert not own.stderr and own.stdout.splitlines()[-1] == "sparse_decode_etap_r16_obf16_sm90a"
    assert "index_logits_h64_u4_sm90a" in own.stdout and "h32" not in own.stdout


def test_help_lists_the_formats() -> None:
    text = " ".join(command("--help").output.replace("│", " ").split())
    for name, fmt in FORMATS.items():
        if fmt.sparse or name in rank.DENSE_FORMATS:
            assert name in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads 0", "--heads: expected 1 to 128, got 0"),
        ("--heads 16 --page 48", "--page: expected one of 16, 32, 64, 128, got 48"),
        ("--heads 16 --dtype fp16", "--dtype: expected one of 'fp8', 'bf16', 'f16', 'fp8_ds_mla'"),
        ("--heads 16 --arch sm90", "--arch: expected one of 'sm_90a', 'sm_100a', got 'sm90'"),
        ("--heads 16 --index int64", "--index: expected one of 'i64', 'i32', got 'int64'"),
        ("--heads 16 --card B200", "--card: expected a card of sm_90a, got B200, which is sm_100a"),
        ("--heads 16 --kv-heads 2", "--kv-heads: expected 1"),
        ("--heads 16 --norm", "--norm: expected False without rope, got True"),
        ("--heads 16 --rope neox --dtype bf16", "--rope: expected 'applied' with a 16-bit cache"),
        ("--heads 16 --dtype f16 --merge", "--merge: expected results of bf16 or f32, got f16"),
        (
            "--heads 16 --sparse --dtype f16",
            "--dtype: expected one of 'fp8', 'fp8_ds_mla', 'fp8_v4'",
        ),
        (
            "--heads 16 --sparse --dtype bf16 --arch sm_100a",
            "--arch: expected sm_90a, where",
        ),
        ("--heads 16 --sparse --dtype bf16 --accuracy high", "--accuracy: expected one of"),
        ("--heads 129", "--heads: expected 1 to 128, got 129"),
        ("--heads 16 --s-q 0", "--s-q: expected "),
        ("--heads 16 --sparse --index-heads 16", "--index-heads: expected one of 64, 32, got 16"),
        ("--heads 16 --indexer", "--indexer: expected False without sparse, got True"),
        ("--heads 16 --hadamard", "--hadamard: expected False without the indexer, got True"),
        ("--heads 16 --index-fetch", "--index-fetch: expected False without the indexer"),
        ("--heads 16 --index-rope neox", "--index-rope: expected applied without the indexer"),
        ("--heads 16 --index-rope left", "--index-rope: expected one of 'applied'"),
        ("--heads 16 --split-keys", "--split-keys: expected False without mha, got True"),
        ("--heads 16 --sparse-prefill", "--sparse-prefill: expected False without sparse"),
        ("--heads 16 --mha --head-dim 64", "--head-dim: expected one of 192, 128, 256, got 64"),
        ("--heads 16 --mha --rows f32", "--rows: expected bf16 or f16 with mha, got f32"),
        ("--heads 16 --mha --arch sm_100a", "--arch: expected sm_90a, where dense prefill"),
        ("--heads 16 --dtype fp8_nope --rope neox", "--rope: expected 'applied' with a cache"),
        ("--heads 16 --dtype fp8_ds_mla --arch sm_100a", "sm_100a: no dense decode kernel"),
        ("--heads 16 --sparse --dtype fp8_ds_mla --rows f16", "--rows: expected bf16 with a cache"),
        (
            "--heads 16 --sparse --dtype fp8_ds_mla --accuracy high",
            "--accuracy: expected 'standard",
        ),
        (
            "--heads 16 --sparse --dtype fp8_ds_mla --arch sm_100a",
            "sm_100a: no kernel for sparse decode exists",
        ),
    ],
)
def test_what_is_no_model_is_one_sentence(words: str, message: str) -> None:
    done = command(*words.split())
    assert done.exit_code == 2 and not done.stdout
    assert done.stderr.startswith(message) and done.stderr.count("\n") == 1, done.stderr
