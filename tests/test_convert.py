"""The converter against the naive forward pass: every layout of the source gives the same packed file, and the right logits."""

import json
import shutil
import threading
from pathlib import Path

import naive_forward
import numpy as np
import pytest
from checkpoints import DENSE, LLAMA, MOE, Notes, fuse_experts, to_bf16, weights, write_checkpoint, write_safetensors
from unpack import matrix

from qwenc.checkpoint import convert as convert_module
from qwenc.checkpoint.convert import convert
from qwenc.checkpoint.packed import open_packed
from qwenc.errors import QwencError

GOLDENS = Path(__file__).parent / "data/goldens"
NAMES = ["llama-smol", "qwen3-dense-tied", "qwen3-moe", "qwen3-vl-text"]


def same(first, second):
    """Whether two packed files hold the same tensors, bit for bit."""
    a, b = open_packed(first).tensors, open_packed(second).tensors
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


@pytest.mark.parametrize("name", NAMES)
def test_golden_logits(tmp_path, name, monkeypatch):
    """f32 weights through the naive forward: transformers' float32 logits; and expected.npz, whose RoPE was rounded to bfloat16."""
    packed = open_packed(convert(GOLDENS / name, tmp_path / "x.qwenc", "f32"))
    ours = np.load(GOLDENS / name / "float32.npz")
    given = np.load(GOLDENS / name / "expected.npz")
    logits = naive_forward.forward(packed, given["input_ids"])
    np.testing.assert_allclose(logits, ours["logits"], atol=2e-4)
    assert logits[-1].argmax() == ours["greedy_ids"][0]

    exact = naive_forward.rope_inv_freq

    def rounded(rope, head_dim):
        inv_freq, scaling = exact(rope, head_dim)
        return (to_bf16(inv_freq).astype(np.uint32) << 16).view(np.float32), scaling

    monkeypatch.setattr(naive_forward, "rope_inv_freq", rounded)
    np.testing.assert_allclose(naive_forward.forward(packed, given["input_ids"]), given["logits"], atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt, most", [("q8", 0.01), ("q4", 0.5)])
def test_golden_quantised(tmp_path, name, fmt, most):
    """Mean KL against the f32 logits. The weights are random, so that 4 bits cost far more than they do in a trained model."""
    packed = open_packed(convert(GOLDENS / name, tmp_path / "x.qwenc", fmt))
    truth = np.load(GOLDENS / name / "float32.npz")["logits"].astype(np.float64)
    ids = np.load(GOLDENS / name / "expected.npz")["input_ids"]
    p, q = naive_forward.softmax(truth), naive_forward.softmax(naive_forward.forward(packed, ids, fmt))
    assert (p * np.log(p / q)).sum(-1).mean() < most


@pytest.mark.parametrize("wmode", ["q8", "q4"])
def test_dual_holds_what_each_mode_holds(tmp_path, wmode):
    folder = write_checkpoint(tmp_path / "model", MOE)
    dual = open_packed(convert(folder, tmp_path / "dual.qwenc", "dual")).tensors
    single = open_packed(convert(folder, tmp_path / "single.qwenc", wmode)).tensors
    assert all(dual[name].tobytes() == single[name].tobytes() for name in single)


@pytest.mark.parametrize("config", [DENSE, LLAMA, MOE], ids=["qwen3", "llama", "moe"])
def test_matrices_hold_the_weights_and_zeros(tmp_path, config):
    """Every weight at its place, and nothing but zeros in the padding: head_dim 10 → 16, FFN 40 → 48, hidden 48 → 64, vocab 40 → 48."""
    tensors = weights(config)
    packed = open_packed(convert(write_checkpoint(tmp_path / "model", config, tensors), tmp_path / "x.qwenc", "f32"))
    embed = matrix(packed, "embed", "f32")
    assert np.array_equal(embed[:40, :48], tensors["model.embed_tokens.weight"]) and np.count_nonzero(embed) == 40 * 48
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}.self_attn."
        qkv = matrix(packed, "qkv", "f32")[layer].reshape(8, 16, 64)
        source = np.concatenate([tensors[f"{at}{x}_proj.weight"] for x in "qkv"]).reshape(8, 10, 48)
        assert np.array_equal(qkv[:, :10, :48], source) and np.count_nonzero(qkv) == source.size
        o = matrix(packed, "o", "f32")[layer].reshape(48, 4, 16)
        assert np.array_equal(o[:, :, :10].reshape(48, 40), tensors[f"{at}o_proj.weight"]) and np.count_nonzero(o) == 48 * 40
    mlps = [(packed.config.dense_layers, "gate_up", "down", "mlp.", 40)]
    mlps += (
        [(packed.config.moe_layers, "expert_gate_up", "expert_down", f"mlp.experts.{e}.", 24) for e in range(4)] if config is MOE else []
    )
    for expert, (layers, gate_up_name, down_name, at, width) in enumerate(mlps, start=-1):
        for i, layer in enumerate(layers):
            entry = (i, expert) if "expert" in gate_up_name else (i,)
            source = {x: tensors[f"model.layers.{layer}.{at}{x}_proj.weight"] for x in ("gate", "up", "down")}
            gate_up = matrix(packed, gate_up_name, "f32")[entry].reshape(-1, 2, 16, 64)
            for half, x in enumerate(("gate", "up")):
                assert np.array_equal(gate_up[:, half].reshape(-1, 64)[:width, :48], source[x])
            down = matrix(packed, down_name, "f32")[entry]
            assert np.array_equal(down[:48, :width], source["down"])
            assert (np.count_nonzero(gate_up), np.count_nonzero(down)) == (2 * width * 48, width * 48)


def test_sharded_is_the_same(tmp_path):
    for config, tag in ((DENSE, "dense"), (MOE, "moe")):
        single = convert(write_checkpoint(tmp_path / f"{tag}-1", config), tmp_path / f"{tag}-1.qwenc", "dual")
        sharded = convert(write_checkpoint(tmp_path / f"{tag}-5", config, shards=5), tmp_path / f"{tag}-5.qwenc", "dual")
        assert same(single, sharded)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
def test_prefixes(tmp_path, prefix):
    plain = convert(write_checkpoint(tmp_path / "plain"), tmp_path / "plain.qwenc", "q8")
    other = write_checkpoint(tmp_path / "other", tensors=weights(DENSE, prefix=prefix))
    assert same(plain, convert(other, tmp_path / "other.qwenc", "q8"))


@pytest.mark.parametrize("width, hidden", [(24, 48), (48, 48), (32, 64)])
def test_fused_experts_in_both_orientations(tmp_path, width, hidden):
    """Also where one shape reads both ways: I = H, and 2I = H."""
    config = {**MOE, "moe_intermediate_size": width, "hidden_size": hidden}
    tensors = weights(config)
    single = convert(write_checkpoint(tmp_path / "one", config, tensors), tmp_path / "one.qwenc", "q8")
    for transposed in (False, True):
        fused = fuse_experts(tensors, config, transposed)
        folder = write_checkpoint(tmp_path / f"fused-{transposed}", config, fused)
        assert same(single, convert(folder, tmp_path / f"fused-{transposed}.qwenc", "q8"))


def test_fused_experts_of_a_wrong_shape(tmp_path):
    config = {**MOE, "moe_intermediate_size": 20}
    fused = fuse_experts(weights(config), config, False)
    fused["model.layers.0.mlp.experts.down_proj"] = np.ascontiguousarray(fused["model.layers.0.mlp.experts.down_proj"].swapaxes(1, 2))
    with pytest.raises(QwencError, match=r"experts\.gate_up_proj is \[4, 40, 48\] and .*down_proj \[4, 20, 48\], expected"):
        convert(write_checkpoint(tmp_path / "model", config, fused), tmp_path / "x.qwenc", "q8")


def test_vision_is_skipped_with_one_note(tmp_path):
    notes = Notes()
    convert(GOLDENS / "qwen3-vl-text", tmp_path / "x.qwenc", "q4", notes)
    assert [note for note in notes.notes if "vision part" in note] == [
        "skipping the vision part (39 tensors): qwenc runs the text model only"
    ]


def test_unused_tensors_are_told_of(tmp_path):
    extra = {
        "model.layers.0.self_attn.q_proj.bias": np.zeros(40),
        "lm_head.weight": np.zeros((40, 48)),
        "model.rotary_emb.inv_freq": np.ones(5),
    }
    notes = Notes()
    convert(write_checkpoint(tmp_path / "model", tensors=weights(DENSE) | extra), tmp_path / "x.qwenc", "q4", notes)
    assert any("ignoring 1 tensors" in note and "q_proj.bias" in note for note in notes.notes)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_sources(tmp_path, dtype):
    folder = write_checkpoint(tmp_path / "model", dtype=dtype)
    embed = matrix(open_packed(convert(folder, tmp_path / "x.qwenc", "f32")), "embed", "f32")[:40, :48]
    np.testing.assert_allclose(embed, weights(DENSE)["model.embed_tokens.weight"], rtol=2**-8, atol=1e-7)


def test_small_files_come_along(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0", "x": "\xc3\xa9"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config", "eos_token": "<e>"}))
    packed = open_packed(convert(folder, tmp_path / "a.qwenc", "q4"))
    assert packed.tokenizer_json == b'{"version": "1.0", "x": "\xc3\xa9"}'
    assert packed.generation_config == {"eos_token_id": [1, 2]} and packed.tokenizer_config["eos_token"] == "<e>"
    assert packed.chat_template == "from config" and packed.metadata["source"] == str(folder)

    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_packed(convert(folder, tmp_path / "b.qwenc", "q4")).chat_template == "D"
    (folder / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert open_packed(convert(folder, tmp_path / "c.qwenc", "q4")).chat_template == "from json"
    (folder / "chat_template.jinja").write_text("from jinja\n")
    assert open_packed(convert(folder, tmp_path / "d.qwenc", "q4")).chat_template == "from jinja\n"


def test_progress_and_stated_size(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "CHUNK_WEIGHTS", 1024)
    notes, here = Notes(), []
    notes.progress = lambda *step: (here.append(threading.current_thread()), notes.steps.append(step))
    out = convert(write_checkpoint(tmp_path / "model"), tmp_path / "x.qwenc", "dual", notes)
    stages, done, totals, units = zip(*notes.steps, strict=True)
    assert set(stages) == {"convert"} and set(units) == {"B"} and len(set(totals)) == 1
    assert list(done) == sorted(done) and done[-1] == totals[0] and len(done) > 10
    assert set(here) == {threading.current_thread()}
    assert any("converting" in note and "kB in" in note and str(out) in note for note in notes.notes)


def test_chunks_do_not_change_the_result(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", MOE)
    whole = convert(folder, tmp_path / "whole.qwenc", "dual")
    monkeypatch.setattr(convert_module, "CHUNK_WEIGHTS", 1)
    assert same(whole, convert(folder, tmp_path / "tiles.qwenc", "dual"))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError, QwencError])
@pytest.mark.parametrize("place", ["thread", "caller"])
def test_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, failure, place):
    folder = write_checkpoint(tmp_path / "model")
    (tmp_path / "out").mkdir()
    notes = Notes()

    def fail(*args):
        raise failure

    if place == "caller":
        notes.progress = fail
    else:
        monkeypatch.setattr(convert_module, "pack_q8", fail)
    with pytest.raises(failure):
        convert(folder, tmp_path / "out/x.qwenc", "q8", notes)
    assert not list((tmp_path / "out").iterdir())


def test_source_is_only_read(tmp_path):
    folder = write_checkpoint(tmp_path / "model", shards=2)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    folder.chmod(0o555)
    try:
        convert(folder, tmp_path / "x.qwenc", "q4")
    finally:
        folder.chmod(0o755)
    assert before == {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_non_finite_weights_survive(tmp_path):
    tensors = weights(DENSE)
    tensors["model.layers.1.mlp.down_proj.weight"][5, 7] = np.nan
    folder = write_checkpoint(tmp_path / "model", tensors=tensors)
    for fmt in ("f32", "q8", "q4"):
        down = matrix(open_packed(convert(folder, tmp_path / "x.qwenc", fmt)), "down", fmt)
        assert np.isnan(down[1, 5, 7]) and np.isfinite(down[0]).all()


def test_shards_may_be_links(tmp_path):
    """As in the Hub's cache."""
    folder = write_checkpoint(tmp_path / "model")
    blob = shutil.move(folder / "model.safetensors", tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(blob)
    convert(folder, tmp_path / "x.qwenc", "q4")


def test_no_layer_is_read_whole(tmp_path, monkeypatch):
    """Memory: a thread never holds more than a chunk of weights (or one row tile, or one fused expert)."""
    from qwenc.checkpoint.safetensors_file import SafetensorsFile

    monkeypatch.setattr(convert_module, "CHUNK_WEIGHTS", 4096)
    read, largest = SafetensorsFile.rows, []

    def watched(self, name, start, stop):
        values = read(self, name, start, stop)
        largest.append(values.size)
        return values

    monkeypatch.setattr(SafetensorsFile, "rows", watched)
    config = {**DENSE, "vocab_size": 1000}
    folder = tmp_path / "model"
    write_checkpoint(folder, config)
    write_safetensors(folder / "model.safetensors", weights(config), "BF16")
    convert(folder, tmp_path / "x.qwenc", "q4")
    assert max(largest) <= 4096
