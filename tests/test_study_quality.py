"""`qwenc quality` with an engine of formulas (tests/fake_study.py), and the statistics behind it."""

import csv
import io
import json
import math

import fake_study
import numpy as np
import pytest

from qwenc.study.divergence import diverge, log_probabilities
from qwenc.study.needles import hide
from qwenc.study.prose import long_text
from qwenc.study.quality import Plan
from qwenc.study.recall import recall


@pytest.fixture
def cli(monkeypatch, capfdbinary, tmp_path):
    return fake_study.command(monkeypatch, capfdbinary, tmp_path, "quality", "-m", "M")


def rows_by(out):
    return {(row["context"], row["method"], row["arm"]): row for row in json.loads(out)}


def test_divergence_by_hand():
    reference, other = np.log([[0.5, 0.25, 0.25]] * 20), np.log([[0.25, 0.5, 0.25]] * 20)
    found = diverge(reference.astype(np.float32) + 3, other.astype(np.float32), [1] * 20)
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)
    assert found.kl == pytest.approx([kl] * 20, abs=1e-6) and not found.same_top.any()
    assert found.nll == pytest.approx([-math.log(0.5)] * 20, abs=1e-6)
    assert found.reference_nll == pytest.approx([-math.log(0.25)] * 20, abs=1e-6)
    assert np.exp(log_probabilities(np.array([[1e4, 0, -1e4]], np.float32))).sum() == pytest.approx(1)


def test_recall_beside_the_best_of_the_same_budget():
    mass = np.array([[[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.7, 0.1]]])
    chosen = np.array([[[1, 0, 0, 1], [0, 0, 1, 0]]], bool)
    held, most = recall(chosen, mass)
    assert held == pytest.approx((0.6 + 0.7) / 2) and most == pytest.approx((0.7 + 0.7) / 2)


def test_perplexity_alone(cli):
    code, out, _ = cli("-c", "64,200", "--chunks", "3", "-o", "json")
    rows = json.loads(out)
    assert code == 0 and [(row["context"], row["tokens"]) for row in rows] == [(64, 96), (200, 300)]
    for row in rows:
        assert row["method"] == "batch" and row["kl"] == 0 and row["perplexity"] == row["reference_perplexity"] > 1


def test_the_pieces_of_every_context_begin_at_the_same_places():
    """They all began within the first document of four where the longest context of the run made one of each."""
    plan = Plan(arms=(), contexts=(64, 1000), chunks=4, scored=16, methods=("decode",))
    short, long = ([plan.piece(context, chunk) for chunk in range(4)] for context in (64, 1000))
    assert [piece.start for piece in short] == [piece.start for piece in long] == [0, 1017, 2034, 3051]
    assert [piece.stop - piece.start for piece in short + long] == [81] * 4 + [1017] * 4 and plan.tokens == long[-1].stop


def test_sparse_arms_by_both_methods(cli):
    args = ["-c", "300", "--chunks", "2", "--scored", "16", "--sparse-attn", "on", "--sparse-k", "4,16", "--kv", "q8,q4", "-o", "json"]
    code, out, err = cli(*args)
    rows = rows_by(out)
    assert code == 0 and any("compared with exact" in line for line in err)
    assert {method for _, method, _ in rows} == {"decode", "all"}
    assert rows[300, "decode", "sparse kv=q8 k=4"]["tokens"] == 32
    for method in ("decode", "all"):
        assert rows[300, method, "sparse kv=q8 k=4"]["kl"] > rows[300, method, "sparse kv=q8 k=16"]["kl"] > 0
    row = rows[300, "all", "sparse kv=q4 k=4"]
    assert row["kl_p99"] >= row["kl"] and 0 <= row["same_top"] <= 1
    assert row["delta_nll"] == pytest.approx(math.log(row["perplexity"] / row["reference_perplexity"]))


def test_the_context_of_decode_is_exact_and_computed_once_for_each_cache(cli):
    cli("-c", "300", "--chunks", "1", "--sparse-attn", "on", "--sparse-k", "4,8,16", "--method", "decode")
    filled = [call[1] for call in fake_study.calls if call[0] == "prefill"]
    never = 2**31 - 1
    assert [settings.sparse_attn and settings.sparse_pf_min_ctx != never for settings in filled] == [False, False]
    stepped = {call[1].sparse_k for call in fake_study.calls if call[0] == "step" and call[1].sparse_attn}
    assert stepped == {4, 8, 16, 9}, "and the oracle, which leaves out one block of ten"
    assert all(call[1].sparse_pf_min_ctx is None for call in fake_study.calls if call[0] == "step")


def test_recall_beside_the_oracles(cli):
    """Block b holds half of what is left after block b − 1, and the arm keeps blocks 0, 2, 4 and 6."""
    args = ["-c", "1000", "--chunks", "1", "--scored", "4", "--sparse-attn", "on", "--sparse-k", "4", "--sparse-score", "scan,probe"]
    _, out, _ = cli(*args, "-o", "json")
    rows = rows_by(out)
    row = rows[1000, "decode", "sparse score=scan"]
    assert row["recall"] == pytest.approx(sum(0.5**b for b in (1, 3, 5, 7)), abs=1e-4)
    assert row["estimated_recall"] == 0.75
    assert row["oracle_recall"] == pytest.approx(1 - 0.5**4, abs=1e-4)
    assert rows[1000, "all", "sparse score=scan"]["recall"] is rows[1000, "decode", "sparse score=probe"]["recall"] is None


def test_what_batch_does_not_see_of_dual_is_said(cli):
    _, _, err = cli("-c", "100", "--chunks", "1", "--wmode", "dual", "-o", "json")
    assert sum("dual reads" in line for line in err) == 1
    assert not any("dual reads" in line for line in cli("-c", "100", "--chunks", "1", "--wmode", "q8", "-o", "json")[2])


def test_each_weight_format_gets_its_engine_and_the_first_is_the_reference(cli):
    _, out, _ = cli("-c", "100", "--chunks", "1", "--wmode", "f32,q8", "--kv", "f32,q8", "-o", "json")
    rows = json.loads(out)
    assert len(rows) == 4 and {row["reference"] for row in rows} == {"exact wmode=f32 kv=f32"}
    assert [call[0] for call in fake_study.calls if call[0] in ("load", "close")] == ["load", "close"] * 2


def test_reference_logits_are_kept_and_used_again(cli, tmp_path):
    folder = tmp_path / "reference"
    args = ["-c", "100", "--chunks", "2", "--method", "all", "--kv", "q8,q4", "-o", "csv", "--reference", str(folder)]
    _, first, _ = cli(*args)
    prefills = [call for call in fake_study.calls if call[0] == "prefill"]
    assert sorted(path.name for path in folder.iterdir()) == ["decode-100-0.npy", "decode-100-1.npy", "reference.json"]
    _, second, _ = cli(*args)
    again = [call for call in fake_study.calls if call[0] == "prefill"]
    assert second == first and len(list(csv.DictReader(io.StringIO(first)))) == 2
    assert (len(prefills), len(again)) == (4, 2)
    code, out, err = cli(*args, "--scored", "9")
    assert (code, out) == (2, "") and "scored" in err[-1]


def test_a_folder_of_other_files_is_left_alone(cli, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    code, _, err = cli("-c", "100", "--reference", str(tmp_path))
    assert code == 2 and "no reference logits" in err[-1]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == ["letter.txt"]


def test_ctrl_c_keeps_what_is_known(cli):
    args = ["-c", "100,200", "--chunks", "1", "--scored", "8", "--kv", "q8,q4", "--method", "all", "-o", "jsonl"]
    code, out, _ = cli(*args, script={"interrupt_at": 20})
    assert code == 130 and {json.loads(line)["context"] for line in out.splitlines()} == {100}


def test_quality_mistakes_are_one_line(cli, tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("short")
    for args, word in (
        (["-f", str(text)], "t.txt has 5 tokens"),
        (["-c", "5000"], "context"),
        (["-c", "1"], "at least 2"),
        (["--method", "some"], "some"),
        (["--plot", "a.png"], "--needle"),
        (["--needle", "--method", "batch"], "--method"),
        (["--needle", "--depths", "120"], "--depths"),
        (["--needle", "-c", "20"], "too few"),
    ):
        code, out, err = cli(*args)
        assert (code, out) == (2, "") and word in err[-1] and err[-1].startswith("qwenc: error: "), args


def test_a_model_without_a_tokenizer(cli):
    code, out, _ = cli("-c", "64", "--chunks", "1", "-o", "json", script={"tokenizer": False})
    assert code == 0 and json.loads(out)[0]["text"] == "random tokens"
    code, _, err = cli("--needle", script={"tokenizer": False})
    assert code == 2 and "no tokenizer" in err[-1]


# ---- needles ---------------------------------------------------------------------------------------------------------------
def test_a_needle_lies_where_it_should():
    hay, needle = list(range(100, 200)), [1, 2, 3]
    assert hide(hay, needle, 20, 0.0)[:5] == [100, 1, 2, 3, 101]
    assert hide(hay, needle, 20, 1.0)[-3:] == needle
    middle = hide(hay, needle, 21, 0.5)
    assert len(middle) == 21 and middle[9:12] == needle


class Memory:
    """Answers with the needle if it can see it: exact attention always, sparse attention only in the first half."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(fake_study.FakeTokenizer, "encode", lambda self, text, special: [ord(char) for char in text])
        monkeypatch.setattr(fake_study.FakeTokenizer, "decode", lambda self, ids: "".join(map(chr, ids)))
        monkeypatch.setattr(fake_study.FakeSession, "_logits", self.logits)

    @staticmethod
    def logits(session, _token):
        text = "".join(map(chr, session.context))
        seen = text.find(" is ", 0, text.find("Question:"))
        lost = session.settings.sparse_attn and seen > 200
        answer = "?" * 12 if lost or seen < 0 else text[seen + 3 : seen + 20]
        given = text.rpartition(" is")[2]
        logits = np.zeros(300, np.float32)
        logits[ord(answer[len(given)]) if len(given) < len(answer) else 46] = 1
        return logits


def test_needles_by_depth_and_length(cli, monkeypatch):
    Memory(monkeypatch)
    args = ["--needle", "-c", "400,600", "--depths", "0,100", "--tries", "2", "--sparse-attn", "on"]
    code, out, err = cli(*args, "-o", "json")
    cells = {(cell["arm"], cell["context"], cell["depth"]): cell["found"] for cell in json.loads(out)}
    assert code == 0 and any("kept: of those that exact finds" in line for line in err)
    assert {found for (arm, _, _), found in cells.items() if arm == "exact"} == {2}
    assert {(depth, found) for (arm, _, depth), found in cells.items() if arm == "sparse"} == {(0.0, 2), (1.0, 0)}
    _, out, _ = cli(*args)
    assert "exact: 8 of 8 found" in out and "sparse: 4 of 8 found, 4 of the 8 that exact finds" in out and "| 100% | 0/2 | 0/2 |" in out


def test_a_heat_map(cli, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    Memory(monkeypatch)
    path = tmp_path / "needles.svg"
    assert cli("--needle", "-c", "400,600", "--sparse-attn", "on", "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"<?xml")


def test_the_built_in_text_is_the_same_everywhere():
    text = long_text(20000)
    assert len(text) >= 20000 and long_text(5000)[:4000] == text[:4000]
    assert text.startswith("Some time before 1792 Greta abandoned a narrow lane of Holloway")
    sentences = text.split(". ")
    assert len(set(sentences)) > 0.95 * len(sentences)
