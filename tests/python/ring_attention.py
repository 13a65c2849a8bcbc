"""torch's context_parallel on CPUs. torch has its ring attention for GPUs only, so here
the ring calls the kernel of CPUs. torch splits the buffers, orders the chunks, and runs
the collectives and the merge."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_SEQUENCE = 2  # dimension of queries, keys and values
_attention_of_torch = F.scaled_dot_product_attention


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, group, options):
        out, logsumexp = _attention._templated_ring_attention(
            group, _SEQUENCE, _forward, query, key, value, **options
        )
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.group, ctx.options = group, options
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, logsumexp = ctx.saved_tensors
        grads = _attention._templated_ring_attention_backward(
            ctx.group,
            _SEQUENCE,
            _backward,
            grad_out=grad,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            dropout_p=0.0,
            **ctx.options,
        )
        return *grads, None, None


# torch replaces it in F under its own name.
def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options
):
    if not isinstance(query, DTensor):  # outside context_parallel
        return _attention_of_torch(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    assert attn_mask is None and dropout_p == 0.0
    mesh, placements = query.device_mesh, query.placements
    query, key, value = (t.to_local() for t in (query, key, value))
    if options.get("enable_gqa"):
        groups = query.size(1) // key.size(1)
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    options = {"is_causal": is_causal, "scale": options.get("scale")}
    out = _Ring.apply(query, key, value, mesh.get_group(), options)
    return DTensor.from_local(out, mesh, placements, run_check=False)


def use_on_cpus():
    """Lets context_parallel find an attention for CPUs, until `end`."""
    F.scaled_dot_product_attention = scaled_dot_product_attention


def end():
    F.scaled_dot_product_attention = _attention_of_torch
