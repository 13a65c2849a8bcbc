"""How a MixedPrecisionPolicy casts the tensors around a forward."""

import copy
import dataclasses
import functools

import torch

from flatshard.torch_versions import never_compiled, tree_map


# The types of most arguments of a forward. tree_map is ten times slower for them.
_NO_TENSORS = (type(None), bool, int, float, str)


def _cast(tree, dtype):
    """Casts floating-point tensors in any nesting to `dtype`; containers are copied."""
    if isinstance(tree, torch.Tensor):
        if tree.dtype is dtype or not tree.is_floating_point():
            return tree
        return tree.to(dtype)
    kind = type(tree)
    if kind in _NO_TENSORS:
        return tree
    if kind is tuple or kind is list:
        return kind([_cast(item, dtype) for item in tree])
    if kind is dict:
        return {key: _cast(item, dtype) for key, item in tree.items()}
    return tree_map(functools.partial(_cast_leaf, dtype), tree)


def _cast_leaf(dtype, leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    # Not dataclasses.replace: that runs __post_init__ again.
    copied = copy.copy(leaf)
    for field in dataclasses.fields(leaf):
        if hasattr(leaf, field.name):
            value = _cast(getattr(leaf, field.name), dtype)
            object.__setattr__(copied, field.name, value)
    return copied


@never_compiled
def cast_inputs(policy, args, kwargs):
    """Returns the arguments of a forward, cast by a MixedPrecisionPolicy."""
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        args = tuple(_cast(a, policy.param_dtype) for a in args)
        kwargs = {k: _cast(v, policy.param_dtype) for k, v in kwargs.items()}
    return args, kwargs


@never_compiled
def cast_output(policy, output):
    if policy.output_dtype is not None:
        output = _cast(output, policy.output_dtype)
    return output


def call_cast(policy, function, args, kwargs):
    """Returns function(*args, **kwargs) with both casts."""
    args, kwargs = cast_inputs(policy, args, kwargs)
    return cast_output(policy, function(*args, **kwargs))
