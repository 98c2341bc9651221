"""One small right-or-wrong check per variant, on the software GPU, at the level of the ABI.

``make try`` runs it after an edit.  It calls the exported function of exactly the variant that was
built, on the small calls of its op (``snapmla.testing.workloads``): CPU tensors, unused cache bytes
poisoned, results compared with ``snapmla.testing.reference``.  The wide tests live in ``tests/``;
this one is about seconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from dsl_kernels.arguments import ordered
from dsl_kernels.spec import VariantSpec
from snapmla.errors import VariantError
from snapmla.runtime import variants
from snapmla.testing import metrics, workloads
from snapmla.testing.comparison import DecodeErrors, decode_errors
from snapmla.testing.workloads.call import DTYPES, Call, Job, Result, run_all, same_bits
from snapmla.testing.workloads.decode import DecodeJob
from snapmla.testing.workloads.samples import (
    ABSURD_PAGE,
    filled_cache,
    filled_rows,
    places,
    poisoned_cache,
    poisoned_rows,
    sample_query,
    sample_tokens,
)

if TYPE_CHECKING:
    import softgpu

__all__ = [
    "ABSURD_PAGE", "DTYPES", "DecodeErrors", "DecodeJob", "Result", "Workload", "check",
    "check_kernel", "decode_errors", "filled_cache", "filled_rows", "load", "metrics", "places",
    "poisoned_cache", "poisoned_rows", "sample_query", "sample_tokens",
]  # fmt: skip


def check(spec: VariantSpec, directory: Path) -> Result:
    """Runs the variant of ``spec`` in ``directory`` on the software GPU.

    Raises:
        VariantError: it is not there.
    """
    return check_kernel(spec, load(spec, directory))


def check_kernel(
    spec: VariantSpec,
    kernel: Callable[..., Any],
    names: Sequence[str] | None = None,
    *,
    again: bool = False,
    most: int | None = None,
) -> Result:
    """Runs ``kernel``, the variant of ``spec``, on the small calls of its op.

    Args:
        names: of its arguments, in order; None: a kernel of the software GPU, which has them.
        again: each call twice more, behind itself: what a grid writes before it has waited for
            the one before, which wrote the same, is found.  A call that writes over what it reads
            is left out: a second one has other inputs.  Of an op with ``behind``, those calls.
        most: how many of the calls; None: all of them.
    """
    known = cast("softgpu.LoadedKernel", kernel).names.arguments if names is None else names
    torch.manual_seed(0)
    work, tiles = workloads.of(spec.op), 0
    run = lambda given: kernel(*ordered(known, given))
    done: list[Call] = []

    def ran() -> Iterator[Call]:
        nonlocal tiles
        for call in run_all(itertools.islice(work.small(spec), most), run):
            tiles += work.tiles(spec, call)
            if again and work.behind is None and not _in_place(call):
                done.append(call)
            yield call

    result = work.judge(spec, ran())
    if not tiles:
        return without_work(spec)
    if again and result.passed and work.behind is not None:
        return work.judge(spec, run_all(work.behind(spec), run))
    if again and result.passed and not done:
        return Result(False, f"{spec.op}: every call writes over what it reads; none is made again")
    if again and result.passed:
        result = work.judge(spec, run_all((call for call in done for _ in range(2)), run))
    return result


def _in_place(call: Call) -> bool:
    """Tells if a result of a call lies in the memory of another argument."""
    lies = {
        name: x.untyped_storage().data_ptr()
        for name, x in call.arguments.items()
        if isinstance(x, torch.Tensor) and x.numel()
    }
    written = set(call.results.values())
    read = {at for name, at in lies.items() if name not in written}
    return any(lies.get(name) in read for name in written)


def without_work(spec: VariantSpec) -> Result:
    """The outcome of a case that has no tile of work: no kernel can get it wrong."""
    return Result(
        False,
        f"no tile of work: the {spec.op} case of {spec.arch} has none but empty lists or "
        "sequences, and would prove nothing",
    )


def job_of(spec: VariantSpec, planner: variants.Kernel | None) -> Job | None:
    """The job of an op's workload with its architecture's lengths, None if it has no jobs.

    Args:
        planner: the plan_decode kernel; None plans with ``reference_plan``.
    """
    make = workloads.of(spec.op).job
    if make is None:
        return None
    torch.manual_seed(0)
    lengths = Workload.BY_ARCH.get(spec.arch, Workload.LENGTHS)
    return make(spec, lengths, cast(variants.Kernel, planner))


def load(spec: VariantSpec, directory: Path) -> softgpu.LoadedKernel:
    """The variant for the software GPU.  Raises VariantError if ``directory`` lacks it."""
    artifact = variants.find(spec, [directory])
    if artifact is None:
        raise VariantError(f"{spec.name}: not built in {directory}")
    return cast("softgpu.LoadedKernel", variants.load(artifact, "cpu"))


def load_or_build(spec: VariantSpec, directory: Path) -> softgpu.LoadedKernel:
    """A helper of another variant's check: compiled, as at run time, where ``directory`` lacks it.

    Raises VariantError if that is not allowed here.
    """
    try:
        return load(spec, directory)
    except VariantError:
        return load(spec, variants.find_or_build(spec, need_library=False).directory)


class Workload:
    """Small calls of a variant that take every path, for the hazard check and the mutation study.

    A decode is a dependent launch right behind the planning kernel.  Sequences have 0, 1 and many
    tokens, and the ring of stages wraps several times.  The launch behind decode combines splits.
    """

    LENGTHS = (70, 0, 450, 64, 1)
    # SM100's FP8 decode passes Q through the KV ring: before its first tile a CTA has more items
    # without one than the ring has stages, so that a role that skips a wait is a phase off, and
    # another CTA's item has more tiles than there are stages, with items behind it.
    BY_ARCH: ClassVar[dict[str, Sequence[int]]] = {"sm_100a": (*7 * (0,), 580, 70, 1)}

    def __init__(self, spec: VariantSpec, directory: Path) -> None:
        self.spec, self.kernel = spec, load(spec, directory)
        self.job: Job | None = None
        if workloads.of(spec.op).job is not None:
            planner = load_or_build(VariantSpec(op="plan_decode", arch=spec.arch), directory)
            self.job = job_of(spec, planner)
        self.expected: tuple[torch.Tensor, torch.Tensor] | None = None
        # True: a helper's calls run behind themselves, too; of other ops, those of ``behind`` do
        self.again = False

    def run(self) -> Result:
        """The result against the reference, then bit for bit against the first run."""
        if self.job is None:
            more = self.spec.family.helper or workloads.of(self.spec.op).behind is not None
            return check_kernel(self.spec, self.kernel, again=self.again and more)
        if not self.job.tiles:
            return without_work(self.spec)
        got = self.job.run(self.kernel)
        if self.expected is not None:
            names = ("out", "lse")
            return same_bits(dict(zip(names, zip(got, self.expected, strict=True), strict=True)))
        errors = self.job.errors(got)
        if errors.right:
            self.expected = got
        return Result(errors.right, str(errors))
