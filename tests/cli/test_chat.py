"""`forerun chat`: turns, commands, a cache that is kept, and a context that fills up."""

from __future__ import annotations

import copy
import io
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.command import Command
from forerun.cli import chat as module
from forerun.cli.console import err_console, out_console
from forerun.cli.conversation import Conversation
from forerun.cli.pair import LoadedPair
from forerun.errors import InvalidArgument
from forerun.inputs import tokenize_rendered
from support.folders import VOCAB, byte_tokenizer, save
from support.tiny import tiny_model

SHORT = ("--max-new-tokens", "8", "-d", "none")


def session(
    keywords: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, **config: Any
) -> module.Session:
    model = tiny_model("llama", vocab=VOCAB, **config)
    loaded = LoadedPair(model, byte_tokenizer(), None, settings or {})
    return module.Session(loaded, keywords or {"max_new_tokens": 8}, None, out_console(), err_console())


def test_every_line_of_a_pipe_is_a_turn(chat: Command, target: str) -> None:
    result = chat("-m", target, "-q", *SHORT, stdin="hello\n\nhow are you\n")
    assert result.exit_code == 0
    first = chat("-m", target, "-q", *SHORT, stdin="hello\n").stdout
    assert result.stdout.startswith(first)
    assert len(result.stdout) > len(first)
    assert result.stderr == ""


def test_the_second_answer_knows_the_first_turn(chat: Command, target: str) -> None:
    with_past = chat("-m", target, "-q", *SHORT, stdin="hello\nhow are you\n").stdout
    first, alone = (chat("-m", target, "-q", *SHORT, stdin=f"{text}\n").stdout for text in ("hello", "how are you"))
    assert with_past != first + alone


def test_reset_forgets(chat: Command, target: str) -> None:
    reset = chat("-m", target, "-q", *SHORT, stdin="hello\n/reset\nhow are you\n").stdout
    first, alone = (chat("-m", target, "-q", *SHORT, stdin=f"{text}\n").stdout for text in ("hello", "how are you"))
    assert reset == first + alone


def test_commands(chat: Command, target: str) -> None:
    result = chat("-m", target, *SHORT, stdin="/help\n/system\n/system be brief\nhi\n/stats\n/quit\nnot heard\n")
    told = result.stderr
    for words in ("forget the conversation", "Set it with", "starts anew", "8 in 8 rounds"):
        assert words in told
    assert result.stdout == chat("-m", target, "-q", *SHORT, "--system", "be brief", stdin="hi\n").stdout


def test_an_unknown_command_of_a_pipe_is_a_turn_without_an_answer(chat: Command, target: str) -> None:
    result = chat("-m", target, "-q", *SHORT, stdin="/etc/fstab is what?\nhello\n/sats\n")
    assert result.exit_code == 1
    answer = chat("-m", target, "-q", *SHORT, stdin="hello\n").stdout
    assert result.stdout == f"\n{answer}\n"
    assert "turn 1: no command /etc/fstab" in result.stderr and "Did you mean /stats?" in result.stderr


def test_a_pipe_that_is_no_text_is_refused(chat: Command, target: str) -> None:
    result = chat("-m", target, "-q", *SHORT, stdin=b"hello\n\xff\xfe\n")
    assert result.exit_code == 2 and "standard input is not text" in result.stderr


def test_half_of_a_character_is_no_text_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python reads other bytes where the locale is C."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a\udcff\n"))
    with pytest.raises(InvalidArgument, match="standard input is not text"):
        session().run()


@pytest.mark.parametrize("quiet", [(), ("-q",)])
def test_an_answer_that_fails_is_told_and_is_one_line(chat: Command, tmp_path: Path, quiet: tuple[str, ...]) -> None:
    model = copy.deepcopy(tiny_model("llama", vocab=VOCAB))
    with torch.no_grad():
        model.lm_head.weight[5].fill_(float("nan"))
    result = chat("-m", save(tmp_path, model), *quiet, "--max-new-tokens", "4", stdin="hello\nyou\n")
    assert result.exit_code == 1 and result.stdout == "\n\n"
    assert "turn 1: " in result.stderr and "turn 2: " in result.stderr and "NaN" in result.stderr


def test_a_byte_order_mark_is_no_part_of_a_turn(chat: Command, target: str) -> None:
    plain, marked = (
        chat("-m", target, "-q", "--max-new-tokens", "6", stdin=f"{mark}hello\n".encode()) for mark in ("", "\ufeff")
    )
    assert plain.exit_code == 0 and plain.stdout.strip() and plain.stdout == marked.stdout
    assert chat("-m", target, "-q", stdin="").exit_code == 0


def test_a_model_without_a_template_cannot_chat(chat: Command, bare: str) -> None:
    result = chat("-m", bare, stdin="hi\n")
    assert result.exit_code == 2
    assert "no chat template" in result.stderr and "`forerun generate`" in result.stderr
    assert "--no-chat" not in result.stderr  # an option that this command does not have


def test_keys_are_kept_from_turn_to_turn() -> None:
    talk = session()
    passed = [0]
    scorer = talk.decoder.engine.target
    run = scorer.body.run

    def counted(call: Any) -> Any:
        passed[0] += call.rows.num_tokens
        return run(call)

    scorer.body.run = counted  # type: ignore[method-assign]

    def read_by(line: str) -> int:
        """Tokens of the prompt that went through the model: all of them less one a round and the drafts."""
        passed[0], before = 0, talk.stats
        talk.handle(line)
        rounds = talk.stats.rounds - before.rounds
        return passed[0] - rounds - (talk.stats.num_draft_tokens - before.num_draft_tokens)

    first, second = read_by("hello there"), read_by("and again")
    question = len(
        tokenize_rendered(talk.conversation.tokenizer, "<|end|>\n<|start|>user\nand again<|end|>\n<|start|>assistant\n")
    )
    assert second <= question
    assert first > question - len("<|end|>\n")


def test_kept_keys_change_nothing() -> None:
    kept, fresh = session(), session()
    fresh.decoder.engine.prefixes.limit = 0
    for line in ("hello", "what else", "go on"):
        kept.handle(line)
        fresh.handle(line)
    assert kept.conversation.messages == fresh.conversation.messages


def test_control_c_stops_the_answer_and_not_the_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = session({"max_new_tokens": 200})
    step = talk.decoder.engine.step
    rounds = []

    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> Any:
        rounds.append(1)
        if len(rounds) == 3:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(talk.decoder.engine, "step", interrupted)
    assert talk.handle("tell me everything")
    assert len(rounds) == 3
    assert talk.handle("/stats")
    assert len(talk.conversation.messages) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_full_context_drops_the_oldest_turns(capsys: pytest.CaptureFixture[str]) -> None:
    talk = session(max_position_embeddings=128)
    for line in ("first question", "second question", "third question", "fourth question"):
        assert talk.handle(line)
    assert "turns were dropped" in capsys.readouterr().err
    assert talk.conversation.messages[0]["content"] != "first question"
    assert talk.conversation.messages[-2]["content"] == "fourth question"


def test_a_message_longer_than_the_context_is_refused_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    talk = session(max_position_embeddings=128)
    assert talk.handle("x" * 300)
    assert "send a shorter one" in " ".join(capsys.readouterr().err.split())
    assert talk.conversation.messages == []
    talk.handle("short")
    assert len(talk.conversation.messages) == 2


def test_a_message_that_is_refused_costs_no_earlier_turn() -> None:
    talk = session(max_position_embeddings=128)
    talk.handle("first")
    before = list(talk.conversation.messages)
    talk.handle("x" * 300)
    assert talk.conversation.messages == before


@pytest.mark.slow
def test_a_cache_smaller_than_the_context_is_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """What is kept of the conversation, and how long an answer may be, follow from it."""
    talk = session({"max_new_tokens": 100}, settings={"cache_tokens": 128})
    for line in ("first question", "second question", "third question", "fourth question"):
        assert talk.handle(line)
        assert talk.conversation.messages[-2]["content"] == line
    assert "turns were dropped" in capsys.readouterr().err and not talk.refused
    talk.handle("x" * 300)
    assert talk.refused == 1 and "context ends at 128" in " ".join(capsys.readouterr().err.split())


def test_a_turn_that_the_template_refuses_costs_that_turn_alone(capsys: pytest.CaptureFixture[str]) -> None:
    talk = session()
    template = talk.conversation.tokenizer.chat_template
    talk.handle("first")
    before = list(talk.conversation.messages)
    talk.conversation.tokenizer.chat_template = "{{ raise_exception('not so') }}"
    assert talk.handle("second") and talk.refused == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "messages: the tokenizer's chat template refuses them: not so" in told
    talk.conversation.tokenizer.chat_template = template
    assert talk.conversation.messages == before and talk.handle("third") and len(talk.conversation.messages) == 4


class TestConversation:
    def test_tokens_of_an_answer_stay_as_they_were(self) -> None:
        talk = Conversation(byte_tokenizer())
        prompt = talk.ask("hi")
        talk.answer([100, 101, 0])
        assert talk.ask("more")[: len(prompt) + 3] == [*prompt, 100, 101, 0]

    def test_the_prompt_is_what_the_template_says(self) -> None:
        tokenizer = byte_tokenizer()
        talk = Conversation(tokenizer, "be kind")
        talk.ask("hi")
        talk.answer([*tokenize_rendered(tokenizer, "hello"), 0])
        text = tokenizer.decode(talk.ask("more"))
        assert text == (
            "<|start|>system\nbe kind<|end|>\n<|start|>user\nhi<|end|>\n<|start|>assistant\nhello<|end|>\n"
            "<|start|>user\nmore<|end|>\n<|start|>assistant\n"
        )

    def test_nothing_fits(self) -> None:
        talk = Conversation(byte_tokenizer())
        talk.ask("a long question")
        with pytest.raises(InvalidArgument, match="context ends at 10"):
            talk.fit(10, 4)
