"""Answers in OpenAI's shapes: whole and streamed, with log-probabilities, usage and origins that agree."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from serve.events import events
from serve.serving import NAME, Server, make_decoder
from support.folders import byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPT = "the sea the sea the sea"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def chat_body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello hello"}], "max_tokens": 12, **GREEDY, **more}


def test_a_chat_is_the_template_continued(server: Server) -> None:
    answer = server.chat("hello hello", max_completion_tokens=12, **GREEDY)
    chat = [{"role": "user", "content": "hello hello"}]
    done = make_decoder().generate(chat, max_new_tokens=12, eos_token_id=[])
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": done.texts[0], "refusal": None}
    assert choice["finish_reason"] == "length" and answer["object"] == "chat.completion" and answer["model"] == NAME
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(
        TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    )


def test_parts_and_developers_are_texts_and_systems(server: Server) -> None:
    def ids(role: str, content: Any) -> list[int]:
        answer = server.post("/tokenize", messages=[{"role": role, "content": content}])
        assert answer.status_code == 200, answer.text
        return answer.json()["tokens"]

    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    assert ids("developer", parts) == ids("system", "be brief") != ids("user", "be brief")


def listed(entries: list[Any]) -> list[Any]:
    """Tokens with their log-probabilities, whose last bits depend on whether both choices began in one pass."""
    every = [each for entry in entries for each in (entry, *entry["top_logprobs"])]
    return [{name: each[name] for name in ("token", "bytes", "logprob")} for each in every]


def test_a_stream_says_what_the_whole_answer_says(server: Server) -> None:
    body = chat_body(n=2, seed=3, temperature=0.9, logprobs=True, top_logprobs=2, speculation={"origins": True})
    whole = server.post("/v1/chat/completions", **body).json()
    stream = list(events(server, "/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}))
    assert stream[-1]["choices"] == [] and stream[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in stream[:-1])
    assert len({event["id"] for event in stream}) == 1 and {event["object"] for event in stream} == {
        "chat.completion.chunk"
    }
    for index, choice in enumerate(whole["choices"]):
        parts = [part for event in stream for part in event["choices"] if part["index"] == index]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        assert parts[-1]["finish_reason"]
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert len(logprobs) == 12
        for streamed, whole_one in zip(listed(logprobs), listed(choice["logprobs"]["content"]), strict=True):
            assert streamed == {**whole_one, "logprob": pytest.approx(whole_one["logprob"], abs=1e-5)}
        origins = [entry for part in parts for entry in part.get("origins", ())]
        assert origins == choice["origins"]
        assert "".join(entry["text"] for entry in origins) == choice["message"]["content"]


def test_origins_and_usage_agree(server: Server) -> None:
    answer = server.complete(PROMPT, max_tokens=60, speculation={"origins": True}, **GREEDY)
    origins = [entry["origin"] for entry in answer["choices"][0]["origins"]]
    (counts,) = answer["usage"]["speculation"]
    accepted = origins.count("accepted")
    assert set(origins) <= {"accepted", "correction", "bonus", "plain"} and accepted and origins.count("plain")
    assert counts["num_accepted_tokens"] == accepted == sum(counts["num_accepted_tokens_per_pos"])
    assert counts["rounds"] == 60 - accepted
    nothing = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    assert answer["usage"]["completion_tokens_details"] == nothing, "drafts of ours are no prediction of the client's"


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("path", ("/v1/completions", "/v1/chat/completions"))
def test_stop_strings_end_the_text_and_stay_out_of_it(server: Server, path: str) -> None:
    is_chat = path.endswith("chat/completions")
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}

    def call(**more: Any) -> Any:
        return server.post(path, **prompt, max_tokens=40, **GREEDY, **more).json()

    def text_of(choice: Any) -> str:
        return choice["message"]["content"] if is_chat else choice["text"]

    whole = text_of(call()["choices"][0])
    stop = next(whole[i : i + 2] for i in range(8, 30) if "\ufffd" not in whole[i : i + 2])
    answer = call(stop=[stop, "never there"])
    assert text_of(answer["choices"][0]) == whole[: whole.find(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] < 40
    body = {**prompt, "max_tokens": 40, **GREEDY, "stop": stop}
    parts = [part for event in events(server, path, body) for part in event["choices"]]
    texts = [part["delta"].get("content", "") if is_chat else part["text"] for part in parts]
    assert "".join(texts) == whole[: whole.find(stop)] and parts[-1]["finish_reason"] == "stop"


def test_no_stop_string_ends_the_text_before_the_least_number_of_tokens(server: Server) -> None:
    bias = {"logit_bias": {str(TOKENIZER("x").input_ids[0]): 100.0}, **GREEDY}
    answer = server.complete(PROMPT, max_tokens=9, min_tokens=5, stop="x", **bias)
    assert answer["choices"][0]["text"] == "xxxxx" and answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 6
    body = {"prompt": PROMPT, "max_tokens": 9, "min_tokens": 9, "stop": ["xx"], **bias}
    parts = [part for event in events(server, "/v1/completions", body) for part in event["choices"]]
    assert "".join(part["text"] for part in parts) == "x" * 9 and parts[-1]["finish_reason"] == "length"


def test_a_stop_string_may_not_begin_in_the_prompt(server: Server) -> None:
    whole = server.complete(PROMPT, max_tokens=6, **GREEDY)["choices"][0]["text"]
    answer = server.complete(PROMPT, max_tokens=6, stop=PROMPT[-1] + whole[0], **GREEDY)
    assert answer["choices"][0]["text"] == whole


def test_end_tokens(server: Server) -> None:
    tokens = server.post("/tokenize", prompt="x").json()["tokens"]
    bias = {"0": 100.0}
    ended = server.complete(tokens, max_tokens=9, temperature=0, logit_bias=bias, logprobs=0)
    assert ended["choices"][0]["finish_reason"] == "stop" and ended["choices"][0]["text"] == ""
    assert ended["usage"]["completion_tokens"] == 1 and ended["choices"][0]["logprobs"]["tokens"] == ["<|end|>"]
    chat = server.chat("x", max_tokens=9, temperature=0, logit_bias=bias, logprobs=True)
    assert chat["choices"][0]["logprobs"]["content"] == [], "as OpenAI's chats tell it"
    later = server.complete(tokens, max_tokens=9, temperature=0, logit_bias=bias, min_tokens=3)
    assert later["usage"]["completion_tokens"] == 4
    assert server.complete(tokens, max_tokens=9, logit_bias=bias, **GREEDY)["usage"]["completion_tokens"] == 9
    stops = server.complete(tokens, max_tokens=9, temperature=0, logit_bias={"40": 100.0}, stop_token_ids=[40])
    assert stops["choices"][0]["text"] == TOKENIZER.decode([40]) and stops["usage"]["completion_tokens"] == 1


def test_there_are_as_many_log_probabilities_as_tokens(server: Server) -> None:
    """Wherever the text is cut, in the middle of a character too: evaluations count places in the list."""
    prompt = len(TOKENIZER(PROMPT).input_ids)
    for number in range(1, 9):
        (choice,) = server.complete(PROMPT, max_tokens=number, echo=True, logprobs=1, **GREEDY)["choices"]
        found = choice["logprobs"]
        sizes = {len(found[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        assert sizes == {prompt + number} and None not in found["token_logprobs"][1:]


def test_log_probabilities_are_the_models(server: Server) -> None:
    """Of new tokens and, with echo, of the prompt: against one forward of the model over the whole text."""
    answer = server.complete(PROMPT, max_tokens=10, echo=True, logprobs=2, **GREEDY)
    (choice,) = answer["choices"]
    found = choice["logprobs"]
    ids = [
        *TOKENIZER(PROMPT).input_ids,
        *make_decoder().generate(PROMPT, max_new_tokens=10, eos_token_id=[]).new_tokens[0],
    ]
    laws = torch.log_softmax(make_decoder().target(torch.tensor([ids])).logits[0].double(), dim=-1)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert len(found["tokens"]) == len(ids) == len(found["text_offset"])
    for place in range(1, len(ids)):
        assert math.isclose(found["token_logprobs"][place], laws[place - 1, ids[place]].item(), abs_tol=2e-4)
        assert math.isclose(max(found["top_logprobs"][place].values()), laws[place - 1].max().item(), abs_tol=2e-4)
    assert choice["text"].startswith(PROMPT) and found["text_offset"][len(PROMPT)] == len(PROMPT)
    only = server.complete(PROMPT, max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert only["text"] == PROMPT and only["finish_reason"] == "length"
    assert only["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(PROMPT)]


def test_several_prompts_with_several_sequences(server: Server) -> None:
    prompts = [PROMPT, TOKENIZER("abcabc").input_ids]
    ids = [TOKENIZER(PROMPT).input_ids, prompts[1]]
    body = {"max_tokens": 7, "n": 2, "seed": 4, "temperature": 0.9, "ignore_eos": True}
    answer = server.complete(ids, **body)
    done = make_decoder().generate(
        ids, max_new_tokens=7, num_return_sequences=2, seed=4, temperature=0.9, eos_token_id=[]
    )
    assert [choice["text"] for choice in answer["choices"]] == done.texts
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) and answer["usage"]["completion_tokens"] == 28


def test_the_best_of_several(server: Server) -> None:
    body = {"max_tokens": 6, "seed": 4, "temperature": 1.0, "ignore_eos": True}
    done = make_decoder().generate(
        PROMPT, max_new_tokens=6, num_return_sequences=5, seed=4, temperature=1.0, eos_token_id=[]
    )
    answer = server.complete(PROMPT, n=2, best_of=5, **body)
    assert [choice["text"] for choice in answer["choices"]] == [done.texts[row] for row in done.ranking[0][:2]]
    assert answer["usage"]["completion_tokens"] == 30, "all that were decoded count"
    assert [each["index"] for each in answer["usage"]["speculation"]] == [0, 1, None, None, None]


def test_tokens_and_texts(server: Server) -> None:
    tokens = server.post("/tokenize", prompt="Größe").json()
    assert tokens["tokens"] == TOKENIZER("Größe").input_ids and tokens["count"] == 7
    assert server.post("/detokenize", tokens=[*tokens["tokens"], 0]).json() == {"prompt": "Größe<|end|>"}


def test_the_model_is_listed(server: Server) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card["id"] == NAME and card["max_model_len"] == 2048 and card["drafter"] == "lookup"
    assert server.client.get(f"/v1/models/{NAME}").json() == card
    assert server.client.get("/v1/models/other").status_code == 404
    assert server.client.get("/health").json() == server.client.get("/ready").json() == {"status": "ok"}
    assert server.client.head("/health").status_code == server.client.head("/ready").status_code == 200
    assert "version" in server.client.get("/version").json()
