"""nn.Linear whose backward writes gradients where they are reduced."""

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from flatshard.torch_versions import parameters_of


class InPlaceLinear(nn.Linear):
    """An nn.Linear whose unit reduces gradients where its backward writes them, see
    ShardOptions.grads_in_place.

    Autograd would allocate a tensor for each weight gradient, keep it until the unit is
    reduced, and copy it then. Here the backward's matmul writes to the memory that is
    reduced, or adds to what an earlier use of the weight wrote.
    """

    def forward(self, input):
        if torch.compiler.is_compiling():
            return functional.linear(input, self.weight, self.bias)
        unit = self.__dict__["_flatshard_unit"]
        core = unit.core
        linear = None if core is None else core.linear
        if linear is None:
            return functional.linear(input, self.weight, self.bias)
        # Not self.weight: nn.Module's lookup costs half as much as the operation.
        own = parameters_of(self)
        output = linear(input, own.get("weight"), own.get("bias"))
        if output is not None:
            return output
        # Outside a forward: a checkpoint's recompute has to find the same.
        is_shard = isinstance(self.weight, DTensor) and input.requires_grad
        if is_shard and unit.unsharded(0) is not None:
            output = linear(input, self.weight, self.bias)
        if output is not None:
            return output
        return functional.linear(input, self.weight, self.bias)

    def __reduce_ex__(self, protocol):
        """Makes copies an nn.Linear that belongs to no unit."""
        state = {k: v for k, v in vars(self).items() if k != "_flatshard_unit"}
        return object.__new__, (nn.Linear,), state


# Errors and printed models name the user's kind.
InPlaceLinear.__name__ = "Linear"


def linears_in_place(modules, parameters, wanted, slices):
    """Returns the nn.Linear among `modules` whose weights are of `parameters`, trained,
    and whose gradients are written in place.

    Args:
        wanted: ShardOptions.grads_in_place. None: not tied weights, because their gradient
            would need the memory of the reduction from the first of its uses on.
        slices: not None for a unit on a part of the model's mesh. Such a unit has none.
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
    """Returns the core's Runtime that accepts gradients of this unsharded parameter, or
    None."""
    unit = getattr(whole, "_flatshard_unit", None)
    state = None if unit is None else unit()
    return None if state is None or state.root is None else state.core.runtime
