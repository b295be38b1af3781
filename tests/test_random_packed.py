"""The benchmark models: the published shapes, and weights that keep activations finite."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import DENSE, MOE
from naive_forward import forward
from unpack import matrix

from qwenc.checkpoint.layout import packed_tensors
from qwenc.checkpoint.packed import open_packed
from qwenc.config.model_config import ModelConfig

SCRIPTS = Path(__file__).parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))
import make_random_packed  # noqa: E402


@pytest.mark.parametrize(
    "shape, wmode, gigabytes",
    [("0.6b", "q4", 0.336), ("2b", "q4", 0.97), ("2b", "dual", 2.80), ("8b", "q4", 4.61), ("30b-a3b", "q4", 17.2)],
)
def test_sizes(shape, wmode, gigabytes):
    """4.5 bits and 8.5 bits per weight of the real shapes."""
    specs = packed_tensors(ModelConfig.from_dict(make_random_packed.SHAPES[shape]), wmode)
    assert sum(spec.nbytes for spec in specs.values()) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("fmt", ["q4", "q8"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_weights_are_sane(tmp_path, config, fmt):
    make_random_packed.write_random(config, tmp_path / "x.qwenc", fmt, seed=3)
    packed = open_packed(tmp_path / "x.qwenc")
    weights = matrix(packed, "qkv", fmt)
    assert weights.std() * np.sqrt(48) == pytest.approx(1, rel=0.05)
    assert abs(weights.mean()) < 0.05 * weights.std()  # else all tokens end up at the same experts
    logits = forward(packed, np.arange(20), fmt)
    assert np.isfinite(logits).all() and 0.05 < logits.std() < 20


def test_command_from_another_folder(tmp_path):
    run = [sys.executable, SCRIPTS / "make_random_packed.py", "0.6b", tmp_path / "nowhere/x.qwenc"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout == "" and "cannot be written" in done.stderr
