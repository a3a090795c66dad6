"""--tree and --draft-top-k reach the decoder, and what cannot be done is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cli.command import Command
from forerun.cli.pair import make_tree, shaped
from forerun.drafters import Chain, DraftModel, PromptLookup, RandomDraft, TopK, Tree
from forerun.errors import InvalidArgument
from support.tiny import tiny_model

SHORT = ("--no-chat", "--json", "--max-new-tokens", "8", "--policy", "3")


def test_generate(generate: Command, target: str, draft: str) -> None:
    """The same text as without a tree, with more tokens drafted than it is deep."""
    documents = []
    for more in ((), ("--tree", "6x2"), ("--tree", "6x2", "--draft-top-k", "5")):
        result = generate("-m", target, "-d", draft, *SHORT, *more, "hello hello")
        assert result.exit_code == 0, result.output
        documents.append(json.loads(result.stdout))
    texts = [document["prompts"][0]["texts"][0] for document in documents]
    assert texts[0]["token_ids"] == texts[1]["token_ids"] == texts[2]["token_ids"]
    assert [document["tree"] for document in documents] == [None, "6x2", "6x2"]
    assert documents[2]["draft_top_k"] == 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--tree", "3x"), "NODES"),
        (("--tree", "6:best"), "NODES"),
        (("--tree", "6", "-d", "lookup"), "PromptLookup"),
        (("--tree", "6", "-d", "none"), "need a drafter"),
        (("--tree", "6", "-d", "early:1", "--rule", "block"), "--rule 'token'"),
    ],
)
def test_refusals(generate: Command, target: str, options: tuple[str, ...], complaint: str) -> None:
    result = generate("-m", target, *SHORT, *options, "hello")
    assert result.exit_code != 0
    assert complaint in result.output


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (None, None),
        ("12", {"nodes": 12}),
        ("12x3", {"nodes": 12, "width": 3}),
        ("12:sampled", {"nodes": 12, "siblings": "sampled"}),
        ("8x2:top", {"nodes": 8, "width": 2, "siblings": "top"}),
    ],
)
def test_what_the_option_means(text: str | None, settings: dict[str, Any] | None) -> None:
    assert make_tree(text) == settings


def test_only_parts_that_can_branch_are_wrapped() -> None:
    chain = Chain(PromptLookup(), DraftModel(tiny_model("llama")))
    made = shaped(chain, {"nodes": 4}, 9)
    assert isinstance(made, TopK) and made.k == 9
    assert [type(part) for part in made.inner.parts] == [PromptLookup, Tree]
    assert made.makes_trees and made.is_mixed
    assert shaped(None, None, None) is None
    with pytest.raises(InvalidArgument):
        shaped(RandomDraft(), {"nodes": 4}, None)
