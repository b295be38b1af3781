"""`qwenc batch --resume`, and what becomes of a file that is there, with a scripted engine (tests/fake_engine.py)."""

import os

import pytest
from batch_files import ITEMS, SIDECAR, answers, content, records, write
from fake_engine import started


def test_resume_answers_only_what_is_not_answered(batch):
    write("in", *ITEMS[:3])
    assert batch("in", "-o", "out")[0] == 0
    before = records("out")
    write("in", *ITEMS)
    assert batch("in", "-o", "out", "--resume")[0] == 0
    assert [call["text"] for call in started()] == ["p3", "p4"]
    assert records("out")[:3] == before and answers(records("out")) == {f"i{n}": f"<p{n}>" for n in range(5)}
    code, _, err = batch("in", "-o", "out", "--resume")
    assert code == 0 and not started() and "5 answered before" in err[-1]


def test_resume_with_no_file_yet(batch):
    write("in", *ITEMS)
    assert batch("in", "-o", "out", "--resume")[0] == 0 and len(records("out")) == 5
    open("empty", "w").close()
    assert batch("in", "-o", "empty", "--resume")[0] == 0 and len(records("empty")) == 5


@pytest.mark.parametrize("cut", [1, 2, 20, -2, -1])
def test_resume_repairs_a_torn_last_line(batch, cut):
    """cut: bytes that are left of the last line, or are missing from it (-1: only its line end)."""
    write("in", *ITEMS)
    batch("in", "-o", "out")
    with open("out", "rb") as file:
        data = file.read()
    last = data.rindex(b"\n", 0, -1) + 1
    with open("out", "wb") as file:
        file.write(data[: last + cut] if cut > 0 else data[:cut])
    code, _, err = batch("in", "-o", "out", "--resume")
    assert code == 0 and answers(records("out")) == {f"i{n}": f"<p{n}>" for n in range(5)}
    assert [call["text"] for call in started()] == ([] if cut == -1 else ["p4"])
    assert any("torn" in line for line in err) == (cut != -1)


def test_resume_tries_failures_again_and_puts_all_in_order(batch):
    write("in", {"id": "a", "prompt": "FAIL"}, b"nonsense\n", *ITEMS)
    assert batch("in", "-o", "out")[0] == 1
    write("in", {"id": "a", "prompt": "fine"}, {"id": "b", "prompt": "new"}, *reversed(ITEMS))
    assert batch("in", "-o", "out", "--resume")[0] == 0
    assert list(answers(records("out")).values()) == ["<fine>", "<new>", *(f"<p{n}>" for n in reversed(range(5)))]


def test_resume_answers_a_changed_item_anew_and_keeps_what_the_input_lacks(batch):
    write("in", *ITEMS)
    batch("in", "-o", "out")
    write("in", ITEMS[3], {"id": "i1", "prompt": "other"})
    assert batch("in", "-o", "out", "--resume")[0] == 0
    assert list(answers(records("out")).items()) == [
        *(("i3", "<p3>"), ("i1", "<other>")),
        *(("i0", "<p0>"), ("i2", "<p2>"), ("i4", "<p4>")),
    ]
    write("in", {"id": "i0", "prompt": "FAIL"})
    assert batch("in", "-o", "out", "--resume")[0] == 1
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
def test_resume_refuses_what_other_settings_made(batch, args, script, name):
    write("in", *ITEMS)
    batch("in", "-o", "out")
    before = content("out") + b'{"id": "torn'
    write("out", before)
    code, _, err = batch("in", "-o", "out", "--resume", *args, script=script)
    assert code == 2 and err[-1].startswith("qwenc: error: ") and f"another {name}:" in err[-1]
    assert content("out") == before and not started()
    assert batch("in", "-o", "out", "--resume", "-t", "1", "--no-pin", "--prefill-batch", "9")[0] == 0  # what changes no result


def test_resume_refuses_a_file_that_it_did_not_make(batch):
    write("in", *ITEMS)
    write("out", {"mine": 1})
    code, _, err = batch("in", "-o", "out", "--resume")
    assert code == 2 and "nothing says what made it" in err[-1] and records("out") == [{"mine": 1}]
    batch("in", "-o", "other")
    write("other", {"mine": 1}, b'{"id": 1, "te')
    code, _, err = batch("in", "-o", "other", "--resume")
    assert code == 2 and "line 1 is no result" in err[-1] and content("other").endswith(b'"te')
    write("other" + SIDECAR, b"{")
    code, _, err = batch("in", "-o", "other", "--resume")
    assert code == 2 and "damaged" in err[-1]


def test_an_existing_file_is_never_overwritten_unasked(batch):
    write("in", *ITEMS)
    write("out", b"precious")
    code, _, err = batch("in", "-o", "out")
    assert code == 2 and len(err) == 1 and "--resume" in err[0] and content("out") == b"precious"
    assert batch("in", "-o", "out", "--force")[0] == 0 and len(records("out")) == 5


def test_a_symbolic_link_stays_one(batch):
    write("in", *ITEMS)
    os.symlink("real", "out")
    batch("in", "-o", "out")
    write("in", *reversed(ITEMS))
    batch("in", "-o", "out", "--resume")
    assert os.path.islink("out") and list(answers(records("real"))) == [f"i{n}" for n in reversed(range(5))]
