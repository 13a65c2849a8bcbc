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


def compare(units):
    """Compares the digests of parameters on the ranks of their meshes. Collective.

    Args:
        units: all units of a model, the root first.

    Raises:
        RuntimeError: parameters whose values were not equal on all ranks of their mesh
            when they were sharded, and were not written since; the same on all ranks.
    """
    if not any(unit.sharding.options.check_same_values for unit in units):
        return
    places = [
        (p.shared_by or u.sharding.device_mesh, u, p)
        for u in units
        for p in u.parameters
    ]
    differ = torch.zeros(len(places), dtype=torch.int64)
    meshes = dict.fromkeys(mesh for mesh, _, _ in places)
    for mesh in meshes:
        own = [i for i, place in enumerate(places) if place[0] == mesh]
        if mesh.size() > 1:
            differ[own] = _differ([places[i][1:] for i in own], mesh)
    if len(meshes) > 1:  # the ranks of one of them go on together with the others
        for mesh in dict.fromkeys(u.sharding.device_mesh for u in units):
            differ = _most(differ.to(device_of(mesh)), mesh).cpu()
    names = [p.names[0] for (_, _, p), is_one in zip(places, differ.tolist()) if is_one]
    if names:
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise RuntimeError(
            f"parameter {names[0]}{others}: the ranks had different values in "
            "fully_shard, expected equal ones, of which each keeps its rows. Seed the "
            "ranks equally before the model is made, or give them the same weights; "
            "ShardOptions(check_same_values=False), or --check-same-values off of "
            "flatshard.as_fsdp2, where they differ on purpose"
        )


def _differ(chosen, device_mesh):
    """Returns [n] int64 on the CPU, 1 for parameters whose digests differ. Collective."""
    device = device_of(device_mesh)
    unknown = [_is_unknown(unit, p) for unit, p in chosen]
    digests = [0 if no else p.digest.to(device) for (_, p), no in zip(chosen, unknown)]
    own = torch.stack([torch.as_tensor(d, device=device) for d in digests])
    of_all = torch.tensor(unknown, device=device).to(own.dtype)
    most = _most(torch.stack([own, -own, of_all]), device_mesh)
    return ((most[0] != -most[1]) & (most[2] == 0)).to(torch.int64).cpu()


def _most(tensor, device_mesh):
    """Makes `tensor` the maximum over the ranks. Collective."""
    for dim in range(device_mesh.ndim):
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=device_mesh.get_group(dim))
    return tensor


def _is_unknown(unit, p):
    storage = address_of(p.shard)
    return (
        p.digest is None
        or storage in writes.written
        or unit.parameters.writes.lists != writes.lists
    )
