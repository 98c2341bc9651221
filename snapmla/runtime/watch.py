"""``SNAPMLA_LOG`` and ``SNAPMLA_DUMP``: a line, or a file, for each call of a compiled function.

Both are read when a kernel is first called: ``runtime.kernel`` then hands out the function wrapped.
Unset, callers hold the function itself and nothing is paid.  What is recorded by ``torch.compile``
arrives here when the compiled code runs; what a CUDA graph replays does not, as no host code runs.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import logging
import os
import platform
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsl_kernels.formats.dims import MERGE_CHECKED
from dsl_kernels.spec import VariantSpec
from snapmla._version import __version__
from snapmla.runtime import dump, env, launch

Kernel = Callable[..., Any]
log = logging.getLogger("snapmla")
WHEN = ("error", "nan", "all")
# An argument of variants over rows, by what stands in its place in those of the same op over planes
OF_ROWS = {"q_nope": "q", "content": "cache"}


def watched(kernel: Kernel, spec: VariantSpec, names: Sequence[str]) -> Kernel:
    """``kernel`` as the environment wants it watched.

    Args:
        names: of its arguments, in ABI order.

    Raises:
        ValueError: ``SNAPMLA_DUMP_WHEN`` or ``SNAPMLA_DUMP_MB`` has no meaning.
    """
    if env.LOG.enabled():
        _show_log()
        kernel = _logged(kernel, spec, names)
    if env.DUMP.get():
        kernel = Dumper(spec, tuple(names), Path(env.DUMP.get()), *_dump_options()).around(kernel)
    return kernel


# ------------------------------------------------------------------------------------------ a line


def _show_log() -> None:
    """Makes INFO of our logger visible: on stderr, unless the application has handlers."""
    if not log.isEnabledFor(logging.INFO):
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        log.addHandler(handler)


def _logged(kernel: Kernel, spec: VariantSpec, names: Sequence[str]) -> Kernel:
    @functools.wraps(kernel, updated=())
    def call(*arguments: Any) -> Any:
        log.info("%s", line(spec, dict(zip(names, arguments))))
        return kernel(*arguments)

    return call


def line(spec: VariantSpec, values: dict[str, Any]) -> str:
    """A call in one line: variant, device, shapes and the plan; asks the device nothing."""
    device = next(v.device for v in values.values() if isinstance(v, Tensor))
    names = (name if name in values else OF_ROWS.get(name, name) for name in spec.family.shown)
    shown = (name for name in names if name in values)
    shapes = ", ".join(f"{name} {tuple(values[name].shape)}" for name in shown)
    if (plan := _plan_of(values)) is not None:
        shapes += f"; {plan}"
    return f"{spec.name} on {device}: {shapes}"


def _plan_of(values: dict[str, Any]) -> str | None:
    """The plan of a call as far as the host knows it: how many splits there are it does not."""
    if "part_begin" not in values:
        return None
    parts, units = (values[name].shape[0] - 1 for name in ("part_begin", "split_begin"))
    text = f"plan: {parts} parts, {units} units"
    if "may_split" not in values:
        return text
    room, merges = values["o_accum"].shape[0], values["may_split"]
    text = f"{text}, {f'splits up to {room}' if merges else 'no splits'}"
    return f"{text}, tables from outside" if merges == MERGE_CHECKED else text


# ------------------------------------------------------------------------------------------ a file


def _dump_options() -> tuple[str, int]:
    """``SNAPMLA_DUMP_WHEN``, and ``SNAPMLA_DUMP_MB`` in bytes."""
    when, megabytes = env.DUMP_WHEN.get(), env.DUMP_MB.get()
    if when not in WHEN:
        raise ValueError(f"{env.DUMP_WHEN.name}: expected one of {', '.join(WHEN)}, got {when!r}")
    if not megabytes.isdigit():
        raise ValueError(f"{env.DUMP_MB.name}: expected a whole number, got {megabytes!r}")
    return when, int(megabytes) * 1_000_000


class _Written:
    """Counters of this process: bytes that it wrote, and a number for each file."""

    def __init__(self) -> None:
        self.bytes = 0
        self.numbers = itertools.count()
        self.lock = threading.Lock()


written = _Written()


class Dumper:
    """Writes calls of one variant to a folder.

    After a fault a GPU's memory cannot be read, so arguments are copied to the host *before* every
    call, and the device is waited for behind it, where the fault then shows.  Calls that a graph
    captures cannot be copied and pass by.
    """

    def __init__(
        self, spec: VariantSpec, names: tuple[str, ...], folder: Path, when: str, limit: int
    ) -> None:
        self.spec, self.names, self.folder = spec, names, folder
        self.when, self.limit = when, limit

    def around(self, kernel: Kernel) -> Kernel:
        """``kernel`` with this around it."""

        @functools.wraps(kernel, updated=())
        def call(*arguments: Any) -> Any:
            device = next(value.device for value in arguments if isinstance(value, Tensor))
            if device.type == "cuda" and launch.capturing(device):
                _say_captured()
                return kernel(*arguments)
            values = dict(zip(self.names, map(_tensor, arguments)))
            content = self._copied(values, device)
            if content is None:
                return kernel(*arguments)
            path = self._write(None, content) if self.when == "all" else None
            try:
                kernel(*arguments)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except (TypeError, ValueError):  # an argument was refused: the message says all
                if path is not None:
                    path.unlink(missing_ok=True)
                raise
            except Exception as error:
                content["error"] = "".join(traceback.format_exception(error))
                if (path := self._write(path, content)) is not None:
                    log.error("%s failed: its arguments are in %s", self.spec.name, path)
                raise
            self._returned(path, content, values)
            return None

        return call

    def _copied(self, values: dict[str, Any], device: torch.device) -> dict[str, Any] | None:
        """The call as a file has it, without results; None if it cannot be had."""
        tensors = ((name, v) for name, v in values.items() if isinstance(v, Tensor) and v.numel())
        if gone := [name for name, tensor in tensors if not tensor.data_ptr()]:
            text = "%s is not dumped: the storage of %s was freed, so there is nothing to write"
            log.warning(text, self.spec.name, ", ".join(gone))
            return None
        try:
            with torch.no_grad():
                kept, notes = dump.reduced(values)
                wanted = dump.size(kept)
                if written.bytes + wanted > self.limit:
                    log.warning(
                        "%s is not dumped: it takes %.0f MB and %s leaves %.0f", self.spec.name,
                        wanted / 1e6, env.DUMP_MB.name, (self.limit - written.bytes) / 1e6,
                    )  # fmt: skip
                    return None
                facts = _facts(device)
                return dump.packed(dump.Dump(self.spec.name, self.spec.op, kept, {}, notes, facts))
        except RuntimeError as error:  # of an earlier fault: the call itself will say it again
            log.warning("%s is not dumped: %s", self.spec.name, error)
            return None

    def _returned(self, path: Path | None, content: dict[str, Any], values: dict[str, Any]) -> None:
        """Writes a call that came back, if it is wanted."""
        found = {name: values[name] for name in self.spec.family.results if name in values}
        bad = self.when == "nan" and any(
            _has_new_nan(value, content["arguments"][name]["values"])
            for name, value in found.items()
        )
        if not bad and path is None:
            return
        if not content["notes"] or not found.keys() & set(dump.pools()):  # else pages are others
            content["results"] = {name: dump.pack(value) for name, value in found.items()}
        path = self._write(path, content)
        if bad and path is not None:
            log.error("%s gave NaN: its arguments are in %s", self.spec.name, path)

    def _write(self, path: Path | None, content: dict[str, Any]) -> Path | None:
        """Writes a new file, or again the one that there is; None if that fails."""
        with written.lock:
            if path is None:
                now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
                number = next(written.numbers)
                host = f"{socket.gethostname()}-{os.getpid()}"
                path = self.folder / f"{now}-{host}-{number:06d}-{self.spec.name}.pt"
                before = 0
            else:
                before = path.stat().st_size
            try:
                dump.write(path, content)
            except OSError as error:
                log.warning("%s cannot be written: %s", path, error)
                return None
            written.bytes += path.stat().st_size - before
            return path


@functools.cache
def _say_captured() -> None:
    """Once: a graph's calls are no files."""
    log.warning("%s: calls that a CUDA graph captures are not written", env.DUMP.name)


def _tensor(value: Any) -> Any:
    """An argument as a torch tensor, if it is one in TVM FFI's form."""
    if isinstance(value, Tensor) or not hasattr(value, "__dlpack__"):
        return value
    return torch.from_dlpack(value)


def _has_new_nan(now: Tensor, before: Tensor) -> bool:
    """True if there is a NaN where there was none: rows that a call leaves alone may hold any."""
    if not now.is_floating_point() or now.shape != before.shape:  # a pool, cut down
        return False
    return bool((now.cpu().isnan() & ~before.isnan()).any())


def _facts(device: torch.device) -> dict[str, str]:
    """Facts for the reader of a dump: where, when and by which versions the call ran."""
    cuda = device.type == "cuda"
    return {
        "snapmla": __version__,
        "device": torch.cuda.get_device_name(device) if cuda else "software GPU",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "command": " ".join(sys.argv)[:500],
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }
