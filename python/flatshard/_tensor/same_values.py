"""Whether the ranks started from equal values.

Each rank keeps some rows of what it has. When the ranks made different values, the
model is a patchwork of them, and copies of it differ. So `fully_shard` computes a digest
of each unsharded parameter, and the first forward compares them.
"""

import torch
import torch.distributed as dist

from flatshard._tensor.memory import address_of
from flatshard._tensor.mesh import device_of
from flatshard._tensor.writes import writes

_MASK = (1 << 62) - 1  # its negative is an int64, too


@torch.no_grad()
def digest(tensor):
    """Returns [] int64 on the tensor's device: the sum of its bits, eight bytes at a
    time. Reads them once, at the price of a copy, and does not block the host."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8 or not flat.is_contiguous():
        flat = flat.clone()
    nbytes = flat.numel() * flat.element_size()
    whole = nbytes // 8 * 8 // flat.element_size()
    total = flat[:whole].view(torch.int64).sum()
    if whole < flat.numel():
        total = total + flat[whole:].view(torch.uint8).sum()
    return total & _MASK


def compare(units, device_mesh):
    """Compares the digests of parameters on all ranks. Collective.

    Raises:
        RuntimeError: parameters whose values were not equal on all ranks when they were
            sharded, and were not written since; the same on all ranks.
    """
    if device_mesh.size() == 1 or not any(
        unit.sharding.check_same_values for unit in units
    ):
        return
    names = []
    meshes = {id(p.shared_by): p.shared_by for u in units for p in u.parameters}
    for shared_by in meshes.values():
        chosen = [
            (u, p) for u in units for p in u.parameters if p.shared_by is shared_by
        ]
        names += _differing(chosen, shared_by or device_mesh)
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(
            f"parameter {names[0]}{others}: the ranks had different values in "
            "fully_shard, expected equal ones, of which each keeps its rows. Seed the "
            "ranks equally before the model is made, or give them the same weights; "
            "ShardOptions(check_same_values=False), or --check-same-values off of "
            "flatshard.as_fsdp2, where they differ on purpose"
        )


def _differing(chosen, device_mesh):
    """Returns the names of parameters whose digests differ. Collective."""
    device = device_of(device_mesh)
    unknown = [_is_unknown(unit, p) for unit, p in chosen]
    digests = [0 if no else p.digest.to(device) for (_, p), no in zip(chosen, unknown)]
    own = torch.stack([torch.as_tensor(d, device=device) for d in digests])
    most = torch.stack([own, -own, torch.tensor(unknown, device=device).to(own.dtype)])
    for dim in range(device_mesh.ndim):
        dist.all_reduce(most, dist.ReduceOp.MAX, group=device_mesh.get_group(dim))
    differ = (most[0] != -most[1]) & (most[2] == 0)
    return [p.names[0] for (_, p), differs in zip(chosen, differ.tolist()) if differs]


def _is_unknown(unit, p):
    storage = address_of(p.shard)
    return (
        p.digest is None
        or storage in writes.written
        or unit.parameters.writes.lists != writes.lists
    )
