"""Calls and host time that accelerate and transformers' Trainer add to a training step.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/libraries_host.py own --bf16

Put `python3 -m flatshard.as_fsdp2` before torchrun for Flatshard. Other cases are
`accelerate` and `trainer`.

A tiny Qwen3 on CPUs, with a gradient norm in each step. `own` is a loop without a
library. Times are of the CPU that the main thread of rank 0 uses, so they exclude waits
for other ranks. Prints the median of a step. Profiled steps (cProfile) give its calls,
and the calls and microseconds of parts of the libraries, including what they call.
"""

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from harness.command_line import Parser
from libraries_train import qwen3_06b, ranks_as_gpus, tokens, usual_arguments

# part: (end of the file's path, function)
PARTS = {
    "next batch": ("accelerate/data_loader.py", "__iter__"),
    "count of a batch's tokens": ("trainer.py", "_get_num_items_in_batch"),
    "context of accumulation": ("accelerate/accelerator.py", "accumulate"),
    "casts: autocast": ("amp/autocast_mode.py", "decorate_autocast"),
    "casts: output to float32": ("accelerate/utils/operations.py", "convert_to_fp32"),
    "gradient norm and clipping": ("utils/clip_grad.py", "clip_grad_norm_"),
    "gradient norm, by accelerate": ("accelerate/accelerator.py", "clip_grad_norm_"),
    "optimizer": ("optim/adam.py", "step"),
    "optimizer, by accelerate": ("accelerate/optimizer.py", "step"),
    "scheduler": ("accelerate/scheduler.py", "step"),
    "gather_for_metrics": ("accelerate/accelerator.py", "gather_for_metrics"),
    "callbacks": ("trainer_callback.py", "call_event"),
    "logs": ("trainer.py", "_maybe_log_save_evaluate"),
}


class Watch:
    """Times some steps, then profiles as many."""

    def __init__(self, args):
        self.args, self.profile = args, cProfile.Profile(time.thread_time)
        self.ends = []

    def step_ended(self):
        self.ends.append(time.thread_time())
        first = self.args.warmup + self.args.steps
        if len(self.ends) == first:
            self.profile.enable()
        elif len(self.ends) == first + self.args.steps:
            self.profile.disable()

    def report(self):
        if dist.get_rank() != 0:
            return
        steps = self.args.steps
        ends = self.ends[self.args.warmup - 1 : self.args.warmup + steps]
        times = [after - before for before, after in zip(ends, ends[1:])]
        stats = pstats.Stats(self.profile).stats
        calls = sum(row[1] for row in stats.values()) / steps
        print(f"{1e3 * statistics.median(times):.2f} ms a step, {calls:.0f} calls")
        for part, (path, function) in PARTS.items():
            found = [
                (row[1], row[3])
                for (file, _, name), row in stats.items()
                if file.endswith(path) and name == function
            ]
            if found:
                count, seconds = map(sum, zip(*found))
                print(f"{part:30} {count / steps:6.1f} {1e6 * seconds / steps:8.0f} us")


def rows_of(args, vocab):
    args = argparse.Namespace(**{**vars(args), "steps": 2 * args.steps})
    return torch.tensor(tokens(args, vocab))


def train_own(args, watch):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    model = qwen3_06b(tiny=True)
    dtype = torch.bfloat16 if args.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for ids in rows_of(args, model.config.vocab_size)[: args.warmup + 2 * args.steps]:
        model(input_ids=ids[None], labels=ids[None]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch.step_ended()


def train_accelerate(args, watch):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    precision = "bf16" if args.bf16 else "no"
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin)
    model = qwen3_06b(tiny=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    rows = rows_of(args, model.config.vocab_size)
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared
    for _, ids in zip(range(args.warmup + 2 * args.steps), loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach())
        watch.step_ended()


def train_trainer(args, watch):
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watched(TrainerCallback):
        def on_step_end(self, arguments, state, control, **more):
            watch.step_ended()

    model = qwen3_06b(tiny=True)
    rows = rows_of(args, model.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        settings = usual_arguments(
            args,
            folder,
            bf16=args.bf16,
            max_steps=args.warmup + 2 * args.steps,
        )
        Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[Watched()],
        ).train()


CASES = {"own": train_own, "accelerate": train_accelerate, "trainer": train_trainer}


def main():
    parser = Parser(__doc__).options("seq", bf16=False, warmup=5, steps=20)
    parser.add_argument("case", choices=CASES)
    args = parser.parse_args()
    args.seq, args.tiny = min(args.seq, 64), True
    # Libraries would import this folder's kernels.py instead of the package.
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    torch.set_num_threads(1)
    ranks_as_gpus()
    watch = Watch(args)
    CASES[args.case](args, watch)
    watch.report()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
