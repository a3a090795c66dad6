"""Bodies that nobody meant: each is answered, with 200 or with a 4xx that says why, and the server stays whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from serve.serving import Server

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**70), 0.0, 0.5, -0.5, 1e308, 1e-308, "", "a", "é\x00", "a" * 3000,
    [], [1], ["a"], [[]], [[1, 2], [3]], [None], {}, {"type": "text"}, {"type": "json_object"}, {"1": 5}, {"a": {}},
    {"enabled": False}, {"max_draft_tokens": 2, "origins": True}, {"include_usage": True}, {"type": "object"},
    {"$ref": "#"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
    {"anyOf": [{"type": "array", "items": {"$ref": "#"}}, {"type": "null"}]},
)  # fmt: skip
FIELDS = (
    "n", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "presence_penalty", "frequency_penalty",
    "logit_bias", "user", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format", "speculation", "best_of",
    "echo", "logprobs", "top_logprobs", "suffix", "model", "prompt", "messages", "unknown",
)  # fmt: skip
FITTING = {
    "n": 2, "seed": 7, "stop": ["b", "cd"], "temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "min_tokens": 2,
    "repetition_penalty": 1.2, "logit_bias": {"5": -100}, "guided_regex": "[ab]*", "guided_choice": ["x", "y"],
    "speculation": {"enabled": False}, "best_of": 3, "echo": True, "logprobs": 2, "ignore_eos": True,
}  # fmt: skip


def body_of(rng: random.Random) -> dict[str, Any]:
    """A good body in which some fields have values of any kind, and some good ones."""
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 3, 5))}
    body |= {"prompt": "abab"} if rng.random() < 0.8 else {"messages": [{"role": "user", "content": "abab"}]}
    body |= {name: FITTING[name] for name in rng.sample(sorted(FITTING), rng.randint(0, 4))}
    return body | {name: rng.choice(VALUES) for name in rng.sample(FIELDS, rng.choice((0, 0, 1, 1, 2)))}


@pytest.mark.parametrize("seed", (0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))))
def test_no_body_fails_the_server(server: Server, seed: int) -> None:
    rng, statuses = random.Random(seed), []
    for _ in range(40):
        body = body_of(rng)
        path = "/v1/chat/completions" if "messages" in body and "prompt" not in body else "/v1/completions"
        answer = server.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], body
        statuses.append(answer.status_code)
    assert statuses.count(200) > 5 and statuses.count(400) > 5
    assert server.is_idle()
