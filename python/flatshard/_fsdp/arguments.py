"""Interprets the arguments of `fully_shard` and rejects what they do not support."""

import warnings
import weakref

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _C
from flatshard._fsdp.configure import options_of, take_keywords
from flatshard._fsdp.options import ShardOptions
from flatshard._fsdp.parts import find_parts
from flatshard._fsdp.strategies import find_strategy
from flatshard._fsdp.wrapping import check_module
from flatshard._graphs.checks import check_cuda_graph
from flatshard._tensor.mesh import (
    default_device_mesh,
    flattened,
    model_mesh,
    slices_of,
)
from flatshard.torch_versions import parameters_of

# One answer for each mesh, since asking is a collective.
_fast_links: weakref.WeakKeyDictionary[_C.Mesh, bool] = weakref.WeakKeyDictionary()


class Arguments:
    """The arguments of a fully_shard call, checked, with what follows from them."""

    def __init__(
        self,
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
        """
        Raises:
            As fully_shard: an argument that cannot work, naming it.
        """
        self.modules = modules_of(module)
        if options is not None and not isinstance(options, ShardOptions):
            raise TypeError(
                f"options: expected ShardOptions, got {type(options).__name__}"
            )
        options, self.model_options = take_keywords(
            options, options_of(self.modules), former_keywords
        )
        self.options = options
        # The mesh of torch, and the mesh that parameters show.
        self.device_mesh = default_device_mesh() if mesh is None else mesh
        if not isinstance(self.device_mesh, DeviceMesh):
            raise TypeError(f"mesh: expected a DeviceMesh, got {mesh!r}")
        self.strategy = strategy_name(strategy, options.outer, self.device_mesh)
        self.shown_mesh = mesh_to_show(options.outer, self.device_mesh)
        check_granularity(options.granularity, strategy)
        self.mp_policy = mixed_precision(mp_policy, options.fp8)
        self.offload = offloads(offload_policy)
        self.pin_memory = self.offload and offload_policy.pin_memory
        self.reshard, self.post_forward_ranks = reshards(
            reshard_after_forward, strategy, self.device_mesh, options.fp8
        )
        if options.cuda_graph:
            check_cuda_graph(self.modules, self.device_mesh, self.offload)
        if dp_mesh_dims is not None:
            check_dp_mesh_dims(dp_mesh_dims, self.device_mesh)
        # The meshes of the core: of the unit, perhaps a part of the mesh of the model, with
        # `slices` as in Sharding.
        self.mesh, self.whole_mesh = model_mesh(self.device_mesh)
        self.slices = slices_of(self.mesh, self.whole_mesh)
        self.copy_engines = uses_copy_engines(
            self.model_options.copy_engines, self.whole_mesh
        )
        # Units inside the modules, for this unit to join.
        self.parts = find_parts(
            self.modules, self.mesh, self.offload, self.copy_engines
        )
        self.ignored = ids_of(ignored_params)


def modules_of(module):
    one = isinstance(module, nn.Module) or not hasattr(module, "__iter__")
    modules = [module] if one else list(module)
    if not modules:
        raise ValueError(
            "module: expected a module or a list of them, got an empty list"
        )
    for m in modules:
        if not isinstance(m, nn.Module):
            raise TypeError(
                "module: expected an nn.Module or a list of them, got "
                f"{type(m).__name__}"
            )
        check_module(m)
    return modules


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
            "outer: 'optim' flattens the mesh, so its dimensions need names: pass "
            "mesh_dim_names to init_device_mesh"
        )
    return flattened(mesh)


def mixed_precision(policy, fp8):
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ValueError(
            f"mp_policy: expected a MixedPrecisionPolicy, got {type(policy).__name__}"
        )
    for name in names[:3]:
        dtype = getattr(policy, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"mp_policy: {name}: expected a torch.dtype, got {dtype}")
    if fp8 is not None and getattr(policy, "param_dtype_override_fn", None):
        raise NotImplementedError(
            "mp_policy: param_dtype_override_fn is not supported with fp8; choose "
            "FP8 weights by Float8Policy's module_filter_fn"
        )
    return policy


def param_dtype_of(policy, tensor, name):
    """Returns the dtype in which a parameter is all-gathered; None: its own."""
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
        "over the data-parallel dimensions: distribute them only over the others, such "
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
            f"strategy={strategy!r}, because it shards no parameter; leave it out"
        )


def reshards(reshard_after_forward, strategy, device_mesh, fp8):
    """Returns whether parameters are resharded after the forward (None: not given), and
    over how many adjacent ranks (0: over all)."""
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
            "reshard_after_forward=1 keeps parameters unsharded from forward to backward, "
            "as False does; True shards them over all ranks",
            stacklevel=4,
        )
        return False, 0
    if ranks == size:
        return True, 0
    if find_strategy(strategy).parameter == "RR":
        raise ValueError(
            f"reshard_after_forward={ranks} has no effect with strategy={strategy!r}, "
            "because it replicates parameters on every rank; leave it out"
        )
    if fp8:
        raise NotImplementedError(
            f"reshard_after_forward={ranks} is not supported together with fp8, because "
            "forward and backward all-gather different data; use True or False"
        )
    return True, ranks
