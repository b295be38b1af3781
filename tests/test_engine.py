"""The whole engine: logits against transformers and against float64 NumPy, prefill against decode, threads, limits, failures."""

import subprocess
import sys
from pathlib import Path

import naive_forward
import numpy as np
import pytest
from checkpoints import DENSE, LLAMA, MOE, to_bf16, write_checkpoint
from checkpoints import weights as weights_of

import qwenc
from qwenc.model import forward
from qwenc.report import Reporter
from qwenc.settings import Settings

ROOT = Path(__file__).parent.parent
GOLDENS = ROOT / "tests" / "data" / "goldens"
NAMES = ["llama-smol", "qwen3-dense-tied", "qwen3-moe", "qwen3-vl-text"]
ODD = DENSE | {"hidden_size": 40, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Converted models of a test run go to one temporary folder; compiled kernels stay in the usual one."""
    from qwenc.checkpoint import model_cache

    monkeypatch.setattr(model_cache, "cache_root", lambda: tmp_path_factory.getbasetemp() / "qwenc-cache")


def golden(name, file="float32.npz"):
    """input_ids, logits and greedy_ids; float32.npz holds what transformers computes from the files as they are."""
    return {**np.load(GOLDENS / name / "expected.npz"), **np.load(GOLDENS / name / file)}


def distance(a, b):
    return np.abs(a - b).mean()


def greedy(engine, ids, count):
    return [step.id for step in engine.generate(list(ids), max_tokens=count, ignore_eos=True)]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_ids_of_transformers(name):
    wanted = golden(name)
    with qwenc.load(GOLDENS / name, wmode="f32", kv="f32", prefill_batch=64) as engine:
        logits = engine.logits(wanted["input_ids"])
        assert logits.dtype == np.float32 and logits.shape == wanted["logits"].shape
        assert np.abs(logits - wanted["logits"]).max() < 2e-4
        assert greedy(engine, wanted["input_ids"], 24) == wanted["greedy_ids"].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_the_goldens_as_delivered(name, monkeypatch):
    """expected.npz was made with rotary frequencies rounded to bfloat16 (see tests/data/goldens/README.md)."""
    exact = forward.rope_inv_freq

    def rounded(rope, head_dim):
        inv_freq, scaling = exact(rope, head_dim)
        return (to_bf16(inv_freq).astype(np.uint32) << 16).view(np.float32), scaling

    monkeypatch.setattr(forward, "rope_inv_freq", rounded)
    wanted = golden(name, "expected.npz")
    with qwenc.load(GOLDENS / name, wmode="f32", kv="f32") as engine:
        assert np.abs(engine.logits(wanted["input_ids"]) - wanted["logits"]).max() < 2e-4
        assert greedy(engine, wanted["input_ids"], 24) == wanted["greedy_ids"].tolist()


@pytest.mark.parametrize("config", [DENSE, LLAMA, MOE, ODD], ids=["dense", "llama", "moe", "odd"])
@pytest.mark.parametrize("wmode", ["f32", "q8", "q4"])
def test_against_float64(tmp_path, config, wmode):
    """Sizes that fit no tile. Activations of 15 or 8 bits cost their rounding, and now and then another expert: hence the median over
    tokens."""
    folder = write_checkpoint(tmp_path / "model", config)
    ids = np.random.default_rng(3).integers(0, config["vocab_size"], 75)
    with qwenc.load(folder, wmode=wmode, kv="f32", prefill_batch=32) as engine:
        got = engine.logits(ids)
        wanted = naive_forward.forward(engine.packed, ids, wmode)
    error = np.abs(got - wanted).max(axis=1) / wanted.std()
    assert np.median(error) < {"f32": 1e-5, "q8": 1e-3, "q4": 0.1}[wmode]
    if wmode == "f32":
        assert error.max() < 2e-5


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wmode", ["q8", "q4"])
def test_decode_gives_the_bits_of_prefill(name, wmode):
    """Token by token or in batches of any size: the same integers, the same floats."""
    ids = golden(name)["input_ids"][:70]
    with qwenc.load(GOLDENS / name, wmode=wmode) as engine:
        whole = engine.logits(ids)
        session = engine.session(len(ids))
        stepped = np.array([session.step(int(i)).copy() for i in ids])
        np.testing.assert_array_equal(whole, stepped)
        session = engine.session(len(ids))
        for first, last in ((0, 1), (1, 18), (18, 70)):
            np.testing.assert_array_equal(session.prefill(ids[first:last]), whole[last - 1])


def test_dual_reads_q8_in_prefill_and_q4_in_decode():
    ids = golden("qwen3-dense-tied")["input_ids"][:40]
    logits = {}
    for wmode in ("q8", "q4", "dual"):
        with qwenc.load(GOLDENS / "qwen3-dense-tied", wmode=wmode) as engine:
            logits[wmode] = engine.logits(ids)
            if wmode == "q4":
                continue
            session = engine.session(64)
            session.prefill(ids)
            logits[wmode + " step"] = session.step(7).copy()
    assert distance(logits["dual"], logits["q8"]) < 0.1 * distance(logits["dual"], logits["q4"])
    assert distance(logits["dual step"], logits["q8 step"]) > 4 * distance(logits["dual"], logits["q8"])


@pytest.mark.parametrize("name", ["llama-smol", "qwen3-moe"])
def test_threads_do_not_change_a_bit(name, monkeypatch):
    """Also with more threads than cores, and over contexts that are cut into parts."""
    from qwenc import engine as module
    from qwenc.machine.cpus import CpuChoice

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150, 600)
    seen = []
    for threads in (1, 2, 3, 5):
        choice = CpuChoice(threads, tuple(range(threads)), (0,), (0,), None)
        monkeypatch.setattr(module, "choose_cpus", lambda *_, choice=choice: choice)
        with qwenc.load(GOLDENS / name, wmode="dual", pin=False) as engine:
            session = engine.session(640)
            session.prefill(ids)
            seen.append(np.array([session.step(i).copy() for i in range(5)]))
    for other in seen[1:]:
        np.testing.assert_array_equal(seen[0], other)


@pytest.mark.parametrize("wmode", ["q4", "f32"])
def test_weights_in_own_memory_give_the_same_bits(wmode):
    ids = golden("qwen3-moe")["input_ids"]
    logits = []
    for mmap in (True, False):
        with qwenc.load(GOLDENS / "qwen3-moe", wmode=wmode, mmap=mmap) as engine:
            assert engine.packed.mapped == mmap
            logits.append(engine.logits(ids))
    np.testing.assert_array_equal(*logits)


def test_timings_add_up():
    ids = golden("llama-smol")["input_ids"].tolist()
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine:
        steps = list(engine.generate(ids, max_tokens=5, ignore_eos=True, dec_prof=True))
    end = steps[-1]
    assert [s.finish_reason for s in steps] == [None] * 4 + ["length"] and end.usage == (150, 5)
    assert end.timings.prefill.n == 150 and end.timings.decode.n == 4
    prefill, decode = end.timings.prefill, end.timings.decode
    assert 0 < prefill.gemm_ms + prefill.attn_ms <= prefill.total_ms
    assert 0 < decode.gemm_ms + decode.attn_ms <= decode.total_ms
    assert steps[0].token_timing is None
    assert [s.token_timing.seq for s in steps[1:]] == [151, 152, 153, 154]
    assert all(s.logprob < 0 for s in steps)


def test_log_probabilities():
    wanted = golden("llama-smol")
    with qwenc.load(GOLDENS / "llama-smol", wmode="f32", kv="f32") as engine:
        step = next(engine.generate(wanted["input_ids"].tolist(), max_tokens=1))
    last = wanted["logits"][-1].astype(np.float64)
    assert step.id == last.argmax()
    assert step.logprob == pytest.approx(last.max() - np.log(np.exp(last - last.max()).sum()) - last.max(), abs=1e-4)


@pytest.mark.parametrize(("prompt", "room", "made"), [(10, 13, 3), (12, 13, 1), (13, 13, 0)])
def test_the_context_ends_a_generation(prompt, room, made):
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8", ctx_size=room) as engine:
        steps = list(engine.generate([5] * prompt, max_tokens=50, ignore_eos=True))
    assert steps[-1].finish_reason == "length" and steps[-1].usage == (prompt, made)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers():
    with (
        qwenc.load(GOLDENS / "llama-smol", wmode="q8", ctx_size=13) as engine,
        pytest.raises(qwenc.UsageError, match=r"14 tokens.*13"),
    ):
        engine.generate([5] * 14)


def test_eos_ends_a_generation():
    ids = golden("llama-smol")["input_ids"].tolist()
    with qwenc.load(GOLDENS / "llama-smol", wmode="f32", kv="f32") as engine:
        third = greedy(engine, ids, 3)[2]
        engine.eos_ids = frozenset({third})
        steps = list(engine.generate(ids, max_tokens=10))
        assert steps[-1].id == third and steps[-1].finish_reason == "stop" and len(steps) == 3
        assert len(list(engine.generate(ids, max_tokens=10, ignore_eos=True))) == 10


@pytest.mark.parametrize("bad", [[], [-1], [160], [3, 10**12]])
def test_bad_ids(bad):
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine:
        with pytest.raises(qwenc.UsageError):
            engine.generate(bad)
        with pytest.raises(qwenc.UsageError):
            engine.logits(bad)


def test_a_checkpoint_without_tokenizer_takes_ids_only():
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine:
        assert engine.tokenizer is None and not engine.has_chat_template
        with pytest.raises(qwenc.UsageError, match="no tokenizer"):
            engine.generate("hello")


@pytest.mark.parametrize("settings", [{"wmode": "q5"}, {"kv": "q3"}, {"threads": 0}, {"prefill_batch": -1}, {"ctx_size": 0}, {"color": 1}])
def test_bad_settings(settings):
    with pytest.raises(qwenc.UsageError):
        qwenc.load(GOLDENS / "llama-smol", **settings)


@pytest.mark.parametrize("wmode", ["f32", "q8", "q4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_weight_stops_the_run_and_names_the_layer(tmp_path, wmode, value):
    from checkpoints import weights, write_safetensors

    folder = write_checkpoint(tmp_path / "model", DENSE)
    tensors = weights(DENSE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    write_safetensors(folder / "model.safetensors", tensors)
    told = []

    class Listener(Reporter):
        def detail(self, text):
            told.append(text)

    with qwenc.load(folder, wmode=wmode, reporter=Listener()) as engine, pytest.raises(qwenc.QwencError, match="not finite"):
        list(engine.generate([1, 2, 3]))
    assert told[-1] == "the first layer whose output is not finite: 1"


@pytest.mark.parametrize("ids", [[10**9], [-1], [160], ["a"], [2.5], [], 7])
def test_a_session_checks_its_ids(ids):
    """An id beyond the vocabulary would be read from beyond the weights."""
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine:
        session = engine.session(10)
        for call in (session.prefill, session.logits):
            with pytest.raises(qwenc.UsageError):
                call(ids)
        if ids and ids != 7:
            with pytest.raises(qwenc.UsageError):
                session.step(ids[0])
        assert session.length == 0
        with pytest.raises(qwenc.UsageError, match="full"):
            session.prefill([1] * 11)


@pytest.mark.parametrize("capacity", [0, -5, 2.5, 10**15, "x", True])
def test_a_session_checks_its_capacity(capacity):
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine, pytest.raises(qwenc.UsageError):
        engine.session(capacity)


@pytest.mark.parametrize("arguments", [{"temp": -1}, {"top_k": 1.5}, {"max_tokens": -1}, {"max_tokens": None}, {"stop": 5}])
def test_bad_arguments_of_generate(arguments):
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine, pytest.raises(qwenc.UsageError):
        engine.generate([1, 2], **arguments)


def test_more_than_the_context_is_refused_by_logits_too():
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8", ctx_size=5) as engine, pytest.raises(qwenc.UsageError, match=r"6 tokens.*5"):
        engine.logits([1] * 6)


def test_a_prefill_batch_larger_than_the_context_takes_no_memory():
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8", prefill_batch=2**31 - 1) as engine:
        assert len(list(engine.generate([1] * 80, max_tokens=2, ignore_eos=True))) == 2


def test_squares_that_overflow_are_not_taken_for_zero(tmp_path):
    from checkpoints import weights, write_safetensors

    folder = write_checkpoint(tmp_path / "model", DENSE)
    tensors = weights(DENSE)
    tensors["model.layers.0.mlp.down_proj.weight"][:, :] = 1e30
    write_safetensors(folder / "model.safetensors", tensors)
    with qwenc.load(folder, wmode="f32", kv="f32") as engine, pytest.raises(qwenc.QwencError, match="not finite"):
        list(engine.generate([1, 2, 3]))


def test_dense_and_expert_layers_do_not_share_padding(tmp_path):
    """A dense width of 48 is padded to 64 inputs: what an expert layer left there used to set the scale of the last group."""
    config = MOE | {"intermediate_size": 48, "moe_intermediate_size": 64, "num_hidden_layers": 4, "mlp_only_layers": [1, 3]}
    tensors = {name: values * (40 if "experts" in name and "down" not in name else 1) for name, values in weights_of(config).items()}
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    ids = np.random.default_rng(2).integers(0, config["vocab_size"], 20)
    with qwenc.load(folder, wmode="q8", kv="f32") as engine:
        wanted = naive_forward.forward(engine.packed, ids, "q8")
        session = engine.session(32)
        stepped = np.array([session.step(int(i)).copy() for i in ids])
        for got in (stepped, engine.logits(ids)):
            assert np.median(np.abs(got - wanted).max(axis=1)) < 5e-3 * wanted.std()


def test_an_interrupt_leaves_together(tmp_path):
    """Threads used to look for the wish to stop each on its own: one left, the other waited for ever. Run in a process that can be
    killed."""
    program = f"""
import signal, threading, time, numpy as np, qwenc
from qwenc import engine as module
from qwenc.machine.cpus import CpuChoice
module.choose_cpus = lambda *_: CpuChoice(2, (0, 0), (0,), (0,), None)
engine = qwenc.load({str(GOLDENS / "qwen3-dense-tied")!r}, wmode="q4", pin=False)
session = engine.session(512)
session.compile()
sequence = session._sequence
rng = np.random.default_rng(0)
stopped = 0
for i in range(400):
    sequence.length = 0
    timer = threading.Timer(rng.uniform(0, 0.004), lambda: sequence._signal(16))
    timer.start()
    session.prefill(rng.integers(0, 150, 200))
    session.step(5)
    timer.join()
print("ok")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr


def test_a_thread_that_fails_does_not_keep_the_others_waiting():
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8", pin=False, threads=2) as engine:
        session = engine.session(64)
        session.prefill([1, 2, 3])
        run = engine._team.run

        def fail_on_the_last(function, **events):
            def one_fails(rank):
                if rank == engine.threads - 1:
                    raise MemoryError("injected")
                function(rank)

            run(one_fails, **events)

        engine._team.run = fail_on_the_last
        with pytest.raises(MemoryError, match="injected"):
            session.step(4)


def test_held_text_of_a_generation_that_is_cut_short(tmp_path):
    from tiny_model import write_tiny_model

    folder = write_tiny_model(tmp_path / "model")
    with qwenc.load(folder, wmode="q8") as engine:
        whole = "".join(step.text for step in engine.generate("hello", max_tokens=12, ignore_eos=True))
        cut = engine.generate("hello", max_tokens=12, ignore_eos=True, stop=[whole[:6] + "never"])
        seen = "".join(next(cut).text for _ in range(2))
        held = engine.held_text()
        assert seen == "" and held and whole.startswith(held)
        assert engine.held_text() == ""


def test_settings_default_to_what_a_packed_file_holds(tmp_path):
    from qwenc.checkpoint.convert import convert

    convert(GOLDENS / "llama-smol", tmp_path / "m.qwenc", "q4")
    with qwenc.load(tmp_path / "m.qwenc") as engine:
        assert engine.wmode == "q4"
    with pytest.raises(qwenc.QwencError, match="q4"):
        qwenc.load(tmp_path / "m.qwenc", wmode="q8")
    assert Settings().wmode is None


def test_compiled_steps_are_kept():
    """A step that holds an address cannot be cached: then every run compiles for half a minute."""
    from qwenc.kernels.jit import CACHE_DIR

    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine:
        engine.session(8).compile()
    kept = {path.name.split("-")[0] for path in CACHE_DIR.glob("*.nbc")}
    assert {"decode.decode_step", "prefill.prefill_step"} <= kept


def test_a_second_process_compiles_nothing():
    """A helper that plain Python calls is compiled again in every process: one such call made each start half a second longer."""
    program = f"""
from numba.core import event
class Compiled(event.Listener):
    def on_start(self, event): compiled.append(event.data["dispatcher"].__name__)
    def on_end(self, event): pass
compiled = []
event.register("numba:compile", Compiled())
import qwenc
with qwenc.load({str(GOLDENS / "llama-smol")!r}, wmode="q8") as engine:
    list(engine.generate([1, 2, 3], max_tokens=2))
print(compiled)
"""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout == "[]\n", done.stderr
