"""Reductions over the rows of sharded tensors: each rank reduces its own rows, then all
of them what the ranks have, in one small collective."""

import functools

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from flatshard._tensor.mesh import ranks_of, root_of
from flatshard._tensor.reported_collectives import DTENSORS_ALL_REDUCE, gathered, note
from flatshard._tensor.shard_values import is_cut, is_whole, row_dim, tensors_in
from flatshard._tensor.shard_views import ShardedView
from flatshard._tensor.sharded_tensor import ShardedTensor


def reduce(func, traits, args, kwargs):
    """Runs reductions over rows. They combine results of the ranks' rows."""
    if traits.written:
        return NotImplemented
    source = args[0]
    bound = traits.bind(args, kwargs)
    if not isinstance(source, ShardedTensor) or not is_cut(source):
        return NotImplemented
    dims = bound.get("dim")
    if "dim" in bound and bound["dim"] is not None and "indices" in traits.returns:
        return NotImplemented  # of max and min
    if len(list(tensors_in((args, kwargs)))) > 1:
        return NotImplemented  # max and min, element by element
    if source.numel() == 0 or source.dtype.is_complex:
        return NotImplemented
    dims = [] if dims is None else dims if isinstance(dims, (list, tuple)) else [dims]
    if any(not -source.dim() <= d < source.dim() for d in dims):
        return NotImplemented
    dims = [d % source.dim() for d in dims] or list(range(source.dim()))
    keepdim = bound.get("keepdim", False)
    made = PARTS[traits.name](source, bound, dims, keepdim)
    if made is None:
        return NotImplemented
    part, combine = made
    result = combine(gathered(part, source._spec.mesh, row_dim(source)))
    return ShardedTensor.replicated(result, source._spec.mesh)


def accumulator(dtype):
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sum(source, bound, dims, keepdim, of=torch.sum):
    local = source._local_tensor
    dtype = bound.get("dtype")
    if dtype is None:
        floats = source.dtype.is_floating_point
        dtype = source.dtype if floats else torch.int64
    part = of(local, dims, keepdim, dtype=accumulator(dtype))
    return part, lambda parts: parts.sum(0).to(dtype)


def _nansum(source, bound, dims, keepdim):
    return _sum(source, bound, dims, keepdim, torch.nansum)


def _mean(source, bound, dims, keepdim):
    dtype = bound.get("dtype") or source.dtype
    if not dtype.is_floating_point:
        return None  # torch's error
    count = 1
    for d in dims:
        count *= source.shape[d]
    part = source._local_tensor.sum(dims, keepdim, dtype=accumulator(dtype))
    return part, lambda parts: (parts.sum(0) / count).to(dtype)


def _rows_or(source, value):
    """Returns this rank's rows, or, if it has none, a row of `value`: it changes no
    result."""
    local = source._local_tensor
    return local if local.shape[0] else local.new_full((1, *local.shape[1:]), value)


def _extreme(of, neutral):
    def reduce(source, bound, dims, keepdim):
        part = of(_rows_or(source, neutral(source.dtype)), dims, keepdim)
        return part, lambda parts: of(parts, 0)

    return reduce


def _lowest(dtype):
    if dtype.is_floating_point:
        return -torch.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _highest(dtype):
    if dtype.is_floating_point:
        return torch.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _norm(source, bound, dims, keepdim):
    order = bound.get("ord", bound.get("p"))
    order = 2 if order is None else order
    dtype = bound.get("dtype") or source.dtype
    if not isinstance(order, (int, float)) or not source.dtype.is_floating_point:
        return None
    rows = _rows_or(source, torch.inf if order < 0 else 0)
    part = torch.linalg.vector_norm(
        rows, order, dims, keepdim, dtype=accumulator(dtype)
    )
    return part, lambda parts: norm_of_norms(parts, order).to(dtype)


def norm_of_norms(norms, order):
    """Returns the norm of norms along dim 0."""
    return norms.sum(0) if order == 0 else torch.linalg.vector_norm(norms, order, 0)


def norms_of_ranks(norms, mesh, dim, order):
    """Returns [n] norms of tensors of whose rows each rank along the mesh dimension has
    some, from `norms` of its rows. One all-reduce of float64, or one all-gather.
    Collective."""
    if mesh.size(dim) == 1:
        return norms
    if order < 0 or order == torch.inf:
        # An all-reduce of maxima may lose a NaN: Gloo keeps it from some ranks only.
        return norm_of_norms(gathered(norms, mesh, dim), order)
    has_root = order > 0
    part = norms.to(mesh.device_type, torch.float64)
    part = part**order if has_root else part
    placements = [Replicate()] * mesh.ndim
    placements[dim] = Partial("sum")
    whole = DTensor.from_local(part, mesh, placements, run_check=False)
    whole = whole.redistribute(placements=[Replicate()] * mesh.ndim).to_local()
    note(DTENSORS_ALL_REDUCE)
    whole = whole ** (1 / order) if has_root else whole
    return whole.to(norms.device, norms.dtype)


# A function for each reduction of rules.py: what a rank computes, and how the ranks'
# results become one.
PARTS = {
    "sum": _sum,
    "nansum": _nansum,
    "mean": _mean,
    "amax": _extreme(torch.amax, _lowest),
    "amin": _extreme(torch.amin, _highest),
    "max": _extreme(torch.amax, _lowest),
    "min": _extreme(torch.amin, _highest),
    "any": _extreme(torch.any, lambda dtype: False),
    "all": _extreme(torch.all, lambda dtype: True),
    "linalg_vector_norm": _norm,
    "norm": _norm,
}


def foreach_norm(func, traits, args, kwargs):
    """Computes the norms of a list, with one all-reduce per mesh for sharded tensors."""
    bound = traits.bind(args, kwargs)
    tensors, order = args[0], bound.get("ord", 2)
    if not isinstance(order, (int, float)):
        return NotImplemented
    if any(not t.dtype.is_floating_point or t.numel() == 0 for t in tensors):
        return NotImplemented
    if not all(map(_is_held, tensors)):
        return NotImplemented
    places = [(t._spec.mesh, row_dim(t)) if is_cut(t) else None for t in tensors]
    if len({t.device for t in tensors}) > 1:
        return NotImplemented
    meshes = dict.fromkeys(t._spec.mesh for t in tensors if isinstance(t, DTensor))
    check_comparable(list(meshes))
    dtypes = {accumulator(bound.get("dtype") or t.dtype) for t in tensors}
    dtype = functools.reduce(torch.promote_types, dtypes)
    neutral = torch.inf if order < 0 else 0
    local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    local = [t if t.numel() else t.new_full((1,), neutral) for t in local]
    if all(t.dtype == dtype for t in local):
        norms = torch._foreach_norm(local, order)  # one kernel, as torch's clipping
    else:
        norms = [torch.linalg.vector_norm(t, order, dtype=dtype) for t in local]
    norms = torch.stack(norms)
    mesh = next(t._spec.mesh for t in tensors if isinstance(t, DTensor))
    for place in filter(None, dict.fromkeys(places)):
        together = norms_of_ranks(norms, *place, order)
        if any(other != place for other in places):
            own = torch.tensor([p == place for p in places], device=norms.device)
            together = torch.where(own, together, norms)
        norms = together
    dtypes = [bound.get("dtype") or t.dtype for t in tensors]
    like = {d: ShardedTensor.replicated(norms[0].to(d), mesh) for d in set(dtypes)}
    return [like[d].beside(n.to(d)) for d, n in zip(dtypes, norms.unbind())]


def check_comparable(meshes):
    """Refuses tensors on meshes that do not show which ranks have equal ones.

    Raises:
        NotImplementedError: meshes of two roots, of other ranks.
    """
    for mesh in meshes[1:]:
        apart = root_of(mesh) != root_of(meshes[0])
        if apart and ranks_of(mesh) != ranks_of(meshes[0]):
            raise NotImplementedError(
                f"one norm of tensors on {meshes[0]} and on {mesh} would differ between "
                "ranks, because these meshes have different ranks and it is unknown which "
                "ranks have equal tensors. Make experts DTensors over the other ranks "
                "before fully_shard. Or call get_total_norm for the gradients of each "
                "mesh, add up the squares over ranks with different experts, and call "
                "clip_grads_with_norm_"
            )


def _is_held(tensor):
    """Returns whether this rank has all values of a tensor, or some rows of it."""
    if not isinstance(tensor, DTensor):
        return True
    whole_or_cut = is_whole(tensor) or is_cut(tensor)
    return whole_or_cut and not isinstance(tensor, ShardedView)
