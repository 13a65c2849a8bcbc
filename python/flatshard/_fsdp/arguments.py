"""What the arguments of `fully_shard` mean, and what of them is refused."""

import warnings
import weakref

from torch import nn
from torch.distributed.tensor import Shard

from flatshard._fsdp.strategies import find_strategy
from flatshard._fsdp.wrapping import check_module
from flatshard._tensor.mesh import flattened
from flatshard.torch_versions import parameters_of

# Of each mesh: asking is a collective.
_fast_links = weakref.WeakKeyDictionary()


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


def check_slices(**options):
    """Refuses options of a module whose mesh is a part of the model's."""
    for name, value in options.items():
        if value not in (None, False):
            raise NotImplementedError(
                f"{name} is not supported for a module whose mesh is a part of the "
                "model's; leave it out here"
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
    if outer not in ("replicate", "optim"):
        raise ValueError(f"outer: expected 'replicate' or 'optim', got {outer!r}")
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
    """Over which the parameters are DTensors."""
    if outer == "replicate":
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "outer: 'optim' flattens the mesh, which needs names: give "
            "init_device_mesh mesh_dim_names"
        )
    return flattened(mesh)


def mixed_precision(policy):
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ValueError(
            f"mp_policy: expected a MixedPrecisionPolicy, got {type(policy).__name__}"
        )
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise NotImplementedError(
            "mp_policy: param_dtype_override_fn is not supported; give the modules whose "
            "parameters keep their dtype a fully_shard call and a policy of their own"
        )
    return policy


def uses_copy_engines(copy_engines, mesh):
    if copy_engines not in ("none", "auto", "all"):
        raise ValueError(
            f"copy_engines: expected 'none', 'auto' or 'all', got {copy_engines!r}"
        )
    if copy_engines == "auto":
        if mesh not in _fast_links:
            _fast_links[mesh] = mesh.has_fast_links
        return _fast_links[mesh]
    return copy_engines == "all"


def offloads(policy):
    name = type(policy).__name__
    if name not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise ValueError(
            "offload_policy: expected OffloadPolicy() or CPUOffloadPolicy(), got "
            f"{policy!r}"
        )
    return name == "CPUOffloadPolicy"


def reshards(reshard_after_forward, strategy, device_mesh, fp8):
    """Returns whether parameters are resharded after the forward (None: not said), and
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
            stacklevel=3,
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


def check_placement(shard_placement_fn, tensor, name):
    placement = None if shard_placement_fn is None else shard_placement_fn(tensor)
    if placement is not None and not (
        isinstance(placement, Shard) and placement.dim == 0
    ):
        raise NotImplementedError(
            f"shard_placement_fn: expected None or Shard(0) for parameter {name}, got "
            f"{placement}"
        )
