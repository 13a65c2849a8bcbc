"""Plans four models on 8 to 4,096 GPUs and prints the table of docs/guides/plan.md.

python3 bench/plan_table.py

A row has the fastest way in bfloat16 that fits with float32 states, its bound and the gain
of the fastest FP8 recipe. For comparison it has the fastest ZeRO-3 over all ranks and the
fastest way without tensor parallelism. No GPU is needed.
"""

import tempfile
from pathlib import Path

from harness.command_line import Parser
from harness.programs import plan
from harness.tables import head, row

QWEN3_235B = """
[model]
family = "qwen3_moe"
dim = 4096
layers = 94
heads = 64
kv_heads = 4
head_dim = 128
ffn_dim = 12288
vocab_size = 151936
max_seq_len = 40960
num_experts = 128
experts_per_token = 8
moe_ffn_dim = 1536
[data]
train = "random"
[training]
seq_len = 8192
[precision]
compute = "bfloat16"
reduce = "bfloat16"
"""
MODELS = {
    "8B": "llama3_8b",
    "70B": "llama3_70b",
    "405B": "llama3_405b",
    "Qwen3-235B-A22B": None,
}
RANKS = (8, 64, 512, 4096)


def sweep(args, config, ranks):
    options = ["--sweep", f"--ranks={ranks}", f"--gpu={args.gpu}"]
    return plan(args.program, config, *options)


def strategy(way, ranks):
    text = way["strategy"]
    if way["replicas"] > 1:
        shards = ranks // way["replicas"] // way["tensor_parallel_degree"]
        text += f" {way['replicas']}x{shards}"
    if not way["reshard_after_forward"]:
        text += ", kept"
    if way["tensor_parallel_degree"] > 1:
        text += f", tp {way['tensor_parallel_degree']}"
    if way["expert_degree"] > 1:
        text += f", ep {way['expert_degree']}"
        text += ", overlap" if way["overlap"] else ""
    return text


def is_plain(way):
    return (
        way["strategy"] == "zero3"
        and way["replicas"] == 1
        and way["tensor_parallel_degree"] == 1
        and way["reshard_after_forward"]
        and way["expert_degree"] == 1
    )


def speed(way):
    return way["tokens_per_second_per_gpu"]


def print_row(name, ranks, found):
    fitting = [way for way in found["fitting"] if way["state_dtype"] == "float32"]
    bf16 = [way for way in fitting if way["float8"] == "none"]
    if not bf16:
        row(name, ranks, "does not fit with float32 states", *[""] * 9)
        return
    best = bf16[0]
    plain = [way for way in bf16 if is_plain(way)]
    alone = [way for way in bf16 if way["tensor_parallel_degree"] == 1]
    fp8 = [way for way in fitting if way["float8"] != "none"]
    row(
        name,
        f"{ranks:,}",
        strategy(best, ranks),
        best["recompute"],
        best["local_batch_size"],
        f"{best['peak_bytes'] / 2**30:.0f}",
        f"{speed(best):,.0f}",
        f"{100 * best['mfu']:.1f}",
        best["bound"],
        f"{speed(plain[0]) / speed(best):.2f}" if plain else "does not fit",
        f"{speed(alone[0]) / speed(best):.2f}" if alone else "does not fit",
        f"{fp8[0]['float8']} {speed(fp8[0]) / speed(best):.2f}" if fp8 else "",
    )


def main():
    parser = Parser(__doc__)
    parser.options("program", gpu="h100")
    args = parser.parse_args()
    columns = "model|GPUs|fastest way|recompute|sequences|GiB|"
    columns += "tokens/s/GPU|MFU, %|bound by|ZeRO-3, of it|without TP, of it|FP8, of it"
    head(*columns.split("|"), left=(0, 2, 3, 8))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "qwen3_235b_a22b.toml"
        config.write_text(QWEN3_235B, encoding="utf-8")
        for name, preset in MODELS.items():
            for ranks in RANKS:
                print_row(name, ranks, sweep(args, preset or config, ranks))


if __name__ == "__main__":
    main()
