"""Checkpoints as people really have them: half downloaded, mixed up, or not checkpoints at all. One clear line each, naming the file."""

import json
import time

import numpy as np
import pytest
from checkpoints import DENSE, LLAMA, MOE, Notes, weights, write_checkpoint, write_safetensors

from qwenc.checkpoint.convert import convert
from qwenc.checkpoint.packed import open_packed
from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.checkpoint.shards import open_shards
from qwenc.errors import QwencError

SECOND = "model-00002-of-00003.safetensors"


def refused(folder, *words, out="out.qwenc"):
    """Converting `folder` fails with one line that holds every word, and leaves nothing behind."""
    before = sorted(path.name for path in folder.parent.iterdir())
    with pytest.raises(QwencError) as error:
        convert(folder, folder.parent / out, "q8")
    message = str(error.value)
    assert "\n" not in message and all(word in message for word in words), message
    assert sorted(path.name for path in folder.parent.iterdir()) == before


def header(entries):
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is empty"]),
        (b"\x01\x02", ["not a safetensors file"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3441\n", ["Git LFS pointer"]),
        (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", ["HTML"]),
        (b"\n  <html>", ["HTML"]),
        (b'{"error":"Repository not found"}', ["not a safetensors file"]),
        ((1 << 60).to_bytes(8, "little") + b"{}", ["not a safetensors file"]),
        (((1 << 64) - 1).to_bytes(8, "little") + b"{}", ["not a safetensors file"]),
        ((5000).to_bytes(8, "little") + b"{}", ["header of 5000 bytes", "beyond the file of 10 bytes"]),
        ((4).to_bytes(8, "little") + b"nope", ["header is not JSON"]),
        ((2).to_bytes(8, "little") + b"\xff\xfe", ["header is not JSON"]),
        ((2).to_bytes(8, "little") + b"[]", ["not a JSON object"]),
        (len(b"[" * 100000).to_bytes(8, "little") + b"[" * 100000, ["not a safetensors file"]),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), ["promises", "incomplete download"]),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}) + bytes(9), ["describes only"]),
        (header({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}) + bytes(8), ["malformed entry for tensor w"]),
        (header({"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}) + bytes(8), ["malformed entry for tensor w"]),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}) + bytes(8), ["malformed entry for tensor w"]),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [1 << 70, (1 << 70) + 8]}}), ["promises"]),
        (header({"w": 3}), ["malformed entry for tensor w"]),
        (header({"__metadata__": {"a": 1}}), ["malformed __metadata__"]),
    ],
)
def test_files_that_are_not_whole_safetensors(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(QwencError) as error:
        SafetensorsFile(path)
    assert str(error.value).startswith(str(path)) and all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("cut", [1, 2000])
def test_truncated_shard(tmp_path, cut):
    folder = write_checkpoint(tmp_path / "model", shards=3)
    whole = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(whole[:-cut])
    refused(folder, SECOND, "incomplete download")


def test_missing_shard(tmp_path):
    folder = write_checkpoint(tmp_path / "model", shards=3)
    (folder / SECOND).unlink()
    refused(folder, SECOND, "not there")


def test_index_without_any_shard(tmp_path):
    """A stale index beside a single file: the index decides, and its shard is named."""
    folder = write_checkpoint(tmp_path / "model", shards=3)
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    write_safetensors(folder / "model.safetensors", weights(DENSE))
    refused(folder, "model-00001-of-00003.safetensors and 2 more")


def test_stray_file_is_ignored_with_a_note(tmp_path):
    """A stray model.safetensors beside an index must not be merged in."""
    folder = write_checkpoint(tmp_path / "model", shards=3)
    convert(folder, tmp_path / "clean.qwenc", "f32")
    write_safetensors(folder / "model.safetensors", weights(DENSE, seed=9))
    notes = Notes()
    convert(folder, tmp_path / "stray.qwenc", "f32", notes)
    assert [note for note in notes.notes if "ignoring model.safetensors" in note]
    clean, stray = open_packed(tmp_path / "clean.qwenc"), open_packed(tmp_path / "stray.qwenc")
    assert all(np.array_equal(clean.tensors[name], stray.tensors[name]) for name in clean.tensors)


def test_index_names_a_tensor_that_its_shard_lacks(tmp_path):
    folder = write_checkpoint(tmp_path / "model", shards=3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = SECOND
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model.extra.weight", SECOND)


@pytest.mark.parametrize(
    "index, word",
    [
        ("{", "not valid JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"w": "../../etc/passwd"}}', "not a file name"),
        ('{"weight_map": {"w": 3}}', "not a file name"),
    ],
)
def test_malformed_index(tmp_path, index, word):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, "model.safetensors.index.json", word)


def test_no_index_and_shards(tmp_path):
    folder = write_checkpoint(tmp_path / "model", shards=3)
    (folder / "model.safetensors.index.json").unlink()
    refused(folder, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("name, word", [("pytorch_model.bin", "PyTorch"), ("model.gguf", "GGUF"), ("readme.txt", "no weights")])
def test_no_safetensors(tmp_path, name, word):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, word)


def test_missing_tensor_is_named(tmp_path):
    tensors = weights(DENSE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    refused(write_checkpoint(tmp_path / "model", tensors=tensors), "no tensor model.layers.1.mlp.up_proj.weight")


def test_wrong_shape_is_named(tmp_path):
    tensors = weights(DENSE)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((20, 47), np.float32)
    refused(write_checkpoint(tmp_path / "model", tensors=tensors), "layers.0.self_attn.k_proj.weight has shape [20, 47]", "[20, 48]")


def test_untied_without_lm_head(tmp_path):
    tensors = weights(LLAMA)
    del tensors["lm_head.weight"]
    refused(write_checkpoint(tmp_path / "model", LLAMA, tensors), "no tensor lm_head.weight")


def test_no_embeddings(tmp_path):
    refused(write_checkpoint(tmp_path / "model", tensors={"w": np.zeros((2, 2))}), "no tensor model.embed_tokens.weight")


def test_unsupported_weight_dtype(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    refused(folder, "model.safetensors", "is I32")


def test_config_files(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "generation_config.json").write_text("{not json")
    refused(folder, "generation_config.json", "not valid JSON")
    (folder / "generation_config.json").write_text("[1]")
    refused(folder, "generation_config.json", "not a JSON object")
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(folder, "tokenizer.json", "Git LFS")
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    refused(folder, "chat_template.jinja", "not UTF-8")
    (folder / "config.json").unlink()
    refused(folder, "no config.json")


def test_opened_shards_are_closed_again(tmp_path):
    folder = write_checkpoint(tmp_path / "model", shards=3)
    with open_shards(folder, Notes()) as shards:
        assert "model.norm.weight" in shards
    with pytest.raises(QwencError):
        shards.tensor("model.norm.weight")


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    "changes, tensor",
    [
        ({"hidden_size": HUGE}, "input_layernorm.weight has shape [48]"),
        ({"vocab_size": HUGE}, "embed_tokens.weight has shape [40, 48]"),
        ({"intermediate_size": HUGE}, "gate_proj.weight has shape [40, 48]"),
        ({"num_attention_heads": HUGE - 1}, "q_proj.weight has shape [40, 48]"),
        ({"num_experts": 2_000_000_000}, "mlp.gate.weight has shape [4, 48]"),
        ({"moe_intermediate_size": HUGE}, "gate_proj.weight has shape [24, 48]"),
    ],
)
def test_sizes_that_config_json_makes_up_cost_nothing(tmp_path, monkeypatch, changes, tensor):
    """They are compared with the headers before anything of that size is allocated or counted through."""

    config = MOE if any("expert" in name for name in changes) or "moe_intermediate_size" in changes else DENSE
    folder = write_checkpoint(tmp_path / "m", config | changes, weights(config))

    def small_only(function):
        def checked(shape, *rest, **more):
            assert np.prod(shape, dtype=float) < 1e6
            return function(shape, *rest, **more)

        return checked

    for name in ("arange", "full", "zeros"):
        monkeypatch.setattr(np, name, small_only(getattr(np, name)))
    began = time.monotonic()
    refused(folder, tensor, "but config.json implies")
    assert time.monotonic() - began < 5


def test_experts_that_are_not_there_are_told_at_the_first(tmp_path):
    tensors = weights(MOE)
    gates = [name for name in tensors if name.endswith("mlp.gate.weight")]
    config = MOE | {"num_experts": 20_000}
    tensors |= dict.fromkeys(gates, np.zeros((20_000, 48), np.float32))
    refused(write_checkpoint(tmp_path / "m", config, tensors), "no tensor model.layers.0.mlp.experts.4.gate_proj.weight")


def test_a_folder_whose_name_is_no_utf8(tmp_path):
    folder = write_checkpoint(tmp_path / "m\udcff\udce9")
    packed = open_packed(convert(folder, tmp_path / "o\udcff.qwenc", "q8"))
    assert packed.metadata["source"] == f"{tmp_path}/m\ufffd\ufffd"


def test_lone_surrogates_in_json_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "\\ud800"}')
    refused(folder, "the chat template is no Unicode text: lone surrogate U+D800")
    (folder / "tokenizer_config.json").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"w": "\\ud800"}}')
    refused(folder, "which is not a file name")
