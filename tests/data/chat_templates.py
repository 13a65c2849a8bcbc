"""Chat templates in the shapes of published ones, and a tokenizer that joins newlines
as the published tokenizers do."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = [
    "<|end|>",
    "<|over|>",
    "<|bos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
]

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
# ChatML without and with the system message of Qwen2.5.
CHATML = (
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}"
)
DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|system|>\\nYou are helpful.<|end|>\\n' }}{%- endif %}" + CHATML
)
WITH_BOS = "{{ bos_token }}" + CHATML
# Qwen3: an answer before the last question loses its reasoning, the last one gets a
# block for it.
QWEN3 = (
    "{%- set ns = namespace(last=messages|length - 1, found=false) %}"
    "{%- for m in messages[::-1] %}{%- if m.role == 'user' and not ns.found %}"
    "{%- set ns.last = messages|length - loop.index %}{%- set ns.found = true %}"
    "{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- set content = m.content if m.content is string else '' %}"
    "{{- '<|' + m.role + '|>\\n' }}"
    "{%- if m.role == 'assistant' %}"
    "{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}"
    "{%- if not reasoning and '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
    "{{- content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '\\n<call>' + c.function.name + (c.function.arguments | tojson) }}"
    "{%- endfor %}"
    "{{- '<|end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
# Qwen3.5: the prompt starts the reasoning, and a question is required.
QWEN35 = (
    "{%- if messages | selectattr('role', 'eq', 'user') | list | length == 0 %}"
    "{{- raise_exception('No user query found in messages.') }}{%- endif %}"
    + QWEN3.replace("{{- '<|assistant|>\\n' }}", "{{- '<|assistant|>\\n<think>\\n' }}")
)
# DeepSeek-R1: no answer keeps its reasoning, the prompt starts it, a content that is
# null means calls, and arguments are text.
R1 = (
    "{{ bos_token }}"
    "{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{{ m['content'] }}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m['role'] == 'user' %}{{ '<|user|>' + m['content'] }}{%- endif %}"
    "{%- if m['role'] == 'tool' %}{{ '<|tool|>' + m['content'] }}{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is none %}"
    "{%- for c in m['tool_calls'] %}"
    "{{ '<|assistant|>' + c['function']['name'] + c['function']['arguments'] }}"
    "{%- endfor %}{{ '<|end|>' }}"
    "{%- endif %}"
    "{%- if m['role'] == 'assistant' and m['content'] is not none %}"
    "{%- set content = m['content'] %}"
    "{%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}"
    "{%- endif %}{{ '<|assistant|>' + content + '<|end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{%- endif %}"
)
# Mistral: roles alternate, and spaces are around what is said.
MISTRAL = (
    "{{ bos_token }}{%- for m in messages %}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{%- endif %}"
    "{%- if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{%- else %}{{ ' ' + m['content'] | trim + '<|end|>' }}{%- endif %}{%- endfor %}"
)
# Phi-3.5: the conversation ends with a special token.
PHI = (
    "{%- for m in messages %}"
    "{{- '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}"
    "{%- else %}{{- '<|over|>' }}{%- endif %}"
)
# gpt-oss: calls have no content, and no reasoning once an answer follows.
GPT_OSS = (
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}"
    "{%- if not messages[loop.index:] | selectattr('role', 'eq', 'assistant') | list %}"
    "{{- '<|assistant|><think>' + m.thinking + '<|end|>' }}{%- endif %}"
    "{%- for c in m.tool_calls %}{{- '<|assistant|>' + c.function.name + ' ' }}"
    "{{- c.function.arguments | tojson }}{%- endfor %}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content }}{%- endif %}"
    "{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
TEMPLATES = {
    "plain": PLAIN,
    "marked": MARKED,
    "chatml": CHATML,
    "default_system": DEFAULT_SYSTEM,
    "with_bos": WITH_BOS,
    "qwen3": QWEN3,
    "qwen35": QWEN35,
    "r1": R1,
    "mistral": MISTRAL,
    "phi": PHI,
    "gpt_oss": GPT_OSS,
}


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    # As in Qwen's tokenizer, newlines are one word with the spaces before them.
    words = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = ["the cat sat on the mat", "a\n\nb\n\nc"] * 9
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


def save(tokenizer, template, folder):
    """Writes the tokenizer with a template. Returns the path of its tokenizer.json."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[1:],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder / "tokenizer.json")
