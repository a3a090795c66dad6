"""From the fields of a body to requests of the engine. What cannot be honoured is refused by the field's name."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from forerun.config import SamplingParams
from forerun.engine import Request
from forerun.errors import ForerunError
from forerun.serve.call_formats import Tools, asked_tools
from forerun.serve.errors import ApiError, refused, shortened
from forerun.serve.grammar import Grammar, asked_grammar
from forerun.serve.model import ServedModel
from forerun.serve.schemas import ChatBody, CompletionBody, EarlierCall, Generation, Message, TextPart, Tool

DEFAULT_COMPLETION = 16  # tokens, as in OpenAI's API
ENDLESS_CHAT = 4096  # tokens of an answer where neither the client nor the model's context says how many
SEEDS = 2**63


def num_sequences(body: CompletionBody) -> int:
    """How many are asked for, known before anything is made for one of them."""
    return len(_listed_prompts(body)) * (body.best_of or body.n or 1)


def completion_prompts(body: CompletionBody, model: ServedModel) -> list[list[int]]:
    """Token ids of each prompt."""
    listed = _listed_prompts(body)
    prompts = [model.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in listed]
    if not prompts or not all(prompts):
        raise refused("prompt", "must not be empty: give at least one token")
    for prompt in prompts:
        model.check_tokens("prompt", prompt)
    return prompts


def _listed_prompts(body: CompletionBody) -> list[Any]:
    prompts: list[Any] = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def chat_prompt(messages: Sequence[Message], tools: Sequence[Tool] | None, model: ServedModel) -> list[int]:
    """Token ids of a chat, up to where the answer begins."""
    described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools or ()]
    ids = model.encode_chat([_turn(message) for message in messages], described or None)
    if not ids:
        raise refused("messages", "the chat template makes no text of them")
    return ids


def completion_requests(body: CompletionBody, prompts: Sequence[Sequence[int]], model: ServedModel) -> list[Request]:
    """One for each sequence, prompt by prompt; where nothing is to be decoded (`max_tokens` 0), one for each prompt."""
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise refused("best_of", f"must be at least n, which is {n}")
    if best_of > n and body.stream:
        raise refused("best_of", "what is best is known at the end: leave out stream, or best_of")
    if body.max_tokens == 0:
        _check_only_echo(body)
        for prompt in prompts:
            _check_fits(prompt, model)
        return _requests(body, prompts, [1] * len(prompts), 1, body.logprobs, model)
    logprobs = body.logprobs if body.logprobs is not None or best_of == n else 0
    limit = DEFAULT_COMPLETION if body.max_tokens is None else body.max_tokens
    budgets = [_budget(prompt, limit, model, is_default=body.max_tokens is None) for prompt in prompts]
    return _requests(body, prompts, budgets, best_of, logprobs, model)


def _check_only_echo(body: CompletionBody) -> None:
    if not body.echo:
        raise refused("max_tokens", "must be at least 1, or 0 with echo: true")
    for name in ("n", "best_of"):
        if (getattr(body, name) or 1) > 1:
            raise refused(name, "with max_tokens 0 there is one text for each prompt: leave it out")
    if body.min_tokens:
        raise refused("min_tokens", "must not be above max_tokens, which is 0")


def chat_tools(body: ChatBody, model: ServedModel) -> Tools | None:
    """What the answer may call."""
    return asked_tools(body, model.call_format if body.tools else None, model.tokenizer)


def chat_requests(body: ChatBody, prompt: Sequence[int], tools: Tools | None, model: ServedModel) -> list[Request]:
    """One for each choice."""
    limit = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return _requests(body, [prompt], [_budget(prompt, limit, model)], body.n or 1, logprobs, model, tools)


def _requests(
    body: Generation,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    copies: int,
    logprobs: int | None,
    model: ServedModel,
    tools: Tools | None = None,
) -> list[Request]:
    """As `decoder.generate` makes them for the same call, so that texts are the same."""
    if (body.min_tokens or 0) > (most := min(budgets)):
        reason = f"{body.min_tokens} is above the {most} tokens that the answer may have: lower it, or raise max_tokens"
        raise refused("min_tokens", reason)
    seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    stops = stop_strings(body)
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else model.stop_ids)
    model.check_tokens("stop_token_ids", body.stop_token_ids or ())
    params, max_draft_tokens = _params(body, model), _max_draft_tokens(body, model)
    grammar, prediction = _grammar(body, tools, model), _prediction(body, model)
    try:
        return [
            Request(
                prompt=prompt,
                max_new_tokens=budget,
                params=params,
                seed=seed,
                request_id=place * copies + copy,
                stop_ids=stop_ids,
                stop_strings=stops,
                stops_in_prompt=False,
                min_new_tokens=body.min_tokens or 0,
                stops_early=False,
                processors=() if grammar is None else (grammar.processor(len(prompt)),),
                logprobs=logprobs,
                max_draft_tokens=max_draft_tokens,
                prediction=prediction,
            )
            for place, (prompt, budget) in enumerate(zip(map(tuple, prompts), budgets, strict=True))
            for copy in range(copies)
        ]
    except ForerunError as error:
        raise ApiError(400, str(error)) from error


def stop_strings(body: Generation) -> tuple[str, ...]:
    return (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())


def _grammar(body: Generation, tools: Tools | None, model: ServedModel) -> Grammar | None:
    asked = asked_grammar(body)
    if tools is not None:
        if asked is not None:
            raise refused(asked[0], "tools say what the answer may be already: leave it out, or say tool_choice: none")
        if body.ignore_eos:
            raise refused("ignore_eos", "an answer with calls ends where its last call ends: leave it out")
        asked = "tools", tools.grammar(model.stop_ids)
    if asked is None:
        return None
    param, text = asked
    if not model.stop_ids:
        raise refused(param, "this model has no end token, so no text of it is ever complete")
    return Grammar(text, param, model.grammar_tokenizer, model.stop_ids)


def _turn(message: Message) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(message.content or "")}
    if message.tool_calls is not None:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    optional = {"name": message.name, "tool_call_id": message.tool_call_id}
    return turn | {name: value for name, value in optional.items() if value is not None}


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _call(call: EarlierCall) -> dict[str, Any]:
    """As templates read it: with arguments as an object, not as text."""
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        reason = f"the arguments of the call {shortened(call.id)!r} must be a JSON object, written as text"
        raise refused("messages", reason)
    return {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}


def _check_fits(prompt: Sequence[int], model: ServedModel) -> None:
    """For a prompt that nothing follows: it may fill the context."""
    context = model.context_length
    if context is not None and len(prompt) > context:
        raise ApiError(
            400, f"this server holds {context} tokens a request; the prompt has {len(prompt)}",
            param="prompt", code="context_length_exceeded",
        )  # fmt: skip


def _budget(prompt: Sequence[int], limit: int | None, model: ServedModel, is_default: bool = False) -> int:
    """New tokens: what was asked for, if the context holds it; where nothing was, what the context leaves."""
    context = model.context_length
    if context is None:
        return ENDLESS_CHAT if limit is None else limit
    room = context - len(prompt)
    if room < 1 or (limit is not None and limit > room and not is_default):
        asked = "" if limit is None else f" and {limit} are asked for"
        raise ApiError(
            400, f"this server holds {context} tokens a request; the prompt has {len(prompt)}{asked}",
            param="prompt" if room < 1 else "max_tokens", code="context_length_exceeded",
        )  # fmt: skip
    return room if limit is None else min(limit, room)


def _params(body: Generation, model: ServedModel) -> SamplingParams:
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    model.check_tokens("logit_bias", list(bias))
    optional = {
        "top_p": body.top_p,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    try:
        return SamplingParams(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k if (body.top_k or 0) > 0 else None,
            logit_bias=bias,
            **{name: value for name, value in optional.items() if value is not None},
        )
    except ForerunError as error:
        raise ApiError(400, str(error)) from error


def _prediction(body: Generation, model: ServedModel) -> tuple[int, ...]:
    """Token ids of what the answer is expected to be, as far as the context could hold it."""
    if body.prediction is None:
        return ()
    if not model.takes_predictions:
        raise refused(
            "prediction",
            f"this server drafts with {model.drafter_name!r}, which takes none: start it with --draft lookup,NAME and "
            "without --tree",
            "not_offered",
        )
    if (asked := body.speculation) is not None and (asked.enabled is False or asked.max_draft_tokens == 0):
        off = "enabled is false" if asked.enabled is False else "max_draft_tokens is 0"
        raise refused("prediction", f"has no use where speculation.{off}: leave one of them out")
    return tuple(model.encode(_text(body.prediction.content), add_special_tokens=False)[: model.context_length])


def _max_draft_tokens(body: Generation, model: ServedModel) -> int | None:
    if (asked := body.speculation) is None:
        return None
    model.check_drafter(asked.drafter)
    if asked.enabled is False:
        if asked.max_draft_tokens:
            raise refused("speculation.max_draft_tokens", "has no use where enabled is false: leave it out")
        return 0
    return asked.max_draft_tokens
