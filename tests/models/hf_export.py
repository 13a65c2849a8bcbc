#!/usr/bin/env python3
"""The files of `flatshard export` are the ones that transformers' users expect.

Exports of runs on bytes, on a dataset of a tokenizer.json, and of runs that started
from a Hugging Face folder with a chat template: AutoTokenizer and AutoModelForCausalLM
load each, and `generate` answers with ids of the vocabulary. Then
examples/python/finetune_hf.py trains an export for one more step and saves it with its
tokenizer. It also trains a GPT-2 because the name of its blocks differs.

Exits with 77 (skipped) without transformers.

usage: hf_export.py PROGRAM
"""

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.program import expect, run  # noqa: E402

TEXT = "the cat sat on the mat, and the h\u00e9ron flew.\n" * 40
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"

CONFIG = """
[run]
output_dir = "{run}"
save_weights = false
[model]
{model}
[data]
train = "{corpus}"
[training]
steps = 2
seq_len = 32
local_batch_size = 2
[precision]
compute = "float32"
[checkpoint]
interval = 2
"""
SHAPE = "dim = 32\nlayers = 2\nheads = 4\nffn_dim = 64\nvocab_size = {}"


def export(program, folder, name, corpus, model):
    """Trains two steps and exports them; the folder and what was printed."""
    config = folder / f"{name}.toml"
    config.write_text(
        CONFIG.format(run=folder / f"{name}-run", model=model, corpus=corpus)
    )
    run(program, "train", config, "--device", "cpu")
    out = folder / f"{name}-export"
    said = run(program, "export", "--run", folder / f"{name}-run", "--to", out)
    return out, said


def prepare(program, folder, name, *more):
    corpus = folder / f"{name}-corpus"
    arguments = ["--input", folder / "text.txt", "--output", corpus]
    run(program, "data", "prepare", *arguments, *more)
    return corpus


def load_and_generate(folder):
    """Every id that goes in or comes out belongs to the vocabulary."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    vocabulary = model.config.vocab_size
    inputs = tokenizer("the cat", return_tensors="pt")
    expect(
        inputs["input_ids"].max() < vocabulary,
        f"{folder.name}: ids {inputs['input_ids']} of a vocabulary of {vocabulary}",
    )
    expect(
        tokenizer.eos_token_id is not None and tokenizer.eos_token_id < vocabulary,
        f"{folder.name}: eos_token_id {tokenizer.eos_token_id}",
    )
    out = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    text = tokenizer.decode(out[0], skip_special_tokens=True)
    expect(text.startswith("the cat"), f"{folder.name}: generated {text!r}")
    # The prompt is only the token at the start of a text.
    expect(model.generate(max_new_tokens=2).shape[0] == 1, f"{folder.name}: no prompt")
    return tokenizer, model


def make_tokenizer(folder):
    """A byte-level BPE of 300 tokens, as tokenizer.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|begin|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def try_bytes(program, folder):
    corpus = prepare(program, folder, "bytes")
    out, _ = export(program, folder, "bytes", corpus, SHAPE.format(257))
    tokenizer, model = load_and_generate(out)
    text = "h\u00e9ron\t\n \x00\x7f"
    ids = tokenizer(text)["input_ids"]
    expect(ids == list(text.encode()), f"bytes: {text!r} became {ids}")
    expect(tokenizer.decode(ids) == text, "bytes: another text came back")
    expect(tokenizer("<|endoftext|>")["input_ids"] == [256], "bytes: no end of text")
    expect(model.config.eos_token_id == 256, "bytes: eos of config.json")
    expect(model.generation_config.eos_token_id == 256, "bytes: eos of generate")
    return out, corpus


def try_tokenizer_json(program, folder):
    tokenizer = make_tokenizer(folder / "bpe")
    corpus = prepare(
        *[program, folder, "bpe", "--tokenizer", folder / "bpe"],
        *["--begin-of-document", "<|begin|>"],
    )
    out, _ = export(program, folder, "bpe", corpus, SHAPE.format(300))
    loaded, model = load_and_generate(out)
    expect(
        loaded(TEXT)["input_ids"] == [1, *tokenizer.encode(TEXT).ids],
        "tokenizer.json: other ids",
    )
    expect(loaded.eos_token == "<|endoftext|>", f"tokenizer.json: {loaded.eos_token}")
    expect(loaded.bos_token == "<|begin|>", f"tokenizer.json: {loaded.bos_token}")
    expect(model.config.bos_token_id == 1, "tokenizer.json: bos of config.json")
    # The program generates as well, with the Python that it gets.
    arguments = ["generate", "--run", out, "--prompt", "the cat", "--device", "cpu"]
    said = run(program, *arguments, "--max-new-tokens", 3)
    expect("the cat" in said, f"generate: {said}")
    failed = subprocess.run(
        [program, *map(str, arguments), "--python", "/none/python"],
        capture_output=True,
        text=True,
        check=False,
    )
    expect(
        failed.returncode == 1
        and "give --python or set FLATSHARD_PYTHON" in failed.stderr,
        f"generate without Python: {failed.stderr}",
    )
    return corpus


def try_init_from(program, folder, corpus, of_bytes):
    """Its files are exported unchanged, unless the dataset has another tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    start = folder / "start"
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            bos_token_id=1,
            eos_token_id=[0, 2],
        )
    )
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(start)
    PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "bpe" / "tokenizer.json"),
        bos_token="<|begin|>",
        eos_token="<|turn|>",
        chat_template=TEMPLATE,
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(start)
    out, said = export(program, folder, "started", corpus, f'init_from = "{start}"')
    tokenizer, model = load_and_generate(out)
    expect(
        "no tokenizer" not in said and "differs from the tokenizer" not in said, said
    )
    chat = [{"role": "user", "content": "hi"}]
    expect(
        tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi\n",
        "init_from: the chat template",
    )
    expect(tokenizer.eos_token == "<|turn|>", "init_from: eos_token")
    expect(model.config.eos_token_id == [0, 2], "init_from: eos of config.json")
    expect(model.generation_config.top_k == 7, "init_from: generation_config.json")
    for name in ("tokenizer.json", "generation_config.json"):
        same = (start / name).read_bytes() == (out / name).read_bytes()
        expect(same, f"init_from: {name} changed")

    out, said = export(program, folder, "other", of_bytes, f'init_from = "{start}"')
    expect("differs from the tokenizer of data.train" in said, said)
    expect(load_and_generate(out)[0].eos_token_id == 256, "other: eos_token_id")


def finetune(model, folder, out):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    arguments = ["--model", model, "--text", folder / "text.txt", "--out", out]
    script = ROOT / "examples" / "python" / "finetune_hf.py"
    sys.argv = [str(script), *map(str, arguments), "--steps", "1", "--seq", "16"]
    runpy.run_path(str(script), run_name="__main__")


def try_finetune(folder, exported):
    import shutil

    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    tuned = folder / "tuned"
    finetune(exported, folder, tuned)
    _, after = load_and_generate(tuned)
    expect(after.generation_config.eos_token_id == 256, "finetune: eos of generate")
    before = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    changed = [not torch.equal(before[k], v) for k, v in after.state_dict().items()]
    expect(all(changed), f"finetune: {changed.count(False)} weights did not change")

    gpt2 = folder / "gpt2"
    ids = {"bos_token_id": 256, "eos_token_id": 256}
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=257, **sizes, **ids)).save_pretrained(gpt2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(exported / name, gpt2 / name)
    finetune(gpt2, folder, folder / "gpt2-tuned")
    load_and_generate(folder / "gpt2-tuned")


def main():
    try:
        import transformers
    except ImportError:
        print("SKIPPED hf_export: this Python has no transformers")
        sys.exit(SKIPPED)
    transformers.logging.set_verbosity_error()
    if len(sys.argv) != 2:
        sys.exit("usage: hf_export.py PROGRAM")
    program = str(Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(TEXT)
        exported, of_bytes = try_bytes(program, folder)
        corpus = try_tokenizer_json(program, folder)
        try_init_from(program, folder, corpus, of_bytes)
        written = json.loads((exported / "config.json").read_text())
        expect(written["bos_token_id"] == 256, "bytes: bos of config.json")
        try_finetune(folder, exported)
    print("exports load, generate and train on")


if __name__ == "__main__":
    main()
