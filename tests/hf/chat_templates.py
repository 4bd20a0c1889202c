"""Chat templates of the kinds that models have, and a tokenizer in which each byte is a token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
TURNS = PLAIN + ASKS

_TOOLS = "# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
_REST = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Help.{% endif %}"

TOOLS_LAST = (
    f"<|im_start|>system\n{_SYSTEM}{{% if tools %}}\n\n{_TOOLS}{{% endif %}}<|im_end|>\n{_REST}"
)
"""The way of Qwen 2.5: tools after the system text; a system turn without a system message too"""

TOOLS_FIRST = (
    f"<|im_start|>system\n{{% if tools %}}{_TOOLS}\n{{% endif %}}{_SYSTEM}<|im_end|>\n{_REST}"
)
"""The way of Hermes: tools before the system text"""

LLAMA = (
    "{% set turns = messages[1:] if messages[0].role == 'system' else messages %}"
    "<|start|>system<|sep|>\nToday: {{ date_string or '26 Jul 2024' }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot|>"
    "{% if tools and not turns %}{{ raise_exception('no first user message for the tools') }}"
    "{% endif %}{% for m in turns %}<|start|>{{ m.role }}<|sep|>\n"
    "{% if loop.first and tools %}" + _TOOLS + "{% endif %}{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|sep|>\n{% endif %}"
)
"""The way of Llama 3.1: a date in the system turn, and tools in the first user's turn"""

THOUGHTS = (
    "{% if tools %}<|im_start|>system\n" + _SYSTEM + "\n\n" + _TOOLS + "<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}{% for m in messages if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1].lstrip('\n') }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""The way of Qwen 3: `enable_thinking`, and earlier thoughts are left out"""

FOLDED = (
    "<s>{% set system = messages[0].content if messages[0].role == 'system' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.first and system %}{{ system }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% else %}{{ raise_exception('no user') }}"
    "{% endfor %}"
)
"""The way of Mistral: the system message in the first user's turn, and spaces around answers"""

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
)
"""The way of Gemma 2: no system role"""

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


def byte_tokenizer(*special: str) -> PreTrainedTokenizerFast:
    """A tokenizer in which each byte is a token, and so is each of these special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_)
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made
