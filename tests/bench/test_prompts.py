"""Where prompts come from, and how they are dealt out to groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.bench.builtin import BUILT_IN
from forerun.bench.prompts import MT_BENCH_PARTS, Question, Questions, built_in, encode, find_questions, pools
from forerun.bench.schedule import BaselineSpeed, Group, groups_of, make_schedule
from forerun.errors import InvalidArgument
from support.bench import WordTokenizer


@pytest.fixture(autouse=True)
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_DATA", raising=False)
    monkeypatch.delenv("FORERUN_TEST_DATA", raising=False)


def write_questions(path: Path, *pairs: tuple[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = [{"question_id": i, "category": c, "turns": [t, "and then?"]} for i, (c, t) in enumerate(pairs)]
    path.write_text("\n".join(map(json.dumps, entries)) + "\n\n", encoding="utf-8")
    return path


def test_built_in_prompts_where_there_is_no_data() -> None:
    found = find_questions()
    assert found.categories == tuple(BUILT_IN) and found.note is not None
    assert "--data" in found.note and "FORERUN_DATA" in found.note


def test_built_in_prompts_fill_a_batch_of_eight_with_different_ones() -> None:
    for category, texts in BUILT_IN.items():
        assert len(set(texts)) == 8, category


def test_an_empty_data_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_DATA", str(tmp_path))
    assert str(tmp_path) in (find_questions().note or "")


def test_the_data_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_questions(tmp_path / "spec_bench" / "question.jsonl", ("qa", "Who?"))
    monkeypatch.setenv("FORERUN_TEST_DATA", str(tmp_path))
    found = find_questions()
    assert found.items == (Question("qa", "Who?"),) and found.note is None
    assert str(tmp_path) not in found.source


def test_a_given_file_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_questions(tmp_path / "question.jsonl", ("qa", "Who?"))
    monkeypatch.setenv("FORERUN_DATA", str(tmp_path))
    other = write_questions(tmp_path / "mine.jsonl", ("rag", "What?"))
    assert find_questions(other).categories == ("rag",)


@pytest.mark.parametrize(
    "line", ["{", '{"category": "qa"}', '{"category": "qa", "turns": []}', '{"category": 1, "turns": ["x"]}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = write_questions(tmp_path / "q.jsonl", ("qa", "Who?"))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InvalidArgument, match="line 3"):
        find_questions(path)


def test_mt_bench_takes_its_parts_in_turn() -> None:
    items = [Question(part, f"{part} {i}") for part in MT_BENCH_PARTS for i in range(2)]
    found = Questions((*items, Question("qa", "Who?")), "test")
    assert found.categories == ("mt_bench", "qa")
    assert [q.category for q in found.of("mt_bench")] == [*MT_BENCH_PARTS, *MT_BENCH_PARTS]
    assert [q.text for q in found.of("coding")] == ["coding 0", "coding 1"]


def test_an_unknown_category_gets_the_list() -> None:
    with pytest.raises(InvalidArgument, match="translation"):
        built_in().of("poetry")


class ChatTokenizer(WordTokenizer):
    chat_template = "yes"

    def __call__(self, texts: list[str], add_special_tokens: bool = True, **_: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens, "the template already has them"
        return super().__call__(texts)

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return f"user says {messages[0]['content']} you say"


def test_prompts_are_asked_as_in_a_chat() -> None:
    plain, chat = (encode(tokenizer(), [Question("qa", "Who?")])[0] for tokenizer in (WordTokenizer, ChatTokenizer))
    assert len(plain) == 1 and len(chat) == 5


def test_prompts_that_are_too_long_or_twins_are_left_out() -> None:
    found = Questions(tuple(Question("qa", text) for text in ("a b c", "a", "a", "b")), "test")
    assert [len(p) for p in pools(found, ["qa"], WordTokenizer(), longest=2)["qa"]] == [1, 1]


POOLS = {name: [(i,) for i in range(20)] for name in ("x", "y")}


def test_groups_fill_every_batch_and_categories_take_turns() -> None:
    groups = groups_of(POOLS, (1, 4), per_category=2)
    assert [(g.batch, g.category, g.index) for g in groups] == [
        (1, "x", 0), (1, "y", 0), (1, "x", 1), (1, "y", 1), (4, "x", 0), (4, "y", 0),
    ]  # fmt: skip
    assert groups[4].prompts == ((0,), (1,), (2,), (3,))


def test_the_number_of_prompts_follows_the_budget() -> None:
    def chosen(budget: float) -> int:
        return make_schedule(
            POOLS, (1,), None, cost=lambda g: 1.0, turns=lambda g: 3, budget=budget
        ).prompts_per_category

    assert [chosen(budget) for budget in (0, 6, 11.9, 12, 1e9)] == [1, 1, 1, 2, 10]


def test_the_expected_time_counts_prefill_padding_and_turns() -> None:
    speed = BaselineSpeed(prefill=0.5, step=2.0)
    pools = {"x": [(1,), (1, 2, 3)]}
    found = make_schedule(pools, (2,), 1, cost=lambda g: speed.call(g, 10), turns=lambda g: 4, budget=0)
    assert found.total_seconds == 4 * (0.5 * 6 + 2.0 * 10)


def test_too_few_prompts_are_reported_never_repeated() -> None:
    found = make_schedule({"x": [(1,), (2,), (3,)]}, (2, 4), 4, cost=lambda g: 1.0, turns=lambda g: 1, budget=0)
    assert [g.prompts for g in found.groups] == [((1,), (2,))]
    assert ["fewer groups" in note for note in found.notes] == [True, False]
    assert "left out" in found.notes[1]
    assert Group("x", 0, ((1,), (2, 3))).padded_tokens == 4
