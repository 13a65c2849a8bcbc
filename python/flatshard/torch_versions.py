"""How torch's versions differ where Flatshard's Python meets them: the one place.

Each name says what it hides. Which versions were tried is in docs/python.md.
"""

import torch

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def default_reduce_dtype(param_dtype, dtype):
    """FSDP2's meaning of reduce_dtype=None for a parameter of `dtype`: up to 2.14
    the dtype it is gathered in, since 2.15 its own."""
    if VERSION < (2, 15) and param_dtype is not None:
        return param_dtype
    return dtype
