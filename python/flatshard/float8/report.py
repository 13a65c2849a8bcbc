"""Which parameters are FP8, and why the others are not."""

from collections import Counter
from dataclasses import dataclass, field

from torch import nn

from flatshard import _C
from flatshard._tensor.mesh import device_of
from flatshard._tensor.places import unit_of


@dataclass(frozen=True)
class Float8Report:
    """The findings of `flatshard.float8.describe`; `str()` of it is one line.

    Attributes:
        float8: recipe of each parameter that is FP8, by name, e.g. "rowwise, derived
            columns".
        others: why each of the others is not, by name, e.g. "weight of Embedding".
        num_elements: of all parameters.
        num_float8_elements: of those that are FP8.
    """

    float8: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    num_elements: int = 0
    num_float8_elements: int = 0

    def __str__(self):
        share = 100 * self.num_float8_elements / max(1, self.num_elements)
        text = (
            f"float8: {len(self.float8)} parameters with {share:.1f} % of the elements"
        )
        for recipe, count in Counter(self.float8.values()).items():
            text += f", {recipe} ({count})"
        reasons = Counter(self.others.values()).items()
        return (
            text
            + "; not FP8: " * bool(reasons)
            + ", ".join(f"{count} ({reason})" for reason, count in reasons)
        )


def describe(model: nn.Module) -> Float8Report:
    """Reports which parameters of a sharded model are FP8, and why the others are not.

    Args:
        model: a module that fully_shard wrapped, or one that contains such.

    Returns:
        Float8Report.
    """
    float8, others, sizes = {}, {}, {}
    for name, shard in model.named_parameters():
        sizes[name] = shard.numel()
        place = unit_of(shard)
        if place is None:
            others[name] = "not sharded"
            continue
        state, index = place
        p = state.parameters[index]
        if p.float8:
            float8[name] = _describe(
                state.sharding.options.fp8, device_of(state.sharding.device_mesh)
            )
        else:
            others[name] = p.why_not_float8
    return Float8Report(
        float8, others, sum(sizes.values()), sum(sizes[name] for name in float8)
    )


def _describe(fp8, device):
    emulated = device.type == "cpu" or not _C.float8_multiplies(fp8.recipe, device)
    columns = "stored" if fp8.column_plane == "stored" else "derived"
    return f"{fp8.recipe}{' (emulated)' * emulated}, {columns} columns"
