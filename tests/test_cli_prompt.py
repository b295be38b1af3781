"""Where `qwenc run` takes its prompt from, with a scripted engine (tests/fake_engine.py)."""

import os
import sys

import pytest
from fake_engine import asked

from qwenc.commands.prompt_input import read_prompt
from qwenc.errors import UsageError


@pytest.mark.parametrize("args", [["hi"], ["run", "hi"], ["-p", "hi"], ["run", "-p", "hi"], ["--prompt=hi"], ["--", "hi"]])
def test_ways_to_give_a_prompt(cli, args):
    code, out, _ = cli("-m", "M", *args) if args[0] != "run" else cli("run", "-m", "M", *args[1:])
    assert code == 0 and out == "Hello wörld\n" and asked("encode_prompt")["text"] == "hi"


def test_a_prompt_named_like_a_command_or_an_option(cli):
    assert cli("-m", "M", "-p", "info")[0] == 0 and asked("encode_prompt")["text"] == "info"
    assert cli("run", "-m", "M", "env")[0] == 0 and asked("encode_prompt")["text"] == "env"
    assert cli("-m", "M", "--", "-x")[0] == 0 and asked("encode_prompt")["text"] == "-x"
    assert cli("-m", "M", " ")[0] == 0 and asked("encode_prompt")["text"] == " "


@pytest.mark.parametrize("args", [[], ["-"], ["-f", "-"]])
def test_stdin_is_the_prompt_byte_for_byte(cli, args):
    code, _, _ = cli("-m", "M", *args, stdin="\ufeff a\r\nwörld\x00\n\n".encode())
    assert code == 0 and asked("encode_prompt")["text"] == " a\r\nwörld\x00\n\n"


def test_piped_stdin_is_left_alone_when_there_is_a_prompt(cli):
    cli("-m", "M", "hi", stdin=b"not me")
    assert asked("encode_prompt")["text"] == "hi" and sys.stdin.buffer.read() == b"not me"


def test_a_prompt_file_that_never_ends_is_refused(cli, monkeypatch):
    monkeypatch.setattr("qwenc.text.files.MOST", 1000)
    code, out, err = cli("-f", "/dev/zero")
    assert (code, out, err) == (2, "", ["qwenc: error: cannot read the prompt from /dev/zero: it is longer than 256 MiB"])


def test_an_endless_stdin_is_wrong_usage(cli, monkeypatch):
    with open("/dev/zero") as endless:
        monkeypatch.setattr("sys.stdin", endless)
        with pytest.raises(UsageError, match="from stdin: it is longer than 256 MiB"):
            read_prompt(None, None, None)


@pytest.mark.parametrize("data", [b"", "\ufeff".encode()])
def test_an_empty_stdin_or_file_is_wrong_usage(cli, tmp_path, data):
    code, _, err = cli("-m", "M", stdin=data)
    assert code == 2 and len(err) == 1 and "empty" in err[0]
    (tmp_path / "p").write_bytes(data)
    code, _, err = cli("-m", "M", "-f", str(tmp_path / "p"))
    assert code == 2 and len(err) == 1 and "empty" in err[0]


def test_a_closed_stdin_is_wrong_usage(cli, monkeypatch):
    import qwenc.commands.prompt_input as prompt_input

    monkeypatch.setattr(prompt_input, "sys", type("S", (), {"stdin": None}))
    code, _, err = cli("-m", "M")
    assert code == 2 and len(err) == 1 and "stdin is closed" in err[0]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"x", "x"),
        (b"x\n", "x\n"),
        (b"x\n\n", "x\n\n"),
        (b"\xef\xbb\xbfx", "x"),
        (b"\xef\xbb\xbf\xef\xbb\xbfx", "\ufeffx"),
        (b"a\r\nb\rc", "a\r\nb\rc"),
        (b"a\x00b", "a\x00b"),
        (b"\x1b[31m", "\x1b[31m"),
        ("é👍🏽".encode(), "é👍🏽"),
        (b" ", " "),
        (b"x" * 3_000_000, "x" * 3_000_000),
    ],
    ids=range(11),
)
def test_a_file_is_taken_as_its_bytes_are(cli, tmp_path, data, text):
    path = tmp_path / "prompt [x] [red] :smile:.txt"
    path.write_bytes(data)
    assert cli("-m", "M", "-f", str(path), "-n", "1")[0] == 0
    assert asked("encode_prompt")["text"] == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"ab\xffc", "byte 0xff at offset 2"),
        (b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5"),
        ("hi".encode("utf-16"), "byte 0xff at offset 0 (it looks like UTF-16"),
        (b"ab\xe2\x82", "byte 0xe2 at offset 2"),
        (b"\xed\xa0\x80", "byte 0xed at offset 0"),
    ],
)
def test_a_file_that_is_not_utf8_is_refused_with_the_offset(cli, tmp_path, data, says):
    path = tmp_path / "prompt"
    path.write_bytes(data)
    code, _, err = cli("-m", "M", "-f", str(path))
    assert code == 2 and len(err) == 1 and says in err[0]
    code, _, err = cli("-m", "M", stdin=data)
    assert code == 2 and len(err) == 1 and "stdin is not UTF-8" in err[0] and says in err[0]


def test_a_fifo_is_read_to_its_end(cli, tmp_path):
    import threading

    path = tmp_path / "fifo"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_bytes(b"from a fifo"))
    writer.start()
    assert cli("-m", "M", "-f", str(path))[0] == 0
    writer.join()
    assert asked("encode_prompt")["text"] == "from a fifo"
