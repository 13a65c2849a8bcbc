"""How the parameters of a fully_shard call are split: along which dimension, over which
mesh."""

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from flatshard._fsdp.extension import is_extended
from flatshard._tensor.mesh import root_names
from flatshard._tensor.tensor_parallel import is_tensor_parallel


@dataclass(frozen=True)
class Place:
    """How a parameter is split: along which dimension, and over which mesh if not over the
    mesh of the unit."""

    dim: int
    mesh: DeviceMesh | None


def places_in(found, shard_placement_fn, mesh):
    """Returns the Place of each of collect_parameters' finds, in a unit on `mesh`."""
    places = []
    for tensor, name, _ in found:
        placement, own = placement_of(shard_placement_fn, tensor, name, mesh)
        places.append(Place(cut_dim(placement, tensor, name, mesh), own))
    return places


def check_places(places, found, asked):
    """Refuses options of a unit that do not fit how its parameters are split.

    Returns:
        The places, adjusted if the strategy does not shard parameters.
    """
    options, strategy, slices = asked.options, asked.strategy, asked.slices
    fp8, cuda_graph = options.fp8, options.cuda_graph
    flattens = options.outer == "optim"
    any_dim = any(place.dim for place in places)
    on_parts = slices is not None or any(place.mesh is not None for place in places)
    tensors = [tensor for tensor, _, _ in found]
    if on_parts:
        in_place = options.grads_in_place
        refuse(_ON_A_PART, fp8=fp8, cuda_graph=cuda_graph, grads_in_place=in_place)
    if any_dim:
        refuse(_CUT_ELSEWHERE, fp8=fp8, outer=flattens, mesh=on_parts)
    if any(map(is_tensor_parallel, tensors)):
        stored = fp8 is not None and fp8.recipe == "mxfp8"
        stored = stored and fp8.column_plane == "stored"
        refuse(_PARALLEL, outer=flattens, column_plane=stored)
    if any(map(is_extended, tensors)):
        refuse(
            _EXTENDED,
            strategy=strategy not in ("zero3", "hsdp"),
            dims=any_dim,
            fp8=fp8,
            offload_policy=asked.offload,
            cuda_graph=cuda_graph,
            mesh=on_parts,
        )
    if strategy == "zero0" or asked.device_mesh.size() == 1:
        return [replace(place, dim=0) for place in places]
    return places


def placement_of(shard_placement_fn, tensor, name, mesh):
    """Returns (Shard or None, the parameter's mesh or None) by shard_placement_fn.

    Args:
        mesh: DeviceMesh of the unit.
    """
    found = None if shard_placement_fn is None else shard_placement_fn(tensor)
    own = None
    if hasattr(found, "placement") and hasattr(found, "mesh_info"):
        found = found.placement, getattr(found.mesh_info, "mesh", None)
    placement = found
    if isinstance(found, tuple) and len(found) == 2:
        placement, own = found
    is_mesh = own is None or isinstance(own, DeviceMesh)
    if not (placement is None or isinstance(placement, Shard)) or not is_mesh:
        raise NotImplementedError(
            f"shard_placement_fn: expected None, a Shard or (Shard, mesh) for parameter "
            f"{name}, got {found}"
        )
    return placement, None if own is None or own == mesh else own


def check_own_mesh(names, own, mesh, is_part):
    """Refuses a mesh of shard_placement_fn that is not a part of the unit's mesh."""
    if not is_part:
        raise ValueError(
            f"shard_placement_fn: parameter {names[0]} should be on {own}, this "
            f"module on {mesh}: expected the module's mesh, or a dimension that was "
            "flattened together with others into it"
        )


def check_flattened(parameters, part, whole):
    """Refuses DTensors over the dimensions that make a unit's parameters experts.

    Args:
        parameters: of a unit on a part of the model's mesh.
        part, whole: the core's meshes: for the unit, and for the model.
    """
    others = {name for name, _ in whole.axes} - {name for name, _ in part.axes}
    for p in parameters:
        if p.parallel is not None and others <= root_names(p.parallel.own_mesh):
            raise ValueError(
                f"mesh: dimensions {sorted(others)} were flattened together with the mesh "
                "of the module, so their ranks have different experts, but parameter "
                f"{p.label} is a DTensor over them. With tensor parallelism flatten them "
                "after the last fully_shard. Experts are plain tensors, or DTensors over "
                "another dimension"
            )


def cut_dim(placement, tensor, name, mesh):
    """Returns the dimension along which to split a parameter.

    Args:
        placement: Shard or None.
        mesh: DeviceMesh; its last dimension shards.

    Raises:
        NotImplementedError: it cannot be split along it, naming the parameter.
    """
    if placement is None:
        return 0
    dim = placement.dim + tensor.dim() if placement.dim < 0 else placement.dim
    if dim == 0:
        return 0
    if not 0 < dim < tensor.dim():
        raise AssertionError(
            f"Shard dim {placement.dim} is invalid for {tensor.dim()}D tensor: "
            f"shard_placement_fn: expected a dimension of parameter {name}, "
            f"{tuple(tensor.shape)}"
        )
    ranks = mesh.size(mesh.ndim - 1)
    if tensor.shape[dim] % ranks != 0:
        raise NotImplementedError(
            f"shard_placement_fn: FSDP does not support uneven sharding on dim {dim}: "
            f"parameter {name} has the shape {tuple(tensor.shape)}, and {ranks} ranks do "
            "not divide this dimension; return Shard(0) for it"
        )
    return dim


def refuse(template, **options):
    """Raises NotImplementedError for the first of `options` that is on. `template` has
    {name} where the option's name is."""
    for name, value in options.items():
        if value:
            raise NotImplementedError(template.format(name=name))


_ON_A_PART = (
    "{name} is not supported for a module on a part of the model's mesh; leave it out "
    "here"
)
_PARALLEL = (
    "{name}: this value is not supported for a unit that has parameters with tensor "
    "parallelism (DTensors); leave it out there"
)
_EXTENDED = (
    "{name}: this value is not supported for a unit that has parameters of subclasses "
    "with fsdp_pre_all_gather; give them a fully_shard call of their own, with the default"
)
_CUT_ELSEWHERE = (
    "{name} is not supported where shard_placement_fn returns another placement than "
    "Shard(0); leave one of them out"
)
