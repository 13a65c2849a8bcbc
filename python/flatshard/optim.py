"""Optimizers of the core for sharded parameters: one kernel per flat buffer,
whatever the number of parameters."""

from collections.abc import Callable, Iterable
from typing import overload

import torch

from flatshard import _C
from flatshard._fsdp.renewal import follow_changes
from flatshard._fsdp.unit import UnitState
from flatshard._tensor.pieces import state_beside
from flatshard._tensor.places import unit_of
from flatshard.torch_versions import plain_attributes


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for parameters that `fully_shard` sharded.

    It writes the sharded parameters and their all-gathered form in one pass. Its state
    (`exp_avg`, `exp_avg_sq`, `step`) equals torch.optim.AdamW's, so state dicts of one
    load into the other.

    Args:
        params: parameters, or groups of them. All trainable parameters of a unit
            have to be in it. Groups may differ only in whether `weight_decay` is 0.
        lr: learning rate; schedulers change it as always, for all groups alike.
        betas, eps, weight_decay: as in torch.optim.AdamW.

    Raises:
        ValueError: parameters or groups that cannot be updated together.
        NotImplementedError: an option of torch's that is not supported.
    """

    # Its writes are known to the core, see _tensor/writes.py.
    writes_through_core = True

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
    ):
        for name, value in (
            ("amsgrad", amsgrad),
            ("maximize", maximize),
            ("capturable", capturable),
            ("differentiable", differentiable),
        ):
            if value:
                raise NotImplementedError(
                    f"flatshard.optim.AdamW: {name}=True is not supported; use "
                    "torch.optim.AdamW"
                )
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
        )
        # The unit and the index in it.
        self._places: dict[torch.Tensor, tuple[UnitState, int]] = {}
        undecayed = self._check_groups()
        follow_changes(dict.fromkeys(unit for unit, _ in self._places.values()))
        # A core that is made anew may number its parameters in another order.
        self._places = {parameter: unit_of(parameter) for parameter in self._places}
        self._check_units()
        decay = {g["weight_decay"] for g in self.param_groups} - {0, 0.0}
        for parameter in undecayed:
            unit, index = self._places[parameter]
            unit.core.set_attribute(index, "weight_decay", "none")
        first = self.param_groups[0]
        self._units = list(dict.fromkeys(unit for unit, _ in self._places.values()))
        self._cores = [unit.core for unit in self._units]
        self.core = _C.AdamW(
            self._cores,
            beta1=first["betas"][0],
            beta2=first["betas"][1],
            eps=first["eps"],
            weight_decay=decay.pop() if decay else 0.0,
        )
        self._show_state()

    def _check_groups(self):
        """Returns the parameters that are not decayed."""
        first = self.param_groups[0]
        undecayed, decays = [], set()
        for group in self.param_groups:
            for name in ("lr", "betas", "eps"):
                if group[name] != first[name]:
                    raise ValueError(
                        f"flatshard.optim.AdamW: expected one {name} for all groups, "
                        f"got {first[name]} and {group[name]}; use torch.optim.AdamW"
                    )
            if group["weight_decay"] == 0:
                undecayed += group["params"]
            else:
                decays.add(group["weight_decay"])
            for parameter in group["params"]:
                place = unit_of(parameter)
                if place is None:
                    raise ValueError(
                        "flatshard.optim.AdamW: expected parameters that fully_shard "
                        f"sharded, got one of shape {tuple(parameter.shape)} that it "
                        "did not; make the optimizer after fully_shard"
                    )
                if place[0].parameters[place[1]].extension is not None:
                    raise NotImplementedError(
                        "flatshard.optim.AdamW: a parameter of shape "
                        f"{tuple(parameter.shape)} is a tensor of a subclass, which is "
                        "not supported. Use torch.optim.AdamW"
                    )
                if parameter.dtype == torch.float64:
                    raise NotImplementedError(
                        "flatshard.optim.AdamW: float64 parameters are not supported, "
                        f"as it computes in float32; got one of shape "
                        f"{tuple(parameter.shape)}. Use torch.optim.AdamW"
                    )
                self._places[parameter] = place
        if len(decays) > 1:
            raise ValueError(
                "flatshard.optim.AdamW: expected one weight_decay besides 0, got "
                f"{sorted(decays)}; use torch.optim.AdamW"
            )
        return undecayed

    def _check_units(self):
        for unit in {unit for unit, _ in self._places.values()}:
            for p in unit.parameters:
                if p.trainable and p.is_shown() and p.shard not in self._places:
                    raise ValueError(
                        f"flatshard.optim.AdamW: parameter {p.title} of unit "
                        f"{unit.name or '(not run yet)'} is missing; a unit's "
                        "parameters are updated together, use torch.optim.AdamW"
                    )

    def _show_state(self):
        for parameter, (unit, index) in self._places.items():
            if not parameter.requires_grad:
                continue
            views = self.core.state(unit.core, index)
            self.state[parameter] = {
                "step": torch.tensor(0.0),
                **{name: state_beside(parameter, view) for name, view in views.items()},
            }

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one update. Units without a gradient are left alone. A parameter without
        one, in a unit that has others, counts as zeros.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rates = {float(group["lr"]) for group in self.param_groups}
        if len(rates) > 1:
            raise ValueError(
                f"flatshard.optim.AdamW: expected one lr for all groups, got {rates}"
            )
        self._check_as_made()
        views = [unit.grads for unit in self._units if unit.grads is not None]
        for grads in views:
            grads.take()
        self.core.step(rates.pop())
        for grads in views:
            grads.release()
        self.show_steps()
        return loss

    def _check_as_made(self):
        """The core updates all parameters of a unit, and those it had then."""
        for unit, core in zip(self._units, self._cores):
            if unit.core is not core:
                raise RuntimeError(
                    f"flatshard.optim.AdamW: parameters of unit {unit.name} were "
                    "unfrozen, got another dtype, or moved to another device since the "
                    "optimizer was made; make it anew, or use torch.optim.AdamW"
                )
        with plain_attributes():
            for parameter, (unit, index) in self._places.items():
                if parameter in self.state and not parameter.requires_grad:
                    name = unit.parameters[index].names[0]
                    raise NotImplementedError(
                        f"flatshard.optim.AdamW: parameter {name} of unit {unit.name} was "
                        "frozen since the optimizer was made, which is not supported, as "
                        "a unit's parameters are updated together; use torch.optim.AdamW"
                    )

    def show_steps(self) -> None:
        """Makes `step` of each parameter's state what the core counted."""
        for parameter, (unit, index) in self._places.items():
            if parameter in self.state:
                updates = self.core.num_updates(unit.core, index)
                self.state[parameter]["step"].fill_(float(updates))

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Works as torch.optim.Optimizer.load_state_dict, and puts values where the
        core keeps them."""
        own = {p: dict(state) for p, state in self.state.items()}
        super().load_state_dict(state_dict)
        loaded, self.state = self.state, type(self.state)(dict)
        for parameter, state in own.items():
            found = loaded.get(parameter, {})
            for name in ("exp_avg", "exp_avg_sq"):
                if name in found:
                    state[name].copy_(found[name])
                else:
                    state[name].zero_()
            step = float(found.get("step", 0))
            state["step"].fill_(step)
            self.state[parameter] = state
            unit, index = self._places[parameter]
            self.core.set_num_updates(unit.core, index, int(step))
