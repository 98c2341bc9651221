"""FlashMLA-ETAP as a contender: how its library is called, on a stand-in for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from codegen import toolchain
from profiles import check, contenders, peer_libraries, shapes
from profiles.decode_row import SOFTMAX_SCALE, Problem
from profiles.pools import RowsPool
from profiles.shapes import DecodeShape
from snapmla.testing import metrics

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "support" / "flashmla_etap.c"
LENGTHS = (150, 64)
PAGES = 8


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A peers' folder with the stand-in."""
    compiler = toolchain.c_compiler()
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("peers")
    target = folder / peer_libraries.PEER_FILES["etap"]
    target.parent.mkdir()
    words = [compiler, "-O2", "-shared", "-fPIC", str(STAND_IN), "-o", str(target), "-lm"]
    subprocess.run(words, check=True)
    return folder


def problem(heads: int, s_q: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Problem, RowsPool]:
    """Two requests, two buffers whose tables are columns of wider ones."""
    rng = torch.Generator().manual_seed(heads)
    pool = RowsPool(PAGES * 64, torch.device("cpu"), dtype)
    pool.store(0, torch.randn(PAGES * 64, 576, generator=rng))
    wide = torch.randperm(2 * PAGES, generator=rng).view(2, 2, 4).int() % PAGES
    query = torch.randn(2, s_q, heads, 576, generator=rng).to(dtype)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    shape = DecodeShape(2, max(LENGTHS), heads, s_q)
    return Problem(shape, query, lengths, {64: [table[:, :3] for table in wide]}), pool


@pytest.mark.parametrize(
    ("heads", "s_q", "parts", "dtype"),
    [(16, 1, 132, torch.bfloat16), (33, 3, 66, torch.bfloat16), (16, 2, 132, torch.float16)],
)
def test_etap_gives_its_library_what_it_wants(
    peers: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    s_q: int,
    parts: int,
    dtype: torch.dtype,
) -> None:
    monkeypatch.setattr(peer_libraries, "_sm90_count", lambda device: 132)
    monkeypatch.setattr(peer_libraries, "_stream", lambda device: 0)
    given, pool = problem(heads, s_q, dtype)
    contender = contenders.make("etap", peers)
    assert contender.unavailable() is None and contender.refuses(given.shape) is None
    entry = contender.enter(given, pool)
    assert entry.note == f"parts {parts}"
    for index, call in enumerate(entry.calls):
        for tensor in entry.outputs:
            tensor.fill_(float("nan"))
        out, lse = call()
        assert out.shape == (2, s_q, heads, 512) and lse is not None and out.dtype == dtype
        assert lse.shape == (2, heads, s_q)
        truths = {}
        for request, length in enumerate(LENGTHS):
            table = given.tables[64][index][request].long()
            tokens = pool.load((table[:, None] * 64 + torch.arange(64)).flatten())
            truths[request] = check.decode_truth(
                entry.query[request], lambda a, b, k=tokens: k[a:b], length,
                SOFTMAX_SCALE,
            )  # fmt: skip
        gates = dict.fromkeys(truths, contender.gate)
        verdict = check.check_decode(out, lse, truths, gates, strict_lse=True)
        assert verdict.ok, verdict.text
        error = max(metrics.relative_l2(out[i], truth.out) for i, truth in truths.items())
        assert error < (2.0**-9 if dtype == torch.bfloat16 else 2.0**-12)  # their roundings


def test_etap_in_fp16_in_the_bench(peers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for an fp16 pool, ours of ``cache=f16``, and rounds the bench's BF16 queries."""
    monkeypatch.setattr(peer_libraries, "_sm90_count", lambda device: 132)
    monkeypatch.setattr(peer_libraries, "_stream", lambda device: 0)
    etap = contenders.make("etap:cache=f16", peers)
    assert etap.pool_key() == contenders.make("snapmla:cache=f16", None).pool_key()
    assert contenders.make("etap", peers).pool_key() == ("bf16",)
    assert etap.unavailable() is None and "no peers folder" in str(
        contenders.make("etap:cache=f16", None).unavailable()
    )
    given, _ = problem(16, 1)
    pool = etap.make_pool(PAGES * 64, torch.device("cpu"))
    pool.store(0, torch.randn(PAGES * 64, 576).bfloat16())
    entry = etap.enter(given, pool)
    assert torch.equal(entry.query, given.query.half().double())
    assert entry.calls[0]()[0].dtype == torch.float16
    wide = RowsPool(64, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match=r"cache of bfloat16 or float16, got torch\.float32"):
        etap.enter(given, wide)


def test_etap_needs_a_hopper_card(peers: Path) -> None:
    given, pool = problem(16, 1)
    with pytest.raises(ValueError, match=r"capability 9\.0, got cpu"):
        contenders.make("etap", peers).enter(given, pool)


def test_etap_takes_more_rows_than_its_schedule_only_with_an_error(
    peers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H20 has 78 SMs: no part is left for more than 78 blocks of 64 rows."""
    monkeypatch.setattr(peer_libraries, "_sm90_count", lambda device: 78)
    given, pool = problem(128, 40)
    with pytest.raises(ValueError, match="parts, got 0"):
        contenders.make("etap", peers).enter(given, pool)


def test_etap_refuses_what_its_kernels_get_wrong() -> None:
    etap = contenders.make("etap", None)
    for name in ("etap-fig1", "dense-table", "h200-table", "flashmla-dense"):
        for shape in shapes.preset(name):
            assert isinstance(shape, DecodeShape) and etap.refuses(shape) is None
    assert etap.refuses(DecodeShape(8, 8192, 128, 66)) is None
    for shape, words in (
        (DecodeShape(8, 8192, 16, 67), "66 query tokens"),
        (DecodeShape(4096, 64, 16), "4095 requests"),
        (DecodeShape(4000, 64, 128, 8), "32 bits"),
    ):
        assert words in str(etap.refuses(shape))


def test_the_docs_list_every_library() -> None:
    page = (ROOT / "profiles" / "results" / "README.md").read_text()
    for name, file in peer_libraries.PEER_FILES.items():
        assert f"| `{name}` | `{file}`" in page
