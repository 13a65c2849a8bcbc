"""Outputs of forwards that pytree does not look into: distributions, objects of a
program's classes, closures, iterators.

The backward of a unit starts at the gradients of its outputs, so these have to be found.
"""

import contextvars
import functools
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Set, ValuesView

import torch
from torch import nn

# An object that contains more is not an output. The search ends there.
_MOST = 10_000

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.Generator),
)
# The body of a function runs later.
_BODIES = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def look_inside(units, number, objects, shows_backward):
    """Returns the tensors in `objects`, the results of the forward of unit `number`, and
    whether modules of the unit may run after it.

    Args:
        shows_backward: a tensor next to them has a backward.

    Raises:
        NotImplementedError: they may, in a unit that is resharded by then.
    """
    tensors = []
    for found in objects:
        of_this, runs_later = _search(found)
        tensors += of_this
        if not runs_later or shows_backward:
            continue
        if number == 0:
            return tensors, True
        raise NotImplementedError(
            f"the forward of unit {units[number].name} returned a {_name(found)} that "
            "runs later, when the unit's parameters are sharded again: return tensors, "
            "or an object that contains them, or apply fully_shard only to modules around "
            "it"
        )
    return tensors, False


def _name(found):
    kind = type(found)
    if kind.__module__ == "builtins":
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"


def _search(found):
    """Returns the tensors that an object refers to, and whether it may call a module."""
    tensors, runs_later = [], False
    # By id. Kept, since the id of an object that was made for the search is used again.
    seen = {}
    left = [(found, False)]
    while left and len(seen) < _MOST:
        value, is_run = left.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, nn.Module):
            runs_later = runs_later or is_run
        else:
            is_run = is_run or callable(value) or isinstance(value, (map, filter))
            runs_later = runs_later or isinstance(value, _BODIES)
            inside = _inside(value)
            if inside is None:
                runs_later = True
            else:
                left += [(v, is_run) for v in inside]
    return tensors, runs_later


def _inside(value):
    """Returns what an object refers to; None for an iterator that does not show it."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, Set, ValuesView, deque)):
        return list(value)
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.GeneratorType):
        return list(value.gi_frame.f_locals.values()) if value.gi_frame else []
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__self__]
    if isinstance(value, types.CellType):
        return [value.cell_contents] if _is_set(value) else []
    if isinstance(value, weakref.ReferenceType):
        return [value()]
    if isinstance(value, contextvars.ContextVar):
        return [value.get(None)]
    if isinstance(value, torch.futures.Future):
        return [value.value()] if value.done() else []
    fields = [*getattr(value, "__dict__", {}).values(), *_slots(value)]
    if isinstance(value, Iterator) and not fields:
        try:
            return list(value.__reduce__()[1:])
        except TypeError:  # it cannot be copied
            return None
    return fields


def _of_function(function):
    cells = [c.cell_contents for c in function.__closure__ or () if _is_set(c)]
    defaults = [
        *(function.__defaults__ or ()),
        *(function.__kwdefaults__ or {}).values(),
    ]
    return cells + defaults


def _is_set(cell):
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def _slots(value):
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                yield getattr(value, name)
