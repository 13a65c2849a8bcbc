"""Tokenizes for `flatshard data prepare` with the tokenizers package.

The program runs this text with `python -c` and talks to it over standard
input and output:

    prepare_tokens.py MODE TOKENIZER_JSON END_OF_DOCUMENT

    files   input: paths, each ended by a zero byte; output: one frame a file
    encode  input: UTF-8 text; output: one frame
    decode  input: token ids as decimal text; output: int64 length, UTF-8 text

Output begins with one line of JSON: vocab_size and end_of_document, or error.
A frame is an int64 count and that many uint32 ids; count -1 is an error, with
an int64 length and a text after it. All numbers are little-endian.
"""

import array
import json
import os
import struct
import sys

# Ends of a document in tokenizers people use, most specific first.
END_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
BATCH_BYTES = 4 << 20
BATCH_FILES = 256


class Failure(Exception):
    """A message for the user."""


def load(mode, path, end_name):
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise Failure(
            "a tokenizer.json needs the Python package 'tokenizers'; install "
            f"it with: {sys.executable} -m pip install tokenizers"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the package raises plain Exception
        raise Failure(f"cannot load the tokenizer {path}: {error}") from error
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    if not vocab:
        raise Failure(f"the tokenizer {path} has an empty vocabulary")
    names = [end_name] if end_name else END_NAMES
    found = [name for name in names if name in vocab]
    if not found and mode == "files":
        raise Failure(
            f"the tokenizer {path} has no token {' or '.join(names)}; name the "
            "token that ends a document with --end-of-document"
        )
    header = {
        "vocab_size": max(vocab.values()) + 1,
        "end_of_document": vocab[found[0]] if found else -1,
    }
    return tokenizer, header


def write_ids(out, ids):
    words = array.array("I", ids)
    if sys.byteorder != "little":
        words.byteswap()
    out.write(struct.pack("<q", len(words)))
    out.write(words.tobytes())


def write_text(out, text):
    data = text.encode("utf-8")
    out.write(struct.pack("<q", len(data)))
    out.write(data)


def read_batches(paths):
    texts, nbytes = [], 0
    for path in paths:
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise Failure(
                f"cannot read {os.fsdecode(path)}: {error.strerror}"
            ) from error
        # Bytes that are not UTF-8 become U+FFFD.
        texts.append(data.decode("utf-8", errors="replace"))
        nbytes += len(data)
        if nbytes >= BATCH_BYTES or len(texts) >= BATCH_FILES:
            yield texts
            texts, nbytes = [], 0
    if texts:
        yield texts


def run(mode, tokenizer, data, out):
    if mode == "files":
        paths = data.split(b"\0")[:-1]
        for texts in read_batches(paths):
            for item in tokenizer.encode_batch(texts, add_special_tokens=False):
                write_ids(out, item.ids)
    elif mode == "encode":
        text = data.decode("utf-8", errors="replace")
        write_ids(out, tokenizer.encode(text, add_special_tokens=False).ids)
    else:
        ids = [int(word) for word in data.split()]
        write_text(out, tokenizer.decode(ids, skip_special_tokens=True))


def main():
    mode, path, end_name = sys.argv[1:4]
    out = sys.stdout.buffer
    try:
        tokenizer, header = load(mode, path, end_name)
    except Failure as failure:
        out.write(json.dumps({"error": str(failure)}).encode() + b"\n")
        return 1
    out.write(json.dumps(header).encode() + b"\n")
    try:
        run(mode, tokenizer, sys.stdin.buffer.read(), out)
    except Failure as failure:
        out.write(struct.pack("<q", -1))
        write_text(out, str(failure))
        return 1
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
