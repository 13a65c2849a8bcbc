"""Gradients of sharded tensors: they arrive with the row boundaries of their tensors.

Operations on full values have full gradients, equal on all ranks. `.grad` and
`torch.autograd.grad` of a sharded tensor return its rows of them.
"""

import torch
from torch.distributed.tensor import DTensor

from flatshard._tensor.shard_values import (
    Values,
    is_cut,
    is_whole,
    same_cuts,
    tensors_in,
)


def cut_as(tensor, gradient):
    """Returns `tensor.grad`, with the row boundaries of `tensor`. Not collective."""
    if not is_cut(tensor):
        return gradient
    if isinstance(gradient, DTensor):
        if gradient._spec is tensor._spec or is_cut(gradient) or not is_whole(gradient):
            return gradient
    if gradient.requires_grad:
        return Rows.apply(gradient, tensor.detach())
    tensor.grad = tensor.beside(tensor.rows_of(gradient).clone())
    return tensor.grad


def alike(kind, name, args, kwargs):
    """Arguments of which each has gradients with its own row boundaries: where these
    differ, or plain numbers (a loss) meet sharded tensors. Collective where they differ.

    Args:
        kind: ShardedTensor, the class of what is made.
    """
    shards, plain = [], False
    for value in (*args, *kwargs.values()):
        if isinstance(value, DTensor):
            if is_cut(value):
                shards.append(value)
        elif isinstance(value, torch.Tensor) and value.requires_grad:
            plain = plain or value.numel() == 1
    if not plain and len(shards) < 2:
        return args, kwargs
    found = tensors_in((args, kwargs))
    mesh = next((t.device_mesh for t in found if isinstance(t, DTensor)), None)
    # The result has the row boundaries of the first.
    first = None
    if shards:
        first = shards[0] if name.endswith("_") else max(shards, key=torch.Tensor.dim)

    def of(value):
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        if not isinstance(value, DTensor):
            is_number = mesh and value.numel() == 1
            return Beside.apply(value, mesh, kind) if is_number else value
        if not is_cut(value) or same_cuts(value, first):
            return value
        return Replicated.apply(value, kind)

    return tuple(map(of, args)), {key: of(value) for key, value in kwargs.items()}


class Rows(torch.autograd.Function):
    """The rows of a tensor, full or with other row boundaries, that `source` has."""

    @staticmethod
    def forward(ctx, tensor, source):
        ctx.plain, ctx.kind = not isinstance(tensor, DTensor), type(source)
        rows = source.rows_of(tensor)
        whole = ctx.plain or is_whole(tensor)
        return source.beside(rows.clone() if whole else rows)

    @staticmethod
    def backward(ctx, grad):
        return (Whole.apply(grad, None, ctx.kind) if ctx.plain else grad), None


class Replicated(torch.autograd.Function):
    """The DTensor, of class `kind`, of which each rank has all values."""

    @staticmethod
    def forward(ctx, tensor, kind):
        ctx.source = tensor.detach()
        mesh = tensor.device_mesh
        value = Values("redistribute", mesh).asked_for(tensor)
        return kind.replicated(value, mesh)

    @staticmethod
    def backward(ctx, grad):
        return (Rows.apply(grad, ctx.source) if is_cut(ctx.source) else grad), None


class Whole(torch.autograd.Function):
    """The full plain tensor. `kind`: the class of a gradient that each rank has in full."""

    @staticmethod
    def forward(ctx, tensor, grad_placements, kind):
        ctx.source, ctx.kind = tensor.detach(), kind
        ctx.grad_placements = grad_placements
        value = Values("full_tensor", tensor.device_mesh).asked_for(tensor)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        source = ctx.source
        mesh = source.device_mesh
        for dim, placement in enumerate(ctx.grad_placements or ()):
            if placement.is_partial():
                grad = _summed(grad, mesh, dim, placement.reduce_op)
        if is_cut(source):
            return Rows.apply(grad, source), None, None
        return Beside.apply(grad, mesh, ctx.kind), None, None


def _summed(grad, mesh, dim, reduce_op):
    from torch.distributed.nn.functional import all_reduce

    grad = all_reduce(grad.contiguous(), group=mesh.get_group(dim))
    return grad / mesh.size(dim) if reduce_op == "avg" else grad


class Beside(torch.autograd.Function):
    """A plain tensor, equal on all ranks, as a DTensor of class `kind`."""

    @staticmethod
    def forward(ctx, plain, mesh, kind):
        ctx.kind = kind
        return kind.replicated(plain.detach(), mesh)

    @staticmethod
    def backward(ctx, grad):
        is_plain = not isinstance(grad, DTensor)
        plain = grad if is_plain else Whole.apply(grad, None, ctx.kind)
        return plain, None, None


class Local(torch.autograd.Function):
    """This rank's rows as a plain tensor."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.source = tensor.detach()
        local = tensor._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        return FromLocal.apply(grad, ctx.source)


class FromLocal(torch.autograd.Function):
    """A plain tensor as this rank's rows of a tensor that is sharded as `source`."""

    @staticmethod
    def forward(ctx, local, source):
        return source.beside(local.detach())

    @staticmethod
    def backward(ctx, grad):
        return Local.apply(grad), None
