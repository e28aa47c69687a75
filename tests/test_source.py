"""Laws about the source of `zero` and `collectives`, read from the syntax trees: nothing is run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .test_structure import PACKAGES, ROOT, TREES

UNPICKLES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "yaml"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "_tensor_to_object", "Unpickler", "eval", "exec", "allow_pickle"),
}
GLOBAL_RANKS = {"get_rank", "get_global_rank", "get_group_rank", "get_process_group_ranks", "group_src", "group_dst"}
CACHED = {
    ("zero.checkpoint.contents", "cached_property"),  # of one object, which changes no more
    ("zero.checkpoint.format.checksums", "functools.lru_cache(maxsize=1024)"),  # powers of one polynomial
    ("zero.checkpoint.format.extents", "cached_property"),  # of one object, which is frozen
    ("zero.checkpoint.read.reader", "cached_property"),  # of one object
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return every name in a module: variables, attributes, keyword arguments, and imported names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
            for alias in node.names:
                yield from ((name, node.lineno) for name in (*module, *alias.name.split(".")))


def loads(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return the calls of ``torch.load`` and ``numpy.load`` that may unpickle."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if given.get("weights_only") != "True":
                yield ast.unparse(node.func), node.lineno


def unpickling(tree: ast.AST) -> list[tuple[str, int]]:
    return sorted({*((name, line) for name, line in names(tree) if name in UNPICKLES), *loads(tree)})


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from pickle import loads", ["pickle"]),
        ("dist.all_gather_object(a, b)", ["all_gather_object"]),
        ("from torch.distributed import broadcast_object_list as b", ["broadcast_object_list"]),
        ("np.load(path, allow_pickle=True)", ["allow_pickle", "np.load"]),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load"]),
        ("torch.load(path, weights_only=True)", []),
        ("json.loads(text)", []),
    ],
)
def test_the_reader_sees_every_way_to_unpickle(source: str, found: list[str]) -> None:
    assert [name for name, _ in unpickling(ast.parse(source))] == found


def test_nothing_from_disk_or_from_a_peer_is_unpickled() -> None:
    found = {module: unpickling(tree) for module, tree in TREES.items()}
    assert not any(found.values()), {module: places for module, places in found.items() if places}


def test_global_ranks_exist_in_one_module_alone() -> None:
    found = {module: {name for name, _ in names(tree)} & GLOBAL_RANKS for module, tree in TREES.items()}
    assert {module for module, spoken in found.items() if spoken} == {"collectives.backends.gloo"}


def test_every_line_that_coverage_leaves_out_says_why() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    lines = [(path.name, line) for path in paths for line in path.read_text().splitlines()]
    left_out = [(name, line.partition("pragma:")[2]) for name, line in lines if "pragma:" in line]
    assert left_out, "if there are none, this reader may be blind"
    for name, said in left_out:
        assert re.fullmatch(r" no (cover|branch) - .{20,}", said), (name, said)


# -- shared objects are not changed -----------------------------------------------------------------------------------


def imported_names(tree: ast.Module) -> set[str]:
    """Return the globals and classes of the two packages that a module imports, and imported modules."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] in PACKAGES):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def shared_writes(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the places where a function changes shared objects.

    It stores into a class or another module's object, has a cache for the life of the process, or has a mutable
    default.
    """
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    shared, found = classes | imported_names(tree) | {"cls"}, []
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
        mutable = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
        found += [(default.lineno, "a default") for default in defaults if isinstance(default, mutable)]
        if isinstance(node, ast.FunctionDef):
            cached = [ast.unparse(each) for each in node.decorator_list]
            found += [(node.lineno, each) for each in cached if "cache" in each]
        for inside in ast.walk(node):
            if isinstance(inside, (ast.Attribute, ast.Subscript)) and not isinstance(inside.ctx, ast.Load):
                owner: ast.expr = inside.value
                while isinstance(owner, (ast.Attribute, ast.Subscript)) and not _is_own_class(owner):
                    owner = owner.value
                if _is_own_class(owner) or (isinstance(owner, ast.Name) and owner.id in shared):
                    found.append((inside.lineno, ast.unparse(inside)))
    return sorted(set(found))


def _is_own_class(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self.__class__", "type(self)")


@pytest.mark.parametrize(
    "body",
    ["C.a = 1", "C.a[0] += 1", "cls.a = 1", "type(self).a = 1", "self.__class__.a = 1", "OTHER[0] = 1", "other.a = 1"],
)
def test_the_reader_sees_what_is_stored_into_what_is_shared(body: str) -> None:
    source = f"from .somewhere import OTHER, other\nclass C:\n def f(self, cls):\n  {body}"
    assert [line for line, _ in shared_writes(ast.parse(source))] == [4]


@pytest.mark.parametrize(
    "source", ["def f(a=[]):\n pass", "f = lambda *, a={}: a", "@functools.cache\ndef f():\n pass"]
)
def test_the_reader_sees_caches_and_defaults_that_change(source: str) -> None:
    assert len(shared_writes(ast.parse(source))) == 1


def test_no_function_changes_a_class_a_default_or_what_another_module_owns() -> None:
    written = {module: shared_writes(tree) for module, tree in TREES.items()}
    found = {
        module: [place for place in places if (module, place[1]) not in CACHED] for module, places in written.items()
    }
    assert not any(found.values()), {module: places for module, places in found.items() if places}
