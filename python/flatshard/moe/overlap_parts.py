"""The state that overlap_microbatches keeps of a microbatch."""

import contextlib
import contextvars

import torch

from flatshard._tensor.places import state_of

# Arguments of layers that a second run would change.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


class Layer:
    """One microbatch in one layer."""

    def __init__(self):
        self.input = self.output = self.result = None  # result: the output's leaf
        self.routed = None  # RoutedTokens
        self.sent = self.arrived = None  # [tokens or rows, their weights]
        self.expert_rows = self.back = None
        self.logits = None  # (the router's, the leaf that others read)
        self.gradients = None  # (those that the next exchange takes, when made)
        self.transfer = None  # RowTransfer
        self.recompute = self.forward = None  # Recompute, and what it runs
        self.ended = self.began = False  # forward, backward

    def to_send(self, gradients):
        """Sets the gradients to send. All of them are queued, so the exchange waits for
        nothing that is queued later."""
        self.gradients = list(gradients), self.routed.queued()

    def send(self, start):
        self.transfer, self.gradients = start(*self.gradients), None

    def forget(self):
        """Drops the results of its forward, except what others read."""
        self.output = None
        self.sent = self.arrived = self.expert_rows = self.back = None
        if self.logits is not None:
            self.logits = None, self.logits[1]


class Microbatch:
    def __init__(self, model, number, num_layers):
        self.number = number
        self.steps = model.backward_pass()
        self.layers = [Layer() for _ in range(num_layers)]
        self.current = -1  # the layer whose forward runs, or ran last
        self.embedded = None  # what the first layer takes, with its graph
        self.gradient = None  # of that
        self.loss = None
        self.before, self.behind = [], []  # other units, before and after the layers


class Recompute:
    """The forward of a layer with gradient checkpointing, for a second run of it: with
    the random numbers and the autocast of the first."""

    def __init__(self, device):
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._random = torch.get_rng_state()
        self._random_on_gpu = torch.cuda.get_rng_state(device) if self._on_gpu else None
        self._autocast = (
            torch.get_autocast_dtype(device.type),
            torch.is_autocast_enabled(device.type),
        )

    def run(self, function):
        """Returns function(), without recording its calls: transformers collects what
        layers return in a variable of the context."""
        return contextvars.Context().run(self._run, function)

    def _run(self, function):
        devices = [self._device] if self._on_gpu else []
        dtype, enabled = self._autocast
        with (
            torch.random.fork_rng(devices),
            torch.autocast(self._device.type, dtype, enabled),
        ):
            torch.set_rng_state(self._random)
            if self._on_gpu:
                torch.cuda.set_rng_state(self._random_on_gpu, self._device)
            return function()


def is_checkpointed(layer):
    return getattr(layer, "gradient_checkpointing", False) and layer.training


@contextlib.contextmanager
def without_checkpoint(layer):
    """Disables gradient checkpointing of the layer inside the context, so that its forward
    keeps its graph."""
    former = getattr(layer, "gradient_checkpointing", False)
    if former:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        if former:
            layer.gradient_checkpointing = True


def without_cache(kwargs):
    """Changes arguments as transformers does when it calls a layer with gradient
    checkpointing."""
    changed = {name: None for name in _CACHES if name in kwargs}
    if "use_cache" in kwargs:
        changed["use_cache"] = False
    return {**kwargs, **changed}


def forwards_of(model):
    """Returns forwards that replace the forward of the class in a module, by the id of the
    module."""
    return {id(m): vars(m)["forward"] for m in model.modules() if "forward" in vars(m)}


@contextlib.contextmanager
def with_forwards(layer, forwards):
    """Runs with forwards_of in its modules: while the model's forward runs, transformers 4
    replaces them to record the results of modules."""
    changed = [
        (vars(m), vars(m)["forward"])
        for m in layer.modules()
        if "forward" in vars(m) and forwards.get(id(m)) is not vars(m)["forward"]
    ]
    try:
        for m in layer.modules():
            if id(m) in forwards:
                vars(m)["forward"] = forwards[id(m)]
            else:
                vars(m).pop("forward", None)
        yield
    finally:
        for attributes, forward in changed:
            attributes["forward"] = forward


def outside_of_autocast(device):
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def is_cut(layer):
    """Returns whether it exchanges tokens."""
    return any(getattr(m, "_flatshard_overlap", False) for m in layer.modules())


def reads_after_experts(layer):
    """Returns whether its forward may read weights when the tokens are back: the
    weights of shared experts."""
    return any(
        child is not block.experts and child is not getattr(block, "gate", None)
        for block in layer.modules()
        if getattr(getattr(block, "experts", None), "_flatshard_overlap", False)
        for child in block.children()
        if any(True for _ in child.parameters())
    )


def find_layers(model):
    """Returns the decoder layers, in order: the elements of the list that has the
    experts."""
    found = next(
        (
            list(module)
            for module in model.modules()
            if isinstance(module, torch.nn.ModuleList) and any(map(is_cut, module))
        ),
        [],
    )
    if not found:
        raise ValueError(
            "model: expected layers with experts that flatshard.expert_parallel(model, "
            f"mesh, overlap=True) spread, found none in {type(model).__name__}"
        )
    for n, layer in enumerate(found):
        state = state_of(layer)
        if state is None or len(state.modules) != 1:
            raise ValueError(
                f"model: expected fully_shard(layer) of each layer, but layer {n} is not a "
                "separate unit"
            )
    return found
