"""Tokenizers whose chat templates know tools, in the formats of well-known models."""

from __future__ import annotations

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from support.folders import byte_tokenizer

KNOWN = "{% if tools %}<|start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
TURNS = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m.tool_calls %}CALLS{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
EACH = "{% for c in m.tool_calls %}CALL{% endfor %}"
BODY = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}'
CALLS = {
    "hermes": EACH.replace("CALL", f"<tool_call>\n{BODY}}}\n</tool_call>"),
    "mistral": '[TOOL_CALLS] [{% for c in m.tool_calls %}BODY, "id": "{{ c.id }}"}{% endfor %}]'.replace("BODY", BODY),
    "mistral args": EACH.replace("CALL", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"),
    "llama3": EACH.replace("CALL", BODY.replace("arguments\"", "parameters\"") + "}"),
    "xml": EACH.replace("CALL", "<tool_call>\n<function={{ c.function.name }}>\n</function>\n</tool_call>"),
}  # fmt: skip
MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]")


def tool_tokenizer(calls: str, marks: bool = True) -> PreTrainedTokenizerFast:
    """Its template writes calls in the format of this name; with `marks` those of the format are single tokens."""
    tokenizer = byte_tokenizer(KNOWN + TURNS.replace("CALLS", CALLS[calls]))
    if marks:  # ordinary ones, as Qwen's are, and special ones, as Mistral's are
        tokenizer.add_tokens([AddedToken(mark, special="[" in mark, normalized=False) for mark in MARKS])
    return tokenizer
