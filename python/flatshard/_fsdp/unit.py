"""One unit: its parameters in the core, its shards, and its options."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import Replicate

from flatshard import _C
from flatshard._fsdp.parameter import copy_attributes, put_hooks, whole_parameter
from flatshard._graphs.checks import DEFAULT_WARMUP_STEPS
from flatshard._tensor.memory import address_of, local_of
from flatshard._tensor.meta_shards import mark_of_meta
from flatshard._tensor.places import forget_unit, set_unit
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor, become, make_sharded
from flatshard._tensor.writes import writes
from flatshard.torch_versions import (
    default_reduce_dtype,
    hooks_of_tensor,
    parameters_of,
)


@dataclass
class Policy:
    """What the setters of FSDPModule change."""

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: list | None = None
    backward_prefetch: list | None = None
    keep_post_forward: bool = True  # reshard_after_forward was a number
    sync_gradients: bool = True
    all_reduce: bool = True


@dataclass(eq=False, repr=False)
class UnitState:
    """One call of fully_shard."""

    modules: list  # weak references
    core: _C.Unit
    mesh: _C.Mesh
    device_mesh: object
    parameters: list
    mp_policy: object
    fp8: object  # Float8Policy or None
    prefetch: int | None
    copy_engines: bool
    core_options: object  # _C.UnitOptions
    cuda_graph: bool = False
    main_grads: bool = False  # modules write some of its gradients, see main_grad.py
    slots_on_demand: bool | None = None
    max_padding: float = 0.05
    graph_warmup_steps: int = DEFAULT_WARMUP_STEPS
    policy: Policy = field(default_factory=Policy)
    grads: _C.GradViews = None
    root: object = None  # Root, once known
    id: int = -1
    name: str = ""
    num_writes: int = 0  # that others made to its parameters
    num_looks: int = 0  # at their memory
    seen_writes: tuple = ()  # Writes.count, num_writes, num_looks
    check_same_values: bool = False
    seen_list_writes: int = field(default_factory=lambda: writes.lists)
    ignored: list = field(default_factory=list)  # places of ignored_params
    loads_by_assign: bool = False  # the load_state_dict that runs
    initialized: bool = True  # False: parameters that were on meta have no values
    running: set = field(default_factory=set)  # ids of a list's modules still to run
    # On a part of the model's mesh its parameters are slices of larger tensors: how
    # many there are, and which. None: on all of it.
    slices: tuple | None = None
    joined: list = field(default_factory=list)  # UnitStates whose parameters it has

    # -- parameters ----------------------------------------------------------------

    def make_shards(self):
        """Replaces the parameters in the modules by their shards."""
        for p, data in self._cut():
            self._show_new(p, data, p.trainable, p.whole)
        self.make_grads()
        self._watch_shards()

    def _cut(self):
        """Yields each parameter with the shard that the core made of it, and brings them
        into the core's order."""
        by_tensor = {id(p.whole): p for p in self.parameters}
        numbers = range(self.core.num_parameters)
        self.parameters = [by_tensor[id(self.core.whole(i))] for i in numbers]
        for i, p in enumerate(self.parameters):
            p.index, p.trainable = i, self.core.trainable(i)
            data = self._wrap(p, self.core.shard(i))
            p.shown_dtype = data.dtype
            yield p, data

    def _show_new(self, p, data, trainable, former):
        """Makes `data` the shard of p, with the attributes of `former`."""
        p.shard = nn.Parameter(data, requires_grad=trainable)
        copy_attributes(former, p.shard)
        put_hooks(p)
        set_unit(p.shard, self, p.index)
        self.show(p, p.shard)

    def take_over(self, p, index, placements, shape):
        """Makes p, of a unit on a part of the mesh, parameter `index` of this unit: a tensor
        of `shape` that is cut by `placements`."""
        former, p.index = p.shard, index
        p.hooks = hooks_of_tensor(former)
        forget_unit(former)
        data = ShardedTensor.wrap(local_of(former), self.device_mesh, placements, shape)
        self._show_new(p, data, former.requires_grad, former)

    def _watch_shards(self):
        writes.add(self, [p.shard for p in self.parameters])
        mark_of_meta(
            {address_of(p.shard) for p in self.parameters if p.on_meta},
            self,
        )

    def is_as_sharded(self):
        return all(p.is_as_sharded() for p in self.parameters)

    def shard_again(self):
        """The core groups parameters by requires_grad and dtype: makes it anew, with
        what they are now. The shards stay the same objects. Before the first forward,
        collective."""
        self._check_may_change()
        for p in self.parameters:
            if p.shard.dtype == p.shown_dtype:
                p.whole.requires_grad_(p.shard.requires_grad)
            else:
                p.whole = whole_parameter(p.shard, p.whole)
        values = [
            torch.empty_like(p.whole)
            if p.on_meta
            else p.shard.detach().full_tensor().to(p.whole.dtype)
            for p in self.parameters
        ]
        writes.remove([p.shard for p in self.parameters])
        self.core = make_core(
            self.parameters, values, self.mp_policy, self.mesh, self.core_options
        )
        for p, data in self._cut():
            become(p.shard, data)
            set_unit(p.shard, self, p.index)
        self._watch_shards()

    def _check_may_change(self):
        changed = next(p for p in self.parameters if not p.is_as_sharded())
        what, now = "requires_grad", changed.shard.requires_grad
        if changed.shard.dtype != changed.shown_dtype:
            what, now = "the dtype", changed.shard.dtype
        why = None
        if self.joined:
            why = "whose parameters rest on a part of the model's mesh"
        elif self.core.offloads:
            why = "which has CPUOffloadPolicy"
        elif what == "the dtype" and (changed.float8 or self.main_grads):
            why = "whose modules have FP8 weights or write to main_grad"
        if why is not None:
            raise NotImplementedError(
                f"{what} of parameter {changed.title} was changed to {now} after "
                f"fully_shard, which is not supported for a unit {why}: change it before "
                "fully_shard"
            )

    def forget_digests(self):
        """The values are others now."""
        for p in self.parameters:
            p.digest = None

    def make_grads(self):
        self.grads = _C.GradViews(
            self.core,
            [p.shard for p in self.parameters],
            ShardedTensor.beside,
            ShardedTensor.rows_of,
        )

    def take(self, p, tensor):
        """Makes `tensor`, a DTensor like p's shard, that shard. Collective."""
        local = local_of(p.shard)
        if tensor.dtype != p.shard.dtype:  # until shard_again
            local = torch.empty_like(local, dtype=tensor.dtype)
        if local_of(tensor).is_meta:
            p.on_meta = True
        else:
            with torch.no_grad():
                local.copy_(p.shard.rows_of(tensor))
            p.on_meta = False
        p.digest = None
        forget_unit(p.shard)
        make_sharded(tensor, local, p.shard)
        p.shard = tensor
        set_unit(tensor, self, p.index)
        writes.count += 1

    def _wrap(self, p, local):
        cuts = self.core.cuts(p.index)
        mesh = self.device_mesh
        inner = mesh.size(mesh.ndim - 1)
        if not cuts:
            placements = [Replicate()] * mesh.ndim
        else:
            pieces = self.core.shard_of_ranks(p.index)[:inner]
            outer = [Replicate()] * (mesh.ndim - 1)
            placements = [*outer, RowShard(cuts, pieces)]
        return ShardedTensor.wrap(local, mesh, placements, p.whole.shape)

    @staticmethod
    def show(p, tensor):
        for module, name in p.sites:
            parameters_of(module())[name] = tensor

    def check_initialized(self):
        for p in self.parameters:
            if p.on_meta and not self.initialized:
                raise RuntimeError(
                    f"parameter {p.names[0]} was on the meta device when it was "
                    "sharded and has no values yet: call "
                    "flatshard.reset_parameters(model), or load a checkpoint"
                )

    def check_trainable(self):
        for p in self.parameters:
            if p.shard.requires_grad != p.trainable:
                raise RuntimeError(
                    f"requires_grad of parameter {p.title} of unit {self.name} "
                    "was changed after fully_shard, which groups parameters by it: "
                    "freeze or unfreeze before fully_shard"
                )


def make_core(parameters, values, mp_policy, mesh, options):
    """The core's unit of `parameters`.

    Args:
        values: of each, whole.
        mesh: _C.Mesh of the model.
        options: _C.UnitOptions.
    """
    members = []
    for p, value in zip(parameters, values):
        reduce_dtype = mp_policy.reduce_dtype or default_reduce_dtype(
            mp_policy.param_dtype, value.dtype
        )
        members.append((p.label, p.whole, value, reduce_dtype, p.float8))
    return _C.Unit(members=members, mesh=mesh, options=options)
