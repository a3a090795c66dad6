"""`python -m benchmarks.kernels` as far as a CPU can tell: bytes, tables, pictures, a clear word without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernels.cases import CASES, Case
from benchmarks.kernels.results import KernelResults, Measurement, Times
from forerun.measure.plot import draw
from forerun.measure.provenance import provenance
from forerun.measure.record import load


def results() -> KernelResults:
    theirs = Times(91.0, 41, 520.0)
    made = [Measurement(c, Times(8.0, 2, 60.0, 7.5), theirs if c.batch == 1 else None, None) for c in CASES]
    sweep = {"32000 x 1": {"as it is": 7.5, "block=2048": 7.9}}
    return KernelResults(provenance("cpu", ["python", "-m", "benchmarks.kernels"]), 4e12, tuple(made), sweep)


def test_bytes_that_must_be_read() -> None:
    large = Case(256000, 32, 7)
    assert large.must_read == 32 * 256000 * 10 * 4
    assert results().floor(large) == pytest.approx(81.92)
    assert Case(256000, 32, 7, kept=False).must_read == 32 * 256000 * 17 * 4
    assert Case(256000, 32, 7, dtype="bfloat16").must_read * 2 == large.must_read
    assert Case(256000, 32, 7, rule="sigmoid").must_read == 32 * 256000 * 2 * 4


def test_a_record_survives_the_disk_and_has_tables(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    results().record(complete=True).save(path)
    again = load(path)
    main, other = again.tables
    assert len(main.rows) == len(CASES) == len(again.rows) and main.rows[0][2] == "7.5" and main.rows[0][-2] == "41"
    assert main.rows[2][-1] == "-" and other.rows[1] == ("block=2048", "7.9")
    assert "TB/s" in again.remarks[0] and again.rows[0]["floor"] == results().floor(CASES[0])


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = results().record(complete=True).figure
    assert figure is not None
    draw(figure, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    from benchmarks.kernels.run import check_device
    from forerun.errors import ForerunError

    with pytest.raises(ForerunError, match="GPU"):
        check_device()
