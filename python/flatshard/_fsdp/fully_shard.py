"""`fully_shard`: shards a module's parameters, gradients and optimizer state."""

import weakref

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _C
from flatshard._fsdp.arguments import (
    check_cut_dims,
    check_extended,
    check_own_mesh,
    check_slices,
    cut_dim,
    ids_of,
    mesh_to_show,
    mixed_precision,
    modules_of,
    offloads,
    param_dtype_of,
    placement_of,
    places_of,
    refuse_unsupported,
    strategy_name,
    uses_copy_engines,
)
from flatshard._fsdp.collect import collect_parameters, modules_of_unit
from flatshard._fsdp.extension import Extension, may_follow_protocol
from flatshard._fsdp.forward import state_of
from flatshard._fsdp.joined import find_parts, join
from flatshard._fsdp.linear import write_grads_in_place
from flatshard._fsdp.main_grad import offer_main_grads
from flatshard._fsdp.parameter import Parameter, mark_owner, plain_like, whole_parameter
from flatshard._fsdp.policies import MixedPrecisionPolicy, OffloadPolicy
from flatshard._fsdp.replaced import watch_loads
from flatshard._fsdp.unit import Policy, UnitState, make_core
from flatshard._fsdp.wrapping import wrap_class
from flatshard._graphs.checks import check_cuda_graph
from flatshard._tensor.mesh import default_device_mesh, device_of, model_mesh, slices_of
from flatshard._tensor.same_values import digest
from flatshard.float8.linear import make_float8
from flatshard.float8.policy import check_policy, choose_weights
from flatshard.torch_versions import buffers_of, hooks_of_tensor


def fully_shard(
    module,
    *,
    mesh=None,
    reshard_after_forward=None,
    shard_placement_fn=None,
    mp_policy=MixedPrecisionPolicy(),
    offload_policy=OffloadPolicy(),
    ignored_params=None,
    strategy="zero3",
    outer="replicate",
    granularity="dim0",
    prefetch=None,
    max_padding=0.05,
    grads_in_place=False,
    copy_engines="none",
    cuda_graph=False,
    slots_on_demand=None,
    check_same_values=True,
    fp8=None,
    dp_mesh_dims=None,
):
    """Shards the parameters of `module` that no inner call has sharded yet.

    Call it on the blocks first and on the whole model last; each call makes one
    unit, whose parameters are gathered together. Optimizers are made afterwards.
    Collective over the ranks of the mesh.

    Args:
        module: an nn.Module, or a list of modules that form one unit. In a forward it
            is whole from the first of them that runs until each has run, in any order
            and as often as they like; when one does not run, until the backward.
        mesh: DeviceMesh of one dimension, or two: replicas over the first, shards
            over the second (HSDP). None: all ranks. A dimension that was flattened
            together with others into the enclosing module's mesh: this module's
            parameters are slices, see below.
        reshard_after_forward: False keeps parameters whole from forward to
            backward. None: True, but False for the root. A number of ranks to
            reshard to is refused.
        shard_placement_fn: function of a parameter that returns None or Shard(dim), the
            dimension along which it is cut. Other dimensions than the first have to be
            multiples of the ranks. Such a parameter is stored with that dimension first,
            so the unsharded one is not contiguous. With a mesh, as (Shard(0), mesh) or
            FSDP2's ShardPlacementResult, it rests on that one, a part of `mesh`: see
            experts below.
        mp_policy: MixedPrecisionPolicy, of this package or FSDP2's.
        offload_policy: OffloadPolicy(): nothing; CPUOffloadPolicy(): sharded
            parameters, their gradients and optimizer state rest on the CPU. Of this
            package or FSDP2's.
        ignored_params: set of parameters to leave as they are on every rank.
        strategy: "zero0" (no_shard), "zero1" (optim), "zero2" (optim_grads) or "zero3"
            (optim_grads_params); both names mean the same.
        outer: what the outer of two mesh dimensions does: "replicate", or "optim"
            with ZeRO-3: the optimizer state is sharded over it, too (HFSDP), and
            parameters are DTensors over the flattened mesh.
        granularity: "dim0": parameters are cut between any two slices along their
            first dimension, which is what a DTensor can say; "chunk": as torch.chunk
            cuts, so each rank has the rows that it has with FSDP2, for programs that
            read the shapes of to_local(). The unit is then gathered by one collective
            for each parameter; "tensor": never cut, a rank holds it or not.
        prefetch: how many units are all-gathered ahead of the one that computes. None:
            1. An option of the outermost module: an inner one accepts its value alone.
        max_padding: the first forward warns of more padding than this, as a fraction
            of the model's elements, unless it is less than 64 MiB a rank. The largest
            of all units counts.
        grads_in_place: the backward of each nn.Linear (not of subclasses) writes
            gradients into the memory that is reduced, so they need no tensors of
            their own and no copy. Compiled code and autocast go the usual way.
        copy_engines: "all": gathers and reductions are copies between the ranks'
            memory, which on GPUs take no SM, instead of collectives. Keeps the shard
            of the compute weights and takes 256 MiB; all ranks on one host. "auto":
            where NVLink joins all GPUs of the model's mesh. One for all units of a model.
        cuda_graph: after three steps the forward of this module, with its backward, is
            captured as CUDA graphs and replayed, with the same bits. For blocks: modules
            that hold no other unit, take and return tensors in any nesting, and do the
            same work in each step. What cannot be replayed runs eagerly, see
            cuda_graph_stats. GPUs only.
        slots_on_demand: True: whole parameters and gradients are allocated when a unit
            needs them. False: they lie in one arena that is there all the time, at the
            same addresses in every step, as torch.compile(mode="reduce-overhead") wants
            them. None: True, but False where a unit has cuda_graph=True. An option of
            the outermost module: an inner one accepts its value alone.
        check_same_values: the first forward compares a digest of what the ranks of the
            mesh had here, but for parameters on the meta device or written since, and
            raises RuntimeError where they differ. False: they may, on purpose.
        fp8: Float8Policy: weights of the nn.Linear that this call shards (not of
            subclasses) are gathered and multiplied as FP8, beside mp_policy's
            param_dtype=torch.bfloat16. Other code must not read them in the forward;
            flatshard.float8.describe says which they are. None: none.
        dp_mesh_dims: None; FSDP2's, for parameters that are DTensors already, is
            refused.

    Experts: each rank has some of a layer's. With `edp` and `ep` of one mesh, the other
    parameters rest on both, mesh["edp", "ep"]._flatten("dp"), and the experts on "edp":

        fully_shard(block.experts, mesh=mesh["edp"])
        fully_shard(block, mesh=mesh["dp"])

    A parameter of `experts`, [n, ...], is then slice number mesh.get_local_rank("ep") of
    [ep * n, ...], which is what parameters(), state dicts and checkpoints show. It
    joins the block's unit, with a gather and a reduction of its own over "edp". Its
    gradients are divided by all ranks of "dp", as each saw the tokens of "ep" ranks.
    A shard_placement_fn of one call for the block says the same.

    Returns:
        `module`, which is an FSDPModule from now on.

    Raises:
        ValueError: an argument that cannot work, naming it.
        NotImplementedError: one that is not supported, naming it.
    """
    modules = modules_of(module)
    if not isinstance(cuda_graph, bool):
        raise ValueError(f"cuda_graph: expected True or False, got {cuda_graph!r}")
    if slots_on_demand is not None and not isinstance(slots_on_demand, bool):
        raise ValueError(
            f"slots_on_demand: expected True, False or None, got {slots_on_demand!r}"
        )
    if not max_padding >= 0:
        raise ValueError(f"max_padding: expected a number >= 0, got {max_padding!r}")
    device_mesh = default_device_mesh() if mesh is None else mesh
    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {mesh!r}")
    name = strategy_name(strategy, outer, device_mesh)
    shown_mesh = mesh_to_show(outer, device_mesh)
    mp_policy = mixed_precision(mp_policy)
    check_policy(fp8)
    if fp8 is not None and getattr(mp_policy, "param_dtype_override_fn", None):
        raise NotImplementedError(
            "mp_policy: param_dtype_override_fn is not supported with fp8; say by "
            "Float8Policy's module_filter_fn which weights are FP8"
        )
    offload = offloads(offload_policy)
    refuse_unsupported(reshard_after_forward)
    if cuda_graph:
        check_cuda_graph(modules, device_mesh, offload)
    if dp_mesh_dims is not None:
        raise NotImplementedError(
            "dp_mesh_dims is not supported: parameters that are DTensors already are "
            "not; pass the mesh of the data-parallel ranks as mesh"
        )
    if granularity not in ("dim0", "chunk", "tensor"):
        raise ValueError(
            "granularity: expected 'dim0', 'chunk' or 'tensor', which DTensors can say, "
            f"got {granularity!r}"
        )
    if granularity == "chunk" and fp8 is not None:
        raise NotImplementedError(
            "granularity: 'chunk' is not supported with fp8, whose scales say where a "
            "weight may be cut; leave one of them out"
        )

    core, whole_mesh = model_mesh(device_mesh)
    slices = slices_of(core, whole_mesh)
    if slices is not None:
        check_slices(fp8=fp8, cuda_graph=cuda_graph, grads_in_place=grads_in_place)
    copy_engines = uses_copy_engines(copy_engines, whole_mesh)
    parts = find_parts(modules, core, offload, copy_engines)
    ignored = ids_of(ignored_params)
    owned = modules_of_unit(modules, lambda m: state_of(m) is not None)
    found = collect_parameters(modules, owned, ignored)
    placements = [
        placement_of(shard_placement_fn, tensor, full_name, device_mesh)
        for tensor, full_name, _ in found
    ]
    dims = [
        cut_dim(placement, tensor, full_name, device_mesh)
        for (placement, _), (tensor, full_name, _) in zip(placements, found)
    ]
    own_meshes = any(own_mesh is not None for _, own_mesh in placements)
    check_cut_dims(
        dims,
        fp8=fp8,
        outer=outer == "optim",
        mesh=slices is not None or own_meshes,
    )
    if own_meshes:
        check_slices(fp8=fp8, cuda_graph=cuda_graph, grads_in_place=grads_in_place)
    if name == "zero0" or device_mesh.size() == 1:
        dims = [0] * len(dims)  # nothing is cut
    extended = [
        type(tensor) is not nn.Parameter and may_follow_protocol(tensor)
        for tensor, _, _ in found
    ]
    if any(extended):
        check_extended(
            strategy=name not in ("zero3", "hsdp"),
            dims=any(dims),
            fp8=fp8,
            offload_policy=offload,
            cuda_graph=cuda_graph,
            mesh=slices is not None or own_meshes,
        )
    reasons = choose_weights(fp8, found, mp_policy.param_dtype, device_of(device_mesh))
    _move_buffers(owned, device_mesh)

    parameters = []
    for (tensor, full_name, sites), reason, dim, by_subclass in zip(
        found, reasons, dims, extended
    ):
        p = Parameter(
            sites,
            whole_parameter(tensor, dim, former=plain_like(tensor, by_subclass)),
            dim=dim,
            granularity="chunk" if dim or by_subclass else granularity,
            trainable=tensor.requires_grad,
            apart=int(not tensor.requires_grad),
            dtype=tensor.dtype,
            param_dtype=param_dtype_of(mp_policy, tensor, full_name),
            on_meta=tensor.is_meta,
            label=full_name,
            float8=not reason,
            why_not_float8=reason,
            hooks=hooks_of_tensor(tensor),
        )
        if by_subclass:
            p.extension = Extension(p, tensor, device_mesh, mp_policy)
        elif check_same_values and device_mesh.size() > 1 and not tensor.is_meta:
            p.digest = digest(tensor)
        parameters.append(p)

    def options_on(part, slices):
        return _C.UnitOptions(
            strategy=name,
            offload=offload,
            pin_memory=offload and offload_policy.pin_memory,
            # A graph writes them where they are reduced.
            grads_in_place=grads_in_place or cuda_graph,
            copy_engines=copy_engines,
            float8=fp8.core() if fp8 else None,
            part=None if part is whole_mesh else part,
            slices=slices or (1, 0),
        )

    options = options_on(core, slices)
    values = {
        id(p): p.stored(p.whole if p.extension else t.detach())
        for p, (t, _, _) in zip(parameters, found)
    }
    everything = parameters
    for own_mesh in dict.fromkeys(m for _, m in placements if m is not None):
        members = [p for p, (_, m) in zip(everything, placements) if m == own_mesh]
        part, whole = model_mesh(own_mesh)
        own_slices = slices_of(part, whole)
        check_own_mesh(members, own_mesh, device_mesh, whole is core and own_slices)
        own_options = options_on(part, own_slices)
        of_members = [values[id(p)] for p in members]
        parts.append(
            UnitState(
                modules=[],
                core=make_core(members, of_members, mp_policy, whole, own_options),
                core_options=own_options,
                mesh=part,
                device_mesh=own_mesh,
                parameters=members,
                mp_policy=mp_policy,
                fp8=None,
                prefetch=None,
                copy_engines=copy_engines,
                check_same_values=check_same_values,
                slices=own_slices,
            )
        )
        parts[-1].make_shards()
    parameters = [
        p
        for p, (_, own_mesh) in zip(everything, placements)
        if own_mesh is None and (p.trainable or p.extension is None)
    ]
    values = [values[id(p)] for p in parameters]
    state = UnitState(
        modules=[weakref.ref(m) for m in modules],
        core=make_core(parameters, values, mp_policy, whole_mesh, options),
        core_options=options,
        mesh=core,
        device_mesh=shown_mesh,
        parameters=parameters,
        mp_policy=mp_policy,
        fp8=fp8,
        prefetch=prefetch,
        copy_engines=copy_engines,
        cuda_graph=cuda_graph,
        slots_on_demand=slots_on_demand,
        max_padding=max_padding,
        policy=Policy(reshard_after_forward=reshard_after_forward),
        check_same_values=check_same_values,
        ignored=places_of(ignored, owned),
        initialized=not any(p.on_meta for p in everything),
        extended=[p for p in everything if p.extension is not None],
        slices=slices,
    )
    state.make_shards()
    make_float8(state)
    offer_main_grads(state)
    if grads_in_place:
        write_grads_in_place(owned, state)
    for tensor, full_name, _ in found:
        mark_owner(tensor, full_name)
    for m in modules:
        m.__dict__["_flatshard"] = state
        wrap_class(m, cuda_graph)
    for m in owned:
        watch_loads(m, state)
    join(state, parts)
    return module


def _move_buffers(modules, device_mesh):
    """Buffers, which stay whole, follow the parameters to the mesh's device."""
    device = device_of(device_mesh)
    if device.type == "cpu":
        return
    for module in modules:
        buffers = buffers_of(module)
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffers[name] = buffer.to(device)
