"""How large things may be, and that docstrings name what is there.

Files, function bodies, the modules at the top of ``snapmla`` and the lines of prose in docs have
limits.  A docstring opens with a verb or a noun; a name between double backquotes in it must be
somewhere: see ``Names``.  Frozen folders, which pyproject.toml takes out of lint, need not keep any
of it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import gc
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dsl_kernels.spec import VariantSpec
from tests import test_floors
from tests.test_floors import FLOORS, ROOT, targets

# Packages whose files are kept short.
SPLIT = ("snapmla", "snapmla_cli", "dsl_kernels", "codegen", "softgpu", "profiles")
FILE_LINES = 600
BODY_LINES = 80  # without signature and docstring
TOP_MODULES = 37  # of snapmla: what is new, or split off, goes into packages
PROSE = 120  # characters of a line
DOCS = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "profiles/results/README.md",
    "softgpu/README.md",
)  # fmt: skip
DOC_FOLDERS = ("docs", "examples")

# Names in docstrings that are other projects', or made of parts
OTHERS = frozenset({"torch", "cutlass", "cute", "vllm", "triton"})  # before a dot
FOREIGN = frozenset(
    {
        *("sync_warp", "producer_acquire", "recast_tensor", "export_to_c"),  # the DSL's
        *("make_fx", "apply", "lse.mT", "conftest.py"),  # torch's, pytest's
        *("concat_and_cache_mla_rope_fused", "concat_and_cache_mla"),  # vLLM's
        "indexer_k_quant_and_cache",
        *("fp8_paged_mqa_logits", "fp8_mqa_logits"),  # DeepGEMM's
        *("concat_and_cache_ds_mla_kernel", "MLAAttention", "max_model_len"),
        *("attention_backend", "DeepseekV3RMSNorm"),
        *("H20", "H100", "H800", "datasheet"),  # in tables of cards
        *("cu12", "cu13", "snapmla_kernels_sm90_cu13_decode", "stamps1", "rope_", "_f32"),
        *("arg0", "arg1", "DIR", "BxTOKENS"),
        *("generate", "num_return_sequences", "grouped_mm", "batched_mm"),  # transformers'
    }
)


# ---------------------------------------------------------------- how large


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements below a node; expressions are not looked at."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from statements(node)


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a body, from the first statement behind the docstring."""
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a Markdown page that are neither code nor table nor one long word."""
    fenced = listed = code = False
    blank = True
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
        elif not fenced and bare:
            if not line.startswith(" "):
                item = re.match(r"[-*+] |\d+[.)] ", line) is not None
                listed = item or (listed and not blank)
            # indented behind a blank line, and in no list: code
            code = line.startswith("    ") and not listed and (code or blank)
            if not (code or bare.startswith("|") or " " not in bare):
                yield number, line
        blank = not bare


@functools.cache
def frozen() -> tuple[str, ...]:
    """Folders of packages that lint leaves out."""
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    return tuple(name for name in ruff["extend-exclude"] if name.startswith(SPLIT))


def modules(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """Source files of the packages by dotted name, without what is frozen."""
    out = tuple(root / name for name in frozen())
    return {
        name: path
        for name, path in test_floors.modules(root, packages).items()
        if not any(path.is_relative_to(folder) for folder in out)
    }


@functools.cache
def parsed(root: Path, packages: tuple[str, ...]) -> dict[str, ast.Module]:
    """Syntax trees by module.  Collecting garbage between them would take longer than they do."""
    gc.disable()
    try:
        return {
            name: ast.parse(path.read_text(), str(path))
            for name, path in modules(root, packages).items()
        }
    finally:
        gc.enable()


def test_files_are_short() -> None:
    found = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in modules(ROOT, SPLIT).values()
    }
    assert len(found) > 200
    assert not {path: n for path, n in found.items() if n > FILE_LINES}


def test_bodies_of_functions_are_short() -> None:
    found = {
        f"{module}:{function.lineno}: {function.name}": body_lines(function)
        for module, tree in parsed(ROOT, FLOORS).items()
        for function in statements(tree)
        if isinstance(function, ast.FunctionDef)
    }
    assert len(found) > 2000
    assert not {place: n for place, n in found.items() if n > BODY_LINES}


def test_the_top_of_snapmla_is_no_heap() -> None:
    assert len(list((ROOT / "snapmla").glob("*.py"))) <= TOP_MODULES


def test_lines_of_prose() -> None:
    pages = [ROOT / name for name in DOCS]
    pages += [path for folder in DOC_FOLDERS for path in sorted((ROOT / folder).rglob("*.md"))]
    assert len(pages) > 12
    long = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)}"
        for page in pages
        for number, line in prose(page.read_text())
        if len(line) > PROSE
    ]
    assert not long, "\n".join(long)


# ---------------------------------------------------------------- names in docstrings


def docstring(node: ast.AST) -> ast.Constant | None:
    """The docstring of a module, class or function, as it stands in the tree."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
        value = getattr(node.body[0], "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value
    return None


def bound(tree: ast.AST) -> Iterator[str]:
    """Names that the statements of a module or a class bind."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.For | ast.With):
            for name in ast.walk(node):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    yield name.id
        elif isinstance(node, ast.If | ast.Try):
            yield from bound(node)


def _is_variant(name: str) -> bool:
    try:
        return VariantSpec.from_name(name).name == name
    except ValueError:
        return False


class Names:
    """What names in the docstrings of some packages may be.

    From the top of a package, from a class, or from a module that the file imports or lies beside,
    every part must be bound there; ``x.py`` is a file.  Any other name is one that its own file
    uses outside of docstrings and comments, or that some package defines without an underscore: a
    module, a class, a function, a parameter, a field, or the value of a string.
    """

    def __init__(self, root: Path, packages: tuple[str, ...]) -> None:
        self.packages = packages
        self.modules = modules(root, packages)
        self.files = {path.name for name in self.packages for path in (root / name).rglob("*.*")}
        self.docs: dict[str, list[tuple[int, str]]] = {}
        self.words: dict[str, set[str]] = {}  # by module
        self.tops: dict[str, set[str]] = {}  # by module
        self.imported: dict[str, dict[str, str]] = {}  # by module: what a name there stands for
        self.members: dict[str, set[str]] = {}  # by class
        self.bases: dict[str, set[str]] = {}  # by class
        self.defined = {part for name in self.modules for part in name.split(".")}
        for name, tree in parsed(root, packages).items():
            self._read(name, self.modules[name], tree)

    def _read(self, name: str, path: Path, tree: ast.Module) -> None:
        """Takes in one module."""
        lines = path.read_text().splitlines()
        nodes = [tree, *statements(tree)]
        self.docs[name] = []
        for node in nodes:
            if (text := docstring(node)) is not None:
                self.docs[name].append((text.lineno, text.value))
                for number in range(text.lineno - 1, text.end_lineno or 0):
                    lines[number] = ""
        lines = [re.sub(r"(^|\s)# .*", "", line) for line in lines]
        code = "\n".join(lines)
        self.words[name] = set(re.findall(r"[A-Za-z_]\w*", code))
        self.tops[name] = set(bound(tree))
        strings = re.findall(r'"((\w+)\([^"\n]*|[^"\n]+)"', code)  # an operator's schema: its name
        self.defined |= self.tops[name] | {part for found in strings for part in found}
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        self.imported[name] = {}
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias, target in zip(node.names, targets(node, package), strict=True):
                    self.imported[name][alias.asname or alias.name] = target
            elif isinstance(node, ast.FunctionDef):
                self.defined |= {node.name} | {
                    arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)
                }
            elif isinstance(node, ast.ClassDef):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                found = set(bound(node)) | set(re.findall(r"\bself\.(\w+)", text))
                self.members.setdefault(node.name, set()).update(found)
                bases = {ast.unparse(b).partition("[")[0].rpartition(".")[2] for b in node.bases}
                self.bases.setdefault(node.name, set()).update(bases)
                self.defined |= found

    def _in_class(self, owner: str, member: str) -> bool:
        if owner not in self.members:
            return True  # a base of somebody else's
        bases = self.bases[owner] - {owner}  # of the same name in another module
        inherited = any(self._in_class(base, member) for base in bases)
        return member in self.members[owner] or inherited

    def _in_module(self, module: str, parts: list[str]) -> bool:
        while parts and f"{module}.{parts[0]}" in self.modules:
            module, parts = f"{module}.{parts[0]}", parts[1:]
        if not parts:
            return True
        if parts[0] not in self.tops[module]:
            return False
        return len(parts) == 1 or self._in_class(parts[0], parts[1])

    def known(self, module: str, name: str) -> bool:
        """Whether a name in a docstring of a module is something."""
        words, (head, *rest) = self.words[module], name.split(".")
        if head in self.packages and rest:
            return self._in_module(head, rest)
        if name.startswith("torch.ops.snapmla."):
            return rest[-1] in self.defined
        if head in OTHERS or name in self.files or name in self.defined or name in FOREIGN:
            return True
        if not rest:
            return name in words or hasattr(builtins, name) or _is_variant(name)
        meant = self.imported[module].get(head, head)
        if head in self.imported[module] and meant.partition(".")[0] not in self.packages:
            return True  # of another project
        places = {meant, f"{module.rpartition('.')[0]}.{head}"} & self.modules.keys()
        owner = meant.rpartition(".")[2]
        if places or owner in self.members:
            owners = {owner, head.title().replace("_", "")}  # of a value that is named like it
            return any(self._in_module(place, rest) for place in places) or any(
                self._in_class(each, rest[0]) for each in owners & self.members.keys()
            )
        return all(part in words or part in self.defined for part in (head, *rest))

    def unknown(self) -> Iterator[str]:
        """Where a docstring names what is not there."""
        for module, docs in self.docs.items():
            for line, text in docs:
                for name in re.findall(r"``([A-Za-z_][\w.]*?\w)(?:\(\))?``", text):
                    if not self.known(module, name):
                        yield f"{self.modules[module]}:{line}: {name}"


# First words of a docstring that name nothing and say nothing to do: none opens so.
FIRST = frozenset(
    {"as", "how", "if", "in", "when", "where", "whether", "which", "who", "whose", "why"}
    | {"for", "at", "on", "from"}
)
# In packages that are in service none opens with these either.
UNNAMED = frozenset(
    {"what", "of", "whether", "who", "where", "which", "that", "as", "by", "how", "those"}
)
SERVED = frozenset({"snapmla", "dsl_kernels", "softgpu", "codegen"})
# Elsewhere no more of these than so many; numbers fall as they are mended.
NOT_MORE = {"of": 23, "what": 43, "that": 1, "those": 0, "its": 11, "by": 1, "with": 5}
FIRST_WORD = re.compile(r"\(*(\w+)")


def first_words(root: Path, packages: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Places of docstrings in packages and folders, with the first word of each in lower case."""
    trees = dict(parsed(root, tuple(packages)))
    for path in (path for folder in folders for path in sorted((root / folder).glob("*.py"))):
        trees[str(path.relative_to(root))] = ast.parse(path.read_text())
    found = {}
    for module, tree in trees.items():
        for node in (tree, *statements(tree)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                word = FIRST_WORD.match(ast.get_docstring(node) or "")
                if word is not None:
                    place = f"{module}:{getattr(node, 'lineno', 1)}: {getattr(node, 'name', '')}"
                    found[place] = word[1].lower()
    return found


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    """The lists of the packages in service are empty; elsewhere some words are counted still."""
    every = first_words(ROOT, FLOORS, ["tests/support"])
    assert len(every) > 3000
    served = {place: word for place, word in every.items() if re.split("[.:]", place)[0] in SERVED}
    assert len(served) > 3000
    assert not {place: word for place, word in served.items() if word in UNNAMED}
    # but for kernels', whose docstrings are in the line numbers of their objects
    found = {place: word for place, word in every.items() if not place.startswith("dsl_kernels")}
    assert not {place: word for place, word in found.items() if word in FIRST}
    counts = Counter(found.values())
    assert not {word: counts[word] for word, most in NOT_MORE.items() if counts[word] > most}


def test_names_in_docstrings_exist() -> None:
    names = Names(ROOT, FLOORS)
    assert sum(len(docs) for docs in names.docs.values()) > 3000
    wrong = list(names.unknown())
    assert not wrong, "\n" + "\n".join(wrong)


# ---------------------------------------------------------------- the checks can fail


def test_a_long_body_is_found() -> None:
    tree = ast.parse(
        'class A:\n  def f(\n    self\n  ):\n    """A.\n    """\n    x = 1\n\n    return x\n'
    )
    (function,) = (node for node in statements(tree) if isinstance(node, ast.FunctionDef))
    assert body_lines(function) == 3
    (function, _) = statements(ast.parse('def f():\n    """A."""\n'))
    assert isinstance(function, ast.FunctionDef) and body_lines(function) == 0


def test_prose_is_found() -> None:
    page = """\
    # Title of it

    Prose of
    two lines.

        code of
    | a | table |
    [word](without-a-blank)

    * an item

          code, or the item's

        its second paragraph
    ```
    fenced code
    ```
    the end
    """
    found = [number for number, _ in prose(textwrap.dedent(page))]
    assert found == [1, 3, 4, 10, 12, 14, 18]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A package whose docstrings name what is there, and what is not."""
    files = {
        "low/__init__.py": "",
        "low/a.py": '''
            """``run``, ``Kept``, ``low.b.rest``, ``b.rest``, ``b.py``, ``arg``, ``text``.

            ``ran``, ``low.b.rests``, ``low.c``, ``b.rests``, ``c.py``, ``written``, ``run()``.
            """
            import json
            import low.b as other
            def run(arg):
                """``json.anything``, ``other.rest``, ``other.rests``, ``Kept.field``."""
                return "text"  # written
            ''',
        "low/b.py": '''
            class Base:
                """``Kept.field``, ``kept.field``, ``Kept.fields``."""
                def __init__(self):
                    self.made = 1
            class Kept(Base):
                """``Kept.made``, ``Base.field``, ``int``, ``_hidden``."""
                field: int
            def rest(kept): ...
            ''',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def test_first_words_are_found(tmp_path: Path) -> None:
    files = {
        "low/__init__.py": '"""Low."""\n',
        "low/a.py": (
            '"""How it is."""\nclass A:\n  """(b, h) of A."""\n  def f():\n    """``x`` of."""\n'
        ),
        "more/b.py": 'def g():\n  """Whether."""\ndef h(): ...\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert first_words(tmp_path, ["low"], ["more"]) == {
        "low:1: ": "low", "low.a:1: ": "how", "low.a:2: A": "b",
        "more/b.py:1: g": "whether",
    }  # fmt: skip


def test_names_that_are_not_there_are_found(library: Path) -> None:
    found = [each.rpartition("/")[2] for each in Names(library, ("low",)).unknown()]
    assert sorted(found) == [
        "a.py:1: b.rests",
        "a.py:1: c.py",
        "a.py:1: low.b.rests",
        "a.py:1: low.c",
        "a.py:1: ran",
        "a.py:1: written",
        "a.py:8: other.rests",
        "b.py:2: Kept.fields",
        "b.py:6: Base.field",
        "b.py:6: _hidden",
    ]
