"""Libraries as C programs see them: the generated header, and launch.c over a stand-in driver.

A small libcuda answers the dozen driver calls and prints what it is asked, so that the whole way
from a typed C call to cuLaunchKernelEx runs without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import artifacts, bundle, link, render, toolchain
from codegen.artifacts import Record
from codegen.precompile import Report, precompile
from dsl_kernels.spec import VariantSpec, decode_spec
from tests.support.libcuda import DRIVER

pytestmark = pytest.mark.skipif(
    not toolchain.have_compiler() or link.identity() is None, reason="needs DSL and C compiler"
)
MERGE = VariantSpec(op="merge")


PROGRAM = r"""
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include "merge_obf16_sm90a.h"
#include <tvm/ffi/extra/c_env_api.h>
static int64_t acc[] = {4, 64, 528}, acc_s[] = {64 * 528, 528, 1}, la[] = {4, 64}, la_s[] = {64, 1};
static int64_t sb[] = {3}, one[] = {1}, o[] = {2, 1, 64, 512}, o_s[] = {64 * 512, 64 * 512, 512, 1};
static int64_t l[] = {2, 64, 1}, l_s[] = {64, 1, 1}, u[] = {0, 2}, u_s[] = {2, 1};
static DLTensor make(int n, int64_t *shape, int64_t *strides, int code, int bits) {
  DLDataType type = {(uint8_t)code, (uint8_t)bits, 1};
  DLTensor t = {(void *)0x1000, {kDLCUDA, 1}, n, type, shape, strides, 0};
  return t;
}
static pthread_barrier_t gate;
static void *first_use(void *unused) {
  DLTensor a = make(3, acc, acc_s, kDLFloat, 16), b = make(2, la, la_s, kDLFloat, 32);
  DLTensor c = make(1, sb, one, kDLInt, 32), d = make(4, o, o_s, kDLBfloat, 16);
  DLTensor e = make(3, l, l_s, kDLFloat, 32), f = make(2, u, u_s, kDLInt, 32);
  (void)unused;
  pthread_barrier_wait(&gate);
  if (snapmla_merge_obf16_sm90a(&a, &b, &c, &f, &d, &e, 1.0, 0.0)) printf("failed\n");
  return NULL;
}
static int many(int n) {
  pthread_t threads[64];
  int i;
  pthread_barrier_init(&gate, NULL, (unsigned)n);
  for (i = 0; i < n; ++i) pthread_create(&threads[i], NULL, first_use, NULL);
  for (i = 0; i < n; ++i) pthread_join(threads[i], NULL);
  return 0;
}
static void report(void) {
  TVMFFIObjectHandle h;
  TVMFFIErrorMoveFromRaised(&h);
  TVMFFIErrorCell *cell = (TVMFFIErrorCell *)((char *)h + sizeof(TVMFFIObject));
  printf("%.*s: %.*s\n", (int)cell->kind.size, cell->kind.data, (int)cell->message.size,
         cell->message.data);
  TVMFFIObjectDecRef(h);
}
static int nothing(void) {
  DLTensor a = make(3, acc, acc_s, kDLFloat, 16), b = make(2, la, la_s, kDLFloat, 32);
  DLTensor c = make(1, sb, one, kDLInt, 32), d = make(4, o, o_s, kDLBfloat, 16);
  DLTensor f = make(2, u, u_s, kDLInt, 32);
  if (snapmla_merge_obf16_sm90a(NULL, NULL, NULL, NULL, NULL, NULL, 1.0, 0.0)) report();
  if (snapmla_merge_obf16_sm90a(&a, &b, &c, &f, &d, NULL, 1.0, 0.0)) report();
  b.shape = NULL;
  if (snapmla_merge_obf16_sm90a(&a, &b, &c, &f, &d, NULL, 1.0, 0.0)) report();
  a.strides = NULL;
  if (snapmla_merge_obf16_sm90a(&a, &b, &c, &f, &d, NULL, 1.0, 0.0)) report();
  return 1;
}
int main(int argc, char **argv) {
  DLTensor a = make(3, acc, acc_s, kDLFloat, 16), b = make(2, la, la_s, kDLFloat, 32);
  DLTensor c = make(1, sb, one, kDLInt, 32), d = make(4, o, o_s, kDLBfloat, 16);
  DLTensor e = make(3, l, l_s, kDLFloat, 32), f = make(2, u, u_s, kDLInt, 32);
  int code, i;
  if (argc == 2 && !strcmp(argv[1], "null")) return nothing();
  if (argc > 2 && strcmp(argv[1], "device")) return many(atoi(argv[2]));
  if (argc > 2) {
    a.device.device_id = b.device.device_id = c.device.device_id = atoi(argv[2]);
    d.device.device_id = e.device.device_id = f.device.device_id = atoi(argv[2]);
  }
  TVMFFIEnvSetStream(kDLCUDA, a.device.device_id, (void *)0x77, NULL);
  if (argc == 2) a.ndim = 2;
  for (i = 0; i < 2; ++i) {
    code = snapmla_merge_obf16_sm90a(&a, &b, &c, &f, &d, &e, 1.0, 0.0);
    if (code) {
      report();
      return 1;
    }
  }
  return 0;
}
"""


CC = [str(toolchain.c_compiler()), "-Wall", "-Wextra", "-Werror", "-std=gnu11"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines are built; holds the stand-in driver."""
    made = tmp_path_factory.mktemp("engine")
    (made / "driver.c").write_text(DRIVER)
    (made / "driver").mkdir()
    command = [*CC, "-shared", "-fPIC", "driver.c", "-o", "driver/libcuda.so.1"]
    subprocess.run(command, cwd=made, check=True)
    return made


def engine(folder: Path, name: str, source: str, library: Path) -> Path:
    """Compiles a C program that calls one library."""
    ffi = toolchain.tvm_ffi_lib_dir()
    assert ffi is not None
    (folder / f"{name}.c").write_text(source)
    subprocess.run(
        [*CC, f"-I{ffi.parent / 'include'}", f"{name}.c", str(library), f"-L{ffi}", "-pthread",
         "-Wl,--no-as-needed", "-ltvm_ffi", f"-Wl,-rpath,{ffi}:{library.parent}", "-o", name],
        cwd=folder, check=True,
    )  # fmt: skip
    return folder / name


@pytest.fixture(scope="module")
def program(folder: Path, variant_dir: Path) -> Path:
    """An engine in C that calls the merge kernel."""
    record = precompile([MERGE], variant_dir, jobs=1).records[MERGE.name]
    (folder / "merge_obf16_sm90a.h").write_text(render.header(record))
    return engine(folder, "engine", PROGRAM, artifacts.paths(variant_dir, MERGE)["so"])


def run(program: Path, case: str = "", *arguments: str, driver: bool = True) -> tuple[int, str]:
    """(exit status, output) with the stand-in driver behaving as ``case``."""
    environment = {**os.environ, "FAKE": case}
    if driver:
        environment["LD_LIBRARY_PATH"] = str(program.parent / "driver")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout + done.stderr


def test_typed_call_reaches_the_driver(program: Path) -> None:
    code, out = run(program)
    lines = out.splitlines()
    assert code == 0, out
    # loaded once, for both devices, with all the shared memory they grant
    assert lines.count("load") == 1
    for device in (0, 1):
        assert f"attribute 8 = 232448 on {device}" in lines
        assert f"attribute 14 = 1 on {device}" in lines
    # loading is allowed while a graph is being captured, and the thread's mode is as it was then
    assert lines.index("capture mode 2") < lines.index("load") < lines.index("capture mode 0")
    assert lines.index("capture mode 0") > lines.index("attribute 14 = 1 on 1")
    assert out.count("capture mode") == 2, "once, not at every launch"
    first = next(line for line in lines if line.startswith("launch"))
    grid, block, smem, stream, attributes, tokens = first.removeprefix("launch ").split(" | ")
    assert [int(x) > 0 for x in grid.split()] == [True] * 3 and int(block.split()[0]) % 32 == 0
    assert int(smem) >= 0 and stream == "stream 0x77" and tokens == "tokens 0x1000"
    assert int(attributes.split()[1]) >= 1  # programmatic dependent launch


def around_launches(out: str) -> list[str]:
    """What concerns contexts, and the launches, of two calls."""
    lines = [line.split()[0] if line.startswith("launch") else line for line in out.splitlines()]
    return [
        line for line in lines if line == "launch" or line.startswith(("context", "device", "no"))
    ]


@pytest.mark.parametrize("device", [0, 1])
def test_a_thread_without_a_context_ends_without_one(program: Path, device: int) -> None:
    """The tensors' device gets a context, no other one does: device 0's costs hundreds of MB."""
    code, out = run(program, "", "device", str(device))
    call = [f"device {device}", "launch", "no device"]
    assert code == 0 and around_launches(out) == [f"context on {device}", *call, *call], out
    assert out.count("function on") == out.count(f"function on {device}") == 1, "looked up once"


def test_a_context_has_a_function_of_its_own(program: Path) -> None:
    """A context of the same device that came later, which may have the first one's address."""
    code, out = run(program, "contexts", "device", "0")
    assert code == 0 and out.count("function on 0") == out.count("launch") == 2, out


def test_a_stream_of_another_context_gets_the_kernel(program: Path) -> None:
    """What is current says which function it is, and the driver refuses that."""
    code, out = run(program, "stream")
    assert code == 0 and out.count("launch") == 2, out


def test_a_kernel_that_has_no_function_is_launched_as_it_is(program: Path) -> None:
    code, out = run(program, "kernels")
    assert code == 0 and "launch" in out, out


@pytest.mark.parametrize("case", ["current", "current and failing"])
def test_the_callers_device_is_current_again(program: Path, case: str) -> None:
    code, out = run(program, case, "device", "1")
    call = ["device 1", "launch", "device 0"]
    contexts = [line for line in around_launches(out) if not line.startswith("context")]
    assert contexts == call * (1 if code else 2) and code == ("failing" in case), out
    code, out = run(program, "current", "device", "0")
    assert code == 0 and around_launches(out) == ["launch", "launch"], "it is current: left alone"


def test_a_context_that_cannot_be_made_is_told_of_its_device(program: Path) -> None:
    """... not of device 0: neither is current."""
    code, out = run(program, "half, no memory", "device", "1")
    assert code == 1 and "launch" not in out and "context on 0" not in out, out
    assert out.endswith("RuntimeError: CUDA error 2 (CUDA_ERROR_FAKE): as asked\n")


def test_wrong_argument_needs_no_driver(program: Path) -> None:
    code, out = run(program, "", "bad", driver=False)
    assert code == 1 and out.startswith("ValueError: Mismatched Tensor") and "o_accum" in out
    assert "ndim=3" in out


def test_null_is_an_error_not_a_crash(program: Path) -> None:
    code, out = run(program, "", "null", driver=False)
    wanted = "expected a DLTensor with shape and strides, got NULL"
    names = ("o_accum", "lse", "lse_accum", "o_accum")
    assert code == 1 and out.splitlines() == [f"ValueError: {name}: {wanted}" for name in names]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("old", "was built with CUDA 13 and the driver supports CUDA 12.4: update the driver, or"),
        ("arch", "this variant was built for sm_90a and device 0 is sm_80"),
        ("launch", "CUDA error 701 (CUDA_ERROR_FAKE): as asked"),
        (
            "full",
            "the kernel could not be loaded on device 1: CUDA error 2 (CUDA_ERROR_FAKE): as asked",
        ),
        ("other", "this variant was built for sm_90a and device 1 is sm_81"),
        ("image", "CUDA error 200 (CUDA_ERROR_FAKE): as asked"),  # the right GPU: a broken file
    ],
)
def test_driver_errors_are_one_sentence(program: Path, case: str, words: str) -> None:
    if toolchain.flavour() != "cu13":
        pytest.skip("built with another CUDA")
    code, out = run(program, case)
    assert code == 1
    last = out.splitlines()[-1]
    assert last.startswith("RuntimeError: ") and words in last
    assert ("unload" in out) is (case == "arch")  # what was loaded and does not run


def test_threads_that_come_first_together(program: Path) -> None:
    """One loads, the others wait for it and find every kernel on every device."""
    code, out = run(program, "slow", "many", "16")
    lines = out.splitlines()
    assert code == 0 and "failed" not in lines, out
    assert lines.count("load") == 1
    assert sum(line.startswith("launch") for line in lines) == 16
    first = next(i for i, line in enumerate(lines) if line.startswith("launch"))
    assert lines.index("attribute 14 = 1 on 1") < first


TWO_KERNELS = """
import sys
from pathlib import Path
from codegen import compile as compiler, link, toolchain
compiler.set_target("sm_90a")
toolchain.import_compiler()
import cutlass
from cutlass import cute
from dsl_kernels.blocks import compat

@cute.kernel
def first(x: cute.Tensor):
    x[cute.arch.thread_idx()[0]] *= 2

@cute.kernel
def second(x: cute.Tensor):
    x[cute.arch.thread_idx()[0]] += 1

@cute.jit
def both(x: cute.Tensor, stream: object):
    first(x).launch(grid=[6, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1], smem=100000, stream=stream)
    second(x).launch(grid=[3, 1, 1], block=[32, 1, 1], smem=2048, stream=stream, use_pdl=True)

out = Path(sys.argv[1])
x = compat.vector(cutlass.Float32, compat.sym())
options = f"{compiler.OPTIONS} --gpu-arch sm_90a --dump-dir={out}"
made = cute.compile(both, x, compat.env_stream(), options=options)
made.export_to_c(str(out / "both.o"), function_name="both")
link.link(out / "both.o", out / "both.so", "sm_90a", toolchain.flavour())
"""
TWO_CALLS = r"""
#include <stdio.h>
#include <tvm/ffi/c_api.h>
int __tvm_ffi_both(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result);
int main(void) {
  int64_t shape[] = {64}, stride[] = {1};
  DLTensor x = {(void *)0x1000, {kDLCUDA, 1}, 1, {kDLFloat, 32, 1}, shape, stride, 0};
  TVMFFIAny arg = {0}, result = {0};
  arg.type_index = kTVMFFIDLTensorPtr;
  arg.v_ptr = &x;
  return __tvm_ffi_both(NULL, &arg, 1, &result);
}
"""


def test_a_function_of_two_kernels(folder: Path) -> None:
    """One module, both kernels ready on every device, launched in order with their own geometry."""
    (folder / "two.py").write_text(TWO_KERNELS)  # kernels need a file: the DSL reads their source
    done = subprocess.run(
        [sys.executable, "two.py", str(folder)], capture_output=True, text=True, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(artifacts.ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    code, out = run(engine(folder, "two", TWO_CALLS, folder / "both.so"))
    lines = out.splitlines()
    assert code == 0 and lines.count("load") == 1, out
    for device in (0, 1):
        assert lines.count(f"attribute 8 = 232448 on {device}") == 2
        assert lines.count(f"attribute 14 = 1 on {device}") == 2
    launches = [line for line in lines if line.startswith("launch")]
    assert [line.split(" | ")[:3] for line in launches] == [
        ["launch 6 1 1", "64 1 1", "100000"], ["launch 3 1 1", "32 1 1", "2048"],
    ]  # fmt: skip


C_TYPES = {
    "float16": "kDLFloat, 16",
    "uint8": "kDLUInt, 8",
    "int32": "kDLInt, 32",
    "bfloat16": "kDLBfloat, 16",
}
EXTENTS = {  # others: 16
    "pages": 8, "P": 64, "b": 2, "b_q": 2, "s_q": 1, "h": 16, "n_units_or_0": 0,
    "tokens_or_0": 0,
}  # fmt: skip


def caller(record: Record) -> str:
    """A C program that calls a variant once with contiguous tensors on device 1, scalars 1."""
    lines, passed = [], []
    for i, argument in enumerate(record.arguments):
        if "shape" not in argument:
            passed.append("1")
            continue
        shape = [n if isinstance(n, int) else EXTENTS.get(n, 16) for n in argument["shape"]]
        strides = [1]
        for extent in reversed(shape[1:]):
            strides.insert(0, strides[0] * extent)
        kind = C_TYPES.get(argument["dtype"], "kDLFloat, 32")
        lines += [
            f"  int64_t n{i}[] = {{{str(shape)[1:-1]}}}, s{i}[] = {{{str(strides)[1:-1]}}};",
            f"  DLTensor t{i} = {{(void *)0x10000, {{kDLCUDA, 1}}, {len(shape)}, {{{kind}, 1}},",
            f"                 n{i}, s{i}, 0}};",
        ]
        passed.append(f"&t{i}")
    call = f"  return {record.symbol}({', '.join(passed)});"
    return "\n".join([f'#include "{record.name}.h"', "int main(void) {", *lines, call, "}\n"])


@pytest.mark.parametrize(("row_tile", "ctas"), [(16, 1), (128, 2)])
def test_decode_launches_its_merge(
    folder: Path, variant_dir: Path, row_tile: int, ctas: int
) -> None:
    """One call: decode, a cluster where it needs one, then merge, which may start early (PDL)."""
    spec = decode_spec("etap", row_tile, 64, "bf16")
    record = precompile([spec], variant_dir, jobs=1).records[spec.name]
    (folder / f"{record.name}.h").write_text(render.header(record))
    library = artifacts.paths(variant_dir, spec)["so"]
    code, out = run(engine(folder, record.name, caller(record), library))
    lines = out.splitlines()
    assert code == 0 and lines.count("load") == 1, out
    assert lines.count("attribute 8 = 232448 on 1") == 2, "both kernels, on each device"
    decode, merge = (line.split(" | ") for line in lines if line.startswith("launch"))
    assert decode[0].split()[1] == str(ctas) and merge[1] != decode[1]
    assert (decode[1], decode[2]) == (f"{record.threads} 1 1", str(record.dynamic_smem))
    assert lines[-1] == "no device", "as before the call"


THREADS = """
import sys, threading
from pathlib import Path
import torch
from dsl_kernels.spec import decode_spec
from snapmla.runtime import variants as runtime
from softgpu.runtime import as_cuda

spec = decode_spec("etap", 16, 64, "bf16")
decode = runtime.load(runtime.find(spec, [Path(sys.argv[1])]), "cuda")
shapes = {"uint8": torch.uint8, "int32": torch.int32, "bfloat16": torch.bfloat16,
          "float16": torch.float16}
extents = {"pages": 8, "b": 2, "s_q": 1, "h": 16, "width": 4, "b_plus_1": 3}
record = runtime._record(Path(sys.argv[1]), spec.name)
arguments = [
    as_cuda(torch.zeros([n if isinstance(n, int) else extents.get(n, 16) for n in a["shape"]],
                        dtype=shapes.get(a["dtype"], torch.float32))) if "shape" in a else 1
    for a in record["arguments"]
]
def hammer():
    for _ in range(10):
        decode(*arguments)
both = [threading.Thread(target=hammer) for _ in range(2)]
for thread in both: thread.start()
for thread in both: thread.join()
"""


def test_python_threads_do_not_come_between_the_launches_of_a_call(
    folder: Path, variant_dir: Path
) -> None:
    """Decode and merge share a workspace: on one stream nothing may be launched between them."""
    spec = decode_spec("etap", 16, 64, "bf16")
    record = precompile([spec], variant_dir, jobs=1).records[spec.name]
    done = subprocess.run(
        [sys.executable, "-c", THREADS, str(variant_dir)], capture_output=True, text=True,
        cwd=artifacts.ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(folder / "driver"), "FAKE": "slow"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    blocks = [line.split(" | ")[1] for line in done.stdout.splitlines() if " | " in line]
    assert len(set(blocks)) == 2 and blocks[::2] == [f"{record.threads} 1 1"] * 20, blocks
    assert len(set(blocks[1::2])) == 1, blocks


def test_a_device_of_another_arch_beside_a_good_one(program: Path) -> None:
    code, out = run(program, "half")
    assert code == 0 and "attribute 8 = 232448 on 1" in out and "on 0" not in out


def test_no_driver_at_all(program: Path) -> None:
    if toolchain.driver_major() is not None:
        pytest.skip("there is a driver")
    code, out = run(program, driver=False)
    assert code == 1 and "there is no NVIDIA driver here" in out


EXAMPLE = artifacts.ROOT / "examples" / "c"
EXAMPLE_SPECS = [
    VariantSpec(op="append_kv"), VariantSpec(op="plan_decode"),
    decode_spec("etap", 16, 64, "bf16"),
]  # fmt: skip


@pytest.fixture(scope="module")
def example(folder: Path, variant_dir: Path) -> Path:
    """examples/c/decode.c, compiled as its README says against what a bundle has of it."""
    records = list(precompile(EXAMPLE_SPECS, variant_dir, jobs=1).records.values())
    root = folder / "bundle"
    bundle.copy_variants(root / "snapmla/variants", root / "include/snapmla", records, variant_dir)
    subprocess.run(
        ["sh", EXAMPLE / "build.sh", folder / "bundle", folder / "decode"], check=True,
        env={**os.environ, "PYTHON": sys.executable, "CC": str(toolchain.c_compiler())},
    )  # fmt: skip
    return folder / "decode"


def test_the_c_example_launches_what_it_says(example: Path) -> None:
    code, out = run(example)
    lines = out.splitlines()
    launches = [line.split(" | ") for line in lines if line.startswith("launch")]
    assert code == 0 and len(launches) == 4, out  # append, plan, decode and its merge
    assert launches[2][0] == "launch 1 132 1", "row blocks, parts"
    assert {launch[3] for launch in launches} == {"stream 0x55"}
    assert lines[-2] == "wait for 0x55"
    assert lines[-1] == "out 0.000, lse 0.0000; empty: out 0, lse 0", "nothing was computed"


def test_the_c_example_prints_errors(example: Path) -> None:
    """A failed launch, and, as its README shows, what it is without a driver."""
    code, out = run(example, "failing")
    assert code == 1 and "append: RuntimeError: CUDA error 701 (CUDA_ERROR_FAKE): as asked" in out
    if toolchain.driver_major() is not None:
        pytest.skip("there is a driver")
    code, out = run(example, driver=False)
    readme = (EXAMPLE / "README.md").read_text()
    assert code == 1 and out.startswith("append: RuntimeError: libcuda.so.1 cannot be used")
    assert f"```text\n{out}```\n" in readme


def test_header_is_cxx_too(program: Path) -> None:
    ffi = toolchain.tvm_ffi_lib_dir()
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"]
    done = subprocess.run(
        [*command, f"-I{ffi.parent / 'include'}", "merge_obf16_sm90a.h"],  # type: ignore[union-attr]
        cwd=program.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_header_command(built: Report, variant_dir: Path) -> None:
    command = [sys.executable, "-m", "codegen", "header"]
    for name, code, words in (
        ("decode_etap_r64_p64_obf16_sm90a", 0, "DLTensor *  content,"),
        ("decode_etap_r64_p64_obf16_st7_sm90a", 1, "is not built in"),
    ):
        done = subprocess.run(
            [*command, name], capture_output=True, text=True, cwd=artifacts.ROOT,
        )  # fmt: skip
        assert done.returncode == code and words in done.stdout
