"""Answers a question of the program `flatshard` about a tokenizer. Standard input has the
question, and standard output gets the answer. Both are a JSON object.

The question has a mode:

    encode  `texts` become `tokens`, a list of ids for each
    decode  `tokens`, lists of ids, become `texts`
    prompt  `texts` are rows of chats. Each becomes two lists in `tokens`: the
            conversation up to where the assistant answers, and the token that ends the
            answer, if there is one

It also has tokenizer (the path of a tokenizer.json), parse_special, keep_special, and
chat_template_kwargs (JSON text of an object, or ""). The answer also has warnings and
own_begin (the tokens that the tokenizer itself puts before a text). After a failure it
has error and is_row (whether the error is in a row)."""

import json
import signal
import sys

from flatshard._data.failures import Failure
from flatshard._data.hf_chat import ChatEncoder
from flatshard._data.hf_encoder import Encoder


def encode(encoder, question, answer):
    for text in question["texts"]:
        if name := encoder.spelled(text):
            answer["warnings"].append(
                f"the text spells out the control token {name}. It stays text; "
                "--parse-special encodes it as the token"
            )
        answer["tokens"].append(encoder.encode(text))


def decode(encoder, question, answer):
    for ids in question["tokens"]:
        text = encoder.decode(ids, question["keep_special"])
        # Parsers reject halves of surrogate pairs.
        answer["texts"].append(text.encode("utf-8", errors="replace").decode())


def prompt(encoder, question, answer):
    variables = question["chat_template_kwargs"]
    answer["is_row"] = False
    chats = ChatEncoder(question["tokenizer"], "assistant", variables)
    answer["is_row"] = True
    answer["warnings"] = chats.warnings
    for number, row in enumerate(question["texts"], 1):
        ids, end = chats.prompt(f"conversation {number}", row)
        answer["tokens"] += [ids, [] if end is None else [end]]


def answer_of(question):
    answer = {"texts": [], "tokens": [], "own_begin": [], "warnings": []}
    answer["is_row"] = False
    modes = {"encode": encode, "decode": decode, "prompt": prompt}
    try:
        encoder = Encoder(question["tokenizer"], question["parse_special"])
        answer["own_begin"] = encoder.own_begin
        answer["is_row"] = True
        modes[question["mode"]](encoder, question, answer)
    except Failure as failure:
        answer["error"] = str(failure)
    return answer


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    json.dump(answer_of(json.load(sys.stdin.buffer)), sys.stdout)
