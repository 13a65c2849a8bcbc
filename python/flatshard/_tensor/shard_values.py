"""Values of sharded tensors as plain full tensors, and rows of full tensors."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.same_values import digest


def tensors_in(value):
    """Returns the tensors inside arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def row_dim(tensor):
    """Returns the mesh dimension over which the rows of a DTensor are sharded, or None."""
    for dim, placement in enumerate(tensor._spec.placements):
        if isinstance(placement, RowShard):
            return dim
    return None


def base_of(tensor):
    """Returns the shard that a ShardedView looks at, else the tensor."""
    return tensor.__dict__.get("base", tensor)


def is_cut(tensor):
    return isinstance(tensor, DTensor) and row_dim(tensor) is not None


def is_whole(tensor):
    """Returns whether each rank has all values of a DTensor."""
    return all(placement.is_replicate() for placement in tensor._spec.placements)


def same_cuts(a, b):
    a, b = a._spec, b._spec
    return a is b or (a.placements == b.placements and a.mesh == b.mesh)


def own_rows(whole, tensor):
    """Returns this rank's rows of `whole`, a plain tensor with as many rows as `tensor`."""
    dim = row_dim(tensor)
    if dim is None:
        return whole
    mesh = tensor._spec.mesh
    return tensor._spec.placements[dim].slice(whole, mesh.get_local_rank(dim))


def own_span(tensor):
    """Returns this rank's first row, and the end."""
    dim = row_dim(tensor)
    rank = tensor._spec.mesh.get_local_rank(dim)
    return tensor._spec.placements[dim].span(rank)


def gather(tensor):
    """Returns the full value of a sharded tensor, strided as the tensor.
    Collective."""
    dim = row_dim(tensor)
    placement = tensor._spec.placements[dim]
    whole = placement.gather(tensor._local_tensor, tensor._spec.mesh, dim)
    if whole.stride() == tensor.stride():
        return whole
    strided = whole.new_empty_strided(tensor.shape, tensor.stride())
    unique = strided
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            unique, whole = unique.narrow(dim, 0, 1), whole.narrow(dim, 0, 1)
    unique.copy_(whole)
    return strided


class Values:
    """The plain full values of the tensors of one operation."""

    # Names of the operations whose cost, an all-gather, was logged.
    warned: set[str] = set()

    def __init__(self, name, mesh):
        self.name = name
        self.mesh = mesh
        self._known = {}  # id of a tensor: (it, its value)
        self._bases = {}  # id of a view: the whole value of its base

    def asked_for(self, tensor):
        """Works as `of`, where the user asked for an all-gather."""
        self.name = None
        return self.of(tensor)

    def of(self, tensor, overwritten=False):
        """Returns the plain full value of `tensor`. Collective when the ranks do not have
        it.

        Args:
            overwritten: all of it will be written, and nothing read before.
        """
        known = self._known.get(id(tensor))
        if known is None:
            known = self._known[id(tensor)] = tensor, self._find(tensor, overwritten)
        return known[1]

    def _find(self, tensor, overwritten):
        if not isinstance(tensor, DTensor):
            return tensor
        base = base_of(tensor)
        if base is not tensor:
            whole = self._gathered(base, overwritten and tensor.numel() == base.numel())
            self._bases[id(tensor)] = whole
            return whole.as_strided(*tensor.frame)
        if is_cut(tensor):
            return self._gathered(tensor, overwritten)
        if is_whole(tensor):
            return tensor._local_tensor
        return tensor.full_tensor()

    def _gathered(self, tensor, overwritten):
        if overwritten:
            local = tensor._local_tensor
            return local.new_empty_strided(tensor.shape, tensor.stride())
        self._warn(tensor)
        return gather(tensor)

    def _warn(self, tensor):
        if self.name is None or self.name in self.warned:
            return
        self.warned.add(self.name)
        nbytes = tensor.numel() * tensor.element_size()
        warnings.warn(
            f"{self.name} of a sharded tensor of shape {tuple(tensor.shape)} all-gathers "
            f"it: {nbytes / 2**20:.3g} MiB on each rank, in each call. Where that is too "
            "much, compute with the rows of each rank (to_local()), call full_tensor() "
            "once for several operations, or compute in a forward of the unit, where its "
            "parameters are unsharded. This warning appears once per operation",
            stacklevel=_level_of_caller(),
        )

    def store(self, tensor):
        """Makes what was computed in the value of `tensor` its value."""
        value = self._known[id(tensor)][1]
        if value.shape != tensor.shape:
            raise NotImplementedError(
                f"{self.name}: cannot change the shape of a sharded tensor from "
                f"{tuple(tensor.shape)} to {tuple(value.shape)}; expected a result of the "
                "same shape"
            )
        if not isinstance(tensor, DTensor):
            return
        base = base_of(tensor)
        if base is not tensor:
            tensor, value = base, self._bases[id(tensor)]
        if is_cut(tensor):
            tensor._local_tensor.copy_(own_rows(value, tensor))
        elif not is_whole(tensor):
            tensor._local_tensor.copy_(_placed_as(tensor, value))

    def check_equal(self, tensors):
        """Checks that plain tensors, used with sharded ones, are equal on all ranks.
        Collective.

        Raises:
            PlainMeetsShards: they are not, on all ranks alike.
        """
        own = torch.stack([digest(t).to(self.mesh.device_type) for t in tensors])
        most = torch.stack([own, -own])
        for dim in range(self.mesh.ndim):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self.mesh.get_group(dim))
        if bool((most[0] != -most[1]).any()):
            raise PlainMeetsShards(
                f"{self.name}: a sharded tensor meets a plain tensor that is not equal on "
                "all ranks; the result would be another on each rank. Give it the same "
                "values on all ranks, or call full_tensor() of the sharded one"
            )


def _level_of_caller():
    """Returns the level of the innermost frame outside this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[
        0
    ] in ("flatshard", "torch"):
        level, frame = level + 1, frame.f_back
    return level


class PlainMeetsShards(RuntimeError):
    """Sharded tensors with plain ones of which each rank has others."""


def _placed_as(tensor, value):
    """Returns this rank's part of `value` for a DTensor that torch sharded."""
    if any(placement.is_partial() for placement in tensor._spec.placements):
        raise NotImplementedError(
            f"expected a tensor whose values can be written, got {tensor._spec.placements}; "
            "redistribute it first"
        )
    mesh = tensor.device_mesh
    whole = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, tensor._spec.placements)._local_tensor
