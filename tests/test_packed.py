"""The packed file: aligned, plain safetensors, whole or absent."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import DENSE, MOE, write_checkpoint, write_safetensors

from qwenc.checkpoint import packed_writer
from qwenc.checkpoint.convert import convert
from qwenc.checkpoint.layout import TensorSpec, matrices
from qwenc.checkpoint.packed import open_packed
from qwenc.checkpoint.packed_writer import PackedWriter, remove_stale_temps, show_bytes
from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.config.model_config import ModelConfig
from qwenc.errors import QwencError

ROOT = Path(__file__).parent.parent
SPECS = {"a": TensorSpec("F32", (3, 5)), "b": TensorSpec("U8", (7,)), "c": TensorSpec("F16", (2, 3)), "d": TensorSpec("I8", (4, 2, 8))}


@pytest.fixture
def dual(tmp_path):
    return convert(write_checkpoint(tmp_path / "model"), tmp_path / "dual.qwenc", "dual")


def test_writer_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    a, d = rng.random((3, 5), np.float32), rng.integers(-127, 127, (4, 2, 8), np.int8)
    c = rng.integers(0, 60000, (2, 3), np.uint16)
    with PackedWriter(tmp_path / "x.qwenc", SPECS, {"format": "test", "text": "é\n"}) as writer:
        writer.write("d", (2, 1), d[2, 1])  # in any order, slice by slice
        writer.write("d", (3,), d[3])
        writer.write("d", (0,), d[:2].reshape(-1))  # going on over the next row
        writer.write("d", (2,), d[2, :1])
        writer.write("c", (), c)
        writer.write("a", (1,), a[1:])
        writer.write("a", (0,), a[0])
        assert not (tmp_path / "x.qwenc").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["x.qwenc"]
    assert (tmp_path / "x.qwenc").stat().st_size == writer.file_bytes
    loaded = safetensors.numpy.load_file(tmp_path / "x.qwenc")
    np.testing.assert_array_equal(loaded["a"], a)
    np.testing.assert_array_equal(loaded["d"], d)
    np.testing.assert_array_equal(loaded["c"].view(np.uint16), c)
    assert not loaded["b"].any()
    with SafetensorsFile(tmp_path / "x.qwenc") as file:
        assert all(file.header.tensors[name].offset % 64 == 0 for name in SPECS)
        assert file.header.metadata == {"format": "test", "text": "é\n"}


def test_writer_checks_its_caller(tmp_path):
    with pytest.raises(ValueError), PackedWriter(tmp_path / "x.qwenc", SPECS, {}) as writer:
        writer.write("a", (), np.zeros((3, 5), np.float64))
    with pytest.raises(ValueError), PackedWriter(tmp_path / "x.qwenc", SPECS, {}) as writer:
        writer.write("a", (1,), np.zeros((3, 5), np.float32))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failure", [QwencError("x"), KeyboardInterrupt(), RuntimeError()])
def test_any_failure_leaves_nothing(tmp_path, failure):
    (tmp_path / "x.qwenc").write_text("the old file")
    with pytest.raises(type(failure)), PackedWriter(tmp_path / "x.qwenc", SPECS, {}) as writer:
        writer.write("a", (), np.zeros((3, 5), np.float32))
        raise failure
    assert (tmp_path / "x.qwenc").read_text() == "the old file"
    assert len(list(tmp_path.iterdir())) == 1


def test_full_disk_shows_before_the_first_tensor(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_space, raising=False)
    with pytest.raises(QwencError, match="disk is full"):
        PackedWriter(tmp_path / "x.qwenc", SPECS, {})
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(QwencError, match=r"needs 1 kB, but only 0 kB is free"):
        PackedWriter(tmp_path / "x.qwenc", SPECS, {})
    assert not list(tmp_path.iterdir())


def test_full_disk_while_writing(tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(QwencError, match="disk is full"), PackedWriter(tmp_path / "x.qwenc", SPECS, {}) as writer:
        monkeypatch.setattr(os, "pwrite", no_space)
        writer.write("a", (), np.zeros((3, 5), np.float32))
    assert not list(tmp_path.iterdir())


def test_file_systems_that_cannot_reserve(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    with PackedWriter(tmp_path / "x.qwenc", SPECS, {}) as writer:
        pass
    assert (tmp_path / "x.qwenc").stat().st_size == writer.file_bytes


def test_out_folder_that_is_none(tmp_path):
    with pytest.raises(QwencError, match="cannot be written"):
        PackedWriter(tmp_path / "nowhere" / "x.qwenc", SPECS, {})


def test_stale_temps_go_and_live_ones_stay(tmp_path):
    """A killed writer's file is removed by the next one; a running writer's is not."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from qwenc.checkpoint.layout import TensorSpec
from qwenc.checkpoint.packed_writer import PackedWriter
PackedWriter(Path({str(tmp_path / "x.qwenc")!r}), {{"a": TensorSpec("U8", (5,))}}, {{}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with PackedWriter(tmp_path / "y.qwenc", SPECS, {}):
        assert left.exists()  # another file's
        remove_stale_temps(tmp_path, "x.qwenc")
        assert not left.exists() and len(list(tmp_path.iterdir())) == 1
        remove_stale_temps(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["y.qwenc"]


def test_a_temp_taken_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """The moment between creating the file and locking it, when another process may remove it."""
    flock, calls = packed_writer.fcntl.flock, []

    def removed_before_lock(fd, how):
        calls.append(how)
        if len(calls) == 1:
            for path in tmp_path.iterdir():
                path.unlink()
        return flock(fd, how)

    monkeypatch.setattr(packed_writer.fcntl, "flock", removed_before_lock)
    with PackedWriter(tmp_path / "x.qwenc", SPECS, {}):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x.qwenc"]


def test_open_maps_in_place_read_only(dual):
    packed = open_packed(dual)
    assert packed.wmode == "dual" and packed.config == ModelConfig.from_dict(DENSE) and packed.config_json == DENSE
    assert packed.file_bytes == dual.stat().st_size and packed.tokenizer_json is None and packed.chat_template is None
    for name, tensor in packed.tensors.items():
        assert not tensor.flags.writeable and not tensor.flags.owndata and tensor.ctypes.data % 64 == 0, name
        assert (tensor.dtype == np.uint16) == name.endswith("scales")


@pytest.mark.parametrize("config", [DENSE, MOE, {**DENSE, "tie_word_embeddings": False}])
@pytest.mark.parametrize("wmode", ["f32", "q8", "q4", "dual"])
def test_shapes_are_those_of_the_contract(tmp_path, config, wmode):
    packed = open_packed(convert(write_checkpoint(tmp_path / "model", config), tmp_path / "x.qwenc", wmode))
    shapes = {name: tensor.shape for name, tensor in packed.tensors.items()}
    assert shapes["input_norm"] == (config["num_hidden_layers"], 48) and shapes["q_norm"] == (config["num_hidden_layers"], 10)
    dense = 2 if config is not MOE else 1
    expected = {"embed": ((), 40, 48), "qkv": ((config["num_hidden_layers"],), 128, 48), "o": ((config["num_hidden_layers"],), 48, 64)}
    expected |= {"gate_up": ((dense,), 96, 48), "down": ((dense,), 48, 48)}
    if config is MOE:
        expected |= {"expert_gate_up": ((2, 4), 64, 48), "expert_down": ((2, 4), 48, 32)}
        assert shapes["router"] == (2, 4, 48)
    if not config["tie_word_embeddings"]:
        expected["lm_head"] = ((), 40, 48)
    assert {matrix.name for matrix in matrices(packed.config)} == set(expected)
    for name, (stack, rows, inputs) in expected.items():
        tiles, groups = -(-rows // 16), -(-inputs // 32)
        if wmode == "f32":
            assert shapes[f"{name}.f32.values"] == (*stack, tiles, groups * 32, 16)
        if wmode in ("q8", "dual"):
            assert shapes[f"{name}.q8.codes"] == (*stack, tiles, groups, 512) and shapes[f"{name}.q8.scales"] == (*stack, tiles, groups, 16)
        if wmode in ("q4", "dual"):
            assert shapes[f"{name}.q4.codes"] == (*stack, tiles, groups, 256) and shapes[f"{name}.q4.scales"] == (*stack, tiles, groups, 16)


def test_packed_files_load_with_the_safetensors_package(dual):
    packed, loaded = open_packed(dual), safetensors.numpy.load_file(dual)
    for name, tensor in packed.tensors.items():
        np.testing.assert_array_equal(loaded[name].view(tensor.dtype), tensor)


def change_header(path, old, new):
    """Replaces text in the header by text of the same length."""
    assert len(old) == len(new)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.mark.parametrize(
    "old, new, word",
    [
        (b'"version":"1"', b'"version":"9"', "version 9"),
        (b"qwenc-packed", b"somethingels", "not a packed qwenc file"),
        (b'"wmode":"dual"', b'"wmode":"q999"', "unknown mode 'q999'"),
        (b"qkv.q4.scales", b"xkv.q4.scales", "no tensor qkv.q4.scales"),
        (b'\\"hidden_size\\": 48', b'\\"hidden_size\\": 80', "is damaged: "),
        (b'\\"qwen3\\"', b'\\"qwen9\\"', "config: model_type 'qwen9'"),
        (b'"config":"{', b'"config":"!', "config is not a JSON object"),
    ],
)
def test_damaged_files(dual, old, new, word):
    change_header(dual, old, new)
    with pytest.raises(QwencError) as error:
        open_packed(dual)
    assert word in str(error.value) and str(dual) in str(error.value) and "\n" not in str(error.value)


def test_a_config_that_nests_too_deep(tmp_path):
    metadata = {"format": "qwenc-packed", "version": "1", "wmode": "q4", "config": "[" * 100_000}
    write_safetensors(tmp_path / "x.qwenc", {}, metadata=metadata)
    with pytest.raises(QwencError, match="its config is not a JSON object"):
        open_packed(tmp_path / "x.qwenc")


def test_truncated_packed_file(dual):
    os.truncate(dual, dual.stat().st_size - 1)
    with pytest.raises(QwencError, match="incomplete"):
        open_packed(dual)
    with pytest.raises(QwencError, match="cannot be opened"):
        open_packed(dual.with_name("nothing.qwenc"))


def test_show_bytes():
    assert [show_bytes(n) for n in (1_830_000_000, 335_400_000, 12_300, 5)] == ["1.83 GB", "335 MB", "12 kB", "0 kB"]
