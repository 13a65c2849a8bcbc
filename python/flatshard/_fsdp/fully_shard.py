"""`fully_shard`: shards a module's parameters, gradients and optimizer state."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _C
from flatshard._fsdp.arguments import Arguments, places_of
from flatshard._fsdp.collect import collect_parameters, modules_of_unit
from flatshard._fsdp.core import make_core
from flatshard._fsdp.cuts import check_flattened, check_own_mesh
from flatshard._fsdp.former import mark_owner
from flatshard._fsdp.linear import linears_in_place, write_grads_in_place
from flatshard._fsdp.main_grad import offer_main_grads
from flatshard._fsdp.options import ShardOptions
from flatshard._fsdp.parameters import Parameters
from flatshard._fsdp.parts import join
from flatshard._fsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from flatshard._fsdp.resolved import resolve
from flatshard._fsdp.state_dicts import watch_state_dicts
from flatshard._fsdp.ties import find_ties
from flatshard._fsdp.unit import Modules, Policy, Sharding, UnitState
from flatshard._fsdp.wrapping import wrap_class
from flatshard._tensor.mesh import device_of, model_mesh, slices_of
from flatshard._tensor.places import set_state, state_of
from flatshard.float8.linear import make_float8
from flatshard.torch_versions import buffers_of

# The argument and result of fully_shard, such as a Transformer or a list of its layers.
Wrapped = TypeVar("Wrapped", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: Wrapped,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], object] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = OffloadPolicy(),
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: object | None = None,
    strategy: str = "zero3",
    options: ShardOptions | None = None,
    **former_keywords: object,
) -> Wrapped:
    """Shards the parameters of `module` that no inner call has sharded yet.

    Call it on the blocks first and on the full model last. Each call makes one unit. The
    parameters of a unit are all-gathered together. A module that shares all its parameters
    with an inner unit, such as an embedding, joins that unit. Create optimizers afterwards.
    Collective over the ranks of the mesh.

    Args:
        module: an nn.Module, or a list of modules that form one unit. In a forward it
            is unsharded from the first of them that runs until each has run. They may
            run in any order and as often as they like. When one does not run, it is
            unsharded until the backward.
        mesh: DeviceMesh of one dimension, or two: replicas over the first, shards
            over the second (HSDP). None: all ranks. A dimension that was flattened
            together with others into the enclosing module's mesh: this module's
            parameters are slices, see below.
        reshard_after_forward: False keeps parameters unsharded from forward to
            backward. None: True, but False for the root. A number N that divides the
            number of ranks that parameters are sharded over: until the backward they are
            sharded over N adjacent ranks, such as the ranks of a host. The backward's
            all-gather runs among these.
        shard_placement_fn: function of a parameter that returns None or Shard(dim), the
            dimension along which to shard it. Dimensions other than the first have to be
            multiples of the number of ranks. Such a parameter is stored with that
            dimension first, so the unsharded one is not contiguous. A pair with a mesh,
            such as (Shard(0), mesh) or FSDP2's ShardPlacementResult, stores it on that
            mesh, a part of `mesh`: see experts below.
        mp_policy: MixedPrecisionPolicy, of this package or of FSDP2.
        offload_policy: OffloadPolicy() or None: nothing; CPUOffloadPolicy(): sharded
            parameters, their gradients and optimizer state are stored on the CPU. Of this
            package or of FSDP2.
        ignored_params: set of parameters to leave as they are on every rank.
        dp_mesh_dims: None, or FSDP2's DataParallelMeshDims that names all dimensions of
            `mesh`. If parameters are DTensors over all of a larger mesh, give
            mesh=mesh["dp"], and parameters over only the other dimensions.
        strategy: "zero0" (no_shard), "zero1" (optim), "zero2" (optim_grads) or "zero3"
            (optim_grads_params); both names mean the same.
        options: ShardOptions, what FSDP2 does not have. Options of the full model
            (prefetch, copy engines, ...) belong to `flatshard.configure`.

    Tensor parallelism: parameters that are DTensors over another dimension of the same
    mesh, such as parallelize_module(model, mesh["tp"], plan) makes, are sharded over
    mesh=mesh["dp"] as FSDP2 shards them. Modules see DTensors over mesh["tp"] while their
    unit computes; parameters(), gradients and state dicts have DTensors over both.

    Experts: each rank has some experts of a layer. The other parameters are sharded over
    the ranks of `dp`, and the experts over a part of them (see `flatshard.moe_meshes`):

        fully_shard(block.experts, mesh=meshes.experts)
        fully_shard(block, mesh=meshes.dp)

    A parameter of `experts`, [n, ...], is then slice number meshes.ep.get_local_rank() of
    [ep * n, ...], the tensor in parameters(), state dicts and checkpoints. It
    joins the block's unit, with an all-gather and a reduction over "edp". Its
    gradients are divided by all ranks of "dp", as each saw the tokens of "ep" ranks.

    Returns:
        `module`. It is an FSDPModule from now on.

    Raises:
        ValueError: an argument that cannot work, naming it. AssertionError, as in FSDP2,
            for a module that was sharded before and for a dimension that does not exist.
        NotImplementedError: one that is not supported, naming it.
    """
    asked = Arguments(
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
    )
    owned = modules_of_unit(asked.modules, state_of)
    ties, tied = find_ties(asked.modules, owned)
    joining = {id(tie.module) for tie in ties if tie.joins}
    owned = [m for m in owned if id(m) not in joining]
    found = collect_parameters(asked.modules, owned, asked.ignored | tied)
    resolved = resolve(asked, found, shard_placement_fn)
    unit, parts, in_place = _make_units(asked, owned, resolved)
    _install(asked, owned, found, unit, in_place)
    for tie in ties:
        tie.make()
    join(unit, asked.parts + parts)
    return module


# This is the same as in FSDP2: callers see whether, and in which unit, a module was
# sharded. None: it was not.
setattr(fully_shard, "state", state_of)


def _make_units(asked, owned, resolved):
    """Makes the units, and replaces the parameters in the modules by their shards.

    Args:
        asked: Arguments.
        owned: the modules whose parameters `resolved` are.

    Returns:
        The unit of the call; the units of parameters that shard_placement_fn put on a
        part of the mesh; and the modules that write gradients where they are reduced.
    """
    _move_buffers(owned, asked.device_mesh)
    own = [r for r in resolved if r.is_own]
    in_place = linears_in_place(
        owned,
        [r.parameter for r in own],
        asked.options.grads_in_place,
        asked.slices,
    )
    parts = []
    for mesh in dict.fromkeys(r.mesh for r in resolved if r.mesh is not None):
        members = [r for r in resolved if r.mesh == mesh]
        part, whole = model_mesh(mesh)
        slices = slices_of(part, whole)
        names = [r.parameter.label for r in members]
        check_own_mesh(names, mesh, asked.device_mesh, whole is asked.mesh and slices)
        parts.append(_unit(asked, members, (part, whole), mesh, slices, in_place))
    unit = _unit(
        asked,
        own,
        (asked.mesh, asked.whole_mesh),
        asked.shown_mesh,
        asked.slices,
        in_place,
        extended=[r.parameter for r in resolved if r.parameter.extension is not None],
        ignored=places_of(asked.ignored, owned),
    )
    unit.modules.extend(weakref.ref(m) for m in asked.modules)
    unit.policy.reshard_after_forward = asked.reshard
    return unit, parts, in_place


def _unit(asked, members, meshes, shown, slices, in_place, **of_parameters):
    """
    Args:
        members: Resolved, of its core.
        meshes: _C.Mesh of the unit, and of the model.
        shown: the DeviceMesh of its DTensors.
        slices: as in Sharding.
    """
    mesh, whole = meshes
    parameters = [r.parameter for r in members]
    if slices is not None:
        check_flattened(parameters, mesh, whole)
    core_options = _C.UnitOptions(
        strategy=asked.strategy,
        offload=asked.offload,
        pin_memory=asked.pin_memory,
        # A graph writes them where they are reduced.
        grads_in_place=slices is None and (bool(in_place) or asked.options.cuda_graph),
        peers_read=asked.copy_engines,
        post_forward_ranks=asked.post_forward_ranks,
        part=None if mesh is whole else mesh,
        slices=slices or (1, 0),
        **asked.options.core(),
    )
    values = [r.value for r in members]
    unit = UnitState(
        modules=Modules(()),
        parameters=Parameters(parameters, **of_parameters),
        sharding=Sharding(
            mesh=mesh,
            device_mesh=shown,
            slices=slices,
            strategy=asked.strategy,
            core_options=core_options,
            mp_policy=asked.mp_policy,
            options=asked.options,
            model_options=asked.model_options,
            copy_engines=asked.copy_engines,
        ),
        core=make_core(parameters, values, asked.mp_policy, whole, core_options),
        policy=Policy(),
    )
    unit.make_shards()
    return unit


def _move_buffers(modules, device_mesh):
    """Moves buffers to the mesh's device, as the parameters. They are not sharded."""
    device = device_of(device_mesh)
    if device.type == "cpu":
        return
    for module in modules:
        buffers = buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffers[name] = buffer.to(device)


def _install(asked, owned, found, unit, in_place):
    """Changes the modules of a unit so that they compute as its parts.

    Args:
        asked: Arguments.
        owned: the modules whose parameters belong to the unit.
        found: their parameters, as collect_parameters returns them.
        in_place: those that write gradients where they are reduced.
    """
    make_float8(unit)
    offer_main_grads(unit)
    if in_place:
        write_grads_in_place(in_place, unit)
    for tensor, full_name, _ in found:
        mark_owner(tensor, full_name)
    for m in asked.modules:
        set_state(m, unit)
        wrap_class(m, asked.options.cuda_graph)
    for m in owned:
        watch_state_dicts(m, unit)
