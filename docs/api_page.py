"""``docs/api.md``, from the docstrings of what users import; ``docs/render.py`` writes it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from equivalents import EQUIVALENTS

# What users import from, in the order in which a caller meets it.  A test holds the first three to
# the modules' __all__.
MODULES: dict[str, tuple[str, ...]] = {
    "snapmla": (
        "PagedKVCache", "append_kv", "quantize_q", "QuantizedQuery", "plan_decode", "DecodePlan",
        "decode", "plan_sparse_decode", "SparsePlan", "SparseRowsPlan", "PlanCache",
        "SparsePlanCache", "mha_prefill", "mha_prefill_backward", "sparse_prefill",
        "plan_sparse_prefill", "rope_append_kv", "rope_quantize_q", "fetch_dequant",
        "convert_cache", "merge_state", "merge_states", "explain", "explain_prefill",
        "install_as_flash_mla", "SnapMLAError",
        "UnsupportedDeviceError", "VariantError", "__version__",
    ),
    "snapmla.parallel": ("ContextGroup", "ContextPlan"),
    "snapmla.flash_mla": (
        "get_mla_metadata", "get_mla_metadata_tensors", "flash_mla_with_kvcache",
        "FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
    ),
    "snapmla.flash_mla_fp8": (
        "get_mla_metadata", "quantize_and_cache_k", "quantize_ckv_per_token_head",
        "flash_mla_ckv_fp8_per_token", "dequantize_ckv_fused_indexed",
    ),
    "snapmla.dsa": (
        "prologue", "Prologue", "append_index_k", "index_topk", "index_topk_workspace",
        "index_logits", "select_topk", "fetch_index_k",
    ),
    "snapmla.dsa.deep_gemm_names": (
        "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata", "fp8_mqa_logits",
        "fp8_fp4_paged_mqa_logits", "fp8_fp4_mqa_logits",
    ),
    "snapmla.dsa.vllm_names": (
        "top_k_per_row_decode", "top_k_per_row_prefill", "persistent_topk",
        "indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache",
    ),
    "snapmla.mha": ("workspace_size", "backward_workspace_size"),
    "snapmla.mha.flash_attention_names": ("flash_attn_varlen_func",),
    "snapmla.layouts": ("paged_views", "rows640_views"),
    "snapmla.reference": (
        "mla_decode_reference", "reference_from_unquantised", "quantize_rows", "dequantize_rows",
        "quantize_ds_mla_rows", "dequantize_ds_mla_rows", "quantize_pages", "dequantize_pages",
        "rms_norm_rows", "rotate_rows", "QuantConfig",
    ),
    "snapmla.selfcheck": ("decode_errors", "DecodeErrors", "QkErrors", "lse_bounds"),
}  # fmt: skip
# What the package's own modules use of a class, and a caller does not: last on the page.
INTERNALS: dict[str, tuple[str, ...]] = {
    "DecodePlan": (
        "work_items", "part_begin", "split_begin", "units", "unit_begin", "row_limits",
        "token_tile", "unit_rows", "fixed_overhead", "split_tiles", "longest_item",
        "max_stretches", "tile_ns", "sequences", "group", "n_units", "rows", "place", "trims",
        "may_trim", "idle", "variant", "as_given", "regroups", "must_regroup", "arguments",
        "plain", "may_split", "can_split", "merges",
    ),
    "PagedKVCache": (
        "content_u8", "memory", "traceable", "plain", "begins", "asks", "arguments",
        "append_options", "decode_arguments", "gather_arguments", "named_tensors", "memory_now",
    ),
    "SparsePlan": ("variant", "must_regroup"),
    "SparseRowsPlan": ("arguments", "plain", "tokens"),
    "QuantizedQuery": ("nope_u8", "row_scale", "arguments", "plain", "written", "begins"),
    "QuantConfig": ("group",),
}  # fmt: skip
WIDTH = 120  # of a line of prose
_UNBROKEN = re.compile(r"(?:``.*?``|`[^`]{,80}`|\[[^]]*\]\([^)]*\)|\S)+")
_STARTS = re.compile(r"[-*+=>#|]|\d+[.)]$")  # what would begin a list, a heading or a quotation
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "Source")


# ---------------------------------------------------------------- docstrings


@dataclasses.dataclass
class Doc:
    """A docstring taken apart: prose, and the Google-style sections' text by name."""

    prose: str
    sections: dict[str, str]

    def items(self, section: str) -> Iterator[tuple[str, str]]:
        """(name, text) of the entries of a section; names may share one text (``a, b: ...``)."""
        entry: list[str] = []
        for line in [*self.sections.get(section, "").splitlines(), "."]:
            if entry and not line.startswith(" "):
                names, _, text = " ".join(part.strip() for part in entry).partition(": ")
                yield names, text
                entry = []
            entry.append(line)


def parse(docstring: str | None) -> Doc:
    """Takes a docstring apart."""
    prose: list[str] = []
    sections: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in inspect.cleandoc(docstring or "").splitlines():
        heading = re.fullmatch(rf"({'|'.join(SECTIONS)}):(.*)", line)
        if heading:
            current = sections.setdefault(heading[1], [])
            if heading[2].strip():
                current.append(heading[2].strip())
        elif current is not None:
            current.append(line.removeprefix("    "))
        else:
            prose.append(line)
    text = {name: "\n".join(lines).strip("\n") for name, lines in sections.items()}
    return Doc("\n".join(prose).strip(), text)


def annotation(value: Any, module: str = "") -> str:
    """An annotation as it stands in the source, a module's aliases of tuples spelled out."""
    if not isinstance(value, str):
        return getattr(value, "__name__", str(value))

    def spelled(found: re.Match[str]) -> str:
        alias = getattr(sys.modules.get(module), found[0], None)
        return str(alias) if isinstance(alias, types.GenericAlias) else found[0]

    return re.sub(r"\b[A-Z]\w+\b", spelled, value)


def parameters(function: Any) -> list[inspect.Parameter]:
    """Parameters without self and cls."""
    found = inspect.signature(function).parameters.values()
    return [p for p in found if p.name not in ("self", "cls")]


def signature(name: str, function: Any) -> str:
    """``name(...)`` over one line or many."""
    parts: list[str] = []
    starred = False
    for p in parameters(function):
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        text = p.name
        if p.annotation is not p.empty:
            text += f": {annotation(p.annotation, function.__module__)}"
        if p.default is not p.empty:
            text += f" = {'...' if p.default is dataclasses.MISSING else _default(p.default)}"
        parts.append(text)
    result = inspect.signature(function).return_annotation
    tail = ""
    if result is not inspect.Signature.empty:
        tail = f" -> {annotation(result, function.__module__)}"
    line = f"{name}({', '.join(parts)}){tail}"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){tail}"


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value) and value == type(value)():
        return f"{type(value).__name__}()"
    return str(value) if isinstance(value, torch.dtype) else repr(value)


# ---------------------------------------------------------------- the API page


@dataclasses.dataclass(frozen=True)
class Entry:
    """One public name: where it lives, what it is."""

    module: str
    name: str
    value: Any

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def kind(self) -> str:
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if callable(self.value) else "value"

    def members(self) -> Iterator[tuple[str, Any]]:
        """Public methods and properties that the class itself defines, in source order."""
        for name, value in vars(self.value).items():
            if name.startswith("_") or not _is_member(value):
                continue
            yield name, value


def _is_member(value: Any) -> bool:
    kinds = (property, functools.cached_property, classmethod, staticmethod)
    return inspect.isfunction(value) or isinstance(value, kinds)


def entries() -> Iterator[Entry]:
    """Every public name of the package, in the page's order."""
    for module_name, names in MODULES.items():
        module: ModuleType = importlib.import_module(module_name)
        for name in names:
            yield Entry(module_name, name, getattr(module, name))


def underlying(member: Any) -> Any:
    """The function behind a method or property."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return getattr(member, "__func__", member)


def _sections(doc: Doc) -> list[str]:
    lines = []
    for section in SECTIONS:
        if section not in doc.sections:
            continue
        if section in ("Args", "Attributes"):
            lines += [f"*{section}*", ""]
            lines += [f"- `{names}`: {text}" for names, text in doc.items(section)]
            lines.append("")
        elif section == "Example":
            lines += [f"*{section}*", "", "```python", doc.sections[section], "```", ""]
        else:
            text = " ".join(doc.sections[section].split())
            lines += [f"*{section}*: {text}", ""]
    return lines


def _paragraphs(text: str) -> list[str]:
    """Prose as Markdown: indented blocks become code, or pictures."""
    lines = []
    for block in re.split(r"\n\n+", text):
        if block.startswith("    "):
            code = inspect.cleandoc(block)
            lines += [f"```{'python' if _is_python(code) else 'text'}", code, "```", ""]
        elif block.startswith("* "):
            lines += [" ".join(item.split()) for item in re.split(r"\n(?=\* )", block)] + [""]
        elif block:
            lines += [" ".join(block.split()), ""]
    return lines


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _value_line(name: str, member: Any) -> str:
    """A property, or a method of those that callers leave alone, as an item of a list."""
    function = underlying(member)
    result = annotation(inspect.signature(function).return_annotation)
    about = " ".join(parse(function.__doc__).prose.split())
    call = "()" if inspect.isfunction(member) else ""
    return f"- `{name}{call}`, `{result}`" + (f": {about}" if about else "")


def _class_lines(entry: Entry, doc: Doc) -> list[str]:
    """A class: what it holds, its methods, and last what callers leave alone."""
    internal = INTERNALS.get(entry.name, ())
    shown: list[str] = []
    hidden: list[str] = []
    for names, text in doc.items("Attributes"):
        line = f"- `{names}`: {text}"
        (hidden if names.partition(",")[0] in internal else shown).append(line)
    methods = []
    for name, member in entry.members():
        if name in internal:
            hidden.append(_value_line(name, member))
        elif isinstance(member, (property, functools.cached_property)):
            shown.append(_value_line(name, member))
        else:
            methods += [f"#### {entry.name}.{name}", "", *_call_lines(entry.name, name, member)]
    about = {name: text for name, text in doc.sections.items() if name != "Attributes"}
    lines = [*_paragraphs(doc.prose), *_sections(Doc("", {**about, "Attributes": ""}))]
    at = lines.index("*Attributes*")
    lines[at : at + 3] = ["*Attributes*", "", *shown, ""] if shown else []
    lines += methods
    if hidden:
        words = "What the package's own modules use. A caller needs none of it."
        lines += [f"#### {entry.name}: internals", "", words, "", *hidden, ""]
    return lines


def _call_lines(owner: str, name: str, member: Any) -> list[str]:
    function = underlying(member)
    doc = parse(function.__doc__)
    head = signature(f"{owner}.{name}", function)
    return ["```python", head, "```", "", *_paragraphs(doc.prose), *_sections(doc)]


def _entry_lines(entry: Entry) -> list[str]:
    # as code where underscores would be read as bold type
    lines = [f"### {f'`{entry.name}`' if entry.name.startswith('_') else entry.name}", ""]
    if entry.kind == "value":
        return [*lines, "The package's version, a string.", ""]
    doc = parse(entry.value.__doc__)
    if entry.kind == "class":
        return lines + _class_lines(entry, doc)
    if entry.kind == "function":
        lines += ["```python", signature(entry.path, entry.value), "```", ""]
    else:
        lines += [f"Exception, a `{entry.value.__mro__[1].__name__}`.", ""]
    return [*lines, *_paragraphs(doc.prose), *_equivalents(entry), *_sections(doc)]


def _equivalents(entry: Entry) -> list[str]:
    """The PyTorch that says what a call computes, if there is some."""
    found = EQUIVALENTS.get((entry.module, entry.name), ())
    if not found:
        return []
    source = "\n\n".join(inspect.getsource(function).strip() for function in found)
    head = "*In PyTorch*, with `from torch import Tensor, einsum`, in float32 (tested beside it):"
    return [head, "", "```python", source, "```", ""]


def contents(lines: list[str], about: dict[str, str]) -> list[str]:
    """A table of contents: modules, in them names with a sentence, and the headings of classes.

    Args:
        lines: of the page.
        about: a sentence by module, or module and name, of those that have one.
    """
    found: list[str] = []
    taken: dict[str, int] = {}
    module, fenced = "", False
    for line in lines:
        fenced ^= line.startswith("```")
        heading = re.fullmatch(r"(##+) (.+)", line)
        if fenced or heading is None:
            continue
        level, title = len(heading[1]), heading[2]
        anchor = re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-")
        taken[anchor] = taken.get(anchor, -1) + 1  # GitHub numbers those that come again
        anchor += f"-{taken[anchor]}" if taken[anchor] else ""
        if level == 4:
            name = title.partition(".")[2] or title.partition(": ")[2]
            found[-1] += f" · [{name}](#{anchor})"
        else:
            module = title if level == 2 else module
            text = about.get(title if level == 2 else f"{module}.{title}", "")
            text = text and f": {text}"
            found.append(f"{'  ' * (level - 2)}- [{title}](#{anchor}){text}")
    return found


def _first_sentence(docstring: str | None) -> str:
    return re.split(r"(?<=\.)\s", " ".join(parse(docstring).prose.split()))[0]


def wrapped(lines: list[str]) -> Iterator[str]:
    """The lines of a page, its prose cut at ``WIDTH``, not within code or a link."""
    fenced = False
    for line in lines:
        fenced ^= line.startswith("```")
        if fenced or len(line) <= WIDTH:
            yield line
            continue
        head = re.match(r" *(?:[-*] )?", line)[0]  # type: ignore[index]
        text = ""
        for word in re.findall(_UNBROKEN, line[len(head) :]):
            if text and len(head + text) + 1 + len(word) > WIDTH and not _STARTS.match(word):
                yield head + text
                head, text = " " * len(head), word
            else:
                text = f"{text} {word}".lstrip()
        yield head + text


def api_page() -> str:
    """docs/api.md."""
    head = [
        "# API",
        "",
        "Generated from the docstrings by `python docs/render.py`; a test fails when this page is",
        "stale. Wrong arguments raise `TypeError` or `ValueError` that name the argument, what was",
        "expected, what came and what to change. Layouts and scales: [formats.md](formats.md); how",
        "the calls go together in an engine: [integration.md](integration.md); questions that come",
        "up: [faq.md](faq.md).",
        "",
    ]
    lines: list[str] = []
    about: dict[str, str] = {}
    module = ""
    for entry in entries():
        if entry.module != module:
            module = entry.module
            lines += [f"## {module}", ""]
            if "." in module:
                prose = importlib.import_module(module).__doc__
                lines += _paragraphs(parse(prose).prose)
                about[module] = _first_sentence(prose)
        if entry.kind != "value":
            about[entry.path] = _first_sentence(entry.value.__doc__)
        lines += _entry_lines(entry)
    page = [*head, *contents(lines, about), "", *lines]
    return "\n".join(wrapped("\n".join(page).split("\n"))).rstrip("\n") + "\n"
