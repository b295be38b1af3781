"""Prompts that are not computed twice: cut, forked, saved and restored contexts go on to the bits of those that were never saved."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import qwenc
from qwenc.errors import UsageError
from qwenc.kv_store.arrays import common_prefix, usable
from qwenc.kv_store.saved import Damaged, SavedFile, save
from qwenc.kv_store.stores import first_difference
from qwenc.report import Reporter

GOLDENS = Path(__file__).parent / "data" / "goldens"
MODEL = GOLDENS / "qwen3-dense-tied"
IDS = np.random.default_rng(2).integers(0, 150, 700).tolist()
KINDS = [{}, {"kv": "q4"}, {"kv": "k8v4"}, {"wmode": "f32", "kv": "f32"}]
names = [" ".join(kind.values()) or "dual q8" for kind in KINDS]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    from qwenc.checkpoint import model_cache

    monkeypatch.setattr(model_cache, "cache_root", lambda: tmp_path_factory.getbasetemp() / "qwenc-cache")


class Listener(Reporter):
    def __init__(self):
        self.notes, self.details = [], []

    def note(self, text):
        self.notes.append(text)

    def detail(self, text):
        self.details.append(text)


@pytest.fixture(scope="module", params=KINDS, ids=names)
def engine(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        from qwenc.checkpoint import model_cache

        patch.setattr(model_cache, "cache_root", lambda: tmp_path_factory.getbasetemp() / "qwenc-cache")
        with qwenc.load(MODEL, **request.param) as loaded:
            yield loaded


def run_on(session, ids):
    """Logits after the rest of the prompt, and after two steps."""
    return [session.prefill(ids).copy(), session.step(7).copy(), session.step(8).copy()]


def test_arithmetic_of_cuts():
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2 and common_prefix(np.array([1]), np.array([1, 2])) == 1
    assert usable(shared=10, held=10, wanted=20, grain=1) == 10
    assert usable(shared=10, held=10, wanted=10, grain=1) == 9  # one token is left to compute: logits come from it
    assert usable(shared=40, held=50, wanted=60, grain=32) == 32
    assert usable(shared=50, held=50, wanted=60, grain=32) == 50  # the end of what was saved is kept as it stands
    assert usable(shared=50, held=-1, wanted=60, grain=32) == 32


@pytest.mark.parametrize("cut", [1, 31, 32, 256, 300, 576, 699])
def test_snapshot_fork_and_cut_go_on_to_the_same_bits(engine, cut):
    """Wherever the prompt was cut: mini-batches do not change a bit."""
    wanted = run_on(engine.session(710), IDS)
    session = engine.session(710)
    session.prefill(IDS[:cut])
    snapshot, fork = session.snapshot(), session.fork()
    np.testing.assert_array_equal(run_on(session, IDS[cut:]), wanted)
    assert session.prompt.tolist() == IDS and len(session.ids) == 702
    np.testing.assert_array_equal(run_on(fork, IDS[cut:]), wanted)
    other = engine.session(720)
    other.prefill(IDS[::-1])  # something else was there
    other.restore(snapshot)
    np.testing.assert_array_equal(run_on(other, IDS[cut:]), wanted)
    if cut % session.grain == 0:
        session.truncate(cut)
        np.testing.assert_array_equal(run_on(session, IDS[cut:]), wanted)
        other.restore(fork, cut)
        np.testing.assert_array_equal(run_on(other, IDS[cut:]), wanted)
    else:
        with pytest.raises(UsageError):
            session.truncate(cut)
        with pytest.raises(UsageError):
            other.restore(fork, cut)


@pytest.mark.parametrize("saved", [40, 256, 513, 700])
@pytest.mark.parametrize("used", [32, 512, None])
def test_a_file_goes_on_to_the_same_bits(engine, tmp_path, saved, used):
    wanted = run_on(engine.session(710), IDS)
    session = engine.session(900)
    session.prefill(IDS[:saved])
    save(tmp_path / "f", session.ids, session.cache, {"a": 1})
    used = saved if used is None else used
    if used > saved or used == 700:
        return
    restored = engine.session(710)
    with SavedFile(tmp_path / "f") as file:
        assert file.identity == {"a": 1} and file.ids.tolist() == IDS[:saved]
        restored.restore(file, used)
    np.testing.assert_array_equal(run_on(restored, IDS[used:]), wanted)


def test_a_longer_file_than_the_context_has_room_for(engine, tmp_path):
    session = engine.session(700)
    session.prefill(IDS)
    save(tmp_path / "f", session.ids, session.cache, {})
    small = engine.session(70)
    with SavedFile(tmp_path / "f") as file:
        small.restore(file, 64)
        with pytest.raises(UsageError):
            small.restore(file, 96)
    wanted = engine.session(70)
    wanted.prefill(IDS[:64])
    np.testing.assert_array_equal(small.step(3), wanted.step(3))


def test_safetensors_reads_the_file(tmp_path, engine):
    from safetensors import safe_open

    session = engine.session(300)
    session.prefill(IDS[:290])
    save(tmp_path / "f", session.ids, session.cache, {"model": "x"})
    with safe_open(tmp_path / "f", "np") as file:
        assert file.metadata()["format"] == "qwenc-kv" and json.loads(file.metadata()["identity"]) == {"model": "x"}
        assert file.get_tensor("ids").tolist() == IDS[:290]


# ---- the stores, on one kind of cache ---------------------------------------------------------------------------------------
def load(tmp_path, listener=None, model=MODEL, **settings):
    return qwenc.load(model, wmode="dual", reporter=listener or Listener(), **settings)


def generate(engine, ids, count=6):
    steps = list(engine.generate(ids, max_tokens=count, ignore_eos=True))
    return [(step.id, step.logprob) for step in steps], steps[-1].timings.prefill.n


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """Tokens and log probabilities by prompt length, never cached."""
    with pytest.MonkeyPatch.context() as patch:
        from qwenc.checkpoint import model_cache

        patch.setattr(model_cache, "cache_root", lambda: tmp_path_factory.getbasetemp() / "qwenc-cache")
        with load(None) as engine:
            return {n: generate(engine, IDS[:n])[0] for n in (40, 300, 600, 700)}


def test_prompt_cache_saves_restores_and_says_what_it_cannot_use(tmp_path, cold):
    path, listener = tmp_path / "cache", Listener()
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        assert generate(engine, IDS[:600]) == (cold[600], 600) and path.exists() and not listener.notes
    first = path.read_bytes()
    for length, computed in ((600, 1), (700, 100), (600, 1)):
        with load(tmp_path, listener, prompt_cache=str(path)) as engine:
            assert generate(engine, IDS[:length]) == (cold[length], computed)
    assert path.read_bytes() == first and not listener.notes  # it serves as it is
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        assert generate(engine, IDS[:300]) == (cold[300], 1)
    assert not listener.notes
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        generate(engine, [*IDS[:250], 1, 2, 3])
    assert "shares 250 of its 600 tokens" in listener.notes[-1] and path.read_bytes() != first  # it fits the new prompt better now
    with load(tmp_path, listener, prompt_cache=str(path), kv="f32") as engine:
        generate(engine, IDS[:600])
    assert "made with another kv" in listener.notes[-1]
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        assert generate(engine, IDS[:600]) == (cold[600], 600)
    assert "made with another kv" in listener.notes[-1]


def test_what_differs_is_told_by_its_cause():
    """The mini-batch counts only while attention is sparse, so it differed too, and came first in the alphabet."""
    sparse = {"kv": "q4", "prefill_batch": 256, "sparse_attn": True, "sparse_k": 32}
    assert first_difference(sparse, {"kv": "q4", "sparse_attn": False}) == "sparse_attn"
    assert first_difference(sparse, {"kv": "q4"}) == "sparse_attn"
    assert first_difference(sparse, sparse | {"sparse_k": 8}) == "sparse_k"
    assert first_difference(sparse, dict(sparse)) == ""


def test_another_model_is_another_identity(tmp_path, cold):
    path, listener = tmp_path / "cache", Listener()
    with load(tmp_path, listener, GOLDENS / "llama-smol", prompt_cache=str(path)) as engine:
        generate(engine, IDS[:300])
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        assert generate(engine, IDS[:300]) == (cold[300], 300)
    assert "made with another" in listener.notes[-1]


DAMAGES = {
    "a byte of the keys": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "cut by one byte": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "longer": lambda data: data + b"x",
    "another version": lambda data: data.replace(b'"version":"1"', b'"version":"9"'),
    "no identity": lambda data: data.replace(b'"identity"', b'"idemtity"'),
    "other ids": lambda data: data.replace(b'"ids"', b'"IDS"'),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_costs_a_note_and_is_made_again(tmp_path, cold, damage):
    path, listener = tmp_path / "cache", Listener()
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        generate(engine, IDS[:40])
        whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        assert generate(engine, IDS[:40]) == (cold[40], 40)
    assert len(listener.notes) == 1 and str(path) in listener.notes[0] and "\n" not in listener.notes[0]
    with load(tmp_path, listener, prompt_cache=str(path)) as engine:
        assert generate(engine, IDS[:40]) == (cold[40], 1)
    assert len(listener.notes) == 1


@pytest.mark.parametrize("data", [b"my precious notes", b"\x00" * 100, b'{"format": "gguf"}'])
def test_a_file_of_another_kind_is_never_replaced(tmp_path, data):
    (tmp_path / "mine").write_bytes(data)
    with load(tmp_path, prompt_cache=str(tmp_path / "mine")) as engine, pytest.raises(UsageError, match="something else"):
        generate(engine, IDS[:40])
    assert (tmp_path / "mine").read_bytes() == data
    with load(tmp_path, prompt_cache=str(tmp_path)) as engine, pytest.raises(UsageError):
        generate(engine, IDS[:40])


def test_a_cache_that_cannot_be_written_costs_a_note(tmp_path, cold):
    listener = Listener()
    with load(tmp_path, listener, prompt_cache=str(tmp_path / "none" / "cache")) as engine:
        assert generate(engine, IDS[:300]) == (cold[300], 300)
    assert "cannot be written" in listener.notes[-1] or "No such file" in listener.notes[-1]


def test_disk_kv_finds_the_longest_beginning_and_stays_within_its_bound(tmp_path, cold):
    folder, listener = tmp_path / "kv", Listener()
    other = IDS[:290] + [1] * 300
    with load(tmp_path, listener, disk_kv=str(folder)) as engine:
        assert generate(engine, other)[1] == 590
        assert generate(engine, IDS[:600]) == (cold[600], 310)
        assert generate(engine, IDS[:700]) == (cold[700], 100)  # too little to save
        assert generate(engine, IDS[:40]) == (cold[40], 1)
    files = sorted(folder.iterdir(), key=os.path.getsize)
    assert len(files) == 2
    each = files[-1].stat().st_size
    for n, path in enumerate(files):
        os.utime(path, (n + 1, n + 1))
    with load(tmp_path, listener, disk_kv=str(folder), disk_kv_gb=2.5 * each / 1e9) as engine:
        assert generate(engine, IDS[:600]) == (cold[600], 1)  # which makes it the one used last
        generate(engine, IDS[::-1])
    assert len(list(folder.iterdir())) == 2 and sum(path.stat().st_size for path in folder.iterdir()) <= 2.5 * each
    with load(tmp_path, listener, disk_kv=str(folder)) as engine:
        assert generate(engine, IDS[:600]) == (cold[600], 1)
        assert generate(engine, other)[1] == 300  # was the oldest, and went
    assert not listener.notes


def test_disk_kv_removes_a_damaged_file_and_touches_no_other(tmp_path, cold):
    folder, listener = tmp_path / "kv", Listener()
    with load(tmp_path, listener, disk_kv=str(folder)) as engine:
        generate(engine, IDS[:300])
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    (folder / "mine.txt").write_text("precious")
    with load(tmp_path, listener, disk_kv=str(folder), disk_kv_gb=0) as engine:
        assert generate(engine, IDS[:300]) == (cold[300], 300)
    assert len(listener.notes) == 1 and "removed" in listener.notes[0]
    assert [entry.name for entry in folder.iterdir()] == ["mine.txt"]


def test_lanes_compute_a_common_beginning_once(cold):
    with load(None) as engine:
        lanes = engine.lanes(2)
        found, computed = {}, {}
        requests = [IDS[:600], IDS[:300], IDS[:700], IDS[:40]]
        waiting = list(enumerate(requests))
        while waiting or lanes.working:
            while waiting and lanes.free:
                n, ids = waiting.pop(0)
                step = lanes.start(n, ids, max_tokens=6, ignore_eos=True)
                found[n] = [(step.id, step.logprob)]
            for n, step in lanes.step():
                found[n].append((step.id, step.logprob))
                if step.finish_reason:
                    computed[n] = step.timings.prefill.n
    assert [found[n] for n in range(4)] == [cold[len(ids)] for ids in requests]
    assert computed == {0: 600, 1: 1, 2: 100, 3: 1}


def test_a_saved_prompt_of_another_kind_of_cache_is_damaged(tmp_path):
    with load(None) as engine, load(None, kv="q4") as other:
        session = engine.session(300)
        session.prefill(IDS[:290])
        save(tmp_path / "f", session.ids, session.cache, {})
        with SavedFile(tmp_path / "f") as file, pytest.raises(Damaged):
            other.session(300).restore(file, 256)


def test_sparse_prompts_are_cut_where_their_queries_choose_together(tmp_path):
    """Cached runs have the bits of cold ones, also where the saved prompt ends inside a mini-batch."""
    sparse = {"sparse_attn": True, "sparse_k": 2, "sparse_pf_min_ctx": 0, "prefill_batch": 64}
    with load(tmp_path, **sparse) as engine:
        wanted = {n: generate(engine, IDS[:n])[0] for n in (300, 500)}
        assert wanted[300] != generate_exactly(IDS[:300])  # blocks were left out
    path = str(tmp_path / "cache")
    with load(tmp_path, prompt_cache=path, **sparse) as engine:
        assert generate(engine, IDS[:300]) == (wanted[300], 300)
    with load(tmp_path, prompt_cache=path, **sparse) as engine:
        assert generate(engine, IDS[:500]) == (wanted[500], 500 - 256)
        assert generate(engine, IDS[:300])[0] == wanted[300]


def generate_exactly(ids):
    with load(None) as engine:
        return generate(engine, ids)[0]
