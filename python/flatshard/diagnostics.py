"""Norms of a model, NaN in its gradients, and traces of its steps."""

from dataclasses import dataclass

from torch import nn

from flatshard._fsdp.forward import root_of, without_compile
from flatshard._fsdp.grid import grids_of, sums_over


@dataclass
class ParameterNorm:
    """2-norms of one unsharded parameter, over all of its shards."""

    name: str
    weight: float
    grad: float | None  # of the reduced gradient; None: no gradient came


def parameter_norms(model: nn.Module) -> list[ParameterNorm]:
    """Norms of every sharded parameter, in order of units.

    Between a backward and the optimizer's step the gradients are the gradients of that
    step, before clipping if that comes later. One all-reduce serves all parameters. A
    parameter that several ranks store counts once. Collective; blocks the host.

    Args:
        model: the outermost module that fully_shard wrapped.

    Returns:
        A list of ParameterNorm, frozen parameters included.
    """
    root = root_of(without_compile(model))
    units = root.units
    for unit in units:
        unit.parameters.refuse_extended(
            "parameter_norms", "compute norms of the tensors in parameters()"
        )
    for unit in units:
        unit.grads.take()
    norms = root.runtime.parameter_norms()
    for unit in units:
        unit.grads.release()
    grids = grids_of(units)
    if grids is not None:
        squares = {name: (weight**2, (grad or 0) ** 2) for name, weight, grad in norms}
        sums = sums_over(grids, units, squares)
        norms = [
            (name, sums[name][0] ** 0.5, None if grad is None else sums[name][1] ** 0.5)
            for name, _, grad in norms
        ]
    # In the core, one of a unit that has others counts as zeros.
    parameters = [p for unit in units for p in unit.parameters]
    without = {name for p in parameters if p.shard.grad is None for name in p.names}
    return [
        ParameterNorm(name, weight, None if name in without else grad)
        for name, weight, grad in norms
    ]


def report_nan_in_param_grad(model: nn.Module, enabled: bool = True) -> None:
    """Looks for NaN and infinite values in the gradients of each unit before they are
    reduced, while their origin is still visible. It starts with the next backward.

    The backward of the rank that has one raises a RuntimeError with the parameter's
    name, the first element and their number. The other ranks wait for this one in the
    reduction until it ends or they time out, so let the error end the process. One
    pass over the gradients of a unit, for which the host waits.

    Args:
        model: the outermost module that fully_shard wrapped.
        enabled: False ends it.
    """
    root = root_of(without_compile(model))
    root.units[0].policy.reports_nan = enabled
    root.report_nan(enabled)


@dataclass(frozen=True)
class TracedAction:
    """Something that the core did, in the order in which it was launched.

    Attributes:
        kind: "gather", "derive", "await", "release", "reduce" and others, see
            docs/internals/overview.md.
        unit: its name; "" for an action of no unit.
        plane: 0: weights; 1 and 2: rows and columns of FP8 weights. The last: slices that
            reshard_after_forward keeps, where it is a number.
        part: number of the weight in its plane; -1: all of it.
        phase: of a "gather" or derive: "forward" or "backward", the pass that it was for.
        nbytes: of a "gather": size of the unsharded slot in bytes.
    """

    kind: str
    unit: str
    plane: int
    part: int
    phase: str
    nbytes: int


def take_trace(model: nn.Module) -> list[TracedAction]:
    """Returns the actions of the core since the last call, if
    FLATSHARD_TRACE_STEPS=1 was in the environment when the model ran first; else
    nothing. Actions are kept until the next call.

    Args:
        model: the outermost module that fully_shard wrapped.

    Returns:
        A list of TracedAction.
    """
    root = root_of(without_compile(model))
    if not root.trace.is_kept:
        return []
    return [TracedAction(*action) for action in root.trace.take()]
