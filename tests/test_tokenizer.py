"""The tokenizer against ids frozen from transformers (tests/data/qwen3-tokenizer/make.py), and every way that ids can be odd."""

import json
import os
from pathlib import Path

import pytest
from qwen3_fixture import CASES, CONFIG, tokenizer_json

from qwenc.errors import QwencError
from qwenc.text.prompt import resolve_eos
from qwenc.text.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["trimmed", "full"])
def qwen3(request):
    """The trimmed tokenizer that is committed, and the real one where QWENC_TEST_QWEN3_TOKENIZER names its folder."""
    if request.param == "trimmed":
        return Tokenizer(tokenizer_json(), CONFIG)
    if "QWENC_TEST_QWEN3_TOKENIZER" not in os.environ:
        pytest.skip("QWENC_TEST_QWEN3_TOKENIZER is not set")
    return Tokenizer(Path(os.environ["QWENC_TEST_QWEN3_TOKENIZER"], "tokenizer.json").read_bytes(), CONFIG)


def build(model: dict, added=(), **parts) -> bytes:
    tokens = [
        {"id": id, "content": text, "special": special, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for id, text, special in added
    ]
    base = {"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": None}
    return json.dumps({**base, "added_tokens": tokens, "post_processor": None, "decoder": None, "model": model, **parts}).encode()


def llama_like(**parts) -> bytes:
    """A SentencePiece-style tokenizer: <s> in front, ▁ for a space, bytes as <0x..>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi", "s", "<", ">", "/"]
    added = [(0, "<unk>", True), (1, "<s>", True), (2, "</s>", True)]
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return build(
        {
            "type": "BPE",
            "vocab": {piece: id for id, piece in enumerate(pieces)},
            "merges": [["▁", "h"], ["▁h", "i"]],
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
        },
        added,
        **{
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
            "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
            },
            **parts,
        },
    )


@pytest.mark.parametrize("case", CASES["texts"], ids=lambda case: case["name"])
def test_ids_equal_transformers(qwen3, case):
    assert qwen3.encode(case["text"], special=True) == case["ids"]
    assert qwen3.encode_with_bos(case["text"]) == case["ids"]


@pytest.mark.parametrize("case", CASES["texts"], ids=lambda case: case["name"])
def test_plain_encoding_has_no_control_token_and_keeps_the_text(qwen3, case):
    import unicodedata

    ids = qwen3.encode(case["text"], special=False)
    assert not set(ids) & set(qwen3.control_tokens.values())
    assert qwen3.decode(ids) == unicodedata.normalize("NFC", case["text"])


def test_control_tokens_are_the_special_ones_and_those_in_angle_brackets(qwen3):
    assert qwen3.control_tokens["<|im_end|>"] == 151645
    assert {"<think>", "</think>", "<tool_call>", "</tool_response>", "<|fim_prefix|>"} <= set(qwen3.control_tokens)
    spaces = build({"type": "BPE", "vocab": {"a": 0}, "merges": []}, [(1, "   ", False), (2, "<x>", False), (3, "!", True)])
    assert set(Tokenizer(spaces).control_tokens) == {"<x>"}


def test_special_and_unknown_ids_have_no_bytes(qwen3):
    assert qwen3.vocab_size == 151669
    assert 151645 in qwen3.special_ids and 151667 not in qwen3.special_ids
    for id in (151643, 151645, 151669, 151700, 151935, 10**12, -1):
        assert qwen3.token_bytes(id) == b""
    assert qwen3.token_bytes(151667) == b"<think>"
    assert qwen3.decode([151700, 39, 151645]) == "H"


def test_a_vocabulary_with_gaps():
    tokenizer = Tokenizer(build({"type": "BPE", "vocab": {"a": 0, "b": 3, "<x>": 5}, "merges": []}, [(5, "<x>", False)]))
    assert tokenizer.vocab_size == 6
    assert [tokenizer.token_bytes(id) for id in range(7)] == [b"a", b"", b"", b"b", b"", b"<x>", b""]
    with pytest.raises(QwencError, match="gaps"):
        tokenizer.encode_sealed("a", "\ufdd0")


def test_every_byte_survives(qwen3):
    single = [qwen3.token_bytes(id) for id in range(256)]
    assert sorted(single) == [bytes([byte]) for byte in range(256)]


def test_llama_style_bytes_and_start_token():
    tokenizer = Tokenizer(llama_like())
    assert tokenizer.encode_with_bos("hi") == [1, 263]
    assert [tokenizer.token_bytes(id) for id in (1, 263, 3 + 0xE2, 259)] == [b"", b" hi", b"\xe2", b" "]
    ids = tokenizer.encode_with_bos("hi €")
    assert tokenizer.decode(ids) == " hi €"


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({}, [1, 263]),
        ({"add_bos_token": False}, [263]),
        ({"add_bos_token": True, "bos_token": "<s>"}, [1, 263]),
        ({"add_bos_token": True, "bos_token": {"content": "</s>"}}, [2, 1, 263]),
        ({"add_bos_token": None}, [1, 263]),
    ],
)
def test_start_token_follows_the_config(config, ids):
    assert Tokenizer(llama_like(), config).encode_with_bos("hi") == ids


def test_end_token_of_a_post_processor_is_not_added():
    processor = json.loads(llama_like())["post_processor"]
    processor["single"].append({"SpecialToken": {"id": "</s>", "type_id": 0}})
    processor["special_tokens"]["</s>"] = {"id": "</s>", "ids": [2], "tokens": ["</s>"]}
    assert Tokenizer(llama_like(post_processor=processor)).encode_with_bos("hi") == [1, 263]


def test_plain_llama_text_cannot_spell_a_control_token():
    tokenizer = Tokenizer(llama_like())
    ids = tokenizer.encode("hi</s>", special=False)
    assert 2 not in ids and tokenizer.decode(ids) == " hi</s>"


def test_a_model_that_itself_spells_a_control_token_is_refused():
    merges = {"type": "BPE", "vocab": {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}, "merges": [["<", "s"], ["<s", ">"]]}
    tokenizer = Tokenizer(build(merges, [(4, "<s>", True)]))
    assert tokenizer.encode("<s>", special=True) == [4]
    with pytest.raises(QwencError, match="cannot write '<s>' as plain text"):
        tokenizer.encode("<s>", special=False)


def test_length_limits_saved_in_the_file_do_not_cut_prompts():
    limits = {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "a",
            "pad_to_multiple_of": None,
        },
    }
    tokenizer = Tokenizer(build({"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}, **limits))
    assert tokenizer.encode("abab", special=True) == [0, 1, 0, 1]


def test_tokens_declared_only_in_the_config_are_added():
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
    declared = {"2": {"content": "<x>", "special": True}, "3": {"content": "<y>", "special": False}, "9": {"content": "<z>"}}
    tokenizer = Tokenizer(build(model), {"added_tokens_decoder": declared})
    assert tokenizer.encode("a<x>b<y>", special=True) == [0, 2, 1, 3]
    assert tokenizer.special_ids == {2} and tokenizer.vocab_size == 4


@pytest.mark.parametrize("junk", [b"", b"{}", b"<html>", b"\xff\xfe", b"[1]"])
def test_junk_is_one_clear_error(junk):
    with pytest.raises(QwencError, match="cannot be read"):
        Tokenizer(junk)


@pytest.mark.parametrize(
    ("generation", "config", "with_tokenizer", "ids"),
    [
        ({"eos_token_id": 5}, {}, False, {5}),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, False, {5, 6, 7}),
        (None, {"eos_token_id": [7, 8]}, False, {7, 8}),
        ({}, {"text_config": {"eos_token_id": 9}}, False, {9}),
        ({"eos_token_id": None}, {"eos_token_id": None}, False, set()),
        ({"eos_token_id": [151645, 151643]}, {"eos_token_id": 151643}, True, {151643, 151645}),
        ({"eos_token_id": 151643}, {"eos_token_id": 151643}, True, {151643, 151645}),  # a Base checkpoint disagrees with its tokenizer
        (None, None, True, {151645}),
        (None, None, False, set()),
        ({"eos_token_id": [True, "x", -1, 3]}, {}, False, {3}),
    ],
)
def test_every_declared_end_counts(generation, config, with_tokenizer, ids):
    tokenizer = Tokenizer(tokenizer_json(), CONFIG) if with_tokenizer else None
    assert resolve_eos(generation, config, tokenizer) == ids


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "[UNK]"}
CLS = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}


@pytest.mark.parametrize("charsmap", ["AAAA", "////fwAAAAA=", "?", "", "CAAAAAAAAAA=", None, "AAAAAP8="])
def test_a_malformed_precompiled_normalizer_is_one_clear_error(charsmap, capfd):
    """The package panics, which is no Exception, and prints a trace by itself."""
    data = build(WORDS, normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})
    with pytest.raises(QwencError, match=r"^tokenizer.json cannot be read: [^\n]*$"):
        Tokenizer(data)
    assert capfd.readouterr().err == ""


def test_a_post_processor_with_an_undefined_token_is_one_clear_error(capfd):
    tokenizer = Tokenizer(build(WORDS, post_processor=CLS | {"pair": [], "special_tokens": {}}))
    assert tokenizer.encode("a", special=True) == [0]
    with pytest.raises(QwencError, match="names the token '\\[CLS\\]' but does not define it"):
        tokenizer.encode_with_bos("a")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("model", [WORDS, {"type": "Unigram", "unk_id": None, "vocab": [["a", -1.0]]}])
def test_text_that_the_model_has_no_token_for_is_one_clear_error(model):
    tokenizer = Tokenizer(build(model))
    for encode in (tokenizer.encode_with_bos, lambda text: tokenizer.encode(text, special=False)):
        with pytest.raises(QwencError, match=r"^this checkpoint's tokenizer cannot encode the prompt: [^\n]*$"):
            encode("zz")


def test_an_empty_vocabulary_is_one_clear_error():
    with pytest.raises(QwencError, match="its vocabulary is empty"):
        Tokenizer(build({"type": "BPE", "vocab": {}, "merges": []}))


def test_odd_ids_of_declared_tokens_are_left_out():
    declared = {key: {"content": f"<{place}>"} for place, key in enumerate(["²", "-1", "9" * 5000, "x", ""])}
    assert Tokenizer(build(WORDS), {"added_tokens_decoder": declared}).vocab_size == 2


def test_panics_are_errors_and_interrupts_pass():
    from qwenc.text import tokenizer as module

    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(QwencError, match=r"^what: 1 2$"), module._one_line_errors("what"):
        raise panic("1\n2")
    for passing in (KeyboardInterrupt, SystemExit, MemoryError):
        with pytest.raises(passing), module._one_line_errors("what"):
            raise passing
