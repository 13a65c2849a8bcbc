"""A DTensor with equal pieces, which torch computes with, that notices writes."""

import sys

import torch
from torch.distributed.tensor import DTensor

from flatshard._tensor.row_spec import DTensorSpec, dtensor, make_spec
from flatshard._tensor.shard_values import tensors_in
from flatshard._tensor.watched_tensor import WatchedTensor
from flatshard._tensor.writes import writes


class EvenShard(WatchedTensor):
    """The shard of a parameter that is no ShardedTensor. Results of operations on it are
    plain DTensors."""

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
        result = function(*args, **kwargs)
        if name == "detach":  # nn.Parameter makes one of it, of the same type
            result.__class__ = EvenShard
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or "out" in kwargs:
            for tensor in tensors_in([args, kwargs]):
                if isinstance(tensor, EvenShard):
                    writes.note(tensor)
        return result

    def over(self, local):
        spec = self._spec
        return EvenShard.wrap(
            local, spec.mesh, spec.placements, self.shape, self.stride()
        )

    def to_local(self, **options):
        writes.note_look(self)
        return super().to_local(**options)


setattr(EvenShard, "__slots__", DTensor.__slots__)  # as in ShardedTensor
EvenShard.__module__ = "flatshard.even_shard"
sys.modules[EvenShard.__module__] = sys.modules[__name__]
torch.serialization.add_safe_globals([EvenShard])
