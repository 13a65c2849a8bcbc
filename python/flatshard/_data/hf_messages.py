"""Rows of chats as chat templates expect them: a list of messages whose contents are
text, objects in place of JSON text, no null."""

import json

from flatshard._data.failures import Failure
from flatshard._data.json_rows import without_halves

ASSISTANT = "assistant"
# Keys of a message that decide whether it is trained. Templates do not see them.
FLAGS = ("weight", "train", "training", "trainable", "loss")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
USED = ("tools", "chat_template_kwargs")
QUESTIONS = ("instruction", "question", "query", "prompt", "problem", "input")
ANSWERS = ("output", "response", "answer", "completion", "solution", "target")


def shown(value):
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:80] + "..."


def read_json(text):
    """Returns the value of a JSON text, without halves of surrogate pairs."""
    return repaired(json.loads(text))


def repaired(value):
    if isinstance(value, str):
        return without_halves(value)
    if isinstance(value, list):
        return [repaired(item) for item in value]
    if isinstance(value, dict):
        return {repaired(key): repaired(item) for key, item in value.items()}
    return value


def without_null(fields):
    return {key: value for key, value in fields.items() if value is not None}


def parsed(value, what):
    """Returns a value that may be written as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        raise Failure(
            f"expected JSON in {what}, got {shown(value)}: {error}"
        ) from error


def parsed_list(value, what):
    values = parsed(value, what)
    if not isinstance(values, list):
        raise Failure(f"expected a list in {what}, got {shown(values)}")
    return [parsed_object(value, what) for value in values]


def parsed_object(value, what):
    found = parsed(value, what)
    if not isinstance(found, dict):
        raise Failure(f"expected an object in {what}, got {shown(found)}")
    return found


def is_blank(value):
    """Returns whether a field that may have JSON text has none, or null."""
    return isinstance(value, str) and value.strip() in ("", "null")


class Conversation:
    """The messages of a JSON row, and how it is written and trained."""

    def __init__(self, row):
        row = without_null(row)
        for key in MEDIA:
            if row.get(key):
                raise Failure(
                    f"expected only text, got '{key}': {shown(row[key])}; leave the "
                    "row out"
                )
        if "messages" in row:
            fields = [("messages", None)]
        elif "prompt" in row and "completion" in row:
            fields = [("prompt", "user"), ("completion", ASSISTANT)]
        else:
            raise Failure(
                "expected the field 'messages', or 'prompt' and 'completion', found "
                f"{', '.join(row) or 'no field'}{conversion(row)}"
            )
        self.messages, self.flags = [], []
        self.first_answer = 0  # messages before it are a prompt, which is not trained
        for field, role in fields:
            if field == "completion":
                self.first_answer = len(self.messages)
            for message in messages_of(row[field], field, role):
                self.add(message, field)
        self.tools = None
        if not is_blank(row.get("tools", "")):
            self.tools = parsed_list(row["tools"], "'tools'")
        variables = row.get("chat_template_kwargs", {})
        variables = {} if is_blank(variables) else variables
        self.variables = without_null(
            parsed_object(variables, "'chat_template_kwargs'")
        )
        used = {field for field, _ in fields}
        self.unused = [key for key in row if key not in used and key not in USED]

    def add(self, message, field):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Failure(
                f"expected messages with a role and a content in '{field}', got "
                f"{shown(message)}"
            )
        role = message["role"]
        where = f"message {len(self.messages) + 1} ({role})"
        message = without_null(message)
        flags = [flag_of(message.pop(k), k, where) for k in FLAGS if k in message]
        content = text_of(message.get("content"), where)
        message = {**message, "content": content}
        calls = message.pop("tool_calls", None)
        if is_blank(calls):
            calls = None
        calls = calls and parsed_list(calls, f"'tool_calls' of {where}")
        if calls:
            message["tool_calls"] = [call_of(call, where) for call in calls]
        for key in MEDIA:
            if message.get(key):
                raise Failure(f"expected only text in {where}, got '{key}'")
        self.messages.append(message)
        self.flags.append(all(flags) if flags else None)

    def chosen(self, train_on):
        """Returns the messages of the assistant that are trained ("assistant" or "last"),
        or messages of all roles that are not trained ("all")."""
        if train_on == "all":
            return [at for at, flag in enumerate(self.flags) if flag is False]
        roles = [message["role"] for message in self.messages]
        found = [
            at
            for at, (role, flag) in enumerate(zip(roles, self.flags, strict=True))
            if role == ASSISTANT
            and flag is not False
            and (flag or at >= self.first_answer)
        ]
        if not found:
            raise Failure(
                "expected a message of the assistant to train on, found messages of "
                f"{', '.join(dict.fromkeys(roles))}; leave the row out, or give "
                "--train-on all"
            )
        return found[-1:] if train_on == "last" else found


def messages_of(value, field, role):
    """Returns the messages that a field has: a list of them, JSON text of one, or
    where `role` is set the text of one message."""
    if isinstance(value, str):
        if role is None:
            value = parsed(value, f"'{field}'")
        else:
            try:
                found = read_json(value)
            except ValueError:
                found = None
            is_list = isinstance(found, list) and found
            if is_list and all(isinstance(m, dict) and "role" in m for m in found):
                value = found
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        text = "text or " if role else ""
        raise Failure(
            f"expected {text}a list of messages in '{field}', got {shown(value)}"
        )
    return value


def flag_of(value, key, where):
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise Failure(
        f"expected 0 or 1, or true or false, in '{key}' of {where}, got {shown(value)}; "
        "a token is trained or not"
    )


def text_of(content, where):
    """Returns a message's content as text, or None."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        hint = "; write it as text" if isinstance(content, (dict, int, float)) else ""
        raise Failure(
            f"expected text in 'content' of {where}, got {shown(content)}{hint}"
        )
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise Failure(
                f"expected text, or parts of the type text, in 'content' of {where}, "
                f"got {shown(part)}"
            )
    return "".join(part["text"] for part in content)


def call_of(call, where):
    """Returns a call of a tool in the form that templates read: a function with a name
    and arguments. OpenAI's files have the arguments as JSON text."""
    what = f"'tool_calls' of {where}"
    call = without_null(call)
    function = call.pop("function", None)
    if function is None:
        keys = [key for key in ("name", "arguments") if key in call]
        function = {key: call.pop(key) for key in keys}
    function = without_null(parsed_object(function, what))
    if not isinstance(function.get("name"), str):
        raise Failure(
            f"expected a function with a name in {what}, got {shown(function)}"
        )
    arguments = function.get("arguments", "")
    if isinstance(arguments, str) and not arguments.strip():
        arguments = {}
    what = f"'arguments' of a tool call of {where}"
    function["arguments"] = parsed_object(arguments, what)
    return {"type": "function", **call, "function": function}


def conversion(row):
    """Returns a line that converts a row of another known form."""
    system, turns = "", None
    if isinstance(row.get("system"), str):
        system = '[{role: "system", content: .system}] + '
    for key in ("conversations", "conversation", "dialog", "turns"):
        if isinstance(row.get(key), list) and row[key]:
            turns = key
            break
    question = next((key for key in QUESTIONS if key in row), None)
    answer = next((key for key in ANSWERS if key in row), None)
    if turns and isinstance(row[turns][0], dict) and "from" in row[turns][0]:
        roles = '{human: "user", gpt: "assistant", observation: "tool"}[.from] // .from'
        message = "{role: (%s), content: .value} + del(.from, .value)" % roles
        filter = "{messages: (%s[.%s[] | %s])}" % (system, turns, message)
    elif turns and isinstance(row[turns][0], dict) and "role" in row[turns][0]:
        filter = "{messages: (%s.%s)}" % (system, turns)
    elif question and answer:
        asked = f".{question}"
        if question != "input" and "input" in row:
            asked = (
                f'[.{question}, .input // ""] | map(select(. != "")) | join("\\n\\n")'
            )
        user = '[{role: "user", content: (%s)}' % asked
        reply = '{role: "assistant", content: .%s}]' % answer
        filter = "{messages: (%s%s, %s)}" % (system, user, reply)
    else:
        return ""
    return (
        '; convert the file with: jq -c \'if type == "array" then .[] else . end | '
        f"{filter}' FILE > chats.jsonl"
    )
