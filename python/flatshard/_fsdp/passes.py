"""The state of a model between calls of its modules: passes, and what a forward waits
for."""

import weakref

from flatshard import _C


class Passes:
    """The BackwardPasses of a model, and what its next forward waits for.

    Attributes:
        concern_forwards: a forward has to ask: one runs here, or there was one since the
            last forward outside them. A call is skipped that most models do not need.
        post_optim_event: to wait for before the next all-gather, or None.
    """

    def __init__(self, runtime, has_graphs):
        self._runtime = runtime
        self._has_graphs = has_graphs
        self._running = None
        self._open = weakref.WeakSet()  # that began and continue
        # The argument of one, not a setter, decided whether it is the step's last.
        self._sync_is_of_pass = False
        self.concern_forwards = False
        self.post_optim_event = None

    @property
    def running(self):
        """The pass that runs calls of wrapped modules, or None."""
        return self._running

    @running.setter
    def running(self, which):
        self._running = which
        self.concern_forwards = True

    @property
    def are_open(self):
        return bool(self._open)

    def new(self):
        if self._has_graphs:
            raise NotImplementedError(
                "backward_pass is not supported in a model with cuda_graph=True: graphs "
                "of blocks whose backwards interleave are not; leave cuda_graph out"
            )
        return _C.BackwardPass(self._runtime)

    def began(self, which):
        self._open.add(which)
        self.concern_forwards = True

    def opens_backward(self):
        self._sync_is_of_pass = self.concern_forwards = True

    def ended(self, which):
        self._open.discard(which)
        self._restore_sync()

    def give_up(self):
        for which in list(self._open):
            which.give_up()

    def refuse_between(self, module):
        """Raises an error if a forward outside them is not allowed now."""
        if self._open:
            raise RuntimeError(
                f"{type(module).__name__} was called while a backward_pass of its model "
                "is open, but is not part of the forward or backward of that pass: call it "
                "inside `with that_pass.forward():`, or end or give_up() that pass first"
            )
        self._restore_sync()  # of one that was dropped
        self.concern_forwards = False

    def wait_for_optimizer(self):
        self.post_optim_event.wait()
        self.post_optim_event = None

    def _restore_sync(self):
        if self._sync_is_of_pass:
            self._sync_is_of_pass = False
            self._runtime.set_is_last_microbatch(True)
