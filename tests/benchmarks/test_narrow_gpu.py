"""The record of narrow weights, from made-up times."""

from __future__ import annotations

import torch

from benchmarks.narrow_gpu.report import make_record
from benchmarks.narrow_gpu.results import NarrowResults, Timing
from forerun.measure.provenance import provenance


def test_a_record_tells_times_and_shares() -> None:
    results = NarrowResults(provenance(torch.device("cpu"), ["python"]), {"pair": "a pair"})
    assert make_record(results, "bf16", False).tables == ()
    results.timings += [
        Timing("bf16", "pass 1x1", 4e-3),
        Timing("fp8", "pass 1x1", 2e-3),
        Timing("fp8", "plain, 1", 3e-3),
    ]
    results.weight_bytes |= {"bf16": 13_000_000_000, "fp8": 7_000_000_000}
    results.keys += [Timing("bf16 keys", "4096 tokens", 2e-5), Timing("int8 keys", "4096 tokens", 1e-5)]
    times, shares, keys = make_record(results, "bf16", True).tables
    assert times.rows[1] == ("fp8", "7.00", "2.00", "3.00")
    assert shares.rows[0][:3] == ("fp8", "7.00", "0.50")
    assert keys.rows == (("bf16 keys", "20.0"), ("int8 keys", "10.0"))
