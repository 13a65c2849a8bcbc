"""Conversations through chat templates: which tokens, and which of them are trained."""

import json

import pytest
import transformers
from tokenizers import (
    AddedToken,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from flatshard._data.hf_chat import ChatEncoder
from flatshard._data.failures import Failure
from tests.data import chat_templates as of
from tests.data.chat_templates import MARKED, PLAIN

TRANSFORMERS_4 = transformers.__version__.startswith("4.")

# Some templates drop the reasoning of earlier answers like this.
FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:1] }}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "the cat?"},
    {"role": "assistant", "content": "sat"},
    {"role": "user", "content": "where?"},
    {"role": "assistant", "content": "on the mat"},
]


@pytest.fixture(scope="module")
def bpe():
    return of.make_tokenizer()


@pytest.fixture
def chats(bpe, tmp_path):
    def make(template, train_on="assistant", tokenizer=None, **options):
        path = of.save(tokenizer or bpe, template, tmp_path)
        return ChatEncoder(path, train_on, **options)

    return make


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **keys):
    return {"role": "assistant", "content": content, **keys}


def trained(encoder, row):
    """The text of each run of trained tokens."""
    ids, mask = encoder.encode("chats.jsonl:7", json.dumps(row))
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    runs, before = [], 0
    for token, bit in zip(ids, mask, strict=True):
        if bit:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = bit
    return [encoder.tokenizer.decode(run) for run in runs]


def failure(encoder, row):
    text = row if isinstance(row, str) else json.dumps(row)
    with pytest.raises(Failure) as caught:
        encoder.encode("chats.jsonl:7", text)
    assert str(caught.value).startswith("chats.jsonl:7: ")
    return str(caught.value)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_messages_are_trained_to_their_end(chats, template):
    encoder = chats(template)
    assert trained(encoder, {"messages": TURNS}) == ["sat<|end|>", "on the mat<|end|>"]
    whole = encoder.tokenizer.apply_chat_template(
        TURNS, tokenize=True, return_dict=False
    )
    assert encoder.encode("f:1", json.dumps({"messages": TURNS}))[0] == whole


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_last_is_the_last_message_of_the_assistant(chats, template):
    more = [*TURNS, {"role": "user", "content": "oh"}]
    encoder = chats(template, "last")
    assert trained(encoder, {"messages": more}) == ["on the mat<|end|>"]


def test_all_is_every_token(chats):
    encoder = chats(PLAIN, "all")
    [text] = trained(encoder, {"messages": TURNS[:2]})
    assert text == "<|system|>be brief<|end|><|user|>the cat?<|end|>"


def test_prompt_and_completion_are_two_messages(chats):
    encoder = chats(PLAIN)
    row = {"prompt": "the cat?", "completion": "sat"}
    assert trained(encoder, row) == ["sat<|end|>"]
    ids, _ = encoder.encode("f:1", json.dumps(row))
    assert encoder.tokenizer.decode(ids) == (
        "<|user|>the cat?<|end|><|assistant|>sat<|end|>"
    )
    row = {"prompt": TURNS[:2], "completion": [TURNS[2]]}
    assert trained(encoder, row) == ["sat<|end|>"]


def test_tools_answer_between_calls_and_answers(chats):
    call = {"function": {"name": "look", "arguments": '{"at": "the mat"}'}}
    messages = [
        TURNS[1],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a cat"},
        {"role": "assistant", "content": "sat"},
    ]
    # Arguments that are JSON text reach the template as an object.
    assert trained(chats(PLAIN), {"messages": messages}) == [
        '{"at": "the mat"}<|end|>',
        "sat<|end|>",
    ]
    call["function"]["arguments"] = '{"at": '
    text = failure(chats(PLAIN), {"messages": messages})
    assert "expected JSON in 'arguments' of a tool call of message 2" in text


# Template, messages, and the text of each run of trained tokens.
CASES = {
    # Neither the header, BOS nor a default system message is of the first answer.
    "first, after a default system message": (
        of.DEFAULT_SYSTEM,
        [assistant("sat"), user("the"), assistant("mat")],
        ["sat<|end|>\n", "mat<|end|>\n"],
    ),
    "first, after bos": (
        of.WITH_BOS,
        [assistant("sat"), user("the"), assistant("mat")],
        ["sat<|end|>\n", "mat<|end|>\n"],
    ),
    "first, and empty": (of.WITH_BOS, [assistant("")], ["<|end|>\n"]),
    "first, where a question is needed": (
        of.QWEN35,
        [assistant("sat"), user("the"), assistant("mat")],
        ["sat<|end|>", "\n\n</think>\n\nmat<|end|>\n"],
    ),
    "first, where roles alternate from the user": (
        of.R1,
        [assistant("sat"), user("the"), assistant("mat")],
        ["sat<|end|>", "mat<|end|>"],
    ),
    "after a system message": (
        of.CHATML,
        [{"role": "system", "content": "the"}, assistant("sat")],
        ["sat<|end|>\n"],
    ),
    # The token \n\n has the newline of the header and one of the answer.
    "begins with a newline": (
        of.CHATML,
        [user("the"), assistant("\nsat"), user("a"), assistant("\n\nmat")],
        ["\n\nsat<|end|>\n", "\n\n\nmat<|end|>\n"],
    ),
    "after a prompt that ends with a space": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        [user("the cat "), assistant("sat on")],
        [" sat on"],
    ),
    "that is tokenized with the prompt": (
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        [user("cat t"), assistant("he mat")],
        [" the mat"],
    ),
    "of characters of several tokens": (
        of.PLAIN,
        [user("\u00e9"), assistant("\u00e9\U0001f44d"), user("\U0001f44d")],
        ["\u00e9\U0001f44d<|end|>"],
    ),
    # Templates change earlier answers later.
    "forgotten": (
        FORGETS,
        [user("the"), assistant("sat"), user("on"), assistant("mat")],
        ["s<|end|>", "mat<|end|>"],
    ),
    "with a block for reasoning at the end": (
        of.QWEN3,
        [user("the"), assistant("sat"), user("on"), assistant("mat")],
        ["sat<|end|>\n", "<think>\n\n</think>\n\nmat<|end|>\n"],
    ),
    "whose reasoning is dropped": (
        of.QWEN3,
        [
            user("the"),
            assistant("<think>\ncat\n</think>\n\nsat"),
            user("on"),
            assistant("mat", reasoning_content="the"),
        ],
        ["sat<|end|>\n", "<think>\nthe\n</think>\n\nmat<|end|>\n"],
    ),
    "whose prompt begins the reasoning": (
        of.QWEN35,
        [user("the"), assistant("sat"), user("on"), assistant("mat")],
        ["sat<|end|>\n", "\n\n</think>\n\nmat<|end|>\n"],
    ),
    "without the reasoning that the prompt begins": (
        of.R1,
        [user("the"), assistant("<think>a</think><b>"), user("on"), assistant("mat")],
        ["<b><|end|>", "mat<|end|>"],
    ),
    "between tools": (
        of.QWEN35,
        [
            user("the"),
            assistant(
                None,
                reasoning_content="cat",
                tool_calls=[{"function": {"name": "on", "arguments": {}}}],
            ),
            {"role": "tool", "content": "a"},
            assistant("sat"),
            user("on"),
            assistant("mat"),
        ],
        [
            "\n\n<call>on{}<|end|>\n",
            "sat<|end|>\n",
            "\n\n</think>\n\nmat<|end|>\n",
        ],
    ),
    "before a token that ends the conversation": (
        of.PHI,
        [user("the"), assistant("sat"), user("on"), assistant("mat")],
        ["sat<|end|>\n", "mat<|end|>\n<|over|>"],
    ),
    "of calls, whose reasoning is dropped": (
        of.GPT_OSS,
        [
            user("the"),
            assistant("a", thinking="b", tool_calls=[{"name": "on"}]),
            {"role": "tool", "content": "the"},
            assistant("mat"),
        ],
        ["on {}<|end|>", "mat<|end|>"],
    ),
    "around spaces that the template writes": (
        of.MISTRAL,
        [user("the"), assistant(" sat "), user("on"), assistant("mat")],
        [" sat<|end|>", " mat<|end|>"],
    ),
    # Null and nothing are one, for templates that write None and that need it.
    "null, written": (
        of.DEFAULT_SYSTEM,
        [user("the"), assistant(None, name=None), user("on"), assistant("None")],
        ["<|end|>\n", "None<|end|>\n"],
    ),
    "null, with calls": (
        of.R1,
        [
            {**user("the"), "tool_calls": None},
            assistant(None, tool_calls=[{"name": "look", "arguments": None}]),
            {"role": "tool", "content": "a", "tool_calls": []},
            assistant("sat", tool_calls=None),
        ],
        # From version 5 on transformers hides null from templates.
        ["look{}<|end|>" if TRANSFORMERS_4 else "<|end|>", "sat<|end|>"],
    ),
    "reasoning by another name": (
        of.QWEN3,
        [user("the"), assistant("sat", thinking="cat")],
        ["<think>\ncat\n</think>\n\nsat<|end|>\n"],
    ),
    "parts": (
        of.CHATML,
        [
            user([{"type": "text", "text": "the"}]),
            assistant([{"type": "text", "text": t} for t in ("sa", "t")]),
        ],
        ["sat<|end|>\n"],
    ),
    "weights": (
        of.CHATML,
        [
            user("the"),
            assistant("a", weight=0),
            user("cat"),
            assistant("sat", weight=1, train=None),
            user("on"),
            assistant("b", train=False),
            user("c"),
            assistant("mat"),
            user("c"),
            assistant("d", weight=1, trainable=False),
        ],
        ["sat<|end|>\n", "mat<|end|>\n"],
    ),
    "weights between marks": (
        of.MARKED,
        [
            user("the"),
            assistant("a", loss=False),
            user("cat"),
            assistant("sat", training=True),
        ],
        ["sat<|end|>"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_answer(chats, case):
    template, messages, texts = CASES[case]
    assert trained(chats(template), {"messages": messages}) == texts


@pytest.mark.parametrize("template", ["chatml", "marked", "qwen3", "qwen35", "r1"])
def test_the_last_answer_alone(chats, template):
    messages = [user("the"), assistant("sat"), user("on"), assistant("mat")]
    every = trained(chats(of.TEMPLATES[template]), {"messages": messages})
    last = trained(chats(of.TEMPLATES[template], "last"), {"messages": messages})
    assert len(every) == 2 and last == every[1:]
    messages[-1]["weight"] = 0
    last = trained(chats(of.TEMPLATES[template], "last"), {"messages": messages})
    assert last == every[:1]


def test_a_prompt_is_not_trained(chats):
    prompt = [user("the"), assistant("sat"), user("on")]
    row = {"prompt": prompt, "completion": [assistant("mat")]}
    assert trained(chats(of.CHATML), row) == ["mat<|end|>\n"]
    assert trained(chats(of.MARKED), row) == ["mat<|end|>"]
    prompt[1]["weight"] = 1  # but for what is marked
    assert trained(chats(of.CHATML), row) == ["sat<|end|>\n", "mat<|end|>\n"]


def test_marks_that_only_the_last_answer_has(chats):
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        "{% if loop.last %}{% generation %}the {% endgeneration %}{% endif %}"
        "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    messages = [user("a"), assistant("sat"), user("on"), assistant("mat", weight=0)]
    assert trained(chats(template), {"messages": messages}) == ["sat<|end|>"]
    messages[1]["weight"], messages[3]["weight"] = 0, 1
    assert trained(chats(template), {"messages": messages}) == ["the mat<|end|>"]


def test_marks_in_a_comment(chats):
    template = "{# {% generation %} and\n{% endgeneration %} #}" + of.CHATML
    row = {"messages": [user("the"), assistant("sat")]}
    assert trained(chats(template), row) == ["sat<|end|>\n"]


def test_control_tokens_that_take_spaces_before_them(chats):
    tokens = [AddedToken(t, special=True, lstrip=True) for t in of.SPECIAL]
    tokenizer = of.make_tokenizer()
    tokenizer.add_special_tokens(tokens)
    messages = [user("the"), assistant("sat"), user("on"), assistant("mat")]
    runs = trained(chats(of.CHATML, tokenizer=tokenizer), {"messages": messages})
    assert [run.rstrip() for run in runs] == ["sat<|end|>", "mat<|end|>"]


def test_halves_of_surrogate_pairs_and_nesting(chats):
    encoder = chats(of.CHATML)
    text = json.dumps({"messages": [user("a"), assistant("cat")]})
    whole, _ = encoder.encode("chats.jsonl:7", text.replace("cat", "c\\ufffdt"))
    assert encoder.encode("a", text.replace("cat", "c\\ud83dt"))[0] == whole
    assert encoder.encode("a", text.replace("cat", "c\\udc00t"))[0] == whole
    inner = {"prompt": json.dumps([user("c\ud83dt")]), "completion": "sat"}
    ids, _ = encoder.encode("a", json.dumps(inner))  # JSON text in a field
    inner["prompt"] = [user("c\ufffdt")]
    assert encoder.encode("a", json.dumps(inner))[0] == ids
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(Failure, match="chats.jsonl:7: expected JSON .* inside each"):
        encoder.encode("chats.jsonl:7", text[:-1] + f', "more": {deep}}}')


def test_all_but_messages_without_weight(chats):
    messages = [{**user("the"), "train": False}, assistant("sat"), user("on")]
    messages += [assistant("mat", weight=0), user("a")]
    assert trained(chats(PLAIN, "all"), {"messages": messages}) == [
        "<|user|>",  # the header of the first message may be of any row
        "<|assistant|>sat<|end|><|user|>on<|end|><|assistant|>",
        "<|user|>a<|end|>",
    ]


def test_marks_give_the_mask_of_transformers(chats):
    encoder = chats(MARKED)
    ids, mask = encoder.encode("f:1", json.dumps({"messages": TURNS}))
    wanted = encoder.tokenizer.apply_chat_template(
        TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == wanted["input_ids"] and mask == wanted["assistant_masks"]


def test_marks_around_what_no_token_has(chats):
    # A token of words has neither the newline nor the space at the start of a message.
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", *of.SPECIAL]
    trainer = trainers.WordPieceTrainer(special_tokens=special, show_progress=False)
    words.train_from_iterator(["the cat sat on the mat"], trainer)
    encoder = chats(MARKED, tokenizer=words)
    messages = [user("the"), assistant("\ncat"), user("on"), assistant(" mat")]
    texts = trained(encoder, {"messages": messages})
    assert texts == ["cat <|end|>", "mat <|end|>"]


def test_marks_that_cannot_be_followed_are_refused(chats):
    template = MARKED.replace("messages %}<|", "messages %}{% set text %}<|", 1)
    template = template.replace(
        "{% endfor %}", "{% endset %}{{ text|length }}{% endfor %}"
    )
    text = failure(chats(template), {"messages": TURNS})
    assert "changes the text between {% generation %} and" in text


def test_marks_that_mark_nothing_are_refused(chats):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{# none #}"
    template += "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert "marks no token" in failure(chats(template), {"messages": TURNS})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "expected JSON"),
        ({"text": "x"}, "'messages', or 'prompt' and 'completion', found text"),
        ({}, "found no field"),
        ({"messages": TURNS[:2]}, "expected a message of the assistant"),
        ({"messages": []}, "a list of messages in 'messages', got []"),
        ({"messages": [{"content": "x"}]}, "messages with a role and a content"),
        ({"prompt": "x", "completion": 3}, "in 'completion', got 3"),
    ],
)
def test_bad_rows_are_named(chats, row, message):
    assert message in failure(chats(PLAIN), row)


def test_what_a_template_raises_is_told(chats):
    template = "{{ raise_exception('roles must alternate') }}"
    text = failure(chats(template), {"messages": TURNS})
    assert "the chat template refuses the conversation: roles must alternate" in text


def test_control_tokens_in_messages_are_seen(chats):
    encoder = chats(PLAIN)
    trained(encoder, {"messages": TURNS})
    assert encoder.warnings == []
    for _ in range(2):  # only once
        trained(encoder, {"prompt": "say <|end|>", "completion": "no"})
    [warning] = encoder.warnings
    assert "chats.jsonl:7: a message spells out the control token <|end|>" in warning


def test_a_template_is_needed(chats, tmp_path):
    with pytest.raises(Failure, match="has no chat template"):
        chats(None)
    with pytest.raises(Failure, match="expected a tokenizer's folder"):
        ChatEncoder(str(tmp_path / "other.json"), "all")
