"""The spec of a DTensor that is cut between any two rows."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


class RowSpec(DTensorSpec):
    """The spec of a ShardedTensor. DTensor finds what it has worked out for an
    operation by the specs of its arguments: this one equals none with other cuts,
    nor one with Shard(0)."""

    def __eq__(self, other):
        return isinstance(other, RowSpec) and super().__eq__(other)

    def __hash__(self):
        return hash(("RowSpec", super().__hash__()))

    @staticmethod
    def of(spec, placements=None):
        return RowSpec(
            spec.mesh,
            spec.placements if placements is None else tuple(placements),
            tensor_meta=spec.tensor_meta,
        )


def from_local(local, mesh, placements, shape, kind=DTensorSpec):
    """DTensor.from_local, which would copy what is on another device than the mesh: an
    offloaded shard would be no view any more."""
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, local.dtype)
    spec = kind(mesh, tuple(placements), tensor_meta=meta)
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
