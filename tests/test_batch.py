"""`qwenc batch` in this process, with a scripted engine (tests/fake_engine.py: a prompt P is answered "<P>")."""

import os

import fake_engine
import pytest
from batch_files import ITEMS, answers, content, records, write
from fake_engine import started


# ---- items ------------------------------------------------------------------------------------------------------------------
def test_results_in_input_order_with_default_ids_and_meta(batch):
    write("in", {"id": "a", "prompt": "hi"}, b"\n", {"prompt": "x", "meta": {"k": [1]}}, {"id": 7, "prompt": "y"})
    code, found, err = batch("in", "-o", "out")
    assert (code, found) == (0, [])
    first, second, third = records("out")
    assert [record["id"] for record in (first, second, third)] == ["a", 3, 7]
    assert (first["text"], first["finish_reason"], first["usage"]) == ("<hi>", "length", {"prompt_tokens": 2, "completion_tokens": 4})
    assert first["timings"]["decode_tok_s"] == 200.0 and "seed" not in first
    assert second["meta"] == {"k": [1]} and "meta" not in first
    assert "3 answered" in err[-1] and err[-4].startswith("[PREFILL-TIMING] n=4 ")


def test_a_line_sets_what_the_command_line_does_not(batch):
    write(
        "in",
        {"id": 1, "prompt": "a"},
        {"id": 2, "prompt": "b", "max_tokens": 2, "temp": 0.5, "seed": 9, "stop": "z", "ignore_eos": True, "top_k": 3, "system": "T"},
        {"id": 3, "prompt": "c", "raw": True},
        {"id": 4, "messages": [{"role": "user", "content": "d"}], "think": True, "chat_template_kwargs": {"x": 1}},
        {"id": 5, "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "d"}]},
        {"id": 6, "prompt": "e", "temp": None, "seed": None},
    )
    assert batch("in", "-n", "5", "-s", "S", "--stop", "x", "--no-think", "-q")[0] == 0
    one, two, *_ = started()
    assert one["max_tokens"] == 5 and one["stop"] == ("x",) and one["temp"] == 0.0 and one["seed"] is None
    wanted = {"max_tokens": 2, "temp": 0.5, "seed": 9, "stop": ["z"], "ignore_eos": True, "top_k": 3}
    assert {name: two[name] for name in wanted} == wanted
    encoded = [arguments for name, arguments in fake_engine.calls if name.startswith("encode")]
    assert [call.get("system") for call in encoded[:3]] == ["S", "T", None] and encoded[2]["raw"] is True
    assert [message["content"] for message in encoded[3]["messages"]] == ["S", "d"] and encoded[3]["think"] is True
    assert encoded[3]["chat_template_kwargs"] == {"x": 1} and encoded[4]["messages"][0]["content"] == "own"


def test_a_fresh_seed_is_told_and_repeats(batch):
    write("in", {"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a"})
    _, (one, two), _ = batch("in", "--temp", "1")
    assert one["seed"] != two["seed"] and [call["seed"] for call in started()] == [one["seed"], two["seed"]]
    assert [record["seed"] for record in batch("in", "--temp", "1", "--seed", "4")[1]] == [4, 4]


BAD_LINES = [
    (b"not json\n", "not JSON"),
    (b"[1]\n", "must be a JSON object"),
    (b'{"prompt": NaN}\n', "NaN is no JSON"),
    (b"[" * 100000 + b"\n", "nests too deep"),
    (b'{"prompt": "\xff"}\n', "not UTF-8: byte 0xff at offset 12"),
    (b'{"prompt": "a\n', "not JSON"),
    ({"id": "x"}, "one of prompt, messages and prompt_file, not none"),
    ({"id": "x", "prompt": "a", "messages": []}, "not prompt and messages"),
    ({"id": "x", "prompt": ""}, "prompt must be text"),
    ({"id": "x", "prompt": 5}, "prompt must be text, not 5"),
    ({"id": "x", "prompt": "a", "max_token": 5}, "did you mean 'max_tokens'"),
    ({"id": "x", "prompt": "a", "label": 5}, "'meta'"),
    ({"id": "x", "prompt": "a", "max_tokens": -1}, "max_tokens"),
    ({"id": "x", "prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"id": "x", "prompt": "a", "temp": -1}, "temp must be at least 0"),
    ({"id": "x", "prompt": "a", "top_p": "high"}, "top_p"),
    ({"id": "x", "prompt": "a", "stop": ["b", ""]}, "stop"),
    ({"id": "x", "prompt": "a", "raw": True, "system": "S"}, "raw"),
    ({"id": "x", "prompt": "a", "raw": 1}, "raw must be true or false"),
    ({"id": "x", "messages": [{"role": "user"}]}, "message 1"),
    ({"id": "x", "messages": "hi"}, "list of messages"),
    ({"id": "x", "messages": [{"role": "user", "content": "a"}], "system": "S"}, "system message"),
    ({"id": "x", "prompt_file": "none/such"}, "cannot read the prompt from none/such"),
    ({"id": "x", "prompt_file": "."}, "directory"),
    ({"id": "x", "prompt": "BAD"}, "the context 8"),
    ({"id": "x", "prompt": "FAIL"}, "not finite"),
    ({"id": "x", "prompt": "MEMORY"}, "out of memory"),
    ({"id": True, "prompt": "a"}, "id must be"),
    ({"id": None, "prompt": "a"}, "id must be"),
    ({"id": "good", "prompt": "a"}, "that of line 1 too"),
]


@pytest.mark.parametrize(("bad", "why"), BAD_LINES, ids=[why for _bad, why in BAD_LINES])
def test_one_bad_line_fails_alone(batch, bad, why):
    write("in", {"id": "good", "prompt": "a"}, bad, {"id": "last", "prompt": "b"})
    code, (first, second, third), err = batch("in")
    assert code == 1 and (first["text"], third["text"]) == ("<a>", "<b>")
    assert why in second["error"] and second["line"] == 2 and len(second["error"]) < 300
    assert "1 failed (line 2: " in err[-1]
    if isinstance(bad, dict) and isinstance(bad["id"], str):
        assert second["id"] == bad["id"]


def test_prompt_files_and_the_prefix_file(batch, tmp_path):
    (tmp_path / "p").write_bytes("\ufeffline\r\n".encode())
    (tmp_path / "prefix").write_bytes("\ufeffDoc: ".encode())
    write("in", {"prompt_file": "p"}, {"prompt": "q"}, {"messages": [{"role": "user", "content": "m"}]})
    assert batch("in", "--prefix-file", "prefix")[0] == 0
    encoded = [arguments for name, arguments in fake_engine.calls if name.startswith("encode")]
    assert [call.get("text") for call in encoded] == ["Doc: line\r\n", "Doc: q", None]


def test_format_lines(batch):
    write("in", b"\xef\xbb\xbfone\r\n\n\xff\n  two \n")
    code, found, _ = batch("in", "--format", "lines")
    assert code == 1 and answers(found) == {1: "<one>", None: "not UTF-8: byte 0xff at offset 0 of the line", 4: "<  two >"}


def test_a_prompt_of_50_megabytes(batch):
    prompt = "x" * 50_000_000
    write("in", {"id": 1, "prompt": prompt, "max_tokens": 1}, {"id": 2, "prompt": "a"})
    code, _, _ = batch("in", "-o", "out")
    assert code == 0 and answers(records("out")) == {1: "<", 2: "<a>"}
    assert started()[0]["text"] == prompt


def test_fail_fast_begins_nothing_more(batch):
    write("in", {"id": 1, "prompt": "a"}, {"id": 2, "prompt": "FAIL"}, {"id": 3, "prompt": "c"})
    code, found, _ = batch("in", "--fail-fast")
    assert code == 1 and list(answers(found)) == [1, 2]


@pytest.mark.parametrize("parallel", [2, 3, 8])
def test_parallel_changes_neither_results_nor_their_order(batch, parallel):
    items = [{"id": n, "prompt": "FAIL" if n == 3 else "x" * (40 // (n + 1))} for n in range(9)]
    write("in", *items)
    _, alone, _ = batch("in")
    code, together, _ = batch("in", "--parallel", parallel)
    assert code == 1 and ("lanes", parallel) in fake_engine.calls

    def without_time(found):
        return [{name: value for name, value in record.items() if name != "timings"} for record in found]

    assert without_time(together) == without_time(alone)
    batch("in", "--parallel", parallel, "-o", "out")
    assert without_time(records("out")) == without_time(alone)


def test_an_item_waits_for_memory(batch):
    write("in", *({"id": n, "prompt": "x" * n, "max_tokens": 10} for n in range(1, 8)))
    code, found, _ = batch("in", "--parallel", "3", script={"room": 14})
    assert code == 0 and [record["id"] for record in found] == list(range(1, 8))


# ---- usage ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "args",
    [
        ["none"],
        ["."],
        ["in", "-o", "in"],
        ["link", "-o", "in"],
        ["in", "-o", "link"],
        ["in", "-o", "."],
        ["in", "--resume"],
        ["in", "--force"],
        ["in", "-o", "out", "--resume", "--force"],
        ["in", "--parallel", "0"],
        ["in", "--format", "csv"],
        ["in", "--prefix-file", "none"],
        ["in", "-o", "p", "--prefix-file", "p"],
        ["in", "--raw", "-s", "S"],
        ["in", "--temp", "-1"],
        ["in", "in"],
        ["in", "-v", "-q"],
        ["in", "-o", "/dev/null", "--resume"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_one_line_and_exit_2(batch, args):
    write("in", *ITEMS)
    os.symlink("in", "link")
    before = content("in")
    code, found, err = batch(*args)
    assert (code, found, len(err)) == (2, [], 1) and err[0].startswith("qwenc: error: ")
    assert content("in") == before and not fake_engine.calls and not os.path.exists("out")


def test_an_unwritable_out(batch):
    write("in", *ITEMS)
    code, _, err = batch("in", "-o", "none/out")
    assert code == 1 and err[-1] == "qwenc: error: cannot write " + os.path.realpath("none/out") + ": No such file or directory"


def test_a_model_that_does_not_load_leaves_no_file(batch):
    write("in", *ITEMS)
    assert batch("in", "-o", "out", script={"load_failure": "qwenc"})[0] == 1
    assert sorted(os.listdir()) == ["in"]


def test_no_items(batch):
    write("in", b"\n\n")
    code, _, err = batch("in", "-o", "out")
    assert code == 0 and records("out") == [] and "0 answered" in err[-1]


def test_quiet_and_log_every(batch):
    write("in", *ITEMS)
    assert batch("in", "-q")[2] == []
    lines = [line for line in batch("in", "--log-every", "2")[2] if "/5 items" in line]
    assert [line.split()[1] for line in lines] == ["2/5", "4/5"] and lines[0].endswith("s left")
