#!/usr/bin/env bash
# transformers 5.24.0: apply_chat_template removes a message's content when it is null
# (None). Templates that ask `content is none` then see an undefined content instead.
#
# Seen on 2026-11-29, for a message of the assistant with "content": None and tool_calls,
# the usual form of a tool call in OpenAI's format. What a template sees of the content:
#   transformers 5.24.0: not defined
#   transformers 4.57.1: none
# DeepSeek-R1's published template writes tool calls only under
# `message['content'] is none`, so with 5.24.0 it writes none of them.
#
# Exits with 1 when the behavior is another.
# usage: findings/chat_null_content_is_dropped.sh [a Python that has transformers and jinja2]
# Without one it installs them from PyPI into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${1:-$folder/venv/bin/python}
if [ $# -eq 0 ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install -q transformers==5.24.0 jinja2==3.1.6
fi
cat >"$folder/program.py" <<'PROGRAM'
import sys

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is not defined %}not defined"
    "{% elif message['content'] is none %}none"
    "{% else %}text{% endif %}"
    "{% if not loop.last %}, {% endif %}"
    "{% endfor %}"
)
call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
messages = [
    {"role": "user", "content": "How is the weather?"},
    {"role": "assistant", "content": None, "tool_calls": [call]},
]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
)
tokenizer.chat_template = TEMPLATE
seen = tokenizer.apply_chat_template(messages, tokenize=False)
print(f"transformers {transformers.__version__}: {seen}")
sys.exit(0 if seen == "text, not defined" else 1)
PROGRAM
"$python" "$folder/program.py"
