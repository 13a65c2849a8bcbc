"""Where parameters, gradients and optimizer state are stored, in Megatron-FSDP's
words."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement

from flatshard._fsdp.strategies import by_placements

# The placement of each state, a letter per mesh axis: Replicate, Partial, Shard.
_STRATEGIES = by_placements()
_REFUSED = {
    ("SS", "SS", "SS"): "to shard over all ranks of two axes, give a mesh of one "
    "axis over the same ranks",
}


@dataclass(frozen=True)
class Placements:
    """Where parameters, gradients and optimizer state are stored, per mesh axis.

    Attributes:
        dp_axes: data-parallel axes of the mesh, by number or name, in its order.
        parameter, gradient, optimizer: for each of these axes Replicate() or
            Shard(0); for a gradient Partial("avg") instead of Replicate().
    """

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self):
        for name in ("parameter", "gradient", "optimizer"):
            placements = getattr(self, name)
            if len(placements) != len(self.dp_axes):
                raise ValueError(
                    f"Placements.{name}: expected one placement per axis of dp_axes, "
                    f"{len(self.dp_axes)}, got {len(placements)}"
                )


def strategy_of(placements):
    lists = {
        name: "".join(_letter(name, p) for p in getattr(placements, name))
        for name in ("parameter", "gradient", "optimizer")
    }
    key = tuple(lists.values())
    if key in _STRATEGIES:
        return _STRATEGIES[key]
    given = ", ".join(
        f"{name} {list(getattr(placements, name))}"
        for name in ("parameter", "gradient", "optimizer")
    )
    reason = _REFUSED.get(
        key,
        "expected the placements of ZeRO-0 to 3 on one axis, or on two with replicas over "
        "the first (docs/guides/from_megatron_fsdp.md lists them)",
    )
    raise NotImplementedError(f"placements: {given} are not supported: {reason}")


def _letter(name, placement):
    if placement.is_shard():
        if placement.dim != 0:
            raise NotImplementedError(
                f"Placements.{name}: expected Shard(0), got {placement}: parameters "
                "are sharded by rows"
            )
        return "S"
    if name == "gradient" and placement.is_partial():
        if placement.reduce_op != "avg":
            raise NotImplementedError(
                f"Placements.gradient: expected Partial('avg'), got {placement}; for "
                "sums call set_gradient_divide_factor(1.0) on each sharded module"
            )
        return "P"
    if name != "gradient" and placement.is_replicate():
        return "R"
    expected = "Partial('avg')" if name == "gradient" else "Replicate()"
    raise ValueError(
        f"Placements.{name}: expected {expected} or Shard(0) per axis, got {placement}"
    )


def data_parallel_mesh(mesh, axes):
    numbers = [_axis_number(mesh, axis) for axis in axes]
    if numbers != sorted(set(numbers)):
        raise ValueError(
            "Placements.dp_axes: expected different axes in the mesh's order, got "
            f"{list(axes)}"
        )
    if len(numbers) == mesh.ndim:
        return mesh
    if mesh.mesh_dim_names is None or not numbers:
        raise ValueError(
            f"Placements.dp_axes: {list(axes)} are a part of the axes of a mesh of "
            f"{mesh.ndim}; expected at least one axis, and names: give "
            "init_device_mesh mesh_dim_names"
        )
    names = tuple(mesh.mesh_dim_names[n] for n in numbers)
    return mesh[names]


def _axis_number(mesh, axis):
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise ValueError(
        f"Placements.dp_axes: expected axes of the mesh ({mesh.ndim} with the names "
        f"{names or None}), got {axis!r}"
    )
