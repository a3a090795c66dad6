"""Bodies that nobody meant: each is answered, with 200 or with a 4xx that says why, and the server stays whole."""

from __future__ import annotations

import json
import random
import re
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forerun import Chain, PredictedText, PromptLookup, SpeculativeDecoder
from serve.serving import KEY, Server, running
from serve.tool_models import tool_tokenizer
from support.tiny import tiny_model

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**70), 0.0, 0.5, -0.5, 1e308, 1e-308, "", "a", "é\x00", "a" * 3000,
    [], [1], ["a"], [[]], [[1, 2], [3]], [None], {}, {"type": "text"}, {"type": "json_object"}, {"1": 5}, {"a": {}},
    {"enabled": False}, {"max_draft_tokens": 2, "origins": True}, {"include_usage": True}, {"type": "object"},
    {"$ref": "#"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]}, "(a{1,99}){1,99}", "required",
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "", "arguments": ""}}]}],
    {"type": "content", "content": "abab"}, {"type": "function", "function": {"name": "f"}},
)  # fmt: skip
FIELDS = (
    "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "presence_penalty", "frequency_penalty",
    "logit_bias", "user", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format", "speculation", "best_of",
    "echo", "logprobs", "top_logprobs", "suffix", "model", "prompt", "messages", "unknown", "tools", "tool_choice",
    "parallel_tool_calls", "prediction", "structured_outputs",
)  # fmt: skip
SECRETS = rf"Traceback|\.py|/tmp|/work|/home|site-packages|{KEY}"
"""What no answer may hold: traces, paths, the key."""
FITTING = {
    "n": 2, "seed": 7, "stop": ["b", "cd"], "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "min_tokens": 2,
    "repetition_penalty": 1.2, "logit_bias": {"5": -100}, "guided_regex": "[ab]*", "guided_choice": ["x", "y"],
    "structured_outputs": {"regex": "[ab]*"},
    "speculation": {"enabled": False}, "best_of": 3, "echo": True, "logprobs": 2, "ignore_eos": True,
}  # fmt: skip


def body_of(rng: random.Random) -> dict[str, Any]:
    """A good body in which some fields have values of any kind, and some good ones."""
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 5))}
    body |= {"prompt": "abab"} if rng.random() < 0.8 else {"messages": [{"role": "user", "content": "abab"}]}
    body |= {name: FITTING[name] for name in rng.sample(sorted(FITTING), rng.randint(0, 4))}
    return body | {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.choice((0, 0, 1, 1, 2)))}


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Server]:
    """One that knows tools, takes predictions and has a key."""
    tokenizer = tool_tokenizer("hermes")
    model = tiny_model("llama", vocab=len(tokenizer), eos_token_id=0, max_position_embeddings=2048)
    drafter = Chain(PredictedText(), PromptLookup())
    decoder = SpeculativeDecoder(model, drafter, tokenizer=tokenizer, rule="coupled", policy=3)
    with running(decoder, KEY, tokenizer, max_rows=8, max_queued=64) as server:
        yield server


@pytest.mark.parametrize(
    ("seed", "number"), ((0, 150), *(pytest.param(seed, 1400, marks=pytest.mark.slow) for seed in range(1, 8)))
)
def test_no_body_fails_the_server(fuzzed: Server, seed: int, number: int) -> None:
    """The slow cases make it 10,100 bodies."""
    rng, statuses, server = random.Random(seed), [], fuzzed
    for _ in range(number):
        body = body_of(rng)
        path = "/v1/chat/completions" if "messages" in body and "prompt" not in body else "/v1/completions"
        answer = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, (body, answer.text)
        assert not re.search(SECRETS, answer.text), answer.text
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], body
        statuses.append(answer.status_code)
    assert statuses.count(200) > 50 and statuses.count(400) > 50
    assert server.is_idle()


def schema_of(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + '{"type":"null"}' + "}}" * depth


@pytest.mark.parametrize("depth", (90, 400, pytest.param(20_000, id="as deep as a body may be")))
@pytest.mark.parametrize("field", ("guided_json", "response_format", "tools", "prompt", "logit_bias"))
def test_deep_bodies_are_answered_soon(fuzzed: Server, field: str, depth: int) -> None:
    """Whatever is nested, and however deep: an answer within seconds, no 5xx, and no megabytes kept."""
    value = {
        "guided_json": schema_of(depth),
        "response_format": f'{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema_of(depth)}}}}}',
        "tools": f'[{{"type":"function","function":{{"name":"f","parameters":{schema_of(depth)}}}}}]',
        "prompt": "[" * depth + "1" + "]" * depth,
        "logit_bias": '{"1":' * depth + "1" + "}" * depth,
    }[field]
    chat = '"messages":[{"role":"user","content":"abab"}]'
    path = "/v1/chat/completions" if field == "tools" else "/v1/completions"
    rest = chat if field == "tools" else '"prompt":"abab"' if field != "prompt" else '"n":1'
    before, started = memory(), time.monotonic()
    answer = fuzzed.client.post(
        path, content=f'{{"max_tokens":4,{rest},"{field}":{value}}}', headers={"Content-Type": "application/json"}
    )
    assert answer.status_code in (200, 400) and time.monotonic() - started < 10, answer.text
    assert not re.search(SECRETS, answer.text), answer.text
    assert memory() - before < 256 * 2**20 and fuzzed.is_idle()


def memory() -> int:
    """Bytes of this process, server included."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
