"""`--plot` makes the folder it is to draw into, as `--output` does."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.measure.plot import check_plot, save


class Figure:
    def savefig(self, path: Path, **_: object) -> None:
        path.write_bytes(b"picture")


def test_a_picture_may_go_into_a_new_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "folder" / "picture.png"
    check_plot(path)
    assert not path.parent.exists()
    save(Figure(), path)
    assert path.read_bytes() == b"picture"
