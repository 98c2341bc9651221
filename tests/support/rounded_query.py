"""Inputs on which FP8 products of a rounded query show, for tests of pipeline ``mix8`` on either
device: every product of Q.K has one sign."""

from __future__ import annotations

import torch
from torch import Tensor

from dsl_kernels.formats.dims import KV_LORA_RANK
from dsl_kernels.formats.ds_mla import GROUPS
from dsl_kernels.spec import VariantSpec
from snapmla.testing import record_qk
from snapmla.testing.record_job import RecordJob, RecordShape
from snapmla.testing.record_reference import record_decode_reference
from snapmla.testing.sparse_job import HEAD_SCALE

NAME = "sparse_decode_mix8_r64_obf16_sm90a"
LOGITS = (10.0, 40.0, 80.0)
IDLE = 5  # entries of -1 in a list


def equal_to_tokens(
    spec: VariantSpec, heads: int, n: int, logit: float, device: torch.device | str = "cpu"
) -> RecordJob:
    """Two lists of ``n`` tokens in any order, ``IDLE`` entries of -1 among them.  Each head's query
    equals a token of its list, times what makes their logit ``logit``."""
    width = n + IDLE
    shape = RecordShape(heads, width, (width,) * 2, 1, parts=1, dense=True)
    job = RecordJob(spec, shape, device=device)
    job.indices[:, torch.randperm(width)[:IDLE]] = -1
    call = job.call()
    content, scales, rope = call.fields()
    values = content * scales.repeat_interleave(KV_LORA_RANK // GROUPS, 1)
    keys = torch.cat((values, rope), 1)
    for i, q in enumerate(job.q16.flatten(0, 1)):
        row, named = call.named(i)
        own = keys[row[named]][torch.arange(heads) % n]
        q.copy_(own * (logit / (HEAD_SCALE * own.square().sum(1, keepdim=True))))
    return job


def share_of_bound(job: RecordJob, lse: Tensor) -> float:
    """Largest error of an LSE as a share of its bound; the truth is that of the rounded query.

    The bound is on what the sums may do.  All of the job's rows must have tokens.
    """
    call = job.call()
    truth = record_decode_reference(call._replace(q=record_qk.rounded(call.q)))[1]
    off = lse.transpose(0, 1).flatten(1).double() - truth
    bounds = record_qk.bounds(call)
    return float(torch.where(off < 0, off / bounds.low, off / bounds.high).max())
