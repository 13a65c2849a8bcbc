"""FP8 linear layers whose weight is sharded over the ranks of tensor parallelism.

Each rank quantizes its own part, so scales are computed per part, as in the trainer.
"""

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flatshard._tensor.sharded_tensor import contiguous_stride
from flatshard._tensor.tensor_parallel import arrived


def why_not_cut(tensor):
    """Returns why the DTensor `tensor` cannot be such a weight; "" when it can."""
    if tensor.device_mesh.ndim != 1:
        return f"it is a DTensor over {tensor.device_mesh.ndim} mesh dimensions"
    placement = tensor.placements[0]
    if type(placement) is not Shard:
        return f"it is a DTensor with placement {placement}, FP8 needs Shard"
    return ""


def parallel_linear(module, input, spec, linear):
    """Runs the forward of a Float8Linear.

    Args:
        input: [..., in_features], a DTensor over the mesh of `spec`.
        spec: DTensorSpec of the full weight, [out_features, in_features].
        linear: function of this rank's parts of input, weight and bias.

    Returns:
        [..., out_features], a DTensor: Shard(-1) where the weight is Shard(0), Partial
        where it is Shard(1).
    """
    mesh, placement = spec.mesh, spec.placements[0]
    if not isinstance(input, DTensor):
        raise ValueError(
            "Float8Linear: expected a DTensor as input, because its weight is sharded over "
            f"{mesh}, got a {type(input).__name__}: the styles of parallelize_module "
            "make one of a plain tensor"
        )
    last = Shard(input.dim() - 1)
    if placement.dim == 0:
        taken, gradient, made = Replicate(), Partial(), last
    else:
        taken, gradient, made = last, last, Partial()
    x = input.redistribute(mesh, [taken]).to_local(grad_placements=[gradient])
    sizes = torch.Size([*input.shape[:-1], module.out_features])
    y = linear(arrived(x), module.weight, _own_bias(module.bias, placement, mesh))
    return DTensor.from_local(
        y, mesh, [made], run_check=False, shape=sizes, stride=contiguous_stride(sizes)
    )


def _own_bias(bias, placement, mesh):
    """Returns what this rank adds to its part of the result."""
    if bias is None:
        return None
    if placement.dim == 0:
        own = bias.redistribute(mesh, [Shard(0)]).to_local()
        return arrived(own)
    return _Share.apply(arrived(bias.to_local()), mesh.size())


class _Share(torch.autograd.Function):
    """An equal fraction of a bias for each addend of a sum over ranks. Each rank sees the
    gradient of the full sum."""

    @staticmethod
    def forward(ctx, bias, ranks):
        return bias / ranks

    @staticmethod
    def backward(ctx, grad):
        return grad, None
