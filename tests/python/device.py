"""The device of the tests' models and data: FLATSHARD_TEST_DEVICE, cpu or cuda.

First values and data are drawn on the CPU, so that they are the same on both, and then
moved. Modules from tests/python/models.py are on the device already.
"""

import functools
import itertools
import os

from torch.distributed.device_mesh import init_device_mesh

DEVICE = os.environ.get("FLATSHARD_TEST_DEVICE", "cpu")
# Tests of several options run all combinations, and not only all pairs of values.
IS_WHOLE_MATRIX = os.environ.get("FLATSHARD_WHOLE_MATRIX") == "1"


def on_device(value):
    """A tensor there, or a module with its parameters and buffers moved there.

    One with any of them on the meta device stays as it is: it has no values yet.
    """
    if DEVICE == "cpu" or _is_meta(value):
        return value
    return value.to(DEVICE)


def _is_meta(value):
    if not hasattr(value, "parameters"):
        return value.is_meta
    tensors = itertools.chain(value.parameters(), value.buffers())
    return any(tensor.is_meta for tensor in tensors)


@functools.lru_cache(maxsize=None)
def named_mesh(**sizes):
    """A DeviceMesh of dimensions of these names, one for each shape: its groups stay
    until the process ends, and of Gloo's each has threads that wake a hundred times a
    second."""
    return init_device_mesh(DEVICE, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
