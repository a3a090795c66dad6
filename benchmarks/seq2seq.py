"""Encoder-decoder pairs of full size with dialled-in acceptance: plain decoding and drafts, batch by batch.

    python benchmarks/seq2seq.py -o benchmarks/results/seq2seq-h200.json

Whole `generate` calls at temperature 1, encoder included; before them greedy text is compared token for token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import forerun
from forerun.bench.methods import timed
from forerun.bench.records import Agreement, Measurement, Record, provenance, write
from forerun.bench.report import as_text, tables
from forerun.bench.synthetic import SyntheticPair
from forerun.bench.synthetic_seq2seq import DRAFTS, a_source, build_seq2seq_pair, family_of

PLAIN = "plain"
GREEDY_TOKENS = 24


def decoders(pair: SyntheticPair, name: str, lengths: Sequence[int]) -> dict[str, forerun.SpeculativeDecoder]:
    """Each with a drafter of its own: two engines may not share one."""
    shares = family_of(name).shares_encoder
    found = {PLAIN: forerun.SpeculativeDecoder(pair.target, None)}
    for length in lengths:
        drafter = forerun.DraftModel(pair.draft, shares_encoder=shares)
        found[f"drafts-{length}"] = forerun.SpeculativeDecoder(pair.target, drafter, policy=length)
    return found


def same_greedy(
    ways: dict[str, forerun.SpeculativeDecoder], sources: dict[str, Any], batch: int
) -> dict[str, Agreement]:
    texts = {
        way: decoder.generate(**sources, max_new_tokens=GREEDY_TOKENS, temperature=0.0, eos_token_id=[]).sequences
        for way, decoder in ways.items()
    }
    same = {way: int((text == texts[PLAIN]).all(dim=1).sum()) for way, text in texts.items()}
    return {way: Agreement(count, 0, batch - count) for way, count in same.items()}


def measured(
    name: str, pair: SyntheticPair, batch: int, lengths: Sequence[int], tokens: int, repeats: int
) -> Iterator[Measurement]:
    """All ways in turns, so that a slow moment hits all of them."""
    ways, sources = decoders(pair, name, lengths), a_source(pair.target, batch)
    agreement = same_greedy(ways, sources, batch)
    for repeat in range(repeats):
        for way, decoder in ways.items():

            def call(decoder: forerun.SpeculativeDecoder = decoder, seed: int = repeat) -> Any:
                return decoder.generate(**sources, max_new_tokens=tokens, temperature=1.0, seed=seed, eos_token_id=[])

            made, seconds = timed(pair.target.device, call)
            yield Measurement(
                method=way,
                batch=batch,
                category=name,
                group=0,
                repeat=repeat,
                seconds=seconds,
                prompt_tokens=batch,
                new_tokens=made.stats.num_emitted_tokens,
                rounds=made.stats.rounds,
                drafted=made.stats.num_draft_tokens,
                accepted=made.stats.num_accepted_tokens,
                repeated=0.0,
                agreement=None if way == PLAIN else agreement[way],
                phases={
                    part: getattr(made.stats, f"{part}_seconds") for part in ("draft", "score", "verify", "prefill")
                },
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=["whisper-large-v2", "t5-xxl"], choices=list(DRAFTS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--lengths", nargs="+", type=int, default=[6], help="of the drafts")
    parser.add_argument("--alpha", type=float, default=0.87)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", "-o", type=Path, default=Path("seq2seq.json"))
    chosen = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    origin, begun = provenance(device, ["python", *sys.argv]), time.perf_counter()
    titles = {PLAIN: "Forerun, plain", **{f"drafts-{n}": f"Forerun, drafts of {n}" for n in chosen.lengths}}
    settings = {"alpha": chosen.alpha, "tokens": chosen.tokens, "temperature": 1.0, "drafts": DRAFTS, "rule": "token"}
    record = Record(origin, settings, titles, False, ())
    for name in chosen.pairs:
        pair = build_seq2seq_pair(name, chosen.alpha, device=device)
        for batch in chosen.batch_sizes:
            for one in measured(name, pair, batch, chosen.lengths, chosen.tokens, chosen.repeats):
                record = replace(record, measurements=(*record.measurements, one))
                print(f"{time.perf_counter() - begun:6.1f} s  {_in_words(one)}", flush=True)
            write(record, chosen.output)
        del pair
        torch.cuda.empty_cache()
    record = replace(record, complete=True)
    write(record, chosen.output)
    for table in tables(record):
        print(as_text(table))


def _in_words(one: Measurement) -> str:
    gained = 1 + (one.accepted or 0) / max(one.rounds, 1)
    phases = ", ".join(f"{part} {seconds:.2f}" for part, seconds in one.phases.items())
    return (
        f"{one.category} x {one.batch}, {one.method}: {one.seconds:.3f} s ({phases}), {gained:.2f} tokens a round, "
        f"greedy {one.agreement}"
    )


if __name__ == "__main__":
    main()
