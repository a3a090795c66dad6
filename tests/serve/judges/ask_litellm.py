"""Run in litellm's environment: chat, stream, log-probabilities and errors over the address in the first argument."""

import asyncio
import sys

import litellm

URL, NAME = sys.argv[1], sys.argv[2]
SETTINGS = {
    "model": f"openai/{NAME}", "api_base": f"{URL}/v1", "api_key": "any", "num_retries": 0, "max_tokens": 12,
    "messages": [{"role": "user", "content": "the sea the sea"}], "temperature": 0,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip

whole = litellm.completion(**SETTINGS, logprobs=True, top_logprobs=2)
text = whole.choices[0].message.content
assert whole.usage.completion_tokens == 12 and whole.choices[0].finish_reason == "length", whole
assert len(whole.choices[0].logprobs.content) == 12

parts = litellm.completion(**SETTINGS, stream=True, stream_options={"include_usage": True})
assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text


async def many() -> list:
    return await asyncio.gather(*(litellm.acompletion(**SETTINGS) for _ in range(8)))


assert {answer.choices[0].message.content for answer in asyncio.run(many())} == {text}

for body, kind in (
    ({"temperature": -3}, litellm.BadRequestError),
    ({"model": "openai/other"}, litellm.NotFoundError),
):
    try:
        litellm.completion(**{**SETTINGS, **body})
    except kind:
        continue
    raise AssertionError(f"{body} was answered")
sys.stdout.write("litellm is content\n")
