"""Compares calls of a forward with the sample that make_graphed_callables got."""

from dataclasses import dataclass

import torch
from torch import nn

from flatshard._graphs.unit_graph import is_plain
from flatshard._tensor.mesh import device_of
from flatshard.torch_versions import never_compiled, tree_flatten


class Sample:
    """The arguments of the captured call; keeps no tensor."""

    def __init__(self, args, kwargs, state, allow_unused_input):
        self._args, self._structure = self._flatten(args, "sample_args", state)
        self._keywords = {
            name: self._flatten(value, f"sample_kwargs[{name!r}]", state)
            for name, value in kwargs.items()
        }
        self._unused_allowed = allow_unused_input

    @staticmethod
    def _flatten(tree, name, state):
        leaves, structure = tree_flatten(tree)
        return [_describe(leaf, name, state) for leaf in leaves], structure

    @never_compiled
    def difference(self, args, kwargs):
        """Returns in what a call differs; empty: in nothing."""
        if kwargs.keys() != self._keywords.keys():
            return "it has other keyword arguments than sample_kwargs"
        difference = _compare(args, self._args, self._structure, "sample_args")
        for name, value in kwargs.items():
            difference = difference or _compare(
                value, *self._keywords[name], f"sample_kwargs[{name!r}]"
            )
        return difference

    @never_compiled
    def check_used(self, tensors, outputs, unit):
        """Checks a forward from `tensors` to `outputs`."""
        if self._unused_allowed:
            return
        unused = _unused(tensors, outputs)
        if unused is not None:
            raise RuntimeError(
                f"make_graphed_callables: argument tensor {unused} of unit {unit} needs "
                "a gradient, and none of its results depends on it; pass it without "
                "requires_grad, in sample_args as well, or set allow_unused_input=True"
            )
        self._unused_allowed = True  # once is enough


@dataclass(frozen=True)
class _TensorLike:
    shape: tuple
    dtype: torch.dtype
    needs_grad: bool


def _describe(leaf, name, state):
    if isinstance(leaf, torch.Tensor):
        device = device_of(state.sharding.device_mesh)
        if type(leaf) not in (torch.Tensor, nn.Parameter) or (
            leaf.layout is not torch.strided
        ):
            raise TypeError(
                f"{name}: expected strided tensors, got a {leaf.layout} "
                f"{type(leaf).__name__}"
            )
        if leaf.device != device and not leaf.is_meta:
            raise ValueError(
                f"{name}: expected tensors on {device} or meta, got one on {leaf.device}"
            )
        policy = state.sharding.mp_policy
        casts = policy.cast_forward_inputs and leaf.is_floating_point()
        dtype = policy.param_dtype if casts and policy.param_dtype else leaf.dtype
        return _TensorLike(tuple(leaf.shape), dtype, leaf.requires_grad)
    if not is_plain(leaf):
        raise TypeError(
            f"{name}: expected tensors and plain values, got a {type(leaf).__name__}"
        )
    return type(leaf), leaf


def _compare(tree, expected, structure, name):
    leaves, found = tree_flatten(tree)
    if found != structure:
        return f"its arguments are nested in another way than {name}"
    for leaf, like in zip(leaves, expected):
        if type(like) is tuple:
            if (type(leaf), leaf) != like:
                return (
                    f"an argument that is not a tensor has another value than in {name}"
                )
        elif not isinstance(leaf, torch.Tensor):
            return f"an argument is not a tensor as in {name}"
        elif leaf.shape != like.shape or leaf.dtype != like.dtype:
            return (
                f"an argument has another shape or dtype than in {name}: "
                f"{list(like.shape)}, {like.dtype}"
            )
        elif leaf.requires_grad != like.needs_grad:
            return f"an argument needs a gradient and does not in {name}, or vice versa"
    return ""


def _unused(tensors, outputs):
    """Returns the number of a tensor that needs a gradient and gets none; None: there
    is none."""
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {}
    for number, tensor in enumerate(tensors):
        if tensor.requires_grad:
            wanted[edge(tensor)[:2]] = number
    missing = set(wanted.values())
    todo = [edge(t)[:2] for t in outputs if t.requires_grad]
    seen = set(todo)
    while todo and missing:
        found = todo.pop()
        if found in wanted:
            missing.discard(wanted[found])
            continue  # others use the memory after it
        for following in found[0].next_functions:
            if following[0] is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return min(missing, default=None)
