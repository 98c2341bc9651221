"""A torch before 2.10, for scripts of tests: no exchange API, and ``__dlpack__`` refuses."""

WITHOUT_API = """
import os
os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"  # it would compile what torch lacks
import torch
del torch.Tensor.__dlpack_c_exchange_api__
def refused(*_, **__):
    raise AssertionError("Tensor.__dlpack__ was called: it synchronises streams")
torch.Tensor.__dlpack__ = refused
"""
