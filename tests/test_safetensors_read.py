"""Reading safetensors: exact widening, row ranges, every shape."""

import numpy as np
import pytest
import safetensors.numpy
from checkpoints import to_bf16, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.errors import QwencError


def test_bf16_widens_exactly(tmp_path):
    """All 65,536 bit patterns: NaN, infinities, −0 and subnormals included."""
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).reshape(256, 256)
    write_safetensors(tmp_path / "a.safetensors", {"w": bits})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert np.array_equal(file.tensor("w").view(np.uint32), bits.astype(np.uint32) << 16)
        assert np.array_equal(file.rows("w", 3, 5).view(np.uint32), bits[3:5].astype(np.uint32) << 16)


def test_f16_and_f32_widen_exactly(tmp_path):
    half = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    single = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3.4e38, -1.5], np.float32)
    safetensors.numpy.save_file({"half": half, "single": single}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        np.testing.assert_array_equal(file.tensor("half"), half.astype(np.float32))
        assert np.array_equal(file.tensor("single").view(np.uint32), single.view(np.uint32))


def test_shapes(tmp_path):
    """0-d, empty and 3-d tensors; 3-d by its first axis, as fused experts are read."""
    experts = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {"scalar": np.float32(2.5), "empty": np.zeros((0, 4), np.float32), "experts": experts, "none": np.zeros((3, 0), np.float32)}
    write_safetensors(tmp_path / "a.safetensors", tensors, metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "a.safetensors") as file:
        assert file.header.metadata == {"format": "pt"}
        assert file.tensor("scalar").shape == () and file.tensor("scalar") == 2.5
        assert file.rows("empty", 0, 0).shape == (0, 4) and file.tensor("none").shape == (3, 0)
        np.testing.assert_array_equal(file.rows("experts", 1, 2), experts[1:2])
        with pytest.raises(ValueError):
            file.rows("experts", 1, 3)
        with pytest.raises(QwencError, match="no tensor nothing"):
            file.tensor("nothing")


def test_other_dtypes_are_refused_by_name(tmp_path):
    safetensors.numpy.save_file({"w": np.zeros((2, 2), np.float64)}, tmp_path / "a.safetensors")
    with SafetensorsFile(tmp_path / "a.safetensors") as file, pytest.raises(QwencError, match=r"a\.safetensors: tensor w is F64"):
        file.tensor("w")


def test_bf16_helper_rounds_to_nearest_even():
    assert to_bf16(np.array([1.0, 1.00390625, 1.01171875], np.float32)).tolist() == [0x3F80, 0x3F80, 0x3F82]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_crash_the_reader(tmp_path_factory, content, framed):
    """Whatever a file holds, opening it works or is a QwencError of one line."""
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content if framed else content)
    try:
        SafetensorsFile(path).close()
    except QwencError as error:
        assert str(path) in str(error) and "\n" not in str(error)
