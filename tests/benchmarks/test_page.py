"""From a measurement to the page: every table on a tiny pair, gaps that are refused, and the page that is in docs."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forerun.loading
from benchmarks.kernels.cases import Case
from benchmarks.kernels.results import KernelResults, Measurement, Times
from benchmarks.papers import __main__ as command
from benchmarks.papers import make_page, pairs, service, verify
from benchmarks.papers.common import RESULTS, Setup, paper_record, read
from benchmarks.papers.make_page import PAGE, Place, page_text, places
from benchmarks.papers.others import kernel_lines, tables_of, tree_lines
from benchmarks.papers.tables import TABLES
from forerun.engine import FinishReason
from forerun.errors import InvalidArgument
from forerun.measure import provenance
from forerun.measure.plot import draw
from forerun.measure.record import Record
from forerun.measure.table import Table
from support.bench import ORIGIN
from support.folders import VOCAB, byte_tokenizer
from support.tiny import tiny_model

TINY = Setup(pair=pairs.TINY, device="cpu", quick=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "cores_of_others", lambda: 0.0)
    monkeypatch.setattr(verify, "COPY_BYTES", 2**16)


@pytest.fixture(scope="module")
def pair() -> pairs.Pair:
    return pairs.open_pair(TINY)


@pytest.mark.parametrize("name", ["chen", "leviathan", "bass", "int8", "verify"])
@pytest.mark.slow
def test_a_record_becomes_a_table_and_a_picture(name: str, pair: pairs.Pair, tmp_path: Path) -> None:
    from benchmarks.papers import bass, chen, int8, leviathan

    module: Any = {"chen": chen, "leviathan": leviathan, "bass": bass, "int8": int8, "verify": verify}[name]
    path = tmp_path / f"{name}.json"
    module.measure(TINY, path, pair)
    record = read(path)
    assert [record.settings[key] for key in ("table", "quick", "pair")] == [name, True, pairs.TINY]
    lines = module.render(record)
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 3 and all(line.count("|") > 2 for line in tables)
    assert not any("nan" in line.lower() for line in tables)
    if importlib.util.find_spec("matplotlib"):
        draw(module.figure(record), tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 10_000


def place(folder: Path, name: str = "one") -> Place:
    return Place(f"Table {name}", f"make {name}", folder / f"{name}.json", folder / f"{name}.png", tables_of)


def other_record(path: Path, cell: str) -> None:
    table = Table("Speeds", ("method", "speed"), (("plain", cell),))
    Record("another", ORIGIN, {}, tables=(table,), headline=("It held.",)).save(path)


class TestPage:
    def test_a_missing_record_is_refused_with_its_command(self, tmp_path: Path) -> None:
        other_record(tmp_path / "one.json", "1.00x")
        chosen = {"A paper": [place(tmp_path, "one"), place(tmp_path, "two")]}
        with pytest.raises(InvalidArgument, match=r"1 records are missing.*--partial[^$]*two\.json: make two"):
            page_text(chosen, page=tmp_path / "page.md")

    def test_a_partial_page_says_what_is_missing(self, tmp_path: Path) -> None:
        other_record(tmp_path / "one.json", "1.25x")
        chosen = {"A paper": [place(tmp_path, "one"), place(tmp_path, "two")]}
        text = page_text(chosen, partial=True, page=tmp_path / "page.md")
        assert "| plain | 1.25x |" in text and "It held." in text
        assert text.count("Not measured yet.") == 1 and "`make two`" in text

    def test_the_page_follows_the_record(self, tmp_path: Path) -> None:
        chosen = {"A paper": [place(tmp_path)]}
        texts = []
        for cell in ("1.25x", "1.26x"):
            other_record(tmp_path / "one.json", cell)
            texts.append(page_text(chosen, page=tmp_path / "page.md"))
        assert texts[0] != texts[1]

    def test_a_picture_is_shown_where_there_is_one(self, tmp_path: Path) -> None:
        other_record(tmp_path / "one.json", "1.00x")
        chosen = {"A paper": [place(tmp_path)]}
        assert "![" not in page_text(chosen, page=tmp_path / "page.md")
        (tmp_path / "one.png").write_bytes(b"")
        assert "![Table one](one.png)" in page_text(chosen, page=tmp_path / "page.md")

    def test_the_page_in_docs_is_that_of_the_records(self) -> None:
        assert PAGE.read_text(encoding="utf-8") == page_text(places(), partial=True), (
            "run: python -m benchmarks.papers page --partial"
        )

    def test_every_table_has_its_place(self) -> None:
        commands = [p.command for tables in places().values() for p in tables]
        assert all(any(c.startswith(f"python -m benchmarks.papers {name}") for c in commands) for name in TABLES)
        assert len(commands) == len(set(commands))


class TestOthers:
    def test_kernels(self, tmp_path: Path) -> None:
        case = Case(vocab=1000, batch=1, length=4)
        ours, theirs = Times(kernels=9.0, launches=2, wall=20.0, graph=8.0), Times(kernels=40.0, launches=30, wall=90.0)
        floor = 1e6 * case.must_read / 1e9
        KernelResults(ORIGIN, 1e9, (Measurement(case, ours, theirs),)).record(True).save(tmp_path / "k.json")
        text = "\n".join(kernel_lines(tmp_path / "k.json"))
        assert "kernels take 5.0 to 5.0 times as long" in text and "by the clock 4.5 to 4.5 times" in text
        assert f"takes {8 / floor:.1f} to {8 / floor:.1f} times as long as reading" in text
        assert "| 1000 x 1, 4 drafted |" in text

    def test_trees(self, tmp_path: Path) -> None:
        shapes = (("chain", 2.0, 0.0), ("top", 2.5, 0.25))
        rows = [
            {"temperature": 1.0, "size": 8, "shape": shape, "tokens_per_call": tokens, "gain": gain}
            for shape, tokens, gain in shapes
        ]
        Record("trees", ORIGIN, {}, rows=rows).save(tmp_path / "t.json")
        text = "\n".join(tree_lines(tmp_path / "t.json"))
        assert "| 1 | 8 | top | 2.50 | +25% |" in text and "at best +25% at T = 1 (8 positions)" in text


class TestRecords:
    def record(self, **changes: Any) -> Record:
        made = paper_record(ORIGIN, "theory", {"quick": False}, {"table1": []})
        return replace(made, **changes)

    def test_another_kind_is_refused(self, tmp_path: Path) -> None:
        self.record(kind="decode").save(tmp_path / "r.json")
        with pytest.raises(InvalidArgument, match="kind 'decode'"):
            read(tmp_path / "r.json")

    def test_a_damaged_one_is_refused(self, tmp_path: Path) -> None:
        self.record().save(tmp_path / "r.json")
        content = json.loads((tmp_path / "r.json").read_text())
        del content["details"]
        (tmp_path / "r.json").write_text(json.dumps(content))
        with pytest.raises(InvalidArgument, match="damaged record"):
            read(tmp_path / "r.json")

    def test_quick_and_disturbed_runs_are_marked(self) -> None:
        loud = self.record(settings={"quick": True}, remarks=("other programs kept 1.0 cores busy",))
        assert "say nothing yet" in "\n".join(make_page.origin(loud))
        assert "1.0 cores busy" in "\n".join(make_page.origin(loud))
        assert len(make_page.origin(self.record())) == 1


class TestCommand:
    def test_gaps_are_an_error_with_a_way_out(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(make_page, "places", lambda: {"A paper": [place(tmp_path)]})
        assert command.main(["page"]) == 2
        assert "--partial" in capsys.readouterr().err

    def test_theory_from_end_to_end(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["theory", "--output", str(tmp_path / "t.json")]) == 0
        assert "| 0.9 | 10 | 1.60x | 6.86x |" in capsys.readouterr().out
        assert "benchmarks.papers" in read(tmp_path / "t.json").provenance.command

    def test_one_file_for_one_table(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["theory", "theory", "--output", str(tmp_path / "t.json")]) == 2
        assert "2 were asked for" in capsys.readouterr().err

    def test_answers_need_a_language(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        given = ["service", "--pair", "tiny", "--device", "cpu", "--output", str(tmp_path / "s.json")]
        assert command.main(given) == 2
        assert "speaks no language" in capsys.readouterr().err

    def test_committed_records_are_replaced_on_demand_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Path] = []
        monkeypatch.setattr(command, "check_output", lambda path: made.append(path))
        monkeypatch.setattr(command, "draw", lambda *_: None)
        theory = replace(TABLES["theory"], measure=lambda *_: TestRecords().record(), render=lambda _: [])
        for update in (False, True):
            command.make_table(theory, TINY, None, None, update)
        assert not made[0].exists() and made[1] == RESULTS / "theory.json"

    def test_a_draft_needs_its_target(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.main(["chen", "--draft", "small"]) == 2
        assert "--target" in capsys.readouterr().err


class TestPieces:
    def test_a_users_models_are_described_beside_the_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tables keep the drafter's name under "draft", and look their rows up by it."""
        loaded = tiny_model("llama", vocab=VOCAB), byte_tokenizer()
        monkeypatch.setattr(forerun.loading, "load_model", lambda name, **where: loaded)
        alone, drafted = (
            pairs.open_pair(Setup(pair=pairs.OWN, target="/a/big", draft=draft)) for draft in (None, "/a/small")
        )
        assert (alone.main, drafted.main) == ("prompt lookup", "draft model")
        assert "draft" not in drafted.about and drafted.about["draft model"] == "small"

    def test_peak_memory_of_a_known_call(self) -> None:
        def call(_: int) -> torch.Tensor:
            first = torch.ones(2**18)  # 1 MiB
            second = first + 1  # and another one beside it
            del first
            return second * 2  # a third, when the first is gone

        assert verify.peak_bytes(call, torch.device("cpu")) == pytest.approx(2 * 2**20, rel=0.01)

    def test_what_must_be_read(self) -> None:
        assert verify.must_read(5, 1000) == 4 * 1000 * (5 + 1 + 2)

    def test_the_answer_shown_first_is_the_best_finished_one(self) -> None:
        words = {1: "It is Paris.", 2: "It is Rome.", 3: "Paris"}
        talker: Any = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: words[ids[0]]))
        reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.TIME]
        result: Any = SimpleNamespace(
            ranking=[[2, 1, 0]], finish_reasons=reasons, new_tokens=[[1], [2], [3]], seconds=1.0
        )
        found = service.score_answers(talker, result, r"\bParis\b")
        assert (found["finished"], found["first"], found["any"]) == (2, False, True)
        late: Any = SimpleNamespace(**{**vars(result), "finish_reasons": [FinishReason.TIME] * 3})
        assert service.score_answers(talker, late, "Paris") == {
            "finished": 0,
            "first": False,
            "any": False,
            "seconds": 1.0,
        }
