"""The 1F1B schedule of transformers' models with experts: the backward of one microbatch
in parallel with the forward of the next, so that tokens of one are exchanged while the other computes.

The model's own forward runs, as transformers wrote it, once for each microbatch. Its
graph is split where it enters a layer, sends tokens to their experts or awaits them back.
There the steps of the plan run that are due: pieces of the former microbatch's
backward, each one run of the autograd engine.
"""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import nn

from flatshard import _C
from flatshard._fsdp.casts import call_cast
from flatshard._fsdp.forward import root_of
from flatshard._tensor.places import state_of
from flatshard.moe.overlap_parts import (
    Microbatch,
    Recompute,
    find_layers,
    forwards_of,
    is_checkpointed,
    is_cut,
    outside_of_autocast,
    reads_after_experts,
    with_forwards,
    without_cache,
    without_checkpoint,
)

# The names of nodes, by which delayed weight gradients are found.
_NODES = {"attend": 0, "experts": 1}

_running = None


def running():
    """Returns the schedule whose forward runs, or None."""
    return _running


def overlap_microbatches(
    model: nn.Module,
    microbatches: Iterable[dict],
    loss_of: Callable[[nn.Module, dict], torch.Tensor] | None = None,
    *,
    delay_wgrad: bool = False,
) -> list[torch.Tensor]:
    """Runs forward and backward of a step's microbatches by the 1F1B schedule.

    The gradients, and the losses, are bitwise equal to the results of

        for n, microbatch in enumerate(microbatches):
            model.set_requires_all_reduce(n + 1 == len(microbatches))
            loss_of(model, microbatch).backward()

    Collective. Afterwards the optimizer steps as always. After an exception, on all
    ranks, nothing of the step is left.

    Args:
        model: a transformers model that expert_parallel(..., overlap=True) and then
            fully_shard were applied to, each decoder layer a unit.
        microbatches: list of second arguments of `loss_of`; by default dicts of keyword
            arguments of the model.
        loss_of: function of the model and a microbatch that calls the model once and
            returns the loss [] to be differentiated. It may read what the model returns
            except hidden states and attentions of layers. None: the model's `loss`
            divided by the number of microbatches.
        delay_wgrad: weight gradients of nn.Linear in layers with grads_in_place=True
            come later, while gradients of tokens are exchanged. Weight gradients of
            experts come at once.

    Returns:
        Losses [], without graph, one for each microbatch.

    Layers with gradient checkpointing run their forward again at the start of their
    backward. Their tokens are then exchanged again, and nothing hides this exchange.

    Raises:
        ValueError: naming what the model lacks.
    """
    microbatches = list(microbatches)
    if not microbatches:
        raise ValueError("microbatches: expected at least one, got an empty list")
    if loss_of is None:

        def loss_of(model, microbatch):
            return model(**microbatch).loss / len(microbatches)

    return _Schedule(model, len(microbatches), delay_wgrad).run_step(
        microbatches, loss_of
    )


class _Schedule:
    """One step."""

    def __init__(self, model, num_microbatches, delay_wgrad):
        self._model, self._root = model, root_of(model)
        self._layers = find_layers(model)
        self._number = {id(layer): n for n, layer in enumerate(self._layers)}
        self._reads_last = [reads_after_experts(layer) for layer in self._layers]
        dense = [not is_cut(layer) for layer in self._layers]
        self._plan = _C.overlap_plan(
            len(self._layers), num_microbatches, delay_wgrad, dense
        )
        self._delay_wgrad = delay_wgrad
        self._next = 0
        self._num = num_microbatches
        self._microbatches = {}
        self._now = None
        self._recomputes = False  # a layer's forward runs once more
        self._forwards = forwards_of(model)

    # -- the order -----------------------------------------------------------------

    def run_step(self, microbatches, loss_of):
        global _running
        former, self._root.passes.running, _running = _running, self, self
        try:
            losses = [
                self._forward(number, microbatch, loss_of)
                for number, microbatch in enumerate(microbatches)
            ]
            self._reach(None)
        except BaseException:
            for microbatch in self._microbatches.values():
                microbatch.steps.give_up()
            raise
        finally:
            self._root.passes.running, _running = None, former
        return losses

    def _reach(self, step):
        """Runs what the plan has before `step`, a step of the forward that runs. None:
        all that is left."""
        while self._next < len(self._plan):
            due = self._plan[self._next]
            self._next += 1
            if due == step:
                return
            which, number, layer, node = due
            if which == "F":
                raise RuntimeError(
                    f"overlap_microbatches: expected the model to reach {due}, it reached "
                    f"{step}: each layer runs once in a forward, in order"
                )
            microbatch = self._microbatches[number]
            with outside_of_autocast(self._root.ranks.device):
                if which == "W":
                    module = self._layers[layer]
                    microbatch.steps.run_wgrads(module, _NODES[node])
                else:
                    getattr(self, f"_{node}_backward")(microbatch, layer)

    # -- forward -------------------------------------------------------------------

    def _forward(self, number, arguments, loss_of):
        mine = Microbatch(self._model, number, len(self._layers))
        self._reach(("F", number, -1, "embed"))
        self._microbatches[number] = self._now = mine
        loss = loss_of(self._model, arguments)
        if mine.current + 1 != len(self._layers) or not loss.requires_grad:
            raise ValueError(
                "loss_of: expected a call of the model, and a loss that needs a gradient"
            )
        mine.steps.end_forward(self._model)
        mine.loss, self._now = loss, None
        return loss.detach()

    def run(self, module, function, args, kwargs):
        """Returns function(*args, **kwargs), the forward of a wrapped module."""
        mine, policy = self._now, state_of(module).sharding.mp_policy
        if mine is None:
            raise RuntimeError(
                f"{type(module).__name__} was called outside loss_of while the "
                "microbatches of overlap_microbatches run"
            )
        number = self._number.get(id(module))
        if number is not None:
            return self._run_layer(mine, number, module, function, args, kwargs)
        mine.steps.begin_forward(module)
        output = call_cast(policy, function, args, kwargs)
        if module is not self._model:  # its loss may come after it
            mine.steps.end_forward(module)
            (mine.behind if mine.layers[-1].output is not None else mine.before).append(
                module
            )
        return output

    def _run_layer(self, mine, number, module, function, args, kwargs):
        layer = mine.layers[number]
        self._reach(("F", mine.number, number, "attend"))
        if number == 0:
            mine.embedded = args[0]
            layer.input = args[0].detach().requires_grad_()
        else:
            layer.input = mine.layers[number - 1].result
            if args[0] is not layer.input:
                raise ValueError(
                    f"layer {number}: expected the result of the layer before as its "
                    "first argument, and nothing in between"
                )
        mine.current = number
        mine.steps.begin_forward(module)
        policy = state_of(module).sharding.mp_policy
        if is_checkpointed(module):
            kwargs = without_cache(kwargs)
            layer.recompute = Recompute(self._root.ranks.device)

        def forward():
            inputs = layer.input, *args[1:]
            with without_checkpoint(module):
                output = call_cast(policy, function, inputs, kwargs)
            layer.output = output[0] if isinstance(output, tuple) else output
            return output

        output = forward()
        if not layer.ended:
            self._end_forward(mine, number)
        layer.result = layer.output.detach().requires_grad_()
        if layer.recompute is not None:
            layer.forward = forward
            layer.forget()
        if number + 1 == len(self._layers):
            self._reach(("F", mine.number, -1, "head"))
        if isinstance(output, tuple):  # what else layers of version 4 return
            return (layer.result, *output[1:])
        return layer.result

    # -- what experts and routers ask for ------------------------------------------

    def cut(self, routed):
        """Returns what dispatches and combines as `routed` does, by the schedule."""
        routed.finish()  # a layer that runs again may come before the dispatch
        self._now.layers[self._now.current].routed = routed
        return self

    def dispatch(self, x, row_weights):
        """Works as RoutedTokens.dispatch, with leaves as results."""
        layer = self._now.layers[self._now.current]
        # The view ends the graph here, in its place among the uses of x.
        layer.sent = [x.view_as(x), row_weights]
        rows = self._exchanged(
            "dispatch", "experts", layer.routed.start_dispatch, layer.sent
        )
        layer.arrived = [
            new.requires_grad_(t.requires_grad) for new, t in zip(rows, layer.sent)
        ]
        return layer.arrived

    def combine(self, rows):
        """Works as RoutedTokens.combine, with a leaf as result."""
        mine, number = self._now, self._now.current
        layer = mine.layers[number]
        layer.expert_rows = rows
        if not self._recomputes and not self._reads_last[number]:
            self._end_forward(mine, number)
        (back,) = self._exchanged(
            "combine", "merge", layer.routed.start_combine, [rows]
        )
        layer.back = back.requires_grad_()
        return layer.back

    def _exchanged(self, node, reader, start, rows):
        """Returns what arrives, where `reader` needs it."""
        made = self._now.layers[self._now.current].routed.queued()
        self._reach_node(node)
        transfer = start([t.detach() for t in rows], made)
        self._reach_node(reader)
        return [t.detach() for t in transfer.wait()]

    def _reach_node(self, node):
        if not self._recomputes:
            self._reach(("F", self._now.number, self._now.current, node))

    def _end_forward(self, mine, number):
        mine.layers[number].ended = True
        mine.steps.end_forward(self._layers[number])

    def cut_logits(self, logits):
        """Returns the router's logits for an auxiliary loss that reads them after the
        layers."""
        layer = self._now.layers[self._now.current]
        leaf = layer.logits[1] if self._recomputes else logits.detach().requires_grad_()
        layer.logits = logits, leaf
        return leaf

    # -- backward ------------------------------------------------------------------

    def _head_backward(self, mine, _):
        steps, last = mine.steps, mine.number + 1 == self._num
        steps.is_last, steps.interleaved = last, not last
        steps.__enter__()
        for module in (self._model, *reversed(mine.behind)):
            steps.begin_backward(module)
        torch.autograd.backward(mine.loss)
        mine.loss = None
        for module in reversed(mine.behind):
            steps.end_backward(module)

    def _merge_backward(self, mine, number):
        layer = self._begin(mine, number)
        # Attend has its weights and residual, so its step also computes the gradient of
        # the tokens.
        layer.to_send(
            torch.autograd.grad(
                layer.output, layer.back, layer.result.grad, retain_graph=True
            )
        )

    def _combine_backward(self, mine, number):
        layer = mine.layers[number]
        layer.send(layer.routed.start_dispatch)

    def _experts_backward(self, mine, number):
        layer = mine.layers[number]
        (grad,) = layer.transfer.wait()
        with self._delayed(mine, "experts"):
            _backward([(layer.expert_rows, grad)])
        # All ranks compute gradients of the same tensors, also ranks without rows.
        layer.to_send(
            torch.zeros_like(t) if t.requires_grad and t.grad is None else t.grad
            for t in layer.arrived
        )
        layer.expert_rows = layer.arrived = None

    def _dispatch_backward(self, mine, number):
        layer = mine.layers[number]
        layer.send(layer.routed.start_combine)

    def _attend_backward(self, mine, number):
        layer = self._begin(mine, number)
        ends = [(layer.output, layer.result.grad)]
        if layer.sent is not None:
            ends += zip(layer.sent, layer.transfer.wait())
        if layer.logits is not None:
            ends.append((layer.logits[0], layer.logits[1].grad))
        with self._delayed(mine, "attend"):
            _backward(ends)
        mine.steps.end_backward(self._layers[number])
        mine.layers[number] = None
        if number == 0:
            mine.gradient = layer.input.grad

    def _embed_backward(self, mine, _):
        steps = mine.steps
        for module in reversed(mine.before):
            steps.begin_backward(module)
        _backward([(mine.embedded, mine.gradient)])
        for module in mine.before:
            steps.end_backward(module)
        steps.end_backward(self._model)
        steps.__exit__(None, None, None)
        del self._microbatches[mine.number]

    def _begin(self, mine, number):
        layer = mine.layers[number]
        if not layer.began:
            layer.began = True
            mine.steps.begin_backward(self._layers[number])
            if layer.recompute is not None:
                self._recompute(mine, number)
        return layer

    def _recompute(self, mine, number):
        """Exchanges tokens once more, at once: all ranks are here."""
        layer, module = mine.layers[number], self._layers[number]
        former = self._now, self._recomputes
        self._now, self._recomputes, mine.current = mine, True, number
        try:
            with mine.steps.recompute(module), with_forwards(module, self._forwards):
                layer.recompute.run(layer.forward)
        finally:
            self._now, self._recomputes = former
        layer.recompute = layer.forward = None

    def _delayed(self, mine, node):
        if self._delay_wgrad:
            return mine.steps.delay_wgrads(_NODES[node])
        return contextlib.nullcontext()


def _backward(ends):
    """Runs the engine once from the (tensor, gradient)s that need one and have one."""
    ends = [(t, g) for t, g in ends if t.requires_grad and g is not None]
    if ends:
        torch.autograd.backward(*zip(*ends))
