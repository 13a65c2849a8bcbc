"""Every public function has type annotations, and they resolve."""

import inspect
import typing

import pytest

import flatshard
from flatshard import checkpoint, diagnostics, float8, megatron, optim
from flatshard.megatron import v2


def public_functions():
    for module in (flatshard, checkpoint, diagnostics, float8, megatron, v2, optim):
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
        ]
        for name in names:
            value = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{module.__name__}.{name}", value
            elif inspect.isclass(value):
                for key, function in vars(value).items():
                    is_public = not key.startswith("_") or key == "__init__"
                    if is_public and inspect.isfunction(function):
                        yield f"{module.__name__}.{name}.{key}", function


FUNCTIONS = dict(public_functions())


def test_functions_are_found():
    assert len(FUNCTIONS) > 80
    assert "flatshard.fully_shard" in FUNCTIONS
    assert "flatshard.FSDPModule.unshard" in FUNCTIONS


@pytest.mark.parametrize("name", FUNCTIONS)
def test_annotated(name):
    function = inspect.unwrap(FUNCTIONS[name])
    hints = typing.get_type_hints(function)
    expected = set(inspect.signature(function).parameters) - {"self", "cls"}
    if function.__name__ != "__init__":
        expected.add("return")
    assert expected <= set(hints)
