"""Survey of this installation (``collect``): its parts, what runs here, and what is missing.

Works without a GPU, without the compiler and without TVM FFI.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from dsl_kernels import registry
from dsl_kernels.families import FAMILIES, UNTESTED
from dsl_kernels.spec import VariantSpec, decode_spec
from snapmla.errors import SnapMLAError
from snapmla.runtime import env
from snapmla.runtime import variants as runtime

PAGE, ROW_TILES = 64, (16, 32, 64, 128)
_PIPELINES = {"sm_90a": "etap", "sm_100a": "ws"}
_LIBRARIES = ("apache-tvm-ffi", "numpy", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Card:
    """One GPU: name, capability as "sm_90", and its kernels' target, None if there are none."""

    name: str
    capability: str
    arch: str | None


@dataclass(frozen=True)
class Folder:
    """A place where variants are searched.

    Attributes:
        what: in words. path: of the directory.
        variants: ``arch family`` -> how many; the family is a decode's pipeline, else the op.
        refused: why what is there is not used, or None.
        damaged: files that are not as they were built; their variants do not count.
        outdated: variants of other kernel sources than those here, which run as they are because
            nothing is compiled; empty where they would be compiled, and where there are no sources.
        narrow: variants of sm_100a that a B300 does not load: their cubins are for sm_100a alone.
    """

    what: str
    path: str
    variants: dict[str, int]
    refused: str | None = None
    damaged: list[str] = field(default_factory=list)
    outdated: list[str] = field(default_factory=list)
    narrow: list[str] = field(default_factory=list)


@dataclass
class Info:
    """The report; ``missing`` has one sentence for each thing that is to be mended.

    Attributes:
        package: ``checkout``, ``wheel`` or ``bundle``, with version, commit (empty if nobody knows)
            and directory.
        versions: of Python, torch and libraries; an empty string where one is not installed.
        driver: CUDA that the driver supports, ``13.0``; empty without a driver.
        cards: the GPUs that torch sees.
        folders: in the order of the search.
        settings: variables of the project that are set.
        decodes: a card's index -> whether the common decode shapes have kernels, or may compile.
        software_gpu: whether CPU tensors run.
        missing: for a GPU that cannot decode, and for the software GPU where there is no GPU.
        untested: architectures of cards and variants here whose kernels never ran on hardware.
        next: the command to type next.
        absent: a sentence for each kind of kernels of which ops have no variant for a card here,
            and none can be compiled: how they are made.  A wheel of a part has them meant to be so.
            And one for each folder with variants that not all cards of their family load.
    """

    package: dict[str, str]
    versions: dict[str, str]
    driver: str
    cards: list[Card]
    folders: list[Folder]
    settings: dict[str, str]
    decodes: list[bool] = field(default_factory=list)
    software_gpu: bool = False
    missing: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    next: str = ""

    @property
    def good(self) -> bool:
        """True if every GPU decodes or, without one, the software GPU does."""
        return all(self.decodes) if self.cards else self.software_gpu


def collect() -> Info:
    """Looks at this machine and installation; compiles and loads nothing."""
    driver = runtime.driver_version()
    cards = [_card(i) for i in range(torch.cuda.device_count())]
    info = Info(
        package=_package(),
        versions=_versions(),
        driver="" if driver is None else f"{driver[0]}.{driver[1]}",
        cards=cards,
        folders=[_folder(place) for place in env.places()],
        settings={v.name: os.environ[v.name] for v in env.TABLE if v.name in os.environ},
    )
    info.missing += (text for folder in info.folders for text in _wrong_with_folder(folder))
    for card in cards:
        wrong = [*_without_libraries(info), *_wrong_with(card)]
        info.decodes.append(not wrong)
        info.missing += (text for text in wrong if text not in info.missing)
    info.absent += [*_absent(info), *_narrow(info)]
    if not cards and driver is not None:
        built = torch.version.cuda
        info.missing.append(
            "there is a driver, but torch sees no GPU: "
            + ("CUDA_VISIBLE_DEVICES may hide it" if built else "install a CUDA build of torch")
        )
    wrong = [*_without_libraries(info), *_wrong_with_software_gpu()]
    info.software_gpu = not wrong
    if not cards:
        info.missing += (text for text in wrong if text not in info.missing)
    here = [card.arch for card in cards]
    here += [name.split()[0] for folder in info.folders for name in folder.variants]
    info.untested += (arch for arch in UNTESTED if arch in here)
    info.next = _next(info)
    return info


def installed(arch: str, device_type: str) -> dict[str, VariantSpec]:
    """The plainest variant of each op that is built for an architecture and runs on such a device.

    Plainest is the one with the most defaults; of equals the first of the family's default matrix.

    Args:
        device_type: ``cuda``, which loads libraries, or ``cpu``, the software GPU, which loads
            objects and PTX.
    """
    found: dict[str, list[VariantSpec]] = {}
    for spec in runtime.available():
        if spec.arch == arch and _runs(spec, device_type):
            found.setdefault(spec.op, []).append(spec)
    return {op: _plainest(arch, found[op]) for op in FAMILIES if op in found}


def _runs(spec: VariantSpec, device_type: str) -> bool:
    artifact = runtime.find(spec)
    if artifact is None:
        return False
    if device_type == "cuda":
        return artifact.library is not None
    return artifact.obj.is_file() and artifact.ptx.is_file()


def _plainest(arch: str, specs: list[VariantSpec]) -> VariantSpec:
    family = specs[0].family
    order = [VariantSpec(op=family.op, arch=arch, **values) for values in family.points(arch)]

    def rank(spec: VariantSpec) -> tuple[int, int]:
        at = order.index(spec) if spec in order else len(order)
        return family.changed(dict(spec.values)), at

    return min(specs, key=rank)


def _next(info: Info) -> str:
    """The command that follows ``snapmla info``."""
    if not info.good:
        return "snapmla info, once what is missing is there"
    if info.package["kind"] == "bundle":
        return "python -m snapmla.bundle"
    device = "cuda" if info.cards else "cpu"
    arch = info.cards[0].arch if info.cards else runtime.arch_of(torch.device("cpu"))
    if arch is None or installed(arch, device):
        return "snapmla selfcheck"
    names = " ".join(spec.name for spec in needed(arch)[:4])  # one row tile is enough to begin
    return f"python -m codegen build {names} && snapmla selfcheck"


def _package() -> dict[str, str]:
    here = env.PACKAGE
    kind = "checkout" if env.is_checkout() else "wheel"
    if not (here / "__main__.py").is_file() or (here / "variants" / runtime.BUNDLE).is_file():
        kind = "bundle"
    return {
        "version": env.__version__, "commit": env.commit(), "kind": kind, "directory": str(here),
    }  # fmt: skip


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _card(index: int) -> Card:
    capability = torch.cuda.get_device_capability(index)
    try:
        arch = runtime.arch_of(torch.device("cuda", index))
    except SnapMLAError:
        arch = None
    return Card(torch.cuda.get_device_name(index), f"sm_{capability[0]}{capability[1]}", arch)


B300 = (10, 3)


def _numbers(capability: str) -> tuple[int, int]:
    """(major, minor) of ``sm_103``."""
    digits = capability.removeprefix("sm_")
    return int(digits[:-1]), int(digits[-1])


def family(spec: VariantSpec) -> str:
    """Name that a variant is counted under: its op and the axes that its family counts by."""
    return " ".join([spec.op, *(str(getattr(spec, axis)) for axis in spec.family.counted_by)])


def _folder(place: env.Place) -> Folder:
    count: dict[str, int] = {}
    damaged, outdated, narrow = [], [], []
    stay = runtime.jit_refusal() is not None
    for spec in runtime.available([place.path]) if place.refused is None else ():
        artifact = runtime.find(spec, [place.path])
        if artifact is None:  # a record without its files
            continue
        wrong = [runtime.damage(artifact, need_library=library) for library in (True, False)]
        if any(wrong):
            damaged += [found.path.name for found in wrong if found is not None]
            continue
        if runtime.other_cards(artifact, [B300]) is not None:
            narrow.append(spec.name)
        name = f"{spec.arch} {family(spec)}"
        count[name] = count.get(name, 0) + 1
        if stay and artifact.source_hash and runtime.other_sources(spec, artifact):
            outdated.append(spec.name)
    what = place.what.replace("`", "")
    return Folder(what, str(place.path), count, place.refused, damaged, outdated, narrow)


def _wrong_with_folder(folder: Folder) -> Iterator[str]:
    """Reason why its variants are not used, or some of them not as they should be."""
    if folder.refused is not None:
        yield folder.refused
    refusal = runtime.jit_refusal()
    if folder.damaged:
        files = f"{len(folder.damaged)} files" if len(folder.damaged) > 1 else "1 file"
        mended = f"put back what was built there: {refusal}"
        mended = "their variants are compiled anew when they are called" if not refusal else mended
        yield f"{files} of {folder.path} damaged ({folder.damaged[0]}): {mended}"
    if folder.outdated:
        total = sum(folder.variants.values())
        yield (
            f"{len(folder.outdated)} of {total} variants in {folder.path} are outdated "
            f"({folder.outdated[0]}): they were built from other kernel sources than those here, "
            f"and run as they are, as {refusal}; `make precompile` builds them anew"
        )


def _without_libraries(info: Info) -> Iterator[str]:
    if importlib.util.find_spec("tvm_ffi") is None:
        yield "apache-tvm-ffi is not installed: pip install apache-tvm-ffi"


def needed(arch: str) -> list[VariantSpec]:
    """Kernels of a decode step of a common shape, pages of 64 tokens, results in bfloat16."""
    rows = ROW_TILES if arch == "sm_90a" else (64,)
    step = [VariantSpec(op="plan_decode", arch=arch)]
    step += [VariantSpec(op="append_kv", arch=arch)]
    step += [VariantSpec(op="quantize_q", arch=arch, mode="token_head")]
    return step + [decode_spec(_PIPELINES[arch], n, PAGE, "bf16", arch) for n in rows]


def _wrong_with(card: Card) -> Iterator[str]:
    """Reason why a card does not decode; nothing where what is missing would be compiled."""
    if card.arch is None:
        yield runtime.unserved(card.name, _numbers(card.capability))
        return
    refusal = runtime.jit_refusal()
    specs = needed(card.arch)
    if refusal is None:
        libraries = [found and found.library for found in map(runtime.find, specs)]
        if None in libraries and not _c_compiler():
            yield f"kernels for a GPU need a C compiler: {_INSTALL_CC}"
        return
    absent = [spec.name for spec in specs if runtime.find(spec) is None]
    if absent:
        yield (
            f"{len(absent)} of {len(specs)} kernels of a decode step are not built for "
            f"{card.arch} ({absent[0]}), and {refusal}: install the wheel of kernels that `make "
            f"wheels ARCH={card.arch}` builds in a checkout, run `make precompile "
            f"ARCH={card.arch}` there, or let {env.VARIANT_DIR.name} name a directory that has them"
        )
    for spec in specs:
        artifact = runtime.find(spec)
        if artifact is None:
            continue
        reason = (
            runtime.too_new(artifact)
            or runtime.other_cards(artifact, [_numbers(card.capability)])
            or runtime.damage(artifact, need_library=True)
        )
        if reason is not None:
            yield str(reason)
            return
        if artifact.library is None:
            yield f"{artifact.name} in {artifact.directory} has no .so: build it with a C compiler"
            return


def _absent(info: Info) -> Iterator[str]:
    """Ops that have no variant for the cards here, by kind."""
    if runtime.jit_refusal() is None:
        return
    for arch in dict.fromkeys(card.arch for card in info.cards if card.arch is not None):
        there = {name.split()[1] for folder in info.folders for name in folder.variants
                 if name.startswith(f"{arch} ")}  # fmt: skip
        lacking: dict[str, list[str]] = {}
        for family in FAMILIES.values():
            points = (VariantSpec(op=family.op, arch=arch, **v) for v in family.points(arch))
            if family.op not in there and any(map(registry.module_name, points)):
                lacking.setdefault(family.kind, []).append(family.op)
        for kind, ops in lacking.items():
            yield (
                f"{arch}, kind {kind}: no variant of {', '.join(ops)}: in a checkout `make wheels "
                f"ARCH={arch} KIND={kind}` builds a wheel of them, `make precompile ARCH={arch} "
                f"KIND={kind}` a folder for {env.VARIANT_DIR.name}"
            )


def _narrow(info: Info) -> Iterator[str]:
    """Folders whose variants of sm_100a do not serve a B300."""
    for folder in (folder for folder in info.folders if folder.narrow):
        yield (
            f"sm_103 (B300) is not served by {len(folder.narrow)} variants in {folder.path} "
            f"({folder.narrow[0]}), which were assembled for sm_100a alone: `make precompile "
            "ARCH=sm_100a` with CUDA 12.9 or newer assembles them for both"
        )


_INSTALL_CC = "install gcc or clang, or let CC name one"


def _c_compiler() -> bool:
    """True if there is one, as the software GPU and codegen look for it."""
    from softgpu.runtime import c_compiler

    return c_compiler() is not None


def _wrong_with_software_gpu() -> Iterator[str]:
    if importlib.util.find_spec("softgpu") is None:
        yield "the software GPU is not in this package: a checkout and the wheel have it"
        return
    if not _c_compiler():
        yield f"the software GPU needs a C compiler: {_INSTALL_CC}"
    refusal = runtime.jit_refusal()
    if refusal is None:
        return
    try:
        arch = runtime.arch_of(torch.device("cpu"))
        found = [runtime.find(spec) for spec in needed(arch)]
    except (KeyError, ValueError):
        yield f"{env.SOFTGPU_ARCH.name}: no architecture {env.SOFTGPU_ARCH.get()!r}"
        return
    if any(artifact is None or not artifact.ptx.is_file() for artifact in found):
        yield (
            f"the software GPU, which CPU tensors run on, has no kernels with PTX, and {refusal}: "
            f"let {env.VARIANT_DIR.name} name what `make precompile` built"
        )
        return
    broken = (runtime.damage(artifact, need_library=False) for artifact in found if artifact)
    yield from (str(reason) for reason in broken if reason is not None)
