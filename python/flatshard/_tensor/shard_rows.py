"""Operations of which each rank computes its own rows."""

import torch
from torch.distributed.tensor import DTensor

from flatshard._tensor.shard_calls import (
    as_rows,
    call,
    call_with,
    mapped,
    named,
    replaced,
    rows_beside,
    values_for,
)
from flatshard._tensor.shard_values import (
    base_of,
    is_cut,
    is_whole,
    own_span,
    same_cuts,
    tensors_in,
)
from flatshard._tensor.shard_views import ShardedView
from flatshard._tensor.sharded_tensor import ShardedTensor


def pointwise(func, traits, args, kwargs):
    tensors = list(tensors_in((args, kwargs)))
    written = [t for n in traits.written for t in named(traits, args, kwargs, n)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    for reference in written or tensors:
        if (
            isinstance(reference, ShardedTensor)
            and is_cut(reference)
            and len(reference.shape) == len(shape)
            and reference.shape[0] == shape[0]
        ):
            break
    else:
        return NotImplemented
    if any(t.shape != shape for t in written):
        return NotImplemented  # torch's error
    if any(not is_cut(t) or not same_cuts(t, reference) for t in written):
        return NotImplemented
    values = values_for(traits, args, kwargs)
    shown = {}

    def rows(tensor, is_written):
        value = rows_beside(tensor, reference, values)
        if is_written:
            shown[id(value)] = tensor
        return value

    result = call(func, traits, args, kwargs, rows)
    return mapped(
        result,
        lambda t: shown[id(t)] if id(t) in shown else as_rows(t, reference),
    )


def along_rows(func, traits, args, kwargs):
    """Computes where each row of the result needs one row: `dim` does not include 0."""
    source = args[0]
    if traits.written or not isinstance(source, ShardedTensor) or not is_cut(source):
        return NotImplemented
    bound = traits.bind(args, kwargs)
    dims = bound.get("dim", bound.get("dims"))
    if dims is None or dims == [] or dims == ():
        return NotImplemented
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    if any(
        d in (0, -source.dim()) or not -source.dim() <= d < source.dim() for d in dims
    ):
        return NotImplemented
    tensors = list(tensors_in((args, kwargs)))
    if any(t.shape != source.shape for t in tensors):
        return NotImplemented
    if 0 in source.shape[1:]:
        return NotImplemented
    values = values_for(traits, args, kwargs)
    result = call(
        func, traits, args, kwargs, lambda t, _: rows_beside(t, source, values)
    )
    return mapped(result, lambda t: as_rows(t, source))


def by_position(func, traits, args, kwargs):
    """Handles foreach and fused operations: lists of tensors, where tensors of one
    position meet."""
    first = args[0]
    if traits.name.startswith(("_foreach_max", "_foreach_powsum")):
        return NotImplemented
    values = values_for(traits, args, kwargs)
    lists = {}
    for name, value in traits.bind(args, kwargs).items():
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            lists[name] = value
    if any(
        isinstance(b, DTensor) and not _written_alike(a, b)
        for name in traits.written
        if name in lists
        for a, b in zip(first, lists[name])
    ):
        return _one_by_one(func, traits, args, kwargs, lists)

    def local(reference, tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if isinstance(reference, ShardedTensor) and is_cut(reference):
            return rows_beside(tensor, reference, values)
        return values.of(tensor)

    def of(name, value):
        if name in lists:
            return [local(a, b) for a, b in zip(first, value)]
        return replaced(value, values.of)

    result = call_with(func, traits, args, kwargs, of)
    if traits.written:
        return list(first) if traits.returns else None
    return [
        as_rows(t, a)
        if isinstance(a, ShardedTensor) and is_cut(a)
        else ShardedTensor.replicated(t, values.mesh)
        for a, t in zip(first, result)
    ]


def _one_by_one(func, traits, args, kwargs, lists):
    """Handles lists of views that may overlap: each sees what was written before."""
    length = len(args[0])
    if length == 1:
        return NotImplemented
    for i in range(length):

        def of(name, value):
            return [value[i]] if name in lists else value

        call_with(func, traits, args, kwargs, of)
    return list(args[0]) if traits.returns else None


def _written_alike(reference, tensor):
    if isinstance(tensor, ShardedView) or not isinstance(tensor, ShardedTensor):
        return False
    if not is_cut(tensor):
        return not isinstance(reference, ShardedTensor) or not is_cut(reference)
    return isinstance(reference, ShardedTensor) and same_cuts(tensor, reference)


def like(func, traits, args, kwargs):
    source = args[0]
    if not is_cut(source):
        mesh = source._spec.mesh
        local = source._local_tensor if not isinstance(source, ShardedView) else None
        if local is None:
            local = source.base._local_tensor.new_empty_strided(
                source.shape, source.stride()
            )
        result = func(local, *args[1:], **kwargs)
        made = result.shape, result.stride(), result.dtype
        if is_whole(source) and source._spec.tensor_meta == made:
            return source.beside(result)  # one spec: fast in optimizers
        return ShardedTensor.replicated(result, mesh)
    return as_rows(func(source._local_tensor, *args[1:], **kwargs), source)


def new_values(func, traits, args, kwargs):
    """Returns a tensor with the rows of the shard if it has its shape, else a full one."""
    source, size, *others = args
    if is_cut(source) and tuple(size) == tuple(source.shape):
        local = source._local_tensor
        if traits.name == "new_empty_strided":
            return as_rows(local.new_empty(local.shape, **kwargs), source)
        return as_rows(func(local, local.shape, *others, **kwargs), source)
    base = base_of(source)
    return ShardedTensor.replicated(
        func(base._local_tensor, size, *others, **kwargs), source._spec.mesh
    )


def put_rows(func, traits, args, kwargs):
    """Computes weight[rows] = values, and grad[mask] = number, on the ranks that have the
    rows."""
    bound = traits.bind(args, kwargs)
    target, indices, new = bound["self"], bound["indices"], bound["values"]
    if not isinstance(target, ShardedTensor) or not is_cut(target):
        return NotImplemented
    if not indices or indices[0] is None or any(i is not None for i in indices[1:]):
        return NotImplemented
    if indices[0].dtype == torch.uint8:
        return NotImplemented  # a mask, formerly
    values = values_for(traits, args, kwargs)
    index = indices[0]
    others = [bound["accumulate"], *([bound["unsafe"]] if "unsafe" in bound else [])]
    local = target._local_tensor
    if index.dtype == torch.bool and index.dim() > 1:
        if index.shape != target.shape or new.numel() != 1:
            return NotImplemented
        mask = rows_beside(index, target, values)
        func(local, [mask.to(local.device)], values.of(new), *others)
        return target
    index = values.of(index)
    if index.dim() != 1:
        return NotImplemented
    if index.dtype == torch.bool:
        if index.shape[0] != target.shape[0]:
            return NotImplemented
        index = index.nonzero().flatten()
    count = target.shape[0]
    if bool(((index < -count) | (index >= count)).any()):
        return NotImplemented  # torch's error
    index = torch.where(index < 0, index + count, index).to(local.device)
    new = values.of(new).to(local.device).expand(index.shape[0], *target.shape[1:])
    first, end = own_span(target)
    here = (index >= first) & (index < end)
    func(local, [index[here] - first], new[here], *others)
    return target


def on_local(func, traits, args, kwargs):
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def is_same_size(func, traits, args, kwargs):
    return args[0].shape == args[1].shape
