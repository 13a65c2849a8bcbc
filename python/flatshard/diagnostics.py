"""What the core can tell of a model's numbers."""

from dataclasses import dataclass

from flatshard.module import root_of


@dataclass
class ParameterNorm:
    """2-norms of one whole parameter, over all of its shards."""

    name: str
    weight: float
    grad: float | None  # of the reduced gradient; None: no gradient came


def parameter_norms(model):
    """Norms of every sharded parameter, in order of units.

    Between a backward and the optimizer's step the gradients are those of the step,
    before clipping if that comes later. One all-reduce serves all parameters; what
    several ranks hold counts once. Collective; blocks the host.

    Args:
        model: the outermost module that fully_shard wrapped.

    Returns:
        A list of ParameterNorm, frozen parameters included.
    """
    root = root_of(model)
    units = root.units
    for unit in units:
        unit.grads.take()
    norms = root.core.parameter_norms()
    for unit in units:
        unit.grads.release()
    return [ParameterNorm(*norm) for norm in norms]


def report_nan_in_param_grad(model, enabled=True):
    """From the next backward on, looks for NaN and infinite values in the gradients of
    each unit before they are reduced, when it is still known where they come from.

    The backward of the rank that has one raises a RuntimeError with the parameter's
    name, the first element and their number. The other ranks wait for this one in the
    reduction until it ends or they time out, so let the error end the process. One
    pass over the gradients of a unit, for which the host waits.

    Args:
        model: the outermost module that fully_shard wrapped.
        enabled: False ends it.
    """
    root_of(model).core.report_nan_in_param_grad(enabled)
