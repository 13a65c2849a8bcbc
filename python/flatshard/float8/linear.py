"""nn.Linear whose weight is FP8 while its unit computes."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _C
from flatshard.float8.parallel_linear import parallel_linear
from flatshard.torch_versions import register_effect


class Float8Linear(nn.Linear):
    """`ShardOptions(fp8=Float8Policy(...))` turns an nn.Linear into this.

    Its weight is an nn.Parameter in bfloat16 whose values cannot be read: the matmuls
    of forward and backward read its FP8 planes. Activations are quantized by the
    weight's recipe, and sums are float32. The weight's gradient is written where it is
    reduced, and hooks on the unsharded weight see None.
    """

    def forward(self, input):
        weight = self.weight
        if isinstance(weight, DTensor):
            raise RuntimeError(
                "Float8Linear: its weight is a shard here: call the module that "
                "fully_shard wrapped, not this one below it, or unshard() it first"
            )
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(weight.dtype)
        # The operator's own errors have another type with newer torch.
        if input.dtype != weight.dtype:
            raise ValueError(
                f"Float8Linear: expected an input of {weight.dtype}, the dtype of "
                f"its weight, got {input.dtype}: mp_policy casts the inputs of units, and "
                "autocast the inputs of layers"
            )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"Float8Linear: expected an input [..., {self.in_features}], got "
                f"{list(input.shape)}"
            )
        compiles = torch.compiler.is_compiling()
        # A layer with the same input as the layer before does not quantize it again.
        linear = torch.ops.flatshard.float8_linear if compiles else _C.float8_linear
        spec = self.__dict__.get("_flatshard_cut")
        if spec is not None:
            return parallel_linear(self, input, spec, linear)
        return linear(input, weight, self.bias)

    def __reduce_ex__(self, protocol):
        """Makes copies an nn.Linear whose weight is a shard that belongs to no unit."""
        state = {k: v for k, v in vars(self).items() if k != "_flatshard_cut"}
        return object.__new__, (nn.Linear,), state


def make_float8(state):
    """Converts the nn.Linear modules whose weights are FP8 in `state`."""
    weights = [p for p in state.parameters if p.float8]
    if weights:
        register_effect("flatshard::float8_linear_backward")
    for p in weights:
        for module, _ in p.sites:
            module().__class__ = Float8Linear
            if p.parallel is not None:
                module().__dict__["_flatshard_cut"] = p.parallel.spec
