"""torch.autograd.grad for sharded parameters."""

import torch
import torch.distributed as dist

from flatshard._tensor.places import parameter_of
from flatshard._tensor.shard_gradients import cut_all


def grad(outputs, inputs, grad_outputs=None, *args, **kwargs):
    """torch.autograd.grad(outputs, inputs, ...), where `inputs` has sharded tensors.

    A forward computes with the unsharded parameter, so a loss of a model has a gradient
    for that one. For a sharded parameter this returns the mean of the ranks' gradients,
    as the backward does, cut as the parameter: collective. A graph that was computed
    from the shard itself, such as a penalty, is added.
    """
    options = dict(zip(("retain_graph", "create_graph", "only_inputs"), args))
    options.update(kwargs)
    allow_unused = options.pop("allow_unused", None)
    fills = options.pop("materialize_grads", False)
    if allow_unused is None:
        allow_unused = fills
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    places = [parameter_of(tensor) for tensor in inputs]
    wholes = [p.whole for p in places if p is not None]
    found = torch.autograd.grad(
        outputs, (*inputs, *wholes), grad_outputs, allow_unused=True, **options
    )
    results = list(cut_all(inputs, found[: len(inputs)]))
    of_wholes = iter(found[len(inputs) :])
    for i, p in enumerate(places):
        whole = next(of_wholes) if p is not None else None
        if whole is not None:
            if options.get("create_graph", False):
                raise NotImplementedError(
                    f"torch.autograd.grad(create_graph=True) of parameter {p.title}, "
                    "which a sharded model computed with, is not supported: the gradient "
                    "is reduced over the ranks, which has no second derivative. Ask for "
                    "the gradient of an input or an output instead"
                )
            mean = _mean(inputs[i], whole, p)
            results[i] = mean if results[i] is None else results[i] + mean
        elif results[i] is None and fills:
            results[i] = torch.zeros_like(inputs[i])
    if not allow_unused and any(result is None for result in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the "
            "graph. Set allow_unused=True if this is the desired behavior."
        )
    return tuple(results)


def _mean(shard, whole, p):
    if p.dim:
        raise NotImplementedError(
            f"torch.autograd.grad of parameter {p.title}, which is cut along dimension "
            f"{p.dim}, is not supported; let shard_placement_fn return Shard(0) for it"
        )
    if whole.shape != shard.shape:
        raise NotImplementedError(
            f"torch.autograd.grad of parameter {p.title} is not supported: it is "
            "sharded over a part of the model's mesh"
        )
    mesh = shard.device_mesh
    total = whole.contiguous().clone()
    for dim in range(mesh.ndim):
        dist.all_reduce(total, group=mesh.get_group(dim))
    total /= mesh.size()
    return shard.beside(shard.rows_of(total.to(shard.dtype)).clone())
