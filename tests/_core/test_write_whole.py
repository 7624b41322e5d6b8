"""`write_whole`: a file is there whole or not at all, with an ordinary file's mode."""

import errno
import os
import stat
import threading

import pytest

from gradflow._core.file_format import write_whole


@pytest.fixture
def umask():
    """A function that sets the umask, which is put back after the test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000, 0o007])
def test_the_mode_follows_the_umask(mask, umask, tmp_path):
    umask(mask)
    path = tmp_path / "file"
    status = write_whole(path, lambda file: file.write(b"content"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert path.read_bytes() == b"content"
    assert (status.st_size, status.st_ino) == (7, path.stat().st_ino)


def test_the_umask_is_never_set(tmp_path, monkeypatch):
    """Not even for a moment: it belongs to all threads of the process."""

    def refuse(mask):
        raise AssertionError("os.umask was called")

    monkeypatch.setattr(os, "umask", refuse)
    write_whole(tmp_path / "file", lambda file: file.write(b"content"))


def test_the_file_is_synced_before_the_rename_and_the_folder_after(
    tmp_path, monkeypatch
):
    path, synced, fsync = tmp_path / "file", [], os.fsync

    def record(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        inode = os.fstat(handle).st_ino
        synced.append((kind, inode, path.exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    write_whole(path, lambda file: file.write(b"content"))
    assert synced == [
        ("file", path.stat().st_ino, False),
        ("folder", tmp_path.stat().st_ino, True),
    ]


def fail_on_folders(monkeypatch, code):
    fsync = os.fsync

    def fail(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail)


def test_a_file_system_that_syncs_no_folders_will_do(tmp_path, monkeypatch):
    fail_on_folders(monkeypatch, errno.EINVAL)
    write_whole(tmp_path / "file", lambda file: file.write(b"content"))
    assert names(tmp_path) == ["file"]


def test_a_broken_disk_is_reported(tmp_path, monkeypatch):
    fail_on_folders(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_whole(tmp_path / "file", lambda file: file.write(b"content"))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(error, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"half of the n")
        raise error

    with pytest.raises(type(error)):
        write_whole(path, fail)
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_a_failed_rename_leaves_no_temporary_file(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file", lambda file: file.write(b"content"))
    assert names(tmp_path) == ["file"]


def test_temporary_names_have_the_pattern_that_checkpoints_clean_up(tmp_path):
    seen = []

    def look(file):
        seen.extend(tmp_path.glob(".run.npz.????????"))
        assert [path.name for path in seen] == names(tmp_path)

    write_whole(tmp_path / "run.npz", look)
    assert len(seen) == 1


def test_threads_that_write_one_file_do_not_meet(tmp_path):
    """Each has a temporary file of its own; one of the contents wins."""
    path, together = tmp_path / "file", threading.Barrier(8)
    contents = [bytes([i]) * 1000 for i in range(8)]

    def write(content):
        write_whole(path, lambda file: (file.write(content), together.wait(10)))

    threads = [threading.Thread(target=write, args=(c,)) for c in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert names(tmp_path) == ["file"]
