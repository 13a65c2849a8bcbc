"""Experts of transformers' Mixtral, Qwen2-MoE and Qwen3-MoE, spread over ranks.

Each rank of a mesh dimension keeps some experts of every layer. The core's exchange
sends each token to the ranks of its experts and adds up the results, and its grouped
matmuls compute them. Routers, gates and everything else are the code of transformers.
"""

import functools

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from flatshard import _C
from flatshard._fsdp.arguments import uses_copy_engines
from flatshard._tensor.mesh import core_mesh, default_timeout_s
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.moe.overlap import running
from flatshard.torch_versions import outside_of_graphs, parameters_of

# Blocks of transformers 4 that have their experts in a list, and whether they always
# make the chosen weights add up to 1.
_LISTS = {
    "MixtralSparseMoeBlock": True,
    "Qwen2MoeSparseMoeBlock": False,
    "Qwen3MoeSparseMoeBlock": False,
}


def expert_parallel(
    model: nn.Module,
    ep_mesh: DeviceMesh,
    *,
    overlap: bool = False,
    copy_engines: str = "auto",
) -> nn.Module:
    """Leaves on each rank its experts of every layer, and dispatches tokens to them.

    Before fully_shard. `moe_meshes` makes the meshes that fit, and `shard_moe` does both.

    Rank r of `ep_mesh` keeps experts [r * n, (r + 1) * n), n = experts / ranks, of the
    3-D parameters `gate_up_proj` and `down_proj`. transformers 4 has a list of experts
    instead. They are stacked, and get version 5's names. Routers, auxiliary losses and
    the configuration are as before. On several ranks the host waits in each layer's
    forward for the number of rows. Gradients have no second derivative.

    Args:
        model: a transformers model, before fully_shard; may be on the meta device.
        ep_mesh: DeviceMesh of one dimension.
        overlap: True: steps may run by overlap_microbatches, so that the token exchange of
            one microbatch overlaps with the computation of another. Calls of the model do
            not change.
        copy_engines: "all": tokens are copied between the GPUs of one host, or between
            processes on CPUs. "none": collectives exchange them. "auto": copies where
            NVLink joins the GPUs of `ep_mesh`. Results are bitwise equal.

    Returns:
        `model`.

    Raises:
        ValueError: a model without experts, or with a number of them that does not
            divide, naming it.
    """
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap: expected True or False, got {overlap!r}")
    if copy_engines not in ("none", "auto", "all"):
        raise ValueError(
            f"copy_engines: expected 'none', 'auto' or 'all', got {copy_engines!r}"
        )
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
        _spread(module, ep_mesh, overlap, copy_engines)
    if overlap:
        experts = {id(module) for _, module in found}
        for block in model.modules():
            if id(getattr(block, "experts", None)) in experts:
                _cut_logits(block)
    return model


def experts_in(model):
    """Returns names and modules of the experts of each layer, in the form of transformers
    5."""
    return [(n, m) for n, m in model.named_modules() if _is_experts(m)]


def is_spread(module):
    """Returns whether expert_parallel spread the module over ranks."""
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


def _spread(module, ep_mesh, overlap, copy_engines):
    ranks, rank = ep_mesh.size(), ep_mesh.get_local_rank()
    exchange = _exchange_of(ep_mesh, module.num_experts, copy_engines)
    n = module.num_experts // ranks
    for key, p in list(parameters_of(module).items()):
        if p is not None:
            part = p.detach()[rank * n : (rank + 1) * n].clone()
            parameters_of(module)[key] = nn.Parameter(
                part, requires_grad=p.requires_grad
            )
    module.num_experts = n
    module._flatshard_exchange = exchange
    module._flatshard_overlap = overlap
    module.__class__ = _with_base(_Spread, type(module))


# One for layers of as many experts: their tokens share its stream. All ranks make the
# same ones, so none is dropped when its layers are.
_exchanges: dict = {}


def _exchange_of(ep_mesh, num_experts, copy_engines):
    """Returns the token exchange over `ep_mesh`, created once. Collective."""
    mesh = core_mesh(ep_mesh)
    copies = uses_copy_engines(copy_engines, mesh)
    key = mesh, num_experts, copies
    if key not in _exchanges:
        options = _C.TokenExchangeOptions(
            num_experts=num_experts, copies=copies, timeout_s=default_timeout_s()
        )
        _exchanges[key] = _C.TokenExchange(mesh, options)
    return _exchanges[key]


class _Spread:
    """Sends tokens to the ranks of their experts, and adds up the results."""

    @outside_of_graphs
    def forward(self, hidden_states, top_k_index, top_k_weights):
        """
        Args:
            hidden_states: [tokens, dim]
            top_k_index: [tokens, k] numbers among the experts of all ranks.
            top_k_weights: [tokens, k]

        Returns:
            [tokens, dim]
        """
        way = routed = _C.RoutedTokens(self._flatshard_exchange, top_k_index)
        if self._flatshard_overlap and (schedule := running()) is not None:
            way = schedule.cut(routed)
        weights = routed.row_weights(top_k_weights.float())
        rows, row_weights = way.dispatch(hidden_states, weights)
        weights = row_weights.to(top_k_weights.dtype).unsqueeze(1)
        if _is_gated(self):
            rows = rows.to(self.gate_up_proj.dtype)
            both = _C.grouped_linear(rows, self.gate_up_proj, routed.ends)
            down = self.down_proj, routed.ends
            if both.is_cuda and _is_swiglu(self):  # by a kernel, with the weights
                rows = _C.grouped_swiglu_linear(both, row_weights, *down)
            else:
                rows = _C.grouped_linear(self._apply_gate(both), *down) * weights
        elif routed.num_received > 0:
            rows = super().forward(rows, _experts_of_rows(routed), weights)
        else:  # of no token; the ranks' backwards stay alike
            rows = rows * weights + sum(p[:0].sum() for p in self.parameters())
        return way.combine(rows.to(hidden_states.dtype))


def _is_gated(experts):
    """Returns whether they compute only two matmuls with a gate in between."""
    return (
        getattr(experts, "has_gate", False)
        and not experts.has_bias
        and not experts.is_transposed
    )


def _is_swiglu(experts):
    """Returns whether the gate is silu, as the core's kernel has it."""
    own_gate = type(experts)._apply_gate.__name__ != "_default_apply_gate"
    act = type(experts.act_fn).__name__
    return not own_gate and act in ("SiLU", "SiLUActivation")


def _experts_of_rows(routed):
    """Returns [num_received, 1]: the expert of each row, in the form that transformers'
    forward accepts."""
    ends = routed.ends
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    experts = torch.arange(len(ends), device=ends.device)
    n = routed.num_received
    return experts.repeat_interleave(sizes, output_size=n).unsqueeze(1)


class _CutRouter:
    """Replaces a module whose first result auxiliary losses read."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        schedule = running()
        if schedule is None or not isinstance(output, tuple):
            return output
        return (schedule.cut_logits(output[0]), *output[1:])


def _cut_logits(block):
    """Truncates the logits of version 5, since blocks of version 4 do it themselves."""
    if not isinstance(block, _StackedBlock):
        block.gate.__class__ = _with_base(_CutRouter, type(block.gate))


@functools.lru_cache(maxsize=None)
def _with_base(base, cls):
    """Returns `cls` with the methods of `base` before its own."""
    return type(cls.__name__, (base, cls), {"__module__": cls.__module__})


# -- transformers 4 --------------------------------------------------------------------


def _default_apply_gate(experts, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


class StackedExperts(nn.Module):
    """The parameters of experts with a gate, as transformers 5 has them.

    Parameters: gate_up_proj [experts, 2 * ffn, dim], down_proj [experts, dim, ffn].
    The names are as in transformers 5.
    """

    has_gate, has_bias, is_transposed = True, False, False
    _apply_gate = _default_apply_gate

    def __init__(self, gate_up, down, act_fn):
        super().__init__()
        self.num_experts = gate_up.shape[0]
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)
        self.act_fn = act_fn


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
    block.__class__ = _with_base(_StackedBlock, type(block))


class _StackedBlock:
    def forward(self, hidden_states):
        noise = getattr(self, "jitter_noise", 0)
        if self.training and noise > 0:
            shape = torch.empty_like(hidden_states)
            hidden_states = hidden_states * shape.uniform_(1 - noise, 1 + noise)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(rows)
        shared = None
        if hasattr(self, "shared_expert"):
            shared = F.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        weights = F.softmax(logits, dim=1, dtype=torch.float)
        weights, chosen = torch.topk(weights, self.top_k, dim=-1)
        if _LISTS[type(self).__name__] or getattr(self, "norm_topk_prob", False):
            weights = weights / weights.sum(dim=-1, keepdim=True)
        rows = self.experts(rows, chosen, weights.to(rows.dtype))
        rows = rows if shared is None else rows + shared
        if (schedule := running()) is not None:
            logits = schedule.cut_logits(logits)
        return rows.view(hidden_states.shape), logits
