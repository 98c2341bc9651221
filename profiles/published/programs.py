"""The published programs: where each lies under ``--from``, what to call, how far off it may be.

The bound on the relative L2 error is derived from the roundings on the way to a result: a number
rounded to f fraction bits is off by at most 2^-f / sqrt(12) of itself in the mean square, and
independent roundings add in squares.  Sums of small integers are exact: bound 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

E4M3, BF16, F16 = 3, 7, 10  # fraction bits

_PRIMITIVES = "examples/python/CuTeDSL/experimental/primitives/tcgen05"
_KERNELS = "examples/python/CuTeDSL/cute/blackwell/kernel"


def roundings(*bits: int) -> float:
    """The bound for results that were rounded to each of these fraction bits once."""
    return math.sqrt(sum(4.0**-f for f in bits) / 12)


def steps(count: int) -> float:
    """The bound for float32 sums that are cut toward zero after each of ``count`` MMAs."""
    return count * 2.0**-23


@dataclass(frozen=True)
class Program:
    """One published program.

    Attributes:
        name: as on the command line and the page.
        source: key of ``SOURCES``.
        path: of the module, in the source's folder.
        call: runs it, given the module.
        shapes: of the problem.
        shows: what of tcgen05 it exercises.
        bounds: greatest relative L2 error of each comparison, in order; the last one repeats.
        atomics: results depend on the order of additions, so schedules may differ in bits.
        hazards: whether it runs with the hazard check.
        turns: warps take turns of so many instructions, as they do on a GPU, and no random
            schedule is run: for a program with a race of its own that only a schedule far from
            that shows.  0: the software GPU's own schedules.
        packages: (name, folder) of packages whose ``__init__`` is left out; no folder: a module
            of which nothing is needed but decorators.
        beside: further folders under --from whose packages it imports.
        first: modules that are imported before it, for what they change in others.
        held_out: not empty for a program that the model was not made with: what it changed in it.
        edit: a pattern and its replacement, for a program that does not run as it was published.
    """

    name: str
    source: str
    path: str
    call: Callable[[Any], None]
    shapes: str
    shows: str
    bounds: tuple[float, ...] = (0.0,)
    atomics: bool = False
    hazards: bool = True
    turns: int = 0
    packages: tuple[tuple[str, str], ...] = ()
    beside: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    held_out: str = ""
    edit: tuple[str, str] | None = None


@dataclass(frozen=True)
class Source:
    """Source of programs: folder under ``--from``, whose it is, version, licence."""

    folder: str
    title: str
    version: str
    licence: str


SOURCES = {
    "cutlass": Source("cutlass", "NVIDIA/cutlass", "commit 7107b055 (2026-08-20)", "BSD-3-Clause"),
    "tokenspeed": Source("tokenspeed", "tokenspeed-mla (PyPI)", "2.0.4", "MIT"),
    "flash-attention": Source(
        "flash-attention",
        "Dao-AILab/flash-attention",
        "commit 0251105a (2026-08-15), with quack of commit c8ec3170",
        "BSD-3-Clause",
    ),
    "flashinfer": Source("flashinfer", "flashinfer-python (PyPI)", "0.7.2.post1", "Apache-2.0"),
}


def _primitive(
    name: str, shapes: str, shows: str, call: Callable[[Any], None], *bounds: float, **named: Any
) -> Program:
    path = f"{_PRIMITIVES}/{name}.py"
    return Program(name, "cutlass", path, call, shapes, shows, bounds or (0.0,), **named)


def _verify(module: Any) -> None:
    module.verify()


def _basic(module: Any) -> None:
    module.verify()
    module.verify(MMA_SHAPE=(64, 64, 64))
    module.verify(SCALE_D=4)
    module.verify(WDMASK=1)
    module.verify(COLLECTOR=2, MMA_SHAPE=(128, 128, 64))


def _pipeline(module: Any) -> None:
    module.verify(num_k_tiles=4)


def _transpose(module: Any) -> None:
    for dtype in module._DTYPE_BY_NAME.values():
        module.verify(OUT_DTYPE=dtype)


def _clusters(module: Any) -> None:
    module.verify((256, 128, 128), CLUSTER_SHAPE=(2, 1), CLUSTER_TILE=(256, 128))
    module.verify(
        (256, 128, 128), CLUSTER_SHAPE=(2, 2), CLUSTER_TILE=(256, 128), GROUP_TILE=(256, 64)
    )
    module.verify(
        (128, 256, 128), USE_2CTA_GROUP=False, CLUSTER_SHAPE=(1, 2), CLUSTER_TILE=(128, 256)
    )


def _mla(module: Any, tokens: int) -> None:
    import cutlass

    fp8 = module.__file__.endswith("fp8.py")
    kind = cutlass.Float8E4M3FN if fp8 else cutlass.Float16
    module.run(
        1, 1, tokens, 128, 512, 64, kind, kind, cutlass.Float32, cutlass.Float32, (128, 128),
        (128, 256), 2, False, True, False, 128 if fp8 else 64, 0.0416, 1.0, 0.0, 1e-2, 0, 1,
        False, False,
    )  # fmt: skip


def _fmha(module: Any, kind: str, d: int, d_v: int, causal: bool) -> None:
    import cutlass

    one = {"bf16": cutlass.BFloat16, "fp8": cutlass.Float8E4M3FN}[kind]
    module.run(
        (1, 256, 1, d), (1, 256, 1, d), one, one, cutlass.BFloat16, cutlass.Float32,
        cutlass.Float32, (128, 128), False, False, False, causal, False, True, (-1, -1),
        1.0, 1.0, 1.0, 1.0, 0.0, None, 1e-1, 0, 1, False,
    )  # fmt: skip


def _gemm(module: Any, fp8: bool) -> None:
    import cutlass

    kind = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
    module.run(
        (256, 128, 256, 1), kind, cutlass.BFloat16, cutlass.Float32, "k", "n" if fp8 else "k", "n",
        mma_tiler_mn=(256, 128), cluster_shape_mn=(2, 1), use_2cta_instrs=True,
    )  # fmt: skip


def _blockwise_gemm(module: Any) -> None:
    import cutlass

    module.run(
        (256, 256, 384, 1), cutlass.Float8E4M3FN, cutlass.BFloat16, cutlass.Float32,
        cutlass.Float32, "k", "k", "n", (128, 128), (1, 1), False, 1e-1,
    )  # fmt: skip


def _persistent_gemm(module: Any, pair: bool = True, n: int = 128) -> None:
    import cutlass

    module.run(
        (512, 256, 192, 1), cutlass.BFloat16, cutlass.BFloat16, cutlass.Float32, "k", "k", "n",
        mma_tiler_mn=(256, n) if pair else (128, n), cluster_shape_mn=(2, 1) if pair else (1, 1),
        use_2cta_instrs=pair,
    )  # fmt: skip


def _slice_k(module: Any) -> None:
    for variant in (
        "async_s32_smem", "a_tmem_core_matrix", "tma_s128_mma_s32", "tma_s32_mma_s32",
        "n_group_smem_a_reuse_wdm",
    ):  # fmt: skip
        module.verify(variant)


def _fmha_bwd(module: Any) -> None:
    """Its own check holds max differences against torch's in bf16; ours takes the relative L2."""
    import cutlass
    import torch

    real, references = module.fmha_bwd_reference, []

    def observed(*args: Any, **named: Any) -> Any:
        references.append(real(*args, **named))
        return references[-1]

    module.fmha_bwd_reference = observed
    module.run(
        256, 256, 1, 1, 128, 1, True, False, cutlass.BFloat16, cutlass.Float32, (128, 128), 0.0,
        (-1, -1), 0, 1, False,
    )  # fmt: skip
    dq, dk, dv = (module.cute.compile.kernels[-1].tensors[i] for i in (4, 5, 6))
    for got, expected in zip((dv, dk, dq), references[0], strict=True):
        torch.testing.assert_close(got.float(), expected.float(), rtol=1.0, atol=1.0)


def _tokenspeed(module: Any, heads: int, queries: int) -> None:
    """Random FP8 queries and cache, ragged lengths; the reference is float64."""
    import torch

    torch.manual_seed(1)
    lengths = torch.tensor([300, 65], dtype=torch.int32)
    pages, page = 8, 64
    fp8 = torch.float8_e4m3fn
    query = torch.randn(2, queries, heads, 576).to(fp8)
    cache = torch.randn(2 * pages, page, 576).to(fp8)
    table = torch.randperm(2 * pages).reshape(2, pages).to(torch.int32)
    workspace = torch.zeros(32 << 20, dtype=torch.int8)
    scale = 192**-0.5
    out, lse = module.tokenspeed_mla_decode(
        query, cache, workspace, 512, 64, table, lengths, int(lengths.max()), scale,
        causal_mask=queries > 1, return_lse=True,
    )  # fmt: skip
    for i, n in enumerate(lengths.tolist()):
        joint = cache[table[i].long()].reshape(-1, 576)[:n].double()
        score = query[i].double() @ joint.T * scale  # (queries, heads, n)
        for j in range(queries):
            score[j, :, n - queries + 1 + j :] = -math.inf
        expected = torch.softmax(score, -1) @ joint[:, :512]
        want_lse = torch.logsumexp(score, -1) / math.log(2)
        torch.testing.assert_close(out[i].double(), expected, rtol=0.1, atol=0.1)
        torch.testing.assert_close(lse[i].double(), want_lse, rtol=1e-5, atol=1e-5)


def _exact(q: Any, k: Any, v: Any, causal: bool, scale: float) -> tuple[Any, Any]:
    """Attention in float64, (b, s, h, d) and (b, s, h_k, d): (b, s, h, d_v) and lse (b, h, s)."""
    import torch

    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        seen = torch.ones(score.shape[-2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        score = score.masked_fill(~seen, -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(score, -1), v)
    return out, torch.logsumexp(score, -1)


def _fa4(module: Any, d: int, d_v: int, heads: int, kv_heads: int, fp8: bool = False) -> None:
    import torch

    torch.manual_seed(1)
    shapes = ((heads, d), (kv_heads, d), (kv_heads, d_v))
    q, k, v = (torch.randn(1, 256, *shape).bfloat16() for shape in shapes)
    if fp8:
        q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    out, lse = module.flash_attn_func(q, k, v, causal=True, return_lse=True)
    expected, want_lse = _exact(q, k, v, True, d**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=0.1, atol=0.1)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def _fa4_mla(module: Any, form: str) -> None:
    """128 heads, two queries, 320 tokens: dense and causal, a list of 256, or pages of 64."""
    import torch

    torch.manual_seed(1)
    b, queries, heads, tokens = 1, 2, 128, 320
    q, qv = (torch.randn(b, queries, heads, x).bfloat16() for x in (64, 512))
    k, v = (torch.randn(b, tokens, 1, x).bfloat16() for x in (64, 512))
    scale, named, causal = 192**-0.5, {}, form != "top-k"
    if form == "top-k":
        indices = torch.stack([torch.randperm(tokens)[:256] for _ in range(queries)])
        named["gather_kv_indices"] = indices[None].to(torch.int32)
    if form == "paged":
        order = torch.randperm(8)[: tokens // 64]
        pages = [torch.randn(8, 64, 1, x.shape[-1]).bfloat16() for x in (k, v)]
        for pool, x in zip(pages, (k, v), strict=True):
            pool[order] = x.reshape(-1, 64, 1, x.shape[-1])
        out, lse = module.flash_attn_varlen_func(
            q, *pages, qv=qv, page_table=order[None].to(torch.int32), softmax_scale=scale,
            seqused_k=torch.tensor([tokens], dtype=torch.int32), causal=True, return_lse=True,
        )  # fmt: skip
    else:
        out, lse = module.flash_attn_func(
            q, k, v, qv=qv, softmax_scale=scale, causal=causal, return_lse=True, **named
        )
    joint_q, joint_k = torch.cat([q, qv], -1), torch.cat([k, v], -1)
    for i in range(queries):
        rows = indices[i] if form == "top-k" else torch.arange(tokens - (queries - 1 - i) * causal)
        expected, want_lse = _exact(
            joint_q[:, i : i + 1], joint_k[:, rows], v[:, rows], False, scale
        )
        torch.testing.assert_close(out[:, i : i + 1].double(), expected, rtol=0.1, atol=0.1)
        torch.testing.assert_close(lse[:, i].double(), want_lse[..., 0], rtol=1e-5, atol=1e-5)


def _fa4_bwd(module: Any, d: int, d_v: int) -> None:
    """The gradients of float64 attention, by torch's autograd."""
    import torch

    torch.manual_seed(1)
    q, k = (torch.randn(1, 256, 1, d).bfloat16() for _ in range(2))
    v, dout = (torch.randn(1, 256, 1, d_v).bfloat16() for _ in range(2))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, want_lse = _exact(*exact, True, d**-0.5)
    gradients = torch.autograd.grad(expected, exact, dout.double())
    out, lse = expected.detach().bfloat16(), want_lse.detach().float()
    got = module._flash_attn_bwd(q, k, v, out, dout, lse, causal=True)
    for x, want in zip(got[:3], gradients, strict=True):
        torch.testing.assert_close(x.double(), want, rtol=1.0, atol=1.0)


def _flashinfer(module: Any) -> None:
    """Sizes for which its heuristics choose the tile of 64 queries and 256 keys."""
    import torch

    torch.manual_seed(1)
    batch, queries, heads, d, page, pages = 40, 8, 16, 128, 32, 16
    query = torch.randn(batch, queries, heads, d).bfloat16()
    cache = torch.randn(64, 2, 1, page, d).bfloat16()
    table = torch.randint(64, (batch, pages), dtype=torch.int32)
    lengths = torch.randint(queries, page * pages + 1, (batch,), dtype=torch.int32)
    lengths[0], lengths[1] = page * pages, queries
    out = module.batch_decode_with_paged_kv_cache(
        query, cache, table, lengths, seq_len_q=queries, mask_type="causal"
    )
    expected = torch.zeros(out.shape, dtype=torch.float64)
    for i, n in enumerate(lengths.tolist()):
        k, v = (cache[table[i].long(), x, 0].reshape(-1, d)[:n].double() for x in (0, 1))
        score = query[i].double() @ k.T * d**-0.5
        for j in range(queries):
            score[j, :, n - queries + 1 + j :] = -math.inf
        expected[i] = torch.softmax(score, -1) @ v
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


_MLA = f"{_KERNELS}/attention/mla/mla_decode_{{}}.py"
# Behind the barrier each warp reads its partner's row maximum; nothing keeps the partner from
# storing the next tile's before.  The edit puts the same barrier before the store, too.
_SECOND_BARRIER = (
    r"^( *)(\w+\.smem_exchange\[tidx\] = row_max_new)$",
    r"\1self.softmax_exchange_sync_bar.wait()\n\1\2",
)
_FLASHINFER = (
    ("flashinfer", "flashinfer"), ("flashinfer.attention", "flashinfer/attention"),
    ("flashinfer.attention.prims_ts", "flashinfer/attention/prims_ts"),
    ("flashinfer.cute_dsl", "flashinfer/cute_dsl"), ("flashinfer.api_logging", ""),
    ("flashinfer.trace", ""), ("flashinfer.trace.templates", ""),
    ("flashinfer.trace.templates.attention", ""), ("flashinfer.utils", ""),
)  # fmt: skip
_LSE = 1e-5  # logarithms of float32 sums of a few hundred terms

_FA4_PACKAGES = (
    ("flash_attn", "flash_attn"), ("flash_attn.cute", "flash_attn/cute"),
    ("quack", "../quack/quack"),
)  # fmt: skip


def _fa4_program(
    name: str, shapes: str, shows: str, call: Callable[[Any], None], *bounds: float, **named: Any
) -> Program:
    return Program(
        name, "flash-attention", "flash_attn/cute/interface.py", call, shapes, shows, bounds,
        packages=_FA4_PACKAGES, beside=("quack",), first=("quack.dsl",), **named,
    )  # fmt: skip


PROGRAMS: dict[str, Program] = {
    p.name: p
    for p in (
        _primitive(
            "1cta_mma_basic", "128x128x64; 64x64x64; scale-d 4; mask; collector",
            "layouts D and F, scale-input-d, lane mask, collector hints", _basic,
            0.0, 0.0, roundings(F16), 0.0, 0.0,
        ),
        _primitive("1cta_mma_mn_major", "128x128x128", "MN-major A and B, layout D", _verify),
        _primitive(
            "1cta_mma_pipeline", "4 tiles of K", "stages handed back by tcgen05.commit", _pipeline,
            steps(16),
        ),
        _primitive("2cta_mma_basic", "256x256x64", "layout A, pair TMA, pair alloc", _verify),
        _primitive("2cta_mma_tma_store", "256x256x64", "layout A, TMA store", _verify),
        _primitive(
            "clusterMxN_2cta_mma", "256x128x128 in 2x1 and 2x2; 128x256x128 without pairs",
            "layout A in several pairs of a cluster, commit to a pair", _clusters,
        ),
        _primitive(
            "mcast_clusterMxN_1cta_mma", "default", "TMA multicast, multicast commit", _verify
        ),
        _primitive(
            "mcast_clusterMxN_2cta_mma", "default",
            "layout A, pair TMA with multicast, multicast commit", _verify,
        ),
        _primitive(
            "tmem_ld_to_stmatrix_transpose", "every dtype", "16x256b ld, stmatrix", _transpose
        ),
        Program(
            "mla_decode_fp8", "cutlass", _MLA.format("fp8"), lambda m: _mla(m, 500),
            "128 heads, up to 500 tokens, 2 splits, pages of 128",
            "layout B, MN-major V, pair TMA, multicast commit",
            (roundings(E4M3, E4M3), _LSE), turns=32,
        ),
        Program(
            "mla_decode_fp8_long", "cutlass", _MLA.format("fp8"), lambda m: _mla(m, 1150),
            "128 heads, up to 1150 tokens, 2 splits, with the barrier that it lacks (see hazards)",
            "as mla_decode_fp8, 4 or 5 tiles a split", (roundings(E4M3, E4M3), _LSE),
            edit=_SECOND_BARRIER,
        ),
        Program(
            "mla_decode_fp16", "cutlass", _MLA.format("fp16"), lambda m: _mla(m, 500),
            "as mla_decode_fp8 in f16, pages of 64", "layout B in kind::f16, MN-major V",
            (roundings(F16, F16), _LSE), turns=32,
        ),
        Program(
            "mla_decode_fp16_long", "cutlass", _MLA.format("fp16"), lambda m: _mla(m, 1150),
            "as mla_decode_fp8_long in f16, pages of 64", "as mla_decode_fp16, more tiles",
            (roundings(F16, F16), _LSE), edit=_SECOND_BARRIER,
        ),
        Program(
            "fmha_bf16", "cutlass", f"{_KERNELS}/attention/fmha/fmha.py",
            lambda m: _fmha(m, "bf16", 128, 128, True), "256 x 256, d 128, causal",
            "TS with P over S, layout D", (roundings(BF16, BF16), _LSE),
        ),
        Program(
            "fmha_fp8", "cutlass", f"{_KERNELS}/attention/fmha/fmha.py",
            lambda m: _fmha(m, "fp8", 128, 128, True), "256 x 256, d 128, causal",
            "TS of e4m3, MN-major V", (roundings(E4M3, BF16), _LSE),
        ),
        Program(
            "dense_gemm_bf16", "cutlass", f"{_KERNELS}/dense_gemm/dense_gemm.py",
            lambda m: _gemm(m, False), "256x128x256", "layout A, TMA store",
        ),
        Program(
            "dense_gemm_fp8", "cutlass", f"{_KERNELS}/dense_gemm/dense_gemm.py",
            lambda m: _gemm(m, True), "256x128x256, B N-major", "layout A, 8-bit MN-major B",
        ),
        Program(
            "fmha_bwd", "cutlass", f"{_KERNELS}/attention/fmha/fmha_bwd.py", _fmha_bwd,
            "256 x 256, d 128, causal, bf16", "five MMAs, TS, MN-major A and B, reduce by TMA",
            (roundings(BF16, BF16, BF16),), atomics=True, turns=32,
        ),
        Program(
            "blockwise_gemm", "cutlass", f"{_KERNELS}/blockwise_gemm/blockwise_gemm.py",
            _blockwise_gemm, "256x256x384, e4m3, scales of 128 x 128 and 1 x 128",
            "layout D, products promoted from tensor memory", (roundings(BF16),),
            held_out="nothing",
        ),
        Program(
            "dense_gemm_persistent", "cutlass",
            f"{_KERNELS}/dense_gemm/dense_gemm_persistent.py", _persistent_gemm,
            "512x256x192 bf16", "layout A, static persistent tiles, TMA store", (0.0,),
            held_out="nothing",
        ),
        Program(
            "dense_gemm_persistent_dynamic", "cutlass",
            f"{_KERNELS}/dense_gemm/dense_gemm_persistent_dynamic.py", _persistent_gemm,
            "512x256x192 bf16, pair", "clusters that cancel others", (0.0,),
            held_out="coordinates of a refused request are poison, not an error",
        ),
        Program(
            "dense_gemm_persistent_dynamic_1cta", "cutlass",
            f"{_KERNELS}/dense_gemm/dense_gemm_persistent_dynamic.py",
            lambda m: _persistent_gemm(m, False, 64), "512x256x192 bf16, one CTA a tile",
            "the same without pairs", (0.0,),
            held_out="coordinates of a refused request are poison, not an error",
        ),
        _primitive(
            "slicek_m32n8k128", "32x8x128 and 32x32x128, 5 of its 6 variants",
            "M = 64 as 32 rows twice, A in tensor memory, lane masks, reuse of B", _slice_k,
            held_out="nothing",
        ),
        Program(
            "cluster_tmem_reduce", "cutlass",
            "examples/python/CuTeDSL/experimental/primitives/reduction/cluster_tmem_reduce.py",
            _verify, "default", "cp, ld, distributed shared memory", held_out="nothing",
        ),
        Program(
            "tokenspeed_m64", "tokenspeed", "tokenspeed_mla/mla_decode.py",
            lambda m: _tokenspeed(m, 16, 1), "2 x 16 heads, 300 and 65 tokens",
            ".ws M = 64: layout E, MN-major V", (roundings(E4M3, BF16), _LSE),
        ),
        Program(
            "tokenspeed_m128", "tokenspeed", "tokenspeed_mla/mla_decode.py",
            lambda m: _tokenspeed(m, 32, 4), "2 x 4 x 32 heads, 300 and 65 tokens, causal",
            "pairs M = 128: layout B, MN-major V", (roundings(E4M3, BF16), _LSE),
        ),
        _fa4_program(
            "fa4_fwd_128", "256 x 256, 2 heads of 1, causal, bf16", "TS with P over S, layout D",
            lambda m: _fa4(m, 128, 128, 2, 1), roundings(BF16, BF16), _LSE,
            held_out="names of register ranges; a tail that leaves an mbarrier armed is a rule",
        ),
        _fa4_program(
            "fa4_fwd_192", "256 x 256, d 192 and 128, causal, bf16", "as fa4_fwd_128",
            lambda m: _fa4(m, 192, 128, 1, 1), roundings(BF16, BF16), _LSE,
            held_out="names of register ranges; a tail that leaves an mbarrier armed is a rule",
        ),
        _fa4_program(
            "fa4_fwd_fp8", "256 x 256, d 128, causal, e4m3", "TS of e4m3, MN-major V",
            lambda m: _fa4(m, 128, 128, 1, 1, True), roundings(E4M3, BF16), _LSE,
            held_out="names of register ranges; a tail that leaves an mbarrier armed is a rule",
        ),
        _fa4_program(
            "fa4_fwd_256", "256 x 256, d 256, causal, bf16, pair", "pairs M = 256",
            lambda m: _fa4(m, 256, 256, 1, 1), roundings(BF16, BF16), _LSE, held_out="nothing",
        ),
        *(
            _fa4_program(
                f"fa4_mla_{form}", f"2 x 128 heads, 320 tokens, {text}",
                "pairs M = 128, S and O of two stages", functools.partial(_fa4_mla, form=form),
                roundings(BF16, BF16), _LSE,
                held_out="two arrivals at barrier.cluster are a hazard, not an error",
            )
            for form, text in (("dense", "causal"), ("top-k", "256 of them"),
                               ("paged", "pages of 64, causal"))
        ),
        *(
            _fa4_program(
                f"fa4_bwd_{d}", f"256 x 256, d {d} and 128, causal, bf16",
                "three kernels; pairs, bulk additions", functools.partial(_fa4_bwd, d=d, d_v=128),
                roundings(BF16, BF16, BF16), atomics=True,
                held_out="bulk additions; lanes that initialise one mbarrier together make one",
            )
            for d in (128, 192)
        ),
        Program(
            "flashinfer_q64_kv256", "flashinfer", "flashinfer/attention/prims_ts/decode.py",
            _flashinfer, "40 x 8 x 16 queries, 8 to 512 tokens, d 128, bf16, pages of 32, causal",
            ".ws M = 64 with other A in each half of the lanes (\"dual GEMM\"), TS",
            (roundings(BF16, BF16),), packages=_FLASHINFER,
        ),
    )
}  # fmt: skip
