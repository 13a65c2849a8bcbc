"""A tree of units and the core's Runtime that serves it."""

import warnings
import weakref

import torch

from flatshard import _C
from flatshard._fsdp.graphs import Graphs
from flatshard._fsdp.grid import Ranks
from flatshard._fsdp.life import Life, LifeCycle
from flatshard._fsdp.opaque_outputs import look_inside
from flatshard._fsdp.parameter import note_whole
from flatshard._fsdp.passes import Passes
from flatshard._fsdp.renewal import check_is_home, check_may_renew, renew, why_fixed
from flatshard._fsdp.replacements import (
    follow_modules,
    refuse_exchanged,
    refuse_replaced,
)
from flatshard._fsdp.seen_writes import SeenWrites
from flatshard._fsdp.trace import Trace
from flatshard._fsdp.tree import Tree, check_units, names_of, walk
from flatshard.torch_versions import never_compiled, parameters_of, plain_attributes


class Stale(Exception):
    """A forward starts, and parameters were changed so that the core has to be another
    one. Not for users: run_forward renews the root and starts again."""


class Root:
    """Made when the outermost unit runs for the first time: only then are the units
    below it and their names known.

    Attributes:
        life: ROOTED, TRAINED or OUTDATED.
        tree: the outermost module and the units.
        ranks: those that have the model.
        graphs, passes, trace: see there.
        seen_writes: reports writes of others to the core.
        runtime: _C.Runtime.
    """

    def __init__(self, module, state):
        units, parents, module_names = walk(module)
        for unit in units:
            if unit.life.now in (Life.OUTDATED, Life.AWAY):
                check_is_home(unit)
                check_may_renew(unit)
                renew(unit)
        check_units(units, parents, state)
        follow_modules(units, module_names)
        options = state.sharding.model_options
        _warn_of_padding(units, state.sharding.device_mesh, options.max_padding)
        tree = []
        for unit, parent in zip(units, parents):
            places = _place(unit, module_names)
            tree.append(_C.TreeUnit(unit.core, parent, places, unit.core.grads))
        # The units refer to this object. They are freed with their modules.
        self.life = LifeCycle(Life.ROOTED)
        self.ranks = Ranks(state.sharding.mesh, state.sharding.device_mesh)
        self.graphs = Graphs(units, options.buffers_on_demand)
        refuse_exchanged(module)
        self.runtime = self._make_runtime(state, tree, options)
        self.graphs.begin(self.runtime)
        self.passes = Passes(self.runtime, self.graphs.enabled)
        self.trace = Trace(self.runtime, units)
        self.seen_writes = SeenWrites()
        self.tree = Tree(module, units)
        for number, unit in enumerate(units):
            unit.life.move("root", unit.name)
            unit.root = self
            unit.core.begin(self.runtime, number)
            # Its core stays, so a parameter that is frozen keeps its place.
            if self.graphs.enabled or any(why_fixed(unit, p) for p in unit.parameters):
                unit.life.move("train", unit.name)
        for unit in units:
            self.apply_policy(unit)
        self._apply_limits(state.policy)

    def _make_runtime(self, state, tree, options):
        # The core would keep a bound method, and with it this object, forever.
        me = weakref.ref(self)
        return _C.Runtime(
            self.ranks.mesh,
            tree,
            _C.Callbacks(
                before_forward=lambda: me()._before_forward(),
                before_backward=lambda: me()._before_backward(),
                whole_written=lambda number, whole: me()._whole_written(number, whole),
                look_inside=lambda *output: look_inside(me().units, *output),
            ),
            _C.RuntimeOptions(
                copy_engines=state.sharding.copy_engines,
                slots_on_demand=self.graphs.buffers_on_demand,
                shared_streams=state.policy.shared_streams,
                trace=True,
                graphs=self.graphs.options(),
                **options.core(),
            ),
        )

    @property
    def units(self):
        return self.tree.units

    def checkpoint_mesh(self):
        """Returns the core's mesh over all ranks that have parts of the model.
        Collective."""
        return self.ranks.for_checkpoints(self.units)

    # -- options -----------------------------------------------------------------

    def apply_policy(self, unit):
        policy, fp8 = unit.policy, unit.sharding.options.fp8
        ids = [
            None if units is None else [u.core.number for u in units]
            for units in (policy.forward_prefetch, policy.backward_prefetch)
        ]
        # As with FSDP2, parameters() are the unsharded ones until the backward. This is
        # not so where these have no values of their own, or are not leaves.
        special = fp8 is not None or unit.parameters.extended or self.graphs.enabled
        unit.core.set_policy(
            _C.UnitPolicy(
                reshard_after_forward=unit.reshards,
                reshard_after_backward=policy.reshard_after_backward,
                unshard_in_backward=policy.unshard_in_backward,
                forward_prefetch=ids[0],
                backward_prefetch=ids[1],
                keep_backward_planes=fp8 is not None and fp8.keep_column_plane,
                keep_post_forward=policy.keep_post_forward,
                sync_gradients=policy.sync_gradients,
                all_reduce=policy.all_reduce,
            ),
            keeps=not (unit.reshards or special),
        )

    def _apply_limits(self, policy):
        """Applies the settings of the full model from the root's setters."""
        if policy.max_input_buffers is not None:
            self.limit_input_buffers(policy.max_input_buffers)
        if policy.reports_nan:
            self.report_nan(True)

    def limit_input_buffers(self, number):
        self.runtime.set_max_grad_slots(number + 1)

    def report_nan(self, enabled):
        self.runtime.report_nan_in_param_grad(enabled)

    # -- life --------------------------------------------------------------------

    def reset(self):
        """Ends what is open, after an exception."""
        self.passes.give_up()
        self.runtime.reset()

    def renew(self):
        """Makes the Root that comes after this one, when Stale was raised."""
        self.check_may_end("a parameter was unfrozen, or its dtype changed")
        units = self.units
        for unit in units:
            check_may_renew(unit)
        self.end()
        return Root(self.tree.module, units[0])

    def check_may_end(self, what):
        """Raises NotImplementedError where what the Root has would be lost."""
        units = self.units
        for problem, name in (
            (self.passes.are_open, "while a backward_pass is open"),
            (self.graphs.enabled, "in a model with cuda_graph=True"),
            (
                any(u.sharding.main_grads for u in units),
                "where modules write to main_grad",
            ),
            (
                any(u.parameters.joined for u in units),
                "with parameters on a part of the mesh",
            ),
        ):
            if problem:
                raise NotImplementedError(
                    f"{what} between two steps. This is not supported {name}; change it "
                    "before the first forward"
                )

    def end(self):
        """Ends the Root. The next forward makes another one, with other cores of units."""
        self.tree.close()
        for unit in self.units:
            unit.show_shards()
            unit.root = None
            unit.core.end()
            unit.life.move("outdate", unit.name)

    def check_replaced(self):
        if self.runtime.shows_others():
            refuse_replaced(self.units)

    # -- callbacks of the core, under its lock ---------------------------------------

    @never_compiled
    def _before_forward(self):
        """Runs checks before a forward of any unit, or an unshard, when none is open."""
        # Each model runs this path in each step: no call that it does not need.
        tree, runtime = self.tree, self.runtime
        if not tree.has_values:
            tree.check_values()
        if self.passes.post_optim_event is not None:
            self.passes.wait_for_optimizer()
        if runtime.shows_others():
            refuse_replaced(self.units)
        if self.life.now is Life.OUTDATED:
            raise Stale
        if torch.is_grad_enabled():
            tree.inner_outputs.update()
            is_first = self.life.now is Life.ROOTED
            if is_first:
                tree.check_trained()
            if is_first or runtime.trains_others():
                self._follow_requires_grad()
            if is_first:
                self.life.move("train")
        if tree.of_several:
            tree.begin_forward()
        self.seen_writes.before_forward(tree.units)

    def _follow_requires_grad(self):
        with plain_attributes():
            for unit in self.units:
                if not unit.fits():
                    raise Stale
                unit.parameters.follow_requires_grad()
                unit.life.move("train", unit.name)

    def _whole_written(self, number, wholes):
        """Copies to the shards what the forward of a unit, or a program that unsharded it,
        wrote to unsharded parameters. They are resharded afterwards."""
        unit = self.units[number]
        for p in unit.parameters:
            if any(p.whole is tensor for tensor in wholes):
                if p.whole.shape != p.shard.shape:
                    raise NotImplementedError(
                        f"parameter {p.names[0]} was written while it was unsharded. This "
                        "is not supported for a module on a part of the model's mesh: "
                        "write to the sharded parameter, outside the forward"
                    )
                p.write(p.whole.detach())
        unit.core.mark_written()
        unit.core.gathered_written()

    def _before_backward(self):
        self.seen_writes.before_backward(self.units)
        self.trace.report_after_backward()


def _place(unit, module_names):
    """Gives the parameters of a unit their names in the model.

    Returns:
        A _C.Place for each place in which they are.
    """
    for p in unit.parameters.all:
        p.names = names_of(p, module_names) or [p.label]
    unit.parameters.check_grad_dtypes()
    for p in unit.parameters:
        if p.parallel is not None:
            p.parallel.bind(p.whole)
        note_whole(p)
    unit.core.name(unit.name, unit.parameters)
    return [
        _C.Place(parameters_of(site()), name, p.whole, p.shard, p.shown)
        for p in unit.parameters.all
        for site, name in p.sites
    ]


def _warn_of_padding(units, device_mesh, max_padding):
    text = _C.describe_excessive_padding(
        [unit.core for unit in units], 0.05 if max_padding is None else max_padding
    )
    if text is not None and device_mesh.get_rank() == 0:
        warnings.warn(f"fully_shard: {text}", stacklevel=2)
