"""The lines of a file of items."""

import os

import pytest

from qwenc.batch import lines
from qwenc.batch.lines import Line, LineReader, No


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", []),
        (b"a", [(1, b"a")]),
        (b"a\n", [(1, b"a")]),
        (b"a\r\nb\r\n", [(1, b"a"), (2, b"b")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"\n\n  \n\r\na\n\n", [(5, b"a")]),
        (b"\xef\xbb\xbf", []),
        (b"a\rb\n", [(1, b"a\rb")]),
        (b" a \n", [(1, b" a ")]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_lines(tmp_path, monkeypatch, data, wanted, chunk):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    (tmp_path / "in").write_bytes(data)
    with open(tmp_path / "in", "rb", buffering=0) as file:
        reader = LineReader(file.fileno(), "in")
        found = []
        while isinstance(line := reader.next(), Line):
            found.append(tuple(line))
        assert found == wanted and reader.next() is No.END
    assert lines.count_lines(tmp_path / "in") == len(wanted)


def test_a_line_beyond_the_limit_is_skipped_and_the_next_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 100)
    monkeypatch.setattr(lines, "CHUNK", 64)
    (tmp_path / "in").write_bytes(b"x" * 100 + b"\n" + b"y" * 101 + b"\n" + b"z" * 999 + b"\nb\n" + b"w" * 500)
    with open(tmp_path / "in", "rb", buffering=0) as file:
        reader = LineReader(file.fileno(), "in")
        assert [reader.next() for _ in range(6)] == [(1, b"x" * 100), (2, None), (3, None), (4, b"b"), (5, None), No.END]


def test_a_file_that_grows_is_read_to_the_size_it_had(tmp_path):
    (tmp_path / "in").write_bytes(b"a\nb")
    with open(tmp_path / "in", "rb", buffering=0) as file, open(tmp_path / "in", "ab", buffering=0) as writer:
        reader = LineReader(file.fileno(), "in")
        writer.write(b"c\nd\n")
        assert [reader.next() for _ in range(3)] == [(1, b"a"), (2, b"b"), No.END]


def test_a_pipe_is_waited_for_only_when_asked():
    read_end, write_end = os.pipe()
    reader = LineReader(read_end, "pipe")
    assert reader.next(wait=False) is No.YET
    os.write(write_end, b"a\nb")
    assert reader.next(wait=False) == (1, b"a") and reader.next(wait=False) is No.YET
    os.write(write_end, b"c\n")
    os.close(write_end)
    assert reader.next(wait=False) == (2, b"bc") and reader.next(wait=False) is No.END
    os.close(read_end)
