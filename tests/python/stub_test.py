"""`_C.pyi` matches the extension: the same names, and the same arguments."""

import ast
import re
from pathlib import Path

import flatshard
from flatshard import _C

STUB = ast.parse((Path(flatshard.__file__).parent / "_C.pyi").read_text())
# No functions and no classes.
VALUES = {"version", "torch_version", "with_cuda"}
# pybind11 writes the arguments that a binding names into the docstring.
ARGUMENT = re.compile(r"(?:^|[(,] ?)\*?(\w+):")


def functions_of(body):
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def names_of(body):
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in body if isinstance(node, kinds)}


def is_property(node):
    return any(ast.unparse(d) == "property" for d in node.decorator_list)


def arguments_in_stub(node):
    names = [a.arg for a in node.args.args]
    return names + [a.arg for a in node.args.kwonlyargs]


def arguments_in_extension(function):
    """Names of the arguments; None where the binding names none of them."""
    line = (function.__doc__ or "").split("\n")[0]
    inside = line[line.find("(") : line.rfind(" -> ")]
    # Text in brackets belongs to a type.
    while "[" in inside:
        inside, n = re.subn(r"\[[^\[\]]*\]", "", inside)
        assert n, line
    names = ARGUMENT.findall(inside)
    unnamed = any(re.fullmatch(r"arg\d+", name) for name in names)
    return None if unnamed or not line else names


def check(where, stub, found):
    here = {name for name in vars(found) if not name.startswith("_")} - VALUES
    wanted = {name for name in names_of(stub) if not name.startswith("_")}
    wrong = [f"{where}{n}: the stub lacks it" for n in sorted(here - wanted)]
    wrong += [f"{where}{n}: not in the extension" for n in sorted(wanted - here)]
    for name, node in functions_of(stub).items():
        function = getattr(found, name, None)
        if function is None:
            continue
        if is_property(node) or isinstance(function, property):
            if is_property(node) != isinstance(function, property):
                wrong.append(f"{where}{name}: a property in one of the two")
            continue
        arguments = arguments_in_extension(function)
        expected = arguments_in_stub(node)
        if arguments is not None and arguments != expected:
            wrong.append(f"{where}{name}: the stub has {expected}, not {arguments}")
    return wrong


def test_the_stub_is_the_extensions():
    wrong = check("", STUB.body, _C)
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and hasattr(_C, node.name):
            wrong += check(f"{node.name}.", node.body, getattr(_C, node.name))
    assert not wrong, "\n".join(wrong)
