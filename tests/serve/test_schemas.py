"""Bodies with a million mistakes: the first is complained of, as if it were the only one."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from forerun.serve.errors import from_validation
from forerun.serve.schemas import ChatBody, CompletionBody, Generation

ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
MANY = 5000
WRONG: tuple[tuple[type[Generation], Any, str], ...] = (
    (CompletionBody, lambda n: {"prompt": [{}] * n}, "prompt.0"),
    (CompletionBody, lambda n: {"prompt": [[-1]] * n}, "prompt.0.0"),
    (CompletionBody, lambda n: {"prompt": [[5], *([["x"]] * n)]}, "prompt.1.0"),
    (CompletionBody, lambda n: {"prompt": "x", **{f"field{i}": 1 for i in range(n)}}, "field0"),
    (CompletionBody, lambda n: {"prompt": "x", "logit_bias": {f"key{i}": 1 for i in range(n)}}, "logit_bias.key0"),
    (CompletionBody, lambda n: {"prompt": "x", "logit_bias": {f"{i}": 101 for i in range(n)}}, "logit_bias.0"),
    (CompletionBody, lambda n: {"prompt": "x", "logit_bias": {f"{i}": True for i in range(n)}}, "logit_bias.0"),
    (ChatBody, lambda n: {"messages": [1] * n}, "messages.0"),
    (ChatBody, lambda n: {"messages": [{"role": "user", "content": [1] * n}]}, "messages.0.content.0"),
    (ChatBody, lambda n: {"messages": [{"role": "assistant", "tool_calls": [1] * n}]}, "messages.0.tool_calls.0"),
    (ChatBody, lambda n: {**ASKED, "prediction": {"type": "content", "content": [1] * n}}, "prediction.content.0"),
    (ChatBody, lambda n: {**ASKED, "speculation": {f"field{i}": 1 for i in range(n)}}, "speculation.field0"),
)  # fmt: skip


@pytest.mark.parametrize(("body", "wrong", "param"), WRONG, ids=[f"{each[2]}-{i}" for i, each in enumerate(WRONG)])
def test_complaints_do_not_grow_with_the_mistakes(body: type[Generation], wrong: Any, param: str) -> None:
    """All complaints together are made in the event loop, before anybody else is served."""
    errors = []
    for number in (2, MANY):
        with pytest.raises(ValidationError) as caught:
            body.model_validate(wrong(number))
        errors.append(caught.value.errors())
    one, many = (from_validation(each) for each in errors)
    assert len(errors[1]) <= 8 and one.param == param and (many.param, many.message) == (one.param, one.message)


def test_many_biases_are_no_mistake() -> None:
    biases = {str(token): -1.5 for token in range(MANY)}
    assert CompletionBody(prompt="x", logit_bias=biases).logit_bias == biases
