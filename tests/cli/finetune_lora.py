#!/usr/bin/env python3
"""The commands of docs/guides/lora.md on a tiny model: with examples/lora_8b.toml two ranks
train adapters of a frozen FP8 base on chats. The adapter answers as it was taught in peft,
and so do the merged weights.

Exits with 77 (skipped) without transformers or peft.

usage: finetune_lora.py PROGRAM
"""

import re
import sys
import tempfile
from pathlib import Path

from finetune_guide import ROOT, SKIPPED, write_chats, write_model

sys.path.insert(0, str(ROOT))

from tests.support.guide import Guide  # noqa: E402
from tests.support.program import expect  # noqa: E402

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


def expect_config_of_example():
    """The page shows lines of the file that its commands use."""
    page = (ROOT / "docs/guides/lora.md").read_text()
    example = (ROOT / "examples/lora_8b.toml").read_text()
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.M | re.S)
    expect(shown in example, f"examples/lora_8b.toml does not have\n{shown}")


def main():
    try:
        import jinja2  # noqa: F401
        import peft
        import transformers
    except ImportError:
        return SKIPPED
    transformers.logging.set_verbosity_error()
    load = transformers.AutoModelForCausalLM.from_pretrained
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base, trained = folder / "models/base", folder / "outputs/lora_8b"
        write_base(base)
        write_chats(folder / "chats.jsonl")
        guide = Guide("lora.md", sys.argv[1], folder, SMALL)
        expect_config_of_example()
        guide.run("data prepare --chat")
        said = guide.run("train examples/lora_8b.toml")
        expect("frozen; LoRA: " in said, said)
        expect("rowwise" in said, said)
        losses = [
            row["loss"]
            for row in guide.rows("outputs/lora_8b/metrics.jsonl")
            if "loss" in row
        ]
        expect(losses[0] > 4 and losses[-1] < 0.3, f"losses {losses}")
        before, after = (
            guide.evaluation("evaluate --hf"),
            guide.evaluation("evaluate --run"),
        )
        expect(after["loss"] < before["loss"] / 2, f"from {before} to {after}")
        # Before and after are measured on the same samples.
        for found in (before, after):
            del found["loss"]
        expect(before == after, f"{before} is not {after}")
        said = guide.run("generate --run")
        expect("Hello" in said, said)
        guide.run("export --run")
        guide.end()
        merged = folder / "outputs/merged"
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
