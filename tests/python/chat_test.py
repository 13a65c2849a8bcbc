"""Conversations through chat templates: which tokens, and which of them are trained."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from flatshard.hf_chat import ChatEncoder
from flatshard.hf_encoder import Failure

SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{%- generation -%}{{ m.content }}<|end|>{%- endgeneration -%}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)
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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return tokenizer


@pytest.fixture
def chats(bpe, tmp_path):
    def make(template, train_on="assistant"):
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            eos_token="<|end|>",
            additional_special_tokens=SPECIAL[1:],
        )
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path)
        return ChatEncoder(str(tmp_path / "tokenizer.json"), train_on)

    return make


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
    assert "expected JSON in the arguments of a tool call" in text


def test_a_template_that_forgets_is_refused(chats):
    encoder = chats(FORGETS)
    text = failure(encoder, {"messages": TURNS})
    assert "other tokens for the first 3 messages" in text
    assert "{% generation %}" in text and "--train-on all" in text
    # One answer has nothing after it.
    assert trained(encoder, {"messages": TURNS[:3]}) == ["sat<|end|>"]


def test_a_prefix_that_is_tokenized_in_another_way_is_refused(bpe, chats):
    # "t" and "he" on both sides of the border become one token.
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    row = {"prompt": "cat t", "completion": "he mat"}
    assert "first 1 messages" in failure(chats(template), row)


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
    assert encoder.spelled is None
    trained(encoder, {"prompt": "say <|end|>", "completion": "no"})
    assert encoder.spelled == "<|end|>"


def test_a_template_is_needed(chats, tmp_path):
    with pytest.raises(Failure, match="has no chat template"):
        chats(None)
    with pytest.raises(Failure, match="expected a tokenizer's folder"):
        ChatEncoder(str(tmp_path / "other.json"), "all")
