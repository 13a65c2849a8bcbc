"""Tokenizes for `flatshard data prepare` with the tokenizers package.

The program runs this text with `python -c` and talks to it over standard
input and output:

    prepare_tokens.py MODE SETTINGS

    tokens  input: int64 length and UTF-8 text of each document; output: a frame each
    chat    input: int64 length and UTF-8 text of each row's place, then of the row;
            output: a frame each, then a byte for each token: 1 where it is trained
    prompt  input: as chat; output: of each row a frame of the conversation up to where
            the assistant answers, and a frame of the tokens that end its answer
    encode  input: UTF-8 text; output: one frame
    decode  input: lines of token ids as decimal text; output: int64 length and UTF-8
            text of each
    texts   input: paths of Parquet files, each ended by a zero byte; output: int64
            length and UTF-8 text of each row (0 where it is null), and -2 after each
            file; without a tokenizer

SETTINGS is JSON. Its keys are tokenizer (the path of a tokenizer.json), text_field (the
column of Parquet files), parse_special and keep_special. Chats have train_on ("assistant",
"all" or "last") and chat_template_kwargs (JSON text of an object, or ""). The keys end
and begin have the texts of the tokens around a document: "" for the tokenizer's own, and
begin may be "none".

Output begins with one line of JSON: vocab_size, end_of_document, begin_of_document when
a document begins with a token, own_begin (the tokens that the tokenizer itself puts
before a text) and warnings; or error. A frame is an int64 count and that many uint32
ids. Three numbers may stand in place of a count or a length: -1 for a row or file of
another format, -4 for a file that cannot be read, -3 for a warning. Each comes with an
int64 length and a text after it. All numbers are little-endian.
"""

import array
import json
import os
import signal
import struct
import sys

from flatshard.hf_chat import ChatEncoder
from flatshard.hf_encoder import Encoder, Failure, missing

BATCH_BYTES = 4 << 20
BATCH_TEXTS = 256
ERROR, END_OF_FILE, WARNING, UNREADABLE = -1, -2, -3, -4


class Unreadable(Failure):
    """A file that cannot be read."""


def write_ids(out, ids):
    words = array.array("I", ids)
    if sys.byteorder != "little":
        words.byteswap()
    out.write(struct.pack("<q", len(words)))
    out.write(words.tobytes())


def write_text(out, text):
    data = text.encode("utf-8", errors="replace")
    out.write(struct.pack("<q", len(data)))
    out.write(data)


def need_parquet():
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise missing("a .parquet file", "pyarrow") from error
    return parquet


def row_text(value, where, field):
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise Failure(
                f"{where}: expected UTF-8 in the column '{field}': {error}"
            ) from error
    if value is not None and not isinstance(value, str):
        raise Failure(
            f"{where}: expected text in the column '{field}', got a "
            f"{type(value).__name__}; name another with --text-field"
        )
    return value or ""


def read_rows(path, field):
    """Returns the texts of a Parquet file's column, "" where they are null."""
    name = os.fsdecode(path)
    try:
        file = need_parquet().ParquetFile(name)
        columns = file.schema_arrow.names
        if field not in columns:
            raise Failure(
                f"{name}: expected the text field '{field}', found "
                f"{', '.join(columns)}; name another with --text-field"
            )
        row = 0
        for batch in file.iter_batches(columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield row_text(value, f"{name}: row {row}", field)
    except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
        raise Unreadable(f"cannot read {name}: {error}") from error


def read_texts(stream):
    """Returns the documents that the program sends."""
    while header := stream.read(8):
        (length,) = struct.unpack("<q", header)
        yield stream.read(length).decode("utf-8", errors="replace")


def read_batches(stream):
    texts, nbytes = [], 0
    for text in read_texts(stream):
        texts.append(text)
        nbytes += len(text)
        if nbytes >= BATCH_BYTES or len(texts) >= BATCH_TEXTS:
            yield texts
            texts, nbytes = [], 0
    if texts:
        yield texts


def write_tokens(encoder, stream, out):
    warned = False
    for texts in read_batches(stream):
        for text in () if warned else texts:
            name = encoder.spelled(text)
            if name:
                warned = True
                write_warning(
                    out,
                    f"texts spell out control tokens ({name}), which stay text; "
                    "--parse-special takes them as the tokens",
                )
                break
        for ids in encoder.encode_all(texts):
            write_ids(out, ids)
        out.flush()


def write_warning(out, text):
    out.write(struct.pack("<q", WARNING))
    write_text(out, text)


def encoded_rows(chats, encode, stream, out):
    """Encodes each row that the program sends with `encode`."""
    texts = read_texts(stream)
    for where in texts:
        result = encode(where, next(texts))
        while chats.warnings:
            write_warning(out, chats.warnings.pop(0))
        yield result


def write_chats(chats, stream, out):
    for ids, mask in encoded_rows(chats, chats.encode, stream, out):
        write_ids(out, ids)
        out.write(bytes(mask))
    out.flush()


def write_prompts(chats, stream, out):
    for ids, end in encoded_rows(chats, chats.prompt, stream, out):
        write_ids(out, ids)
        write_ids(out, [] if end is None else [end])
    out.flush()


def run(mode, encoder, settings, stream, out):
    if mode == "tokens":
        write_tokens(encoder, stream, out)
    elif mode == "chat":
        write_chats(encoder, stream, out)
    elif mode == "prompt":
        write_prompts(encoder, stream, out)
    elif mode == "texts":
        for path in stream.read().split(b"\0")[:-1]:
            for text in read_rows(path, settings["text_field"]):
                write_text(out, text)
            out.write(struct.pack("<q", END_OF_FILE))
    elif mode == "encode":
        text = stream.read().decode("utf-8", errors="replace")
        name = encoder.spelled(text)
        if name:
            write_warning(
                out,
                f"the text spells out the control token {name}, which stays text; "
                "--parse-special takes it as the token",
            )
        write_ids(out, encoder.encode(text))
    else:
        for line in stream.read().splitlines():
            ids = [int(word) for word in line.split()]
            write_text(out, encoder.decode(ids, settings["keep_special"]))


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    out = sys.stdout.buffer
    encoder, header = None, {}
    try:
        if mode == "texts":
            need_parquet()
        else:
            encoder = Encoder(settings)
            header = {
                "vocab_size": max(encoder.vocab.values()) + 1,
                "end_of_document": encoder.end_of_document(
                    settings["end"], mode in ("tokens", "chat")
                ),
                "own_begin": encoder.own_begin,
                "warnings": encoder.warnings if mode in ("tokens", "chat") else [],
            }
            if mode == "tokens":
                begin = encoder.begin_of_document(settings["begin"])
                if begin is not None:
                    header["begin_of_document"] = begin
            if mode in ("chat", "prompt"):
                encoder = ChatEncoder(
                    settings["tokenizer"],
                    settings["train_on"],
                    settings["chat_template_kwargs"],
                )
    except Failure as failure:
        out.write(json.dumps({"error": str(failure)}).encode() + b"\n")
        return 1
    out.write(json.dumps(header).encode() + b"\n")
    out.flush()
    try:
        run(mode, encoder, settings, sys.stdin.buffer, out)
        out.flush()
    except Failure as failure:
        is_unreadable = isinstance(failure, Unreadable)
        out.write(struct.pack("<q", UNREADABLE if is_unreadable else ERROR))
        write_text(out, str(failure))
        return 1
    except BrokenPipeError:  # the program has ended
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
