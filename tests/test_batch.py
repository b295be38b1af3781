"""`qwenc batch` in this process, with a scripted engine (tests/fake_engine.py: a prompt P is answered "<P>")."""

import json
import os

import fake_engine
import pytest

from qwenc.batch import lines
from qwenc.batch.lines import Line, LineReader, No
from qwenc.commands.dispatch import run_command

SIDECAR = ".settings.json"


@pytest.fixture
def cli(monkeypatch, capfdbinary, tmp_path):
    """cli(*args, script={…}) → (exit code, records on stdout, stderr lines), run in an empty folder."""
    fake_engine.install(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("QWENC_", "VLLM_", "FAKE_", "NO_COLOR", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)

    def call(*args, script=None):
        monkeypatch.setenv("FAKE_ENGINE", json.dumps(script or {}))
        fake_engine.calls.clear()
        code = run_command(["batch", "-m", "M", *map(str, args)])
        out, err = capfdbinary.readouterr()
        return code, [json.loads(line) for line in out.decode().splitlines()], err.decode().splitlines()

    return call


def write(path, *items):
    """Items as JSON lines; bytes go in as they are."""
    data = [item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n" for item in items]
    with open(path, "wb") as file:
        file.write(b"".join(data))
    return path


def records(path):
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def content(path):
    with open(path, "rb") as file:
        return file.read()


def answers(found):
    """id -> text, or error."""
    return {record["id"]: record.get("text", record.get("error")) for record in found}


def started():
    return [arguments for name, arguments in fake_engine.calls if name == "start"]


# ---- lines of input ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", []),
        (b"a", [(1, b"a")]),
        (b"a\n", [(1, b"a")]),
        (b"a\r\nb\r\n", [(1, b"a"), (2, b"b")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"\n\n  \n\r\na\n\n", [(5, b"a")]),
        (b"\xef\xbb\xbf", []),
        (b"a\rb\n", [(1, b"a\rb")]),
        (b" a \n", [(1, b" a ")]),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_lines(tmp_path, monkeypatch, data, wanted, chunk):
    monkeypatch.setattr(lines, "CHUNK", chunk)
    (tmp_path / "in").write_bytes(data)
    with open(tmp_path / "in", "rb", buffering=0) as file:
        reader = LineReader(file.fileno(), "in")
        found = []
        while isinstance(line := reader.next(), Line):
            found.append(tuple(line))
        assert found == wanted and reader.next() is No.END
    assert lines.count_lines(tmp_path / "in") == len(wanted)


def test_a_line_beyond_the_limit_is_skipped_and_the_next_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 100)
    monkeypatch.setattr(lines, "CHUNK", 64)
    (tmp_path / "in").write_bytes(b"x" * 100 + b"\n" + b"y" * 101 + b"\n" + b"z" * 999 + b"\nb\n" + b"w" * 500)
    with open(tmp_path / "in", "rb", buffering=0) as file:
        reader = LineReader(file.fileno(), "in")
        assert [reader.next() for _ in range(6)] == [(1, b"x" * 100), (2, None), (3, None), (4, b"b"), (5, None), No.END]


def test_a_file_that_grows_is_read_to_the_size_it_had(tmp_path):
    (tmp_path / "in").write_bytes(b"a\nb")
    with open(tmp_path / "in", "rb", buffering=0) as file, open(tmp_path / "in", "ab", buffering=0) as writer:
        reader = LineReader(file.fileno(), "in")
        writer.write(b"c\nd\n")
        assert [reader.next() for _ in range(3)] == [(1, b"a"), (2, b"b"), No.END]


def test_a_pipe_is_waited_for_only_when_asked():
    read_end, write_end = os.pipe()
    reader = LineReader(read_end, "pipe")
    assert reader.next(wait=False) is No.YET
    os.write(write_end, b"a\nb")
    assert reader.next(wait=False) == (1, b"a") and reader.next(wait=False) is No.YET
    os.write(write_end, b"c\n")
    os.close(write_end)
    assert reader.next(wait=False) == (2, b"bc") and reader.next(wait=False) is No.END
    os.close(read_end)


# ---- items ------------------------------------------------------------------------------------------------------------------
def test_results_in_input_order_with_default_ids_and_meta(cli):
    write("in", {"id": "a", "prompt": "hi"}, b"\n", {"prompt": "x", "meta": {"k": [1]}}, {"id": 7, "prompt": "y"})
    code, found, err = cli("in", "-o", "out")
    assert (code, found) == (0, [])
    first, second, third = records("out")
    assert [record["id"] for record in (first, second, third)] == ["a", 3, 7]
    assert (first["text"], first["finish_reason"], first["usage"]) == ("<hi>", "length", {"prompt_tokens": 2, "completion_tokens": 4})
    assert first["timings"]["decode_tok_s"] == 200.0 and "seed" not in first
    assert second["meta"] == {"k": [1]} and "meta" not in first
    assert "3 answered" in err[-1] and err[-4].startswith("[PREFILL-TIMING] n=4 ")


def test_a_line_sets_what_the_command_line_does_not(cli):
    write(
        "in",
        {"id": 1, "prompt": "a"},
        {"id": 2, "prompt": "b", "max_tokens": 2, "temp": 0.5, "seed": 9, "stop": "z", "ignore_eos": True, "top_k": 3, "system": "T"},
        {"id": 3, "prompt": "c", "raw": True},
        {"id": 4, "messages": [{"role": "user", "content": "d"}], "think": True, "chat_template_kwargs": {"x": 1}},
        {"id": 5, "messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "d"}]},
        {"id": 6, "prompt": "e", "temp": None, "seed": None},
    )
    assert cli("in", "-n", "5", "-s", "S", "--stop", "x", "--no-think", "-q")[0] == 0
    one, two, *_ = started()
    assert one["max_tokens"] == 5 and one["stop"] == ("x",) and one["temp"] == 0.0 and one["seed"] is None
    wanted = {"max_tokens": 2, "temp": 0.5, "seed": 9, "stop": ["z"], "ignore_eos": True, "top_k": 3}
    assert {name: two[name] for name in wanted} == wanted
    encoded = [arguments for name, arguments in fake_engine.calls if name.startswith("encode")]
    assert [call.get("system") for call in encoded[:3]] == ["S", "T", None] and encoded[2]["raw"] is True
    assert [message["content"] for message in encoded[3]["messages"]] == ["S", "d"] and encoded[3]["think"] is True
    assert encoded[3]["chat_template_kwargs"] == {"x": 1} and encoded[4]["messages"][0]["content"] == "own"


def test_a_fresh_seed_is_told_and_repeats(cli):
    write("in", {"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a"})
    _, (one, two), _ = cli("in", "--temp", "1")
    assert one["seed"] != two["seed"] and [call["seed"] for call in started()] == [one["seed"], two["seed"]]
    assert [record["seed"] for record in cli("in", "--temp", "1", "--seed", "4")[1]] == [4, 4]


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
def test_one_bad_line_fails_alone(cli, bad, why):
    write("in", {"id": "good", "prompt": "a"}, bad, {"id": "last", "prompt": "b"})
    code, (first, second, third), err = cli("in")
    assert code == 1 and (first["text"], third["text"]) == ("<a>", "<b>")
    assert why in second["error"] and second["line"] == 2 and len(second["error"]) < 300
    assert "1 failed (line 2: " in err[-1]
    if isinstance(bad, dict) and isinstance(bad["id"], str):
        assert second["id"] == bad["id"]


def test_prompt_files_and_the_prefix_file(cli, tmp_path):
    (tmp_path / "p").write_bytes("\ufeffline\r\n".encode())
    (tmp_path / "prefix").write_bytes("\ufeffDoc: ".encode())
    write("in", {"prompt_file": "p"}, {"prompt": "q"}, {"messages": [{"role": "user", "content": "m"}]})
    assert cli("in", "--prefix-file", "prefix")[0] == 0
    encoded = [arguments for name, arguments in fake_engine.calls if name.startswith("encode")]
    assert [call.get("text") for call in encoded] == ["Doc: line\r\n", "Doc: q", None]


def test_format_lines(cli):
    write("in", b"\xef\xbb\xbfone\r\n\n\xff\n  two \n")
    code, found, _ = cli("in", "--format", "lines")
    assert code == 1 and answers(found) == {1: "<one>", None: "not UTF-8: byte 0xff at offset 0 of the line", 4: "<  two >"}


def test_a_prompt_of_50_megabytes(cli):
    prompt = "x" * 50_000_000
    write("in", {"id": 1, "prompt": prompt, "max_tokens": 1}, {"id": 2, "prompt": "a"})
    code, _, _ = cli("in", "-o", "out")
    assert code == 0 and answers(records("out")) == {1: "<", 2: "<a>"}
    assert started()[0]["text"] == prompt


def test_fail_fast_begins_nothing_more(cli):
    write("in", {"id": 1, "prompt": "a"}, {"id": 2, "prompt": "FAIL"}, {"id": 3, "prompt": "c"})
    code, found, _ = cli("in", "--fail-fast")
    assert code == 1 and list(answers(found)) == [1, 2]


@pytest.mark.parametrize("parallel", [2, 3, 8])
def test_parallel_changes_neither_results_nor_their_order(cli, parallel):
    items = [{"id": n, "prompt": "FAIL" if n == 3 else "x" * (40 // (n + 1))} for n in range(9)]
    write("in", *items)
    _, alone, _ = cli("in")
    code, together, _ = cli("in", "--parallel", parallel)
    assert code == 1 and ("lanes", parallel) in fake_engine.calls

    def without_time(found):
        return [{name: value for name, value in record.items() if name != "timings"} for record in found]

    assert without_time(together) == without_time(alone)
    cli("in", "--parallel", parallel, "-o", "out")
    assert without_time(records("out")) == without_time(alone)


def test_an_item_waits_for_memory(cli):
    write("in", *({"id": n, "prompt": "x" * n, "max_tokens": 10} for n in range(1, 8)))
    code, found, _ = cli("in", "--parallel", "3", script={"room": 14})
    assert code == 0 and [record["id"] for record in found] == list(range(1, 8))


# ---- resume -----------------------------------------------------------------------------------------------------------------
ITEMS = [{"id": f"i{n}", "prompt": f"p{n}"} for n in range(5)]


def test_resume_answers_only_what_is_not_answered(cli):
    write("in", *ITEMS[:3])
    assert cli("in", "-o", "out")[0] == 0
    before = records("out")
    write("in", *ITEMS)
    assert cli("in", "-o", "out", "--resume")[0] == 0
    assert [call["text"] for call in started()] == ["p3", "p4"]
    assert records("out")[:3] == before and answers(records("out")) == {f"i{n}": f"<p{n}>" for n in range(5)}
    code, _, err = cli("in", "-o", "out", "--resume")
    assert code == 0 and not started() and "5 answered before" in err[-1]


def test_resume_with_no_file_yet(cli):
    write("in", *ITEMS)
    assert cli("in", "-o", "out", "--resume")[0] == 0 and len(records("out")) == 5
    open("empty", "w").close()
    assert cli("in", "-o", "empty", "--resume")[0] == 0 and len(records("empty")) == 5


@pytest.mark.parametrize("cut", [1, 2, 20, -2, -1])
def test_resume_repairs_a_torn_last_line(cli, cut):
    """cut: bytes that are left of the last line, or are missing from it (-1: only its line end)."""
    write("in", *ITEMS)
    cli("in", "-o", "out")
    with open("out", "rb") as file:
        data = file.read()
    last = data.rindex(b"\n", 0, -1) + 1
    with open("out", "wb") as file:
        file.write(data[: last + cut] if cut > 0 else data[:cut])
    code, _, err = cli("in", "-o", "out", "--resume")
    assert code == 0 and answers(records("out")) == {f"i{n}": f"<p{n}>" for n in range(5)}
    assert [call["text"] for call in started()] == ([] if cut == -1 else ["p4"])
    assert any("torn" in line for line in err) == (cut != -1)


def test_resume_tries_failures_again_and_puts_all_in_order(cli):
    write("in", {"id": "a", "prompt": "FAIL"}, b"nonsense\n", *ITEMS)
    assert cli("in", "-o", "out")[0] == 1
    write("in", {"id": "a", "prompt": "fine"}, {"id": "b", "prompt": "new"}, *reversed(ITEMS))
    assert cli("in", "-o", "out", "--resume")[0] == 0
    assert list(answers(records("out")).values()) == ["<fine>", "<new>", *(f"<p{n}>" for n in reversed(range(5)))]


def test_resume_answers_a_changed_item_anew_and_keeps_what_the_input_lacks(cli):
    write("in", *ITEMS)
    cli("in", "-o", "out")
    write("in", ITEMS[3], {"id": "i1", "prompt": "other"})
    assert cli("in", "-o", "out", "--resume")[0] == 0
    assert list(answers(records("out")).items()) == [
        *(("i3", "<p3>"), ("i1", "<other>")),
        *(("i0", "<p0>"), ("i2", "<p2>"), ("i4", "<p4>")),
    ]
    write("in", {"id": "i0", "prompt": "FAIL"})
    assert cli("in", "-o", "out", "--resume")[0] == 1
    assert [record.get("text") for record in records("out") if record["id"] == "i0"] == [None, "<p0>"]  # nothing is lost


@pytest.mark.parametrize(
    ("args", "script", "name"),
    [
        (["-n", "3"], {}, "max_tokens"),
        (["--kv", "f32"], {}, "kv"),
        (["-s", "S"], {}, "system"),
        (["--seed", "5", "--temp", "1"], {}, "seed"),
        (["--prefix-file", "in"], {}, "prefix_file"),
        ([], {"model": "another"}, "model"),
    ],
)
def test_resume_refuses_what_other_settings_made(cli, args, script, name):
    write("in", *ITEMS)
    cli("in", "-o", "out")
    before = content("out") + b'{"id": "torn'
    write("out", before)
    code, _, err = cli("in", "-o", "out", "--resume", *args, script=script)
    assert code == 2 and err[-1].startswith("qwenc: error: ") and f"another {name}:" in err[-1]
    assert content("out") == before and not started()
    assert cli("in", "-o", "out", "--resume", "-t", "1", "--no-pin", "--prefill-batch", "9")[0] == 0  # what changes no result


def test_resume_refuses_a_file_that_it_did_not_make(cli):
    write("in", *ITEMS)
    write("out", {"mine": 1})
    code, _, err = cli("in", "-o", "out", "--resume")
    assert code == 2 and "nothing says what made it" in err[-1] and records("out") == [{"mine": 1}]
    cli("in", "-o", "other")
    write("other", {"mine": 1}, b'{"id": 1, "te')
    code, _, err = cli("in", "-o", "other", "--resume")
    assert code == 2 and "line 1 is no result" in err[-1] and content("other").endswith(b'"te')
    write("other" + SIDECAR, b"{")
    code, _, err = cli("in", "-o", "other", "--resume")
    assert code == 2 and "damaged" in err[-1]


def test_an_existing_file_is_never_overwritten_unasked(cli):
    write("in", *ITEMS)
    write("out", b"precious")
    code, _, err = cli("in", "-o", "out")
    assert code == 2 and len(err) == 1 and "--resume" in err[0] and content("out") == b"precious"
    assert cli("in", "-o", "out", "--force")[0] == 0 and len(records("out")) == 5


def test_a_symbolic_link_stays_one(cli):
    write("in", *ITEMS)
    os.symlink("real", "out")
    cli("in", "-o", "out")
    write("in", *reversed(ITEMS))
    cli("in", "-o", "out", "--resume")
    assert os.path.islink("out") and list(answers(records("real"))) == [f"i{n}" for n in reversed(range(5))]


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
def test_wrong_usage_is_one_line_and_exit_2(cli, args):
    write("in", *ITEMS)
    os.symlink("in", "link")
    before = content("in")
    code, found, err = cli(*args)
    assert (code, found, len(err)) == (2, [], 1) and err[0].startswith("qwenc: error: ")
    assert content("in") == before and not fake_engine.calls and not os.path.exists("out")


def test_an_unwritable_out(cli):
    write("in", *ITEMS)
    code, _, err = cli("in", "-o", "none/out")
    assert code == 1 and err[-1] == "qwenc: error: cannot write " + os.path.realpath("none/out") + ": No such file or directory"


def test_a_model_that_does_not_load_leaves_no_file(cli):
    write("in", *ITEMS)
    assert cli("in", "-o", "out", script={"load_failure": "qwenc"})[0] == 1
    assert sorted(os.listdir()) == ["in"]


def test_no_items(cli):
    write("in", b"\n\n")
    code, _, err = cli("in", "-o", "out")
    assert code == 0 and records("out") == [] and "0 answered" in err[-1]


def test_quiet_and_log_every(cli):
    write("in", *ITEMS)
    assert cli("in", "-q")[2] == []
    lines = [line for line in cli("in", "--log-every", "2")[2] if "/5 items" in line]
    assert [line.split()[1] for line in lines] == ["2/5", "4/5"] and lines[0].endswith("s left")
