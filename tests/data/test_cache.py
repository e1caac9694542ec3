"""Caches: noticed when damaged, whole or not there, safe for two processes."""

import errno
import os
import subprocess
import sys
import time

import numpy as np
import pytest

pytest.importorskip("transformers")

from mercer import data
from mercer.data import cache


def write_numbers(writer):
    writer.append(np.arange(1000))
    writer.append(np.arange(500))
    writer.notes["about"] = "numbers"


def load(path, write=write_numbers):
    return cache.load(path, write, dtype="uint16")


def refuse(writer):
    raise AssertionError("it is there already")


def test_an_array_is_written_once(tmp_path):
    path = tmp_path / "new" / "a.arr"
    first = load(path)
    again = load(path, refuse)
    assert again.array.shape == (1500,)
    assert again.notes == {"about": "numbers"}
    assert np.array_equal(first.array, again.array)
    with pytest.raises(ValueError, match="read-only"):
        again.array[0] = 1


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "cut":
        del content[-100:]
    elif kind == "cut to the header":
        del content[10:]
    elif kind == "empty":
        content.clear()
    elif kind == "longer":
        content += b"x"
    elif kind == "a bit in the middle":
        content[700] ^= 1
    elif kind == "a bit at the end":
        content[-5] ^= 1
    elif kind == "another format":
        content[:9] = b"something"
    elif kind == "binary junk":
        content[:] = bytes(range(256)) * 8
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind",
    [
        "cut",
        "cut to the header",
        "empty",
        "longer",
        "a bit in the middle",
        "a bit at the end",
        "another format",
        "binary junk",
    ],
)
def test_a_damaged_file_is_detected_and_rebuilt(kind, tmp_path, caplog):
    path = tmp_path / "a.arr"
    load(path)
    damage(path, kind)
    found = load(path)
    assert np.array_equal(found.array[1000:], np.arange(500))
    assert "rebuilt" in caplog.text
    load(path, refuse)


def test_a_writer_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.arr"

    def fail(writer):
        writer.append(np.arange(10))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == [".a.arr.lock"]
    load(path)
    load(path, refuse)


def test_what_a_killed_process_left_is_removed(tmp_path):
    left = tmp_path / ".a.arr.abc.tmp"
    left.write_bytes(b"half")
    load(tmp_path / "a.arr")
    assert not left.exists()


def test_a_full_disk_gives_an_error(tmp_path):
    def fill(writer):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space left.*give another cache_dir") as caught:
        load(tmp_path / "a.arr", fill)
    assert caught.value.errno == errno.ENOSPC
    assert not list(tmp_path.glob("*.arr"))


def test_a_cache_dir_that_is_no_folder_gives_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="give another cache_dir"):
        load(tmp_path / "file" / "a.arr")


def test_a_read_only_folder_gives_an_error(tmp_path, monkeypatch):
    def deny(prefix, suffix, dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir / f"{prefix}x{suffix}"))

    monkeypatch.setattr(cache.tempfile, "mkstemp", deny)
    with pytest.raises(PermissionError, match=r"Permission denied.*give another cache_dir"):
        load(tmp_path / "a.arr")


def test_the_key_is_the_content(tmp_path):
    def keys(text, tokenizer="bytes"):
        (tmp_path / "train.txt").write_text(text)
        (tmp_path / "valid.txt").write_text("v")
        return data.text(tmp_path, tokenizer=tokenizer, cache_dir=tmp_path / "c").train.fingerprint

    first = keys("some text\n" * 9)
    os.utime(tmp_path / "train.txt", (1, 1))
    assert keys("some text\n" * 9) == first
    assert keys("some Text\n" * 9) != first
    assert keys("some text\n" * 9, "bpe:260") != first
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "a-train.txt").write_text("some text\n" * 9)
    (moved / "valid.txt").write_text("v")
    again = data.text(moved, tokenizer="bytes", cache_dir=tmp_path / "c")
    assert again.train.fingerprint == first


# the module alone, without torch: two processes are to meet, not to load libraries
TWO = """
import importlib.util, sys, time, numpy as np
from pathlib import Path

spec = importlib.util.spec_from_file_location("cache", sys.argv[1])
cache = sys.modules["cache"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)

def write(writer):
    print("wrote", flush=True)
    for n in range(50):
        writer.append(np.full(1000, n))
        time.sleep(0.01)

found = cache.load(Path(sys.argv[2]), write, dtype="uint32")
assert found.array.sum() == 1000 * sum(range(50))
"""


def start(path):
    command = [sys.executable, "-c", TWO, cache.__file__, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="no locks on Windows: the last writer stays")
def test_two_processes_write_one_array_once(tmp_path):
    both = [start(tmp_path / "a.arr") for _ in range(2)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert "".join(said).count("wrote") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed in another way")
def test_a_process_that_is_killed_leaves_no_array(tmp_path):
    path = tmp_path / "a.arr"
    process = start(path)
    assert process.stdout.readline() == "wrote\n"
    time.sleep(0.05)
    process.kill()
    process.communicate()
    assert not path.exists()
    assert list(tmp_path.glob(".a.arr.*.tmp"))
    load(path)
    assert not list(tmp_path.glob(".a.arr.*.tmp"))


def test_writers_without_locks_leave_one_whole_array(tmp_path, monkeypatch):
    """Where a disk has no locks, both write and the last one stays."""
    from contextlib import contextmanager

    @contextmanager
    def no_lock(path):
        yield False

    monkeypatch.setattr(cache, "_alone", no_lock)
    path = tmp_path / "a.arr"

    def write_twice(writer):
        write_numbers(writer)
        load(path)

    assert load(path, write_twice).array.shape == (1500,)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_damaged_tokenizer_is_trained_again(tmp_path):
    first = data.text("embedded", tokenizer="bpe:300", cache_dir=tmp_path)
    (file,) = tmp_path.glob("bpe-*.arr")
    for content in (b"", b"{", file.read_bytes()[:-20]):
        file.write_bytes(content)
        again = data.text("embedded", tokenizer="bpe:300", cache_dir=tmp_path)
        assert again.train.fingerprint == first.train.fingerprint


def test_the_usual_folder():
    assert cache.choose_folder(None).name in ("mercer", "Cache")
    assert str(cache.choose_folder("~/x")).endswith("x")
    assert "~" not in str(cache.choose_folder("~/x"))
