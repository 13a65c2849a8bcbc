"""Custom schedules: a microbatch whose modules run in pieces.

The program marks when the forward and the backward of a wrapped module start and end.
It may run the autograd engine any number of times in between.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from torch import nn

from flatshard._fsdp.casts import call_cast
from flatshard._fsdp.root import Root
from flatshard._graphs.checks import refuse_foreign_capture
from flatshard._tensor.places import state_of


class BackwardPass:
    """Forward and backward of one microbatch, made by `model.backward_pass()`.

        mine = model.backward_pass()
        mine.begin_forward(layer)
        ...                             # calls what is inside the layer
        mine.end_forward(layer)
        with mine:                      # the backward is open
            mine.begin_backward(layer)
            torch.autograd.backward(...)
            mine.end_backward(layer)

    Between `begin_` and `end_` calls the layer's parameters are unsharded. Each wrapped
    module runs once in a pass. The outermost one runs around the others if it has
    parameters outside them. While the backward of one pass is open, the forward of
    another may run. Only `run` casts inputs by `mp_policy`.

    Collective like a forward and a backward: all ranks make the same calls in the same
    order. A pass that is left by an exception, or dropped before its backward has ended,
    is abandoned: the next forward starts a new step, without this step's gradients.

    Attributes:
        is_last, interleaved: the arguments of backward_pass; read when the backward opens.
    """

    def __init__(self, root: Root, is_last: bool, interleaved: bool):
        self._root = root
        self._passes = root.passes
        self._core = root.passes.new()
        self.is_last = is_last
        self.interleaved = interleaved

    # -- forward -------------------------------------------------------------------

    def begin_forward(self, module: nn.Module) -> None:
        """All-gathers the parameters of `module`. They can be read from here on.

        Raises:
            ValueError: a module that fully_shard did not wrap, or of another model.
            flatshard.ConfigError: it ran in this pass before.
        """
        unit = self._unit(module)
        if self._root.ranks.on_gpu:
            refuse_foreign_capture()
        self._core.forward_begin(unit)
        self._passes.began(self)

    def end_forward(self, module: nn.Module) -> None:
        """Reshards the parameters of `module`, the one that started last."""
        self._core.forward_end(self._unit(module))

    @contextlib.contextmanager
    def forward(self) -> Iterator["BackwardPass"]:
        """Makes calls of wrapped modules inside forwards of this pass, as by `run`. An
        exception inside abandons the pass."""
        former, self._passes.running = self._passes.running, self
        try:
            yield self
        except BaseException:
            self.give_up()
            raise
        finally:
            self._passes.running = former

    # -- backward ------------------------------------------------------------------

    def __enter__(self):
        """Opens the backward; the forwards have ended. Runs of the engine belong to this
        pass until it is left. Leaving it reduces what is not reduced yet."""
        self._passes.opens_backward()
        self._core.open_backward(self.is_last, self.interleaved)
        return self

    def __exit__(self, kind, error, trace):
        if kind is not None:
            self.give_up()
            return
        try:
            self._core.close_backward()
        except BaseException:
            self.give_up()
            raise
        self._passes.ended(self)

    def begin_backward(self, module: nn.Module) -> None:
        """All-gathers what the backward of `module` reads, and reduces modules before
        it."""
        self._core.backward_begin(self._unit(module))

    def end_backward(self, module: nn.Module) -> None:
        """Reshards the parameters of `module`. Its gradients and its inputs' are
        computed, or its weight gradients are delayed."""
        self._core.backward_end(self._unit(module))

    @contextlib.contextmanager
    def recompute(self, module: nn.Module) -> Iterator[None]:
        """Runs the forward once more, between `begin_backward` and `end_backward`."""
        unit = self._unit(module)
        self._core.recompute_begin(unit)
        try:
            yield
        finally:
            self._core.recompute_end(unit)

    @contextlib.contextmanager
    def delay_wgrads(self, node: int = 0) -> Iterator[None]:
        """Delays the weight gradients of layers inside that can delay them: nn.Linear of
        modules with `grads_in_place=True`. Leaving the backward computes those that
        `run_wgrads` has not.

        Args:
            node: any number, by which `run_wgrads` finds them.
        """
        self._core.set_delay_wgrad(True, node)
        try:
            yield
        finally:
            self._core.set_delay_wgrad(False, 0)

    def run_wgrads(self, module: nn.Module, node: int = 0) -> None:
        """Computes the weight gradients of `module` that were delayed in `node`."""
        self._core.run_wgrads(self._unit(module), node)

    @property
    def num_delayed_wgrads(self) -> int:
        """Returns the number of weight gradients that are delayed now."""
        return self._core.num_late

    def late_wgrads(self, node: int = 0) -> AbstractContextManager[None]:
        """Deprecated name of delay_wgrads."""
        _warn("late_wgrads", "delay_wgrads")
        return self.delay_wgrads(node)

    @property
    def num_late_wgrads(self) -> int:
        """The former name of num_delayed_wgrads."""
        _warn("num_late_wgrads", "num_delayed_wgrads")
        return self.num_delayed_wgrads

    # -- inside --------------------------------------------------------------------

    def give_up(self) -> None:
        """Ends the pass without its backward. The step's gradients are dropped by the
        next forward. Does nothing to a pass that has ended."""
        self._core.give_up()
        self._passes.ended(self)

    def run(
        self, module: nn.Module, function: Callable, args: tuple, kwargs: dict
    ) -> object:
        """Returns function(*args, **kwargs), run between begin_forward and end_forward with
        the casts of the module's mp_policy."""
        policy = self._state(module).sharding.mp_policy
        self.begin_forward(module)
        output = call_cast(policy, function, args, kwargs)
        self.end_forward(module)
        return output

    def _state(self, module):
        state = state_of(module)
        if state is None or state.root is not self._root:
            raise ValueError(
                f"a backward pass: expected a module of its model that fully_shard "
                f"wrapped, got a {type(module).__name__}"
            )
        return state

    def _unit(self, module):
        return self._state(module).core.number


def _warn(former, name):
    warnings.warn(
        f"BackwardPass: {former} is deprecated and will be removed in the next version; "
        f"use {name}",
        FutureWarning,
        stacklevel=3,
    )
