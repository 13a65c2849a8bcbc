#!/usr/bin/env python3
"""The commands of docs/guides/lora.md on a tiny model: with examples/lora_8b.toml two ranks
train adapters of a frozen FP8 base on chats. The adapter answers as it was taught in peft,
and so do the merged weights.

Exits with 77 (skipped) without transformers or peft.

usage: finetune_lora.py PROGRAM
"""

import json
import sys
import tempfile
from pathlib import Path

from finetune_guide import ROOT, SKIPPED, write_chats, write_model

sys.path.insert(0, str(ROOT))

from tests.support.program import expect, run  # noqa: E402

SMALL = [
    "training.steps=80",
    "training.seq_len=64",
    "training.global_batch_size=8",
    "training.local_batch_size=2",
    "optimizer.lr=5e-3",
    "lr_scheduler.warmup_steps=5",
    "lora.dropout=0.02",
    "validation.freq=40",
    "validation.sequences=8",
    "checkpoint.interval=80",
    "metrics.log_freq=10",
]


def write_base(folder):
    """A random model whose frozen embedding and head are large enough to answer with."""
    import torch
    from transformers import AutoModelForCausalLM

    write_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)
        model.model.embed_tokens.weight.mul_(20)
    model.save_pretrained(folder)


def answers(tokenizer, model, question):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


def main():
    try:
        import jinja2  # noqa: F401
        import peft
        import transformers
    except ImportError:
        return SKIPPED
    program = sys.argv[1]
    transformers.logging.set_verbosity_error()
    load = transformers.AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, corpus, trained = folder / "base", folder / "chats", folder / "run"
        write_base(base)
        write_chats(folder / "chats.jsonl")
        prepare = ["data", "prepare", "--chat", "--input", folder / "chats.jsonl"]
        run(program, *prepare, "--tokenizer", base, "--output", corpus)
        paths = {
            "run.output_dir": trained,
            "model.init_from": base,
            "data.train": corpus,
        }
        settings = [f"{key}={value}" for key, value in paths.items()] + SMALL
        sets = [word for setting in settings for word in ("--set", setting)]
        train = ["train", ROOT / "examples/lora_8b.toml", "--device", "cpu"]
        said = run(program, *train, "--nproc", 2, *sets)
        expect("frozen; LoRA: " in said, said)
        expect("rowwise" in said, said)
        rows = (trained / "metrics.jsonl").read_text().splitlines()
        losses = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
        expect(losses[0] > 4 and losses[-1] < 0.3, f"losses {losses}")

        measure = ["evaluate", "--data", corpus, "--seq-len", 64, "--json"]
        measure += ["--device", "cpu"]
        found = [
            json.loads(run(program, *measure, "--run", which))["loss"]
            for which in (base, trained)
        ]
        expect(found[1] < found[0] / 2, f"evaluated {found}")
        said = run(
            program,
            *["generate", "--run", trained, "--prompt", "Hello", "--corpus", corpus],
            *["--max-new-tokens", 4, "--device", "cpu"],
        )
        expect("Hello" in said, said)
        merged = folder / "merged"
        run(program, "export", "--run", trained, "--to", merged, "--merge")
        tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
        for model in (
            peft.PeftModel.from_pretrained(load(base), trained),
            load(merged),
        ):
            for question, answer in (("axx", "yes"), ("byyy", "no")):
                text = answers(tokenizer, model, question)
                expect(text == answer + "<|end|>", f"{question}: {text!r}")
    print("passed: chats became an adapter that answers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
