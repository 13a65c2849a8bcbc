"""Answers the program `flatshard` about a tokenizer, over standard input and output:

    client.py MODE SETTINGS

    prompt  input: int64 length and UTF-8 text of each row's place, then of the row;
            output: of each row a frame of the conversation up to where the assistant
            answers, and a frame of the tokens that end its answer
    encode  input: UTF-8 text; output: one frame
    decode  input: lines of token ids as decimal text; output: int64 length and UTF-8
            text of each

SETTINGS is JSON. Its keys are tokenizer (the path of a tokenizer.json), parse_special,
keep_special and chat_template_kwargs (JSON text of an object, or "").

Output starts with one line of JSON: own_begin (the tokens that the tokenizer itself puts
before a text), or error. A frame is an int64 count and that many uint32 ids. Two numbers
may stand in place of a count or a length: -1 for an error in a row, -3 for a warning.
Each comes with an int64 length and a text after it. All numbers are little-endian.
"""

import array
import json
import signal
import struct
import sys

from flatshard._data.failures import Failure
from flatshard._data.hf_chat import ChatEncoder
from flatshard._data.hf_encoder import Encoder

ERROR, WARNING = -1, -3


def write_ids(out, ids):
    words = array.array("I", ids)
    if sys.byteorder != "little":
        words.byteswap()
    out.write(struct.pack("<q", len(words)))
    out.write(words.tobytes())


def write_text(out, text, *before):
    data = text.encode("utf-8", errors="replace")
    out.write(struct.pack(f"<{len(before) + 1}q", *before, len(data)))
    out.write(data)


def read_texts(stream):
    while header := stream.read(8):
        (length,) = struct.unpack("<q", header)
        yield stream.read(length).decode("utf-8", errors="replace")


def run(mode, encoder, settings, stream, out):
    if mode == "prompt":
        texts = read_texts(stream)
        for where in texts:
            ids, end = encoder.prompt(where, next(texts))
            while encoder.warnings:
                write_text(out, encoder.warnings.pop(0), WARNING)
            write_ids(out, ids)
            write_ids(out, [] if end is None else [end])
    elif mode == "encode":
        text = stream.read().decode("utf-8", errors="replace")
        name = encoder.spelled(text)
        if name:
            spelled = (
                f"the text spells out the control token {name}. It stays text; "
                "--parse-special encodes it as the token"
            )
            write_text(out, spelled, WARNING)
        write_ids(out, encoder.encode(text))
    else:
        for line in stream.read().splitlines():
            ids = [int(word) for word in line.split()]
            write_text(out, encoder.decode(ids, settings["keep_special"]))


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    mode, settings = sys.argv[1], json.loads(sys.argv[2])
    out = sys.stdout.buffer
    try:
        encoder = Encoder(settings["tokenizer"], settings["parse_special"])
        header = {"own_begin": encoder.own_begin}
        if mode == "prompt":
            variables = settings["chat_template_kwargs"]
            encoder = ChatEncoder(settings["tokenizer"], "assistant", variables)
    except Failure as failure:
        out.write(json.dumps({"error": str(failure)}).encode() + b"\n")
        return 1
    out.write(json.dumps(header).encode() + b"\n")
    out.flush()
    try:
        run(mode, encoder, settings, sys.stdin.buffer, out)
        out.flush()
    except Failure as failure:
        write_text(out, str(failure), ERROR)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
