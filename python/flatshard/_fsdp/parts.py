"""Units on a part of the model's mesh: they join the unit around them.

Experts are sharded over fewer ranks than the block that they belong to, and other ranks
have other experts. The block stays one unit. It all-gathers and reduces them together with
its own parameters. `parameters()` shows the tensor of all experts, sharded over the block's
mesh, and with tensor parallelism of experts over that dimension, too.
"""

import functools

from torch.distributed.tensor import Replicate

from flatshard._fsdp.casts import call_cast
from flatshard._fsdp.module import FSDPModule, class_before
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import parallel_shard
from flatshard._tensor.places import set_state, units_in
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard._tensor.writes import writes


def find_parts(modules, core, offload, copy_engines):
    """Returns the units inside `modules` whose mesh is a part of `core`.

    Raises:
        ValueError: one that cannot join.
    """
    found = [u for u in units_in(*modules) if _is_on_part(u.sharding, core)]
    for unit in found:
        kind = type(unit.modules[0]()).__name__
        mesh, slices = unit.sharding.mesh, unit.sharding.slices
        if mesh is core:
            raise ValueError(
                f"mesh: {kind} inside and this module are on {core}. It was flattened "
                "together with other dimensions, so their ranks have different "
                "experts. Give this module the flattened mesh, or, if these are not "
                "experts, flatten after the last fully_shard"
            )
        number = core.size // mesh.size
        if not mesh.is_part_of(core) or number != slices[0]:
            raise ValueError(
                f"mesh: {kind} inside is on {mesh}, this module on {core}: "
                "expected a mesh that the inner one is a part of"
            )
        unit.life.check("join", kind=kind)
        if unit.sharding.main_grads:
            raise NotImplementedError(
                f"modules that write gradients to main_grad are not supported on a "
                f"part of the mesh, as {kind} has them; leave out their option "
                "(fuse_wgrad_accumulation)"
            )
        for option, inner_has, outer_has in (
            ("offload_policy", unit.core.offloads, offload),
            ("copy_engines", unit.sharding.copy_engines, copy_engines),
        ):
            if inner_has != outer_has:
                raise ValueError(
                    f"{option}: {kind}, on a part of the mesh, and this module "
                    "differ; choose one for both"
                )
    return found


def _is_on_part(sharding, core):
    """Returns whether a unit is on a part of the mesh `core`. It is on the same mesh where
    the dimensions that were flattened together with its own have one rank."""
    is_same = sharding.mesh is core and sharding.slices == (1, 0)
    return sharding.slices is not None and not is_same


def join(state, parts):
    """Appends the parameters of `parts` to the parameters of `state`."""
    for part in parts:
        begin = state.core.num_parameters
        shards = [_shard(state, part, p) for p in part.parameters]
        state.core.join(part.core)
        writes.remove(part.parameters.shards)
        for p, data in zip(part.parameters, shards):
            p.shared_by = part.sharding.device_mesh
            state.adopt(p, begin + p.index, data)
        writes.add(state, part.parameters.shards)
        state.parameters.own += part.parameters
        state.parameters.ignored += part.parameters.ignored
        state.parameters.joined.append(part)
        part.life.move("join")
        for reference in part.modules:
            module = reference()
            set_state(module, state)
            module.__dict__["_flatshard_policy"] = part.sharding.mp_policy
            module.__class__ = _joined_class(type(module))
    if parts:
        state.make_grads()


def _shard(state, part, p):
    """Returns the object that shows a parameter of `part`, a slice, as part of the
    full tensor."""
    local = local_of(p.stored_shard)
    if p.parallel is None:
        mesh = state.sharding.device_mesh
        placements, shape = _placements(part, p, mesh)
        return ShardedTensor.wrap(local, mesh, placements, shape)
    edp = part.sharding.device_mesh
    is_cut = bool(part.core.cuts(p.index))
    p.parallel.become_slice(edp, part.sharding.mesh, state.sharding.mesh)
    placements = p.parallel.placements(edp, p.dim, is_cut)
    return parallel_shard(local, p.parallel, placements, edp.ndim - 1, p.dim)


def _placements(part, p, mesh):
    """Returns placements on `mesh` and the full shape of a parameter that is a slice."""
    number, _ = part.sharding.slices
    rows = p.whole.shape[0]
    pieces = part.core.cuts(p.index) or [0, rows]
    edp = part.sharding.device_mesh
    holders = edp.size(edp.ndim - 1)  # ranks that share a slice, of one replica
    if len(pieces) == 2 and holders > 1:
        raise NotImplementedError(
            f"strategy: parameter {p.title} of a module on a part of the mesh is "
            f"replicated on {holders} ranks. This is not supported; choose zero1, zero2 "
            "or zero3 for it"
        )
    order = part.core.shard_of_ranks(p.index)[:holders]
    cuts, of_ranks = [0], []
    for which in range(number):
        cuts += [which * rows + end for end in pieces[1:]]
    # Ranks of a slice are `number` apart: "edp" is outside "ep".
    for rank in range(number * holders):
        of_ranks.append((rank % number) * holders + order[rank // number])
    shape = (number * rows, *p.whole.shape[1:])
    return [Replicate()] * (mesh.ndim - 1) + [RowShard(cuts, of_ranks)], shape


class _Joined:
    """The state of a module whose parameters the unit around it all-gathers."""

    def __call__(self, *args, **kwargs):
        call = super(FSDPModule, self).__call__
        return call_cast(self.__dict__["_flatshard_policy"], call, args, kwargs)

    def set_gradient_divide_factor(self, factor):
        raise NotImplementedError(
            "set_gradient_divide_factor is not supported for a module that joined the "
            "unit around it; call it on that unit, its factor applies to both"
        )


@functools.lru_cache(maxsize=None)
def _joined_class(cls):
    own = class_before(cls)
    members = {"__module__": own.__module__}
    return type(f"FSDP{own.__name__}", (_Joined, FSDPModule, own), members)
