"""Does training with FP8 weights lose anything? 1B shapes on real text, byte by byte.

python3 bench/float8_loss.py --nproc 1

Reads Python's standard library, which every machine with Python has. bf16 runs with
three seeds, and each recipe runs with the first of them: the same first weights and the
same tokens in the same order. A recipe's loss is the mean of the last 100 steps; it has
to be within 0.25 % of bf16's, or within two standard deviations of the bf16 runs where
that is more. Runs that are complete in --out are not run again, so a call may take up
where another one ended. Ends with 1 when a recipe is outside.
"""

import argparse
import json
import statistics
import sys
import sysconfig
from pathlib import Path

from compare import machine, run

LAST = 100  # steps
BOUND = 0.0025  # of bf16's loss


def prepare(args):
    folder = args.out / "data"
    if folder.exists():
        return folder
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "__pycache__"}
    inputs = [str(library / "*.py")]
    for inner in sorted(library.iterdir()):
        if inner.name not in skipped and any(inner.glob("**/*.py")):
            inputs.append(str(inner / "**/*.py"))
    run(
        [args.program, "data", "prepare", "--input", *inputs]
        + ["--output", str(folder), "--tokenizer", "bytes", "--format", "text"],
        args.out / "data.log",
    )
    return folder


def losses(folder):
    """Of every step that its metrics have."""
    file = folder / "metrics.jsonl"
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text().split("\n") if line]
    return [row["loss"] for row in rows if "step_ms" in row]


def train(args, data, seed, recipe):
    """Mean loss of the last steps."""
    folder = args.out / f"{recipe or 'bf16'}-{seed}"
    if len(losses(folder)) < args.steps:
        command = [args.program, "train", args.config, f"--nproc={args.nproc}"]
        for setting in (
            f"run.output_dir={folder}",
            f"run.seed={seed}",
            f"model.preset={args.preset}",
            "model.vocab_size=257",
            f"data.train={data}",
            f"training.seq_len={args.seq}",
            f"training.local_batch_size={args.batch}",
            f"training.global_batch_size={args.batch * args.nproc}",
            f"training.steps={args.steps}",
            f"lr_scheduler.warmup_steps={args.steps // 10}",
            "metrics.log_freq=1",
            *([f"float8.recipe={recipe}"] if recipe else []),
            *(["float8.emulate=true"] if recipe == "mxfp8" else []),
            *args.set,
        ):
            command += ["--set", setting]
        run(command, Path(f"{folder}.log"))
    return statistics.fmean(losses(folder)[-LAST:])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--program", default="build/flatshard")
    parser.add_argument("--config", default="examples/llama3_8b.toml")
    parser.add_argument("--preset", default="llama3_1b")
    parser.add_argument("--nproc", type=int, default=1, help="GPUs [1]")
    parser.add_argument("--steps", type=int, default=600, help="[600]")
    parser.add_argument("--seq", type=int, default=2048, help="tokens [2048]")
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank [2]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--recipes", nargs="*", default=["tensorwise", "rowwise", "blockwise"]
    )
    parser.add_argument("--set", nargs="*", default=[], help="for all configs, last")
    parser.add_argument("--out", type=Path, default=Path("outputs/float8_loss"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = prepare(args)

    print(f"{args.nproc} ranks on {machine()}: {args.preset}, {args.steps} steps")
    base = []
    for seed in args.seeds:
        base.append(train(args, data, seed, None))
        print(f"bf16, seed {seed}: {base[-1]:.5f}", flush=True)
    sigma = statistics.stdev(base) if len(base) > 1 else 0.0
    bound = max(BOUND, 2 * sigma / base[0])
    print(f"sigma {sigma:.5f}, so a difference of {bound:.2%} is within the bound")
    outside = 0
    for recipe in args.recipes:
        loss = train(args, data, args.seeds[0], recipe)
        difference = loss / base[0] - 1
        outside += abs(difference) > bound
        print(f"{recipe}: {loss:.5f}, {difference:+.2%} of bf16", flush=True)
    return min(outside, 1)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(str(error))
