"""The table of `bench/compare.sh`: runs FSDP2 and Flatshard, one after the other."""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent


def run(command, log):
    with log.open("w") as file:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=file, text=True, check=False
        )
        file.write(done.stdout)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}; see {log}")
    return done.stdout


def fsdp2_row(args, seq, options):
    """What bench/fsdp2_llama.py prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command.append(f"--nproc-per-node={args.nproc}")
    command += [str(BENCH / "fsdp2_llama.py"), f"--seq={seq}"]
    command += [f"--warmup={args.warmup}", f"--steps={args.steps}", *options]
    name = "-".join(["fsdp2", str(seq), *(o.strip("-") for o in options)])
    out = run(command, args.out / f"{name}.log")
    return next(json.loads(line) for line in out.split("\n") if line.startswith("{"))


def fsdp2(args, seq, options):
    row = fsdp2_row(args, seq, options)
    host = sum(row["host_ms_forward_backward_step"])
    return row["ms"], row["ms_range"], host, row["peak_GiB"]


def flatshard(args, seq, folder):
    command = [args.program, "train", args.config, f"--nproc={args.nproc}"]
    for setting in (
        f"run.output_dir={folder}",
        f"training.seq_len={seq}",
        f"training.steps={args.warmup + args.steps}",
        f"lr_scheduler.warmup_steps={args.warmup}",
        "metrics.log_freq=1",
        *args.set,
    ):
        command += ["--set", setting]
    run(command, Path(f"{folder}.log"))
    lines = (folder / "metrics.jsonl").read_text().split("\n")
    rows = [json.loads(line) for line in lines if '"step_ms"' in line]
    rows = [row for row in rows if row["step"] > args.warmup]
    ms = [row["step_ms"] for row in rows]
    host = statistics.median(row["host_ms"] for row in rows)
    peak = max(row["memory_peak_bytes"] for row in rows) / 2**30
    return statistics.median(ms), [min(ms), max(ms)], host, peak


def machine():
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    names = done.stdout.split("\n")[:-1]
    return f"{len(names)}x {names[0]}" if names else "no GPU"


def main():
    parser = argparse.ArgumentParser(
        prog="bench/compare.sh",
        description="Trains Llama-3-8B with FSDP2 + torch.compile and with "
        "Flatshard on this machine, in one call, and prints a table.",
    )
    parser.add_argument("--program", default="build/flatshard")
    parser.add_argument("--config", default="examples/llama3_8b.toml")
    parser.add_argument("--nproc", type=int, default=8, help="GPUs [8]")
    parser.add_argument("--seq", type=int, nargs="+", default=[8192, 2048])
    parser.add_argument("--warmup", type=int, default=4, help="steps [4]")
    parser.add_argument("--steps", type=int, default=10, help="measured [10]")
    parser.add_argument("--set", nargs="*", default=[], help="for Flatshard's config")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        help="options of bench/fsdp2_llama.py, e.g. --peer=--gqa; once for each "
        "setting to try, the fastest counts [its defaults]",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    results = {"machine": machine(), "nproc": args.nproc, "rows": []}
    head = "| | ms per step (range) | of FSDP2 | host ms | peak GiB | of FSDP2 |"
    print(
        f"{args.nproc} ranks on {results['machine']}\n\n{head}\n|---|---:|---:|---:|---:|---:|"
    )
    for seq in args.seq:
        settings = [peer.split() for peer in args.peer] or [[]]
        tried = [(fsdp2(args, seq, options), options) for options in settings]
        best = min(tried)
        for peer, options in tried:
            label = " ".join(["FSDP2", *options])
            report(results, f"{label}, seq {seq}", peer, None)
        ours = flatshard(args, seq, args.out / f"flatshard-{seq}")
        report(results, f"Flatshard, seq {seq}", ours, best[0])
    (args.out / "compare.json").write_text(json.dumps(results, indent=1) + "\n")


def report(results, name, row, peer):
    ms, (low, high), host, peak = row
    result = {"name": name, "ms": ms, "range": [low, high], "host_ms": host}
    result["peak_GiB"] = peak
    ratios = ["", ""]
    if peer is not None:
        result["of_fsdp2"] = {"ms": ms / peer[0], "peak": peak / peer[3]}
        ratios = [f"{value:.3f}" for value in result["of_fsdp2"].values()]
    results["rows"].append(result)
    print(
        f"| {name} | {ms:.1f} ({low:.1f} to {high:.1f}) | {ratios[0]} | "
        f"{host:.0f} | {peak:.1f} | {ratios[1]} |",
        flush=True,
    )


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.exit(str(error))
