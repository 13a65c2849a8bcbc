"""The ranks that have the parts of one model: with tensor parallelism more ranks than in
fully_shard's mesh."""

import torch
import torch.distributed as dist

from flatshard._tensor.mesh import (
    core_mesh_of_all,
    core_mesh_of_dimensions,
    device_of,
    mesh_of_roots,
    ranks_of,
    root_names,
    root_of,
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
            grids = grids_of(units)
            self._of_checkpoints = (
                self.mesh if grids is None else tell_parts(units, grids)
            )
        return self._of_checkpoints


def grids_of(units):
    """Returns a DeviceMesh for each unit: all dimensions of its root mesh over which
    parameters of the model are sharded or replicated. None: all units are on one mesh,
    without tensor parallelism."""
    parallel = [[p.parallel for p in u.parameters if p.parallel] for u in units]
    meshes = [unit.sharding.device_mesh for unit in units]
    if not any(parallel) and len(set(meshes)) == 1:
        return None
    names = {}
    for mesh, of_unit in zip(meshes, parallel):
        of_root = names.setdefault(root_of(mesh), set())
        of_root.update(root_names(mesh), *(root_names(p.own_mesh) for p in of_unit))
    return [
        mesh_of_roots(mesh, names[root_of(mesh)]) if root_names(mesh) else mesh
        for mesh in meshes
    ]


def tell_parts(units, grids):
    """Passes to the core which part of a full tensor each parameter is, for checkpoints.

    Args:
        grids: result of grids_of.

    Returns:
        The core's mesh over all ranks of the model. Collective over them.

    Raises:
        NotImplementedError: it is unknown which ranks have equal values, or ranks that
            have other experts according to the core have equal ones. Names the parameter.
    """
    for unit, grid in zip(units, grids):
        within = root_names(unit.sharding.device_mesh)
        for p in unit.parameters:
            equal = p.parallel.names_with_equal() if p.parallel else set()
            if equal & within:
                raise NotImplementedError(
                    f"flatshard.checkpoint: parameter {p.names[0]} is equal on the ranks "
                    f"of {sorted(equal & within)}, but its unit is sharded over them. "
                    "This is not supported; use torch.distributed.checkpoint"
                )
            _check_known(unit, p, units[0], grid, grids[0])
            which, count = 0, 1
            cut = _cut_over(p)
            for i, name in enumerate(grid.mesh_dim_names or ()):
                if name not in within and name not in cut:
                    which = which * grid.size(i) + grid.get_local_rank(i)
                    count *= grid.size(i)
            cuts = p.parallel.cuts() if p.parallel else None
            unit.core.set_part(p.index, cuts, (which, count))
    return core_mesh_of_all(grids[0])


def tell_matrix_ranks(units):
    """Passes to the core which part of a full tensor each parameter is, for Muon.

    Returns:
        (mesh, cut_axes). The core's mesh over all ranks that have parts of the parameters.
        For each parameter of each unit, the axes outside the unit's mesh along which ranks
        have other parts. (None, []) without tensor parallelism. Collective.

    Raises:
        NotImplementedError: as tell_parts, and for units on several meshes.
    """
    grids = grids_of(units)
    if grids is None:
        return None, []
    if len(set(grids)) > 1:
        raise NotImplementedError(
            f"flatshard.optim.Muon: units on {grids[0]} and on {grids[1]} are not "
            "supported in one optimizer; create an optimizer for the parameters of each"
        )
    tell_parts(units, grids)
    cut_axes, axis_of = [], {}
    for unit in units:
        own, core = unit.sharding.device_mesh, unit.sharding.mesh
        within = root_names(own)
        cut_axes.append([sorted(_cut_over(p) - within) for p in unit.parameters])
        # Another mesh of the same ranks may have named the core's axes.
        if len(own.mesh_dim_names or ()) == len(core.axes):
            axis_of |= zip(own.mesh_dim_names, [name for name, _ in core.axes])
    names = tuple(axis_of.get(name, name) for name in grids[0].mesh_dim_names)
    return core_mesh_of_dimensions(grids[0], names), cut_axes


def _check_known(unit, p, root, grid, of_root):
    """Refuses a parameter of a unit on another mesh than the root's where ranks of the
    model may have equal values or others."""
    mesh = unit.sharding.device_mesh
    known = root_names(mesh) | (
        root_names(p.parallel.own_mesh) if p.parallel else set()
    )
    left = set(grid.mesh_dim_names or ()) - known
    is_of_root = mesh == root.sharding.device_mesh
    if ranks_of(grid) != ranks_of(of_root) or (left and not is_of_root):
        raise NotImplementedError(
            f"flatshard.checkpoint: parameter {p.names[0]} is on {mesh}, the root unit on "
            f"{root.sharding.device_mesh}, so it is unknown which other ranks have equal "
            "values. Make it a DTensor over these ranks before fully_shard, or use "
            "torch.distributed.checkpoint"
        )


def sums_over(grids, units, squares):
    """Adds up, over the ranks that have parts, what each rank has of parameters.

    Args:
        grids: result of grids_of.
        squares: {name: numbers}, a sum over the ranks of the unit's mesh.

    Returns:
        The same over all ranks. Collective over the ranks of `grids`.
    """
    found = {}
    for grid in dict.fromkeys(grids):
        own = [unit for unit, of_unit in zip(units, grids) if of_unit == grid]
        found.update(_sums_over(grid, own, squares))
    return found


def _sums_over(grid, units, squares):
    cut = {}
    for unit in units:
        within = root_names(unit.sharding.device_mesh)
        for p in unit.parameters:
            cut[p.names[0]] = _cut_over(p) - within
    names = [name for name in squares if name in cut]
    if not names:
        return {}
    device = units[0].parameters.home
    sums = torch.tensor(
        [squares[name] for name in names], dtype=torch.float64, device=device
    )
    for i, name in enumerate(grid.mesh_dim_names or ()):
        equal = [name not in cut[n] for n in names]
        sums[torch.tensor(equal, device=device)] /= grid.size(i)
        dist.all_reduce(sums, group=grid.get_group(i))
    return dict(zip(names, sums.tolist()))


def _cut_over(p):
    """Returns the root mesh's dimensions along which ranks have other parts of the user's
    tensor."""
    if p.parallel is None:
        return set()
    return root_names(p.parallel.own_mesh) - p.parallel.names_with_equal()
