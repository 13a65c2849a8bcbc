"""Outputs of modules inside a unit that a program reads with a forward hook: features
for distillation, perceptual losses, early exits.

The backward of a loss of only such a feature starts in the middle of the unit. It
skips the unit's outputs, but their gradients announce a backward in other cases.
"""

import weakref

from flatshard.torch_versions import forward_hooks, never_compiled


class InnerOutputs:
    """Watches the modules below a root that have forward hooks.

    Args:
        modules_of_units: pairs of a UnitState and a module of the unit, without the
            modules that were given to fully_shard.
    """

    def __init__(self, modules_of_units):
        self._places = [
            (weakref.ref(unit), weakref.ref(module))
            for unit, module in modules_of_units
        ]
        # To count them costs 20 ns a module and forward.
        self._hooks = [forward_hooks(module) for _, module in modules_of_units]
        self._num_hooks = 0
        self._own = {}  # handles of hooks put here, by the number of the place

    def update(self):
        """Registers hooks next to hooks of the program, and removes them where these were
        removed. Called before a forward."""
        if sum(map(len, self._hooks)) == self._num_hooks:
            return
        for i, (hooks, (unit, module)) in enumerate(zip(self._hooks, self._places)):
            users = sum(map(_may_take, hooks.values())) - (i in self._own)
            if users == 0 and i in self._own:
                self._own.pop(i).remove()
            elif users > 0 and i not in self._own and module() is not None:
                self._own[i] = module().register_forward_hook(_watcher(unit))
        self._num_hooks = sum(map(len, self._hooks))

    def close(self):
        """Removes the hooks that were registered here."""
        for handle in self._own.values():
            handle.remove()
        self._own.clear()


# They split and join activations, and keep none. A watcher next to one would break the
# graphs of torch.compile.
_OF_TENSOR_PARALLELISM = (
    "torch.distributed.tensor",
    "transformers.integrations.tensor_parallel",
)


def _may_take(hook):
    """Returns whether a forward hook may keep an output of the module."""
    return not str(getattr(hook, "__module__", "")).startswith(_OF_TENSOR_PARALLELISM)


def _watcher(unit):
    @never_compiled
    def watch(module, args, output):
        state = unit()
        if state is not None and state.root is not None:
            state.core.keeps_inner(output)

    return watch
