"""Long texts in parts whose tokens, one after the other, are the tokens of the text."""

import itertools
import json
import re

PART = 1 << 16  # characters; a tokenizer takes about 120 times the bytes of a text
WINDOW, TRIED = 256, 1000  # characters around a cut, and places for one
# Places where a word may end: before a space or a newline, and after a newline.
CUT = re.compile(r"(?<=\S)(?=[ \n]\w)|(?<=\S\n)(?=\w)")
# In a pattern: a match depends on the text before it, or on the end of the text.
LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[AbBGKzZ]|(?<!\[)\^|\$")
NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD")


def cutter(tokenizer):
    """Returns a function that yields the parts of a text, and whether one is the last.

    Words are tokenized one by one, and a pattern finds them from left to right. So a text
    can be split where a word ends in the text and in the part. The characters around each
    split show this. Other normalizers and pre-tokenizers depend on the full text: their
    texts have one part."""
    words, normalizer = tokenizer.pre_tokenizer, tokenizer.normalizer
    kinds, forms = list(_states(words)), list(_states(normalizer))
    is_local = (
        bool(kinds)
        and all(map(_is_local, kinds))
        and all(state["type"] in NORMALIZERS for state in forms)
        and not any(map(_spans, tokenizer.get_added_tokens_decoder().values()))
    )

    def split(text):
        if normalizer:
            text = normalizer.normalize_str(text)
        return [word for word, _ in words.pre_tokenize_str(text)]

    def is_between(text, at):
        before, after = text[at - WINDOW : at], text[at : at + WINDOW]
        return split(before) + split(after) == split(before + after)

    def parts(text):
        begin = 0
        while is_local and len(text) - begin > PART:
            cuts = itertools.islice(CUT.finditer(text, begin + PART), TRIED)
            places = (cut.start() for cut in cuts)
            end = next((at for at in places if is_between(text, at)), None)
            if end is None:
                break
            yield text[begin:end], False
            begin = end
        yield text[begin:], True

    return parts


def _states(component):
    """Yields the states of a normalizer or pre-tokenizer and of those within."""
    pending = [json.loads(component.__getstate__())] if component else []
    for state in pending:
        inner = state.get("pretokenizers", state.get("normalizers"))
        if inner is None:
            yield state
        else:
            pending += inner


def _is_local(state):
    if state["type"] == "ByteLevel":
        return not state["add_prefix_space"]
    if state["type"] == "Split":
        pattern = state["pattern"].get("Regex")
        is_kept = state["behavior"] in ("Isolated", "Removed")
        return is_kept and pattern is not None and not LOOKS_BACK.search(pattern)
    return state["type"] == "Digits"


def _spans(token):
    """Returns whether a text may be split within an added token, or within spaces that
    it removes."""
    text = token.content
    ends = (token.lstrip and text[:1], token.rstrip and text[-1:])
    return bool(CUT.search(text)) or any(end and end.isalnum() for end in ends)
