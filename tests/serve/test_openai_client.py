"""OpenAI's own client against this server: what it reads, and which of its exceptions our errors become."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from serve.serving import KEY, NAME, Server, make_decoder, running

pytest.importorskip("openai")

import openai

CHAT: Any = [{"role": "user", "content": "the sea the sea"}]
OURS = {"ignore_eos": True}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as one:
        yield one


def test_models_chats_and_completions(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    answer = client.chat.completions.create(
        model=NAME, messages=CHAT, max_completion_tokens=9, n=2, seed=1, logprobs=True, top_logprobs=2, extra_body=OURS
    )
    assert [choice.index for choice in answer.choices] == [0, 1] and answer.usage
    assert answer.usage.completion_tokens == 18 and answer.usage.completion_tokens_details
    for choice in answer.choices:
        assert choice.finish_reason == "length" and choice.logprobs and choice.logprobs.content
        assert len(choice.logprobs.content) == 9 and len(choice.logprobs.content[0].top_logprobs) == 2
    text = client.completions.create(model=NAME, prompt=["ab", "cd"], max_tokens=4, echo=True, logprobs=1)
    assert len(text.choices) == 2 and text.choices[1].text.startswith("cd") and text.choices[0].logprobs


def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": CHAT, "max_tokens": 20, "temperature": 0, "extra_body": OURS}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        kinds = {event.type for event in stream}
        final = stream.current_completion_snapshot  # a final one is refused where the length ended it
    assert "content.delta" in kinds and final.choices[0].message.content == whole.choices[0].message.content
    assert final.usage == whole.usage
    parts = list(client.completions.create(model=NAME, prompt="ab", max_tokens=6, stream=True, temperature=0))
    assert parts[-1].choices[0].finish_reason == "length"


class Answer(BaseModel):
    """What the model has to say."""

    yes: bool
    number: int


def test_structured_output(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": CHAT, "temperature": 0, "max_tokens": 200}
    found = client.chat.completions.parse(**asked, response_format=Answer)
    content = found.choices[0].message.content
    assert content is not None and found.choices[0].finish_reason == "stop"
    assert found.choices[0].message.parsed == Answer(**json.loads(content))


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    (
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "no model 'other'"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"spectulation": {}}}, openai.BadRequestError, "spectulation"),
    ),
)
def test_errors_become_its_exceptions(client: openai.OpenAI, body: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        client.chat.completions.create(**{"model": NAME, "messages": CHAT, "max_tokens": 2, **body})


def test_keys_and_retries() -> None:
    """It comes back by itself where the server says 503 with the time to come back."""
    with running(make_decoder(), key=KEY, max_rows=1, max_queued=0) as server:
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=5)
        asked: Any = {"model": NAME, "prompt": "abc", "max_tokens": 400, "extra_body": OURS}
        with client.completions.create(**asked, stream=True) as stream:
            next(iter(stream))
            with pytest.raises(openai.InternalServerError) as refused:
                client.with_options(max_retries=0).completions.create(**asked)
            assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"] == "1"
        assert client.completions.create(**{**asked, "max_tokens": 3}).usage
        assert server.is_idle()
