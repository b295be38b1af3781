"""`qwenc run` from its arguments to what it asks of the engine and prints, with a scripted engine (tests/fake_engine.py)."""

import json
import math

import fake_engine
import pytest
from fake_engine import asked

from qwenc.commands.prompt_input import template_arguments
from qwenc.errors import UsageError
from qwenc.resources import EMBEDDED

TIMING_LINES = ["[PREFILL-TIMING]", "[PREFILL-KERNELS]", "[DECODE-TIMING]"]


def test_text_on_stdout_and_timings_then_summary_on_stderr(cli):
    code, out, err = cli("-m", "M", "hi")
    assert (code, out) == (0, "Hello wörld\n")
    assert [line.split()[0] for line in err[-4:-1]] == TIMING_LINES
    assert err[-1].startswith("qwenc: load 0.50 s, JIT 0.00 s, prefill 2 tok (20.0 tok/s), decode 4 tok (20.0 tok/s over 4 timed), peak ")
    assert err[-1].endswith(" 2 threads on cores 0-1 [length]")


def test_every_setting_reaches_the_engine(cli):
    code, out, _ = cli(
        *("-m", "M", "-s", "S", "--no-think", "--chat-template-kwargs", '{"a": [1]}', "-n", "3", "-c", "99", "--stop", "x", "--stop", "\n"),
        *("--ignore-eos", "--temp", "0.5", "--top-k", "7", "--top-p", "0.9", "--min-p", "0.1", "--repeat-penalty", "1.2", "--seed", "4"),
        *("--wmode", "q4", "--kv", "f32", "-t", "1", "--no-pin", "--prefill-batch", "8", "--offline", "--dec-prof", "-q", "hi"),
        *("--cpus", "0-1", "--no-mmap"),
        *(
            "--sparse-attn",
            "--sparse-k",
            "16",
            "--sparse-block",
            "64",
            "--sparse-probe",
            "4",
            "--sparse-ratio",
            "0.1",
            "--sparse-mass",
            "0.98",
        ),
        *("--prompt-cache", "F", "--disk-kv", "D", "--disk-kv-gb", "2.5"),
        *("--sparse-min-ctx", "5", "--sparse-score", "probe", "--sparse-pf-min-ctx", "6", "--sparse-pf-k", "7", "--sparse-pf-group", "8"),
    )
    assert (code, out) == (0, "Hello\n")
    load = {"wmode": "q4", "kv": "f32", "threads": 1, "cpus": "0-1", "pin": False, "ctx_size": 99, "prefill_batch": 8, "offline": True}
    load |= {"mmap": False}
    load |= {"sparse_attn": True, "sparse_k": 16, "sparse_block": 64, "sparse_probe": 4, "sparse_ratio": 0.1, "sparse_mass": 0.98}
    load |= {"prompt_cache": "F", "disk_kv": "D", "disk_kv_gb": 2.5}
    load |= {"sparse_min_ctx": 5, "sparse_score": "probe", "sparse_pf_min_ctx": 6, "sparse_pf_k": 7, "sparse_pf_group": 8}
    assert asked("load") == {"model": "M", **load}
    assert asked("encode_prompt") == {"text": "hi", "raw": False, "system": "S", "think": False, "chat_template_kwargs": {"a": [1]}}
    generate = asked("generate")
    sampling = {name: generate.pop(name) for name in ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")}
    assert generate == {"max_tokens": 3, "stop": ("x", "\n"), "ignore_eos": True, "dec_prof": True}
    assert list(sampling.values()) == [0.5, 7, 0.9, 0.1, 1.2, 4]


@pytest.mark.parametrize(
    ("args", "kv"),
    [
        ((), "q8"),
        (("--kv-q4",), "q4"),
        (("--kv-q4", "--kv", "q4"), "q4"),
        (("-ctk", "q8_0", "-ctv", "q4_0"), "k8v4"),
        (("-ctk", "q4_0", "-ctv", "q4_0", "--kv-q4"), "q4"),
        (("-ctk", "f32", "-ctv", "f32"), "f32"),
    ],
)
def test_the_ways_to_name_a_kv_cache(cli, args, kv):
    code, _, _ = cli("-m", "M", *args, "hi")
    assert code == 0 and asked("load")["kv"] == kv


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("-ctk", "f16", "-ctv", "q8_0"), "no KV cache of -ctk f16 -ctv q8_0"),
        (("-ctk", "q8_0"), "no KV cache of -ctk q8_0 -ctv f16"),
        (("--kv", "q8", "--kv-q4"), "different KV caches: q8, q4"),
        (("--sparse-k", "0"), "at least 1"),
        (("--sparse-block", "-3"), "at least 1"),
        (("--sparse-ratio", "1.5"), "--sparse-ratio must be between 0 and 1"),
        (("--sparse-mass", "nan"), "--sparse-mass must be between 0 and 1"),
        (("--sparse-score", "guess"), "guess"),
    ],
)
def test_attention_settings_that_cannot_be(cli, args, message):
    code, out, err = cli("-m", "M", *args, "hi")
    assert (code, out) == (2, "") and message in " ".join(err)


BAD = [
    *(["hi", *bad] for bad in (["-n", "-1"], ["-n", "x"], ["-n", "1.5"], ["-c", "0"], ["-t", "0"], ["-t", "-1"], ["--prefill-batch", "0"])),
    *(["hi", "--temp", value] for value in ("-0.1", "nan", "inf", "warm", "")),
    *(["hi", "--top-p", value] for value in ("1.1", "-1", "nan")),
    *(["hi", "--min-p", value] for value in ("1.1", "-1", "nan")),
    *(["hi", "--top-k", value] for value in ("-1", "1.5")),
    *(["hi", "--repeat-penalty", value] for value in ("0", "-1", "nan", "inf")),
    *(["hi", "--seed", value] for value in ("-1", "x", "18446744073709551616")),
    *(
        ["hi", "--wmode", "q5"],
        ["hi", "--kv", "q3"],
        ["hi", "--color", "red"],
        ["hi", "--stop", ""],
        ["hi", "--sparse"],
        ["hi", "-v", "-q"],
    ),
    *(["hi", "--chat-template-kwargs", value] for value in ("{", "[1]", "", "nan", "[" * 100000)),
    *(["hi", "--raw", *more] for more in (["-s", "S"], ["--think"], ["--no-think"], ["--chat-template-kwargs", "{}"])),
    *(["hi", "there"], ["hi", "-p", "x"], ["-p", "x", "-f", "y"], ["-", "-p", "x"], ["hi", "-f", "-"]),
    *([], [""], ["-p", ""], ["-f", "/none/such"], ["-f", "/"], ["-f", ""], ["a\udcffb"], ["hi", "-s", "\udcff"], ["hi", "-m", ""]),
    *(["hi", "--model"], ["hi", "--json=1"], ["hi", "-z"]),
]


@pytest.mark.parametrize("args", BAD, ids=lambda args: " ".join(args)[:40].encode("ascii", "replace").decode())
def test_wrong_usage_is_one_line_and_exit_2(cli, args):
    code, out, err = cli("-m", "M", *args)
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("qwenc: error: ") and len(err[0]) < 300
    assert not fake_engine.calls


def test_without_a_model_the_one_that_comes_with_qwenc_runs_and_a_line_says_so(cli):
    code, out, err = cli("hi")
    assert (code, out) == (0, "Hello wörld\n") and asked("load")["model"] == str(EMBEDDED)
    assert sum("-m" in line and "QWENC_MODEL" in line for line in err) == 1
    assert len(cli("-f", "/nowhere")[2]) == 1, "a mistake is one line"
    assert cli("-q", "hi")[1:] == ("Hello wörld\n", [])
    for code, _, err in (cli("-m", "M", "hi"), cli("hi", env={"QWENC_MODEL": "M"})):
        assert code == 0 and asked("load")["model"] == "M" and not any("QWENC_MODEL" in line for line in err)


def test_template_arguments_are_json():
    with pytest.raises(UsageError, match="NaN is no JSON"):
        template_arguments('{"a": NaN}')


def test_quiet_and_verbose(cli):
    assert cli("-m", "M", "-q", "hi")[2] == []
    plain, verbose = cli("-m", "M", "hi")[2], cli("-m", "M", "-v", "--temp", "1", "hi")[2]
    assert "qwenc: a detail" not in plain and "qwenc: a detail" in verbose
    assert any("seed" in line for line in verbose) and any("ends at ids [3, 5]" in line for line in verbose)
    code, _, err = cli("-m", "M", "-q", "hi", script={"failure": "qwenc", "fail_at": 1})
    assert code == 1 and err == ["qwenc: error: the logits of layer 3 are not finite"]


def test_a_drawn_seed_is_told_so_that_the_run_can_be_repeated(cli):
    first, second = (json.loads(cli("-m", "M", "--temp", "1", "--json", "hi")[1])["settings"]["seed"] for _ in range(2))
    assert isinstance(first, int) and first != second
    assert json.loads(cli("-m", "M", "--json", "hi")[1])["settings"]["seed"] is None


def test_json_is_one_object_on_one_line(cli):
    code, out, err = cli("-m", "M", "--json", "hi")
    record = json.loads(out, parse_constant=lambda name: pytest.fail(f"bare {name}"))
    assert code == 0 and out.count("\n") == 1 and len(err) == 5
    assert list(record) == ["text", "ids", "finish_reason", "usage", "timings", "settings"]
    assert (record["text"], record["ids"], record["finish_reason"]) == ("Hello wörld", [100, 101, 102, 103], "length")
    assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 4}
    assert record["timings"]["prefill"]["gemm_ms"] == 50 and record["timings"]["decode_tok_s"] == 20.0
    assert record["settings"]["threads"] == 2 and record["settings"]["cores"] == [0, 1] and record["settings"]["ctx_size"] == 4096


def test_json_never_holds_nan():
    from qwenc.plain_json import to_json

    record = {"a": math.nan, "b": [math.inf, (-math.inf,)], "c": {1: math.nan}, "d": frozenset([2, 1]), "e": json}
    assert json.loads(to_json(record), parse_constant=pytest.fail) == {
        **{"a": None, "b": [None, [None]], "c": {"1": None}, "d": [1, 2]},
        "e": str(json),
    }


def test_nothing_generated_is_fine(cli):
    code, out, err = cli("-m", "M", "-n", "0", "hi", script={"pieces": []})
    assert (code, out) == (0, "") and "decode 0 tok" in err[-1] and "nan" not in " ".join(err)
    assert json.loads(cli("-m", "M", "-n", "0", "--json", "hi")[1])["usage"]["completion_tokens"] == 0


def test_text_that_comes_with_the_last_record(cli):
    assert cli("-m", "M", "hi", script={"pieces": ["a"], "rest": "\ufffd"})[1] == "a\ufffd\n"


def test_no_stream_prints_the_same(cli):
    assert cli("-m", "M", "--no-stream", "hi")[1] == "Hello wörld\n"
    assert cli("-m", "M", "--no-stream", "--echo", "--raw", "hi ")[1] == "hi Hello wörld\n"


def test_echo(cli):
    assert cli("-m", "M", "--echo", "--raw", "hi ")[1] == "hi Hello wörld\n"
    assert cli("-m", "M", "--echo", "hi")[1] == "hi\nHello wörld\n"
    assert cli("-m", "M", "--echo", "hi\n")[1] == "hi\nHello wörld\n"
    assert cli("-m", "M", "--echo", "hi", script={"chat": False})[1] == "hiHello wörld\n"
    assert json.loads(cli("-m", "M", "--echo", "--json", "hi")[1])["text"] == "hi\nHello wörld"


@pytest.mark.parametrize("by_variable", [False, True])
def test_dec_prof_gives_a_line_per_token(cli, by_variable):
    args, env = ([], {"VLLM_DEC_PROF": ""}) if by_variable else (["--dec-prof"], {})
    code, out, err = cli("-m", "M", *args, "hi", env=env)
    lines = [line for line in err if line.startswith("[DEC-SINGLE]")]
    assert (code, out) == (0, "Hello wörld\n")
    assert [line.split()[1] for line in lines] == ["seq=3", "seq=4", "seq=5", "seq=6"]
    assert cli("-m", "M", "-q", *args, "hi", env=env)[2] == []


@pytest.mark.parametrize(
    ("failure", "code", "line"),
    [
        ("qwenc", 1, "qwenc: error: the logits of layer 3 are not finite"),
        ("usage", 2, "qwenc: error: the prompt has 12 tokens, the context 8"),
        ("memory", 1, "qwenc: error: out of memory: cannot hold 99 GB"),
        ("zero", 1, "qwenc: error: internal error (ZeroDivisionError: [/x] division); QWENC_DEBUG=1 shows where"),
        ("os", 1, "qwenc: error: Input/output error: model[red].qwenc"),
        ("pipe", 1, "qwenc: error: Broken pipe"),  # not stdout's: a broken connection must not pass for success
    ],
)
@pytest.mark.parametrize("where", ["load", "generate"])
def test_failures_are_one_line_and_an_exit_code(cli, failure, code, line, where):
    script = {"load_failure": failure} if where == "load" else {"failure": failure, "fail_at": 2}
    got, out, err = cli("-m", "M", "hi", script=script)
    assert (got, err[-1]) == (code, line)
    assert out == ("" if where == "load" else "Hel\n")
    assert len(err) == (1 if where == "load" else 2)
    _, out, err = cli("-m", "M", "--json", "hi", script=script)
    assert out == "" and err[-1] == line


def test_debug_shows_the_traceback_and_keeps_the_code(cli):
    code, _, err = cli("-m", "M", "hi", script={"load_failure": "usage"}, env={"QWENC_DEBUG": "1"})
    assert code == 2 and err[0].startswith("Traceback") and err[-1].startswith("qwenc: error: ")


@pytest.mark.parametrize("args", [[], ["--no-stream"]])
def test_interrupt_keeps_the_text_and_prints_the_summary(cli, args):
    code, out, err = cli("-m", "M", *args, "hi", script={"failure": "interrupt", "fail_at": 3})
    assert (code, out) == (130, "Hello\n")
    assert [line.split()[0] for line in err[-4:-1]] == TIMING_LINES
    assert err[-1].endswith("[interrupt]") and "prefill 2 tok (20.0 tok/s), decode 3 tok (20.0 tok/s over 3 timed)" in err[-1]
    assert ("close", None) in fake_engine.calls


def test_interrupt_with_json_prints_the_part(cli):
    code, out, _ = cli("-m", "M", "--json", "hi", script={"failure": "interrupt", "fail_at": 3})
    record = json.loads(out)
    assert code == 130 and record["text"] == "Hello" and record["finish_reason"] == "interrupt" and record["ids"] == [100, 101, 102]
    assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}


def test_interrupt_while_loading(cli):
    assert cli("-m", "M", "hi", script={"load_failure": "interrupt"}) == (130, "", [])


MARKUP = "[/INST] [0] [red]x[/red] :smile: {x} %s \\[b] \x1b[31m"


@pytest.mark.parametrize("columns", ["20", "80"])
def test_markup_in_text_model_and_errors_is_left_alone(cli, columns):
    env = {"COLUMNS": columns}
    code, out, err = cli("-m", "[/x] [red]:smile:", "hi", script={"pieces": [MARKUP]}, env=env)
    assert (code, out) == (0, MARKUP + "\n")
    assert err[0] == "qwenc: loaded [bold][/x] [red]:smile:[/bold] :smile:"
    code, _, err = cli("-m", "M", "-f", "/none/[/x] [red]:smile:\x1b[2J\nsecond", env=env)
    assert code == 2 and err == [
        "qwenc: error: cannot read the prompt from /none/[/x] [red]:smile:\\x1b[2J second: No such file or directory"
    ]
    code, _, err = cli("-m", "M", "hi", "[/x]", env=env)
    assert code == 2 and "([/x])" in err[0]


def test_json_holds_any_file_name_and_no_template_argument_that_cannot_be_printed(cli):
    code, out, _ = cli("-m", "M\udcff", "--json", "hi")
    assert code == 0 and json.loads(out)["settings"]["model"] == "M\udcff" and "\\udcff" in out
    code, out, err = cli("-m", "M", "--json", "--chat-template-kwargs", '{"x": [{"\\ud800": 1}]}', "hi")
    assert (code, out) == (2, "") and err == ["qwenc: error: --chat-template-kwargs is no Unicode text: lone surrogate U+D800"]
    code, out, _ = cli("-m", "M", "--json", "hi", script={"pieces": ["a\ud800b"]})
    assert code == 0 and json.loads(out)["text"] == "a\ud800b"
    assert cli("-m", "M", "hi", script={"pieces": ["a\ud800b"]})[:2] == (0, "a?b\n")


TOO_MANY = ["9" * 23, "9" * 5000, str(2**31)]


@pytest.mark.parametrize("number", TOO_MANY, ids=len)
@pytest.mark.parametrize("name", ["-n", "-c", "-t", "--prefill-batch", "--top-k"])
def test_huge_numbers_are_wrong_usage(cli, name, number):
    code, out, err = cli("-m", "M", "hi", name, number)
    assert (code, out, len(err)) == (2, "", 1) and "at most 2^31-1" in err[0] and name in err[0] and len(err[0]) < 300
    assert not fake_engine.calls
    assert cli("-m", "M", "hi", name, str(2**31 - 1))[0] == 0


def test_seeds_have_64_bits(cli):
    assert cli("-m", "M", "hi", "--temp", "1", "--seed", str(2**64 - 1))[0] == 0 and asked("generate")["seed"] == 2**64 - 1
    code, _, err = cli("-m", "M", "hi", "--temp", "1", "--seed", str(2**64))
    assert code == 2 and len(err) == 1 and "--seed" in err[0] and "at most 2^64-1" in err[0]


@pytest.mark.parametrize(("name", "value"), [("--top-p", "2"), ("--min-p", "-1"), ("--temp", "nan"), ("--repeat-penalty", "0")])
def test_wrong_sampling_names_the_option(cli, name, value):
    code, _, err = cli("-m", "M", "hi", name, value)
    assert code == 2 and len(err) == 1 and err[0].startswith(f"qwenc: error: {name} must be ")


def test_a_word_near_a_command_suggests_it(cli):
    code, _, err = cli("inof", "m")
    assert code == 2 and err == ["qwenc: error: 'inof' is no command; did you mean 'info'? (Quote a prompt of several words)"]
    code, _, err = cli("hello", "there")
    assert code == 2 and "quote a prompt" in err[0] and "did you mean" not in err[0]


def test_options_without_effect_at_temperature_0_are_told_once(cli):
    drawing = ["--seed", "1", "--top-k", "5", "--top-p", "0.5", "--min-p", "0.1"]
    _, _, err = cli("-m", "M", "hi", *drawing)
    notes = [line for line in err if "no effect" in line]
    told = "qwenc: --seed, --top-k, --top-p, --min-p have no effect at --temp 0, which always takes the likeliest token"
    assert notes == [told]
    assert "qwenc: --seed has no effect at --temp 0, which always takes the likeliest token" in cli("-m", "M", "hi", "--seed", "0")[2]
    for args in (["-q", *drawing], ["--temp", "1", *drawing], ["--top-p", "1", "--repeat-penalty", "1.2"]):
        assert not any("no effect" in line for line in cli("-m", "M", "hi", *args)[2])


def test_options_of_sparse_attention_that_is_off_are_told(cli):
    told = "qwenc: --sparse-k, --sparse-mass have no effect without --sparse-attn"
    assert told in cli("-m", "M", "hi", "--sparse-k", "5", "--sparse-mass", "0.9")[2]
    for args in (["--sparse-k", "5", "--sparse-attn"], ["--sparse-k", "32"], ["-q", "--sparse-k", "5"]):
        assert not any("no effect" in line for line in cli("-m", "M", "hi", *args)[2])


def test_a_summary_without_tokens_has_no_stray_space(cli):
    _, _, err = cli("-m", "M", "hi", "-n", "0")
    assert ", decode 0 tok, peak RSS " in err[-1]


@pytest.mark.parametrize("args", [[], ["--no-stream"], ["--json"]])
def test_an_interrupt_gives_back_the_text_that_was_held(cli, args):
    code, out, _ = cli("-m", "M", *args, "hi", script={"failure": "interrupt", "fail_at": 3, "held": " <sto"})
    assert code == 130 and (json.loads(out)["text"] if args == ["--json"] else out.removesuffix("\n")) == "Hello <sto"
