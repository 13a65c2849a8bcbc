"""Megatron-FSDP's names for schedules that run modules in pieces.

The hooks of its 1F1B support, and what each is here:

    _replace_param_with_raw_if_needed   from here on calls of sub-modules count
    _pre_forward_param_unshard          the first sub-module of a unit that is called
    post_forward_release_module         BackwardPass.end_forward
    pre_backward                        opens the backward of the forward that ran
    _pre_backward_param_unshard         the first sub-module of a unit with a gradient
    post_backward_release_module        BackwardPass.end_backward
    post_backward                       leaves the backward: reduces what is left
    _process_post_backward_gradients    by the core; nothing to call
"""

import weakref

import torch

from flatshard._fsdp.backward_pass import BackwardPass
from flatshard._fsdp.collect import modules_of_unit
from flatshard._fsdp.forward import root_of
from flatshard._tensor.places import state_of
from flatshard.torch_versions import in_backward, tree_leaves

_NAMES = (
    "pre_backward",
    "post_backward",
    "post_forward_release_module",
    "post_backward_release_module",
    "_replace_param_with_raw_if_needed",
)


class ScheduleHooks:
    """The functions of a fully_shard_model that a schedule calls.

    A microbatch's forward starts with the first sub-module that is called after the
    forward before it has ended; `pre_backward` ends it.
    """

    def __init__(self, module, fine_grained):
        self._module = weakref.ref(module)
        self._fine_grained = fine_grained
        self._forward = self._backward = None  # _Microbatch
        self._is_on = False

    # -- what schedules call -------------------------------------------------------

    def _replace_param_with_raw_if_needed(self):
        """Makes calls of sub-modules all-gather their unit, until the last backward of the
        step has ended. Call it before the first microbatch.

        Raises:
            ValueError: without enable_fine_grained_param_gather=True. Only with it,
                sub-modules report their calls.
        """
        if not self._fine_grained:
            raise ValueError(
                "_replace_param_with_raw_if_needed: a schedule that calls sub-modules "
                "of units needs fully_shard_model(..., "
                "enable_fine_grained_param_gather=True)"
            )
        root = root_of(self._module())
        for left in (self._forward, self._backward):
            if left is not None:  # by an exception
                left.give_up()
        self._forward = self._backward = None
        self._is_on, root.passes.running = True, self

    def post_forward_release_module(self, module):
        """Ends the forward of `module`, a unit, after its last piece ran."""
        self._microbatch(self._forward, "post_forward_release_module").end_forward(
            module
        )

    def pre_backward(self, *, is_last=True, interleaved=True):
        """Starts the backward of the microbatch whose forward ran last.

        Args:
            is_last: as of FSDPModule.backward_pass.
            interleaved: False: no other forward starts before its post_backward.

        Returns:
            Returns the BackwardPass, for delayed weight gradients.
        """
        if self._backward is not None:
            raise RuntimeError(
                "pre_backward: expected post_backward before another one"
            )
        mine = self._microbatch(self._forward, "pre_backward")
        self._forward, self._backward = None, mine
        return mine.open(is_last, interleaved)

    def post_backward_release_module(self, module):
        """Ends the backward of `module`, a unit, after its last piece ran."""
        which = self._microbatch(self._backward, "post_backward_release_module")
        which.end_backward(module)

    def post_backward(self):
        """Ends the backward: reduces what is not reduced yet."""
        which = self._microbatch(self._backward, "post_backward")
        self._backward = None
        which.close()
        if self._forward is None:
            self._is_on, root_of(self._module()).passes.running = False, None

    # -- reports of sub-modules ----------------------------------------------------

    def called(self, unit):
        """Starts the forward of `unit`: a sub-module of it is called and reads its
        weights."""
        if not self._is_on or in_backward():
            return
        self._now().begin_forward(unit)

    def returned(self, unit, output):
        """Registers hooks on the output: its gradients announce the backward of `unit`."""
        mine = self._forward
        if not self._is_on or mine is None or not torch.is_grad_enabled():
            return
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: mine.begin_backward(unit))

    def run(self, unit, function, args, kwargs):
        """Calls a full unit: function(*args, **kwargs) is its forward."""
        if in_backward():
            raise NotImplementedError(
                f"a checkpoint around {type(unit).__name__}, a unit, is not supported in "
                "a schedule that calls sub-modules; put it around parts of the unit"
            )
        output = self._now().run(unit, function, args, kwargs)
        self.returned(unit, output)
        return output

    def _now(self):
        if self._forward is None:
            module = self._module()
            self._forward = _Microbatch(root_of(module), module)
        return self._forward

    @staticmethod
    def _microbatch(which, name):
        if which is None:
            raise RuntimeError(
                f"{name}: expected a forward, by sub-modules that were called after "
                "_replace_param_with_raw_if_needed, and pre_backward before the calls "
                "of a backward"
            )
        return which


class _Microbatch(BackwardPass):
    """A pass whose modules start once, and end with it at the latest."""

    def __init__(self, root, module):
        super().__init__(root, True, True)
        self._root_module = weakref.ref(module)
        self._in_forward, self._ran = [], []
        self._in_backward, self._ended = [], []
        self.begin_forward(module)

    def begin_forward(self, module):
        if module not in self._ran:
            super().begin_forward(module)
            self._ran.append(module)
            self._in_forward.append(module)

    def end_forward(self, module):
        super().end_forward(module)
        self._in_forward.remove(module)

    def open(self, is_last, interleaved):
        while self._in_forward:
            self.end_forward(self._in_forward[-1])
        self.is_last, self.interleaved = is_last, interleaved
        self.__enter__()
        self.begin_backward(self._root_module())
        return self

    def begin_backward(self, module):
        if module not in self._in_backward and module not in self._ended:
            super().begin_backward(module)
            self._in_backward.append(module)

    def end_backward(self, module):
        if module in self._in_backward:  # else none of it got a gradient
            self._in_backward.remove(module)
            self._ended.append(module)
            super().end_backward(module)

    def close(self):
        while self._in_backward:
            self.end_backward(self._in_backward[-1])
        self.__exit__(None, None, None)


def add_hooks(module, units, fine_grained):
    """Gives `module` the names of ScheduleHooks."""
    hooks = ScheduleHooks(module, fine_grained)
    for name in _NAMES:
        # Plain attributes, so that the class of other instances stays as it is.
        object.__setattr__(module, name, getattr(hooks, name))
    if fine_grained:
        for unit in (*units, module):
            _tell(hooks, unit)


def _tell(hooks, unit):
    me = weakref.ref(unit)
    own = (None, state_of(unit))  # experts that joined it have its state
    for inner in modules_of_unit([unit], lambda m: state_of(m) not in own):
        if inner is not unit:
            inner.register_forward_pre_hook(lambda *_: hooks.called(me()))
            inner.register_forward_hook(
                lambda _, args, output: hooks.returned(me(), output)
            )
