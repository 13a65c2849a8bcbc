"""Checks of settings that CUDA graphs of units do not support."""

import contextlib
import os

import torch
from torch.utils import checkpoint

from flatshard._tensor.mesh import device_of
from flatshard._tensor.places import state_of

# Steps that run eagerly before the first capture.
DEFAULT_WARMUP_STEPS = 3


def emulates_on_cpu():
    """Tests: without a GPU a replay calls the captured forward again."""
    return os.environ.get("FLATSHARD_EMULATE_CUDA_GRAPHS") == "1"


def audits_graphs():
    """Returns whether captured graphs are checked for memory of others, for debugging
    (docs/guides/cuda_graphs.md)."""
    return os.environ.get("FLATSHARD_AUDIT_CUDA_GRAPHS") == "1"


def check_cuda_graph(modules, device_mesh, offload, option="cuda_graph"):
    """Checks fully_shard's arguments when `option` asks for graphs.

    Raises:
        ValueError, NotImplementedError: graphs do not go with them.
    """
    device = device_of(device_mesh)
    if device.type != "cuda" and not emulates_on_cpu():
        raise ValueError(
            f"{option}: expected a mesh of GPUs, got {device.type}. CUDA graphs need "
            f"GPUs; leave {option} out"
        )
    if offload:
        raise NotImplementedError(
            f"{option} with CPUOffloadPolicy is not supported; choose one of them"
        )
    check_block(modules, option)


def check_block(modules, option="cuda_graph"):
    """Checks that a call of the modules of a unit can be captured.

    Raises:
        ValueError, NotImplementedError: it cannot.
    """
    if len(modules) > 1:
        raise NotImplementedError(
            f"{option}: expected one module, got a list of {len(modules)}; wrap each "
            "by a separate call"
        )
    module = modules[0]
    for name, inner in module.named_modules():
        if inner is not module and state_of(inner) is not None:
            raise ValueError(
                f"{option}: {type(module).__name__} contains a unit, {name}, and "
                "all-gathers it inside its forward; give the inner units cuda_graph=True "
                "and leave it out for the modules around them"
            )
    if "forward" in module.__dict__:
        raise ValueError(
            f"{option}: the forward of this {type(module).__name__} was replaced on "
            "the instance; replace it after fully_shard, or put it into the class"
        )


@contextlib.contextmanager
def refuse_numbers_drawn_again():
    """Refuses, in a recording on a GPU, a forward that draws random numbers which a
    checkpoint inside it would draw again. A graph of its backward starts at another
    state of the generator.

    Raises:
        NotImplementedError: the forward is such a one.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        yield
        return
    get_states = checkpoint.get_device_states
    states = []

    def note_state(*args):
        states.append(torch.cuda.get_rng_state())
        return get_states(*args)

    # checkpoint() calls it where preserve_rng_state is True.
    checkpoint.get_device_states = note_state
    try:
        yield
    finally:
        checkpoint.get_device_states = get_states
    if states and not torch.equal(states[0], torch.cuda.get_rng_state()):
        raise NotImplementedError(
            "a checkpoint inside it has preserve_rng_state=True, and random numbers are "
            "drawn after it started: a graph cannot draw them again; use a dropout of 0"
        )


def refuse_foreign_capture():
    """Refuses a forward of a unit while another CUDA graph is captured, because it
    all-gathers and waits, and that graph must not contain this."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a sharded module was called while a CUDA graph is captured "
            "(torch.cuda.graph, torch.cuda.make_graphed_callables): all-gathers and "
            "reductions cannot be part of it. Use fully_shard(block, options="
            "ShardOptions(cuda_graph=True)) to capture the forward and backward of the "
            "block between them"
        )
