"""Tests of atomic writes of files and folders."""

import errno
import os
import stat
from pathlib import Path

import pytest

from creditflow._utils.files import make_folder, make_whole, write_named, write_whole
from creditflow.errors import InputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# write_whole


def test_old_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    def write(aside: Path) -> None:
        assert aside.parent == tmp_path  # the same file system, so that renaming is atomic
        with aside.open("w") as file:
            file.write("ne")
            file.flush()
            seen.append(target.read_text())
            file.write("w")
        seen.append(target.read_text())

    seen: list[str] = []
    target = tmp_path / "a.txt"
    target.write_text("old and long")
    write_whole(target, write)
    assert seen == ["old and long", "old and long"]
    assert target.read_text() == "new"
    assert names(tmp_path) == ["a.txt"]
    with pytest.raises(FileNotFoundError):
        write_whole(target, lambda path: None)
    assert target.read_text() == "new"


@pytest.mark.parametrize("old", [None, "old"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("bug"), KeyboardInterrupt()])
def test_failing_writer_leaves_the_file_unchanged(tmp_path: Path, old: str | None, error: BaseException) -> None:
    def write(aside: Path) -> None:
        aside.write_text("half")
        raise error

    target = tmp_path / "a.txt"
    if old:
        target.write_text(old)
    with pytest.raises(type(error)):
        write_whole(target, write)
    assert (target.read_text() if target.exists() else None) == old
    assert names(tmp_path) == (["a.txt"] if old else [])


def test_links_pipes_and_devices_are_written_themselves(tmp_path: Path) -> None:
    target, link = tmp_path / "a.txt", tmp_path / "link"
    link.symlink_to(target)
    write_whole(link, lambda path: path.write_text("new"))
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    read, write = os.pipe()
    write_whole(Path(f"/dev/fd/{write}"), lambda path: path.write_text("piped"))
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "piped"
    os.mkfifo(tmp_path / "device")
    reader = os.open(tmp_path / "device", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "device", lambda path: path.write_text("sent"))
    assert os.read(reader, 9) == b"sent"
    os.close(reader)
    assert names(tmp_path) == ["a.txt", "device", "link"]


# make_whole


def fill(folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "weights.bin").write_bytes(b"\0\1" * 1000)
    (folder / "config.json").write_text("{}")
    (folder / "config.json").chmod(0o600)


def test_write_named_error_names_the_option(tmp_path: Path) -> None:
    write_named(tmp_path / "deep" / "a.txt", lambda path: path.write_text("a"), "-o")
    assert (tmp_path / "deep" / "a.txt").read_text() == "a"
    with pytest.raises(InputError, match=f"-o: {tmp_path / 'deep'} cannot be written: Is a directory"):
        write_named(tmp_path / "deep", lambda path: path.write_text("a"), "-o")
    with pytest.raises(InputError, match=r"-o: \. cannot be written: Is a directory"):
        write_named(Path(), lambda path: path.write_text("a"), "-o")
    assert (names(tmp_path), names(tmp_path / "deep")) == (["deep"], ["a.txt"])

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_named(tmp_path / "b.txt", full, "-o")


def test_folder_is_made_whole_with_nested_files(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "models" / "m"
    make_whole(target, fill)
    assert (target / "deep" / "er" / "weights.bin").read_bytes() == b"\0\1" * 1000
    assert names(target) == ["config.json", "deep"]
    assert names(target.parent) == ["m"]
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (target, target / "config.json")]
    assert modes == [0o755, 0o644]  # other users may read a shared cache


def test_folder_files_keep_a_private_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_whole(tmp_path / "m", fill)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m" / "config.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [OSError("disk full"), FileExistsError(errno.EEXIST, "bug"), KeyboardInterrupt()])
def test_failing_filler_leaves_nothing(tmp_path: Path, error: BaseException, exists: bool) -> None:
    def half(folder: Path) -> None:
        (folder / "weights.bin").write_text("half")
        assert (tmp_path / "m").exists() == exists
        raise error

    if exists:
        make_whole(tmp_path / "m", fill)
    with pytest.raises(type(error)):
        make_whole(tmp_path / "m", half)
    assert names(tmp_path) == ["m"] * exists
    assert not exists or names(tmp_path / "m") == ["config.json", "deep"]


def test_first_of_two_concurrent_folders_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "m"

    def slower(folder: Path) -> None:
        make_whole(target, lambda other: (other / "who").write_text("first"))
        (folder / "who").write_text("second")
        (folder / "more").write_text("second")

    make_whole(target, slower)
    assert (target / "who").read_text() == "first"
    assert names(target) == ["who"]
    assert names(tmp_path) == ["m"]


def test_folder_cannot_replace_a_file(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.write_text("kept")
    with pytest.raises(OSError, match="directory"):
        make_whole(target, fill)
    assert target.read_text() == "kept"
    assert names(tmp_path) == ["m"]


# make_folder


@pytest.mark.parametrize("below", ["", "sub", "sub/sub"])
def test_make_folder_error_names_option_and_reason(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("kept")
    path = tmp_path / "file" / below
    reason = os.strerror(20) if below else os.strerror(17)
    with pytest.raises(InputError) as raised:
        make_folder(path, "trainer.default_local_dir")
    assert str(raised.value) == f"trainer.default_local_dir: {path} cannot be made: {reason}"
    assert (tmp_path / "file").read_text() == "kept"
