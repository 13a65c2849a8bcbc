"""Optimizers of the core for sharded parameters: one kernel per flat buffer,
whatever the number of parameters."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch

from flatshard import _C
from flatshard._fsdp.renewal import follow_changes
from flatshard._fsdp.unit import UnitState
from flatshard._tensor.pieces import rows_of, state_beside
from flatshard._tensor.places import unit_of
from flatshard.torch_versions import plain_attributes

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
# Options of torch.optim.AdamW that the core lacks, with the only value it supports. They
# come with the constructor, with a state dict or a checkpoint, or by assignment.
_FIXED = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
# The other options, with what the core can compute with.
_RANGES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "lr": ("at least 0", lambda lr: lr >= 0),
    "betas": ("two numbers in [0, 1)", lambda b: all(0 <= x < 1 for x in b)),
    "eps": ("more than 0", lambda eps: eps > 0),
    "weight_decay": ("at least 0", lambda decay: decay >= 0),
}


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for parameters that `fully_shard` sharded.

    It writes the sharded parameters and their all-gathered form in one pass. Its state
    (`exp_avg`, `exp_avg_sq`, `step`) is the same as in torch.optim.AdamW, so state dicts of
    one load into the other. Each step reads the options in `param_groups` and `state`, so
    changes of them take effect as in torch.optim.AdamW.

    Where states are int8, `state` shows their codes, and `state_dict()` has their values in
    float32. Loading them again gives the same codes.

    Args:
        params: parameters, or groups of them. All trainable parameters of a unit
            have to be in it. Groups may differ in `lr`, `betas`, `eps`,
            `weight_decay` and `state_dtype`, also within a unit.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW. Schedulers change the
            options of each group as usual.
        state_dtype: dtype of `exp_avg` and `exp_avg_sq`: torch.float32, torch.bfloat16 or
            torch.int8. Updates are computed in float32, from the states before they are
            rounded. int8 has blocks of 256 elements, each with a scale. They are counted
            from each parameter's start, so the mesh does not change results. The weights
            of nn.Embedding, and parameters of fewer than 4096 elements, keep float32.
            A group keeps its dtype when a state dict or a checkpoint is loaded.
        stochastic_rounding: bfloat16 parameters are rounded up or down at random, so that
            the mean is exact. Otherwise, updates of less than half a rounding step are
            lost.
        rounding_seed: seed of the random numbers, equal on all ranks.

    Raises:
        ValueError: parameters or groups that cannot be updated together, or a parameter
            whose layout does not allow int8 states.
        NotImplementedError: an option of torch's that is not supported, or int8 states of
            a parameter with tensor parallelism.
    """

    # Its writes are known to the core, see _tensor/writes.py.
    writes_through_core = True

    core: _C.AdamW
    # The unit of each parameter and the index in it.
    _places: dict[torch.Tensor, tuple[UnitState, int]]
    _group_sizes: list[int]  # how many parameters each of param_groups had
    # One per group, apart from param_groups: state dicts of torch.optim.AdamW fit.
    _state_dtypes: list[torch.dtype]

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
        self._state_dtype = state_dtype
        self._state_dtypes = []
        self._rounding_seed = rounding_seed if stochastic_rounding else None
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
            },
        )
        self._make_core()
        self.register_state_dict_post_hook(_show_values, prepend=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Works as torch.optim.Optimizer.add_param_group. The group has all trainable
        parameters of the units whose parameters it has, and may have a `state_dtype`."""
        dtype = self._state_dtype
        if "state_dtype" in param_group:
            param_group = dict(param_group)
            dtype = param_group.pop("state_dtype")
        if dtype not in _STATE_DTYPES:
            raise ValueError(
                "flatshard.optim.AdamW: state_dtype: expected torch.float32, "
                f"torch.bfloat16 or torch.int8, got {dtype}"
            )
        super().add_param_group(param_group)
        self._state_dtypes.append(dtype)
        if hasattr(self, "core"):  # else torch's constructor adds the first groups
            try:
                self._make_core()
            except BaseException:
                self.param_groups.pop()
                self._state_dtypes.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "flatshard.optim.AdamW cannot be copied or pickled, because its states belong "
            "to the model's units; save state_dict(), and make another optimizer for a "
            "copy of the model"
        )

    # -- the core's optimizer ------------------------------------------------------

    def _make_core(self):
        """Makes the core's optimizer for the groups as they are now. It continues with
        the state that there is."""
        self.check_options(self.param_groups)
        given = self._values_of(self.state)
        parameters = self._parameters_now()
        places = {p: _place_of(p) for p in parameters}
        follow_changes(dict.fromkeys(unit for unit, _ in places.values()))
        # A core that is created again may number its parameters in another order.
        places = {p: unit_of(p) for p in parameters}
        units = list(dict.fromkeys(unit for unit, _ in places.values()))
        _check_units(units, places)
        for group, dtype in zip(self.param_groups, self._state_dtypes):
            if dtype == torch.int8:
                _check_int8(places[p] for p in group["params"])
        if self._rounding_seed is not None:
            _check_rounding(places.values())
        cores = [unit.core for unit in units]
        self.core = _C.AdamW(
            cores, self._group_of_parameters(units, places), self._state_dtypes
        )
        self._rounds = False  # names are known in the first step
        self._places = places
        self._parameters = parameters
        self._units = units
        self._cores = cores
        self._group_sizes = self._sizes_now()
        # The core's state of each trained parameter; `state` shows it.
        self._shown = {
            parameter: {
                "step": torch.tensor(0.0),
                **{
                    name: state_beside(unit.parameters[index].stored_shard, view)
                    for name, view in self.core.state(unit.core, index).items()
                },
            }
            for parameter, (unit, index) in places.items()
            if parameter.requires_grad
        }
        self._counts = dict.fromkeys(self._shown, 0)
        self._take_states(given)

    def _parameters_now(self):
        return [p for group in self.param_groups for p in group["params"]]

    def _sizes_now(self):
        return [len(group["params"]) for group in self.param_groups]

    def _group_of_parameters(self, units, places):
        """Returns the index in param_groups of each parameter of each unit, -1 for
        parameters that are not in them."""
        of_units = {unit: [-1] * unit.core.num_parameters for unit in units}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                unit, index = places[parameter]
                of_units[unit][index] = number
        return list(of_units.values())

    @staticmethod
    def check_options(groups: list[dict[str, Any]]) -> None:
        """Raises an error for options that the core cannot follow.

        Args:
            groups: `param_groups`, or such that are to be loaded.
        """
        for group in groups:
            for name, value in _FIXED.items():
                if bool(group.get(name, value)) != value:
                    raise NotImplementedError(
                        f"flatshard.optim.AdamW: {name}={not value} is not supported; "
                        "use torch.optim.AdamW"
                    )
            for name, (expected, fits) in _RANGES.items():
                own = _number(group[name])
                if not fits(own):
                    raise ValueError(
                        f"flatshard.optim.AdamW: {name}: expected {expected}, got {own}"
                    )

    # -- steps ---------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one update. Units without gradients are not updated. In a unit with
        gradients, a parameter without one is updated as if its gradient were zero.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.check_options(self.param_groups)
        self._check_as_made()
        if self._state_was_changed():
            self._check_dropped()
            self._take_states(dict(self.state))
        if self._rounding_seed is not None and not self._rounds:
            self.core.set_stochastic_rounding(self._rounding_seed)
            self._rounds = True
        views = [unit.grads for unit in self._units]
        for grads in views:
            grads.take()
        self.core.step([_options_of(group) for group in self.param_groups])
        for grads in views:
            grads.release()
        self.show_steps()
        return loss

    def _check_as_made(self):
        """Checks that each group has the same parameters as at creation. The core updates
        all parameters that its units had then, by their group."""
        now = self._parameters_now()
        if self._sizes_now() != self._group_sizes or any(
            a is not b for a, b in zip(now, self._parameters)
        ):
            raise RuntimeError(
                "flatshard.optim.AdamW: the parameters in param_groups were changed "
                "since the optimizer was created; call add_param_group(), or create it "
                "again"
            )
        for unit, core in zip(self._units, self._cores):
            if unit.core is not core:
                raise RuntimeError(
                    f"flatshard.optim.AdamW: parameters of unit {unit.name} were "
                    "unfrozen, or changed dtype or device, since the optimizer was "
                    "created; create it again, or use torch.optim.AdamW"
                )
        with plain_attributes():
            for parameter in self._shown:
                if not parameter.requires_grad:
                    unit, index = self._places[parameter]
                    name = unit.parameters[index].names[0]
                    raise NotImplementedError(
                        f"flatshard.optim.AdamW: parameter {name} of unit {unit.name} was "
                        "frozen since the optimizer was created. This is not supported, "
                        "because a unit's parameters are updated together; use "
                        "torch.optim.AdamW"
                    )

    # -- state ---------------------------------------------------------------------

    def _state_was_changed(self):
        """Returns whether the core's state or number of steps was replaced or dropped."""
        for parameter, shown in self._shown.items():
            state = self.state.get(parameter)
            if (
                state is None
                or any(state.get(name) is not shown[name] for name in shown)
                or int(shown["step"]) != self._counts[parameter]
            ):
                return True
        return False

    def _check_dropped(self):
        """A parameter without a state starts at step 1, and all of a unit have one step."""
        kept = {}  # by the core's group: the steps of a parameter with a state
        dropped = {}  # a parameter without one
        for parameter in self._shown:
            unit, index = self._places[parameter]
            group = unit, unit.core.group_index(index)
            if state := self.state.get(parameter):
                kept[group] = int(state.get("step", 0))
            else:
                dropped[group] = unit.parameters[index].names[0]
        for group, name in dropped.items():
            if kept.get(group, 0) > 0:
                raise ValueError(
                    f"flatshard.optim.AdamW: the state of parameter {name} was dropped, "
                    f"but other parameters of unit {group[0].name} were updated "
                    f"{kept[group]} times. This is not supported, because they are updated "
                    "together; drop the states of all parameters of the unit, or use "
                    "torch.optim.AdamW"
                )

    def _take_states(self, given):
        """Puts values of `given`, states by parameter, where the core keeps them, and
        shows these. Without a state a parameter has zeros.

        Raises:
            ValueError: states of one unit with different numbers of steps. Nothing has
                changed.
        """
        steps = {}  # by the core's group, which counts once
        for parameter in self._shown:
            state = given.get(parameter)
            if not state:
                continue
            unit, index = self._places[parameter]
            names = unit.parameters[index].names or [unit.parameters[index].label]
            for name in ("step", *_MOMENTS):
                if name not in state:
                    raise KeyError(
                        f"flatshard.optim.AdamW: the state of parameter "
                        f"{names[0]} has no {name}, only "
                        f"{', '.join(map(str, state))}"
                    )
            for name in _MOMENTS:
                value = state[name]
                is_shown = value is self._shown[parameter][name]
                if not is_shown and not value.is_floating_point():
                    raise ValueError(
                        f"flatshard.optim.AdamW: state {name} of parameter {names[0]}: "
                        f"expected floating-point values, got {value.dtype}; "
                        "state_dict() has the values of int8 states"
                    )
            group = unit, unit.core.group_index(index)
            own = int(state["step"])
            if steps.setdefault(group, own) != own:
                raise ValueError(
                    f"flatshard.optim.AdamW: parameters of one unit were updated "
                    f"{steps[group]} and {own} times. This is not supported, because they "
                    "are updated together; use torch.optim.AdamW"
                )
        for parameter, shown in self._shown.items():
            state = given.get(parameter, {})
            unit, index = self._places[parameter]
            for name in _MOMENTS:
                value = state.get(name)
                if value is shown[name]:
                    continue
                if _has_codes(shown):
                    shard = unit.parameters[index].stored_shard
                    value = torch.zeros_like(shard) if value is None else value
                    rows = rows_of(shard, value).float().contiguous()
                    self.core.encode(unit.core, index, name, rows)
                elif value is None:
                    shown[name].zero_()
                else:
                    shown[name].copy_(value)
            updates = steps.get((unit, unit.core.group_index(index)), 0)
            self.core.set_num_updates(unit.core, index, updates)
        states = {parameter: dict(shown) for parameter, shown in self._shown.items()}
        self.state = type(self.state)(dict, states)
        self.show_steps()

    def _values_of(self, states):
        """Returns states, by parameter. int8 ones that the core has are copied as
        float32."""
        return {p: self._values_of_state(p, state) for p, state in states.items()}

    def _values_of_state(self, parameter, state):
        """Returns `state` of a parameter, as it is shown, with the values of codes."""
        shown = getattr(self, "_shown", {}).get(parameter)
        if shown is None or not _has_codes(shown):
            return dict(state)
        unit, index = self._places[parameter]
        core = self._cores[self._units.index(unit)]
        shard = unit.parameters[index].stored_shard
        decoded = self.core.decoded(core, index)
        return {
            name: state_beside(shard, decoded[name])
            if name in decoded and value is shown[name]
            else value
            for name, value in state.items()
        }

    def show_steps(self) -> None:
        """Makes `step` of each parameter's state what the core counted."""
        for parameter, shown in self._shown.items():
            unit, index = self._places[parameter]
            updates = self.core.num_updates(unit.core, index)
            shown["step"].fill_(float(updates))
            self._counts[parameter] = updates

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Works as torch.optim.Optimizer.load_state_dict, and puts values where the
        core keeps them, in `state_dtype`.

        Raises:
            ValueError, NotImplementedError: options that the core cannot follow. Nothing
                has changed.
        """
        given = {}
        # The last of the hooks sees what torch loads. It casts states to the dtype of
        # the parameter, and this may be bfloat16.
        hook = self.register_load_state_dict_pre_hook(lambda _, d: given.update(d))
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            self.check_options(self.param_groups)
            numbers = [n for group in given["param_groups"] for n in group["params"]]
            states = {
                parameter: given["state"][number]
                for number, parameter in zip(numbers, self._parameters_now())
                if number in given["state"]
            }
            self._take_states(states)
        except BaseException:
            self.state, self.param_groups = before
            raise
        finally:
            hook.remove()


def _show_values(optimizer, state_dict):
    """Puts the values of int8 states into a state dict, because `state` has no scales."""
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters):
        if number in state_dict["state"]:
            state = state_dict["state"][number]
            state_dict["state"][number] = optimizer._values_of_state(parameter, state)


def _has_codes(shown):
    return not shown["exp_avg"].is_floating_point()


def _options_of(group):
    """Returns a group's options as the core reads them."""
    return tuple(
        _number(group[name]) for name in ("lr", "betas", "eps", "weight_decay")
    )


def _number(value):
    """Returns an option, possibly a tensor or a pair, as numbers."""
    if isinstance(value, (list, tuple)):
        return tuple(float(item) for item in value)
    return float(value)


def _place_of(parameter):
    """Returns (unit, index) of a parameter that the core can update."""
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
            f"{tuple(parameter.shape)} is a tensor of a subclass. This is not supported; "
            "use torch.optim.AdamW"
        )
    if parameter.dtype == torch.float64:
        raise NotImplementedError(
            "flatshard.optim.AdamW: float64 parameters are not supported, "
            f"as it computes in float32; got one of shape "
            f"{tuple(parameter.shape)}. Use torch.optim.AdamW"
        )
    return place


def _check_int8(places):
    for unit, index in places:
        p = unit.parameters[index]
        if p.parallel is not None:
            raise NotImplementedError(
                f"flatshard.optim.AdamW: state_dtype=torch.int8: parameter {p.title} of "
                f"unit {unit.name or '(not run yet)'} has tensor parallelism. This is not "
                "supported; put it into a group with state_dtype=torch.bfloat16"
            )


def _check_rounding(places):
    members = [unit.parameters[index] for unit, index in places]
    rounded = [p for p in members if p.trainable and p.shard.dtype == torch.bfloat16]
    for p in rounded:
        if p.parallel is not None:
            raise NotImplementedError(
                f"flatshard.optim.AdamW: stochastic_rounding: parameter {p.title} has "
                "tensor parallelism. This is not supported, because its parts would draw "
                "the same random numbers; leave stochastic_rounding out"
            )
    if not rounded:
        raise ValueError(
            "flatshard.optim.AdamW: stochastic_rounding is for bfloat16 parameters, and "
            "this optimizer has none; convert the model with model.to(torch.bfloat16) "
            "before fully_shard, or leave it out"
        )


def _check_units(units, places):
    for unit in units:
        for p in unit.parameters:
            if p.trainable and p.is_shown() and p.shard not in places:
                raise ValueError(
                    f"flatshard.optim.AdamW: parameter {p.title} of unit "
                    f"{unit.name or '(not run yet)'} is missing; a unit's "
                    "parameters are updated together, use torch.optim.AdamW"
                )
            dtypes = p.shard.dtype, p.param_dtype or p.shard.dtype
            fits = dtypes[0] == torch.float32 or dtypes == (torch.bfloat16,) * 2
            if p.trainable and p.shard.is_cuda and not fits:
                raise NotImplementedError(
                    "flatshard.optim.AdamW: expected float32 parameters on GPUs, or "
                    f"bfloat16 ones that are all-gathered in bfloat16, got {dtypes[0]} "
                    f"all-gathered in {dtypes[1]} in parameter {p.title} of unit "
                    f"{unit.name or '(not run yet)'}; keep them in float32 with "
                    "MixedPrecisionPolicy(param_dtype=torch.bfloat16), or use "
                    "torch.optim.AdamW"
                )
