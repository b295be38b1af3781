"""Streaming decode: however tokens split characters, the pieces are whole and join to the one-shot decode."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qwen3_fixture import CASES, CONFIG, tokenizer_json

from qwenc.text.stream import TextOutput, Utf8Stream
from qwenc.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tokenizer_json(), CONFIG)


def chop(data: bytes, places) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


def pieces_of(chunks) -> list[str]:
    stream = Utf8Stream()
    return [*map(stream.push, chunks), stream.flush()]


@given(st.text(), st.lists(st.integers(0, 500)))
def test_text_survives_any_chopping(text, places):
    pieces = pieces_of(chop(text.encode(), places))
    assert "".join(pieces) == text and pieces[-1] == ""


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_any_bytes_join_to_the_one_shot_decode(data, places):
    assert "".join(pieces_of(chop(data, places))) == data.decode("utf-8", "replace")


INTERESTING = st.sampled_from(
    [bytes([b]) for b in (0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE0, 0xE2, 0xED, 0xA0, 0x9F, 0xF0, 0xF4, 0x90, 0xF5, 0xFF)]
)


@given(st.lists(INTERESTING, max_size=12))
def test_edge_bytes_one_by_one(data):
    assert "".join(pieces_of(data)) == b"".join(data).decode("utf-8", "replace")


@given(st.lists(INTERESTING, max_size=12))
def test_at_most_three_bytes_are_held(data):
    """What is out so far is the decode of all but at most the last three bytes, so an invalid byte never stalls the stream."""
    stream, out, seen = Utf8Stream(), "", b""
    for byte in data:
        seen += byte
        out += stream.push(byte)
        assert any(out == seen[: len(seen) - held].decode("utf-8", "replace") for held in range(4))


def test_an_invalid_byte_shows_at_once():
    stream = Utf8Stream()
    assert stream.push(b"a\xff") == "a\ufffd"
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.push(b"b") == "\ufffdb"
    assert stream.push(b"\xe2\x82") == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(b"\xac!") == "\ufffd!"  # nothing is left from before the flush


@pytest.mark.parametrize("case", CASES["texts"], ids=lambda case: case["name"])
@pytest.mark.parametrize("special", [False, True])
def test_ids_one_by_one_join_to_the_one_shot_decode(tokenizer, case, special):
    ids = tokenizer.encode(case["text"], special=special)
    output = TextOutput(tokenizer)
    pieces = [output.push(id) for id in ids]
    assert "".join(text for text, _ in pieces) + output.flush() == tokenizer.decode(ids)
    assert not any(stopped for _, stopped in pieces)
    if "\ufffd" not in case["text"]:
        assert not any("\ufffd" in text for text, _ in pieces)


def test_lone_byte_tokens(tokenizer):
    byte_id = {tokenizer.token_bytes(id): id for id in range(256)}
    ids = [byte_id[bytes([byte])] for byte in "é👍🏽".encode()]
    output = TextOutput(tokenizer)
    assert [output.push(id)[0] for id in ids] == ["", "é", "", "", "", "👍", "", "", "", "🏽"]
    assert output.push(byte_id[b"\x80"])[0] == "\ufffd"
    assert output.push(byte_id[b"\xf0"])[0] == "" and output.flush() == "\ufffd"


def test_ids_beyond_the_tokenizer_are_silent(tokenizer):
    output = TextOutput(tokenizer, ["x"])
    assert [output.push(id) for id in (151700, 151645, 151935)] == [("", False)] * 3
    assert output.flush() == ""
