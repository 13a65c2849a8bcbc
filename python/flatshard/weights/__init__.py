"""The weights of a sharded model for an inference engine: full tensors under the names of
its Hugging Face folder, one all-gather for each unit, in bounded memory.

    for name, tensor in flatshard.weights.stream(model):
        send(name, tensor)

All ranks of the model call these functions and iterate alike, between two steps: they are
collective. A rank that leaves the loop early still runs the remaining all-gathers, so the
other ranks do not wait for it. It runs them when the iterator is closed, or freed after its
first tensor. After an exception that is when the traceback is freed, and an iterator without
a first tensor runs none. So use a `with` block if the loop, or code before it, can raise one:

    with flatshard.weights.stream(model) as tensors:
        for name, tensor in tensors:
            send(name, tensor)
"""

from collections.abc import Callable

import torch
from torch import nn

from flatshard.weights.changes import Changes, Patch
from flatshard.weights.engines import Bucket, IpcTensor, TensorInfo, buckets, handles
from flatshard.weights.source import Meta, Options, Source, Stream

_MIB = 1 << 20


def stream(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    format: str | None = None,
    rename: Callable[[str], str] | None = None,
    split_experts: bool = True,
) -> Stream[tuple[str, torch.Tensor]]:
    """Yields name and tensor of each weight, on every rank. Collective.

    Tensors may share memory with the model's weights: do not write to them. A tensor that
    is kept keeps the memory of its unit. Otherwise two units are unsharded at a time, and
    with tensor or expert parallelism one full parameter in addition.

    Args:
        model: the outermost module that `fully_shard` wrapped.
        dtype: None: MixedPrecisionPolicy.param_dtype, or else the parameter's own.
        format: None, or "fp8_block": linear layers of blocks, and of single experts, are
            float8_e4m3fn with a float32 scale for each 128 x 128 elements
            (`weight_scale_inv`), equal to `flatshard export --fp8`; other weights are
            bfloat16. A weight that `Float8Policy.module_filter_fn` leaves out stays
            bfloat16, as one that the trainer's `float8.exclude` names.
        rename: maps a name in the model to a name in the folder. None: they are equal, up
            to the names of wrappers such as torch.compile.
        split_experts: one tensor for each expert, as folders have them, of parameters
            that have all experts of a layer.

    Raises:
        ValueError: an unknown format, or one with a dtype; a dtype that is not
            floating-point; a `rename` that gives two tensors one name.
        NotImplementedError: a parameter that is a tensor of a subclass.
        flatshard.Error: format="fp8_block" and a weight that is not finite.
    """
    return iter(Source(model, Options(dtype, format, rename, split_experts)))


def metadata(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    format: str | None = None,
    rename: Callable[[str], str] | None = None,
    split_experts: bool = True,
) -> list[Meta]:
    """Returns name, dtype and shape of what `stream` yields, in its order."""
    return Source(model, Options(dtype, format, rename, split_experts)).metadata()


def vllm_source(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    format: str | None = None,
    rename: Callable[[str], str] | None = None,
    split_experts: bool = True,
) -> Source:
    """Returns a source for vLLM's WeightTransferTrainerFactory.trainer_init(source=).

    It has the functions of vLLM's WeightSource: metadata(), iteration, and iter_groups().
    Accepts the arguments of `stream`.
    """
    return Source(model, Options(dtype, format, rename, split_experts))


def sglang_buckets(
    model: nn.Module,
    *,
    nbytes: int = 512 * _MIB,
    dtype: torch.dtype | None = None,
    format: str | None = None,
    rename: Callable[[str], str] | None = None,
    split_experts: bool = True,
) -> Stream[Bucket]:
    """Yields what `stream` yields, flattened into buckets of at most `nbytes`, for SGLang's
    load_format="flattened_bucket". A larger tensor has a separate bucket. Collective."""
    return buckets(Source(model, Options(dtype, format, rename, split_experts)), nbytes)


def ipc_handles(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    format: str | None = None,
    rename: Callable[[str], str] | None = None,
    split_experts: bool = True,
) -> Stream[list[IpcTensor]]:
    """Yields the handles of the tensors of one unit after another, for an engine that runs
    on the same GPU. Collective.

    Ask for the next unit when the engine has copied the tensors of this one and freed them:
    then their memory is used again. CUDA frees the memory of a handle that no process opens
    only when this process ends, a unit's tensors at a time. So open all handles, or stop
    after a unit of which some were not opened; ranks without an engine iterate `stream` in
    place of this.

    Raises:
        ValueError: the model is not on a GPU, or its memory has expandable segments.
    """
    return handles(Source(model, Options(dtype, format, rename, split_experts)))


def changed(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str] | None = None,
    split_experts: bool = True,
) -> Changes:
    """Returns the changes of the weights from now on. Each iteration yields the elements
    that changed since the last complete iteration on all ranks, or since this call:

        changes = flatshard.weights.changed(model)
        ...  # send all of stream(model), and train
        for patch in changes:
            send(patch.name, patch.indices, patch.values, patch.full_shape)

    An iteration that a rank leaves early does not count as sent. Each rank keeps a copy of
    its shards in `dtype`. Accepts the arguments of `stream`, except `format`.
    """
    return Changes(model, Options(dtype, None, rename, split_experts))


__all__ = [
    "Bucket",
    "Changes",
    "IpcTensor",
    "Meta",
    "Patch",
    "Source",
    "Stream",
    "TensorInfo",
    "changed",
    "ipc_handles",
    "metadata",
    "sglang_buckets",
    "stream",
    "vllm_source",
]
