"""Rows of chats: null, parts, JSON text, other forms, and keys that nothing uses."""

import json
import shutil
import subprocess

import pytest

from flatshard._data.hf_chat import ChatEncoder
from flatshard._data.failures import Failure
from flatshard._data.hf_messages import Conversation
from tests.data import chat_templates as of

ASK = {"role": "user", "content": "the"}
ANSWER = {"role": "assistant", "content": "sat"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


def test_null_is_absent():
    row = {"messages": None, "tools": None, "prompt": "the", "completion": "sat"}
    chat = Conversation(row)
    assert chat.messages == [ASK, ANSWER] and chat.tools is None
    messages = [{**ASK, "tool_calls": None, "name": None}, {**ANSWER, "weight": None}]
    chat = Conversation({"messages": messages, "prompt": None, "images": None})
    assert chat.messages == [ASK, ANSWER] and chat.flags == [None, None]
    assert chat.unused == []


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "s"}, {"type": "text", "text": "at", "x": None}]
    messages = [ASK, {**ANSWER, "content": parts}]
    assert Conversation({"messages": messages}).messages == [ASK, ANSWER]


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        json.dumps(CALL),
        {"function": {"name": "f", "arguments": ""}},
        {"function": {"name": "f", "arguments": "{}"}},
        {"function": json.dumps({"name": "f"})},
        {"function": {"name": "f", "arguments": None}, "id": None},
        {"name": "f", "arguments": {}},
    ],
)
def test_json_text_of_calls_is_parsed(call):
    for calls in ([call], json.dumps([call])):
        messages = [{"role": "assistant", "tool_calls": calls}]
        for given in (messages, json.dumps(messages)):
            [message] = Conversation({"messages": given}).messages
            assert message["tool_calls"] == [CALL]


def test_json_text_of_rows_is_parsed():
    tools = [{"type": "function", "function": {"name": "f"}}]
    for given in (tools, json.dumps(tools), [json.dumps(tool) for tool in tools]):
        assert Conversation({"messages": [ASK], "tools": given}).tools == tools
    row = {"messages": [ASK], "chat_template_kwargs": '{"a": 1, "b": null}'}
    assert Conversation(row).variables == {"a": 1}
    row = {"prompt": json.dumps([ASK]), "completion": json.dumps([ANSWER])}
    assert Conversation(row).messages == [ASK, ANSWER]
    # Text that is JSON of something else stays text.
    for text in ("[1]", "[]", '{"role": "user"}', "7"):
        messages = Conversation({"prompt": text, "completion": "sat"}).messages
        assert messages[0]["content"] == text


@pytest.mark.parametrize("blank", ["", " ", "null", None])
def test_blank_text_is_absent(blank):
    message = {**ANSWER, "tool_calls": blank}
    row = {"messages": [ASK, message], "tools": blank, "chat_template_kwargs": blank}
    chat = Conversation(row)
    assert chat.tools is None and chat.variables == {}
    assert "tool_calls" not in chat.messages[1]


def changed(key, value, role="assistant"):
    return {"messages": [ASK, {"role": role, "content": "sat", key: value}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed("content", 7), "'content' of message 2 (assistant), got 7"),
        (changed("content", True), "'content' of message 2 (assistant), got true"),
        (changed("content", {}), "'content' of message 2 (assistant), got {}"),
        (changed("content", {"a": 1}, "tool"), 'message 2 (tool), got {"a": 1}; write'),
        (changed("content", [{"a": 1}]), "parts of the type text, in 'content'"),
        (
            changed("content", ["sat"]),
            "in 'content' of message 2 (assistant), got \"sat\"",
        ),
        (changed("content", [{"type": "text"}]), 'got {"type": "text"}'),
        (changed("content", [{"type": "image_url"}]), 'got {"type": "image_url"}'),
        (
            changed("images", ["a.png"]),
            "only text in message 2 (assistant), got 'images'",
        ),
        (
            {**changed("x", 1), "images": ["a.png"]},
            "only text, got 'images': [\"a.png\"]",
        ),
        (changed("weight", 0.5), "0 or 1, or true or false, in 'weight' of message 2"),
        (changed("train", "no"), "in 'train' of message 2 (assistant), got \"no\""),
        (changed("tool_calls", "[{"), "expected JSON in 'tool_calls' of message 2"),
        (
            changed("tool_calls", {"a": 1}),
            "expected a list in 'tool_calls' of message 2",
        ),
        (changed("tool_calls", [7]), "expected an object in 'tool_calls' of message 2"),
        (changed("tool_calls", [{}]), "a function with a name in 'tool_calls'"),
        (
            changed("tool_calls", [{"name": "f", "arguments": "[1]"}]),
            "an object in 'arguments' of a tool call of message 2 (assistant), got [1]",
        ),
        ({"messages": "the"}, "expected JSON in 'messages', got \"the\""),
        ({"messages": "7"}, "expected a list of messages in 'messages', got 7"),
        ({"messages": [ASK], "tools": "x"}, "expected JSON in 'tools', got \"x\""),
        ({"messages": [ASK], "tools": {}}, "expected a list in 'tools', got {}"),
        (
            {"messages": [ASK], "chat_template_kwargs": [1]},
            "expected an object in 'chat_template_kwargs', got [1]",
        ),
        ({"messages": None, "text": "x"}, "'prompt' and 'completion', found text"),
    ],
)
def test_other_values_are_refused_by_name(row, message):
    with pytest.raises(Failure) as caught:
        Conversation(row)
    assert message in str(caught.value)


ALPACA = {"instruction": "the", "input": "cat", "output": "sat"}
SHAREGPT = [
    {"from": "system", "value": "be brief"},
    {"from": "human", "value": "the", "weight": None},
    {"from": "gpt", "value": "sat", "weight": 0},
]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (ALPACA, [("user", "the\n\ncat"), ("assistant", "sat")]),
        ({**ALPACA, "input": ""}, [("user", "the"), ("assistant", "sat")]),
        ({"question": "the", "answer": "sat"}, [("user", "the"), ("assistant", "sat")]),
        (
            {"system": "be brief", "prompt": "the", "response": "sat"},
            [("system", "be brief"), ("user", "the"), ("assistant", "sat")],
        ),
        (
            {"conversations": SHAREGPT},
            [("system", "be brief"), ("user", "the"), ("assistant", "sat")],
        ),
        (
            {"system": "be brief", "conversations": SHAREGPT[1:]},
            [("system", "be brief"), ("user", "the"), ("assistant", "sat")],
        ),
        ({"conversation": [ASK, ANSWER]}, [("user", "the"), ("assistant", "sat")]),
    ],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_rows_of_other_forms_are_converted_by_the_line_of_the_error(
    row, wanted, is_list, tmp_path
):
    with pytest.raises(Failure) as caught:
        Conversation(row)
    text = str(caught.value)
    assert f"found {', '.join(row)}; convert the file with: jq -c " in text
    if shutil.which("jq"):
        (tmp_path / "FILE").write_text(json.dumps([row] if is_list else row))
        line = text.split("convert the file with: ")[1]
        subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
        chat = Conversation(json.loads((tmp_path / "chats.jsonl").read_text()))
        assert [(m["role"], m["content"]) for m in chat.messages] == wanted
        if "conversations" in row:
            assert chat.flags[-1] is False


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    bpe = of.make_tokenizer()

    def make(name, **options):
        folder = tmp_path_factory.mktemp(name)
        return ChatEncoder(
            of.save(bpe, of.TEMPLATES[name], folder), "assistant", **options
        )

    return make


@pytest.mark.parametrize(
    ("template", "row", "warning"),
    [
        (
            "chatml",
            changed("reasoning_content", "x"),
            "does not use the key 'reasoning_content' of message 2 (assistant)",
        ),
        ("chatml", changed("tool_calls", [CALL]), "does not use the key 'tool_calls'"),
        (
            "chatml",
            changed("thoughts", "x"),
            "does not use the key 'thoughts' of message",
        ),
        (
            "r1",
            changed("content", "<think>a</think>b"),
            "all of the 'content' of message 2",
        ),
        (
            "qwen3",
            {"messages": [*changed("reasoning_content", "x")["messages"], ASK, ANSWER]},
            "does not write all of the 'reasoning_content' of message 2 (assistant)",
        ),
        ("chatml", {"messages": [ASK, ANSWER], "tools": []}, None),
        (
            "chatml",
            {"messages": [ASK, ANSWER], "tools": [{"a": 1}]},
            "variable 'tools'",
        ),
        (
            "chatml",
            {"messages": [ASK, ANSWER], "chat_template_kwargs": {"style": 1}},
            "the chat template does not use the variable 'style'",
        ),
        (
            "qwen3",
            {
                "messages": [ASK, ANSWER],
                "chat_template_kwargs": {"enable_thinking": False},
            },
            None,
        ),
        (
            "chatml",
            {**changed("name", None), "weight": 0},
            "the key 'weight' of the row",
        ),
        (
            "chatml",
            {**changed("name", None), "functions": []},
            "key 'functions' of the row",
        ),
        (
            "chatml",
            {"messages": [{**ASK, "train": True}, ANSWER]},
            "message 1 (user) is marked as trained, and --train-on assistant trains",
        ),
        ("mistral", changed("content", "  sat \n on "), None),
        ("qwen3", changed("content", "<think>a</think>sat"), None),
    ],
)
def test_what_nothing_uses_is_warned_of_once(chats, template, row, warning):
    encoder = chats(template)
    for _ in range(2):
        encoder.encode("f:3", json.dumps(row))
    assert len(encoder.warnings) == (0 if warning is None else 1)
    for found in encoder.warnings:
        assert found.startswith("f:3: ") and warning in found


def test_a_message_needs_a_content(chats):
    row = {"messages": [{"role": "user", "text": "the"}, ANSWER]}
    with pytest.raises(
        Failure, match=r"f:3: expected a 'content' in message 1 \(user\)"
    ):
        chats("chatml").encode("f:3", json.dumps(row))


def test_variables_of_the_template(chats):
    row = {"messages": [ASK]}
    encoder = chats("qwen3", variables='{"enable_thinking": false}')

    def prompt(row):
        return encoder.tokenizer.decode(encoder.prompt("f:1", json.dumps(row))[0])

    assert prompt(row).endswith("<|assistant|>\n<think>\n\n</think>\n\n")
    row["chat_template_kwargs"] = {"enable_thinking": True}
    assert prompt(row).endswith("<|assistant|>\n")
    for name in ("tokenize", "messages", "add_generation_prompt"):
        row["chat_template_kwargs"] = {name: False}
        with pytest.raises(Failure, match=f"'{name}' is not a variable"):
            prompt(row)
    with pytest.raises(Failure, match="expected an object in --chat-template-kwargs"):
        chats("qwen3", variables="[]")


def test_variables_hold_for_answers(chats):
    # The prompt of the answer has the block, so the answer has not.
    encoder = chats("qwen3", variables='{"enable_thinking": false}')
    ids, mask = encoder.encode("f:1", json.dumps({"messages": [ASK, ANSWER]}))
    trained = [token for token, bit in zip(ids, mask, strict=True) if bit]
    assert encoder.tokenizer.decode(trained) == "sat<|end|>\n"
