"""`forerun bench kernels` as far as a CPU can tell: bytes, tables, pictures, and a clear word where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from forerun.bench.kernels.cases import CASES, Case
from forerun.bench.kernels.plot import plot
from forerun.bench.kernels.record import KernelRecord, Measurement, read
from forerun.bench.kernels.report import remarks, summary, tables
from forerun.bench.kernels.timing import Times
from forerun.bench.records import write
from forerun.measure.provenance import provenance


def record() -> KernelRecord:
    theirs = Times(91.0, 41, 520.0)
    made = [Measurement(c, Times(8.0, 2, 60.0, 7.5), theirs if c.batch == 1 else None, None) for c in CASES]
    sweep = {"32000 x 1": {"as it is": 7.5, "block=2048": 7.9}}
    return KernelRecord(provenance("cpu", ["forerun", "bench", "kernels"]), 4e12, True, tuple(made), sweep)


def test_bytes_that_must_be_read() -> None:
    large = Case(256000, 32, 7)
    assert large.must_read == 32 * 256000 * 10 * 4
    assert record().floor(large) == pytest.approx(81.92)
    assert Case(256000, 32, 7, kept=False).must_read == 32 * 256000 * 17 * 4
    assert Case(256000, 32, 7, dtype="bfloat16").must_read * 2 == large.must_read
    assert Case(256000, 32, 7, rule="sigmoid").must_read == 32 * 256000 * 2 * 4


def test_a_record_survives_the_disk_and_makes_tables(tmp_path: Path) -> None:
    made = record()
    path = tmp_path / "kernels.json"
    write(made, path, summary(made))
    again = read(path)
    assert again.measurements == made.measurements and again.sweep == made.sweep
    main, other = tables(again)
    assert len(main.rows) == len(CASES) and main.rows[0][2] == "7.5" and main.rows[0][-2] == "41"
    assert main.rows[2][-1] == "-" and other.rows[1] == ("block=2048", "7.9")
    assert "TB/s" in remarks(again)[0]


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(record(), tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").stat().st_size > 10_000


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    from forerun.bench.kernels.run import check_device
    from forerun.errors import ForerunError

    with pytest.raises(ForerunError, match="GPU"):
        check_device()


def test_help_teaches() -> None:
    from forerun.cli.bench_kernels import kernels

    shown = CliRunner().invoke(kernels, ["--help"]).output
    assert "--sweep" in shown and "Needs a GPU" in shown
