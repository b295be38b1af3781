"""Stop strings: nothing of a stop leaks, nothing before it is lost, whatever the pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from qwen3_fixture import CONFIG, tokenizer_json

from qwenc.errors import UsageError
from qwenc.text.stream import StopStrings, TextOutput
from qwenc.text.tokenizer import Tokenizer


def naive(text: str, stops) -> str:
    """The text before the stop that is complete first; of those complete together, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def run(pieces, stops) -> tuple[str, bool]:
    filter_, out = StopStrings(stops), ""
    for piece in pieces:
        text, stopped = filter_.push(piece)
        out += text
        if stopped:
            return out, True
    return out + filter_.flush(), False


SMALL = st.text(alphabet="ab\n👍", max_size=14)
STOPS = st.lists(st.text(alphabet="ab\n👍", min_size=1, max_size=4), max_size=3)


@given(SMALL, STOPS, st.lists(st.integers(0, 14), max_size=5))
def test_any_chopping_equals_the_naive_cut(text, stops, places):
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    pieces = [text[start:end] for start, end in pairwise(edges)]
    out, stopped = run(pieces, stops)
    assert out == naive(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(SMALL, STOPS)
def test_what_is_out_is_never_taken_back_and_no_more_is_held_than_needed(text, stops):
    filter_, out, seen = StopStrings(stops), "", ""
    for char in text:
        seen += char
        piece, stopped = filter_.push(char)
        out += piece
        if stopped:
            break
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_examples():
    assert run(["Hello wo", "rld. Bye"], ["world"]) == ("Hello ", True)
    assert run(["a\n", "\nb"], ["\n\n"]) == ("a", True)
    assert run(["a\n", "b\n"], ["\n\n"]) == ("a\nb\n", False)
    assert run(["ab", "c"], ["abc", "b"]) == ("a", True)  # "b" is complete first
    assert run(["abc"], ["abc", "b"]) == ("a", True)
    assert run(["xaab"], ["aab", "ab"]) == ("x", True)
    assert run(["aaab"], ["aab"]) == ("a", True)
    assert run(["stop"], ["stop"]) == ("", True)
    assert run([], ["x"]) == ("", False)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc", [1], [None]])
def test_empty_stops_are_a_usage_error(stops):
    with pytest.raises(UsageError, match="stop string"):
        StopStrings(stops)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tokenizer_json(), CONFIG)


def generate(tokenizer, text: str, stops) -> tuple[str, bool]:
    output, out = TextOutput(tokenizer, stops), ""
    for id in tokenizer.encode(text, special=False):
        piece, stopped = output.push(id)
        out += piece
        if stopped:
            return out, True
    return out + output.flush(), False


def test_stop_made_of_halves_of_two_tokens(tokenizer):
    first, second = tokenizer.encode("hello world", special=False)
    stop = (tokenizer.token_bytes(first)[-2:] + tokenizer.token_bytes(second)[:3]).decode()
    assert stop == "lo wo"
    assert generate(tokenizer, "hello world", [stop]) == ("hel", True)


def test_stop_inside_an_emoji_sequence_and_across_its_bytes(tokenizer):
    family = "👨‍👩‍👧‍👦"
    assert generate(tokenizer, f"a{family}b", ["\u200d👩"]) == ("a👨", True)
    assert generate(tokenizer, f"a{family}", ["👦"]) == ("a" + family[:-1], True)
    assert generate(tokenizer, "x👍🏽y", ["🏽"]) == ("x👍", True)


def test_a_stop_still_growing_at_the_end_is_printed(tokenizer):
    assert generate(tokenizer, "hello wor", ["world"]) == ("hello wor", False)


def test_a_replacement_character_can_complete_a_stop(tokenizer):
    output = TextOutput(tokenizer, ["a\ufffd"])
    byte_id = {tokenizer.token_bytes(id): id for id in range(256)}
    assert output.push(byte_id[b"a"]) == ("", False)
    assert output.push(byte_id[b"\xf0"]) == ("", False)
    assert output.flush() == ""


def test_long_stops_stay_cheap(tokenizer):
    filter_ = StopStrings(["a" * 5000 + "b"] * 3)
    out = "".join(filter_.push("a")[0] for _ in range(6000))
    assert out == "a" * 1000 and filter_.flush() == "a" * 5000
