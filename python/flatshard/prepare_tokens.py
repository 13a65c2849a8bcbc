"""Tokenizes for `flatshard data prepare` with the tokenizers package.

The program runs this text with `python -c` and talks to it over standard
input and output:

    prepare_tokens.py MODE TOKENIZER_JSON END_OF_DOCUMENT BEGIN_OF_DOCUMENT TEXT_FIELD

    files   input: files; output: one frame a document
    encode  input: UTF-8 text; output: one frame
    decode  input: token ids as decimal text; output: int64 length, UTF-8 text
    count   input: Parquet files; output: an int64 for each, its documents that are
            not empty; without a tokenizer
    texts   input: Parquet files; output: int64 length and UTF-8 text of each
            document; without a tokenizer

Files are a letter and a path each, ended by a zero byte. The letter: t, the file is
one document; j, each line is a JSON object with a document in TEXT_FIELD; p, the same
for each row of a Parquet file. Of j and p, documents that are empty are left out.

Output begins with one line of JSON: vocab_size and end_of_document, begin_of_document
when one is wanted, and own_begin with own_begin_id, the token that the tokenizer itself
puts before a text; or error. A frame is an int64 count and that many uint32 ids; count -1 is an
error, with an int64 length and a text after it. All numbers are little-endian.
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


def missing(what, package):
    return Failure(
        f"{what} needs the Python package '{package}'; install it with: "
        f"{sys.executable} -m pip install {package}"
    )


def load(mode, path, end_name, begin_name):
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise missing("a tokenizer.json", "tokenizers") from error
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
    if begin_name and begin_name not in vocab:
        raise Failure(
            f"the tokenizer {path} has no token {begin_name}; name one that it has "
            "with --begin-of-document"
        )
    if begin_name:
        header["begin_of_document"] = vocab[begin_name]
    whole = tokenizer.encode("a")
    if whole.special_tokens_mask[:1] == [1]:
        header["own_begin"] = whole.tokens[0]
        header["own_begin_id"] = whole.ids[0]
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


def need_parquet():
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing("a .parquet file", "pyarrow") from error
    return parquet


def check_text(value, where, field):
    if value is not None and not isinstance(value, str):
        raise Failure(
            f"{where}: expected text in the field '{field}', got "
            f"{type(value).__name__}"
        )
    return value or ""


def read_rows(path, field):
    """The texts of a Parquet file's column."""
    name = os.fsdecode(path)
    try:
        file = need_parquet().ParquetFile(name)
        columns = file.schema_arrow.names
        if field not in columns:
            raise Failure(
                f"{name}: expected the text field '{field}', found "
                f"{', '.join(columns)}; name another with --text-field"
            )
        for batch in file.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                yield check_text(value, name, field)
    except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
        raise Failure(f"cannot read {name}: {error}") from error


def read_documents(files, field):
    """The number of bytes and the text of each document."""
    for entry in files:
        kind, path = entry[:1], entry[1:]
        if kind == b"p":
            texts = read_rows(path, field)
            yield from ((len(text), text) for text in texts if text)
            continue
        try:
            with open(path, "rb") as file:
                if kind == b"t":
                    data = file.read()
                    # Bytes that are not UTF-8 become U+FFFD.
                    yield len(data), data.decode("utf-8", errors="replace")
                    continue
                for line in file:
                    if line.strip():
                        where = os.fsdecode(path)
                        text = check_text(json.loads(line)[field], where, field)
                        if text:
                            yield len(line), text
        except OSError as error:
            raise Failure(
                f"cannot read {os.fsdecode(path)}: {error.strerror}"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            # The program has read it before.
            raise Failure(f"{os.fsdecode(path)} changed: {error!r}") from error


def read_batches(files, field):
    texts, nbytes = [], 0
    for size, text in read_documents(files, field):
        texts.append(text)
        nbytes += size
        if nbytes >= BATCH_BYTES or len(texts) >= BATCH_FILES:
            yield texts
            texts, nbytes = [], 0
    if texts:
        yield texts


def run(mode, tokenizer, field, data, out):
    if mode == "files":
        files = data.split(b"\0")[:-1]
        for texts in read_batches(files, field):
            for item in tokenizer.encode_batch(texts, add_special_tokens=False):
                write_ids(out, item.ids)
    elif mode == "count":
        for file in data.split(b"\0")[:-1]:
            count = sum(1 for _ in read_documents([file], field))
            out.write(struct.pack("<q", count))
    elif mode == "texts":
        for _, text in read_documents(data.split(b"\0")[:-1], field):
            write_text(out, text)
    elif mode == "encode":
        text = data.decode("utf-8", errors="replace")
        write_ids(out, tokenizer.encode(text, add_special_tokens=False).ids)
    else:
        ids = [int(word) for word in data.split()]
        write_text(out, tokenizer.decode(ids, skip_special_tokens=True))


def main():
    mode, path, end_name, begin_name, field = sys.argv[1:6]
    out = sys.stdout.buffer
    tokenizer, header = None, {}
    try:
        if mode in ("count", "texts"):
            need_parquet()
        else:
            tokenizer, header = load(mode, path, end_name, begin_name)
    except Failure as failure:
        out.write(json.dumps({"error": str(failure)}).encode() + b"\n")
        return 1
    out.write(json.dumps(header).encode() + b"\n")
    try:
        run(mode, tokenizer, field, sys.stdin.buffer.read(), out)
    except Failure as failure:
        out.write(struct.pack("<q", -1))
        write_text(out, str(failure))
        return 1
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
