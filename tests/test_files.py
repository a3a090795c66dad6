"""Files are written whole or not at all, with the user's mode, and what cannot be read or written is named."""

from __future__ import annotations

import gzip
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun.errors import ForerunError, InvalidArgument
from forerun.files import (
    allow_many_open_files,
    check_output,
    check_output_folder,
    fresh_folder,
    parse_json,
    read_json,
    read_text,
    replace_files,
    write_whole,
)
from forerun.loading.converted import is_sound, kept

LARGE = torch.zeros(100_000)


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS: dict[str, Any] = {
    "python": lambda path: path.write_bytes(bytes(100_000)),
    "torch": lambda path: torch.save({"a": LARGE}, path),
    "safetensors": lambda path: save_file({"a": LARGE}, path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_no_room_leaves_the_old_file_and_nothing_else(tmp_path: Path, writer: str) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with limited_files(10_000), pytest.raises(ForerunError, match=r"cannot write .*file.*make room"):
        write_whole(path, WRITERS[writer])
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path: Path, writer: str) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "file", WRITERS[writer])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", interrupted)
    assert not list(tmp_path.iterdir())


def test_a_fresh_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    with (
        limited_files(10_000),
        pytest.raises(ForerunError, match="cannot write"),
        fresh_folder(tmp_path / "m") as place,
    ):
        save_file({"a": LARGE}, place / "weights")
    assert not list(tmp_path.iterdir())
    with fresh_folder(tmp_path / "m") as place:
        save_file({"a": LARGE}, place / "weights")
        (place / "other").write_text("x")
    assert (tmp_path / "m" / "weights").stat().st_mode == (tmp_path / "m" / "other").stat().st_mode
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidArgument, match="no ordinary file"):
        check_output(pipe)
    with pytest.raises(InvalidArgument, match="no ordinary file"):
        write_whole(pipe, WRITERS["python"])
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_an_output_that_cannot_be_written_is_noticed_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="--output"):
        check_output(tmp_path / "file" / "r.json")
    with pytest.raises(InvalidArgument, match="-o"):
        check_output_folder(tmp_path / "file" / "folder", "-o")
    with pytest.raises(InvalidArgument, match="is a folder"):
        check_output(tmp_path)
    check_output(tmp_path / "new" / "r.json")
    check_output_folder(tmp_path / "new" / "folder")
    with pytest.raises(InvalidArgument, match="name too long"):
        check_output_folder(tmp_path / "new" / ("x" * 300))
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "a check leaves nothing behind"


def test_the_folder_of_a_file_is_made(tmp_path: Path) -> None:
    write_whole(tmp_path / "new" / "deep" / "r.json", WRITERS["python"])
    assert (tmp_path / "new" / "deep" / "r.json").exists()


def test_an_existing_file_survives_the_check(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("kept")
    check_output(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == "kept"


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000])
def test_endless_nesting_is_said(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(text)
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"f\.json.*nested too deeply.*try again"):
        read_json(tmp_path / "f.json", "try again")


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(b"some text\n" * 100)
    path = tmp_path / "p.txt.gz"
    for content in (whole[:-9], whole[:12] + b"\xff\xff\xff" + whole[15:], b"no gzip", b""):
        path.write_bytes(content)
        if content:
            with pytest.raises(InvalidArgument, match=r"p\.txt\.gz cannot be read"):
                read_text(path)


def test_a_converted_model_without_room_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        save_file({"a": LARGE}, folder / "model.safetensors")

    with limited_files(10_000), pytest.raises(ForerunError, match="it needs 1 MB there"):
        kept(tmp_path / "model", make, "1 MB")
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]
    kept(tmp_path / "model", make, "1 MB")
    assert is_sound(tmp_path / "model")
    modes = {path.stat().st_mode for path in (tmp_path / "model").iterdir()}
    assert len(modes) == 1


def test_files_are_not_made_beside_a_folder_that_may_be_mounted(tmp_path: Path) -> None:
    """What is renamed from elsewhere onto another disk does not arrive."""
    there, missing, places = tmp_path / "there", tmp_path / "missing", list[Path]()
    there.mkdir()

    def write(place: Path) -> None:
        places.append(place.parent)
        (place / "config.json").write_text("{}")

    for folder in (there, missing):
        replace_files(folder, write, "config.json")
        assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert places == [there, tmp_path] and len(list(tmp_path.iterdir())) == 2


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
    try:
        allow_many_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("opener", [open, gzip.open])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, opener: Any) -> None:
    path = tmp_path / ("p.txt.gz" if opener is gzip.open else "p.txt")
    with opener(path, "wb") as file:
        file.write("\ufeffhello\ufeff".encode())
    assert read_text(path) == "hello\ufeff"
