"""Backwards whose inputs the program chose: backward(inputs=...), torch.autograd.grad.

A forward computes with unsharded parameters, so autograd's graph has these, and not the
sharded ones that parameters() shows.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from flatshard._fsdp.former import refuse_former
from flatshard._fsdp.parameter import parameter_of_whole
from flatshard._tensor.places import parameter_of, unit_of
from flatshard._tensor.shard_gradients import Rows
from flatshard._tensor.shard_values import same_cuts
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.torch_versions import (
    choose_inputs_by,
    gradient_hooks,
    in_backward,
    is_batched,
    leaf_of_edge,
    plain_attributes,
)


def _choose(run, inputs, allow_unused, accumulate):
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    leaves = [i if isinstance(i, torch.Tensor) else leaf_of_edge(i) for i in inputs]
    with plain_attributes():
        of_shards = [None if t is None else parameter_of(t) for t in leaves]
        of_wholes = [parameter_of_whole(leaf) for leaf in leaves]
    if accumulate:
        for leaf in leaves:
            refuse_former(leaf, "the inputs of a backward contain")
        found = [p.whole for p in of_shards + of_wholes if p is not None]
        given = {id(leaf) for leaf in leaves}
        more = {id(t): t for t in found if t.requires_grad and id(t) not in given}
        return run((*inputs, *more.values()), allow_unused)
    if not any(of_shards) and not any(of_wholes):
        results = run(inputs, allow_unused)
        if any(isinstance(leaf, ShardedTensor) for leaf in leaves):
            with plain_attributes():
                results = tuple(map(_cut_as, leaves, results))
    else:
        results = _gradients(run, inputs, leaves, of_shards, of_wholes)
    _check_used(results, leaves, allow_unused)
    return results


def _cut_as(tensor, gradient):
    """Returns the result for one input. A DTensor that torch made has its gradient as it
    is, such as a partial sum. Collective where placements differ."""
    if gradient is None or not isinstance(tensor, ShardedTensor):
        return gradient
    if isinstance(gradient, DTensor) and same_cuts(tensor, gradient):
        return gradient
    return Rows.apply(gradient, tensor.detach())


def _gradients(run, inputs, leaves, of_shards, of_wholes):
    """Returns the mean of the ranks' gradients for parameters, sharded as they are, after
    the hooks of the parameter. A graph that was computed from the shard itself, such as a
    penalty, is added."""
    asked = [i for i, p in enumerate(of_shards) if p and p.whole.requires_grad]
    wholes = [of_shards[i].whole for i in asked]
    found = run((*inputs, *wholes), True)
    means = {}
    with plain_attributes():
        results = list(map(_cut_as, leaves, found))
        for i, gradient in zip(asked, found[len(inputs) :]):
            if gradient is not None:
                p, shard = of_shards[i], leaves[i]
                rows = Rows.apply(_mean(gradient, p).to(shard.dtype), shard.detach())
                means[i] = rows, gradient_hooks(shard)
    for i, (mean, hooks) in means.items():
        for hook in hooks:
            changed = hook(mean)
            mean = mean if changed is None else changed
        with plain_attributes():
            results[i] = mean if results[i] is None else results[i] + mean
    with plain_attributes():
        for i, p in enumerate(of_wholes):
            if p is not None and results[i] is not None and _is_outside(p):
                results[i] = _mean(results[i], p)
    return tuple(results)


def _is_outside(p):
    """Returns whether no forward or backward runs, in which a program computes with this
    rank's part of a batch."""
    return not in_backward() and not unit_of(p.shard)[0].core.in_forward()


def _mean(gradient, p):
    if is_batched(gradient):
        raise NotImplementedError(
            f"torch.autograd.grad of parameter {p.title} is not supported under "
            "torch.vmap or with is_grads_batched=True; call it once for each row of "
            "grad_outputs"
        )
    if p.dim or not isinstance(p.shard, ShardedTensor):
        raise NotImplementedError(
            f"torch.autograd.grad is not supported for parameter {p.title}, because it is "
            "sharded along a dimension other than the first, or over several mesh "
            "dimensions; use backward(), or let shard_placement_fn return Shard(0) for it"
        )
    if gradient.shape != p.shard.shape:
        raise NotImplementedError(
            f"torch.autograd.grad of parameter {p.title} is not supported: it is "
            "sharded over a part of the model's mesh"
        )
    mesh = p.shard.device_mesh
    factor = unit_of(p.shard)[0].policy.divide_factor  # set_gradient_divide_factor
    return _Mean.apply(gradient.to_dense(), mesh, factor or mesh.size())


class _Mean(torch.autograd.Function):
    """The sum over the ranks, divided by `factor`. So is its gradient: each rank has the
    gradient of its loss, of which the mean is trained."""

    @staticmethod
    def forward(ctx, tensor, mesh, factor):
        ctx.mesh, ctx.factor = mesh, factor
        total = tensor.contiguous().clone()
        for dim in range(mesh.ndim):
            dist.all_reduce(total, group=mesh.get_group(dim))
        return total.div_(factor)

    @staticmethod
    def backward(ctx, grad):
        return _Mean.apply(grad, ctx.mesh, ctx.factor), None, None


def _check_used(results, leaves, allow_unused):
    for result, leaf in zip(results, leaves):
        if result is None:
            refuse_former(leaf, "the inputs of torch.autograd.grad contain")
            if not allow_unused:
                raise RuntimeError(
                    "One of the differentiated Tensors appears to not have been used in "
                    "the graph. Set allow_unused=True if this is the desired behavior."
                )


choose_inputs_by(_choose)
