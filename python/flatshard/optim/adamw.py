"""AdamW of the core."""

from collections.abc import Iterable
from typing import Any

import math
import torch

from flatshard import _C
from flatshard.optim.core_optimizer import CoreOptimizer, Place, number

_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)


class AdamW(CoreOptimizer):
    """torch.optim.AdamW for parameters that `fully_shard` sharded.

    It writes the sharded parameters and their all-gathered form in one pass. Its state
    (`exp_avg`, `exp_avg_sq`, `step`) is the same as in torch.optim.AdamW, so state dicts of
    one load into the other. Each step reads the options in `param_groups` and `state`, so
    changes of them take effect as in torch.optim.AdamW.

    Where states are int8, `state` shows their codes, and `state_dict()` has their values in
    float32. Loading them again gives the same codes.

    Args:
        params: parameters, or groups of them. Groups may differ in `lr`, `betas`, `eps`,
            `weight_decay` and `state_dtype`, also within a unit. Another optimizer may
            update other parameters of a unit whose states are float32.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. Schedulers change the
            options of each group as usual.
        state_dtype: dtype of `exp_avg` and `exp_avg_sq`: torch.float32, torch.bfloat16 or
            torch.int8. Updates are computed in float32, from the states before they are
            rounded. int8 has blocks of 256 elements, each with a scale. They are counted
            from each parameter's start, so the mesh does not change results. The weights
            of nn.Embedding, and parameters of fewer than 4096 elements, keep float32.
            The dtype of a group cannot change, and a group keeps it when a state dict or a
            checkpoint is loaded. `param_groups` has it where it was given, so an
            optimizer that is created from them has the same.
        stochastic_rounding: bfloat16 parameters are rounded up or down at random, so that
            the mean is exact. Otherwise, updates of less than half a rounding step are
            lost.
        rounding_seed: seed of the random numbers, equal on all ranks, from 0 to 2^64 - 1.

    Raises:
        ValueError: parameters or groups that cannot be updated together, an option out of
            range, or a parameter whose layout does not allow int8 states.
        NotImplementedError: an option of torch's that is not supported, or int8 states or
            stochastic rounding of a parameter with tensor parallelism.
    """

    _name = "flatshard.optim.AdamW"
    _instead = "torch.optim.AdamW"
    _state_names = ("exp_avg", "exp_avg_sq")
    _counts = True
    _fixed = {
        "amsgrad": False,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "decoupled_weight_decay": True,
    }
    _ranges = {
        "lr": ("at least 0, and finite", lambda lr: 0 <= lr < math.inf),
        "betas": ("two numbers in [0, 1)", lambda b: all(0 <= x < 1 for x in b)),
        "eps": ("more than 0", lambda eps: eps > 0),
        "weight_decay": ("at least 0", lambda decay: decay >= 0),
    }
    creation_option = "state_dtype"
    _creation_default = torch.float32

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype = torch.float32,
        stochastic_rounding: bool = False,
        rounding_seed: int = 0,
    ):
        if not 0 <= rounding_seed < 2**64 or rounding_seed != int(rounding_seed):
            raise ValueError(
                f"{self._name}: rounding_seed: expected an integer from 0 to 2^64 - 1, "
                f"got {rounding_seed}"
            )
        self._rounding_seed = int(rounding_seed) if stochastic_rounding else None
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
                "differentiable": differentiable,
                "fused": fused,
                "state_dtype": state_dtype,
            },
        )

    def check_options(self, groups: list[dict[str, Any]]) -> None:
        super().check_options(groups)
        for group in groups:
            dtype = self.creation_value(group)
            if dtype not in _STATE_DTYPES:
                raise ValueError(
                    f"{self._name}: state_dtype: expected torch.float32, "
                    f"torch.bfloat16 or torch.int8, got {dtype}"
                )

    def _values_of(self, group: dict[str, Any]) -> _C.ParameterValues:
        return _C.ParameterValues.adamw(
            lr=number(group["lr"]),
            betas=number(group["betas"]),
            eps=number(group["eps"]),
            weight_decay=number(group["weight_decay"]),
            state_dtype=self.creation_value(group),
        )

    def _make_core(self):
        super()._make_core()
        self._rounds = False

    def _before_update(self) -> None:
        # The names of parameters select the random numbers, and are known now.
        if self._rounding_seed is not None and not self._rounds:
            self.core.set_stochastic_rounding(self._rounding_seed)
            self._rounds = True

    def _check_places(self, places: dict[torch.Tensor, Place]) -> None:
        for unit, index in places.values():
            p = unit.parameters[index]
            dtypes = p.shard.dtype, p.param_dtype or p.shard.dtype
            fits = dtypes[0] == torch.float32 or dtypes == (torch.bfloat16,) * 2
            if p.trainable and p.shard.is_cuda and not fits:
                raise NotImplementedError(
                    f"{self._name}: expected float32 parameters on GPUs, or "
                    f"bfloat16 ones that are all-gathered in bfloat16, got {dtypes[0]} "
                    f"all-gathered in {dtypes[1]} in {_title(unit, p)}; keep them in "
                    "float32 with MixedPrecisionPolicy(param_dtype=torch.bfloat16), or use "
                    f"{self._instead}"
                )
        for group in self.param_groups:
            if self.creation_value(group) == torch.int8:
                self._check_not_parallel(
                    [places[p] for p in group["params"]],
                    "state_dtype=torch.int8",
                    "put it into a group with state_dtype=torch.bfloat16",
                )
        if self._rounding_seed is not None:
            self._check_rounding(places)

    def _check_not_parallel(self, places, option, instead):
        """Refuses tensor parallelism for an option that counts elements of the full
        parameter."""
        for unit, index in places:
            p = unit.parameters[index]
            if p.parallel is not None:
                raise NotImplementedError(
                    f"{self._name}: {option}: {_title(unit, p)} has tensor parallelism. "
                    f"This is not supported; {instead}"
                )

    def _check_rounding(self, places):
        rounded = [
            (unit, index)
            for unit, index in places.values()
            if unit.parameters[index].trainable
            and unit.parameters[index].shard.dtype == torch.bfloat16
        ]
        if not rounded:
            raise ValueError(
                f"{self._name}: stochastic_rounding is for bfloat16 parameters, and "
                "this optimizer has none; convert the model with model.to(torch.bfloat16) "
                "before fully_shard, or leave it out"
            )
        self._check_not_parallel(
            rounded, "stochastic_rounding", "leave stochastic_rounding out"
        )
        groups = {(unit, unit.core.group_index(index)) for unit, index in rounded}
        for unit in dict.fromkeys(unit for unit, _ in rounded):
            for p in unit.parameters:
                is_stored_with = (unit, unit.core.group_index(p.index)) in groups
                if is_stored_with and p.is_shown() and p.shard not in places:
                    raise NotImplementedError(
                        f"{self._name}: stochastic_rounding: {_title(unit, p)} is "
                        "missing. This is not supported, because a unit's parameters "
                        "are rounded together; shard its module as a separate unit, or "
                        "leave stochastic_rounding out"
                    )


def _title(unit, p):
    return f"parameter {p.title} of unit {unit.name or '(not run yet)'}"
