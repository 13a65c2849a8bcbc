"""The actions of a model's core, for flatshard.diagnostics and for torch's CommDebugMode.

The core launches collectives in C++, where no TorchDispatchMode sees them. An active
CommDebugMode gets them afterwards: one all-gather for each time that a unit was
all-gathered, one reduction for each time that its gradients were reduced, with FSDP2's
operators.
"""

import os

from flatshard import _C
from flatshard._fsdp.strategies import of_core
from flatshard._tensor.reported_collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    report,
)
from flatshard.torch_versions import comm_debug_modes, in_backward, queue_callback


class Trace:
    """The actions of a model's core since the last call of take().

    Args:
        runtime: _C.Runtime.
        units: UnitStates, in the core's order.

    Attributes:
        is_kept: FLATSHARD_TRACE_STEPS=1 keeps all actions, for flatshard.diagnostics.
    """

    def __init__(self, runtime: _C.Runtime, units: list):
        self._runtime = runtime
        self.is_kept = os.environ.get("FLATSHARD_TRACE_STEPS") == "1"
        runtime.set_keeps_trace(self.is_kept)
        self._kinds = {
            unit.name: _kinds_of(unit.sharding.strategy, unit.sharding.device_mesh)
            for unit in units
        }
        self._policies = {unit.name: unit.policy for unit in units}

    def take(self) -> list:
        return self._runtime.take_trace()

    def report(self) -> None:
        """Reports actions to each CommDebugMode. Called after an unshard."""
        if modes := comm_debug_modes():
            self._report(modes)

    def report_after_forward(self, unit) -> None:
        """Reports actions after a forward of `unit`. The core keeps the last unit for the
        backward. While a mode counts, the backward all-gathers it, as with FSDP2."""
        modes = comm_debug_modes()
        if not modes:
            return
        if unit.reshards and not unit.modules.running and not in_backward():
            unit.core.reshard()
        self._report(modes)

    def report_after_backward(self) -> None:
        """Reports actions once the backward has ended. Called when an outermost backward
        starts."""
        modes = comm_debug_modes()
        if modes and in_backward():
            # The core ends the backward in a separate callback that is queued later.
            queue_callback(lambda: queue_callback(lambda: self._report(modes)))

    def _report(self, modes):
        operators = [
            operator
            for kind, unit, *_ in self.take()
            for operator in self._operators(kind, unit)
        ]
        report(modes, operators)

    def _operators(self, kind, unit):
        gathers, scatters, reduces_all = self._kinds.get(unit, (False, False, False))
        if kind == "gather" and gathers:
            yield ALL_GATHER
        if kind == "reduce":
            if scatters:
                yield REDUCE_SCATTER
            if reduces_all and (self._policies[unit].all_reduce or not scatters):
                yield ALL_REDUCE


def _kinds_of(strategy, mesh):
    """Returns whether a unit's weights are all-gathered, its gradients
    reduce-scattered, and all-reduced."""
    inner = mesh.size(mesh.ndim - 1)
    outer = mesh.size() // inner
    cuts = of_core(strategy).optimizer[1] == "S" and inner > 1
    return cuts, cuts, outer > 1 or (not cuts and mesh.size() > 1)
