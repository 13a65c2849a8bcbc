"""The tokens of the parts of a text are the tokens of the text."""

import random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

from flatshard._data import parts

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = [*"A7_'.\u0301 \n\t\r", "the", " cat", "  ", "12", ";\n", "é", "中文", "。\n"]
PIECES += ["\r\n", "'s", "\n\n", "\u00a0", "<|x|>", "mat\nsat", "on the"]


def split(pattern, behavior="isolated"):
    return pre.Split(Regex(pattern), behavior)


def bytes_of(first):
    last = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([first, last])


GPT2 = pre.ByteLevel(add_prefix_space=False)
NFC = normalizers.NFC()
# Pre-tokenizer, normalizer, added token, and whether texts are cut.
CASES = {
    "gpt2": (GPT2, None, None, True),
    "llama3": (bytes_of(split(LLAMA)), None, "<|x|>", True),
    "qwen2": (bytes_of(split(LLAMA.replace("{1,3}", ""))), NFC, "<|x|>", True),
    "digits": (pre.Sequence([pre.Digits(), GPT2]), NFC, None, True),
    "removed": (split(r"\s", "removed"), None, None, True),
    "prefix space": (pre.ByteLevel(), None, None, False),
    "sentencepiece": (pre.Metaspace(), None, None, False),
    "other normalizer": (GPT2, normalizers.Prepend("x"), None, False),
    "looks back": (split(r"(?<=t)\n|\w+|\W"), None, None, False),
    "anchors": (split(r"^\w+|\w+|\W"), None, None, False),
    "one word": (split(r"[\s\S]+"), None, None, False),
    "no words": (None, None, None, False),
    "token of lines": (GPT2, None, "mat\nsat", False),
    "token with spaces": (GPT2, None, AddedToken("cat", lstrip=True), False),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_of_parts(monkeypatch, case):
    monkeypatch.setattr(parts, "PART", 300)
    words, normalizer, added, is_cut = CASES[case]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = GPT2
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=GPT2.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["".join(PIECES), "the cat sat on"] * 9, trainer)
    tokenizer.normalizer = normalizer
    if words:
        tokenizer.pre_tokenizer = words
    else:
        tokenizer = Tokenizer(tokenizer.model)
    if added:
        tokenizer.add_tokens([added])
    cut = parts.cutter(tokenizer)
    choose = random.Random(7).choices
    for _ in range(20):
        text = "".join(choose(PIECES, k=700))
        found = list(cut(text))
        assert "".join(part for part, _ in found) == text
        assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
        assert len(found) > 3 if is_cut else len(found) == 1
        ids = [tokenizer.encode(part).ids for part, _ in found]
        assert sum(ids, []) == tokenizer.encode(text).ids
    assert len(list(cut("x" * 1000))) == 1  # which has no place for a cut
