"""`forerun generate`: what a person, a pipe and a program get."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from cli.command import Command
from forerun.cli.console import TextOut, legend
from forerun.cli.main import cli
from forerun.drafters import NgramTable
from forerun.engine import Engine
from forerun.types import Origin
from support.clocks import ErraticClock
from support.folders import VOCAB, save
from support.tiny import plain_greedy, tiny_model

SHORT = ("--max-new-tokens", "12")


def document(output: str) -> dict[str, Any]:
    found = json.loads(output)
    assert isinstance(found, dict)
    return found


def test_the_text_is_that_of_plain_decoding(generate: Command, target: str) -> None:
    result = generate("-m", target, "--no-chat", "--json", *SHORT, "hello hello")
    entry = document(result.stdout)["prompts"][0]["texts"][0]
    prompt = [2 + sorted_alphabet().index(c) for c in "helloĠhello"]
    assert entry["token_ids"] == plain_greedy(tiny_model("llama", vocab=VOCAB), prompt, 12)
    assert entry["finish_reason"] == "length"
    assert [document(result.stdout)[name] for name in ("model", "draft", "policy", "rule")] == [
        target,
        "auto",
        "auto",
        "token",
    ]
    assert len(entry["origins"]) == 12
    plain = document(generate("-m", target, "--no-chat", "--json", *SHORT, "--draft", "none", "hello hello").stdout)
    assert plain["prompts"][0]["texts"][0]["origins"] == ["plain"] * 12


def sorted_alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def test_a_seed_gives_the_same_text_whatever_the_clock_says(
    generate: Command, target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths of drafts decide which random numbers meet which token."""

    def text(clock: int) -> str:
        monkeypatch.setitem(Engine.__init__.__kwdefaults__, "clock", ErraticClock(clock))
        result = generate("-m", target, "-d", draft, "-t", "1", "--seed", "7", "--max-new-tokens", "30", "-q", "hello")
        assert result.exit_code == 0, result.output
        return result.stdout

    assert len({text(clock) for clock in range(3)}) == 1


def test_only_the_text_goes_to_a_pipe(generate: Command, target: str) -> None:
    result = generate("-m", target, *SHORT, "hello")
    text = document(generate("-m", target, "--json", *SHORT, "hello").stdout)["prompts"][0]["texts"][0]["text"]
    assert result.exit_code == 0
    assert result.stdout == text + "\n"
    assert "\x1b" not in result.output
    assert "tokens per second" in result.stderr


def test_quiet_says_nothing_else(generate: Command, target: str) -> None:
    assert generate("-m", target, "-q", *SHORT, "hello").stderr == ""


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("drafter", ["lookup", "none", "random", "early:1", "model", "lookup,model"])
def test_every_drafter_gives_the_same_text(generate: Command, target: str, draft: str, drafter: str) -> None:
    plain = generate("-m", target, "-q", "-d", "none", *SHORT, "hello hello")
    text = generate("-m", target, "-q", "-d", drafter.replace("model", draft), "--policy", "3", *SHORT, "hello hello")
    assert text.exit_code == 0
    assert text.stdout == plain.stdout


def test_a_table_of_ngrams_drafts(generate: Command, target: str, tmp_path: Path) -> None:
    NgramTable.count([[5, 6, 7, 8] * 9], order=2, vocab_size=VOCAB).save(tmp_path / "table")
    arguments = ("-m", target, "-d", f"ngram:{tmp_path / 'table'}", "--policy", "2", "--json", *SHORT, "hello")
    assert document(generate(*arguments).stdout)["statistics"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("policy", ["auto", "0", "5", "hf", "bass"])
def test_every_policy_runs(generate: Command, target: str, policy: str) -> None:
    assert generate("-m", target, "--policy", policy, *SHORT, "a b a b").exit_code == 0


def test_many_prompts_from_everywhere(generate: Command, target: str, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("from a file\n\nanother\n", encoding="utf-8")
    found = document(generate("-m", target, "--json", *SHORT, "first", "-", "-f", str(lines), stdin="piped\n").stdout)
    assert [entry["prompt"] for entry in found["prompts"]] == ["first", "piped\n", "from a file", "another"]


def test_json_lines(generate: Command, target: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "z"}]
    entries: list[dict[str, Any]] = [{"prompt": "a"}, {"text": "b"}, {"turns": ["c", "d"]}, {"turns": talk}]
    file.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    result = generate("-m", target, "--json", *SHORT, "-f", str(file))
    assert [entry["prompt"] for entry in document(result.stdout)["prompts"]] == ["a", "b", "c", talk]
    assert "only the first is used" in result.stderr


def test_a_pipe_alone_is_the_prompt(generate: Command, target: str) -> None:
    result = generate("-m", target, "--json", *SHORT, stdin="through a pipe")
    assert document(result.stdout)["prompts"][0]["prompt"] == "through a pipe"


def test_copies_are_ranked(generate: Command, target: str) -> None:
    found = document(generate("-m", target, "--json", "--n", "4", "-t", "1", "--seed", "3", *SHORT, "hi").stdout)
    scores = [entry["mean_logprob"] for entry in found["prompts"][0]["texts"]]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) > 1


def test_a_seed_repeats_the_text(generate: Command, target: str) -> None:
    texts = [generate("-m", target, "-q", "-t", "1", "--seed", str(seed), *SHORT, "hi").stdout for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_settings_reach_the_decoder(generate: Command, target: str) -> None:
    arguments = ["--top-k", "5", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--seed", "7"]
    arguments += ["--presence-penalty", "0.5", "--frequency-penalty", "0.25", "--logit-bias", "7=-inf", "--stop", "q"]
    entry = document(generate("-m", target, "--json", *SHORT, *arguments, "hi").stdout)["prompts"][0]["texts"][0]
    wanted = {
        "temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "logit_bias": {"7": "-inf"}, "seed": 7, "max_new_tokens": 12, "stop_strings": ["q"],
    }  # fmt: skip
    assert {name: entry["parameters"][name] for name in wanted} == wanted
    assert 7 not in entry["token_ids"]


def test_the_system_message_changes_the_prompt(generate: Command, target: str) -> None:
    one, other = (
        generate("-m", target, "-q", *SHORT, "--system", text, "hi").stdout for text in ("be kind", "be rude")
    )
    assert one != other


@pytest.mark.quick("extra0")
@pytest.mark.parametrize("extra", [(), ("-t", "1", "--seed", "1", "--n", "2"), ("--logit-bias", "9=3", "--stop", "zz")])
def test_compare_times_three_ways(generate: Command, target: str, extra: tuple[str, ...]) -> None:
    arguments = ("-m", target, "--compare", *SHORT, *extra, "hello hello", "a")
    result = generate(*arguments)
    assert result.exit_code == 0, result.output
    for words in ("model.generate", "Forerun, plain", "Forerun, drafts", "warm-up"):
        assert words in " ".join(result.stderr.split())
    found = document(generate(*arguments, "--json").stdout)["compare"]
    assert [way["tokens"] > 0 for way in found["ways"]] == [True] * 3
    if "-t" in extra:
        assert found["identical"] is None
    else:
        assert found["identical"] == {"model.generate": True, "Forerun, plain": True}


def test_compare_tells_a_different_text_from_a_tie(
    generate: Command, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli import compare

    real = compare._until_end
    monkeypatch.setattr(compare, "_until_end", lambda tokens, ends: [*real(tokens, ends)[:-1], 5])
    result = generate("-m", target, "--compare", *SHORT, "hello hello")
    assert "DIFFERENT in 1 prompts" in " ".join(result.stderr.split())


def test_a_comparison_that_is_interrupted_says_so(
    generate: Command, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forerun.cli import compare

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_transformers", interrupted)
    result = generate("-m", target, "--compare", *SHORT, "hello")
    assert result.exit_code == 130
    assert result.stdout == ""
    assert result.stderr.strip() == "Stopped by Ctrl-C: the comparison was not finished."


def test_compare_leaves_out_what_transformers_cannot_do(generate: Command, target: str) -> None:
    found = document(generate("-m", target, "--compare", "--json", "--presence-penalty", "1", *SHORT, "a").stdout)
    assert len(found["compare"]["ways"]) == 2
    assert "presence_penalty" in found["compare"]["notes"][0]


class TestFilesOfPrompts:
    """What programs put around text is no part of a prompt, and what cannot be read is named by its row."""

    def prompts(self, result: Any) -> list[str]:
        assert result.exit_code == 0, result.output
        return [entry["prompt"] for entry in document(result.stdout)["prompts"]]

    @pytest.mark.parametrize(("name", "content"), [
        ("p.txt", "\ufeffhello\r\nwor\u2028ld\r\n"),
        ("p.jsonl", '\ufeff{"prompt": "hello"}\n{"prompt": "wor\u2028ld"}\n'),
        ("p.txt", '\ufeff{"prompt": "hello"}\n{"prompt": "wor\u2028ld"}\n'), ("p", '["hello", "wor\u2028ld"]'),
        ("-", "\ufeffhello\r\nwor\u2028ld"), ("-", '\ufeff[\n {"prompt": "hello"},\n {"prompt": "wor\u2028ld"}\n]'),
    ])  # fmt: skip
    def test_marks_and_line_ends(self, generate: Command, target: str, tmp_path: Path, name: str, content: str) -> None:
        path = tmp_path / name
        if name != "-":
            path.write_bytes(content.encode())
        given = ("-f", "-" if name == "-" else str(path))
        stdin = content.encode() if name == "-" else None
        result = generate(
            "-m", target, "--json", "--max-new-tokens", "1", *given, stdin=stdin, PYTHONIOENCODING="utf-8"
        )
        assert self.prompts(result) == ["hello", "wor\u2028ld"]

    def test_a_carriage_return_in_a_line_stays(self, generate: Command, target: str, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_bytes(b"one\rtwo\n")
        short = ("-m", target, "--json", "--max-new-tokens", "1")
        for result in (
            generate(*short, "-f", str(tmp_path / "p.txt")),
            generate(*short, "-f", "-", stdin=b"one\rtwo\n"),
        ):
            assert self.prompts(result) == ["one\rtwo"]

    def test_the_mark_before_a_prompt_from_a_pipe(self, generate: Command, target: str) -> None:
        result = generate("-m", target, "--json", "--max-new-tokens", "1", "-", stdin="\ufeffhello\nyou".encode())
        assert self.prompts(result) == ["hello\nyou"]

    def test_the_row_is_named(self, generate: Command, tmp_path: Path) -> None:
        refusing = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}"
        target = save(tmp_path / "m", tiny_model("llama", vocab=VOCAB), refusing + "{{ m['content'] }}{% endfor %}")
        talk = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
        for bad, why in (({"messages": talk}, "template refuses"), ({"prompt": "half \ud83d"}, "half of a character")):
            (tmp_path / "p.jsonl").write_text('{"prompt": "good"}\n' + json.dumps(bad))
            result = generate("-m", target, "-f", str(tmp_path / "p.jsonl"))
            assert result.exit_code == 2 and "p.jsonl, line 2: " in result.stderr and why in result.stderr
        argument = generate("-m", target, "good", "half \ud83d")
        assert argument.exit_code == 2 and "prompt 2 holds half of a character" in argument.stderr


BAD = {
    "no such file": (("-f", "missing.txt"), "does not exist"),
    "unknown drafter": (("-d", "lokup", "x"), "did you mean 'lookup'"),
    "early without a number": (("-d", "early:many", "x"), "early:8"),
    "early too deep": (("-d", "early:9", "x"), "has 2 layers"),
    "table that is not there": (("-d", "ngram:nowhere", "x"), "nowhere"),
    "none in a chain": (("-d", "none,lookup", "x"), "stands alone"),
    "unknown policy": (("--policy", "clever", "x"), "auto, hf, bass"),
    "empty prompt": ((" ",), "prompt 1 is empty"),
    "bad bias": (("--logit-bias", "x", "hi"), "ID=VALUE"),
    "bad temperature": (("-t", "-1", "hi"), "temperature"),
    "greedy copies": (("--n", "3", "hi"), "all the same"),
    "system without chat": (("--no-chat", "--system", "x", "hi"), "chat template"),
    "no model": (("-m", "no/such/folder/here", "hi"), "no folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_with_a_remedy(generate: Command, target: str, name: str) -> None:
    arguments, remedy = BAD[name]
    result = generate("-m", target, *SHORT, *arguments)
    assert result.exit_code == 2, result.output
    assert remedy in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ("generate", "chat"))
@pytest.mark.parametrize(
    ("option", "value"),
    [("--temperature", "-1"), ("--top-p", "1.5"), ("--top-k", "-3"), ("--min-p", "2"), ("--repetition-penalty", "0"),
     ("--presence-penalty", "inf"), ("--logit-bias", "-5=1")],
)  # fmt: skip
def test_numbers_are_refused_before_a_model_is_looked_for(command: str, option: str, value: str) -> None:
    result = CliRunner().invoke(cli, [command, "-m", "no/such/folder/here", f"{option}={value}"], input="hi\n")
    assert result.exit_code == 2
    assert option in result.stderr or "logit_bias, a key=-5" in result.stderr
    assert "no folder" not in result.stderr


def test_no_prompt_at_all(generate: Command, target: str) -> None:
    assert "prompt 1 is empty" in generate("-m", target, stdin="").stderr


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("{broken", "not JSON"),
        ('{"query": "x"}', "none of the fields"),
        ('{"prompt": 3}', "not text"),
        ("\n", "no prompts"),
        ('{"turns": []}', "at least one"),
    ],
)
def test_a_bad_file_names_the_line(generate: Command, target: str, tmp_path: Path, text: str, remedy: str) -> None:
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    result = generate("-m", target, "-f", str(tmp_path / "p.jsonl"))
    assert result.exit_code == 2
    assert remedy in result.stderr


def test_a_model_without_a_template_continues_bare_text(generate: Command, bare: str) -> None:
    assert generate("-m", bare, *SHORT, "hi").exit_code == 0
    assert "--no-chat" in generate("-m", bare, "--chat", *SHORT, "hi").stderr


def test_help_shows_groups_and_defaults() -> None:
    output = " ".join(CliRunner().invoke(cli, ["generate", "--help"]).output.split())
    for words in (
        "Speculation (only a lossy rule",
        "[default: auto]",
        "[default: embedded]",
        "[default: auto]",
        "[default: 128",
    ):
        assert words in output


def on_a_terminal(arguments: list[str]) -> str:
    """What a person would see, escape codes and all."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "forerun", *arguments]
    variables = {**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables) as process:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 65536):
                seen += part
        except OSError:  # Linux ends a pseudo-terminal this way
            pass
        assert process.wait() == 0, seen.decode()
    os.close(ours)
    return seen.decode()


@pytest.mark.slow
def test_a_terminal_gets_colours_and_a_legend(target: str) -> None:
    speculation = ["--policy", "3", "-d", "early:1", "--max-new-tokens", "24"]
    seen = on_a_terminal(["generate", "-m", target, "--device", "cpu", *speculation, "aaaa"])
    assert "\x1b[34m" in seen or "\x1b[33m" in seen
    assert "the target's correction" in seen


@pytest.mark.parametrize(("no_color", "shown"), [(False, "\x1b[32mx␛[2J\x1b[0m"), (True, "x␛[2J")])
def test_a_terminal_may_decline_colours_and_is_never_steered(
    no_color: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(force_terminal=True, no_color=no_color)
    TextOut(console).write("x\x1b[2J", Origin.ACCEPTED)
    assert capsys.readouterr().out == shown
    legend(console)
    assert ("the target's correction" in capsys.readouterr().out) is not no_color


def test_only_what_drafts_had_to_do_with_is_coloured(capsys: pytest.CaptureFixture[str]) -> None:
    out = TextOut(Console(force_terminal=True))
    for origin in (Origin.PLAIN, Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN, Origin.CORRECTION):
        out.write("x", origin)
    assert capsys.readouterr().out == "x\x1b[32mx\x1b[0m\x1b[34mx\x1b[0mx\x1b[33mx\x1b[0m"


@pytest.mark.slow
@pytest.mark.model
def test_the_embedded_model_copies_faster_than_it_thinks(generate: Command, embedded: tuple[Any, Any]) -> None:
    text = "one two three four five six. one two three four five six. one two"
    found = document(generate("--json", "--no-chat", "--policy", "4", "--max-new-tokens", "6", text).stdout)
    assert found["prompts"][0]["texts"][0]["text"].startswith(" three four five six.")
    assert found["statistics"]["tokens_per_round"] >= 2
