"""Models, units and optimizers that Flatshard and FSDP2 have in common."""

import contextlib
import functools
import gc
import importlib

import torch
from torch.distributed.tensor import distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MODULES = {"flatshard": "flatshard", "fsdp2": "torch.distributed.fsdp"}


def library(name):
    """Returns the module that has fully_shard, of "flatshard" or "fsdp2"."""
    return importlib.import_module(MODULES[name])


def shard_function(name):
    """Returns fully_shard. Flatshard's accepts each of its options as a keyword."""
    if name != "flatshard":
        return library(name).fully_shard
    return importlib.import_module(".options", __package__).fully_shard


def fully_shard_of(name, **dtypes):
    """Returns fully_shard with a policy: bfloat16 compute and reduction, or `dtypes`."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16, **dtypes}
    policy = library(name).MixedPrecisionPolicy(**dtypes)
    return functools.partial(shard_function(name), mp_policy=policy)


def shard_decoder(fully_shard, root, embed, blocks, tail, reshard=True):
    """Makes units of a decoder: embedding, blocks, norm with head, and the rest.

    Args:
        reshard: how many blocks are resharded after their forward, or True for all.
    """
    fully_shard(embed)
    for i, block in enumerate(blocks):
        resharded = reshard is True or i < reshard
        fully_shard(block, **({} if resharded else {"reshard_after_forward": False}))
    # Used again at once, by the backward.
    fully_shard(tail, reshard_after_forward=False)
    fully_shard(root)


def fused_attention(device="cuda"):
    """Returns a context with cuDNN's attention, or else flash attention, on GPUs."""
    if device != "cuda":
        return contextlib.nullcontext()
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    return sdpa_kernel(kernels, set_priority=True)


def llama_config(sizes, **more):
    """Returns transformers' configuration of a Llama.

    Args:
        sizes: hidden, intermediate, layers, heads, kv heads
    """
    from transformers import LlamaConfig

    hidden, intermediate, layers, heads, kv_heads = sizes
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
        **more,
    )


def restore_rotary(model, device):
    """Computes a Llama's rotary frequencies. to_empty left them uninitialized."""
    rotary, config = model.model.rotary_emb, model.config
    dim = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, dim, 2, device=device).float() / dim
    rotary.inv_freq = rotary.original_inv_freq = 500000.0**-exponents


# hidden, intermediate, layers, heads, kv heads
LLAMA_SIZES = {
    "8b": (4096, 14336, 32, 32, 8),
    "3b": (3072, 8192, 28, 24, 8),
    "1b": (2048, 8192, 16, 32, 8),
    "tiny": (64, 128, 2, 4, 2),
}


def adamw(model, core=False):
    """Returns torch's fused AdamW, or Flatshard's AdamW with `core`."""
    if core:
        return importlib.import_module("flatshard").optim.AdamW(
            model.parameters(), lr=1e-4
        )
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


class MuonAndAdamW:
    """torch.optim.Muon for the matrices of the blocks, and fused AdamW for the rest.

    Each matrix's update is all-gathered in bfloat16 and orthogonalized on every rank.
    """

    def __init__(self, model, blocks):
        self.gather()
        matrices = [p for p in blocks.parameters() if p.ndim == 2]
        chosen = set(matrices)
        others = [p for p in model.parameters() if p not in chosen]
        fused = matrices[0].device.type == "cuda"
        self.parts = [
            torch.optim.Muon(
                matrices, lr=3e-4, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=3e-4, weight_decay=0.1, fused=fused),
        ]

    @staticmethod
    def gather():
        from torch.optim import _muon

        of_torch = _muon._zeropower_via_newtonschulz
        if of_torch.__name__ != "_zeropower_via_newtonschulz":
            return

        def gathered(update, *options):
            whole = of_torch(update.bfloat16().full_tensor(), *options)
            return distribute_tensor(
                whole, update.device_mesh, update.placements, src_data_rank=None
            )

        _muon._zeropower_via_newtonschulz = gathered

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self):
        for part in self.parts:
            part.zero_grad()


def release():
    """Gives the memory of a model that is no longer used back to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
