"""Decoders in plain PyTorch, as FSDP2's users write them."""

import torch
import torch.nn.functional as F
from torch import nn


def rotary(seq, head_dim, base, device):
    """Returns cos and sin of the angles, each [seq, 1, head_dim / 2] float32."""
    half = head_dim // 2
    turns = base ** -(torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(seq, device=device), turns)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.float().chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Norm, attention and residual: the first half of a block.

    Args:
        args: dim, heads, kv_heads, and gqa: keys and values are not repeated.
        norm_heads: queries and keys are normed, head by head.
    """

    def __init__(self, args, head_dim, eps, norm_heads=False):
        super().__init__()
        self.head_dim, self.native_gqa = head_dim, args.gqa
        self.times = args.heads // args.kv_heads
        wide, narrow = args.heads * head_dim, args.kv_heads * head_dim
        self.attention_norm = nn.RMSNorm(args.dim, eps=eps)
        self.q = nn.Linear(args.dim, wide, bias=False)
        self.k = nn.Linear(args.dim, narrow, bias=False)
        self.v = nn.Linear(args.dim, narrow, bias=False)
        self.q_norm = nn.RMSNorm(head_dim, eps=eps) if norm_heads else None
        self.k_norm = nn.RMSNorm(head_dim, eps=eps) if norm_heads else None
        self.o = nn.Linear(wide, args.dim, bias=False)

    def heads(self, x, shape, norm, angles):
        x = x.view(shape)
        if norm is not None:
            x = norm(x)
        return rotate(x, *angles) if angles else x

    def attend(self, x, *angles):
        shape = (*x.shape[:2], -1, self.head_dim)
        y = self.attention_norm(x)
        q = self.heads(self.q(y), shape, self.q_norm, angles)
        k = self.heads(self.k(y), shape, self.k_norm, angles)
        v = self.v(y).view(shape)
        if not self.native_gqa:
            k, v = (
                k.repeat_interleave(self.times, 2),
                v.repeat_interleave(self.times, 2),
            )
        return x + self.o(self.attention(q, k, v).flatten(2))

    def attention(self, q, k, v):
        """Returns causal attention; all have [batch, tokens, heads, head_dim]."""
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.native_gqa,
        )
        return y.transpose(1, 2)


class LlamaBlock(Attention):
    def __init__(self, args):
        super().__init__(args, args.dim // args.heads, 1e-5)
        self.mlp_norm = nn.RMSNorm(args.dim, eps=1e-5)
        self.gate = nn.Linear(args.dim, args.ffn, bias=False)
        self.up = nn.Linear(args.dim, args.ffn, bias=False)
        self.down = nn.Linear(args.ffn, args.dim, bias=False)

    def forward(self, x, *angles):
        x = self.attend(x, *angles)
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def loss_of(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Decoder(nn.Module):
    def __init__(self, args, block, eps):
        super().__init__()
        self.embed = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(block(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.dim, eps=eps)
        self.head = nn.Linear(args.dim, args.vocab, bias=False)
        self.loss = loss_of

    def logits(self, tokens, *angles):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, *angles)
        return self.head(self.norm(x))

    def forward(self, tokens, targets, *angles):
        return self.loss(self.logits(tokens, *angles), targets)


class Llama(Decoder):
    def __init__(self, args):
        super().__init__(args, LlamaBlock, 1e-5)
