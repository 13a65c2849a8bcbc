"""Base of the optimizers of flatshard.optim: groups, states and steps of the core."""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, overload

import torch

from flatshard import _C
from flatshard._fsdp.renewal import follow_changes
from flatshard._fsdp.unit import UnitState
from flatshard._tensor.pieces import rows_of, state_beside
from flatshard._tensor.places import unit_of
from flatshard.torch_versions import plain_attributes

# Describes the values of an option that the core supports, and tests one.
Range = tuple[str, Callable[[Any], bool]]
# The unit of a parameter and the index in it.
Place = tuple[UnitState, int]


class CoreOptimizer(torch.optim.Optimizer):
    """An optimizer of parameters that `fully_shard` sharded, with the states and the
    arithmetic of the core. Each step reads `param_groups` and `state`."""

    # Its writes are known to the core, see _tensor/writes.py.
    writes_through_core = True

    # Set by subclasses.
    _name: ClassVar[str]
    _instead: ClassVar[str]  # torch's optimizer
    _state_names: ClassVar[tuple[str, ...]]  # of the tensors of a parameter's state
    _counts: ClassVar[bool]  # the state has `step`
    # Options of torch's optimizer that the core lacks, with the only value that it
    # supports. They come with the constructor, with a state dict or a checkpoint, or by
    # assignment.
    _fixed: ClassVar[dict[str, bool]] = {}
    _ranges: ClassVar[dict[str, Range]]
    # An option of groups that torch's optimizer lacks. The core's optimizer is made with
    # it, so it cannot change, and groups keep it when a state dict or a checkpoint is
    # loaded. A group without it has the default, so groups of torch's optimizer fit.
    creation_option: ClassVar[str]
    _creation_default: ClassVar[Any]

    _core: _C.Optimizer | None
    _places: dict[torch.Tensor, Place]
    _group_sizes: list[int]  # how many parameters each of param_groups had
    _creation_values: list[Any]  # of each of param_groups

    def __init__(self, params: Iterable, defaults: dict[str, Any]):
        if defaults[self.creation_option] == self._creation_default:
            del defaults[self.creation_option]
        super().__init__(params, defaults)
        self._core = None
        self._follow_groups()
        self.register_state_dict_post_hook(_show_values, prepend=True)

    # -- of subclasses -------------------------------------------------------------

    def _values_of(self, group: dict[str, Any]) -> _C.ParameterValues:
        """Returns the options of a group as the core reads them."""
        raise NotImplementedError

    def _check_groups(self) -> None:
        """Raises an error for param_groups that the core cannot follow."""
        self.check_options(self.param_groups)

    def _matrices(self, units: list[UnitState]) -> _C.MatrixOptions:
        return _C.MatrixOptions(split_sizes=[], mesh=None, cut_axes=[])

    def _check_places(self, places: dict[torch.Tensor, Place]) -> None:
        """Raises an error for parameters that the core cannot update together."""

    def _before_update(self) -> None:
        """Prepares the core for a step. Names of parameters are known."""

    # -- groups --------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Works as torch.optim.Optimizer.add_param_group."""
        super().add_param_group(param_group)
        if hasattr(self, "_core"):  # else torch's constructor adds the first groups
            try:
                self._follow_groups()
            except BaseException:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{self._name} cannot be copied or pickled, because its states belong "
            "to the model's units; save state_dict(), and make another optimizer for a "
            "copy of the model"
        )

    # -- the core's optimizer ------------------------------------------------------

    @property
    def core(self) -> _C.Optimizer:
        """The core's optimizer. Where parameters were not sharded when the groups were
        given, it is made at the first use: accelerate makes the optimizer, then shards,
        and then puts the sharded parameters into the groups."""
        if self._core is None:
            self._make_core()
        assert self._core is not None
        return self._core

    def _follow_groups(self):
        """Makes the core's optimizer for new groups, now or at the first use."""
        parameters = self._parameters_now()
        if self._core is None and any(unit_of(p) is None for p in parameters):
            self._check_groups()
        else:
            self._make_core()

    def _make_core(self):
        """Makes the core's optimizer for the groups as they are now. It continues with
        the state that there is."""
        self._check_groups()
        given = {p: self._decoded(p, state) for p, state in self.state.items()}
        parameters = self._parameters_now()
        places = {p: self._place_of(p) for p in parameters}
        follow_changes(dict.fromkeys(unit for unit, _ in places.values()))
        # A core that is created again may number its parameters in another order.
        places = {p: unit_of(p) for p in parameters}
        units = list(dict.fromkeys(unit for unit, _ in places.values()))
        self._check_places(places)
        cores = [unit.core for unit in units]
        self._core = _C.Optimizer(
            cores,
            self._group_of_parameters(units, places),
            [self._values_of(group) for group in self.param_groups],
            self._matrices(units),
        )
        self._places = places
        self._parameters = parameters
        self._units = units
        self._cores = cores
        self._group_sizes = self._sizes_now()
        self._creation_values = [self.creation_value(g) for g in self.param_groups]
        # The core's state of each trained parameter; `state` shows it.
        self._shown = {
            parameter: {
                **({"step": torch.tensor(0.0)} if self._counts else {}),
                **{
                    name: state_beside(unit.parameters[index].stored_shard, view)
                    for name, view in self.core.state(unit.core, index).items()
                },
            }
            for parameter, (unit, index) in places.items()
            if parameter.requires_grad
        }
        self._steps = dict.fromkeys(self._shown, 0)
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

    def creation_value(self, group: dict[str, Any]) -> Any:
        """Returns the `creation_option` of a group."""
        value = group.get(self.creation_option, self._creation_default)
        return tuple(value) if isinstance(value, list) else value

    def check_options(self, groups: list[dict[str, Any]]) -> None:
        """Raises an error for options that the core cannot follow.

        Args:
            groups: `param_groups`, or such that are to be loaded.
        """
        for group in groups:
            for name, value in self._fixed.items():
                if bool(group.get(name, value)) != value:
                    raise NotImplementedError(
                        f"{self._name}: {name}={not value} is not supported; "
                        f"use {self._instead}"
                    )
            for name, (expected, fits) in self._ranges.items():
                own = number(group[name])
                if not fits(own):
                    raise ValueError(
                        f"{self._name}: {name}: expected {expected}, got {own}"
                    )

    def _place_of(self, parameter):
        """Returns (unit, index) of a parameter that the core can update."""
        place = unit_of(parameter)
        if place is None:
            raise ValueError(
                f"{self._name}: expected parameters that fully_shard "
                f"sharded, got one of shape {tuple(parameter.shape)} that it "
                "did not; make the optimizer after fully_shard"
            )
        if place[0].parameters[place[1]].extension is not None:
            raise NotImplementedError(
                f"{self._name}: a parameter of shape "
                f"{tuple(parameter.shape)} is a tensor of a subclass. This is not "
                f"supported; use {self._instead}"
            )
        if parameter.dtype == torch.float64:
            raise NotImplementedError(
                f"{self._name}: float64 parameters are not supported, "
                f"as it computes in float32; got one of shape "
                f"{tuple(parameter.shape)}. Use {self._instead}"
            )
        return place

    # -- steps ---------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one update of the parameters that have a gradient. The others are
        skipped. A backward leaves `.grad` None only where no rank has a gradient, so
        all ranks skip the same ones. A program that sets or drops a `.grad` does so on
        all ranks.

        Args:
            closure: evaluates the model again and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        core = self.core
        self.check_options(self.param_groups)
        self._check_as_made()
        if self._state_was_changed():
            self._take_states(dict(self.state))
        self._before_update()
        views = [unit.grads for unit in self._units]
        without_gradient = [grads.take() for grads in views]
        core.step(
            [self._values_of(group) for group in self.param_groups], without_gradient
        )
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
                f"{self._name}: the parameters in param_groups were changed "
                "since the optimizer was created; call add_param_group(), or create it "
                "again"
            )
        for group, made in zip(self.param_groups, self._creation_values):
            value = self.creation_value(group)
            if value != made:
                raise ValueError(
                    f"{self._name}: {self.creation_option} cannot change from {made} to "
                    f"{value} after the optimizer was created; create it again"
                )
        for unit, core in zip(self._units, self._cores):
            if unit.core is not core:
                raise RuntimeError(
                    f"{self._name}: parameters of unit {unit.name} were "
                    "unfrozen, or changed dtype or device, since the optimizer was "
                    f"created; create it again, or use {self._instead}"
                )
        with plain_attributes():
            for parameter in self._shown:
                if not parameter.requires_grad:
                    unit, index = self._places[parameter]
                    name = unit.parameters[index].names[0]
                    raise NotImplementedError(
                        f"{self._name}: parameter {name} of unit {unit.name} was "
                        "frozen since the optimizer was created. This is not supported, "
                        "because a unit's parameters are updated together; use "
                        f"{self._instead}"
                    )

    # -- state ---------------------------------------------------------------------

    def _state_was_changed(self):
        """Returns whether the core's state or number of steps was replaced or dropped."""
        for parameter, shown in self._shown.items():
            state = self.state.get(parameter)
            if (
                state is None
                or any(state.get(name) is not shown[name] for name in shown)
                or (self._counts and int(shown["step"]) != self._steps[parameter])
            ):
                return True
        return False

    def _take_states(self, given):
        """Puts values of `given`, states by parameter, where the core keeps them, and
        shows these. Without a state a parameter has zeros, and was not updated."""
        for parameter in self._shown:
            if state := given.get(parameter):
                self._check_state(parameter, state)
        for parameter, shown in self._shown.items():
            state = given.get(parameter, {})
            for name in self._state_names:
                if state.get(name) is not shown[name]:
                    self._write(parameter, name, state.get(name))
            unit, index = self._places[parameter]
            updates = int(state.get("step", 1)) if state else 0
            self.core.set_num_updates(unit.core, index, updates)
        states = {parameter: dict(shown) for parameter, shown in self._shown.items()}
        self.state = type(self.state)(dict, states)
        self.show_steps()

    def _check_state(self, parameter, state):
        shown = self._shown[parameter]
        unit, index = self._places[parameter]
        names = unit.parameters[index].names or [unit.parameters[index].label]
        for name in shown:
            if name not in state:
                raise KeyError(
                    f"{self._name}: the state of parameter {names[0]} has no {name}, only "
                    f"{', '.join(map(str, state))}"
                )
        for name in self._state_names:
            value = state[name]
            if value is not shown[name] and not value.is_floating_point():
                raise ValueError(
                    f"{self._name}: state {name} of parameter {names[0]}: "
                    f"expected floating-point values, got {value.dtype}; "
                    "state_dict() has the values of int8 states"
                )

    def _write(self, parameter, name, value):
        """Puts the values of a state where the core keeps them; None: zeros."""
        shown = self._shown[parameter]
        if _has_codes(shown):
            unit, index = self._places[parameter]
            shard = unit.parameters[index].stored_shard
            value = torch.zeros_like(shard) if value is None else value
            rows = rows_of(shard, value).float().contiguous()
            self.core.encode(unit.core, index, name, rows)
        elif value is None:
            shown[name].zero_()
        else:
            shown[name].copy_(value)

    def _decoded(self, parameter, state):
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
        if not self._counts:
            return
        for parameter, shown in self._shown.items():
            unit, index = self._places[parameter]
            updates = self.core.num_updates(unit.core, index)
            shown["step"].fill_(float(updates))
            self._steps[parameter] = updates

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """Works as torch.optim.Optimizer.load_state_dict, and puts values where the
        core keeps them, in its dtype.

        Raises:
            ValueError, NotImplementedError: options that the core cannot follow, or
                states for parameters that are not sharded. Nothing has changed.
        """
        if self._core is None and state_dict["state"]:
            self._make_core()
        given = {}
        # The last of the hooks sees what torch loads. It casts states to the dtype of
        # the parameter, and this may be bfloat16.
        hook = self.register_load_state_dict_pre_hook(lambda _, d: given.update(d))
        before = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
            self._keep_creation_options(before[1])
            self.check_options(self.param_groups)
            numbers = [n for group in given["param_groups"] for n in group["params"]]
            states = {
                parameter: given["state"][number]
                for number, parameter in zip(numbers, self._parameters_now())
                if number in given["state"]
            }
            if self._core is not None:
                self._take_states(states)
        except BaseException:
            self.state, self.param_groups = before
            raise
        finally:
            hook.remove()

    def _keep_creation_options(self, groups):
        """Puts the creation_option of the former `groups` into param_groups."""
        for group, former in zip(self.param_groups, groups):
            group.pop(self.creation_option, None)
            if self.creation_option in former:
                group[self.creation_option] = former[self.creation_option]


def _show_values(optimizer, state_dict):
    """Puts the values of int8 states into a state dict, because `state` has no scales.
    A dtype becomes its name, because torch.distributed.checkpoint may refuse a dtype."""
    for group in state_dict["param_groups"]:
        value = group.get(optimizer.creation_option)
        if isinstance(value, torch.dtype):
            group[optimizer.creation_option] = str(value)
    numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters):
        if number in state_dict["state"]:
            state = state_dict["state"][number]
            state_dict["state"][number] = optimizer._decoded(parameter, state)


def _has_codes(shown):
    return not all(state.is_floating_point() for state in shown.values())


def number(value: Any) -> Any:
    """Returns an option, possibly a tensor or a pair, as numbers."""
    if isinstance(value, (list, tuple)):
        return tuple(float(item) for item in value)
    return float(value)
