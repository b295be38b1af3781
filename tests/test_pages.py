"""Reading a mapped file ahead, and how much memory there is for it."""

import mmap
import os
import sys

import numpy as np
import pytest

from qwenc.checkpoint import pages
from qwenc.errors import QwencError
from qwenc.machine.memory import available_memory


def mapped(path):
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize("size", [1, 5000, (32 << 20) + 1])
def test_reading_ahead_changes_nothing_and_ends(tmp_path, size):
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    held = mapped(tmp_path / "file")
    pages.prefer_large_pages(held)
    thread = pages.read_ahead(np.frombuffer(held, np.uint8))
    if sys.platform == "linux":
        assert thread is not None
    if thread is not None:
        thread.join(timeout=30)
        assert not thread.is_alive()
    np.testing.assert_array_equal(np.frombuffer(held, np.uint8), data)


@pytest.mark.parametrize("size", [1, 5000, 3 * pages.SLICE + 1])
def test_a_file_is_read_into_memory_as_it_is(tmp_path, size):
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    (tmp_path / "file").write_bytes(data.tobytes())
    read = pages.read_file(tmp_path / "file", size)
    np.testing.assert_array_equal(read, data)
    assert not read.flags.writeable
    for other in (size + 1, max(size - 1, 0)):
        with pytest.raises(QwencError, match="changed"):
            pages.read_file(tmp_path / "file", other)
    with pytest.raises(QwencError, match="none: cannot be read: No such file"):
        pages.read_file(tmp_path / "none", size)


def test_memory_that_cannot_be_had_is_told(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pages, "reserve", none)
    with pytest.raises(QwencError, match="Cannot allocate memory"):
        pages.read_file(tmp_path / "file", 2000)


def test_a_file_larger_than_memory_is_not_read_into_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(bytes(2000))
    monkeypatch.setattr(pages, "available_bytes", lambda: 1000)
    with pytest.raises(QwencError, match="leave it mapped"):
        pages.read_file(tmp_path / "file", 2000)


def test_a_file_larger_than_memory_is_not_read_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "available_memory", lambda: 1000)
    assert pages.read_ahead(np.zeros(900, np.uint8)) is None
    monkeypatch.setattr(pages, "available_memory", lambda: None)
    assert pages.read_ahead(np.zeros(900, np.uint8)) is None


def test_a_file_that_shrank_ends_the_reading(tmp_path):
    """Reading ahead must not be what kills the process."""
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    held = mapped(path)
    os.truncate(path, 0)
    thread = pages.read_ahead(np.frombuffer(held, np.uint8))
    if thread is not None:
        thread.join(timeout=30)
        assert not thread.is_alive()


def test_available_memory(tmp_path, monkeypatch):
    from qwenc.machine import memory

    meminfo, cgroups = tmp_path / "meminfo", tmp_path / "cgroup"
    assert available_memory(meminfo, cgroups) is None
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert available_memory(meminfo, cgroups) == 2 << 20
    monkeypatch.setattr(memory, "own_cgroups", lambda _root: {"": "/a/b", "memory": "/c"})
    for path, limit in (("memory.max", "max"), ("a/memory.max", "1000000\n"), ("memory/c/memory.limit_in_bytes", "1500000")):
        (cgroups / path).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / path).write_text(limit)
    assert available_memory(meminfo, cgroups) == 1000000
