"""Muon of the core."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from flatshard import _C
from flatshard._fsdp.grid import tell_matrix_ranks
from flatshard._fsdp.unit import UnitState
from flatshard.optim.core_optimizer import CoreOptimizer, number

_ADJUST_LR = ("original", "match_rms_adamw", "spectral_unclamped")
_MOST_STEPS = 99  # torch's limit


def _are_coefficients(values):
    return (
        isinstance(values, tuple)
        and len(values) == 3
        and all(math.isfinite(value) for value in values)
    )


class Muon(CoreOptimizer):
    """torch.optim.Muon for parameters that `fully_shard` sharded.

    One rank orthogonalizes each matrix. The other ranks send it their parts in bfloat16,
    the precision of the iterations. Results do not depend on the number of ranks or on the
    strategy. In one process on a CPU they are bitwise equal to torch.optim.Muon for float32
    parameters. Its state (`momentum_buffer`) has the same values as in torch.optim.Muon,
    always in float32, so state dicts of one load into the other. Each step reads the
    options in `param_groups` and `state`.

    Pass only the weights of hidden layers. Update embeddings, the head, and other parameters
    with a second optimizer, such as flatshard.optim.AdamW.

    Args:
        params: parameters with two dimensions, or groups of them. Groups may differ in
            every option, also within a unit.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps: as in
            torch.optim.Muon. Schedulers change the options of each group as usual.
        adjust_lr_fn: "original" (None), "match_rms_adamw" or "spectral_unclamped", as in
            torch.optim.Muon: the factor of `lr` for a matrix of A rows and B columns is
            sqrt(max(1, A / B)), 0.2 sqrt(max(A, B)) or sqrt(A / B).
        split_sizes: numbers of rows of the matrices that are packed in each parameter of a
            group, as for torch.split(parameter, split_sizes, dim=-2): for example
            (q, k, v) of a packed projection. Each one is orthogonalized separately. With
            `split_sizes` a parameter may have three dimensions: a stack of matrices, such as
            experts, each of which is split. None: a parameter is one matrix. The sizes of a
            group cannot change, and a group keeps them when a state dict or a checkpoint is
            loaded.

    Raises:
        ValueError: a parameter without two dimensions, or an option out of range.
        NotImplementedError: parameters or options that are not supported.
    """

    _name = "flatshard.optim.Muon"
    _instead = "torch.optim.Muon"
    _state_names = ("momentum_buffer",)
    _counts = False
    _ranges = {
        "lr": ("at least 0, and finite", lambda lr: 0 <= lr < math.inf),
        "weight_decay": ("at least 0", lambda decay: decay >= 0),
        "momentum": ("a number in [0, 1)", lambda momentum: 0 <= momentum < 1),
        "ns_coefficients": ("three numbers", _are_coefficients),
        "eps": ("more than 0", lambda eps: eps > 0),
        "ns_steps": (
            f"an integer from 1 to {_MOST_STEPS}",
            lambda steps: 1 <= steps <= _MOST_STEPS and steps == int(steps),
        ),
    }
    creation_option = "split_sizes"
    _creation_default = None

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split_sizes: Sequence[int] | None = None,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "split_sizes": split_sizes,
            },
        )

    def _check_groups(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self._check_matrix(parameter, self.creation_value(group))
        super()._check_groups()

    def _check_matrix(self, parameter, split_sizes):
        if parameter.dim() != 2 and (parameter.dim() != 3 or split_sizes is None):
            text = (
                f"{self._name} only supports 2D parameters whereas we found a parameter "
                f"with size: {parameter.size()}; pass it to flatshard.optim.AdamW"
            )
            if parameter.dim() == 3:
                text += (
                    ", or, if it is a stack of matrices such as experts, to a group with "
                    f"split_sizes=({parameter.size(1)},), or with the rows of each matrix "
                    "that is packed in an entry"
                )
            raise ValueError(text)
        if split_sizes is None:
            return
        rows = parameter.size(-2)
        if not split_sizes or min(split_sizes) < 1 or sum(split_sizes) != rows:
            raise ValueError(
                f"{self._name}: split_sizes: expected numbers of rows with the sum {rows} "
                f"for a parameter with size {parameter.size()}, got {split_sizes}"
            )

    def check_options(self, groups: list[dict[str, Any]]) -> None:
        super().check_options(groups)
        for group in groups:
            adjust = group["adjust_lr_fn"]
            if adjust is not None and adjust not in _ADJUST_LR:
                raise ValueError(
                    f"{self._name}: adjust_lr_fn: expected None or one of "
                    f"{', '.join(_ADJUST_LR)}, got {adjust!r}"
                )

    def _place_of(self, parameter):
        unit, index = super()._place_of(parameter)
        p = unit.parameters[index]
        of = f"parameter {p.title} of unit {unit.name or '(not run yet)'}"
        if unit.core.offloads:
            raise NotImplementedError(
                f"{self._name}: {of} is offloaded to the CPU. This is not supported; leave "
                "out offload_policy, or use flatshard.optim.AdamW"
            )
        if p.dim != 0:
            raise NotImplementedError(
                f"{self._name}: {of} is sharded along dimension {p.dim}. This is not "
                "supported; shard it along dimension 0 (shard_placement_fn), or use "
                "torch.optim.Muon"
            )
        return unit, index

    def _values_of(self, group: dict[str, Any]) -> _C.ParameterValues:
        return _C.ParameterValues.muon(
            lr=number(group["lr"]),
            weight_decay=number(group["weight_decay"]),
            momentum=number(group["momentum"]),
            nesterov=bool(group["nesterov"]),
            ns_coefficients=number(group["ns_coefficients"]),
            eps=number(group["eps"]),
            ns_steps=int(group["ns_steps"]),
            adjust_lr_fn=group["adjust_lr_fn"] or _ADJUST_LR[0],
        )

    def _matrices(self, units: list[UnitState]) -> _C.MatrixOptions:
        mesh, cut_axes = tell_matrix_ranks(units)
        return _C.MatrixOptions(
            split_sizes=[list(self.creation_value(g) or ()) for g in self.param_groups],
            mesh=mesh,
            cut_axes=cut_axes,
        )
