"""RoPE against transformers' frozen numbers and against the formulae in float64; and the places where its parameters may stand."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DENSE
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenc.config.model_config import ModelConfig
from qwenc.config.rope import RopeConfig, rope_inv_freq, rope_tables
from qwenc.errors import QwencError

FROZEN = json.loads((Path(__file__).parent / "data/rope.json").read_text())
DEFAULT = {"rope_type": "default", "rope_theta": 5e6}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def rope_of(**changes):
    config = {key: value for key, value in DENSE.items() if key != "rope_theta"}
    return ModelConfig.from_dict({**config, **changes}).rope


@pytest.mark.parametrize("name", FROZEN["cases"])
def test_against_transformers(name):
    case = FROZEN["cases"][name]
    config = {key: value for key, value in DENSE.items() if key != "rope_theta"} | case["config"] | {"model_type": case["model_type"]}
    rope = ModelConfig.from_dict(config).rope
    inv_freq, scaling = rope_inv_freq(rope, config["head_dim"])
    assert inv_freq.dtype == np.float32 and inv_freq.shape == (config["head_dim"] // 2,)
    np.testing.assert_allclose(inv_freq, np.array(case["inv_freq"], np.float32), rtol=2e-7)
    assert scaling == pytest.approx(case["attention_scaling"], rel=1e-7)
    # The same angles from the frozen frequencies: the tables themselves, apart from a last bit of inv_freq times 40,000.
    cos, sin = rope_tables(np.array(case["inv_freq"], np.float32), scaling, np.array(FROZEN["positions"]))
    half = config["head_dim"] // 2
    dims = [0, 1, half // 4, half // 2, half - 1]
    assert cos.dtype == sin.dtype == np.float32 and cos.shape == sin.shape == (len(FROZEN["positions"]), half)
    np.testing.assert_allclose(cos[:, dims], case["cos"], atol=2e-7)
    np.testing.assert_allclose(sin[:, dims], case["sin"], atol=2e-7)


def test_formulae():
    """default, linear and llama3, dimension by dimension in Python floats."""
    dim, theta = 16, 1e4
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    np.testing.assert_allclose(rope_inv_freq(RopeConfig("default", theta), dim)[0], plain, rtol=1e-6)
    np.testing.assert_allclose(rope_inv_freq(RopeConfig("linear", theta, 4.0), dim)[0], [f / 4 for f in plain], rtol=1e-6)
    llama3 = RopeConfig("llama3", theta, 8.0, 256, low_freq_factor=1.0, high_freq_factor=4.0)
    expected = []
    for f in plain:
        wavelength = 2 * np.pi / f
        blend = min(max((256 / wavelength - 1) / 3, 0), 1)
        expected.append((1 - blend) * f / 8 + blend * f)
    np.testing.assert_allclose(rope_inv_freq(llama3, dim)[0], expected, rtol=1e-6)


def test_yarn_ends():
    """The fastest dimension keeps its frequency, the slowest is divided by the factor; the logit factor is 0.1 ln(4) + 1."""
    rope = RopeConfig("yarn", 1e6, 4.0, 32768)
    inv_freq, scaling = rope_inv_freq(rope, 128)
    plain, _ = rope_inv_freq(RopeConfig("default", 1e6), 128)
    assert inv_freq[0] == plain[0] and inv_freq[-1] == pytest.approx(plain[-1] / 4, rel=1e-6)
    assert scaling == pytest.approx(0.1 * np.log(4) + 1)
    assert np.all(inv_freq <= plain * (1 + 1e-6)) and np.all(inv_freq >= plain / 4 * (1 - 1e-6))


@pytest.mark.parametrize("scaling", [DEFAULT, YARN | {"rope_theta": 5e6}, {"type": "linear", "factor": 2, "rope_theta": 5e6}])
def test_where_parameters_may_stand(scaling):
    """Top level, rope_scaling, rope_parameters, text_config: one record."""
    theta, rest = scaling["rope_theta"], {key: value for key, value in scaling.items() if key != "rope_theta"}
    text = {key: value for key, value in DENSE.items() if key != "rope_theta"} | {"model_type": "qwen3_vl_text"}
    layouts = [
        rope_of(rope_theta=theta, rope_scaling=rest),
        rope_of(rope_parameters=scaling),
        rope_of(rope_scaling=scaling),
        rope_of(rope_theta=theta, rope_parameters=rest),
        rope_of(rope_scaling=rest, rope_parameters={"rope_theta": theta, "rope_type": "default"}),
        ModelConfig.from_dict({"model_type": "qwen3_vl", "text_config": text | {"rope_parameters": scaling}}).rope,
        ModelConfig.from_dict({"model_type": "qwen3_vl", "text_config": text | {"rope_theta": theta, "rope_scaling": rest}}).rope,
        ModelConfig.from_dict({"model_type": "qwen3_vl", "rope_scaling": rest, "text_config": text | {"rope_theta": theta}}).rope,
    ]
    assert all(rope == layouts[0] for rope in layouts)
    assert layouts[0].theta == theta


def test_text_mrope_is_plain_rope():
    sections = {"mrope_section": [2, 2, 1], "mrope_interleaved": True}
    assert rope_of(rope_theta=5e6, rope_scaling={"rope_type": "default", **sections}) == RopeConfig("default", 5e6)
    assert rope_of(rope_theta=5e6, rope_scaling={"type": "mrope", **sections}) == RopeConfig("default", 5e6)
    assert rope_of(rope_theta=5e6, rope_scaling={**YARN, **sections}) == rope_of(rope_theta=5e6, rope_scaling=YARN)


def test_defaults():
    llama = {**DENSE, "model_type": "llama"}
    del llama["rope_theta"]
    assert ModelConfig.from_dict(llama).rope == RopeConfig("default", 10000.0)
    assert rope_of(rope_theta=1e6, rope_scaling=None) == rope_of(rope_theta=1e6, rope_scaling={}) == RopeConfig("default", 1e6)
    # YaRN without a factor: the ratio of the two lengths. With one, the stated factor holds.
    assert rope_of(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 32}).factor == 4.0
    assert rope_of(rope_theta=1e6, rope_scaling={**YARN, "factor": 3.0}).factor == 3.0
    assert rope_of(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "factor": 2.0}).original_max_position_embeddings == 128


NUMBERS = st.sampled_from([1e-6, 1e-3, 1.0, 1.0 + 2**-50, 1.000001, 32.0, 1e6]) | st.floats(0, 1e16)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(["default", "linear", "yarn", "llama3"]), st.data())
def test_numbers_are_refused_or_give_finite_frequencies_without_warnings(kind, data):
    names = ["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "low_freq_factor", "high_freq_factor"]
    scaling = {"rope_type": kind, **data.draw(st.fixed_dictionaries({"factor": NUMBERS}, optional=dict.fromkeys(names[1:], NUMBERS)))}
    theta = data.draw(st.floats(1, 1e15, exclude_min=True))
    config = DENSE | {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": data.draw(st.integers(1, 2**31 - 1))}
    try:
        rope = ModelConfig.from_dict(config).rope
    except QwencError:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inv_freq, scale = rope_inv_freq(rope, 128)
        rope_tables(inv_freq, scale, np.array([0, 1, 2**31 - 1]))
    assert np.isfinite(inv_freq).all() and np.isfinite(scale)
