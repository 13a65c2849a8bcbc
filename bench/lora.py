"""Trains adapters of Llama shapes with the trainer and with peft under FSDP2, alternating.

python3 bench/lora.py --nproc 2 --pairs 3

The peer is transformers' LlamaForCausalLM with peft's adapters, under FSDP2's
fully_shard, with blocks that torch.compile compiled: a bfloat16 base, float32 adapters
that compute in bfloat16, torch's fused AdamW. Weights and tokens are random. Both
recompute the same (--recompute). --loss-chunk and --offload change the peer: logits
exist for one chunk of tokens at a time, and host memory stores the inputs of recomputed
blocks. For the trainer, --set has the same. Prints the median step in ms with the range,
the peak of allocated memory and the ratios to the peer. The last rows are medians over
the pairs. --trace FOLDER writes traces of the peer for bench/kernel_kinds.py. Long
sequences on one GPU:

python3 bench/lora.py --seq 65536 --recompute full --warmup 1 --steps 2 --pairs 1 \\
    --ways "peft + FSDP2" Flatshard --loss-chunk 8192 --offload --set \\
    activation_checkpoint.save=attention activation_checkpoint.loss_chunk_tokens=8192 \\
    activation_checkpoint.offload=true activation_checkpoint.mlp_chunk_tokens=16384
"""

import json
import statistics
import sys
from pathlib import Path

from harness.command_line import Parser
from harness.peers import LLAMA_SIZES
from harness.programs import (
    BENCH,
    file_name,
    machine,
    peer_steps,
    train_steps,
    write_json,
)
from harness.tables import by_turns, head, ms_and_range, row

PEER = "peft + FSDP2"
# Further settings of the trainer for each way.
WAYS = {
    PEER: None,
    "peft + FSDP2, eager": None,
    "Flatshard": [],
    "Flatshard, FP8 base": ["float8.recipe=rowwise"],
    "Flatshard, graphs": ["cuda_graph.impl=full_iteration"],
}
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"


def sizes_of(args):
    hidden, ffn, layers, heads, kv_heads = LLAMA_SIZES[args.shape]
    return hidden, ffn, args.layers or layers, heads, kv_heads


def settings_of(args, way):
    hidden, ffn, layers, heads, kv_heads = sizes_of(args)
    shape = {
        "dim": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_dim": ffn,
        "vocab_size": args.vocab,
        "rope_theta": 500000.0,
    }
    targets = ", ".join(args.targets.split())
    return [
        *(f"model.{key}={value}" for key, value in shape.items()),
        f"lora.rank={args.rank}",
        f"lora.targets={targets}",
        f"lora.dropout={args.dropout}",
        f"training.local_batch_size={args.batch}",
        f"activation_checkpoint.mode={args.recompute}",
        *WAYS[way],
        *args.set,
    ]


def use_chunked_loss(base, chunk, compiled):
    """Replaces the forward of a LlamaForCausalLM; it returns only the loss."""
    import torch
    import torch.nn.functional as F
    from harness.long_context import chunked_loss, loss_of_chunk
    from transformers.modeling_outputs import CausalLMOutput

    loss = torch.compile(loss_of_chunk) if compiled else loss_of_chunk

    def forward(input_ids, labels, **_):
        hidden = base.model(input_ids=input_ids).last_hidden_state.flatten(0, 1)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100).flatten()
        total = chunked_loss(hidden, base.lm_head.weight, targets, chunk, loss)
        return CausalLMOutput(loss=total / (labels.shape[0] * (labels.shape[1] - 1)))

    base.forward = forward


def build_peer(args, mesh, device, compiled):
    """Returns the sharded model of transformers with adapters."""
    import torch
    from harness.long_context import HostCheckpoint, HostCopies
    from harness.peers import fully_shard_of, llama_config, restore_rotary
    from peft import LoraConfig, get_peft_model
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        checkpoint_wrapper,
    )
    from transformers import LlamaForCausalLM

    config = llama_config(
        sizes_of(args),
        vocab_size=args.vocab,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("meta"):
        base = LlamaForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(
            base,
            LoraConfig(
                r=args.rank,
                lora_alpha=16,
                lora_dropout=args.dropout,
                target_modules=args.targets.split(),
                task_type="CAUSAL_LM",
            ),
        )
    # Master weights of adapters are float32, as the trainer's are.
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    layers, copies = base.model.layers, HostCopies()
    for i, layer in enumerate(layers):
        if args.recompute == "full" and not args.offload:
            layers[i] = checkpoint_wrapper(layer)
        if compiled:
            layers[i].compile()
        if args.offload:
            layers[i] = HostCheckpoint(layer, copies)
    if args.loss_chunk:
        use_chunked_loss(base, args.loss_chunk, compiled)
    fully_shard = fully_shard_of("fsdp2", reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif "lora_B" in name:
                parameter.zero_()
            else:
                parameter.normal_(0, 0.02)
    restore_rotary(base, device)
    return model


def run_peer(args):
    """Runs the peer once on this rank. Prints a line of JSON."""
    import torch
    import torch.distributed as dist
    from harness.peers import fused_attention
    from harness.ranks import join_mesh, say, usual_device
    from harness.steps import measure

    kind = usual_device()
    mesh = join_mesh(kind)
    device = torch.device(kind)
    model = build_peer(args, mesh, device, compiled=not args.eager)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=kind == "cuda")
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(args.vocab, (args.batch, args.seq), device=device)
    with fused_attention(kind):
        found = measure(
            lambda: model(input_ids=ids, labels=ids).loss,
            optimizer,
            args,
            trace=args.trace,
        )
    found["trained"] = sum(p.numel() for p in trained)
    say(json.dumps(found))
    dist.destroy_process_group()


def peft_steps(args, way, log):
    names = ("shape", "vocab", "layers", "rank", "targets", "dropout", "batch", "seq")
    names += ("recompute", "loss_chunk")
    options = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    if "eager" in way:
        options.append("--eager")
    if args.offload:
        options.append("--offload")
    if args.trace:
        options.append(f"--trace={args.trace / f'{log.stem}.json.gz'}")
    return peer_steps(args, "lora.py", log, ["--worker", *options])


def measure_way(args, way, pair):
    name = file_name(way, args.nproc, pair)
    if WAYS[way] is None:
        return peft_steps(args, way, args.out / f"{name}.log")
    return train_steps(args, args.seq, settings_of(args, way), args.out / name)


def report(results, way, runs, peers):
    """Prints the medians of a way over the pairs."""
    medians, ratios = [], []
    for key in ("ms", "peak_GiB"):
        medians.append(statistics.median(found[key] for found in runs))
        pairs = [(a[key], b[key]) for a, b in zip(runs, peers)]
        ratios.append(statistics.median(a / b if b else 1.0 for a, b in pairs))
    (ms, peak), (of_ms, of_peak) = medians, ratios
    results["medians"][way] = {"ms": ms, "peak_GiB": peak, "of_peer": ratios}
    row(f"{way}, median", f"{ms:.1f}", f"{of_ms:.3f}", f"{peak:.2f}", f"{of_peak:.3f}")


def main():
    parser = Parser(__doc__).options("program", "set", "nproc", "warmup", "steps")
    parser.options("tiny", pairs=3, seq=4096, out=Path("outputs/lora"), vocab=128256)
    parser.options(rank=16, batch=1, dropout=0.0, targets=TARGETS, loss_chunk=0)
    parser.options("trace", offload=False)
    parser.add_argument("--shape", choices=LLAMA_SIZES, default="8b")
    parser.add_argument("--layers", type=int, default=0, help="blocks; 0: the shape's")
    parser.add_argument("--recompute", choices=["none", "full"], default="none")
    usual = [PEER, "Flatshard", "Flatshard, FP8 base"]
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=usual)
    parser.add_argument("--worker", action="store_true", help="a rank of the peer")
    parser.add_argument("--eager", action="store_true", help="of the worker")
    args = parser.parse_args()
    if args.offload and args.recompute == "none":
        parser.error("--offload requires --recompute full")
    if args.tiny:
        args.shape, args.vocab, args.seq, args.rank = "tiny", 512, 64, 4
        args.set += ["precision.compute=bfloat16"]
    if args.worker:
        run_peer(args)
        return
    args.config = BENCH / "random.toml"
    print(f"{args.nproc} ranks on {machine()}: {vars(args)}\n", flush=True)
    results = {"machine": machine(), "nproc": args.nproc, "runs": {}, "medians": {}}
    head("", "ms per step (range)", "of the peer", "peak GiB", "of the peer")

    def run_one(way, pair):
        found = measure_way(args, way, pair)
        row(f"{way}, {pair}", ms_and_range(found), "", f"{found['peak_GiB']:.2f}", "")
        return found

    runs = by_turns(args.ways, args.pairs, run_one)
    results["runs"] = runs
    for way in args.ways:
        report(results, way, runs[way], runs[args.ways[0]])
    write_json(args.out / "lora.json", results)


if __name__ == "__main__":
    sys.exit(main())
