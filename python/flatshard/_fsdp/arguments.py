"""Interprets the arguments of `fully_shard` and rejects what they do not support."""

import warnings
import weakref
from dataclasses import dataclass, replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from flatshard import _C
from flatshard._fsdp.configure import options_of, take_keywords
from flatshard._fsdp.extension import is_extended
from flatshard._fsdp.options import ModelOptions, ShardOptions
from flatshard._fsdp.parts import find_parts
from flatshard._fsdp.strategies import find_strategy
from flatshard._fsdp.wrapping import check_module
from flatshard._graphs.checks import check_cuda_graph
from flatshard._tensor.mesh import (
    default_device_mesh,
    flattened,
    model_mesh,
    root_names,
    slices_of,
)
from flatshard._tensor.tensor_parallel import is_tensor_parallel
from flatshard.torch_versions import parameters_of

# One answer for each mesh, since asking is a collective.
_fast_links: weakref.WeakKeyDictionary[_C.Mesh, bool] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Arguments:
    """The arguments of a fully_shard call, checked, with what follows from them."""

    modules: list
    ignored: set  # ids of parameters
    # The mesh of torch, the mesh that parameters show, and the mesh of the core. The last
    # may be a part of `whole_mesh`, with `slices` as in Sharding.
    device_mesh: DeviceMesh
    shown_mesh: DeviceMesh
    mesh: _C.Mesh
    whole_mesh: _C.Mesh
    slices: tuple | None
    # In which form.
    strategy: str  # as the core calls it
    mp_policy: object
    offload: bool
    pin_memory: bool
    reshard: bool | None
    post_forward_ranks: int
    options: ShardOptions
    # Options of the model.
    model_options: ModelOptions | None
    asked_copy_engines: str
    copy_engines: bool
    # Units inside the modules, for this unit to join.
    parts: list


def read_arguments(
    module,
    mesh,
    reshard_after_forward,
    mp_policy,
    offload_policy,
    ignored_params,
    dp_mesh_dims,
    strategy,
    options,
    former_keywords,
):
    """Returns the Arguments of fully_shard.

    Raises:
        As fully_shard: an argument that cannot work, naming it.
    """
    modules = modules_of(module)
    if options is not None and not isinstance(options, ShardOptions):
        raise TypeError(f"options: expected ShardOptions, got {type(options).__name__}")
    options, model_options = take_keywords(
        options, options_of(modules), former_keywords
    )
    device_mesh = default_device_mesh() if mesh is None else mesh
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {mesh!r}")
    name = strategy_name(strategy, options.outer, device_mesh)
    shown_mesh = mesh_to_show(options.outer, device_mesh)
    check_granularity(options.granularity, strategy)
    mp_policy = mixed_precision(mp_policy, options.fp8)
    offload = offloads(offload_policy)
    reshard, post_forward_ranks = reshards(
        reshard_after_forward, strategy, device_mesh, options.fp8
    )
    if options.cuda_graph:
        check_cuda_graph(modules, device_mesh, offload)
    if dp_mesh_dims is not None:
        check_dp_mesh_dims(dp_mesh_dims, device_mesh)
    core_mesh, whole_mesh = model_mesh(device_mesh)
    asked_copy_engines = (model_options or ModelOptions()).copy_engines
    copy_engines = uses_copy_engines(asked_copy_engines, whole_mesh)
    return Arguments(
        modules=modules,
        parts=find_parts(modules, core_mesh, offload, copy_engines),
        ignored=ids_of(ignored_params),
        device_mesh=device_mesh,
        shown_mesh=shown_mesh,
        mesh=core_mesh,
        whole_mesh=whole_mesh,
        slices=slices_of(core_mesh, whole_mesh),
        strategy=name,
        mp_policy=mp_policy,
        offload=offload,
        pin_memory=offload and offload_policy.pin_memory,
        reshard=reshard,
        post_forward_ranks=post_forward_ranks,
        options=options,
        model_options=model_options,
        asked_copy_engines=asked_copy_engines,
        copy_engines=copy_engines,
    )


def modules_of(module):
    one = isinstance(module, nn.Module) or not hasattr(module, "__iter__")
    modules = [module] if one else list(module)
    if not modules:
        raise ValueError("module: expected a module or a list of them, got none")
    for m in modules:
        if not isinstance(m, nn.Module):
            raise TypeError(
                "module: expected an nn.Module or a list of them, got "
                f"{type(m).__name__}"
            )
        check_module(m)
    return modules


def refuse(template, **options):
    """Raises NotImplementedError for the first of `options` that is on. `template` has
    {name} where the option's name is."""
    for name, value in options.items():
        if value:
            raise NotImplementedError(template.format(name=name))


_ON_A_PART = (
    "{name} is not supported for a module whose mesh is a part of the model's; leave it "
    "out here"
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


def ids_of(ignored_params):
    ignored = list(ignored_params or ())
    for p in ignored:
        if not isinstance(p, nn.Parameter):
            raise TypeError(
                "ignored_params: expected parameters, not their names or others, got "
                f"{type(p).__name__}"
            )
    return {id(p) for p in ignored}


def places_of(tensors, modules):
    return [
        (weakref.ref(module), name)
        for module in modules
        for name, tensor in parameters_of(module).items()
        if id(tensor) in tensors
    ]


def strategy_name(strategy, outer, mesh):
    row = find_strategy(strategy)
    if outer == "replicate":
        return row.name if mesh.ndim == 1 else row.with_replicas
    if mesh.ndim != 2:
        raise ValueError(
            f"outer: 'optim' expects a mesh of 2 dimensions, got {mesh.ndim}"
        )
    if row.name != "zero3":
        raise NotImplementedError(
            f"outer: 'optim' expects strategy 'zero3', got {strategy!r}: "
            "a mesh of 1 dimension shards the optimizer state over all ranks"
        )
    return "hfsdp"


def mesh_to_show(outer, mesh):
    """Returns the mesh over which the parameters are DTensors."""
    if outer == "replicate":
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "outer: 'optim' flattens the mesh, which needs names: give "
            "init_device_mesh mesh_dim_names"
        )
    return flattened(mesh)


def mixed_precision(policy, fp8):
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ValueError(
            f"mp_policy: expected a MixedPrecisionPolicy, got {type(policy).__name__}"
        )
    if fp8 is not None and getattr(policy, "param_dtype_override_fn", None):
        raise NotImplementedError(
            "mp_policy: param_dtype_override_fn is not supported with fp8; choose "
            "FP8 weights by Float8Policy's module_filter_fn"
        )
    return policy


def param_dtype_of(policy, tensor, name):
    """Returns the dtype in which a parameter is gathered; None: its own."""
    override = getattr(policy, "param_dtype_override_fn", None)
    dtype = None if override is None else override(tensor)
    if dtype is None:
        return policy.param_dtype
    if dtype not in (policy.param_dtype, tensor.dtype):
        raise ValueError(
            "mp_policy: param_dtype_override_fn expected to return None, param_dtype "
            f"({policy.param_dtype}) or the dtype of parameter {name} ({tensor.dtype}), "
            f"got {dtype!r}"
        )
    return dtype


def check_dp_mesh_dims(dims, mesh):
    """Refuses FSDP2's DataParallelMeshDims that mean something else than the mesh."""
    wanted = [_names(dims, "replicate"), _names(dims, "shard")]
    own = mesh.mesh_dim_names
    if own is not None and [(name,) for name in own] == [w for w in wanted if w]:
        if mesh.ndim == 2 or wanted[1]:
            return
    raise NotImplementedError(
        f"dp_mesh_dims: expected the dimensions of the mesh, {own}, with two the first as "
        f"replicate and the second as shard, got {dims!r}. Parameters cannot be DTensors "
        "over the data-parallel dimensions: distribute them over the others alone, such "
        "as mesh['tp'], and pass mesh=mesh['dp'], with replicas "
        "mesh['replicate', 'shard']"
    )


def _names(dims, kind):
    names = getattr(dims, kind, None)
    return (names,) if isinstance(names, str) else tuple(names or ())


def uses_copy_engines(copy_engines, mesh):
    if copy_engines == "auto":
        if mesh not in _fast_links:
            _fast_links[mesh] = mesh.has_fast_links
        return _fast_links[mesh]
    return copy_engines == "all"


def offloads(policy):
    if policy is None:  # FSDP2's callers pass it for nothing
        return False
    name = type(policy).__name__
    if name not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise ValueError(
            "offload_policy: expected OffloadPolicy(), CPUOffloadPolicy() or None, got "
            f"{policy!r}"
        )
    return name == "CPUOffloadPolicy"


def check_granularity(granularity, strategy):
    """Refuses a granularity that changes nothing."""
    if granularity != "dim0" and find_strategy(strategy).name == "zero0":
        raise ValueError(
            f"options: granularity={granularity!r} has no effect with "
            f"strategy={strategy!r}, which cuts no parameter; leave it out"
        )


def reshards(reshard_after_forward, strategy, device_mesh, fp8):
    """Returns whether parameters are resharded after the forward (None: not given), and
    over how many neighbouring ranks (0: over all)."""
    ranks = reshard_after_forward
    if isinstance(ranks, bool) or ranks is None:
        return ranks, 0
    if not isinstance(ranks, int):
        raise ValueError(
            f"reshard_after_forward: expected True, False, None or a number of ranks, got "
            f"{ranks!r}"
        )
    size = device_mesh.size(device_mesh.ndim - 1)
    if ranks < 1 or size % ranks != 0:
        raise ValueError(
            f"reshard_after_forward: as a number expected a factor of {size}, the ranks "
            f"that parameters are sharded over, got {ranks}"
        )
    if ranks == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps parameters whole from forward to backward, as "
            "False does; True shards them over all ranks",
            stacklevel=4,
        )
        return False, 0
    if ranks == size:
        return True, 0
    if find_strategy(strategy).parameter == "RR":
        raise ValueError(
            f"reshard_after_forward={ranks} has no effect with strategy={strategy!r}, "
            "whose parameters are whole on every rank; leave it out"
        )
    if fp8:
        raise NotImplementedError(
            f"reshard_after_forward={ranks} is not supported together with fp8, whose "
            "forward and backward gather different data; use True or False"
        )
    return True, ranks


@dataclass(frozen=True)
class Place:
    """Where a parameter is cut: along which dimension, and over which mesh if not the
    unit's."""

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
    """Refuses options of a unit that do not go with where its parameters are cut.

    Returns:
        The places, with what a strategy that cuts nothing makes of them.
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
    """Refuses a mesh of shard_placement_fn that is no part of the unit's."""
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
        part, whole: the core's meshes: the unit's, and the model's.
    """
    others = {name for name, _ in whole.axes} - {name for name, _ in part.axes}
    for p in parameters:
        if p.parallel is not None and others <= root_names(p.parallel.own_mesh):
            raise ValueError(
                f"mesh: dimensions {sorted(others)} were flattened together with the "
                f"module's, so their ranks have different experts, but parameter {p.label} "
                "is a DTensor over them. With tensor parallelism flatten them after the "
                "last fully_shard. Experts are plain tensors, or DTensors over another "
                "dimension"
            )


def cut_dim(placement, tensor, name, mesh):
    """Returns the dimension along which a parameter is to be cut.

    Args:
        placement: Shard or None.
        mesh: DeviceMesh; its last dimension shards.

    Raises:
        NotImplementedError: it cannot be cut so, naming the parameter.
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
            f"parameter {name} has {tuple(tensor.shape)}, which {ranks} ranks do not "
            "divide; return Shard(0) for it"
        )
    return dim
