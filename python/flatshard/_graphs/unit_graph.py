"""Forwards of units as CUDA graphs: `ShardOptions(cuda_graph=True)`.

The core watches a few steps, captures and replays (RegionGraphs in C++). Here is what
it needs of a module: its forward as a function of a list of tensors, what else that
depends on, and why a call of it cannot be a replay.
"""

import enum
import weakref

import torch
from torch import nn

from flatshard import torch_versions
from flatshard._graphs.checks import refuse_numbers_drawn_again
from flatshard._tensor.mesh import device_of
from flatshard._tensor.places import state_of
from flatshard.torch_versions import (
    await_gradient,
    await_leaves,
    never_compiled,
    outside_of_graphs,
    parameters_of,
    places_tensors,
    tree_flatten,
    tree_unflatten,
)

# Arguments and results of these types are compared, and other types may be anything.
_PLAIN = {
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
}


# Kinds of tensors that the core has in graphs.
_TENSORS = torch.Tensor, nn.Parameter


def is_plain(leaf):
    return type(leaf) in _PLAIN or isinstance(leaf, enum.Enum)


class Recorded:
    """One forward without its tensors: what a capture calls, and what another call has
    to be equal to.

    The core keeps it, so it keeps no module.
    """

    @never_compiled
    def __init__(self, module, forward, args, kwargs, tree):
        leaves, self._structure, (self.args, self.kwargs) = _await((args, kwargs))
        self._module = weakref.ref(module)
        self._forward = forward
        self.tensors = []  # each once
        self._leaves = _number_tensors(leaves, self.tensors)
        self.strange = _strange(self._leaves)
        self._autocast = _autocast(tree.device.type)
        self._device_type = tree.device.type
        self._modes = tuple(m.training for m in (module, *tree.inner))
        self._state = tree.state()
        self._hooks = tree.placing_hooks()
        self._output = None

    def take(self):
        """Returns (tensors, args, kwargs), once."""
        taken = self.tensors, self.args, self.kwargs
        self.tensors = self.args = self.kwargs = None
        return taken

    @outside_of_graphs
    def __call__(self, tensors):
        """Returns the forward's tensors, each once, without those in `tensors`."""
        module = self._module()
        parallel = _parallel_parameters(module)
        if parallel:
            tensors = [await_gradient(t) if t.requires_grad else t for t in tensors]
        args, kwargs = self._arguments(tensors)
        former = _show_new(parallel)
        modes = self._set_modes(module, self._modes)
        enabled, dtype, cache = self._autocast
        # Casts of weights that others made refer to other memory.
        torch.clear_autocast_cache()
        try:
            with (
                torch.autocast(
                    self._device_type, dtype=dtype, enabled=enabled, cache_enabled=cache
                ),
                refuse_numbers_drawn_again(),
            ):
                output = self._forward(module, *args, **kwargs)
        finally:
            torch.clear_autocast_cache()
            self._set_modes(module, modes)
            for parameters, name, shown in former:
                parameters[name] = shown
        return self.take_output(output, tensors)[1]

    @staticmethod
    @never_compiled
    def _set_modes(module, modes):
        """Calls train() or eval() on the module and each inside it. Returns the former
        modes."""
        modules = (module, *(m for m in module.modules() if m is not module))
        if len(modules) != len(modes):
            raise RuntimeError(
                f"a module inside {type(module).__name__} was added or removed"
            )
        before = tuple(m.training for m in modules)
        for m, mode in zip(modules, modes):
            m.training = mode
        return before

    @never_compiled
    def _arguments(self, tensors):
        return tree_unflatten(_put(self._leaves, tensors), self._structure)

    @never_compiled
    def take_output(self, output, tensors):
        """Returns the result without AsyncCollectiveTensors, and its tensors as
        __call__ does."""
        leaves, structure, output = _await(output)
        found = list(tensors)
        numbered = _number_tensors(leaves, found)
        self._output = numbered, structure
        outputs = found[len(tensors) :]
        self._kinds = {type(t) for t in outputs}
        return output, outputs

    @never_compiled
    def strange_output(self):
        """Returns what a replay could not return; empty: nothing."""
        if kind := _strange(self._output[0]):
            return f"a {kind}, neither tensor nor plain value"
        kind = next((k for k in self._kinds if k not in _TENSORS), None)
        return f"a {kind.__name__}, a kind of tensor" if kind else ""

    @never_compiled
    def returned(self, tensors, outputs):
        """Returns the tensors of the result, arguments among them included."""
        found = [*tensors, *outputs]
        return [found[leaf] for leaf in self._output[0] if type(leaf) is int]

    @never_compiled
    def output(self, tensors, outputs):
        """Returns the forward's result, made of a replay's tensors."""
        numbered, structure = self._output
        return tree_unflatten(_put(numbered, [*tensors, *outputs]), structure)

    @never_compiled
    def difference(self, other):
        """Returns in what `other` differs; empty: in nothing."""
        if self._structure != other._structure:
            return "its arguments are nested in another way"
        if self._leaves != other._leaves:
            return "an argument that is not a tensor has another value"
        if self._modes != other._modes:
            return "it or a module inside it changed between train() and eval()"
        if self._autocast != other._autocast:
            return "autocast is in another state"
        if self._state != other._state:
            return "a module or buffer inside it was replaced or moved"
        if self._hooks != other._hooks:
            return "hooks of parallelize_module inside it were added or removed"
        return ""


def _parallel_parameters(module):
    """Returns the Parameters of a unit that its modules see as DTensors."""
    parameters = state_of(module).parameters
    return [p for p in parameters if p.parallel is not None and p.shown is p.parallel]


@never_compiled
def _show_new(parallel):
    """Makes the modules see DTensors that the recording made: a former one leads to the
    gradient of another stream's backward.

    Returns:
        (parameters of a module, name, DTensor before) of each place.
    """
    former = []
    for p in parallel:
        tensor = p.parallel.make()
        for site, name in p.sites:
            if (module := site()) is not None:
                parameters = parameters_of(module)
                former.append((parameters, name, parameters[name]))
                parameters[name] = tensor
    return former


def _await(tree):
    """Returns (leaves, structure, tree), where plain tensors replace the
    AsyncCollectiveTensors."""
    leaves, structure = tree_flatten(tree)
    awaited = await_leaves(leaves)
    if awaited is not leaves:
        tree = tree_unflatten(awaited, structure)
    return awaited, structure, tree


def _number_tensors(leaves, tensors):
    """Returns for each leaf an int, the number of a tensor in `tensors`; a pair of a type
    and its value; or a str, the name of a type whose values cannot be compared. Appends
    to `tensors`."""
    places = {id(t): number for number, t in enumerate(tensors)}
    numbered = []
    for leaf in leaves:
        kind = type(leaf)
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in places:
                places[id(leaf)] = len(tensors)
                tensors.append(leaf)
            numbered.append(places[id(leaf)])
        elif is_plain(leaf):
            numbered.append((kind, leaf))
        else:
            numbered.append(kind.__name__)
    return numbered


def _put(numbered, tensors):
    return [tensors[leaf] if type(leaf) is int else leaf[1] for leaf in numbered]


def _strange(numbered):
    return next((leaf for leaf in numbered if type(leaf) is str), None)


def _autocast(device_type):
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
    )


class _Tree:
    """The modules inside a unit's module, and their state other than its parameters."""

    @never_compiled
    def __init__(self, module, state, of_call):
        self.device = device_of(state.sharding.device_mesh)
        self.inner = [m for m in module.modules() if m is not module]
        recorded = [module, *self.inner] if of_call else self.inner
        self.hooks = torch_versions.GLOBAL_HOOKS + tuple(
            hooks for m in recorded for hooks in torch_versions.hooks_of_module(m)
        )
        own = {id(t) for p in state.parameters for t in p.faces()}
        everything = (module, *self.inner)
        self._children = [c for m in everything if (c := torch_versions.children_of(m))]
        self._buffers = [b for m in everything if (b := torch_versions.buffers_of(m))]
        self._ignored = [
            parameter
            for m in everything
            for parameter in torch_versions.parameters_of(m).values()
            if parameter is not None and id(parameter) not in own
        ]
        self._shape = self._children_now()

    def _children_now(self):
        return [id(m) for children in self._children for m in children.values()]

    @never_compiled
    def is_current(self):
        return self._shape == self._children_now()

    def placing_hooks(self):
        """Returns the hooks of parallelize_module. A graph has their work."""
        if not any(self.hooks):
            return ()
        found = (h for hooks in self.hooks for h in hooks.values())
        return tuple(id(h) for h in found if places_tensors(h))

    @never_compiled
    def has_other_hooks(self):
        return any(
            not places_tensors(h) for hooks in self.hooks for h in hooks.values()
        )

    @never_compiled
    def trains(self):
        """Returns what it trains in addition to its parameters; empty: nothing."""
        if any(parameter.requires_grad for parameter in self._ignored):
            return "parameters of ignored_params"
        buffers = (b for held in self._buffers for b in held.values() if b is not None)
        return "a buffer" if any(b.requires_grad for b in buffers) else ""

    @never_compiled
    def constants(self):
        buffers = [b for held in self._buffers for b in held.values() if b is not None]
        return buffers + [parameter.detach() for parameter in self._ignored]

    def state(self):
        """Returns a value that stays equal as long as a graph reads the right memory."""
        buffers = [
            (id(b), 0 if b is None else b.data_ptr())
            for held in self._buffers
            for b in held.values()
        ]
        return (
            self._shape,
            buffers,
            [parameter.data_ptr() for parameter in self._ignored],
        )


class UnitGraph:
    """The forward of one module of ShardOptions(cuda_graph=True).

    In the module's __dict__, so it may refer to modules below the module. It does not
    refer to the module, so that a deleted model is freed at once.
    """

    def __init__(self, sample, of_call):
        self._sample = sample  # make_graphed_callables's: the one call to capture
        self._of_call = of_call  # the module's __call__ is recorded, with its hooks
        self._tree = None
        self._recorded = None  # the forward that was watched last
        self._refused = ""  # for good

    @outside_of_graphs
    def run(self, module, forward, args, kwargs):
        """Runs forward(module, *args, **kwargs), or a replay of it."""
        state = state_of(module)
        # An evaluation, among others.
        if not torch.is_grad_enabled() or state.root is None:
            return forward(module, *args, **kwargs)
        if self._tree is None or not self._tree.is_current():
            self._tree = _Tree(module, state, self._of_call)
        recorded = Recorded(module, forward, args, kwargs, self._tree)
        tensors, args, kwargs = recorded.take()
        if torch_versions.is_compiled_around():
            # A capture would record what is not compiled.
            obstacle = "torch.compile is around it"
        else:
            obstacle = self._obstacle(recorded, tensors, args, kwargs)
        reason = obstacle
        if not obstacle and self._recorded is not None:
            reason = recorded.difference(self._recorded)
        outputs, is_watched = state.core.graph_forward(
            function=recorded,
            inputs=None if obstacle else tensors,
            constants=self._tree.constants(),
            reason=reason,
        )
        if outputs is not None:
            return self._recorded.output(tensors, outputs)
        if not is_watched:
            return forward(module, *args, **kwargs)
        self._recorded = recorded
        versions = _versions(tensors)
        output = forward(module, *args, **kwargs)
        output, outputs = recorded.take_output(output, tensors)
        strange = recorded.strange_output()
        if _versions(tensors) != versions:
            self._refused = "it writes into an argument in place"
        elif strange:
            self._refused = f"it returns {strange}"
        if self._sample:
            self._sample.check_used(
                tensors, recorded.returned(tensors, outputs), state.name
            )
        # The core accepts only plain tensors.
        state.core.graph_ran(tensors, [] if strange else outputs)
        return output

    @never_compiled
    def _obstacle(self, recorded, tensors, args, kwargs):
        """Returns why the call cannot be part of a graph; empty: it can."""
        tree = self._tree
        if self._refused:
            return self._refused
        if any(tree.hooks) and tree.has_other_hooks():
            either = "it or " if self._of_call else ""
            return f"{either}a module inside it has hooks"
        if trained := tree.trains():
            return f"it trains {trained}"
        if recorded.strange:
            return (
                f"an argument is a {recorded.strange}, neither tensor nor plain value"
            )
        if self._sample and (why := self._sample.difference(args, kwargs)):
            return why
        for tensor in tensors:
            if type(tensor) not in _TENSORS:
                return f"an argument is a {type(tensor).__name__}, a kind of tensor"
            if tensor.layout is not torch.strided or tensor.device != tree.device:
                return (
                    f"an argument is a {tensor.layout} tensor on {tensor.device}, "
                    f"expected a strided one on {tree.device}"
                )
        if torch_versions.in_backward():
            return "it runs in a backward (a checkpoint around it)"
        if torch_versions.has_saved_tensor_hooks():
            return "hooks on saved tensors are around it (a checkpoint, offloading)"
        if torch_versions.has_dispatch_mode():
            return "a TorchDispatchMode around it intercepts each operation"
        if torch_versions.in_functorch():
            return "it runs in a function of torch.func"
        return ""


@never_compiled
def _versions(tensors):
    return [torch_versions.version_of(t) for t in tensors]
