"""`qwenc sweep` and `qwenc bench` with an engine of formulas (tests/fake_study.py): arms, order, resuming, forms of output."""

import csv
import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import fake_study
import pytest

from qwenc.errors import UsageError
from qwenc.study.arms import baseline, cross
from qwenc.study.journal import Journal
from qwenc.study.stats import fit_line
from qwenc.study.values import whole_numbers

FAKE = [sys.executable, str(Path(__file__).parent / "fake_study.py")]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("QWENC_", "FORCE_COLOR", "NO_COLOR"))}


@pytest.fixture
def cli(monkeypatch, capfdbinary, tmp_path):
    return fake_study.command(monkeypatch, capfdbinary, tmp_path)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("506,2046,4059", [506, 2046, 4059]),
        ("512..16384*2", [512, 1024, 2048, 4096, 8192, 16384]),
        ("0..4096+1024", [0, 1024, 2048, 3072, 4096]),
        ("128-1024*2, 7", [128, 256, 512, 1024, 7]),
        ("3..5", [3, 4, 5]),
        ("8,8,8", [8]),
    ],
)
def test_lists_and_ranges(text, numbers):
    assert whole_numbers(text) == numbers


@pytest.mark.parametrize("text", ["", "a", "1,", "5..1", "1..9*1", "0..9*2", "1..9+0", "0..99999", "-3", "1..2..3", "٣", "9" * 30])
def test_ranges_that_are_none(text):
    with pytest.raises(UsageError):
        whole_numbers(text)


def test_arms_are_each_once_and_exact_ones_come_first():
    arms = cross({"pin": False}, {"sparse_attn": [True, False], "sparse_k": [8, 16], "kv": ["q8", "q4"]})
    assert [arm.label for arm in arms] == [
        *("exact kv=q8", "exact kv=q4"),
        *("sparse kv=q8 k=8", "sparse kv=q4 k=8", "sparse kv=q8 k=16", "sparse kv=q4 k=16"),
    ]
    assert all(not arm.settings.pin for arm in arms)
    assert all(baseline(arm, arms) is arms[0] for arm in arms)
    assert baseline(arms[2], arms[2:]) is None


SWEEP = ["sweep", "-m", "M", "--n", "100,2000", "--sparse-k", "8,16", "--kv", "q8,q4", "--decode", "4", "-r", "3"]


def test_a_sweep_measures_every_arm_at_every_length(cli):
    code, out, _ = cli(*SWEEP, "-q", "-o", "json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 2 * 6
    by = {(row["n"], row["arm"]): row for row in rows}
    exact, sparse = by[2000, "exact kv=q8"], by[2000, "sparse kv=q8 k=8"]
    assert exact["attn_ms"] == pytest.approx(0.1 + 2.0025) and exact["rest_ms"] == pytest.approx(3.0)
    assert exact["prefill_gemm_share"] + exact["prefill_attn_share"] + exact["prefill_other_share"] == pytest.approx(1)
    assert sparse["attn_ratio"] == pytest.approx(exact["attn_ms"] / sparse["attn_ms"])
    assert sparse["decode_ratio"] == pytest.approx(exact["total_ms"] / sparse["total_ms"])
    assert sparse["tok_s"] == pytest.approx(1e3 / sparse["total_ms"])
    assert exact["kl"] == 0 and exact["same_top"] == 1 and exact["delta_nll"] == 0
    assert 0 < by[2000, "sparse kv=q8 k=16"]["kl"] < sparse["kl"], "fewer blocks, further from exact"
    assert sparse["kv_bytes"] == 100 * 2004 and sparse["repeats"] == 3
    assert (sparse["sparse_k"], sparse["kv"], sparse["model"], sparse["text"]) == (8, "q8", "M", "built-in text")


def test_every_arm_is_warm_before_its_first_row_and_they_take_turns(cli):
    cli(*SWEEP, "-q", "--fresh-prefill")
    warm = [call[1] for call in fake_study.calls if call[0] == "compile"]
    begun = {}
    for place, call in enumerate(fake_study.calls):
        begun.setdefault((call[0], call[1]), place)
    for settings in warm:
        assert begun["compile", settings] < begun["prefill", settings]
    order = [call[1] for call in fake_study.calls if call[:1] == ("prefill",) and call[2] == 100]
    assert len(order) == 3 * 6 and order[0] != order[6] != order[12]
    assert set(order[:6]) == set(order[6:12]) == set(order[12:])


def test_arms_with_the_same_prefill_share_it_and_say_so(cli):
    args = ["sweep", "-m", "M", "--n", "1500", "--sparse-min-ctx", "0,4000", "--decode", "4", "-r", "1", "-q"]
    _, out, _ = cli(*args, "-o", "json")
    rows = {row["arm"]: row for row in json.loads(out)}
    assert len([call for call in fake_study.calls if call[0] == "prefill" and call[2] == 1500]) == 2
    assert rows["sparse min-ctx=4000"]["prefill_of"] == "sparse min-ctx=0"
    assert rows["sparse min-ctx=4000"]["prefill_ms"] == rows["sparse min-ctx=0"]["prefill_ms"]
    _, out, _ = cli(*args)
    assert "| = " in next(line for line in out.splitlines() if "min-ctx=4000" in line)
    _, out, _ = cli(*args, "-o", "json", "--fresh-prefill")
    assert len([call for call in fake_study.calls if call[0] == "prefill" and call[2] == 1500]) == 3
    assert all(row["prefill_of"] is None for row in json.loads(out))


def run(*args, script=None, cache):
    variables = {**CLEAN, "QWENC_CACHE": str(cache), "FAKE_STUDY": json.dumps(script or {})}
    return subprocess.run([*FAKE, *args], env=variables, capture_output=True, timeout=120, text=True)


@pytest.mark.parametrize("kill_at", [3, 40, 77, 91])
def test_a_sweep_that_was_killed_and_resumed_gives_the_same_table(tmp_path, kill_at):
    """Four decode steps a measurement, two to warm up: the kill strikes in a warm-up, in the first repeat, in a later one."""
    args = [*SWEEP, "-o", "csv", "--resume"]
    whole = run(*args, cache=tmp_path / "a")
    assert whole.returncode == 0
    killed = run(*args, script={"kill_at": kill_at}, cache=tmp_path / "b")
    assert killed.returncode == -signal.SIGKILL and killed.stdout == ""
    resumed = run(*args, cache=tmp_path / "b")
    assert resumed.returncode == 0
    drop = {"rss_bytes"}
    tables = [
        [{k: v for k, v in row.items() if k not in drop} for row in csv.DictReader(io.StringIO(done.stdout))] for done in (whole, resumed)
    ]
    assert tables[0] == tables[1] and len(tables[0]) == 12


def test_ctrl_c_keeps_the_finished_rows_and_resume_measures_only_the_rest(cli):
    code, out, err = cli(*SWEEP, "-o", "json", script={"interrupt_at": 40})
    assert code == 130 and 0 < len(json.loads(out)) < 12 and "--resume" in err[-1]
    fake_study.steps = 0
    code, out, _ = cli(*SWEEP, "-o", "json", "--resume")
    assert code == 0 and len(json.loads(out)) == 12
    resumed = fake_study.steps
    fake_study.steps = 0
    cli(*SWEEP, "-o", "json", "--resume")
    assert fake_study.steps == 0 and resumed == 6 * (2 + 2 * 3 * 4) - 40 + 6 * 2 + 4, "the cut one again, warm-ups, and exact logits again"


def test_a_new_sweep_puts_the_old_journal_aside(cli, tmp_path):
    journal = tmp_path / "mine.jsonl"
    for _ in range(2):
        assert cli(*SWEEP, "--journal", str(journal), "-q")[0] == 0
    assert (tmp_path / "mine.jsonl.old").read_text().count("\n") == journal.read_text().count("\n") == 1 + 36


def test_a_journal_of_something_else_is_refused_and_left_alone(cli, tmp_path):
    journal = tmp_path / "mine.jsonl"
    cli(*SWEEP, "--journal", str(journal), "-q")
    before = journal.read_bytes()
    code, out, err = cli(*SWEEP[:-4], "--decode", "5", "--journal", str(journal), "--resume")
    assert (code, out) == (2, "") and "decode" in err[-1] and journal.read_bytes() == before
    journal.write_text("my diary\n")
    assert cli(*SWEEP, "--journal", str(journal), "--resume")[0] == 2
    assert journal.read_text() == "my diary\n"


def test_half_a_line_is_forgotten_and_two_studies_do_not_write_one_journal(tmp_path):
    path = tmp_path / "j"
    journal = Journal(path, {"a": 1}, resume=True)
    journal.add({"x": 1.25})
    journal.add({"x": 2})
    with pytest.raises(UsageError, match="another study"):
        Journal(path, {"a": 1}, resume=True)
    with pytest.raises(UsageError, match="another study"):
        Journal(path, {"a": 1}, resume=False)
    journal.close()
    path.write_bytes(path.read_bytes()[:-4])
    again = Journal(path, {"a": 1}, resume=True)
    assert again.records == [{"x": 1.25}]
    again.add({"x": 3})
    again.close()
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [{"x": 1.25}, {"x": 3}]


def test_forms_of_output(cli):
    _, md, err = cli(*SWEEP)
    assert md.startswith("| n | arm | prefill s |") and md.count("\n") == 2 * (2 + 12) + 1
    assert any("medians of 3" in line for line in err)
    _, table, _ = cli(*SWEEP, "-q", "-o", "table")
    assert "sparse kv=q4 k=16" in table and "|" not in table and "\x1b" not in table
    _, lines, _ = cli(*SWEEP, "-q", "-o", "jsonl")
    assert len([json.loads(line) for line in lines.splitlines()]) == 12
    _, text, _ = cli(*SWEEP, "-q", "-o", "csv")
    row = next(csv.DictReader(io.StringIO(text)))
    assert float(row["attn_low"]) <= float(row["attn_ms"]) <= float(row["attn_high"])


def test_a_busy_machine_is_told_of(cli, monkeypatch):
    args = ["sweep", "-m", "M", "--n", "100", "-r", "1", "--decode", "2"]
    for cores, told in ((2.0, False), (0.5, True)):
        ticks = iter(range(10**6))
        clock = types.SimpleNamespace(perf_counter=lambda: float(next(ticks)), process_time=lambda: cores * next(ticks))  # noqa: B023
        monkeypatch.setattr("qwenc.study.measure.time", clock)
        assert ("during 2 of 2 measurements" in " ".join(cli(*args)[2])) == told


def test_tables_beside_the_reference(cli):
    _, out, _ = cli("sweep", "-m", "M", "--n", "506,2046", "--decode", "2", "-r", "1", "-q", "--tables", "--chart")
    assert "Table A, prefill: exact → sparse" in out and "Table B" in out
    assert "13.09 → 13.65" in out and "48.9 → 39.1" in out
    assert "o exact: 0.1" in out and "x sparse" in out  # the chart's legend


def test_arms_that_never_chose_blocks_are_named(cli):
    """Short contexts are exact bit for bit: a table of ×1.00 beside "sparse" looked like a measurement of it."""
    _, _, err = cli("sweep", "-m", "M", "--n", "506,2046", "--decode", "2", "-r", "1")
    assert "too short for a choice, so sparse decoded exactly: 506" in " ".join(err)
    _, _, err = cli("sweep", "-m", "M", "--n", "2046", "--decode", "2", "-r", "1")
    assert "too short" not in " ".join(err)


def test_mistakes_are_one_line(cli, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("short")
    for args, word in (
        (["--n", "5000"], "context"),
        (["--n", "x"], "range"),
        (["--n", "100", "-f", str(short)], "short.txt has 5 tokens"),
        (["--n", "100", "--kv", "q8,q9"], "q9"),
        (["--n", "100", "--sparse-ratio", "2"], "--sparse-ratio"),
        (["--n", "100", "--tables", "-o", "csv"], "--tables"),
        (["--n", "100", "--plot", "a.bmp"], ".png"),
        (["--n", "100", "--plot", str(tmp_path / "no" / "a.png")], "cannot write"),
    ):
        code, out, err = cli("sweep", "-m", "M", *args)
        assert (code, out) == (2, "") and word in err[-1] and err[-1].startswith("qwenc: error: "), args


def test_a_line_through_points():
    line = fit_line([100, 200, 400], [1.1, 2.1, 4.1])
    assert line.level == pytest.approx(0.1) and line.slope == pytest.approx(0.01)
    assert fit_line([5, 5], [1, 2]) is None


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("axes", [[], ["--log-axes"]])
def test_a_picture(cli, tmp_path, suffix, axes):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curve.{suffix}"
    assert cli(*SWEEP, "-q", "--plot", str(path), *axes)[0] == 0
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml") and list(tmp_path.glob(".*part")) == []


# ---- bench ----------------------------------------------------------------------------------------------------------------
def test_bench_speaks_llama_bench(cli):
    code, out, _ = cli("bench", "-m", "M", "-p", "512,64", "-n", "16", "-d", "0,128", "-r", "3", "-t", "1,2", "-o", "json")
    rows = json.loads(out)
    names = ["pp512", "pp64", "tg16", "pp512 @ d128", "pp64 @ d128", "tg16 @ d128"]
    assert code == 0 and [row["test"] for row in rows] == names * 2
    assert [row["n_threads"] for row in rows] == [1] * 6 + [2] * 6
    for row in rows:
        assert len(row["samples_ns"]) == 3 and min(row["samples_ns"]) > 0
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"] == pytest.approx([1e9 * tokens / ns for ns in row["samples_ns"]])
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 3)
    deep = [call for call in fake_study.calls if call[0] == "step" and call[2] >= 128]
    assert len(deep) == 2 * 3 * 16, "every repetition begins at the depth again"


def test_bench_in_markdown_has_the_row_names(cli):
    _, out, _ = cli("bench", "-m", "M", "-p", "32", "-n", "0", "-r", "1")
    lines = out.splitlines()
    assert lines[0].startswith("| model | size | params | backend | threads |") and lines[0].endswith("| test | t/s |")
    assert len(lines) == 3 and "| pp32 |" in lines[2] and "±" in lines[2]


def test_bench_keeps_finished_rows_on_ctrl_c(cli):
    code, out, _ = cli("bench", "-m", "M", "-p", "32", "-n", "8", "-r", "2", "-o", "jsonl", script={"interrupt_at": 6})
    assert code == 130 and [json.loads(line)["test"] for line in out.splitlines()] == ["pp32"]


def test_bench_mistakes(cli):
    for args, word in ((["-p", "0", "-n", "0"], "nothing to measure"), (["-d", "9000"], "context"), (["-p", "a"], "range")):
        code, out, err = cli("bench", "-m", "M", *args)
        assert (code, out) == (2, "") and word in err[-1]
