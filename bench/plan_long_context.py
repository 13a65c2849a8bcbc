"""Prints by `flatshard plan` which options a long sequence needs on some numbers of GPUs.

python3 bench/plan_long_context.py build/flatshard

A cell has the fastest of the configurations that fit: its options, its tokens per second
and GPU, and in brackets GiB per GPU. A number after a plus is GiB of host memory per GPU.
All have ZeRO-3, one sequence per data-parallel rank, full recompute, and logits in chunks.
They differ in the degrees of context and tensor parallelism (CP, TP). Each has the first
of these options that fits, with the options before it:

save     results of attention are stored
offload  activations are in host memory
mlp      feed-forward parts run in chunks
states   optimizer states are in host memory
no save  attention is recomputed

Weights and states are float32. Where nothing fits, weights are bfloat16 with stochastic
rounding, and states int8 ("int8").
"""

import itertools
import json
import subprocess

from harness.command_line import Parser
from harness.tables import head, row

LENGTHS = [32, 64, 128, 256, 512, 1024]  # of 1024 tokens
MODELS = {"8B": "llama3_8b", "70B": "llama3_70b"}
GPUS = [1, 8, 32]
CONTEXT_DEGREES = [1, 2, 4, 8, 16, 32]  # on any number of hosts
TENSOR_DEGREES = [1, 2, 4, 8]  # inside a host
ALL = [
    "activation_checkpoint.mode=full",
    "activation_checkpoint.loss_chunk_tokens=8192",
    "training.local_batch_size=1",
]
INT8 = [
    "precision.main_params=bfloat16",
    "optimizer.stochastic_rounding=true",
    "optimizer.state_dtype=int8",
]
SAVE = 'activation_checkpoint.save=["attention"]'
OFFLOAD = "activation_checkpoint.offload=true"
CHUNKS = "activation_checkpoint.mlp_chunk_tokens=16384"
STATES = "optimizer.offload_states=true"
LADDER = {
    "save": [SAVE],
    "offload": [SAVE, OFFLOAD],
    "mlp": [SAVE, OFFLOAD, CHUNKS],
    "states": [SAVE, OFFLOAD, CHUNKS, STATES],
    "no save": [OFFLOAD, CHUNKS, STATES],
}


def plan(args, preset, gpus, settings):
    """Returns what `flatshard plan` predicts; None: the options do not go together."""
    command = [args.program, "plan", preset, "--json", f"--gpu={args.gpu}"]
    command += [f"--ranks={gpus}"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        if args.show_errors:
            print(done.stderr.strip(), flush=True)
        return None
    return json.loads(done.stdout)


def host_gib(found):
    return (found["host_state_bytes"] + found["host_activation_bytes"]) / 2**30


def fitting(args, preset, gpus, tokens, states):
    """Yields (tokens per second, words, plan) of the configurations that fit."""
    fixed = [f"training.seq_len={tokens}", f"model.max_seq_len={tokens}", *ALL, *states]

    def fitting_plan(settings):
        found = plan(args, preset, gpus, [*fixed, *settings])
        fits = found and found["fits"] and host_gib(found) <= args.host
        return found if fits else None

    for context, tensor in itertools.product(CONTEXT_DEGREES, TENSOR_DEGREES):
        if context * tensor > gpus:
            continue
        degrees = [f"parallelism.tensor_parallel_degree={tensor}"]
        words = [f"TP{tensor}"] * (tensor > 1)
        if context > 1:
            degrees += [f"parallelism.context_parallel_degree={context}"]
            words = [f"CP{context}", *words]
        if not fitting_plan([*degrees, *LADDER["no save"]]):
            continue  # the others need more memory
        for name, settings in LADDER.items():
            if found := fitting_plan([*degrees, *settings]):
                yield found["tokens_per_second_per_gpu"], [*words, name], found
                break


def cell(args, preset, gpus, tokens):
    for name, states in (("", []), ("int8", INT8)):
        found = list(fitting(args, preset, gpus, tokens, states))
        if found:
            rate, words, best = max(found, key=lambda each: each[0])
            options = " ".join(word for word in [name, *words] if word)
            memory = f"{best['peak_bytes'] / 2**30:.0f}"
            host = f" + {host_gib(best):.0f}" if host_gib(best) else ""
            return f"{options}: {rate:,.0f} ({memory}{host})"
    return "-"


def main():
    parser = Parser(__doc__)
    parser.add_argument("program")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument(
        "--host", type=float, default=256, help="GiB of host memory per GPU [256]"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--show-errors", action="store_true")
    args = parser.parse_args()
    head(
        "model", "tokens", *(f"{n} GPU{'s' * (n > 1)}" for n in GPUS), left=(0, 2, 3, 4)
    )
    for model in args.models:
        for length in args.lengths:
            cells = [cell(args, MODELS[model], n, 1024 * length) for n in GPUS]
            row(model, f"{length}k", *cells)


if __name__ == "__main__":
    main()
