"""Writing on-policy text: the same text for any batch, limits that stop cleanly, runs that go on."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from forerun.cli.main import cli
from forerun.errors import InvalidArgument
from forerun.math.attention import Form
from forerun.measure.repetition import repeated_grams
from forerun.models.scorer import Scorer
from forerun.train import writing
from forerun.train.options import WritingSettings
from forerun.train.shards import Manifest, Shards, ShardWriter
from forerun.train.writing import (
    Item,
    Tally,
    WideScorer,
    WritingEnd,
    WritingLimits,
    items_of,
    temperature_of,
    wide_engine,
    write_items,
    write_shards,
)  # fmt: skip
from support.folders import VOCAB, byte_tokenizer, save
from support.tiny import plain_greedy, ragged_prompts, tiny_model

ITEMS = [Item(i, tuple(prompt)) for i, prompt in enumerate(ragged_prompts(9, 97, seed=3))]
ABOUT = {"name": "tiny", "model_type": "llama", "hidden_size": 32, "vocab_size": 97}


def settings(**changes: Any) -> WritingSettings:
    return WritingSettings(**{"max_new_tokens": 12, "batch_size": 4} | changes)


def texts(items: list[Item] = ITEMS, **changes: Any) -> dict[int, tuple[int, ...]]:
    rounds = write_items(wide_engine(tiny_model("llama")), items, settings(**changes))
    return {result.request.request_id: result.tokens for results in rounds for result in results}


def writer(folder: Path, **changes: Any) -> ShardWriter:
    return ShardWriter(folder, Manifest(ABOUT, 0, {}), **changes)


def written(folder: Path) -> list[list[int]]:
    return sorted(sequence.tokens.tolist() for sequence in Shards(folder))


def run(folder: Path, limits: WritingLimits | None = None, items: list[Item] = ITEMS, **changes: Any) -> Tally:
    budget = changes.pop("disk_budget", None)
    clock = changes.pop("clock", lambda: 0.0)
    out = writer(folder, disk_budget=budget, shard_tokens=60)
    return write_shards(
        wide_engine(tiny_model("llama")), items, out, settings(**changes), limits or WritingLimits(), clock=clock
    )


@pytest.mark.quick("3")
@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_a_text_does_not_depend_on_its_neighbours(batch_size: int) -> None:
    assert texts(batch_size=batch_size) == texts(batch_size=4)


def test_a_prompt_has_one_greedy_text() -> None:
    """Of the copies that would say the same; numbers, and with them what the others say, stay as they were."""
    temperatures = settings().temperatures
    found = [items_of(place, (5, 6, 7), 4, temperatures) for place in range(8)]
    assert [len(items) for items in found] == [3] * 8, "two in four are greedy"
    for place, items in enumerate(found):
        numbers = [item.number for item in items]
        assert set(numbers) <= set(range(4 * place, 4 * place + 4)) and numbers == sorted(numbers)
        said = texts(items)
        assert len(set(said.values())) == len(said)
    assert len(items_of(3, (5, 6), 4, (0.0,))) == 1 and len(items_of(3, (5, 6), 4, (1.0,))) == 4


def test_another_order_gives_the_same_texts() -> None:
    assert texts(list(reversed(ITEMS))) == texts()


def test_another_seed_changes_sampled_texts_and_no_greedy_one() -> None:
    one, other = texts(seed=1), texts(seed=2)
    greedy = {item.number for item in ITEMS if temperature_of(item.number, settings().temperatures) == 0}
    assert 0 < len(greedy) < len(ITEMS)
    assert all((one[number] == other[number]) == (number in greedy) for number in one)


def test_a_greedy_text_is_the_models_own() -> None:
    found = texts(temperatures=(0.0,))
    for item in ITEMS:
        assert list(found[item.number]) == plain_greedy(tiny_model("llama"), list(item.prompt), 12)


def test_every_slice_meets_every_temperature() -> None:
    for slices in (1, 2, 3, 4, 5, 8, 16):
        for index in range(slices):
            met = {temperature_of(number, (0.0, 0.3, 0.7, 1.0)) for number in range(index, 256, slices)}
            assert len(met) == 4
    counts = [sum(temperature_of(n, (0.0, 0.7)) == t for n in range(100)) for t in (0.0, 0.7)]
    assert counts == [50, 50]


def test_places_are_filled_again_as_rows_finish() -> None:
    engine = wide_engine(tiny_model("llama"))
    items = [Item(i, ITEMS[i % 9].prompt) for i in range(200)]
    stop = frozenset(range(0, 97, 12))
    busy = []
    rounds = write_items(engine, items, settings(batch_size=32, stop_ids=stop, temperatures=(1.0,)))
    done = 0
    for results in rounds:
        busy.append(len(engine.roster.running))
        done += len(results)
        if done > 150:
            break
    before_refill = 32 - 32 // writing.REFILL
    assert sum(busy) / len(busy) > 0.75 * before_refill


def test_prompts_in_one_pass_leave_the_same_keys() -> None:
    model = tiny_model("llama")
    rows, blocks = list(range(9)), [list(item.prompt) for item in ITEMS]
    scorers = Scorer(model), WideScorer(model, Form.PAD)
    for scorer in scorers:
        for row in rows:
            scorer.admit(row)
        scorer.feed(rows, blocks)
    plain, wide = (scorer.score(rows, [[5]] * 9) for scorer in scorers)
    torch.testing.assert_close(wide, plain, atol=1e-4, rtol=1e-4)
    assert [scorers[1].length(row) for row in rows] == [len(block) + 1 for block in blocks]


def test_passes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PASS_TOKENS", 10)
    waiting = [(row, [0] * length) for row, length in enumerate((4, 4, 4, 30, 1))]
    assert [[row for row, _ in part] for part in writing._passes(waiting)] == [[0, 1], [2], [3], [4]]


def test_everything_is_written(tmp_path: Path) -> None:
    tally = run(tmp_path)
    found = texts()
    assert written(tmp_path) == sorted([*item.prompt, *found[item.number]] for item in ITEMS)
    assert tally.ending is WritingEnd.DONE
    assert (tally.sequences, tally.new_tokens) == (9, 9 * 12)
    assert tally.tokens == Shards(tmp_path).num_tokens
    assert sum(tally.by_temperature.values()) == 9
    lengths = {len(item.prompt) for item in ITEMS}
    assert {sequence.prompt_length for sequence in Shards(tmp_path)} == lengths


def test_a_stopped_run_goes_on_to_the_same_texts(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    first = run(tmp_path / "parts", WritingLimits(tokens=60))
    assert first.ending is WritingEnd.TOKENS and 0 < first.sequences < 9
    second = run(tmp_path / "parts", batch_size=7)
    assert first.sequences + second.sequences == 9
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    assert run(tmp_path / "parts").sequences == 0


def test_a_killed_run_keeps_its_finished_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = writer(tmp_path, shard_tokens=60)
    monkeypatch.setattr(out, "flush", lambda flush=out.flush: flush() if out._pending_tokens >= 60 else None)
    write_shards(wide_engine(tiny_model("llama")), ITEMS, out, settings(), WritingLimits())  # its last shard never came
    kept = Shards(tmp_path).num_sequences
    assert 0 < kept < 9
    assert run(tmp_path).sequences == 9 - kept


def test_time_and_interrupts_end_a_run(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    late = run(tmp_path / "late", WritingLimits(seconds=3), clock=lambda: float(next(ticks)), temperatures=(0.0,))
    assert late.ending is WritingEnd.TIME
    stopped = run(tmp_path / "stopped", WritingLimits(interrupted=lambda: True))
    assert stopped.ending is WritingEnd.INTERRUPTED


def test_the_disk_budget_ends_a_run(tmp_path: Path) -> None:
    tally = run(tmp_path, disk_budget=3000)
    size = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    assert tally.ending is WritingEnd.DISK
    assert 0 < size <= 3000
    assert 0 < Shards(tmp_path).num_sequences < 9


def test_short_texts_are_dropped_counted_and_not_tried_again(tmp_path: Path) -> None:
    found = texts()
    stop = frozenset({found[3][2]})
    tally = run(tmp_path, stop_ids=stop)
    early = sum(any(token in stop for token in tokens[:7]) for tokens in found.values())
    assert tally.too_short == early > 0
    assert Shards(tmp_path).num_sequences == 9 - early
    assert run(tmp_path, stop_ids=stop).too_short == 0


def test_texts_that_end_by_themselves_are_counted_and_keep_their_end(tmp_path: Path) -> None:
    found = texts()
    stop = found[0][9]
    ends = [n for n, tokens in found.items() if stop in tokens and tokens.index(stop) >= 7]
    tally = run(tmp_path, stop_ids=frozenset({stop}))
    assert tally.stopped == len(ends) > 0
    assert sum(sequence.tokens[-1] == stop for sequence in Shards(tmp_path)) >= len(ends)


def test_rows_with_broken_logits_are_counted_and_left_out(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    model.get_input_embeddings().weight.data[ITEMS[2].prompt[0]] = torch.nan
    tally = write_shards(wide_engine(model), ITEMS, writer(tmp_path), settings(temperatures=(0.0,)), WritingLimits())
    assert 1 <= tally.failed < 9
    assert Shards(tmp_path).num_sequences == 9 - tally.failed


@pytest.mark.parametrize(("tokens", "expected"), [([1, 2, 3], (0, 0)), ([1, 2, 3, 4], (0, 1)), ([7] * 8, (4, 5)),
                                                  ([1, 2, 3, 4, 5, 1, 2, 3, 4], (1, 6))])  # fmt: skip
def test_repeated_grams(tokens: list[int], expected: tuple[int, int]) -> None:
    assert repeated_grams(tokens) == expected


@pytest.mark.parametrize("change", [{"batch_size": 0}, {"max_new_tokens": 0}, {"temperatures": ()}])
def test_senseless_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        settings(**change)


# The command.


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("target"), tiny_model("llama", vocab=VOCAB))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"question {i}"} for i in range(6)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"wrong": 1}])), encoding="utf-8")
    return path


def data(target: str, *more: str) -> Result:
    fixed = ["--device", "cpu", "--offline", "--max-new-tokens", "10", "--batch-size", "4", "--json"]
    return CliRunner().invoke(cli, ["train", "data", target, *fixed, *more])


def test_the_command_writes_continues_and_refuses_other_arguments(tmp_path: Path, target: str, prompts: Path) -> None:
    call = ["--prompts", str(prompts), "--output", str(tmp_path / "out"), "--top-k", "3"]
    first = data(target, *call)
    assert first.exit_code == 0, first.output
    facts = json.loads(first.stdout)
    assert (facts["sequences"], facts["sequences_in_folder"]) == (6, 6)
    assert "prompts.jsonl, line 7" in first.stderr
    shards = Shards(tmp_path / "out")
    assert shards.top_k == 3 and shards.sequence(0).top_ids is not None
    tokenizer = byte_tokenizer()
    initial = tokenizer.decode(shards.sequence(2).tokens[: shards.sequence(2).prompt_length])
    assert initial == "<|start|>user\nquestion 2<|end|>\n<|start|>assistant\n"

    again = data(target, *call)
    assert json.loads(again.stdout)["sequences"] == 0
    assert json.loads(again.stdout)["sequences_in_folder"] == 6

    other = data(target, *call, "--seed", "5")
    assert other.exit_code == 2
    assert "seed was 0, now 5" in other.stderr


def test_slices_together_write_what_one_process_writes(tmp_path: Path, target: str, prompts: Path) -> None:
    assert data(target, "--prompts", str(prompts), "--output", str(tmp_path / "one")).exit_code == 0
    for index in (0, 1):
        call = ("--prompts", str(prompts), "--output", str(tmp_path / "two"), "--slice", f"{index}/2")
        assert data(target, *call).exit_code == 0
    assert written(tmp_path / "two") == written(tmp_path / "one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--prompts"),
        (("--slice", "2/2"), "--slice '2/2'"),
        (("--slice", "x"), "--slice 'x'"),
        (("--temperatures", "0,hot"), "--temperatures"),
        (("--disk-budget", "much"), "--disk-budget 'much'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, target: str, arguments: tuple[str, ...], message: str) -> None:
    result = data(target, "--output", str(tmp_path / "out"), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_train_lists_its_commands() -> None:
    result = CliRunner().invoke(cli, ["train", "--help"])
    assert all(name in result.output for name in ("data", "draft", "ngram"))
    assert "Did you mean 'data'" in CliRunner().invoke(cli, ["train", "dta"]).output
