"""`fully_shard`: shards a module's parameters, gradients and optimizer state."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _C
from flatshard._fsdp.arguments import (
    check_dp_mesh_dims,
    check_flattened,
    check_granularity,
    check_own_mesh,
    check_places,
    ids_of,
    mesh_to_show,
    mixed_precision,
    modules_of,
    offloads,
    param_dtype_of,
    places_in,
    places_of,
    reshards,
    strategy_name,
    uses_copy_engines,
)
from flatshard._fsdp.collect import collect_parameters, modules_of_unit
from flatshard._fsdp.configure import options_of, take_keywords
from flatshard._fsdp.extension import Extension, is_extended
from flatshard._fsdp.former import mark_owner
from flatshard._fsdp.forward import state_of
from flatshard._fsdp.joined import find_parts, join
from flatshard._fsdp.linear import linears_in_place, write_grads_in_place
from flatshard._fsdp.main_grad import offer_main_grads
from flatshard._fsdp.options import ModelOptions, ShardOptions
from flatshard._fsdp.parameter import (
    FROZEN,
    TRAINED,
    Parameter,
    plain_like,
    whole_parameter,
)
from flatshard._fsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from flatshard._fsdp.renewal import make_core
from flatshard._fsdp.replaced import watch_state_dicts
from flatshard._fsdp.unit import Policy, UnitState
from flatshard._fsdp.wrapping import wrap_class
from flatshard._graphs.checks import check_cuda_graph
from flatshard._tensor.mesh import default_device_mesh, device_of, model_mesh, slices_of
from flatshard._tensor.same_values import digest
from flatshard._tensor.tensor_parallel import (
    TensorParallel,
    is_tensor_parallel,
    plain_value,
)
from flatshard.float8.linear import make_float8
from flatshard.float8.policy import choose_weights
from flatshard.torch_versions import buffers_of, hooks_of_tensor

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

    Call it on the blocks first and on the whole model last. Each call makes one unit,
    whose parameters are all-gathered together. Optimizers are made afterwards.
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
            backward. None: True, but False for the root. A number, which divides the
            ranks that parameters are sharded over: until the backward they are sharded
            over that many neighbouring ranks, such as the ranks of a host. The
            backward's all-gather runs among these.
        shard_placement_fn: function of a parameter that returns None or Shard(dim), the
            dimension along which it is cut. Other dimensions than the first have to be
            multiples of the ranks. Such a parameter is stored with that dimension
            first, so the unsharded one is not contiguous. A pair with a mesh, such as
            (Shard(0), mesh) or FSDP2's ShardPlacementResult, stores it on that one, a
            part of `mesh`: see experts below.
        mp_policy: MixedPrecisionPolicy, of this package or FSDP2's.
        offload_policy: OffloadPolicy() or None: nothing; CPUOffloadPolicy(): sharded
            parameters, their gradients and optimizer state are stored on the CPU. Of this
            package or FSDP2's.
        ignored_params: set of parameters to leave as they are on every rank.
        dp_mesh_dims: None, or FSDP2's DataParallelMeshDims that names all dimensions of
            `mesh`. For a larger mesh, over all of which parameters are DTensors, give
            mesh=mesh["dp"], and parameters over the other dimensions alone.
        strategy: "zero0" (no_shard), "zero1" (optim), "zero2" (optim_grads) or "zero3"
            (optim_grads_params); both names mean the same.
        options: ShardOptions, what FSDP2 does not have. Options of the whole model
            (prefetch, copy engines, ...) belong to `flatshard.configure`.

    Tensor parallelism: parameters that are DTensors over another dimension of the same
    mesh, such as parallelize_module(model, mesh["tp"], plan) makes, are sharded over
    mesh=mesh["dp"] as FSDP2 shards them. Modules see DTensors over mesh["tp"] while their
    unit computes; parameters(), gradients and state dicts have DTensors over both.

    Experts: each rank has some of a layer's. The other parameters are sharded over the
    ranks of `dp`, and the experts over a part of them (see `flatshard.moe_meshes`):

        fully_shard(block.experts, mesh=meshes.experts)
        fully_shard(block, mesh=meshes.dp)

    A parameter of `experts`, [n, ...], is then slice number meshes.ep.get_local_rank() of
    [ep * n, ...], which is what parameters(), state dicts and checkpoints show. It
    joins the block's unit, with an all-gather and a reduction over "edp". Its
    gradients are divided by all ranks of "dp", as each saw the tokens of "ep" ranks.

    Returns:
        `module`, which is an FSDPModule from now on.

    Raises:
        ValueError: an argument that cannot work, naming it. AssertionError, as FSDP2's,
            for a module that was sharded before and for a dimension that is none.
        NotImplementedError: one that is not supported, naming it.
    """
    modules = modules_of(module)
    if options is not None and not isinstance(options, ShardOptions):
        raise TypeError(f"options: expected ShardOptions, got {type(options).__name__}")
    options, model_options = take_keywords(
        options, options_of(modules), former_keywords
    )
    fp8, cuda_graph = options.fp8, options.cuda_graph
    device_mesh = default_device_mesh() if mesh is None else mesh
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {mesh!r}")
    name = strategy_name(strategy, options.outer, device_mesh)
    shown_mesh = mesh_to_show(options.outer, device_mesh)
    check_granularity(options.granularity, strategy)
    mp_policy = mixed_precision(mp_policy, fp8)
    offload = offloads(offload_policy)
    reshard, post_forward_ranks = reshards(
        reshard_after_forward, strategy, device_mesh, fp8
    )
    if cuda_graph:
        check_cuda_graph(modules, device_mesh, offload)
    if dp_mesh_dims is not None:
        check_dp_mesh_dims(dp_mesh_dims, device_mesh)

    core, whole_mesh = model_mesh(device_mesh)
    slices = slices_of(core, whole_mesh)
    asked_copy_engines = (model_options or ModelOptions()).copy_engines
    copy_engines = uses_copy_engines(asked_copy_engines, whole_mesh)
    parts = find_parts(modules, core, offload, copy_engines)
    ignored = ids_of(ignored_params)
    owned = modules_of_unit(modules, lambda m: state_of(m) is not None)
    found = collect_parameters(modules, owned, ignored)
    places = places_in(found, shard_placement_fn, device_mesh)
    places = check_places(places, found, options, name, offload, slices, device_mesh)
    reasons = choose_weights(fp8, found, mp_policy.param_dtype, device_of(device_mesh))
    _move_buffers(owned, device_mesh)

    everything = [
        _parameter(t, label, sites, reason, place, options, mp_policy, device_mesh)
        for (t, label, sites), reason, place in zip(found, reasons, places)
    ]
    values = {
        id(p): p.stored(p.whole if p.extension else plain_value(t))
        for p, (t, _, _) in zip(everything, found)
    }
    own = [
        p
        for p, place in zip(everything, places)
        if place.mesh is None and (p.trainable or p.extension is None)
    ]
    in_place = linears_in_place(owned, own, options.grads_in_place, slices)

    def state_of_parameters(parameters, part, whole, shown, slices, **of_unit):
        if slices is not None:
            check_flattened(parameters, part, whole)
        core_options = _C.UnitOptions(
            strategy=name,
            offload=offload,
            pin_memory=offload and offload_policy.pin_memory,
            # A graph writes them where they are reduced.
            grads_in_place=slices is None and (bool(in_place) or cuda_graph),
            peers_read=copy_engines,
            float8=fp8.core() if fp8 else None,
            post_forward_ranks=post_forward_ranks,
            part=None if part is whole else part,
            slices=slices or (1, 0),
        )
        of_parameters = [values[id(p)] for p in parameters]
        state = UnitState(
            core=make_core(parameters, of_parameters, mp_policy, whole, core_options),
            core_options=core_options,
            strategy=name,
            mesh=part,
            device_mesh=shown,
            parameters=parameters,
            mp_policy=mp_policy,
            model_options=model_options,
            asked_copy_engines=asked_copy_engines,
            copy_engines=copy_engines,
            check_same_values=options.check_same_values,
            slices=slices,
            **of_unit,
        )
        state.make_shards()
        return state

    for own_mesh in dict.fromkeys(p.mesh for p in places if p.mesh is not None):
        members = [p for p, place in zip(everything, places) if place.mesh == own_mesh]
        part, whole = model_mesh(own_mesh)
        part_of = slices_of(part, whole)
        check_own_mesh(members, own_mesh, device_mesh, whole is core and part_of)
        parts.append(
            state_of_parameters(
                members, part, whole, own_mesh, part_of, modules=[], fp8=None
            )
        )
    state = state_of_parameters(
        own,
        core,
        whole_mesh,
        shown_mesh,
        slices,
        modules=[weakref.ref(m) for m in modules],
        fp8=fp8,
        cuda_graph=cuda_graph,
        policy=Policy(reshard_after_forward=reshard),
        ignored=places_of(ignored, owned),
        extended=[p for p in everything if p.extension is not None],
    )
    make_float8(state)
    offer_main_grads(state)
    if in_place:
        write_grads_in_place(in_place, state)
    for tensor, full_name, _ in found:
        mark_owner(tensor, full_name)
    for m in modules:
        m.__dict__["_flatshard"] = state
        wrap_class(m, cuda_graph)
    for m in owned:
        watch_state_dicts(m, state)
    join(state, parts)
    return module


# This is the same as FSDP2's: callers see whether, and in which unit, a module was
# sharded. None: it was not.
setattr(fully_shard, "state", state_of)


def _parameter(tensor, full_name, sites, reason, place, options, mp_policy, mesh):
    """Returns the entry of one parameter in a unit. `reason`: why it is not FP8, or
    ""."""
    by_subclass = is_extended(tensor)
    parallel = None
    if is_tensor_parallel(tensor):
        parallel = TensorParallel(tensor, mesh, full_name)
    value = plain_value(tensor)
    former = plain_like(tensor, by_subclass or parallel is not None)
    as_chunks = place.dim or by_subclass or parallel is not None
    p = Parameter(
        sites,
        whole_parameter(tensor, place.dim, former=former, shape=value.shape),
        dim=place.dim,
        granularity="chunk" if as_chunks else options.granularity,
        parallel=parallel,
        trainable=tensor.requires_grad,
        apart=TRAINED if tensor.requires_grad else FROZEN,
        dtype=tensor.dtype,
        param_dtype=param_dtype_of(mp_policy, tensor, full_name),
        on_meta=tensor.is_meta,
        label=full_name,
        float8=not reason,
        why_not_float8=reason,
        hooks=hooks_of_tensor(tensor),
        former=weakref.ref(tensor),
    )
    if by_subclass:
        p.extension = Extension(p, tensor, mesh, mp_policy)
    elif options.check_same_values and mesh.size() > 1 and not tensor.is_meta:
        p.digest = digest(value)
    return p


def _move_buffers(modules, device_mesh):
    """Buffers, which are not sharded, follow the parameters to the mesh's device."""
    device = device_of(device_mesh)
    if device.type == "cpu":
        return
    for module in modules:
        buffers = buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffers[name] = buffer.to(device)
