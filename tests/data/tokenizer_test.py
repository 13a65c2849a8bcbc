"""Data preparation reads more than a tokenizer.json. The result is compared with
AutoTokenizer."""

import functools
import json

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers import normalizers, processors, trainers
from transformers import AutoTokenizer

from flatshard._data.failures import Failure
from flatshard._data.hf_encoder import Encoder

TEXTS = [
    "the cat sat on the mat " * 40,
    "The CAT sat",
    "a</s>b <|x|> <|y|> [SEP] <unk>",
    "  é ",
]
WORDS = ["the cat sat on the mat"] * 9
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
FLAGS = dict(lstrip=False, rstrip=False, normalized=False, single_word=False)


def bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=270, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


def with_call_state():
    tokenizer = bpe()
    tokenizer.enable_truncation(16, stride=4)
    tokenizer.enable_padding(length=64, pad_to_multiple_of=8, pad_token="</s>")
    return tokenizer


def with_prefix_space():
    tokenizer = bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_template():
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        WORDS, trainers.WordLevelTrainer(special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def bert():
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        [*WORDS, "THE"] * 9, trainers.WordPieceTrainer(special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def llama():
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"\u2581thecasonm", "he", "at", "\u2581the", "\u2581mat"]
    merges = [("h", "e"), ("a", "t"), ("\u2581t", "he"), ("\u2581m", "at")]
    pieces += ["\u2581t", "\u2581m"]
    merges[2:2] = [("\u2581", "t"), ("\u2581", "m")]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def folder(path, tokenizer, config, files=()):
    tokenizer.save(str(path / "tokenizer.json"))
    for name, value in [("tokenizer_config.json", config), *files]:
        (path / name).write_text(json.dumps(value))
    return str(path / "tokenizer.json")


ADDED = {
    "270": {"content": "<|x|>", "special": True, **FLAGS},
    "271": {"content": "<|y|>", "special": False, **FLAGS},
}


# transformers 5 leaves these to tokenizer.json.
of_transformers_4 = functools.partial(
    pytest.param,
    marks=pytest.mark.skipif(
        not transformers.__version__.startswith("4."), reason="needs transformers 4"
    ),
)


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize(
    "make, config, files",
    [
        (with_call_state, {**FAST, "eos_token": "</s>"}, []),
        (bpe, {**FAST, "eos_token": "<|x|>", "added_tokens_decoder": ADDED}, []),
        (bpe, FAST, [("special_tokens_map.json", {"eos_token": ADDED["270"]})]),
        (bpe, FAST, [("added_tokens.json", {"<|y|>": 270, "<|x|>": 271})]),
        (bpe, {**FAST, "additional_special_tokens": ["<|y|>", "<|x|>"]}, []),
        (bpe, {**FAST, "extra_special_tokens": {"image_token": "<|y|>"}}, []),
        of_transformers_4(with_prefix_space, {**FAST, "eos_token": "</s>"}, []),
        (with_prefix_space, {**FAST, "add_prefix_space": True}, []),
        of_transformers_4(bpe, {**FAST, "add_prefix_space": True}, []),
        (with_template, {**FAST, "unk_token": "[UNK]"}, []),
        (llama, {}, [("config.json", {"model_type": "llama"})]),
        (bert, {"tokenizer_class": "BertTokenizer"}, []),
        (bert, {"tokenizer_class": "BertTokenizer", "do_lower_case": False}, []),
        (bpe, {"tokenizer_class": "GPT2Tokenizer"}, []),
        (llama, {"tokenizer_class": "LlamaTokenizer"}, []),
        of_transformers_4(
            llama, {"tokenizer_class": "LlamaTokenizer", "add_bos_token": False}, []
        ),
        of_transformers_4(
            bpe, {"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, []
        ),
    ],
)
def test_tokens_are_those_of_auto_tokenizer(
    make, config, files, parse_special, tmp_path
):
    path = folder(tmp_path, make(), config, files)
    encoder = Encoder(path, parse_special)
    auto = AutoTokenizer.from_pretrained(tmp_path)

    begin, end = encoder.own_begin, encoder.own_end
    for text, ids in zip(TEXTS, encoder.encode_all(TEXTS), strict=True):
        expected = auto(text, split_special_tokens=not parse_special).input_ids
        assert begin + ids + end == expected, text
    if auto.eos_token:
        assert encoder.end_of_document("", True) == auto.eos_token_id


def test_what_the_tokenizer_puts_around_a_text_begins_and_ends_documents(tmp_path):
    encoder = Encoder(folder(tmp_path, with_template(), FAST))
    assert encoder.begin_of_document("") == 1
    assert encoder.begin_of_document("none") is None
    assert encoder.begin_of_document("cat") == encoder.vocab["cat"]
    assert encoder.end_of_document("", True) == 2
    with pytest.raises(Failure, match="has no token <none>"):
        encoder.begin_of_document("<none>")
    with pytest.raises(Failure, match="--end-of-document"):
        encoder.end_of_document("<none>", True)
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    encoder = Encoder(folder(tmp_path, with_template(), FAST))
    assert encoder.end_of_document("", True) == 3


def test_more_than_one_token_before_a_text_is_an_error(tmp_path):
    tokenizer = with_template()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] [SEP] $A", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    encoder = Encoder(folder(tmp_path, tokenizer, FAST))
    with pytest.raises(Failure, match=r"starts a text with the tokens \[CLS\] \[SEP\]"):
        encoder.begin_of_document("")


@pytest.mark.parametrize("kind", ["unigram", "wordlevel", "bpe"])
def test_control_tokens_that_a_vocabulary_has_as_pieces_stay_text(kind, tmp_path):
    pieces = ["<unk>", "</s>", *"</s>ab "]
    pieces = list(dict.fromkeys(pieces))
    if kind == "unigram":
        model = models.Unigram([(piece, -1.0) for piece in pieces], 0, False)
    elif kind == "wordlevel":
        vocab = {piece: id for id, piece in enumerate(pieces)}
        model = models.WordLevel(vocab, unk_token="<unk>")
    else:
        pieces += ["</", "s>"]
        vocab = {piece: id for id, piece in enumerate(pieces)}
        merges = [("<", "/"), ("s", ">"), ("</", "s>")]
        model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["</s>", "<unk>"])
    tokenizer.add_tokens([AddedToken("<|y|>", special=False)])
    path = folder(tmp_path, tokenizer, {**FAST, "eos_token": "</s>"})

    ids = Encoder(path).encode("a</s>b<|y|>")
    assert tokenizer.token_to_id("</s>") not in ids
    assert ids[-1] == tokenizer.token_to_id("<|y|>")
    if kind != "wordlevel":
        assert "".join(tokenizer.id_to_token(id) for id in ids) == "a</s>b<|y|>"
    parsed = Encoder(path, parse_special=True).encode("a</s>b")
    assert tokenizer.token_to_id("</s>") in parsed


def test_dropout_and_ids_that_differ_are_warned_of(tmp_path):
    tokenizer = bpe()
    tokenizer.model.dropout = 0.5
    added = {"400": {"content": "<|x|>", "special": True, **FLAGS}}
    config = {**FAST, "eos_token": "</s>", "added_tokens_decoder": added}
    encoder = Encoder(folder(tmp_path, tokenizer, config))
    assert encoder.encode(TEXTS[0]) == bpe().encode(TEXTS[0]).ids
    dropout, ids = encoder.warnings
    assert "a BPE dropout of 0.5" in dropout
    assert "expected the id 400 for the token <|x|>, got 270" in ids


def test_files_that_are_no_json_are_named(tmp_path):
    path = folder(tmp_path, bpe(), FAST)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(Failure, match="cannot read .*tokenizer_config.json"):
        Encoder(path)
    (tmp_path / "pointer.json").write_text("version https://git-lfs.github.com/spec/")
    with pytest.raises(Failure, match="pointer.json: it is a Git LFS pointer"):
        Encoder(str(tmp_path / "pointer.json"))
    # Configs in the same folder are read only for a file named tokenizer.json.
    bpe().save(str(tmp_path / "mine.json"))
    Encoder(str(tmp_path / "mine.json"))
