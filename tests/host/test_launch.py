"""``snapmla.runtime.launch``: what is asked of the device, and how arguments become what TVM FFI
takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from codegen import artifacts, link
from codegen.precompile import precompile
from dsl_kernels.spec import VariantSpec
from snapmla.compat import metadata_pair
from snapmla.runtime import launch
from tests.support.needs import needs_compiler
from tests.support.old_torch import WITHOUT_API


def test_capture_is_asked_of_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs the second's stream is captured, and the first is current."""
    current = [0]

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == 1)
    monkeypatch.setattr(launch, "several_gpus", lambda: True)
    assert [launch.capturing(torch.device("cuda", i)) for i in (0, 1)] == [False, True]
    assert metadata_pair.stream_of(torch.device("cpu")) == 0 and current == [0]
    assert metadata_pair.stream_of(torch.device("cuda", 1)) is None


@pytest.mark.parametrize("guards", [True, False], ids=["torch's guards", "without them"])
def test_alike_but_for_addresses(monkeypatch: pytest.MonkeyPatch, guards: bool) -> None:
    if not guards:
        monkeypatch.setattr(launch, "_guards", None)
    x, y = torch.zeros(3, 2, 8), torch.zeros(4, dtype=torch.int32)
    alike = launch.alike(x, y)
    assert alike(x, y) and alike(torch.ones(3, 2, 8), y.clone())
    with torch.inference_mode():
        made_there = torch.zeros_like(x)
    for other in (
        x.double(), x[:2], x[:, :1].expand(3, 2, 8), torch.zeros(3, 2, 9)[..., :8], x.flatten(1),
        torch._neg_view(x), x.as_subclass(torch.nn.Parameter), x.to("meta"), made_there, None, y,
    ):  # fmt: skip
        assert not alike(other, y), other
    assert not launch.alike(x, x.clone())(x, x), "one tensor twice"


MERGE = VariantSpec(op="merge")
WITHOUT_EXCHANGE_API = (
    WITHOUT_API
    + """
import sys
import tvm_ffi
from snapmla.runtime import launch

for dtype in (torch.int32, torch.uint8, torch.bfloat16, torch.float32):
    whole = torch.zeros(6, 8, dtype=dtype)
    made = launch.as_argument(whole[1:5, ::2])
    assert tuple(made.shape) == (4, 4) and tuple(made.strides) == (8, 2)
    assert made.data_ptr() == whole[1:5].data_ptr()
merge = tvm_ffi.load_module(sys.argv[1])["snapmla_merge_obf16_sm90a"]
tensors = [torch.zeros(4, 64, 512), torch.zeros(4, 64), torch.zeros(3, dtype=torch.int32),
           torch.zeros(0, 2, dtype=torch.int32),
           torch.zeros(2, 1, 64, 512, dtype=torch.bfloat16), torch.zeros(2, 64, 1)]
for given in (tensors, [launch.as_argument(t) for t in tensors]):
    try:
        merge(*given, 1.0, 0.0)
    except ValueError as error:
        assert "device_type" in str(error), error  # all the rest is right
    else:
        raise AssertionError("a kernel ran on CPU tensors")
print("right")
"""
)


@needs_compiler
def test_arguments_of_a_torch_without_the_exchange_api(variant_dir: Path) -> None:
    """Before torch 2.10 ``Tensor.__dlpack__`` is what is left, and it synchronises streams.

    In 2.9 it makes the default stream wait, which no capture allows, and refuses tensors of a GPU
    that is not the current one.
    """
    if link.identity() is None:
        pytest.skip("nothing can be linked here")
    precompile([MERGE], variant_dir, jobs=1)
    library = artifacts.paths(variant_dir, MERGE)["so"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXCHANGE_API, str(library)], capture_output=True, text=True,
        cwd=artifacts.ROOT,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout == "right\n", done.stderr


def test_where_a_tensor_begins() -> None:
    """Asked again it says so; what had no memory then is never where it was."""
    tensor, empty = torch.zeros(4), torch.zeros(0)
    ask, at = launch.begin_of(tensor)
    assert ask() == at == tensor.data_ptr()
    assert launch.begin_of(empty)[1] == empty.data_ptr()
    tensor.untyped_storage().resize_(0)
    assert ask() != at
    ask, at = launch.begin_of(tensor)
    assert ask() != at
