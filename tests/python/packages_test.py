"""Which package of flatshard imports which."""

import ast
import pathlib

import flatshard

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
