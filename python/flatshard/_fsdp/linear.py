"""nn.Linear whose backward writes gradients where they are reduced."""

import weakref

import torch
from torch import nn
from torch.nn import functional

from flatshard.torch_versions import in_functorch


class InPlaceLinear(nn.Linear):
    """What `fully_shard(..., grads_in_place=True)` makes of an nn.Linear.

    Autograd would make a tensor of each gradient, which stays until the unit is
    reduced and is copied then. Here the product of the backward goes to that place
    itself, and is added to what came there before. Hooks on the whole weight and bias
    see None.
    """

    def forward(self, input):
        weight, bias = self.weight, self.bias
        root = self.__dict__["_flatshard_unit"].root
        if root is None or not _is_plain(input, weight):
            return functional.linear(input, weight, bias)
        return root.core.linear(input, weight, bias)


def _is_plain(input, weight):
    """Nobody but autograd sees the operation, and it has nothing to cast."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and type(input) in (torch.Tensor, nn.Parameter)
        and type(weight) is nn.Parameter
        and input.dtype == weight.dtype
        and input.dim() > 0
        and not torch.is_autocast_enabled(input.device.type)
        and not in_functorch()
    )


def write_grads_in_place(modules, state):
    """Of the nn.Linear among the modules whose weights `state` trains."""
    trained = {id(p.shard) for p in state.parameters if p.trainable}
    for module in modules:
        if type(module) is nn.Linear and id(module.weight) in trained:
            module.__class__ = InPlaceLinear
            module.__dict__["_flatshard_unit"] = state
    for p in state.parameters:
        if p.trainable:
            p.whole._flatshard_unit = weakref.ref(state)


def sink_of(whole):
    """The core's Runtime that takes gradients of this whole parameter, or None."""
    unit = getattr(whole, "_flatshard_unit", None)
    state = None if unit is None else unit()
    return None if state is None or state.root is None else state.root.core
