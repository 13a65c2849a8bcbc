"""A tree of units and the core's Runtime that serves it."""

import os
import warnings
import weakref

import torch

from flatshard import _C
from flatshard._fsdp.grid import grid_of, tell_parts
from flatshard._fsdp.inner_outputs import InnerOutputs
from flatshard._fsdp.life import Life, LifeCycle
from flatshard._fsdp.opaque_outputs import look_inside
from flatshard._fsdp.options import ModelOptions
from flatshard._fsdp.parameter import name_released, note_whole
from flatshard._fsdp.renewal import check_is_home, check_may_renew, renew, why_fixed
from flatshard._fsdp.replaced import (
    refuse_exchanged,
    refuse_plain,
    refuse_replaced,
    settle,
)
from flatshard._fsdp.seen_collectives import SeenCollectives
from flatshard._fsdp.seen_writes import SeenWrites
from flatshard._fsdp.tree import check_units, inner_modules, names_of, walk
from flatshard._graphs.checks import (
    DEFAULT_WARMUP_STEPS,
    audits_graphs,
    emulates_on_cpu,
)
from flatshard._graphs.end import drop_before_groups
from flatshard._tensor.mesh import device_of
from flatshard._tensor.same_values import compare
from flatshard.torch_versions import (
    parameters_of,
    plain_attributes,
    without_dispatch_modes,
)


def traces_steps():
    """Debugging: what the core does is kept for flatshard.diagnostics.take_trace."""
    return os.environ.get("FLATSHARD_TRACE_STEPS") == "1"


class Stale(Exception):
    """A forward begins, and parameters were changed so that the core has to be another
    one. Not for users: run_forward renews the root and begins again."""


class Root:
    """Made when the outermost unit runs for the first time: only then are the units
    below it and their names known."""

    def __init__(self, module, state):
        units, parents, module_names = walk(module)
        for unit in units:
            if unit.life.now in (Life.OUTDATED, Life.AWAY):
                check_is_home(unit)
                check_may_renew(unit)
                renew(unit)
        check_units(units, parents, state)
        settle(units, module_names)
        options = state.model_options or ModelOptions()
        self._warn_of_padding(units, state.device_mesh, options.max_padding)
        tree = []
        for number, unit in enumerate(units):
            for p in unit.all_parameters:
                p.names = names_of(p, module_names) or [p.label]
            unit.core.set_names(unit.name, unit.core_names())
            unit.id = number
            unit.check_grad_dtypes()
            for p in unit.parameters:
                if p.parallel is not None:
                    p.parallel.bind(p.whole)
                note_whole(p)
            name_released(unit.core, unit.parameters)
            places = [
                _C.Place(parameters_of(site()), name, p.whole, p.shard, p.shown)
                for p in unit.all_parameters
                for site, name in p.sites
            ]
            tree.append(_C.TreeUnit(unit.core, parents[number], places, unit.grads))
        # The units hold this object. They go with their modules.
        self.mesh = state.mesh
        self.device_mesh = state.device_mesh
        self._checkpoint_mesh = None
        self._module = weakref.ref(module)
        self._units = [weakref.ref(unit) for unit in units]
        self._of_several = [weakref.ref(u) for u in units if len(u.modules) > 1]
        self.seen_writes = SeenWrites()
        self.device = device_of(state.device_mesh)
        self.on_gpu = self.device.type == "cuda"
        warmup_steps = [u.graph_warmup_steps for u in units if u.cuda_graph]
        self.cuda_graphs = bool(warmup_steps)
        self.buffers_on_demand = self._buffers_on_demand(options.buffers_on_demand)
        # The core would keep a bound method, and with it this object, for ever.
        me = weakref.ref(self)
        refuse_exchanged(module)
        self.core = _C.Runtime(
            state.mesh,
            tree,
            _C.Callbacks(
                before_forward=lambda: me()._before_forward(),
                before_backward=lambda: me()._before_backward(),
                whole_written=lambda number, whole: me()._whole_written(number, whole),
                look_inside=lambda *output: look_inside(me().units, *output),
            ),
            _C.RuntimeOptions(
                prefetch=1 if options.prefetch is None else options.prefetch,
                copy_engines=state.copy_engines,
                slots_on_demand=self.buffers_on_demand,
                shared_streams=state.shared_streams,
                trace=True,
                graphs=_C.GraphOptions(
                    enabled=self.cuda_graphs,
                    warmup_steps=max(warmup_steps, default=DEFAULT_WARMUP_STEPS),
                    audit=audits_graphs(),
                    emulate_on_cpu=self.cuda_graphs and emulates_on_cpu(),
                ),
            ),
        )
        if self.cuda_graphs:
            drop_before_groups(self)
        self.traces_steps = traces_steps()
        self.core.set_keeps_trace(self.traces_steps)
        self.seen_collectives = SeenCollectives(self.core, units)
        self.running_pass = None  # whose forward calls of wrapped modules are
        self._passes = weakref.WeakSet()  # BackwardPasses that began and continue
        self.has_passes = False  # or had one since the last forward outside of them
        self._sync_is_of_pass = False
        self.life = LifeCycle(Life.ROOTED)
        self._has_values = False  # all units, and equal ones on the ranks
        self._inner_outputs = InnerOutputs(inner_modules(units))
        self.post_optim_event = None  # to wait for before the next gather
        for unit in units:
            unit.life.move("root", unit.name)
            unit.root = self
            # Its core stays, so a parameter that is frozen keeps its place.
            if self.cuda_graphs or any(why_fixed(unit, p) for p in unit.parameters):
                unit.life.move("train", unit.name)
        for unit in units:
            self.apply_policy(unit)
        self.apply_limits(state.policy)

    @staticmethod
    def _warn_of_padding(units, device_mesh, max_padding):
        text = _C.describe_excessive_padding(
            [unit.core for unit in units], 0.05 if max_padding is None else max_padding
        )
        if text is not None and device_mesh.get_rank() == 0:
            warnings.warn(f"fully_shard: {text}", stacklevel=2)

    def _buffers_on_demand(self, asked):
        if asked is None:
            return not self.cuda_graphs
        if asked and self.cuda_graphs:
            raise ValueError(
                "buffers_on_demand: expected None or False for the root of a model with "
                "cuda_graph=True, got True: a graph needs weights and gradients at the "
                "same addresses in every step"
            )
        return asked

    @property
    def units(self):
        return [unit for ref in self._units if (unit := ref()) is not None]

    def checkpoint_mesh(self):
        """Returns the core's mesh over all ranks that hold parts of the model.
        Collective."""
        if self._checkpoint_mesh is None:
            grid = grid_of(self.units)
            self._checkpoint_mesh = (
                self.mesh if grid is None else tell_parts(self.units, grid)
            )
        return self._checkpoint_mesh

    # -- options -----------------------------------------------------------------

    @staticmethod
    def reshards(unit):
        """Returns whether the unit is resharded after its forward."""
        asked = unit.policy.reshard_after_forward
        # FSDP2: the root's parameters are needed first in the backward.
        return unit.id != 0 if asked is None else asked

    def apply_policy(self, unit):
        policy = unit.policy
        ids = [
            None if modules is None else [m.id for m in modules]
            for modules in (policy.forward_prefetch, policy.backward_prefetch)
        ]
        core_policy = _C.UnitPolicy(
            reshard_after_forward=self.reshards(unit),
            reshard_after_backward=policy.reshard_after_backward,
            unshard_in_backward=policy.unshard_in_backward,
            forward_prefetch=ids[0],
            backward_prefetch=ids[1],
            keep_backward_planes=unit.fp8 is not None and unit.fp8.keep_column_plane,
            keep_post_forward=policy.keep_post_forward,
            sync_gradients=policy.sync_gradients,
            all_reduce=policy.all_reduce,
        )
        self.core.set_policy(unit.id, core_policy)
        # As with FSDP2, parameters() are the unsharded ones until the backward. This
        # does not hold where these have no own values, or are no leaves.
        special = unit.fp8 is not None or unit.extended or self.cuda_graphs
        self.core.set_keeps(unit.id, not (self.reshards(unit) or special))

    def apply_limits(self, policy):
        """Applies the settings of the whole model from the root's setters."""
        if policy.max_input_buffers is not None:
            self.core.set_max_grad_slots(policy.max_input_buffers + 1)
        if policy.reports_nan:
            self.core.report_nan_in_param_grad(True)

    # -- passes ------------------------------------------------------------------

    def new_pass(self):
        if self.cuda_graphs:
            raise NotImplementedError(
                "backward_pass is not supported in a model with cuda_graph=True: graphs "
                "of blocks whose backwards interleave are not; leave cuda_graph out"
            )
        return _C.BackwardPass(self.core)

    def pass_began(self, which):
        self._passes.add(which)
        self.has_passes = True

    def pass_opens(self):
        """Its argument decides whether it is the step's last."""
        self._sync_is_of_pass = True
        self.has_passes = True

    def pass_ended(self, which):
        self._passes.discard(which)
        self._restore_sync()

    def _restore_sync(self):
        if self._sync_is_of_pass:
            self._sync_is_of_pass = False
            self.core.set_is_last_microbatch(True)

    def give_up_passes(self):
        for which in list(self._passes):
            which.give_up()

    def refuse_between_passes(self, module):
        if self._passes:
            raise RuntimeError(
                f"{type(module).__name__} was called while a backward_pass of its model "
                "is open, whose forward or backward it is not part of: call it inside "
                "of `with that_pass.forward():`, or end or give_up() that pass first"
            )
        self._restore_sync()  # of one that was dropped
        self.has_passes = False

    def _before_forward(self):
        """Before a forward of any unit, or an unshard, when none is open. The core calls
        it, with its lock held."""
        if not self._has_values:
            units = self.units
            for unit in units:
                unit.check_initialized()
            with without_dispatch_modes():  # one that counts collectives
                compare(units, self.device_mesh)
            for unit in units:
                unit.forget_digests()
            self._has_values = True
        if self.post_optim_event is not None:
            self.post_optim_event.wait()
            self.post_optim_event = None
        self.check_replaced()
        if self.life.now is Life.OUTDATED:
            raise Stale
        if torch.is_grad_enabled():
            self._inner_outputs.update()
            is_first = self.life.now is Life.ROOTED
            if is_first:
                refuse_plain(self._module(), self.units)
                for unit in self.units:
                    unit.retire_trained_formers()
            if self.core.trains_others() or is_first:
                self._follow_requires_grad()
            if is_first:
                self.life.move("train")
        for ref in self._of_several:
            if (unit := ref()) is not None:
                unit.running.clear()
        self.seen_writes.before_forward(self.units)

    def _follow_requires_grad(self):
        with plain_attributes():
            for unit in self.units:
                if not unit.fits():
                    raise Stale
                unit.follow_requires_grad()
                unit.life.move("train", unit.name)

    def renew(self):
        """Makes the Root that comes after this one, when Stale was raised."""
        self.check_may_end("a parameter was unfrozen, or its dtype changed")
        units = self.units
        for unit in units:
            check_may_renew(unit)
        self.end()
        return Root(self._module(), units[0])

    def check_may_end(self, what):
        """Raises NotImplementedError where what the Root has would be lost."""
        for problem, name in (
            (self._passes, "while a backward_pass is open"),
            (self.cuda_graphs, "in a model with cuda_graph=True"),
            (any(u.main_grads for u in self.units), "where modules write to main_grad"),
            (
                any(u.joined for u in self.units),
                "with parameters on a part of the mesh",
            ),
        ):
            if problem:
                raise NotImplementedError(
                    f"{what} between two steps, which is not supported {name}; change it "
                    "before the first forward"
                )

    def end(self):
        """The next forward makes another Root, for which all units have other cores."""
        self._inner_outputs.close()
        for unit in self.units:
            unit.show_shards()
            unit.root = None
            unit.life.move("outdate", unit.name)

    def check_replaced(self):
        if self.core.shows_others():
            refuse_replaced(self.units)

    def _whole_written(self, number, wholes):
        """The forward of a unit, or somebody who unsharded it, wrote unsharded
        parameters: the core calls it before they are released."""
        unit = self.units[number]
        for p in unit.parameters:
            if any(p.whole is tensor for tensor in wholes):
                if p.whole.shape != p.shard.shape:
                    raise NotImplementedError(
                        f"parameter {p.names[0]} was written while it was unsharded, "
                        "which is not supported where its mesh is a part of the model's: "
                        "write to the sharded parameter, outside of the forward"
                    )
                p.write(p.whole.detach())
        unit.core.mark_written()
        self.core.gathered_written(number)

    def _before_backward(self):
        """The core calls it, with its lock held."""
        self.seen_writes.before_backward(self.units)
        self.seen_collectives.report_after_backward()
