"""How torch's versions differ where Flatshard's Python meets them: the one place.

Each name says what it hides. Which versions were tried is in docs/python.md.
"""

import functools

import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def default_reduce_dtype(param_dtype, dtype):
    """FSDP2's meaning of reduce_dtype=None for a parameter of `dtype`: up to 2.14
    the dtype it is gathered in, since 2.15 its own."""
    if VERSION < (2, 15) and param_dtype is not None:
        return param_dtype
    return dtype


@functools.cache
def register_effect(operator):
    """torch.compile neither leaves calls of it out nor joins two of them."""
    # Imported here: it takes a second.
    from torch._library.effects import EffectType
    from torch.library import _register_effectful_op

    _register_effectful_op(operator, EffectType.ORDERED)
