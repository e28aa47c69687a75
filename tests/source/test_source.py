"""The library unpickles nothing, and changes nothing shared."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from .trees import PACKAGES, trees

UNPICKLES = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "yaml"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"),
    *("recv_object_list", "_tensor_to_object", "Unpickler", "eval", "exec", "allow_pickle"),
}
GLOBAL_RANKS = {"get_rank", "get_global_rank", "get_group_rank", "get_process_group_ranks", "group_src", "group_dst"}
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem"),
    *("popleft", "remove", "reverse", "setdefault", "sort", "update", "difference_update", "intersection_update"),
}


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, node.value.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.name, node.lineno) for alias in node.names)


def unpickling(tree: ast.AST) -> list[tuple[str, int]]:
    """Return the names that unpickle, and the calls of ``torch.load`` without ``weights_only=True``."""
    evaluated = {("eval", node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}  # model.eval()
    found = [(name, line) for name, line in names(tree) if name in UNPICKLES and (name, line) not in evaluated]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if given.get("weights_only") != "True":
                found.append((ast.unparse(node.func), node.lineno))
    return found


def shared_writes(tree: ast.Module) -> list[tuple[int, str]]:
    """Return the places where a function changes a global of its module, a class, or what another module owns."""
    own: set[str] = set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        own |= {target.id for target in targets if isinstance(target, ast.Name)}
    shared = own | {"cls"} | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").partition(".")[0] in PACKAGES):
            shared |= {alias.asname or alias.name for alias in node.names}

    def root(node: ast.expr) -> str:
        while isinstance(node, (ast.Subscript, ast.Attribute)) and ast.unparse(node) != "self.__class__":
            node = node.value
        return {"type(self)": "cls", "self.__class__": "cls"}.get(ast.unparse(node), ast.unparse(node))

    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        given = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)} - {"cls"}
        for node in ast.walk(function):
            if isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(node.ctx, ast.Load):
                changed = root(node.value) in shared - stored - given
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
                changed = root(node.func.value) in own - stored - given
            else:
                continue
            if changed:
                found.append((node.lineno, ast.unparse(node)))
    return sorted(set(found))


@pytest.mark.law("no unpickling")
def test_nothing_from_disk_or_from_a_peer_is_unpickled() -> None:
    ways = "import pickle\ndist.all_gather_object(a, b)\ntorch.load(p)\ntorch.load(p, weights_only=True)"
    assert [name for name, _ in unpickling(ast.parse(ways))] == ["pickle", "all_gather_object", "torch.load"]
    found = {module: unpickling(tree) for module, tree in trees().items()}
    assert found
    assert not any(found.values()), {module: places for module, places in found.items() if places}


@pytest.mark.law("group ranks")
def test_global_ranks_exist_in_one_module_alone() -> None:
    found = {module for module, tree in trees().items() if {name for name, _ in names(tree)} & GLOBAL_RANKS}
    assert found == {"collectives.backends.gloo"}


CHANGES = (
    *("A[0] = 1", "A.b = 1", "A[0].b += 1", "del A[0]", "A.append(1)", "A[0].update(b=1)", "C.a = 1", "cls.a = 1"),
    *("type(self).a = 1", "self.__class__.a = 1", "OTHER[0] = 1", "other.a = 1"),
)


@pytest.mark.law("no shared changes")
def test_no_function_changes_a_global_a_class_or_what_another_module_owns() -> None:
    for body in CHANGES:
        source = f"from .somewhere import OTHER, other\nA: list = []\nclass C:\n def f(self, cls):\n  {body}"
        assert [line for line, _ in shared_writes(ast.parse(source))] == [5], body
    found = {module: shared_writes(tree) for module, tree in trees().items()}
    assert not any(found.values()), {module: places for module, places in found.items() if places}
