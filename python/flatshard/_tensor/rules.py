"""The table of operations on sharded tensors: how each gets its values and gradients.

This file is data, and imports nothing of the package. shard_operations.py has the ways
by their names here, and docs/guides/python.md shows a row for each kind.
"""

import enum
from dataclasses import dataclass, replace

import torch


class Kind(enum.Enum):
    """A kind of operations.

    Attributes:
        others: operations that have no row, since their tags give the kind.
        communication: what the ranks send.
        gradient: how the gradients of arguments are sharded.
    """

    ELEMENTWISE = (
        "tag `pointwise`, also in place",
        "none between tensors that are sharded equally",
        "as arguments",
    )
    ROWS = (
        "`foreach`, fused optimizers",
        "none along dimensions other than the first",
        "as arguments",
    )
    REDUCTION = (
        "",
        "a small all-gather; an all-reduce for norms of lists",
        "as arguments",
    )
    VIEW = (
        "views",
        "none for rows (`p[3:5]`, `p[:, 1]`); others (`p.T`, `p[2]`) all-gather rows on use",
        "as the shard",
    )
    RANDOM = (
        "random numbers",
        "a broadcast of the generator's state",
        "as arguments",
    )
    REFUSE = ("collectives", "raises an error", "none")
    # Operations without a row, and calls that the ways of a row leave.
    OTHER = (
        "all others (`p @ q`, `linalg.svd`, `cat`, ...)",
        "an all-gather of full tensors, and one warning",
        "as arguments",
    )

    def __init__(self, others, communication, gradient):
        self.others = others
        self.communication = communication
        self.gradient = gradient


@dataclass(frozen=True)
class Rule:
    """One row.

    Attributes:
        kind: Kind.
        forward: names of ways to compute the operation. The first possible one is used;
            the operation on full values is the fallback.
        shown: how the documentation names it; "": not.
    """

    kind: Kind
    forward: tuple[str, ...] = ()
    shown: str = ""


def _rows(kind, forward, names, shown=None):
    ways = tuple(forward.split())
    return {
        name: Rule(kind, ways, f"`{name}`" if shown is None else shown)
        for name in names.split()
    }


# By the name in `aten`. Operations without an entry have one by torch's tags, see rule_of.
TABLE = {
    **_rows(
        Kind.ELEMENTWISE,
        "pointwise",
        "copy_ fill fill_ zero_ masked_fill_ _to_copy leaky_relu leaky_relu_ "
        "leaky_relu_backward hardtanh hardtanh_ hardswish elu_backward "
        "softplus_backward hardtanh_backward _pin_memory",
        shown="",
    ),
    **_rows(Kind.ROWS, "along_rows", "argmax var std cumsum sort topk median flip"),
    **_rows(
        Kind.ROWS,
        "along_rows",
        "argmin prod var_mean std_mean logsumexp cumprod kthvalue nanmedian mode roll "
        "count_nonzero",
        shown="...",
    ),
    **_rows(
        Kind.ROWS,
        "along_rows",
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data",
        shown="`softmax`",
    ),
    **_rows(
        Kind.ROWS, "like", "empty_like zeros_like ones_like full_like", shown="`*_like`"
    ),
    **_rows(
        Kind.ROWS,
        "new_values",
        "new_empty new_zeros new_ones new_full new_empty_strided",
        shown="`new_*`",
    ),
    **_rows(
        Kind.ROWS, "put_rows", "index_put_ _index_put_impl_", shown="`p[rows] = values`"
    ),
    **_rows(Kind.ROWS, "on_local", "record_stream", shown=""),
    **_rows(Kind.ROWS, "is_same_size", "is_same_size", shown=""),
    **_rows(Kind.REDUCTION, "along_rows reduce", "sum mean norm any all"),
    **_rows(
        Kind.REDUCTION,
        "along_rows reduce",
        "nansum amax amin max min linalg_vector_norm",
        shown="...",
    ),
    **_rows(Kind.REDUCTION, "foreach_norm", "_foreach_norm", shown=""),
    **_rows(Kind.VIEW, "same", "detach alias lift_fresh", shown=""),
    **_rows(Kind.REFUSE, "refuse", "set_ resize_"),
    **_rows(Kind.REFUSE, "refuse", "resize_as_ resize", shown=""),
    # It has the tag, and its result is one bool.
    **_rows(Kind.OTHER, "", "equal", shown=""),
}

_WHOLE = Rule(Kind.OTHER)
_COLLECTIVE = Rule(Kind.REFUSE, ("refuse_collective",))
_LISTS = Rule(Kind.ROWS, ("by_position",))  # _foreach_ and _fused_
_RANDOM = Rule(Kind.RANDOM, ("random",))
_TURN = Rule(Kind.VIEW, ("turn",))  # in place
_VIEW = Rule(Kind.VIEW, ("view",))
_POINTWISE = Rule(Kind.ELEMENTWISE, ("pointwise",))


def rule_of(func, traits):
    """Returns the Rule of an operation.

    Args:
        traits: its Traits.
    """
    if "c10d" in func.namespace:
        return _COLLECTIVE
    if func.namespace != "aten":
        return _WHOLE
    rule = TABLE.get(traits.name)
    if rule is None:
        rule = _by_tags(func.tags, traits)
    # Such as max of two tensors.
    is_pointwise = torch.Tag.pointwise in func.tags and rule.kind is not Kind.OTHER
    if is_pointwise and "pointwise" not in rule.forward:
        return replace(rule, forward=(*rule.forward, "pointwise"))
    return rule


def _by_tags(tags, traits):
    if torch.Tag.inplace_view in tags:
        return _TURN
    if traits.shows_argument and not traits.written:
        return _VIEW
    if traits.is_random:
        return _RANDOM
    if traits.name.startswith(("_foreach_", "_fused_")):
        return _LISTS
    return _POINTWISE if torch.Tag.pointwise in tags else _WHOLE


# They write their first argument and do not read it.
OVERWRITING = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ random_ exponential_ cauchy_ log_normal_ "
    "geometric_ bernoulli_".split()
)

# Names of functions and methods of torch, not of operations, from here on.

# torch's optimizers call these for each parameter, without foreach: where all arguments
# have the same row boundaries, local tensors suffice, at half the host's time.
OF_OPTIMIZERS = frozenset(
    "add_ sub_ mul_ div_ lerp_ addcmul_ addcdiv_ copy_ zero_ add sub mul div sqrt neg "
    "abs square __truediv__ __mul__ __add__ __sub__ sqrt_ neg_ fill_".split()
)
# They may compute a maximum or minimum over the ranks.
EXTREMES = frozenset(
    "max min amax amin aminmax norm vector_norm linalg_norm linalg_vector_norm "
    "_foreach_norm".split()
)
# Autograd's own: their arguments are not operands.
WITHOUT_OPERANDS = frozenset(("backward", "grad"))


def table():
    """Returns the lines of the documentation's table, a row for each kind."""
    lines = ["| kind | operations | communication | gradients |", "|---|---|---|---|"]
    for kind in Kind:
        shown = [rule.shown for rule in TABLE.values() if rule.kind is kind]
        names = ", ".join(filter(None, [*dict.fromkeys(shown), kind.others]))
        cells = kind.name.lower(), names, kind.communication, kind.gradient
        lines.append(f"| {' | '.join(cells)} |")
    return lines
