"""Does training with FP8 weights lose anything? 1B shapes on real text, byte by byte.

python3 bench/float8_loss.py --nproc 1

Reads Python's standard library, which every machine with Python has. bf16 trains with
three seeds, and each recipe with the first of them: the same initial weights and the
same tokens in the same order. A recipe's loss is the mean of the last 100 steps. It has
to be within 0.25 % of bf16's, or within two standard deviations of the bf16 runs where
that is more. Runs that are complete in --out are kept, so a call may resume where another
one ended. The exit status is 1 when a recipe is outside.
"""

import statistics
import sys
import sysconfig
from pathlib import Path

from harness.command_line import Parser
from harness.programs import losses, machine, run, train

LAST = 100  # steps
BOUND = 0.0025  # of bf16's loss


def prepare(args):
    folder = args.out / "data"
    if folder.exists():
        return folder
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "__pycache__"}
    inputs = [library / "*.py"]
    for inner in sorted(library.iterdir()):
        if inner.name not in skipped and any(inner.glob("**/*.py")):
            inputs.append(inner / "**/*.py")
    command = [args.program, "data", "prepare", "--input", *inputs, "--output", folder]
    command += ["--tokenizer", "bytes", "--format", "text"]
    run(command, args.out / "data.log")
    return folder


def loss_of(args, data, seed, recipe):
    """Returns the mean loss of the last steps."""
    folder = args.out / f"{recipe or 'bf16'}-{seed}"
    if len(losses(folder)) < args.steps:
        settings = [
            f"run.seed={seed}",
            f"model.preset={args.preset}",
            "model.vocab_size=257",
            f"data.train={data}",
            f"training.seq_len={args.seq}",
            f"training.local_batch_size={args.batch}",
            f"training.global_batch_size={args.batch * args.nproc}",
            f"training.steps={args.steps}",
            f"lr_scheduler.warmup_steps={args.steps // 10}",
            *([f"float8.recipe={recipe}"] if recipe else []),
            *(["float8.emulate=true"] if recipe == "mxfp8" else []),
            *args.set,
        ]
        train(args.program, args.config, folder, settings, f"--nproc={args.nproc}")
    return statistics.fmean(losses(folder)[-LAST:])


def main():
    parser = Parser(__doc__).options("program", "config", "set", "nproc", "seq")
    parser.options(preset="llama3_1b", steps=600, seeds=[1, 2, 3])
    parser.options(out=Path("outputs/float8_loss"))
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    recipes = ["tensorwise", "rowwise", "blockwise"]
    parser.add_argument("--recipes", nargs="*", default=recipes, help="of [float8]")
    args = parser.parse_args()
    data = prepare(args)
    print(f"{args.nproc} ranks on {machine()}: {args.preset}, {args.steps} steps")
    base = []
    for seed in args.seeds:
        base.append(loss_of(args, data, seed, None))
        print(f"bf16, seed {seed}: {base[-1]:.5f}", flush=True)
    sigma = statistics.stdev(base) if len(base) > 1 else 0.0
    bound = max(BOUND, 2 * sigma / base[0])
    print(f"sigma {sigma:.5f}, so a difference of {bound:.2%} is within the bound")
    outside = 0
    for recipe in args.recipes:
        loss = loss_of(args, data, args.seeds[0], recipe)
        difference = loss / base[0] - 1
        outside += abs(difference) > bound
        print(f"{recipe}: {loss:.5f}, {difference:+.2%} of bf16", flush=True)
    return min(outside, 1)


if __name__ == "__main__":
    sys.exit(main())
