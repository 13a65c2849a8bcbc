"""Compares `flatshard plan` with steps that were measured: docs/performance.md has them.

python3 bench/plan_accuracy.py

Each row has a step's time and peak of allocated memory, measured and planned. No GPU is
needed. Times that the host bounds depend on the machine: `host` marks their rows.
"""

import statistics

from harness.cases import VARIANTS
from harness.command_line import Parser
from harness.programs import plan, write_json
from harness.tables import head, row

# Settings by the short names of MEASURED.
SETTINGS = {
    "nccl": "parallelism.copy_engines=none",
    "copies": "parallelism.copy_engines=all",
    "tp": "parallelism.tensor_parallel_degree=2 parallelism.tensor_parallel_comm=collective",
    "tpcopies": "parallelism.tensor_parallel_degree=2 parallelism.tensor_parallel_comm=copies",
    "graphs": "cuda_graph.impl=unit",
    "zero2": "parallelism.strategy=zero2",
    "ep": "parallelism.expert_parallel_degree=2 parallelism.token_exchange=copies",
    "ep4": "parallelism.expert_parallel_degree=4 parallelism.token_exchange=copies",
    "overlap": "parallelism.overlap_expert_parallel=true",
    "late": "parallelism.delay_wgrad=true",
    "batch8": "training.global_batch_size=8 debug.force_balance=true",
    "batch16": "training.local_batch_size=4 training.global_batch_size=16 "
    "debug.force_balance=true",
    "batch32": "training.global_batch_size=32 debug.force_balance=true",
    **{r: f"float8.recipe={r}" for r in ("tensorwise", "rowwise", "blockwise")},
}
# bench/tensor_parallel.py measures these.
SHARED = {
    f"12 layers of 8B shapes{more}": (seq, ["model.layers=12"])
    for seq, more in ((8192, ""), (2048, ", seq 2048"))
}
# bench/lora.py measures these.
LORA = {"8B, LoRA": (4096, ["lora.rank=16"])}
# Variant; GPU; ranks; settings; measured ms; measured GiB, or -.
MEASURED = """
12 layers of 8B shapes; h200; 2; tp; 174.8; -
12 layers of 8B shapes, seq 2048; h200; 2; tp; 54.9; -
12 layers of 8B shapes; h200; 2; tpcopies; 166.5; -
12 layers of 8B shapes, seq 2048; h200; 2; tpcopies; 51.7; -
1B; h200; 2; ; 71.0; 14.0
3B; h200; 2; ; 173.5; 31.2
8B, local batch 1; h200; 8; nccl; 769.4; -
8B, local batch 1; h200; 4; ; 740.6; 54.6
8B, local batch 1; h200; 2; ; 760.0; 80.7
8B, local batch 1; h200; 2; nccl; 784.2; -
8B, local batch 2; h200; 2; ; 1475.2; 106.0
8B, local batch 3; h200; 2; ; 2193.7; 131.2
8B, recompute full; h200; 1; ; 932.9; 121.31
8B, LoRA; h200; 2; ; 270.8; 22.2
8B, LoRA; h200; 2; rowwise; 212.3; 19.0
8B, LoRA; h200; 1; ; 257.4; 28.2
8B, LoRA; h200; 1; rowwise; 218.9; 22.6
8B, ZeRO-3; h200; 4; ; 195.7; 35.6
8B, ZeRO-3; h200; 2; ; 209.5; 63.5
8B, ZeRO-2; h200; 2; ; 218.4; 69.3
8B, ZeRO-1; h200; 2; ; 218.1; 69.3
8B, ZeRO-3; h100; 2; copies; 227.1; 63.5
8B, ZeRO-3; h100; 2; nccl; 245.4; 63.2
20 layers of 8B shapes; h100; 2; copies; 504.1; 55.0
20 layers of 8B shapes; h100; 2; nccl; 518.5; 54.7
8 layers of 8B shapes; h200; 1; ; 232.1; 45.87
8 layers, tensorwise; h200; 1; ; 181.8; 44.45
8 layers of 8B shapes; h100; 1; ; 237.9; 45.87
64 layers of dim 1024; h100; 1; graphs; 54.8; -
64 layers of dim 1024; h100; 2; graphs copies; 52.8; -
64 layers of dim 1024; h100; 1; ; 98.1; 19.16
8 layers, tensorwise; h100; 1; ; 192.8; 44.4
8 layers, rowwise; h100; 1; ; 208.1; 44.4
8 layers, blockwise; h100; 1; ; 210.4; 44.4
8B, ZeRO-3; h100; 2; copies tensorwise; 192.9; 60.0
20 layers of 8B shapes; h100; 2; copies tensorwise; 390.4; 52.8
20 layers of 8B shapes; h100; 2; copies rowwise; 421.2; 52.8
20 layers of 8B shapes; h100; 2; copies blockwise; 430.2; 52.8
4 layers of Qwen3-30B-A3B; h100; 1; ; 100.2; 48.9
4 layers of Qwen3-30B-A3B, one representation; h100; 1; ; 108.7; 46.0
4 layers of Qwen3-30B-A3B; h200; 1; ; 86.6; -
6 layers of Qwen3-30B-A3B; h100; 2; batch8 copies; 229.2; 47.5
6 layers of Qwen3-30B-A3B; h100; 2; batch8 copies zero2; 214.8; 48.7
6 layers of Qwen3-30B-A3B; h100; 2; batch8 copies ep; 212.2; 46.2
6 layers of Qwen3-30B-A3B; h100; 2; batch8 copies ep overlap; 203.5; 47.9
6 layers of Qwen3-30B-A3B; h100; 2; batch8 copies ep overlap late; 201.2; 47.9
6 layers of Qwen3-30B-A3B; h100; 2; batch16 copies; 367.7; 53.0
6 layers of Qwen3-30B-A3B; h100; 2; batch32 copies; 851.8; 47.5
6 layers of Qwen3-30B-A3B; h100; 2; batch32 copies ep; 784.3; 46.2
6 layers of Qwen3-30B-A3B; h100; 2; batch32 copies ep overlap late; 727.4; 48.0
8 layers of Qwen3-30B-A3B; h200; 4; batch32 copies ep4 zero2; 456.2; -
8 layers of Qwen3-30B-A3B; h200; 4; batch32 copies ep4 zero2 overlap; 408.2; -
8 layers of Qwen3-30B-A3B; h200; 4; batch32 copies ep4 zero2 overlap late; 398.7; -
8 layers of Qwen3-30B-A3B, 32 experts; h200; 1; batch8 zero2; 378.3; 40.7
8 layers of Qwen3-30B-A3B, 32 experts; h200; 1; batch8 zero2 overlap late; 378.8; 43.2
"""


def planned(args, variant, gpu, ranks, names):
    seq, of_variant = (VARIANTS | SHARED | LORA)[variant]
    options = [f"--ranks={ranks}", f"--gpu={args.gpu or gpu}"]
    chosen = [setting for name in names for setting in SETTINGS[name].split()]
    for setting in (f"training.seq_len={seq}", *of_variant, *chosen):
        options += ["--set", setting]
    return plan(args.program, args.config, *options)


def change(of, to):
    return 100 * (of / to - 1)


def main():
    args = Parser(__doc__).options("program", "config", json="", gpu="").parse_args()
    columns = ("ms: measured", "planned", "%", "GiB: measured", "planned", "%")
    head("", "", *columns, left=(0, 1))
    errors = {"time": [], "memory": []}
    rows = []
    for line in MEASURED.strip().splitlines():
        variant, gpu, ranks, names, ms, gib = line.split("; ")
        found = planned(args, variant, gpu, ranks, names.split())
        got_ms, got_gib = found["step_ms"], found["peak_bytes"] / 2**30
        ms_change = change(got_ms, float(ms))
        by_host = found["bound"] == "host"
        if not by_host:
            errors["time"].append(abs(ms_change))
        of_memory = ["", f"{got_gib:.1f}", ""]
        if gib != "-":
            gib_change = change(got_gib, float(gib))
            errors["memory"].append(abs(gib_change))
            of_memory = [gib, of_memory[1], f"{gib_change:+.1f}"]
        name = ", ".join([variant, *names.split()]) + (" (host)" if by_host else "")
        of_time = (ms, f"{got_ms:.1f}", f"{ms_change:+.1f}")
        row(name, f"{ranks}x {gpu.upper()}", *of_time, *of_memory)
        rows.append({"name": name, "gpu": gpu, "ranks": ranks, "ms": ms} | found)
    for what, each in errors.items():
        median, most = statistics.median(each), max(each)
        print(f"{what}: median {median:.1f} %, most {most:.1f} %, of {len(each)}")
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
