"""Modules that write weight gradients themselves: TransformerEngine's contract.

The backward of such a module adds the gradient of a weight to `weight.main_grad`, sets
`weight.grad_added_to_main_grad`, and hands autograd a tensor without meaning. Here
`main_grad` is the memory that is reduced, so the gradient needs no other.
"""

import weakref

from torch import nn

from flatshard.torch_versions import in_backward

# Attributes of a parameter that its module is going to look for, and what of them
# others may have left there.
_ASKS = ("main_grad", "grad_added_to_main_grad", "overwrite_main_grad")
_LEFT = (*_ASKS, "get_main_grad", "zero_out_wgrad", "__fsdp_param__")
# The attributes of modules of TransformerEngine, and of Megatron-Core.
_SWITCHES = ("fuse_wgrad_accumulation", "gradient_accumulation_fusion")


class MainGradParameter(nn.Parameter):
    """An unsharded parameter whose gradient its module may write directly."""

    # TransformerEngine and Megatron-Core ask get_main_grad() in the backward then.
    __fsdp_param__ = True
    grad_added_to_main_grad = False
    zero_out_wgrad = False
    _flatshard_given = None  # the address of what get_main_grad gave last

    def get_main_grad(self):
        """Returns the gradient so far, of this parameter's shape, in the dtype of the
        reduction, or zeros if there is none yet. Additions to it count.

        Raises:
            RuntimeError: outside a backward.
        """
        name, unit = self._flatshard_main_grad
        state = unit()
        if state is None or state.root is None or not in_backward():
            raise RuntimeError(
                f"main_grad of parameter {name} exists only during the backward: read it "
                "there, as TransformerEngine 2.10 and later does, and not in the forward "
                "or after the backward (delay_wgrad_compute)"
            )
        grad = state.core.main_grad(self)
        self._flatshard_given = grad.data_ptr()
        return grad

    @property
    def main_grad(self):
        return self.get_main_grad()

    @main_grad.setter
    def main_grad(self, value):
        if value is None or value.data_ptr() != self._flatshard_given:
            raise RuntimeError(
                f"main_grad of parameter {self._flatshard_main_grad[0]} cannot be "
                "another tensor: it is the memory that is reduced"
            )

    @property
    def overwrite_main_grad(self):
        """False: the first that writes finds zeros."""
        return False

    @overwrite_main_grad.setter
    def overwrite_main_grad(self, value):
        if value:
            raise RuntimeError(
                f"overwrite_main_grad of parameter {self._flatshard_main_grad[0]} cannot "
                "be True: the gradients that another use of the weight, or an earlier "
                "microbatch, added would be lost; main_grad starts as zeros"
            )


def offer_main_grads(state):
    """Offers main_grad to the trained parameters of `state` that use the contract:
    parameters with one of its attributes, and parameters of modules that have it
    switched on."""
    for p in state.parameters:
        if not p.trainable or p.float8 or not _is_asked_for(p):
            continue
        for tensor in (p.whole, p.shard):
            for name in _LEFT:
                vars(tensor).pop(name, None)
        whole = p.whole
        whole.__class__ = MainGradParameter
        whole._flatshard_main_grad = p.title, weakref.ref(state)
        # When a parameter has several uses, autograd may get a gradient that counts
        # from one of them: the placeholder to which it is added has to be zeros.
        whole.zero_out_wgrad = len(p.sites) > 1
        whole.register_post_accumulate_grad_hook(_drop_what_was_added)
        state.sharding.main_grads = True
    if state.sharding.main_grads:
        state.core.write_grads_in_place()


def _is_asked_for(p):
    if any(name in vars(p.whole) for name in _ASKS):
        return True
    return any(
        getattr(module(), switch, False) is True
        for module, _ in p.sites
        for switch in _SWITCHES
    )


def _drop_what_was_added(whole):
    if whole.grad_added_to_main_grad:
        whole.grad_added_to_main_grad = False
        if not whole.zero_out_wgrad:
            whole.grad = None
