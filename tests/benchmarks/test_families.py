"""What `benchmarks.families` makes of its times: tables, shares, records that are added to."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.families import page, run
from benchmarks.families.first_call import first_calls
from benchmarks.families.report import (
    GPU_HEADINGS,
    KIND,
    OLD_DECODING,
    _gpu_row,
    figure,
    make_record,
    results_of,
    tables,
)
from benchmarks.families.results import (
    DECODE,
    FIRST_CALL,
    FIRST_CALL_AGAIN,
    FUSED,
    GENERATE,
    PASS,
    PROMPT,
    STORED,
    THEIR_PROMPT,
    THEIR_STORED,
    TRANSFORMERS,
    FamilyResults,
    Step,
)
from benchmarks.families.shapes import ON_CPU, build
from forerun import ops
from forerun.bench.hardware import work_of
from forerun.errors import ForerunWarning
from forerun.measure.progress import Silent
from forerun.measure.provenance import provenance
from forerun.measure.record import load
from forerun.models.bodies.readers import describe
from support.described import described_model


def results(steps: tuple[Step, ...], bandwidth: float | None = 1000.0) -> FamilyResults:
    return FamilyResults(provenance("cpu", ["x"]), {}, bandwidth, {}, steps)


def test_shares() -> None:
    found = results((Step("a", PASS, 1, 1, 2.0, 1000, 600), Step("a", PASS, 8, 8, 4.0, 2000, 1600)))
    assert found.share("a", 1) == 0.5 and found.share("a", 8, 8) == 0.5
    assert found.share("a", 8, 8, with_keys=True) == 0.9
    assert found.share("b", 1) is None and found.share("a", 8) is None


def test_a_decoded_token_has_a_share_of_its_own() -> None:
    steps = Step("a", PASS, 1, 1, 2.0, 1000), Step("a", FUSED, 1, 1, 4.0, pairs=5), Step("b", FUSED, 1, 1, 1.0)
    found = results(steps)
    assert found.decoded_share("a", 1) == 0.25
    assert found.decoded_share("b", 1) is None and found.decoded_share("a", 8) is None
    assert len(GPU_HEADINGS) == len(_gpu_row(found, "a")) and "0.25" in _gpu_row(found, "a")


def test_decoding_is_the_median_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow at first, whose one quick short call would make the difference of the best too large."""
    told: list[int] = []
    short = iter((0.0, 0.3, 0.2, 0.1, 0.1, -0.2, 0.1))  # beside a call's own time

    def timed(device: torch.device, call: Any) -> tuple[None, float]:
        tokens = call.keywords["max_new_tokens"]
        told.append(tokens)
        noise = next(short) if tokens == 8 else 0.1
        return None, 1.0 + 0.01 * tokens + noise

    monkeypatch.setattr(run, "timed", timed)
    model: Any = SimpleNamespace(device=torch.device("cpu"))
    (step,) = run._decoding("a", FUSED, lambda: None, model, run.Settings((), repeats=6), (1,), 8, 40)
    assert step.seconds == pytest.approx(0.01) and step.pairs == 6
    assert told[2:6] == [8, 40, 40, 8], "in turns"


def test_fused_layers_that_are_not_used_leave_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    def decoder(model: Any, drafter: None, kernels: str) -> Any:
        warnings.warn("fused layers differ by 0.3", ForerunWarning, stacklevel=2)
        return SimpleNamespace(engine=SimpleNamespace(target=SimpleNamespace(is_fused=False)))

    monkeypatch.setattr(run, "SpeculativeDecoder", decoder)
    model: Any = None
    for use in ("on", "auto"):
        with pytest.warns(ForerunWarning):
            run._decoder(model, use, notes.append)
    assert notes == ["fused layers are described and were not used: fused layers differ by 0.3"]


def test_tables_of_steps_and_prompts() -> None:
    steps = Step("a", FUSED, 1, 1, 0.5, 400), Step("a", TRANSFORMERS, 1, 1, 1.0, 400)
    narrow = Step("a", STORED, 1, 1, 0.3, 200), Step("a", STORED, 1, 4, 0.4, 200), Step("a", THEIR_STORED, 1, 1, 1.2)
    calls = Step("a", DECODE, 1, 1, 0.6), Step("a", GENERATE, 1, 1, 1.1)
    times, shares = tables(results((*steps, *narrow, *calls)))
    expected = "a 400.00 500.00 - 300.00 400.00 1000.00 - 1200.00 - 600.00 1100.00"
    assert times.rows == (tuple(expected.split()),) and len(times.headings) == len(times.rows[0])
    assert shares.rows == (("a", "0.40", "0.50", "-", "0.30", "-", "0.20", "1.20", "-"),)
    assert len(shares.headings) == len(shares.rows[0])
    times, shares = tables(results((*steps, *calls), bandwidth=None))
    assert times.rows == (("a", "-", "500.00", "-", "-", "-", "1000.00", "-", "-", "-", "600.00", "1100.00"),)
    assert shares.rows == (("a", "-", "0.50", *"-" * 6),)
    prompts = results((Step("a", PROMPT, 1, 4096, 0.03), Step("a", THEIR_PROMPT, 1, 4096, 0.04)))
    (table,) = tables(prompts)
    assert table.rows == (("a", "4096", "30.00", "40.00", "0.75"),)
    assert not list(tables(results(())))


def test_steps_and_prompts_are_drawn_as_shares_of_transformers() -> None:
    steps = Step("a", FUSED, 1, 1, 0.5), Step("a", TRANSFORMERS, 1, 1, 1.0), Step("b", FUSED, 1, 1, 0.5)
    prompts = Step("a", PROMPT, 1, 4096, 0.03), Step("a", THEIR_PROMPT, 1, 4096, 0.04), Step("a", PROMPT, 1, 8192, 0.1)
    drawn = figure(results((*steps, *prompts)))
    assert drawn is not None
    for panel in drawn.panels:
        _, level = panel.series
        assert level.y == (1.0,) and level.label.startswith("transformers")
    assert [panel.series[0].y for panel in drawn.panels] == [(0.5,), (0.75,)]
    assert drawn.panels[0].x_names == ("a",) and drawn.panels[1].series[0].x == (4096,)
    assert figure(results(())) is None


def test_the_page_shows_the_records() -> None:
    assert len(list(page.RECORDS.glob("families-*.json"))) >= 3
    assert "\n".join(page.section()) in page.PAGE.read_text(), "python -m benchmarks.families --page writes it anew"


def test_the_page_of_layers_says_what_the_record_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "\n".join(page.summary()) in page.LAYERS.read_text(), "python -m benchmarks.families --page writes it anew"
    ours = (Step(name, FUSED, 1, tokens, time) for name, tokens, time in (("a", 1, 1.0), ("b", 1, 3.0), ("a", 4, 2.0)))
    theirs = (Step(name, TRANSFORMERS, 1, tokens, 4.0) for name in "ab" for tokens in (1, 4))
    make_record(results((*ours, *theirs, Step("a", STORED, 1, 1, 1.0))), True).save(tmp_path / page.OF_CPU)
    monkeypatch.setattr(page, "RECORDS", tmp_path)
    (row,) = [line for line in page.summary() if line.startswith(("| float32", "| bfloat16"))]  # none of 4 as stored
    assert "0.25 to 0.75, half of 2 families at most 0.50 | 0.50 to 0.50, half of 1" in row


def test_remarks_on_the_page_end_with_one_full_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = make_record(results((Step("a", FUSED, 1, 1, 0.5),)), complete=False)
    assert record.remarks[-1].endswith(".")
    record.save(tmp_path / "families-x.json")
    monkeypatch.setattr(page, "RECORDS", tmp_path)
    (line,) = (line for line in page.section() if line.startswith("`benchmarks/results/families-x.json`"))
    assert line.endswith(".") and ".." not in line and ".;" not in line


def test_tables_on_the_page_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Step("a", FIRST_CALL, 1, 1, 4.0), Step("a", FIRST_CALL_AGAIN, 1, 1, 1.0), Step("a", PASS, 1, 1, 0.5, 900)
    record = make_record(results(steps), True)
    assert len(record.tables) > 1
    record.save(tmp_path / "families-x.json")
    monkeypatch.setattr(page, "RECORDS", tmp_path)
    lines = page.section()
    titles = [place for place, line in enumerate(lines) if line.endswith(":")]
    assert len(titles) == len(record.tables) and all(not lines[place - 1] for place in titles)


def test_a_record_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured replaces what is there of it; what fails, or is never reached, leaves the old."""
    path = tmp_path / "families.json"
    old = [Step(family, PASS, 1, 1, 2.0, 1000) for family in "abc"] + [Step("a", PROMPT, 1, 100, 1.0)]
    make_record(results(tuple(old)), True).save(path)
    new = Step("a", PASS, 1, 1, 1.0, 1000)

    def on_cpu(family: str, *_: object) -> list[Step]:
        if family == "b":
            raise ValueError("no memory")
        if family == "c":
            raise KeyboardInterrupt
        return [new]

    monkeypatch.setattr(run, "build", lambda *_: torch.nn.Linear(1, 1))
    monkeypatch.setattr(run, "_why_not", lambda _: None)
    monkeypatch.setattr(run, "_bandwidth", lambda _: 900.0)
    monkeypatch.setattr(run, "_on_cpu", on_cpu)
    record = run.run(run.Settings(tuple("abc"), adds=True), torch.device("cpu"), path, Silent(), ["x"])
    found = results_of(record)
    assert sorted(found.steps, key=str) == sorted([new, *old[1:]], key=str) and not record.complete
    assert found.notes == {"b": "ValueError: no memory"} and found.bandwidth == 1000.0


def test_what_a_measurement_replaces() -> None:
    steps, prompts = run.Settings(("a",), methods=()), run.Settings(("a",), prompts=(500,))
    assert run.is_anew(Step("a", FUSED, 1, 1, 2.0), steps, True) and not run.is_anew(
        Step("a", TRANSFORMERS, 1, 1, 2.0), steps, True
    )
    assert run.is_anew(Step("a", TRANSFORMERS, 1, 1, 2.0), steps, False)
    assert [run.is_anew(Step("a", PROMPT, 1, size, 1.0), prompts, True) for size in (100, 500)] == [False, True]
    assert not run.is_anew(Step("a", FUSED, 1, 1, 2.0), prompts, True)


def test_first_calls_are_told_and_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, old = tmp_path / "families.json", Step("b", PASS, 1, 1, 3.0, 900)
    make_record(results((old, Step("a", FIRST_CALL, 1, 1, 9.0))), True).save(path)
    monkeypatch.setattr(run, "first_calls", lambda family, device: (4.0, 1.25))
    asked = run.Settings(("a",), first_calls=True, adds=True)
    record = run.run(asked, torch.device("cpu"), path, Silent(), ["x"])
    found = results_of(record)
    assert found.steps[0] == old and found.bandwidth == 1000.0 and len(found.steps) == 3
    assert ("a", "4.00", "1.25") in record.tables[0].rows
    assert run._kept(path)[0] == list(found.steps)


@pytest.mark.slow
def test_first_calls_are_made_by_processes_of_their_own() -> None:
    before, again = first_calls("opt", torch.device("cpu"))
    assert before > 0 and again > 0


def test_older_records_are_read_and_told_apart() -> None:
    record = load(page.RECORDS / "families-h200.json", KIND)
    found = results_of(record)
    assert found.on_gpu and all(step.pairs >= 0 for step in found.steps)
    was_old = any(not step.pairs for step in found.steps if step.method == FUSED)
    assert (OLD_DECODING in make_record(found, True).remarks) == was_old
    newer = replace(found, steps=tuple(replace(step, pairs=5) for step in found.steps))
    assert OLD_DECODING not in make_record(newer, True).remarks


def test_an_interrupted_record_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    assert run.missing("ab", path) == ["a", "b"] == run.missing("ab", None)
    make_record(results((Step("b", FUSED, 1, 1, 3.0, 900),)), False).save(path)
    assert run.missing("abc", path) == ["a", "c"]
    prompts = Step("a", THEIR_PROMPT, 1, 100, 1.0), Step("b", THEIR_PROMPT, 1, 100, 1.0)
    make_record(results((*prompts, Step("b", THEIR_PROMPT, 1, 500, 1.0))), False).save(path)
    assert run.missing("abc", path, (100, 500)) == ["a", "c"] and run.missing("abc", path, (100,)) == ["c"]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("family", ON_CPU)
def test_families_can_be_built(family: str) -> None:
    """Without memory for their weights."""
    model = build(family, torch.device("meta"))
    assert model.config.num_hidden_layers >= 12, "of the model that was published, not of the table's GPU part"


@pytest.mark.slow
def test_a_family_that_cannot_be_built_leaves_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = (Step("b", FUSED, 1, 1, 1.0, 10),)
    monkeypatch.setattr(run, "build", lambda family, *a: {"b": described_model("llama")}[family])
    monkeypatch.setattr(run, "_on_cpu", lambda *a: list(found))
    asked = run.Settings(("a", "b"), compile_only=True)
    record = run.run(asked, torch.device("cpu"), tmp_path / "families.json", Silent(), ["x"])
    assert "KeyError" in record.details["notes"]["a"] and [row["family"] for row in record.rows] == ["b"]


def test_stored_steps_are_said_to_be_what_they_are() -> None:
    steps = Step("a", FUSED, 1, 1, 0.5, 400), Step("a", STORED, 1, 1, 0.3, 200), Step("a", TRANSFORMERS, 1, 1, 1.0)
    assert "bfloat16" in make_record(results(steps), True).remarks[1]
    unlike = FamilyResults(provenance("cpu", ["x"]), {"keeps_bfloat16": False}, None, {}, steps)
    assert "it does not here" in make_record(unlike, True).remarks[1]
    assert "bfloat16" not in make_record(results(steps[::2]), True).remarks[1]
    drawn = figure(results(steps))
    assert drawn is not None and [series.y for series in drawn.panels[0].series] == [(0.5,), (0.3,), (1.0,)]


@pytest.mark.slow
def test_one_file_of_bfloat16_is_loaded_as_users_load_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    from forerun.kernels.cpu.narrow import NarrowWeight

    model = described_model("gemma2")
    with run.stored_models(model) as models:
        wide, kept, theirs = models
        assert kept is not None and {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
        assert not any(isinstance(weight, NarrowWeight) for weight in wide.parameters())
        narrow = [weight for weight in kept.parameters() if isinstance(weight, NarrowWeight)]
        assert {weight.format.name for weight in narrow} == {"BF16"} and len(narrow) >= 2 * 4
        for mine, plain in zip(kept.parameters(), wide.parameters(), strict=True):
            assert torch.equal(mine.dense() if isinstance(mine, NarrowWeight) else mine, plain)
        assert {each.config._attn_implementation for each in models if each} == {model.config._attn_implementation}
        assert work_of(kept).weight_bytes < 0.6 * work_of(wide).weight_bytes


@pytest.mark.slow
def test_every_method_takes_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setenv("FORERUN_KERNELS", "auto")
    monkeypatch.setattr(
        run, "build", lambda *a: described_model("llama", vocab_size=30_000, max_position_embeddings=512)
    )
    monkeypatch.setattr(run, "_bandwidth", lambda device: 1e9)
    record = run.run(run.Settings(("llama",), 1), torch.device("cpu"), tmp_path / "families.json", Silent(), ["x"])
    taken = {(row["method"], row["positions"]) for row in record.rows}
    methods = (FUSED, STORED, TRANSFORMERS, THEIR_STORED)
    assert taken == {(method, tokens) for method in methods for tokens in (1, 4)} | {(DECODE, 1), (GENERATE, 1)}
    read = {row["method"]: row["num_bytes"] for row in record.rows if row["num_bytes"]}
    assert read[THEIR_STORED] <= read[STORED] < 0.6 * read[FUSED] and read[FUSED] == read[TRANSFORMERS]
    assert not record.details["notes"] and record.settings["keeps_bfloat16"] in (True, False)


def test_no_floor_lies_above_a_step() -> None:
    steps = (Step("a", FUSED, 1, 1, 0.5, 1000), Step("a", TRANSFORMERS, 1, 1, 0.1, 1000))
    half = Step("a", STORED, 1, 1, 0.2, 500)
    assert run.fastest_read(1500.0, (*steps, half)) == 2500.0
    assert run.fastest_read(1500.0, steps) == 2000.0 and run.fastest_read(2500.0, steps) == 2500.0
    assert run.fastest_read(None, steps) is None


def test_idle_experts_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of four experts; one row chooses two in each, by the routers that the fused layers ask."""
    model = described_model("mixtral")
    assert model.config.num_local_experts == 4 and model.config.num_experts_per_tok == 2
    held = sum(weight.nbytes for weight in model.parameters() if weight.ndim == 3)
    monkeypatch.setattr(ops, "run_experts", lambda *a: None)
    x, weights = torch.randn(1, model.config.hidden_size), SimpleNamespace(first=torch.zeros(4, 1))

    def step() -> None:
        for layer in describe(model).layers:
            assert layer.experts is not None
            ops.run_experts(x, None, layer.experts.route, weights, None)  # type: ignore[arg-type]

    assert run.bytes_read(model, step) == work_of(model).weight_bytes - held // 2
    assert run.bytes_read(model, lambda: None) == work_of(model).weight_bytes


def test_latents_are_counted_as_they_are_cached() -> None:
    """Two layers of a latent of 16 and a shared key of 4, in float32."""
    model = described_model("deepseek_v3")
    config = model.config
    assert (config.num_hidden_layers, config.kv_lora_rank, config.qk_rope_head_dim) == (2, 16, 4)
    assert work_of(model).bytes_per_key == 2 * (16 + 4) * 4
