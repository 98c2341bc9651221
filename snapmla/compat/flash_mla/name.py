"""The module name ``flash_mla``, for engines that import it by that name: on request of the user
alone, and never in the place of a package that brings it.

In a process ``install_as_flash_mla`` does it; for engines that are started by a command, the wheel
``snapmla-as-flash-mla`` (``codegen.wheels``) does at the engine's first ``import flash_mla``.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
import types
from importlib.machinery import PathFinder

from snapmla import checks
from snapmla._version import __version__
from snapmla.errors import SnapMLAError

NAME = "flash_mla"
INTERFACE = f"{NAME}.flash_mla_interface"  # where FlashMLA's own package has its functions
MARK = "__snapmla__"  # attribute of the modules that are made here
LIKE = "1.0.0"  # FlashMLA's version, whose names these are


def owner() -> str | None:
    """Others that bring a module of that name here: distributions, or a file; None: none."""
    there = sys.modules.get(NAME)
    if there is not None and hasattr(there, MARK):
        return None
    spec = getattr(there, "__spec__", None) if there is not None else PathFinder.find_spec(NAME)
    if there is None and spec is None:
        return None
    found = importlib.metadata.packages_distributions().get(NAME)
    if found:
        return " and ".join(sorted(set(found)))
    where = getattr(there, "__file__", None) or getattr(spec, "origin", None)
    if where is None:
        paths = getattr(spec, "submodule_search_locations", None)
        where = next(iter(paths or ()), None)
    return str(where) if where else "a module without a file"


def install_as_flash_mla(*, tensors: bool = False) -> types.ModuleType:
    """Makes ``import flash_mla`` give ``snapmla.flash_mla``'s functions, in this process.

    Call it before the engine is imported.  ``flash_mla.flash_mla_interface`` is there too.  Called
    again it changes nothing but what ``tensors`` says.  What is not built raises by name, as in
    ``snapmla.flash_mla``.

    Args:
        tensors: whether the module's ``get_mla_metadata`` gives two tensors where it has arguments,
            as FlashMLA's did until 2026, for engines that copy them into buffers of theirs.

    Returns:
        The module, whose ``__version__`` begins with FlashMLA's and names snapmla's behind ``+``.

    Raises:
        TypeError: ``tensors`` is no flag.
        SnapMLAError: another distribution, which it names, brings that module, or something else
            has been imported by that name.

    Example:
        snapmla.install_as_flash_mla()
        from flash_mla import flash_mla_with_kvcache  # snapmla's

    Source: our own; the names are FlashMLA's.
    """
    checks.flag("tensors", tensors)
    there = sys.modules.get(NAME)
    if there is not None and hasattr(there, MARK):
        _give_metadata(tensors)
        return there
    other = owner()
    if other is not None:
        raise SnapMLAError(
            f"flash_mla: expected a name that nobody has here, got {other}'s module (uninstall it "
            "first, or import snapmla.flash_mla by its own name)"
        )
    module, interface = _made(NAME), _made(INTERFACE)
    module.__path__ = []  # a package, without files
    setattr(module, INTERFACE.rpartition(".")[2], interface)
    sys.modules[NAME], sys.modules[INTERFACE] = module, interface
    _give_metadata(tensors)
    return module


def _give_metadata(tensors: bool) -> None:
    """Has the installed modules' ``get_mla_metadata`` give tensors, or the object alone."""
    from snapmla.compat.flash_mla import meta

    function = meta.get_either if tensors else meta.get_mla_metadata
    for name in (NAME, INTERFACE):
        vars(sys.modules[name])["get_mla_metadata"] = function


def _made(name: str) -> types.ModuleType:
    """A module of ``snapmla.flash_mla``'s public names."""
    from snapmla.compat import flash_mla as ours

    module = types.ModuleType(name, ours.__doc__)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == NAME)
    names = {each: getattr(ours, each) for each in ours.__all__}
    vars(module).update(names, __version__=f"{LIKE}+snapmla{__version__}", __all__=list(names))
    setattr(module, MARK, True)
    return module
