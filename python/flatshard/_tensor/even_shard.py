"""A DTensor with equal pieces that notices writes. Torch computes its operations."""

import sys

import torch
from torch.distributed.tensor import DTensor, Replicate

from flatshard._tensor.reported_collectives import gathered
from flatshard._tensor.row_spec import DTensorSpec, dtensor, make_spec
from flatshard._tensor.rules import EXTREMES
from flatshard._tensor.shard_values import is_cut, is_whole, tensors_in
from flatshard._tensor.watched_tensor import WatchedTensor
from flatshard._tensor.writes import writes
from flatshard.torch_versions import tree_map


class EvenShard(WatchedTensor):
    """The shard of a parameter that is not a ShardedTensor. Results of operations on it
    are plain DTensors."""

    __slots__ = ()

    @staticmethod
    def wrap(local, mesh, placements, shape, stride):
        """Returns a view: writes to it are writes to `local`."""
        spec = make_spec(mesh, placements, shape, stride, local.dtype, DTensorSpec)
        return EvenShard.like_spec(local.detach(), spec)

    @staticmethod
    def like_spec(local, spec):
        tensor = dtensor(local, spec)
        tensor.__class__ = EvenShard
        return tensor

    @classmethod
    def _compute(cls, function, name, args, kwargs):
        if name == "_foreach_norm" and any(map(is_cut, args[0])):
            return _norms_of_two_kinds(function, *args, **kwargs)
        if name == "detach" and args[0]._local_tensor.is_meta:
            # The wrapper is where the values will be, and torch compares both devices.
            return EvenShard.like_spec(args[0]._local_tensor.detach(), args[0]._spec)
        if len(args) == 2:
            args = args[0], _as_number(args[0], args[1])
        result = function(*args, **kwargs)
        if name == "detach":  # nn.Parameter makes one of it, of the same type
            result.__class__ = EvenShard
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or "out" in kwargs:
            for tensor in tensors_in([args, kwargs]):
                if isinstance(tensor, EvenShard):
                    writes.note(tensor)
        if name in EXTREMES:
            return tree_map(_with_extremes, result)
        return result

    def over(self, local):
        spec = self._spec
        return EvenShard.wrap(
            local, spec.mesh, spec.placements, self.shape, self.stride()
        )

    def to_local(self, **options):
        writes.note_look(self)
        return super().to_local(**options)


def _as_number(shard, other):
    """Returns `other` as a plain tensor if it is a replicated number on another mesh than
    `shard`, such as the factor of clipping. torch rejects DTensors of two meshes."""
    shard = shard[0] if isinstance(shard, (list, tuple)) and shard else shard
    if not isinstance(other, DTensor) or not isinstance(shard, DTensor):
        return other
    if other.dim() or other._spec.mesh == shard._spec.mesh or not is_whole(other):
        return other
    return other.to_local()


def _norms_of_two_kinds(function, tensors, *args, **kwargs):
    """Returns the norms of a list that also contains shards split between any rows."""
    norms = {}
    for kind in (True, False):
        chosen = [i for i, tensor in enumerate(tensors) if is_cut(tensor) == kind]
        if chosen:
            found = function([tensors[i] for i in chosen], *args, **kwargs)
            norms.update(zip(chosen, map(_with_extremes, found)))
    return [norms[i] for i in range(len(tensors))]


def _with_extremes(tensor):
    """Returns `tensor`, a result, with maxima and minima over ranks computed so that a NaN
    of one rank is the result. An all-reduce of Gloo keeps it from some ranks only.
    Collective.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    placements, mesh = list(tensor.placements), tensor.device_mesh
    local = tensor._local_tensor
    for dim, placement in enumerate(placements):
        if placement.is_partial() and placement.reduce_op in ("max", "min"):
            of = torch.amax if placement.reduce_op == "max" else torch.amin
            local = of(gathered(local, mesh, dim), 0)
            placements[dim] = Replicate()
    if placements == list(tensor.placements):
        return tensor
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


setattr(EvenShard, "__slots__", DTensor.__slots__)  # as in ShardedTensor
EvenShard.__module__ = "flatshard.even_shard"
sys.modules[EvenShard.__module__] = sys.modules[__name__]
torch.serialization.add_safe_globals([EvenShard])
