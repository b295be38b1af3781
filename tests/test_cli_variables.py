"""Options of `qwenc run` that come from the environment: QWENC_ and the option's name."""

import json

import pytest
from fake_engine import asked


@pytest.mark.parametrize(
    ("variable", "args", "kv"),
    [
        ({"QWENC_KV": "q8"}, ("--kv-q4",), "q4"),
        ({"QWENC_KV_Q4": "1"}, ("--kv", "q8"), "q8"),
        ({"QWENC_KV": "f32"}, ("-ctk", "q8_0", "-ctv", "q4_0"), "k8v4"),
        ({"QWENC_KV_Q4": "1"}, (), "q4"),
    ],
)
def test_a_cache_that_is_typed_wins_over_variables(cli, variable, args, kv):
    code, _, _ = cli("hi", *args, env={"QWENC_MODEL": "E", **variable})
    assert code == 0 and asked("load")["kv"] == kv


def test_every_option_can_be_a_variable(cli):
    env = {
        **{"QWENC_MODEL": "E", "QWENC_SYSTEM": "S", "QWENC_THINK": "0", "QWENC_CHAT_TEMPLATE_KWARGS": "{}", "QWENC_MAX_TOKENS": "3"},
        **{"QWENC_CTX_SIZE": "98", "QWENC_STOP": "two words", "QWENC_IGNORE_EOS": "1", "QWENC_TEMP": "0.5", "QWENC_TOP_K": "7"},
        **{"QWENC_TOP_P": "0.9", "QWENC_MIN_P": "0.1", "QWENC_REPEAT_PENALTY": "1.2", "QWENC_SEED": "4", "QWENC_ECHO": "yes"},
        **{"QWENC_JSON": "1", "QWENC_WMODE": "f32", "QWENC_KV": "f32", "QWENC_THREADS": "1", "QWENC_PIN": "0", "QWENC_OFFLINE": "1"},
        **{"QWENC_PREFILL_BATCH": "9", "QWENC_QUIET": "1", "QWENC_PROMPT": "from env", "QWENC_DEC_PROF": "1", "QWENC_COLOR": "never"},
    }
    code, out, err = cli(env=env)
    assert (code, err) == (0, [])
    settings = json.loads(out)["settings"]
    expected = {
        **{
            "model": "E",
            "system": "S",
            "think": False,
            "chat_template_kwargs": {},
            "max_tokens": 3,
            "stop": ["two words"],
            "ignore_eos": True,
        },
        **{
            "temp": 0.5,
            "top_k": 7,
            "top_p": 0.9,
            "min_p": 0.1,
            "repeat_penalty": 1.2,
            "seed": 4,
            "echo": True,
            "wmode": "f32",
            "kv": "f32",
        },
        **{"pin": False, "offline": True, "prefill_batch": 9},
    }
    assert {name: settings[name] for name in expected} == expected
    assert asked("load")["ctx_size"] == 98 and asked("load")["threads"] == 1
    assert asked("encode_prompt")["text"] == "from env"


def test_the_command_line_beats_the_variables(cli):
    env = {"QWENC_MODEL": "E", "QWENC_TEMP": "0.5", "QWENC_PROMPT": "env", "QWENC_FILE": "/none", "QWENC_SYSTEM": "S", "QWENC_VERBOSE": "1"}
    code, _, err = cli("-m", "M", "--temp", "0", "--raw", "-q", "hi", env=env)
    assert (code, err) == (0, [])
    assert asked("load")["model"] == "M" and asked("encode_prompt")["text"] == "hi" and asked("encode_prompt")["system"] is None
    assert cli("hi", env={"QWENC_MODEL": "E", "QWENC_MAX_TOKENS": ""})[0] == 0  # an empty variable is none
    code, _, err = cli("hi", env={"QWENC_MODEL": "E", "QWENC_MAX_TOKENS": "many"})
    assert code == 2 and len(err) == 1 and "QWENC_MAX_TOKENS" in err[0]


def test_a_wrong_switch_in_the_environment_is_told_in_plain_words(cli):
    code, _, err = cli("-m", "M", "hi", env={"QWENC_THINK": "maybe"})
    assert code == 2 and len(err) == 1
    assert "QWENC_THINK" in err[0] and "must be 1 or 0 (also true or false, yes or no, on or off), not 'maybe'" in err[0]
    for value, think in (("1", True), ("off", False), ("YES", True)):
        assert cli("-m", "M", "hi", env={"QWENC_THINK": value})[0] == 0 and asked("encode_prompt")["think"] is think
