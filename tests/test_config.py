"""config.json: every spelling gives the same record, and what we would compute wrongly is refused by name."""

import json
import time
from pathlib import Path

import pytest
from checkpoints import DENSE, LLAMA, MOE
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenc.config.model_config import ModelConfig
from qwenc.errors import QwencError

GOLDENS = Path(__file__).parent / "data/goldens"
VL = {"model_type": "qwen3_vl", "tie_word_embeddings": True, "text_config": {**DENSE, "model_type": "qwen3_vl_text"}}


def without(config, *names):
    return {key: value for key, value in config.items() if key not in names}


def parse(config, **changes):
    return ModelConfig.from_dict({**config, **changes})


def test_goldens():
    configs = {p.parent.name: ModelConfig.from_dict(json.loads(p.read_text())) for p in GOLDENS.glob("*/config.json")}
    llama, vl, moe = configs["llama-smol"], configs["qwen3-vl-text"], configs["qwen3-moe"]
    assert (llama.qk_norm, llama.bos_token_id, llama.eos_token_ids, llama.rope.theta) == (False, 1, (2,), 1e5)
    assert (vl.qk_norm, vl.rope.theta, vl.rope.rope_type, vl.weight_prefix) == (True, 5e6, "default", "model.language_model.")
    assert vl.tie_word_embeddings and vl.has_vision
    assert moe.moe.num_experts == 8 and moe.moe_layers == (0, 1) and moe.dense_layers == () and moe.moe.norm_topk_prob
    assert configs["qwen3-dense-tied"].dense_layers == (0, 1, 2)


@pytest.mark.parametrize("base", [DENSE, LLAMA, MOE])
def test_spellings_of_transformers_5(base):
    """rope_parameters, num_local_experts, dtype: the same record as the spelling of transformers 4."""
    new = without(base, "rope_theta", "num_experts") | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "dtype": "bfloat16"}
    if "num_experts" in base:
        new["num_local_experts"] = base["num_experts"]
    assert parse(new) == parse(base, torch_dtype="bfloat16")


def test_text_config_inside_or_alone():
    assert parse(VL).hidden_size == DENSE["hidden_size"]
    alone = parse(VL["text_config"])
    assert (alone.weight_prefix, alone.has_vision) == ("model.", False)


def test_head_dim():
    assert parse(LLAMA, head_dim=None).head_dim == 12
    assert parse(without(LLAMA, "head_dim")).head_dim == 12
    assert parse(without(DENSE, "head_dim")).head_dim == 128  # what transformers takes for Qwen3
    assert parse(without(MOE, "head_dim")).head_dim == 12
    assert parse(DENSE).padded_head_dim == 16
    assert parse(DENSE, num_key_value_heads=None).num_key_value_heads == 4


def test_outer_tie_decides():
    """Of a vision-language checkpoint the outer value counts; the inner one only where the outer is silent."""
    text = {**VL["text_config"], "tie_word_embeddings": False}
    assert parse(VL, text_config=text).tie_word_embeddings
    assert parse(VL, tie_word_embeddings=False).tie_word_embeddings is False
    assert parse(without(VL, "tie_word_embeddings"), text_config={**text, "tie_word_embeddings": True}).tie_word_embeddings
    assert parse(without(VL, "tie_word_embeddings"), text_config=without(text, "tie_word_embeddings")).tie_word_embeddings is False
    assert parse(without(DENSE, "tie_word_embeddings")).tie_word_embeddings is False


@pytest.mark.parametrize(
    "changes, routed",
    [
        ({"mlp_only_layers": []}, (0, 1, 2)),
        ({"mlp_only_layers": None}, (0, 1, 2)),
        ({"mlp_only_layers": [0, 2]}, (1,)),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, (1,)),
        ({"mlp_only_layers": [2], "decoder_sparse_step": 3}, ()),
    ],
)
def test_moe_layers(changes, routed):
    config = parse(MOE, **changes)
    assert config.moe_layers == routed
    assert sorted(config.moe_layers + config.dense_layers) == [0, 1, 2]
    assert (config.moe is None) == (not routed)


def test_norm_topk_prob_default():
    """Missing: Qwen3-MoE does not renormalise; Qwen3-VL-MoE always does."""
    assert parse(MOE).moe.norm_topk_prob is True
    assert parse(MOE, norm_topk_prob=False).moe.norm_topk_prob is False
    assert parse(without(MOE, "norm_topk_prob")).moe.norm_topk_prob is False
    text = without({**MOE, "model_type": "qwen3_vl_moe_text"}, "norm_topk_prob")
    assert parse({"model_type": "qwen3_vl_moe", "text_config": text}).moe.norm_topk_prob is True


def test_all_routed_needs_no_dense_width():
    assert parse(without(MOE, "intermediate_size"), mlp_only_layers=[]).intermediate_size == 0
    with pytest.raises(QwencError, match="intermediate_size is missing"):
        parse(without(MOE, "intermediate_size"))


def test_eos_ids():
    assert parse(DENSE).eos_token_ids == ()
    assert parse(DENSE, eos_token_id=7).eos_token_ids == (7,)
    assert parse(DENSE, eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert parse(VL, eos_token_id=[3]).eos_token_ids == (3,)


@pytest.mark.parametrize(
    "config, word",
    [
        (without(DENSE, "model_type"), "model_type is missing"),
        ({**DENSE, "model_type": "gpt2"}, "model_type 'gpt2'"),
        ({**DENSE, "model_type": 3}, "model_type must be a string"),
        ({**DENSE, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({**DENSE, "attention_bias": True}, "attention_bias"),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias"),
        ({**DENSE, "attention_bias": "no"}, "attention_bias must be true or false"),
        ({**DENSE, "head_dim": 9}, "head_dim 9"),
        ({**DENSE, "head_dim": 512}, "head_dim 512"),
        ({**without(LLAMA, "head_dim"), "hidden_size": 50}, "hidden_size 50"),
        ({**DENSE, "num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({**DENSE, "num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({**MOE, "num_hidden_layers": 10**12}, "num_hidden_layers must be at most 10000"),
        ({**DENSE, "hidden_size": "48"}, "hidden_size must be a whole number, not '48'"),
        ({**DENSE, "hidden_size": True}, "hidden_size must be a whole number"),
        ({**DENSE, "hidden_size": 48.5}, "hidden_size must be a whole number"),
        ({**DENSE, "rms_norm_eps": float("nan")}, "rms_norm_eps must be finite"),
        ({**DENSE, "rms_norm_eps": 10**400}, "rms_norm_eps must be at most 1"),
        ({**DENSE, "rms_norm_eps": 1e308}, "rms_norm_eps must be at most 1"),
        ({**DENSE, "rope_theta": 10**400}, "rope_theta must be at most 1e+15"),
        ({**DENSE, "rope_theta": 1e308}, "rope_theta must be at most 1e+15"),
        ({**DENSE, "partial_rotary_factor": 10**400}, "partial_rotary_factor must be at most"),
        (without(DENSE, "vocab_size"), "vocab_size is missing"),
        (without(DENSE, "max_position_embeddings"), "max_position_embeddings is missing"),
        ({**DENSE, "quantization_config": {"quant_method": "fp8"}}, "quant_method 'fp8'"),
        ({**VL, "text_config": [1]}, "text_config must be a JSON object"),
        (without(VL, "text_config"), "text_config is missing"),
        (without(MOE, "num_experts"), "num_local_experts is missing"),
        ({**MOE, "num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        ({**MOE, "mlp_only_layers": "1"}, "mlp_only_layers"),
        ({**DENSE, "layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ([DENSE], "not a JSON object"),
        # rope
        (without(DENSE, "rope_theta"), "rope_theta is missing"),
        ({**DENSE, "rope_theta": "1e6"}, "rope_theta must be a number"),
        ({**DENSE, "rope_theta": 0.5}, "rope_theta must be more than 1"),
        ({**DENSE, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
        ({**DENSE, "rope_scaling": {"type": "longrope", "factor": 2.0}}, "RoPE type 'longrope'"),
        ({**DENSE, "rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({**DENSE, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({**DENSE, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}}, "low_freq_factor"),
        ({**DENSE, "rope_scaling": {"rope_type": "linear", "factor": 1e-320}}, "factor must be from 1e-06 to 1e+06"),
        ({**DENSE, "rope_scaling": {"rope_type": "linear", "factor": 10**400}}, "factor must be at most 1e+06"),
        ({**DENSE, "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": 1e-320}}, "beta_fast must be at least 1e-06"),
        ({**DENSE, "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_slow": 1e308}}, "beta_slow must be at most 1e+06"),
        ({**DENSE, "rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 10**400}}, "mscale must be at most 1e+06"),
        ({**DENSE, "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1e-320, "high_freq_factor": 4}}, "close to 0"),
        ({**DENSE, "rope_scaling": "yarn"}, "rope_scaling must be a JSON object"),
        ({**DENSE, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "per layer type"),
        ({**DENSE, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_refused_by_name(config, word):
    with pytest.raises(QwencError) as error:
        ModelConfig.from_dict(config, "here/config.json")
    assert word in str(error.value) and str(error.value).startswith("here/config.json") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "base, changes, refused",
    [
        (DENSE, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, True),
        (DENSE, {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, False),  # no layer slides
        (DENSE, {"use_sliding_window": True, "sliding_window": 64}, False),  # max_window_layers is 28
        (DENSE, {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 0}, False),  # covers every position
        (DENSE, {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0}, False),
        (DENSE, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, False),
        (DENSE, {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, False),
        (DENSE, {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}, True),
        (DENSE, {"layer_types": ["full_attention", "sliding_attention"]}, True),
        (MOE, {"use_sliding_window": True, "sliding_window": 64}, True),
        (MOE, {"use_sliding_window": False, "sliding_window": 64}, False),
    ],
)
def test_sliding_window(base, changes, refused):
    if refused:
        with pytest.raises(QwencError, match="sliding"):
            parse(base, **changes)
    else:
        parse(base, **changes)


def test_many_layers_and_a_long_list_of_dense_ones_take_no_time():
    began = time.monotonic()
    config = parse(MOE, num_hidden_layers=10_000, mlp_only_layers=list(range(-200_000, 0)))
    assert len(config.moe_layers) == 10_000 and time.monotonic() - began < 3


def test_unknown_keys_are_ignored():
    assert parse(DENSE, made_up={"a": [1]}, rope_scaling=None, layer_types=None) == parse(DENSE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([DENSE, LLAMA, MOE, VL["text_config"]]), st.data())
def test_any_json_value_is_accepted_or_refused_cleanly(base, data):
    key = data.draw(st.sampled_from(sorted([*base, "rope_scaling", "rope_parameters", "eos_token_id", "layer_types", "sliding_window"])))
    value = data.draw(JSON | st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "truncate"]), JSON))
    try:
        parse(base, **{key: value})
    except QwencError as error:
        assert "\n" not in str(error)
