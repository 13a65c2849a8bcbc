"""One unit: its parameters, its settings, and its core."""

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from flatshard import _C
from flatshard._fsdp.core import Core
from flatshard._fsdp.life import Life, LifeCycle
from flatshard._fsdp.options import ModelOptions, ShardOptions
from flatshard._fsdp.parameter import copy_attributes, put_hooks
from flatshard._fsdp.parameters import Parameters
from flatshard._graphs.checks import DEFAULT_WARMUP_STEPS
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import (
    even_shard,
    make_shard,
    note_cut,
    on_meta,
    parallel_shard,
    piece_of,
)
from flatshard._tensor.places import forget_unit, set_unit
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor, become
from flatshard._tensor.writes import writes
from flatshard.torch_versions import hooks_of_tensor, in_backward, parameters_of

if TYPE_CHECKING:
    from flatshard._fsdp.root import Root


@dataclass
class Policy:
    """The settings that setters of FSDPModule change."""

    # How long parameters stay unsharded.
    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_post_forward: bool = True  # reshard_after_forward was a number
    # Units to all-gather ahead. None: those that came next the last time.
    forward_prefetch: list | None = None
    backward_prefetch: list | None = None
    # How gradients are reduced.
    sync_gradients: bool = True
    all_reduce: bool = True
    divide_factor: float | None = None
    sums_only: bool = False
    reduced_hook: object = None
    # Options of the model, set on its outermost unit.
    max_input_buffers: int | None = None
    reports_nan: bool = False
    shared_streams: _C.CommStreams | None = None  # of share_comm_ctx


@dataclass
class Sharding:
    """How fully_shard was asked to shard a unit. Another core needs it again."""

    # Over which ranks. On a part of the model's mesh parameters are slices of larger
    # tensors: `slices` is how many there are, and which. None: on all of it.
    mesh: _C.Mesh
    device_mesh: object
    slices: tuple | None
    # In which form.
    strategy: str  # as the core calls it
    core_options: _C.UnitOptions
    mp_policy: object
    options: ShardOptions
    # Options of the model, by `configure`.
    model_options: ModelOptions
    copy_engines: bool
    # How its modules run: graphs replay them after these steps, or they write to main_grad.
    graph_warmup_steps: int = DEFAULT_WARMUP_STEPS
    main_grads: bool = False


class Modules(list):
    """Weak references to the modules of a unit.

    Attributes:
        running: ids of those that have yet to run in this forward, of several.
    """

    def __init__(self, modules):
        super().__init__(modules)
        self.running = set()


@dataclass(eq=False, repr=False)
class UnitState:
    """One call of fully_shard."""

    modules: Modules
    parameters: Parameters
    sharding: Sharding
    core: Core  # None while the unit is AWAY
    policy: Policy = field(default_factory=Policy)
    life: LifeCycle = field(default_factory=LifeCycle)
    # While ROOTED or TRAINED. The Root has weak references to its units.
    root: "Root | None" = None
    name: str = ""  # in the model, for messages

    @property
    def grads(self):
        return None if self.core is None else self.core.grads

    @property
    def reshards(self):
        """Returns whether the unit is resharded after its forward."""
        asked = self.policy.reshard_after_forward
        # FSDP2: the root's parameters are needed first in the backward.
        return self.core.number != 0 if asked is None else asked

    # -- parameters ----------------------------------------------------------------

    def make_shards(self):
        """Replaces the parameters in the modules by their shards."""
        for p, data in self.cut():
            self._show_new(p, data, p.trainable, p.whole)
            self.parameters.home = local_of(data).device
        for p in self.parameters.all[len(self.parameters) :]:
            p.shard = p.extension.make_shard()
            self._show(p)
        self.make_grads()
        self.watch_shards()

    def cut(self):
        """Yields each parameter with the shard that the core made of it, and brings them
        into the core's order."""
        by_tensor = {id(p.whole): p for p in self.parameters}
        numbers = range(self.core.num_parameters)
        self.parameters.own = [by_tensor[id(self.core.whole(i))] for i in numbers]
        for i, p in enumerate(self.parameters):
            p.index, p.trainable = i, self.core.trainable(i)
            data = self._wrap(p, self.core.shard(i))
            p.shown_dtype = data.dtype
            yield p, data

    def adopt(self, p, index, data):
        """Makes p, of a unit on a part of the mesh, parameter `index` of this unit. `data`
        shows it."""
        former, p.index = p.shard, index
        p.hooks = hooks_of_tensor(former)
        forget_unit(former)
        self._show_new(p, data, former.requires_grad, former)

    def _show_new(self, p, data, trainable, former):
        """Makes `data` the shard of p, with the attributes of `former`."""
        if p.extension is None:
            p.shard, p.rows = nn.Parameter(data, requires_grad=trainable), None
            if p.on_meta:
                p.rows = data
                as_chunks = self.sharding.slices is None and p.shared_by is None
                become(p.shard, on_meta(data, as_chunks))
        else:
            p.shard = data
        copy_attributes(former, p.shard)
        if p.parallel is not None:
            note_cut(p.shard, self.sharding.device_mesh.ndim - 1, p.dim)
        put_hooks(p)
        self.note_place(p)
        self._show(p)

    @staticmethod
    def _show(p):
        for module, name in p.sites:
            parameters_of(module())[name] = p.shard

    def note_place(self, p):
        set_unit(p.shard, self, p.index)

    def watch_shards(self):
        writes.add(self, [p.shard for p in self.parameters.all])

    def note_values(self, parameters=None):
        """Records that parameters, by default all, have values from now on: shards that
        showed no memory show the memory of the core."""
        chosen = self.parameters.all if parameters is None else list(parameters)
        for p in chosen:
            p.on_meta = False
            if p.rows is None:
                continue
            rows, p.rows = p.rows, None
            if rows.dtype != p.shard.dtype:  # until the core is renewed
                rows = rows.over(torch.empty_like(local_of(rows), dtype=p.shard.dtype))
            with self._moved(p):
                become(p.shard, rows)

    def note_other_values(self):
        """Records that somebody writes other values to all parameters."""
        self.note_values()
        self.parameters.forget_digests()
        writes.note_unit(self)

    def replace(self, p, tensor):
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
        with self._moved(p):
            make_shard(tensor, local, former)
            p.shard = tensor
        self.note_place(p)

    def move_extended(self, p, piece):
        """Makes `piece` the rank's part of p from now on, such as after to_empty()."""
        if piece is not local_of(p.shard):
            with self._moved(p):
                make_shard(p.shard, piece, p.shard)

    @contextlib.contextmanager
    def _moved(self, p):
        """Watches the memory that the shard of p gets inside the context."""
        writes.remove([p.shard])
        yield
        writes.add(self, [p.shard])
        writes.note_unit(self)

    def make_grads(self):
        self.core.make_grads(self.parameters.shards)

    def fits(self):
        """Returns whether the core can train the parameters as they are now."""
        return not self.misfits()

    def misfits(self):
        return self.parameters.misfits(self.life.keeps_rows)

    def unsharded(self, index):
        """Returns the tensor that modules see of parameter `index`, where the unit
        stays unsharded after its forward, else None. Unshards it; after a training
        forward it is unsharded already."""
        if self.root is None or in_backward() or self.reshards:
            return None
        self.core.unshard()
        p = self.parameters[index]
        return p.shown.tensor if p.shown else p.whole

    def show_shards(self):
        """Lets modules show the shards, as they do when no forward or backward runs.
        Frees nothing."""
        if self.life.now is not Life.AWAY:
            self.core.show_shards()

    def apply_to_core(self):
        """Passes the settings of setters to the core. A unit that is AWAY passes them to
        its next core."""
        if self.life.now is not Life.AWAY:
            self.core.apply(self.policy)

    def gather_extended(self):
        of, made = self.parameters.extended, self.sharding
        self.core.gather_extended(of, made.mesh, made.core_options)

    def mark_written(self):
        """Shards may have been written before this forward."""
        if self.parameters.writes.count:
            self.parameters.retire_formers()
        self.core.mark_written()
        for p in self.parameters.extended:
            p.extension.refresh()

    def _wrap(self, p, local):
        if p.extension is not None:
            return p.extension.make_shard() if p.shard is None else p.shard
        cuts = self.core.cuts(p.index)
        mesh = self.sharding.device_mesh
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
