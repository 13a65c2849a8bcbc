"""Shows collectives to torch's CommDebugMode that it cannot see.

A TorchDispatchMode is not active while the operation that it passes on runs, so
collectives inside a shard's operation are reported afterwards.
"""

import torch
import torch.distributed as dist

from flatshard._tensor.row_shard import as_bytes
from flatshard.torch_versions import comm_debug_modes

# The operators of FSDP2's collectives, and the operator of DTensors' reductions.
ALL_GATHER = torch.ops.c10d._allgather_base_.default
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
ALL_REDUCE = torch.ops.c10d.allreduce_.default
DTENSORS_ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


class _Launched:
    """An operator that ran already, in the form that CommDebugMode accepts."""

    def __init__(self, operator):
        self._operator = operator
        self._overloadpacket = operator.overloadpacket

    def __call__(self, *args, **kwargs):
        return None

    def __str__(self):
        return str(self._operator)


def report(modes, operators):
    """Makes CommDebugModes count `operators` that ran already."""
    for mode in modes:
        for operator in operators:
            mode.__torch_dispatch__(_Launched(operator), ())


_unseen: list[list] = []  # operators, one list for each operation under way


def note(operator):
    """Records that a collective was launched inside an operation on shards."""
    if _unseen:
        _unseen[-1].append(operator)


def gathered(part, mesh, dim):
    """Returns [ranks, ...] `part` of each rank along the mesh dimension. Collective."""
    group = mesh.get_group(dim)
    home = part.device
    part = part.to(mesh.device_type).contiguous()
    parts = part.new_empty((mesh.size(dim), *part.shape))
    dist.all_gather_into_tensor(as_bytes(parts), as_bytes(part), group=group)
    note(ALL_GATHER)
    return parts.to(home)


def reported(function, *args):
    """Returns function(*args), an operation on shards that is reported to active
    CommDebugModes."""
    modes = comm_debug_modes()
    if not modes:
        return function(*args)
    _unseen.append([])
    try:
        result = function(*args)
    finally:
        operators = _unseen.pop()
    report(modes, operators)
    return result
