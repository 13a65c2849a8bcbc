"""Which package of flatshard imports which, and how large the state of a unit is."""

import ast
import dataclasses
import inspect
import pathlib

import flatshard
from flatshard import fully_shard
from flatshard._fsdp.root import Root
from flatshard._fsdp.unit import UnitState

PACKAGE = pathlib.Path(flatshard.__file__).resolve().parent
# The ladder of packages, as in docs/internals/autograd.md.
LOW = {"torch_versions", "_tensor"}
ALLOWED = {
    "torch_versions": set(),
    "_tensor": {"torch_versions"},
    "float8": LOW,
    "_graphs": LOW,
    "_fsdp": LOW | {"float8", "_graphs"},
    "optim": LOW | {"_fsdp"},
    "diagnostics": {"_fsdp"},
    "checkpoint": LOW | {"_fsdp", "optim"},
    "moe": LOW | {"_fsdp"},
    "megatron": LOW | {"float8", "_fsdp", "moe", "diagnostics"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "flatshard":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("flatshard."):
            yield node.module.split(".")[1]


def test_packages_import_what_stands_below_them():
    found = []
    for name, allowed in ALLOWED.items():
        top = PACKAGE / name
        for path in top.rglob("*.py") if top.is_dir() else [PACKAGE / f"{name}.py"]:
            for other in set(imports(path)) - {name, "_C"} - allowed:
                found.append(f"{path.relative_to(PACKAGE)}: {other}")
    assert not found


# -- circles ---------------------------------------------------------------------------


def imports_of(path, modules):
    """Returns the modules of the package that a file imports, also in functions.
    Imports only for types do not count."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    return found & modules.keys()


def circle_in(graph):
    """Returns names of a circle of imports, or those that lead to one; [] if there is
    none."""
    left = dict(graph)
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]
    return []


def test_no_circle_of_imports():
    modules = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(("flatshard", *path.relative_to(PACKAGE).with_suffix("").parts))
        modules[name.removesuffix(".__init__")] = path
    del modules["flatshard"]  # others import _C from it
    graph = {name: imports_of(path, modules) for name, path in modules.items()}
    assert circle_in(graph) == []
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]


# -- sizes -----------------------------------------------------------------------------


def test_a_unit_and_a_root_are_a_few_named_values():
    assert len(dataclasses.fields(UnitState)) <= 8
    tree = ast.parse(inspect.getsource(Root))
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert len(stored - {"root"}) <= 8  # of a unit


def test_fully_shard_is_a_few_steps():
    function = ast.parse(inspect.getsource(fully_shard)).body[0]
    _, first, *_, last = function.body  # after the docstring
    assert last.end_lineno - first.lineno + 1 <= 40


def test_only_core_sees_the_runtime_behind_a_unit():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ".core.runtime." in ast.unparse(node)
    ]
    assert not found
