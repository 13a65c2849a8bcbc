"""nn.Linear whose backward writes gradients where they are reduced."""

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from flatshard.torch_versions import backward_hooks_of, in_functorch


class InPlaceLinear(nn.Linear):
    """An nn.Linear whose unit reduces gradients where its backward writes them, see
    ShardOptions.grads_in_place.

    Autograd would make a tensor of each weight gradient, which stays until the unit is
    reduced and is copied then. Here the product of the backward goes to the memory that
    is reduced, and is added to what an earlier use of the weight wrote.
    """

    def forward(self, input):
        weight, bias = self.weight, self.bias
        if torch.compiler.is_compiling():
            return functional.linear(input, weight, bias)
        unit = self.__dict__["_flatshard_unit"]
        if unit.root is not None and not _is_plain(input, weight):
            # Outside of a forward: a checkpoint's recompute has to find the same.
            is_shard = isinstance(weight, DTensor) and input.requires_grad
            if is_shard and unit.unsharded(0) is not None:
                weight, bias = self.weight, self.bias
        if unit.root is None or not _is_plain(input, weight):
            return functional.linear(input, weight, bias)
        return unit.root.core.linear(input, weight, bias)

    def __reduce_ex__(self, protocol):
        """A copy is an nn.Linear that belongs to no unit."""
        state = {k: v for k, v in vars(self).items() if k != "_flatshard_unit"}
        return object.__new__, (nn.Linear,), state


# Errors and printed models name the user's kind.
InPlaceLinear.__name__ = "Linear"


def _is_plain(input, weight):
    """Nobody but autograd sees the operation, and it has nothing to cast."""
    return (
        torch.is_grad_enabled()
        and type(input) in (torch.Tensor, nn.Parameter)
        and type(weight) is nn.Parameter
        and input.dtype == weight.dtype
        and input.dim() > 0
        and not backward_hooks_of(weight)
        and not torch.is_autocast_enabled(input.device.type)
        and not in_functorch()
    )


def linears_in_place(modules, parameters, wanted, slices):
    """Returns the nn.Linear among `modules` whose weights are of `parameters`, trained,
    and whose gradients are written in place.

    Args:
        wanted: ShardOptions.grads_in_place. None: not tied weights, whose gradient would
            take the memory of the reduction from the first of its uses on.
        slices: not None for a unit on a part of the model's mesh, which has none.
    """
    if wanted is False or slices is not None:
        return []
    trained = [
        p
        for p in parameters
        if p.whole.requires_grad and not p.float8 and not p.shown and p.dim == 0
    ]
    places = {
        id(site()): p for p in trained for site, name in p.sites if name == "weight"
    }
    found = []
    for module in modules:
        p = places.get(id(module)) if type(module) is nn.Linear else None
        if p is not None and (wanted or len(p.sites) == 1):
            found.append(module)
    return found


def write_grads_in_place(linears, state):
    for module in linears:
        module.__class__ = InPlaceLinear
        module.__dict__["_flatshard_unit"] = state
    for p in state.parameters:
        if p.trainable:
            p.whole._flatshard_unit = weakref.ref(state)


def sink_of(whole):
    """Returns the core's Runtime that takes gradients of this whole parameter, or
    None."""
    unit = getattr(whole, "_flatshard_unit", None)
    state = None if unit is None else unit()
    return None if state is None or state.root is None else state.root.core
