"""The run that the fault tests disturb: a tiny Llama on text that is made here."""

import subprocess

CONFIG = """
[run]
output_dir = "{output}"
seed = 3
[model]
dim = 32
layers = 2
heads = 4
kv_heads = 2
ffn_dim = 64
vocab_size = 257
[data]
train = "{corpus}"
[training]
steps = {steps}
seq_len = 32
local_batch_size = 1
global_batch_size = {batch}
[optimizer]
lr = 1e-3
[lr_scheduler]
warmup_steps = {warmup}
[precision]
compute = "float32"
[checkpoint]
interval = {interval}
keep_latest_k = {keep}
[metrics]
log_freq = 1
[comm]
timeout_s = {timeout}
"""


class Failure(Exception):
    """An error that a test found."""


def prepare_corpus(program, folder):
    """Writes a text below `folder` and returns the dataset made of it."""
    texts = folder / "texts"
    texts.mkdir()
    lines = (f"line {i % 10} of a text, {i * i % 101}\n" for i in range(4000))
    (texts / "a.txt").write_text("".join(lines))
    corpus = folder / "corpus"
    subprocess.run(
        [program, "data", "prepare", "--input", texts, "--output", corpus],
        check=True,
        capture_output=True,
    )
    return corpus
