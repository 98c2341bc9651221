"""``SNAPMLA_LOG`` and ``SNAPMLA_DUMP``: what is logged, what is written, and what is not paid."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import snapmla
import softgpu
from dsl_kernels.spec import VariantSpec
from snapmla.runtime import dump, launch, variants, watch
from tests.support.needs import needs_compiler

Q = VariantSpec(op="quantize_q", mode="token_head")
NAMES = ("q_nope", "q_rope", "out_nope", "out_rope", "out_scale")
Set = Callable[..., None]


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Set]:
    """Sets variables and drops loaded kernels, as they are read when a kernel is first called."""

    def put(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"SNAPMLA_{name}", value)
        monkeypatch.setattr(watch.written, "bytes", 0)
        variants.forget()

    yield put
    monkeypatch.undo()
    variants.forget()


def quantise(fill: float = 1.0) -> snapmla.QuantizedQuery:
    q = torch.full((1, 1, 2, 576), fill).bfloat16()
    return snapmla.quantize_q(q[..., :512], q[..., 512:])


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


@needs_compiler
def test_unset_the_function_itself_is_called(settings: Set) -> None:
    settings(LOG="0", DUMP="")
    assert type(variants.kernel(Q, "cpu")) is softgpu.LoadedKernel


# ------------------------------------------------------------------------------------------ a line


def test_a_decode_in_one_line() -> None:
    sizes = {
        "q_nope": (4, 1, 16, 512), "content": (9, 64, 512), "block_table": (4, 3),
        "part_begin": (133,), "split_begin": (5,), "o_accum": (264, 16, 528),
    }  # fmt: skip
    values = {name: torch.empty(shape, device="meta") for name, shape in sizes.items()}
    spec = VariantSpec(op="decode", pipeline="etap", row_tile=16, page_size=64)
    head = f"{spec.name} on meta: q_nope (4, 1, 16, 512), content (9, 64, 512), block_table (4, 3)"
    plan = "plan: 132 parts, 4 units"
    line = watch.line(spec, {**values, "may_split": 1})
    assert line == f"{head}; {plan}, splits up to 264"
    assert watch.line(spec, {**values, "may_split": 0}) == f"{head}; {plan}, no splits"
    line = watch.line(spec, {**values, "may_split": 2})
    assert line == f"{head}; {plan}, splits up to 264, tables from outside"


def test_a_decode_of_rows_in_one_line() -> None:
    sizes = {
        "q": (4, 1, 16, 576), "cache": (9, 64, 1, 576), "block_table": (4, 3),
        "part_begin": (133,), "split_begin": (5,), "o_accum": (264, 16, 528),
    }  # fmt: skip
    values = {name: torch.empty(shape, device="meta") for name, shape in sizes.items()}
    spec = VariantSpec(op="dense_decode", pipeline="split", row_tile=16)
    head = f"{spec.name} on meta: q (4, 1, 16, 576), cache (9, 64, 1, 576), block_table (4, 3)"
    line = watch.line(spec, {**values, "may_split": 1})
    assert line == f"{head}; plan: 132 parts, 4 units, splits up to 264"


def test_a_sparse_decode_in_one_line() -> None:
    """Over planes and over rows."""
    plan = {"part_begin": (133,), "split_begin": (5,), "o_accum": (264, 16, 528)}
    for sizes, pipeline in (
        ({"q_nope": (4, 1, 16, 512), "content": (9, 64, 512), "indices": (4, 2048)}, "etap"),
        ({"q": (4, 1, 16, 576), "cache": (9, 64, 656), "indices": (4, 2048)}, "mix16"),
    ):
        values = {n: torch.empty(s, device="meta") for n, s in {**sizes, **plan}.items()}
        spec = VariantSpec(op="sparse_decode", pipeline=pipeline, row_tile=16)
        shapes = ", ".join(f"{name} {shape}" for name, shape in sizes.items())
        tail = "plan: 132 parts, 4 units, splits up to 264"
        line = watch.line(spec, {**values, "may_split": 1})
        assert line == f"{spec.name} on meta: {shapes}; {tail}"


@needs_compiler
def test_each_call_is_a_line(settings: Set, caplog: pytest.LogCaptureFixture) -> None:
    settings(LOG="1")
    quantise()
    quantise()
    lengths = torch.tensor([3], dtype=torch.int32)
    snapmla.plan_decode(lengths, 16, 1, page_size=64, max_pages=1, num_parts=2)
    assert caplog.messages == [
        *2 * ["quantize_q_xbf16_token_head_sm90a on cpu: q_nope (1, 1, 2, 512)"],
        "plan_decode_sm90a on cpu: cache_seqlens (1,); plan: 2 parts, 1 units",
    ]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@needs_compiler
def test_compiled_code_logs_when_it_runs(
    settings: Set, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings(LOG="1", DUMP=str(tmp_path), DUMP_WHEN="all")
    run = torch.compile(
        lambda q: snapmla.quantize_q(q[..., :512], q[..., 512:]).scale, backend="eager",
        fullgraph=True,
    )  # fmt: skip
    q = torch.randn(1, 1, 2, 576).bfloat16()
    scale = run(q)
    ours = [record for record in caplog.records if record.name == "snapmla"]
    assert len(ours) == 1 and len(files(tmp_path)) == 1
    assert torch.equal(scale, snapmla.quantize_q(q[..., :512], q[..., 512:]).scale)


def test_lines_go_to_stderr_where_nobody_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """... and to the application's handlers alone where there are some."""
    logger = logging.Logger("snapmla")
    monkeypatch.setattr(watch, "log", logger)
    monkeypatch.setenv("SNAPMLA_LOG", "1")
    for _ in range(2):
        watch.watched(lambda *a: None, Q, NAMES)(*(torch.zeros(2) for _ in NAMES))
    assert len(logger.handlers) == 1, "one, however many kernels are loaded"
    assert capsys.readouterr().err == f"snapmla: {Q.name} on cpu: q_nope (2,)\n" * 2


# ------------------------------------------------------------------------------------------ a file


@needs_compiler
def test_a_call_that_fails_is_written(
    settings: Set, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its arguments as they were; one that returns is not."""
    settings(DUMP=str(tmp_path / "new"))
    quantise()
    assert not files(tmp_path)
    with softgpu.using(softgpu.Options(max_instructions=5)), pytest.raises(softgpu.SoftGpuError):
        quantise(3.0)
    (path,) = files(tmp_path / "new")
    assert caplog.messages[-1] == f"{Q.name} failed: its arguments are in {path}"
    call = dump.read(path)
    assert (call.variant, call.op, tuple(call.arguments)) == (Q.name, "quantize_q", NAMES)
    assert bool((call.arguments["q_nope"] == 3).all()) and not call.results
    assert "spin without effect" in call.error.splitlines()[-1] and "loader.py" in call.error
    assert call.facts["device"] == "software GPU" and call.facts["snapmla"] == snapmla.__version__


def failing(error: Exception) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        raise error

    return call


@pytest.mark.parametrize("when", watch.WHEN)
def test_refused_arguments_are_no_failed_call(settings: Set, tmp_path: Path, when: str) -> None:
    """What the exported function's own checks say is said by the exception."""
    settings(DUMP=str(tmp_path), DUMP_WHEN=when)
    tensors = [torch.zeros(2) for _ in NAMES]
    for error in (TypeError("q_nope"), ValueError("q_nope")):
        with pytest.raises(type(error)):
            watch.watched(failing(error), Q, NAMES)(*tensors)
    assert not files(tmp_path)
    with pytest.raises(RuntimeError, match="launch"):
        watch.watched(failing(RuntimeError("launch")), Q, NAMES)(*tensors)
    assert len(files(tmp_path)) == 1


def test_a_call_that_returns_leaves_nothing(settings: Set, tmp_path: Path) -> None:
    """... NaN in its results or not, unless that is asked for."""
    settings(DUMP=str(tmp_path))
    tensors = [torch.zeros(2) for _ in NAMES]
    watch.watched(lambda *a: a[-1].fill_(float("nan")), Q, NAMES)(*tensors)
    assert not files(tmp_path)


def test_arguments_in_the_form_of_tvm_ffi(settings: Set, tmp_path: Path) -> None:
    """As a plan's and a cache's are on a GPU; tables without entries among them."""
    settings(LOG="1", DUMP=str(tmp_path), DUMP_WHEN="all")
    given = [torch.zeros(2), *map(launch.as_argument, (torch.ones(2, 3), torch.zeros(0, 2).int()))]
    passed: list[Any] = []
    watch.watched(lambda *a: passed.extend(a), Q, NAMES)(*given)
    assert all(a is b for a, b in zip(passed, given, strict=True)), "the call gets them as they are"
    (path,) = files(tmp_path)
    found = dump.read(path).arguments
    assert found["q_rope"].tolist() == [[1.0] * 3] * 2 and found["out_nope"].shape == (0, 2)


@needs_compiler
def test_all_calls_are_written_if_asked_for(settings: Set, tmp_path: Path) -> None:
    """Before the launch, which may never return, and again behind it, with results."""
    settings(DUMP=str(tmp_path), DUMP_WHEN="all")
    seen: list[dump.Dump] = []
    names, kernel = NAMES, variants.load(variants.find_or_build(Q, need_library=False), "cpu")

    def look(*arguments: Any) -> None:
        seen.append(dump.read(files(tmp_path)[-1]))
        kernel(*arguments)

    watched = watch.watched(look, Q, names)
    q = torch.randn(1, 1, 2, 576).bfloat16()
    out = snapmla.quantize_q(q[..., :512], q[..., 512:])
    assert len(files(tmp_path)) == 1
    got = snapmla.QuantizedQuery(*(torch.zeros_like(t) for t in (out.nope, out.rope, out.scale)))
    watched(q[..., :512], q[..., 512:], got.nope_u8, got.rope, got.scale)
    assert len(files(tmp_path)) == 2 and not seen[0].results
    call = dump.read(files(tmp_path)[-1])
    assert torch.equal(call.results["out_scale"], out.scale)
    assert not call.arguments["out_scale"].any(), "as it was before the call"
    assert call.arguments["q_nope"].stride() == q[..., :512].stride()


@needs_compiler
def test_nan_is_written_if_asked_for(
    settings: Set, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings(DUMP=str(tmp_path), DUMP_WHEN="nan")
    quantise(1.0)
    assert not files(tmp_path)
    quantise(float("nan"))
    (path,) = files(tmp_path)
    assert caplog.messages[-1] == f"{Q.name} gave NaN: its arguments are in {path}"
    assert bool(dump.read(path).results["out_scale"].isnan().all())


@needs_compiler
def test_no_more_is_written_than_allowed(
    settings: Set, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings(DUMP=str(tmp_path), DUMP_WHEN="all", DUMP_MB="0")
    assert quantise().scale.numel() == 2, "the call itself goes on"
    assert not files(tmp_path) and "SNAPMLA_DUMP_MB leaves 0" in caplog.messages[-1]


def test_a_folder_that_cannot_be_written_does_not_fail_the_call(
    settings: Set, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    settings(DUMP=str(tmp_path / "file"), DUMP_WHEN="all")
    watch.watched(lambda *a: None, Q, NAMES)(*(torch.zeros(2) for _ in NAMES))
    assert "cannot be written" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DUMP_WHEN", "always", "SNAPMLA_DUMP_WHEN: expected one of error, nan, all, got 'always'"),
        ("DUMP_MB", "1.5", "SNAPMLA_DUMP_MB: expected a whole number, got '1.5'"),
    ],
)
def test_settings_of_no_meaning(settings: Set, name: str, value: str, words: str) -> None:
    settings(DUMP="somewhere", **{name: value})
    with pytest.raises(ValueError) as caught:
        watch.watched(lambda *a: None, Q, NAMES)
    assert str(caught.value) == words


@needs_compiler
def test_a_call_whose_memory_was_freed_is_no_file(
    settings: Set, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A sentence says why, and the call is refused as without the variable."""
    settings(DUMP=str(tmp_path))
    out = quantise()
    out.scale.untyped_storage().resize_(0)
    q = torch.ones((1, 1, 2, 576)).bfloat16()
    for _ in range(2):
        with pytest.raises(ValueError, match="^out: expected memory, got a storage that was freed"):
            snapmla.quantize_q(q[..., :512], q[..., 512:], out=out)
    assert not files(tmp_path)
    with pytest.raises(softgpu.MemoryFault):
        variants.kernel(Q, "cpu")(q[..., :512], q[..., 512:], *out.written)
    words = "is not dumped: the storage of out_scale was freed, so there is nothing to write"
    assert caplog.messages == [f"{Q.name} {words}"] and not files(tmp_path)


def test_a_call_with_an_empty_table_is_a_file(settings: Set, tmp_path: Path) -> None:
    """Which has no address, and needs none."""
    settings(DUMP=str(tmp_path), DUMP_WHEN="all")
    tensors = [torch.zeros(2) for _ in NAMES[1:]]
    watch.watched(lambda *_: None, Q, NAMES)(torch.zeros(0), *tensors)
    assert len(files(tmp_path)) == 1
