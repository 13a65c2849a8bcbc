"""One unit: its parameters in the core, its shards, and its options."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from flatshard import _C
from flatshard._fsdp.former import retire
from flatshard._fsdp.life import Life, LifeCycle
from flatshard._fsdp.parameter import copy_attributes, put_hooks
from flatshard._graphs.checks import DEFAULT_WARMUP_STEPS
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import (
    beside,
    even_shard,
    make_shard,
    note_cut,
    on_meta,
    parallel_shard,
    piece_of,
    rows_of,
)
from flatshard._tensor.places import forget_unit, set_unit
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor, become
from flatshard._tensor.writes import writes
from flatshard.torch_versions import (
    grad_dtype_of,
    hooks_of_tensor,
    in_backward,
    parameters_of,
)

if TYPE_CHECKING:
    from flatshard._fsdp.root import Root


@dataclass
class Policy:
    """The settings that setters of FSDPModule change."""

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    forward_prefetch: list | None = None
    backward_prefetch: list | None = None
    keep_post_forward: bool = True  # reshard_after_forward was a number
    sync_gradients: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    sums_only: bool = False
    reduced_hook: object = None
    # Set on the root, for the whole model.
    max_input_buffers: int | None = None
    reports_nan: bool = False


@dataclass(eq=False, repr=False)
class UnitState:
    """One call of fully_shard."""

    modules: list  # weak references
    core: _C.Unit  # None while it is AWAY
    mesh: _C.Mesh
    device_mesh: object
    parameters: list
    mp_policy: object
    fp8: object  # Float8Policy or None
    model_options: object  # ModelOptions, or None where none were given
    asked_copy_engines: str
    copy_engines: bool
    core_options: object  # _C.UnitOptions
    strategy: str  # as the core calls it
    cuda_graph: bool = False
    main_grads: bool = False  # modules write some of its gradients, see main_grad.py
    graph_warmup_steps: int = DEFAULT_WARMUP_STEPS
    policy: Policy = field(default_factory=Policy)
    grads: _C.GradViews | None = None
    life: LifeCycle = field(default_factory=LifeCycle)
    root: "Root | None" = None  # while it is ROOTED or TRAINED
    id: int = -1
    name: str = ""
    num_writes: int = 0  # that others made to its parameters
    num_looks: int = 0  # at their memory
    seen_writes: tuple = ()  # Writes.count, num_writes, num_looks
    check_same_values: bool = False
    seen_list_writes: int = field(default_factory=lambda: writes.lists)
    ignored: list = field(default_factory=list)  # places of ignored_params
    loads_by_assign: bool = False  # the load_state_dict that runs
    shared_streams: _C.CommStreams | None = None  # of share_comm_ctx, for the root
    home: torch.device | None = None  # where the core has its shards
    running: set = field(default_factory=set)  # ids of a list's modules still to run
    # On a part of the model's mesh its parameters are slices of larger tensors: how
    # many there are, and which. None: on all of it.
    slices: tuple | None = None
    # Parameters of subclasses; those that are trained are in `parameters`, too.
    extended: list = field(default_factory=list)
    gathers_extended: object = None  # the core that gathers them
    joined: list = field(default_factory=list)  # UnitStates whose parameters it has
    has_formers: bool = True  # tensors from before fully_shard may still be read

    # -- parameters ----------------------------------------------------------------

    @property
    def all_parameters(self):
        """Returns all parameters, including those without a place in the core."""
        return self.parameters + [p for p in self.extended if p.index < 0]

    def make_shards(self):
        """Replaces the parameters in the modules by their shards."""
        for p, data in self.cut():
            self._show_new(p, data, p.trainable, p.whole)
            self.home = local_of(data).device
        for p in self.all_parameters[len(self.parameters) :]:
            p.shard = p.extension.make_shard()
            self.show(p, p.shard)
        self.make_grads()
        self.watch_shards()

    def cut(self):
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
        if p.extension is None:
            p.shard, p.rows = nn.Parameter(data, requires_grad=trainable), None
            if p.on_meta:
                p.rows = data
                as_chunks = self.slices is None and p.shared_by is None
                become(p.shard, on_meta(data, as_chunks))
        else:
            p.shard = data
        copy_attributes(former, p.shard)
        if p.parallel is not None:
            note_cut(p.shard, self.device_mesh.ndim - 1, p.dim)
        put_hooks(p)
        self.note_place(p)
        self.show(p, p.shard)

    def note_place(self, p):
        set_unit(p.shard, self, p.index)

    def take_over(self, p, index, data):
        """Makes p, of a unit on a part of the mesh, parameter `index` of this unit, which
        `data` shows."""
        former, p.index = p.shard, index
        p.hooks = hooks_of_tensor(former)
        forget_unit(former)
        self._show_new(p, data, former.requires_grad, former)

    def watch_shards(self):
        writes.add(self, [p.shard for p in self.all_parameters])

    def is_as_sharded(self):
        return all(p.is_as_sharded() for p in self.parameters)

    def fits(self):
        """Returns whether the core can train the parameters as they are now."""
        return not self.misfits()

    def misfits(self):
        """Returns the parameters that need another core. Until the first forward with
        gradients these include the ones that were frozen."""
        if self.life.keeps_rows:
            return [p for p in self.parameters if not p.fits()]
        return [p for p in self.parameters if not p.is_as_sharded()]

    def can_evaluate(self):
        """A forward without gradients does not ask which parameters are trained: peft's
        disable_adapter() freezes adapters while it lasts."""
        return all(p.has_dtype() for p in self.parameters)

    def check_grad_dtypes(self):
        for p in self.parameters:
            wanted = grad_dtype_of(p.shard)
            if wanted != p.shard.dtype:
                raise NotImplementedError(
                    f"grad_dtype {wanted} of parameter {p.names[0]} is not supported: its "
                    f"gradient has its own dtype, {p.shard.dtype}. For another dtype on "
                    "the wire give MixedPrecisionPolicy(reduce_dtype=...)"
                )

    def follow_requires_grad(self):
        """The whole parameters require gradients where the shards do."""
        for p in self.extended:
            if p.shard.requires_grad != p.extension.requires_grad:
                raise NotImplementedError(
                    f"requires_grad of parameter {p.names[0]}, a tensor of a subclass, was "
                    "changed after fully_shard, which is not supported; change it before"
                )
        for p in self.parameters:
            # A transform of torch.func refuses the call.
            if p.whole.requires_grad != p.shard.requires_grad:
                p.whole.requires_grad_(p.shard.requires_grad)

    def apply_to_core(self):
        """Passes the settings of setters to the core. Without a core they wait for the
        next one."""
        if self.life.now is Life.AWAY:
            return
        if self.policy.divide_factor is not None:
            self.core.set_divisor(self.policy.divide_factor)
        self.core.set_sums_only(self.policy.sums_only)
        self.core.set_reduced_hook(self.policy.reduced_hook)

    def forget_digests(self):
        """The values are others now."""
        for p in self.parameters:
            p.digest = None

    def make_grads(self):
        self.grads = _C.GradViews(
            self.core,
            [p.shard for p in self.parameters],
            beside,
            rows_of,
        )

    def take(self, p, tensor):
        """Makes `tensor`, a DTensor like p's shard, that shard. Collective."""
        former = p.stored_shard
        local = local_of(former)
        if tensor.dtype != former.dtype:  # until the core is renewed
            local = torch.empty_like(local, dtype=tensor.dtype)
        with torch.no_grad():
            local.copy_(piece_of(former, tensor))
        p.on_meta = False
        p.rows = p.digest = None
        forget_unit(p.shard)
        writes.remove([p.shard])
        make_shard(tensor, local, former)
        p.shard = tensor
        self.note_place(p)
        writes.add(self, [p.shard])
        writes.note_unit(self)

    def unsharded(self, index):
        """Returns the tensor that modules see of parameter `index`, where the unit
        stays unsharded after its forward, else None. Unshards it, which is nothing to
        do after a training forward."""
        if self.root is None or in_backward() or self.root.reshards(self):
            return None
        self.root.core.unshard(self.id, True)
        p = self.parameters[index]
        return p.shown.tensor if p.shown else p.whole

    def gather_extended(self):
        """The core gathers the tensors that parameters of subclasses choose."""
        if not self.extended or self.gathers_extended is self.core:
            return
        self.gathers_extended = self.core
        members = [m for p in self.extended for m in p.extension.members()]
        first = self.core.num_parameters
        self.core.join(
            _C.Unit(members=members, mesh=self.mesh, options=self.core_options)
        )
        for p in self.extended:
            trained = p.index >= 0
            first = p.extension.own(self.core, first, p.whole if trained else None)
            if not trained:
                p.whole = p.extension.hidden[0]

    def move_extended(self, p, piece):
        """`piece` is the rank's part of p from now on, such as of to_empty."""
        if piece is local_of(p.shard):
            return
        writes.remove([p.shard])
        make_shard(p.shard, piece, p.shard)
        writes.add(self, [p.shard])
        writes.note_unit(self)

    def core_names(self):
        """Returns the names of the core's parameters, by their numbers."""
        hidden = self.core.num_parameters - len(self.parameters)
        return [p.names for p in self.parameters] + [
            [f"gathered {i}"] for i in range(hidden)
        ]

    def retire_formers(self):
        """The values differ from those that fully_shard was given, or are to be
        trained."""
        if self.has_formers:
            self.has_formers = False
            for p in self.all_parameters:
                retire(p)

    def retire_trained_formers(self):
        for p in self.all_parameters:
            if p.shard.requires_grad:
                retire(p)

    def mark_written(self):
        """Shards may have been written before this forward."""
        if self.num_writes:
            self.retire_formers()
        self.core.mark_written()
        for p in self.extended:
            p.extension.refresh()

    def _wrap(self, p, local):
        if p.extension is not None:
            return p.extension.make_shard() if p.shard is None else p.shard
        cuts = self.core.cuts(p.index)
        mesh = self.device_mesh
        inner = mesh.size(mesh.ndim - 1)
        if p.parallel is not None:
            placements = p.parallel.placements(mesh, p.dim, is_cut=bool(cuts))
            return parallel_shard(local, p.parallel, placements, mesh.ndim - 1, p.dim)
        if p.dim and cuts:
            outer = [Replicate()] * (mesh.ndim - 1)
            return even_shard(local, mesh, [*outer, Shard(p.dim)], p.whole.shape)
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

    def show_shards(self):
        """Modules show the shards, as outside of the time from a forward to its backward.
        Nothing is released."""
        if self.root is not None:
            self.root.core.show_shards(self.id)

    def note_values(self, parameters=None):
        """Parameters, by default all, have values from now on: shards that showed no
        memory show the core's."""
        for p in self.all_parameters if parameters is None else list(parameters):
            p.on_meta = False
            if p.rows is None:
                continue
            rows, p.rows = p.rows, None
            writes.remove([p.shard])
            if rows.dtype != p.shard.dtype:  # until the core is renewed
                rows = rows.over(torch.empty_like(local_of(rows), dtype=p.shard.dtype))
            become(p.shard, rows)
            writes.add(self, [p.shard])
            writes.note_unit(self)

    def check_initialized(self):
        empty = [p for p in self.all_parameters if p.on_meta]
        found = [p.names[0] if p.names else p.label for p in empty]
        if found:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, "
                f"but the following were still on meta device: {found}. Call "
                f"model.to_empty(device='{self.home.type}'), and then flatshard."
                "reset_parameters(model), or load a checkpoint"
            )
