"""The ranks that have the parts of one model: with tensor parallelism more ranks than in
fully_shard's mesh."""

import torch
import torch.distributed as dist

from flatshard._tensor.mesh import (
    core_mesh_of_all,
    device_of,
    mesh_of_roots,
    root_names,
)


class Ranks:
    """The ranks of one model, and this one's device.

    Attributes:
        mesh, device_mesh: of fully_shard, as the core and as torch have it.
    """

    def __init__(self, mesh, device_mesh):
        self.mesh = mesh
        self.device_mesh = device_mesh
        self.device = device_of(device_mesh)
        self.on_gpu = self.device.type == "cuda"
        self._of_checkpoints = None

    def for_checkpoints(self, units):
        """Returns the core's mesh over all ranks that have parts of the model.
        Collective."""
        if self._of_checkpoints is None:
            grid = grid_of(units)
            self._of_checkpoints = (
                self.mesh if grid is None else tell_parts(units, grid)
            )
        return self._of_checkpoints


def grid_of(units):
    """Returns the DeviceMesh of all dimensions over which the parameters of `units` are
    sharded or replicated; None without tensor parallelism."""
    parallel = [p.parallel for u in units for p in u.parameters if p.parallel]
    if not parallel:
        return None
    names = set().union(
        *(root_names(unit.sharding.device_mesh) for unit in units),
        *(root_names(p.own_mesh) for p in parallel),
    )
    return mesh_of_roots(parallel[0].mesh, names)


def tell_parts(units, grid):
    """Passes to the core which part of a full tensor each parameter is, for checkpoints.

    Returns:
        The core's mesh over all ranks of `grid`. Collective over them.

    Raises:
        NotImplementedError: ranks that have other experts according to the core have equal
            values, naming the parameter.
    """
    for unit in units:
        within = root_names(unit.sharding.device_mesh)
        for p in unit.parameters:
            equal = p.parallel.names_with_equal() if p.parallel else set()
            if equal & within:
                raise NotImplementedError(
                    f"flatshard.checkpoint: parameter {p.names[0]} is equal on the ranks "
                    f"of {sorted(equal & within)}, but its unit is sharded over them. "
                    "This is not supported; use torch.distributed.checkpoint"
                )
            which, count = 0, 1
            cut = _cut_over(p)
            for i, name in enumerate(grid.mesh_dim_names):
                if name not in within and name not in cut:
                    which = which * grid.size(i) + grid.get_local_rank(i)
                    count *= grid.size(i)
            cuts = p.parallel.cuts() if p.parallel else None
            unit.core.set_part(p.index, cuts, (which, count))
    return core_mesh_of_all(grid)


def sums_over(grid, units, squares):
    """Adds up, over the ranks that have parts, what each rank has of parameters.

    Args:
        squares: {name: numbers}, a sum over the ranks of fully_shard's mesh.

    Returns:
        The same over all ranks. Collective over the ranks of `grid`.
    """
    cut = {}
    for unit in units:
        within = root_names(unit.sharding.device_mesh)
        for p in unit.parameters:
            cut[p.names[0]] = _cut_over(p) - within
    names = list(squares)
    device = units[0].parameters.home
    sums = torch.tensor(
        [squares[name] for name in names], dtype=torch.float64, device=device
    )
    for i, name in enumerate(grid.mesh_dim_names):
        equal = [name not in cut.get(n, ()) for n in names]
        sums[torch.tensor(equal, device=device)] /= grid.size(i)
        dist.all_reduce(sums, group=grid.get_group(i))
    return dict(zip(names, sums.tolist()))


def _cut_over(p):
    """Returns the root mesh's dimensions along which ranks have other parts of the user's
    tensor."""
    if p.parallel is None:
        return set()
    return root_names(p.parallel.own_mesh) - p.parallel.names_with_equal()
