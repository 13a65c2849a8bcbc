"""Experts of transformers' Mixtral and Qwen3-MoE, spread over ranks.

Each rank of a mesh dimension keeps some experts of every layer, and each token travels
to the ranks of its experts and back. What an expert computes stays transformers' own.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.moe.overlap import running
from flatshard.torch_versions import parameters_of

# Blocks of transformers 4 that hold their experts in a list, and whether they always
# make the chosen weights add up to 1.
_LISTS = {"MixtralSparseMoeBlock": True, "Qwen3MoeSparseMoeBlock": False}


def expert_parallel(
    model: nn.Module, ep_mesh: DeviceMesh, *, overlap: bool = False
) -> nn.Module:
    """Leaves on each rank its experts of every layer, and dispatches tokens to them.

    Before fully_shard. `moe_meshes` makes the meshes that fit, and `shard_moe` does both.

    Rank r of `ep_mesh` keeps experts [r * n, (r + 1) * n), n = experts / ranks, of the
    3-D parameters `gate_up_proj` and `down_proj`. transformers 4 has a list of experts
    instead; they are stacked, and get version 5's names. Routers, auxiliary losses and
    the configuration are as before. Each layer needs the sizes on the host once in each
    forward.

    Args:
        model: a transformers model, before fully_shard; may be on the meta device.
        ep_mesh: DeviceMesh of one dimension.
        overlap: True: steps may run by overlap_microbatches, which hides one
            microbatch's exchange by another's computation. Calls of the model are
            as without.

    Returns:
        `model`.

    Raises:
        ValueError: a model without experts, or with a number of them that does not
            divide, naming it.
    """
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap: expected True or False, got {overlap!r}")
    if not isinstance(ep_mesh, DeviceMesh) or ep_mesh.ndim != 1:
        raise ValueError(
            f"ep_mesh: expected a DeviceMesh of one dimension, got {ep_mesh!r}"
        )
    for module in model.modules():
        if type(module).__name__ in _LISTS and isinstance(
            getattr(module, "experts", None), nn.ModuleList
        ):
            _stack(module)
    found = experts_in(model)
    if not found:
        raise ValueError(
            f"model: expected experts as transformers' Mixtral and Qwen3-MoE have them, "
            f"found none in {type(model).__name__}"
        )
    for name, module in found:  # all or nothing
        _check(name, module, ep_mesh)
    for _, module in found:
        _spread(module, ep_mesh, overlap)
    if overlap:
        experts = {id(module) for _, module in found}
        for block in model.modules():
            if id(getattr(block, "experts", None)) in experts:
                _cut_logits(block)
    return model


def experts_in(model):
    """Names and modules of the experts of each layer, in the form of transformers 5."""
    return [(n, m) for n, m in model.named_modules() if _is_experts(m)]


def is_spread(module):
    """Of the modules that expert_parallel spread over ranks."""
    return isinstance(module, _Spread)


def _is_experts(module):
    own = parameters_of(module)
    return hasattr(module, "num_experts") and {"gate_up_proj", "down_proj"} <= set(own)


def _check(name, module, ep_mesh):
    n, ranks = module.num_experts, ep_mesh.size()
    if isinstance(module, _Spread):
        raise ValueError(f"{name}: expert_parallel was applied to it before")
    if n % ranks:
        raise ValueError(
            f"{name}: {n} experts do not divide by {ranks} ranks of ep_mesh; choose a "
            "dimension whose size divides them"
        )
    for key, p in parameters_of(module).items():
        if p is None:
            continue
        if isinstance(p, ShardedTensor):
            raise ValueError(
                f"{name}.{key} is sharded already; call expert_parallel before "
                "fully_shard"
            )
        if p.shape[0] != n:
            raise ValueError(
                f"{name}.{key}: expected {n} slices, one for each expert, got "
                f"{tuple(p.shape)}"
            )


def _spread(module, ep_mesh, overlap):
    ranks, rank = ep_mesh.size(), ep_mesh.get_local_rank()
    if ranks == 1 and not overlap:
        return
    n = module.num_experts // ranks
    for key, p in list(parameters_of(module).items()):
        if p is not None:
            part = p.detach()[rank * n : (rank + 1) * n].clone()
            parameters_of(module)[key] = nn.Parameter(
                part, requires_grad=p.requires_grad
            )
    module.num_experts = n
    module._flatshard_group = ep_mesh.get_group()
    module._flatshard_overlap = overlap
    module.__class__ = _spread_class(type(module))


class _Spread:
    """Sends rows to the ranks of their experts, and their results back."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """
        Args:
            hidden_states: [tokens, dim]
            top_k_index: [tokens, k] numbers among the experts of all ranks.
            top_k_weights: [tokens, k]

        Returns:
            [tokens, dim]
        """
        group, n = self._flatshard_group, self.num_experts
        ranks, k = group.size(), top_k_index.shape[1]
        with torch.no_grad():
            order, inverse, leaving = _sort_by_expert(top_k_index, ranks * n)
            arriving = torch.empty_like(leaving)
            dist.all_to_all_single(arriving, leaving, group=group)
            sizes = torch.stack([leaving, arriving]).view(2, ranks, n).sum(2)
            sent, received = sizes.tolist()
            experts = torch.arange(n, device=order.device).repeat(ranks)
            experts = experts.repeat_interleave(arriving, output_size=sum(received))
        schedule = running() if self._flatshard_overlap else None
        rows = hidden_states[order // k]
        if schedule is not None:
            rows = schedule.dispatch(rows, sent, received, group)
        else:
            rows = _Exchange.apply(rows, sent, received, group)
        if rows.shape[0] > 0:
            ones = rows.new_ones(rows.shape[0], 1)
            rows = super().forward(rows, experts.unsqueeze(1), ones)
        else:  # of no token; the ranks' backwards stay alike
            rows = rows + sum(p.flatten()[:0].sum() for p in self.parameters())
        if schedule is not None:
            rows = schedule.combine(rows)
        else:
            rows = _Exchange.apply(rows, received, sent, group)
        return _sum_of_tokens(rows, inverse, top_k_weights).to(hidden_states.dtype)


def _sort_by_expert(top_k_index, num_experts):
    """Of all choices: their order by expert, where each is then, and how many each
    expert has."""
    ids = top_k_index.reshape(-1)
    order = torch.argsort(ids, stable=True)
    counts = torch.bincount(ids, minlength=num_experts)
    return order, torch.argsort(order), counts


def _sum_of_tokens(rows, inverse, top_k_weights):
    """[tokens * k, dim] by expert -> [tokens, dim], weighted."""
    rows = rows[inverse].view(*top_k_weights.shape, -1)
    return (rows * top_k_weights.unsqueeze(-1)).sum(1)


class _Exchange(torch.autograd.Function):
    """[sum(sent), dim] rows, sent[r] of them to rank r of the group in their order ->
    [sum(received), dim], received[r] from rank r. Collective."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sizes = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received, group = ctx.sizes
        return _Exchange.apply(grad, received, sent, group), None, None, None


class _CutRouter:
    """Of a module whose first result auxiliary losses read."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        schedule = running()
        if schedule is None or not isinstance(output, tuple):
            return output
        return (schedule.cut_logits(output[0]), *output[1:])


def _cut_logits(block):
    """Of version 5; blocks of version 4 do it themselves."""
    if not isinstance(block, _StackedBlock):
        block.gate.__class__ = _cut_router_class(type(block.gate))


@functools.lru_cache(maxsize=None)
def _cut_router_class(cls):
    return type(cls.__name__, (_CutRouter, cls), {"__module__": cls.__module__})


@functools.lru_cache(maxsize=None)
def _spread_class(cls):
    return type(cls.__name__, (_Spread, cls), {"__module__": cls.__module__})


# -- transformers 4 --------------------------------------------------------------------


class StackedExperts(nn.Module):
    """Experts with a gate, as 3-D parameters.

    Parameters: gate_up_proj [experts, 2 * ffn, dim], down_proj [experts, dim, ffn].
    """

    def __init__(self, gate_up, down, act_fn):
        super().__init__()
        self.num_experts = gate_up.shape[0]
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)
        self.act_fn = act_fn

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """As _Spread.forward, of this module's experts."""
        k = top_k_index.shape[1]
        with torch.no_grad():
            order, inverse, counts = _sort_by_expert(top_k_index, self.num_experts)
            ends = counts.cumsum(0).to(torch.int32)
        rows = hidden_states[order // k]
        both = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        rows = self.act_fn(gate) * up
        rows = F.grouped_mm(rows, self.down_proj.transpose(1, 2), offs=ends)
        return _sum_of_tokens(rows, inverse, top_k_weights).to(hidden_states.dtype)


def _stack(block):
    experts = list(block.experts)
    names = (
        ("gate_proj", "up_proj", "down_proj")
        if hasattr(experts[0], "gate_proj")
        else ("w1", "w3", "w2")
    )
    trains = {p.requires_grad for p in block.experts.parameters()}
    with torch.no_grad():
        gate, up, down = (
            torch.stack([getattr(e, name).weight for e in experts]) for name in names
        )
        stacked = StackedExperts(torch.cat([gate, up], 1), down, experts[0].act_fn)
    stacked.requires_grad_(trains == {True})
    block.experts = stacked
    block.__class__ = _stacked_class(type(block))


class _StackedBlock:
    def forward(self, hidden_states):
        noise = getattr(self, "jitter_noise", 0)
        if self.training and noise > 0:
            shape = torch.empty_like(hidden_states)
            hidden_states = hidden_states * shape.uniform_(1 - noise, 1 + noise)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(rows)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        if self._normalizes or getattr(self, "norm_topk_prob", False):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        rows = self.experts(rows, chosen, weights.to(rows.dtype))
        if (schedule := running()) is not None:
            logits = schedule.cut_logits(logits)
        return rows.view(hidden_states.shape), logits


@functools.lru_cache(maxsize=None)
def _stacked_class(cls):
    members = {"__module__": cls.__module__, "_normalizes": _LISTS[cls.__name__]}
    return type(cls.__name__, (_StackedBlock, cls), members)
