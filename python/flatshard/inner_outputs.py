"""Outputs of modules inside of a unit that a program takes by a forward hook: features
for distillation, perceptual losses, early exits.

A loss of such a feature alone begins its backward in the middle of the unit, past the
unit's outputs, whose gradients announce a backward otherwise.
"""

import weakref

from flatshard.dynamo import never_compiled


class InnerOutputs:
    """Watches the modules below a root that have forward hooks.

    Args:
        modules_of_units: pairs of a UnitState and a module that it holds, without the
            modules that were given to fully_shard.
    """

    def __init__(self, modules_of_units):
        self._places = [
            (weakref.ref(unit), weakref.ref(module)) for unit, module in modules_of_units
        ]
        # Whether any of these changed costs 20 ns a module and forward.
        self._hooks = [module._forward_hooks for _, module in modules_of_units]
        self._num_hooked = 0
        self._watched = {}

    def update(self):
        """Before a forward."""
        num_hooked = sum(map(bool, self._hooks))
        if num_hooked == self._num_hooked:
            return
        self._num_hooked = num_hooked
        for hooks, (unit, module) in zip(self._hooks, self._places):
            if hooks and module() is not None and module not in self._watched:
                watch = _watcher(unit)
                self._watched[module] = module().register_forward_hook(watch)


def _watcher(unit):
    @never_compiled
    def watch(module, args, output):
        state = unit()
        if state is not None and state.root is not None:
            state.root.core.keeps_inner(state.id, output)

    return watch
