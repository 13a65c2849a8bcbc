"""The loss of a language model without its logits in float32."""

import torch

from flatshard import _C
from flatshard._fsdp.linear import sink_of
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.torch_versions import outside_of_graphs


@outside_of_graphs
def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    chunk_tokens: int = 0,
) -> torch.Tensor:
    """Returns cross_entropy(input @ weight.T, target), computed in float32.

    `torch.nn.functional.cross_entropy` of a head's output stores three tensors of the
    logits' size when its backward starts: their log-softmax in float32, its gradient, and
    the gradient of the logits. Here the logits exist once, in the dtype of the input, and
    become their gradient. With `ShardOptions(grads_in_place=True)` the weight's gradient is
    written where it is reduced.

    Call it while the weight is unsharded: in a forward of its unit, or in a method that
    `register_fsdp_forward_method` made one. It also works without sharding.

    Args:
        input: [..., dim], the input of the head.
        weight: [vocab, dim] of input's dtype, such as `lm_head.weight`.
        target: int64, input's shape without the last dimension; each in [0, vocab)
            or `ignore_index`. On a GPU any other makes the loss NaN.
        reduction: "mean" over the targets that are not ignored (0 if there is none),
            or "sum".
        ignore_index: the target that does not contribute to the loss.
        chunk_tokens: 0: [tokens, vocab] of memory from here to the backward. Otherwise
            the number of tokens to compute at a time. The gradients of input and weight
            (float32) are computed here, and exist until the backward.

    Returns:
        float32 scalar.

    Raises:
        ValueError: an argument that cannot work, naming it.
        RuntimeError: the weight is a shard, or was resharded.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: expected 'mean' or 'sum', got {reduction!r}")
    if isinstance(weight, ShardedTensor):
        raise RuntimeError(
            "weight: expected an unsharded parameter, got a shard: call linear_cross_entropy "
            "in a forward of the parameter's unit, or in a method of it that "
            "register_fsdp_forward_method made one"
        )
    if input.dtype != weight.dtype:
        raise ValueError(
            f"input and weight: expected one dtype, got {input.dtype} and "
            f"{weight.dtype}; autocast does not change them here"
        )
    options = _C.LossOptions(
        mean=reduction == "mean", ignore_index=ignore_index, chunk_tokens=chunk_tokens
    )
    runtime = sink_of(weight) if torch.is_grad_enabled() else None
    return _C.linear_cross_entropy(input, weight, target, options, runtime)
