"""The goldens with their RoPE written wherever transformers 4 and 5 put it, and dealt out over shards: always the same logits."""

import json
import shutil

import numpy as np
import pytest
from checkpoints import write_safetensors
from test_engine import GOLDENS, NAMES, golden, own_cache  # noqa: F401 (own_cache is a fixture)

import qwenc
from qwenc.checkpoint.safetensors_file import SafetensorsFile


def theta_on_top(text, outer):
    """transformers 4: rope_theta beside the sizes, rope_scaling null."""
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    text["rope_scaling"] = None


def scaling_table(text, outer):
    """transformers 4 with a table: the type in rope_scaling (as `type`), theta beside it."""
    parameters = text.pop("rope_parameters")
    text["rope_theta"] = parameters.pop("rope_theta")
    text["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}


def all_in_scaling(text, outer):
    """Everything in rope_scaling, with rope_type."""
    text["rope_scaling"] = text.pop("rope_parameters")


def outside(text, outer):
    """rope_parameters of the outer config; for a text model that is where it was."""
    outer["rope_parameters"] = text.pop("rope_parameters")


def parameters(text, outer):
    """transformers 5, as the goldens were saved."""


def copy_with(name, folder, change):
    shutil.copytree(GOLDENS / name, folder, ignore=shutil.ignore_patterns("*.npz"))
    config = json.loads((folder / "config.json").read_text())
    change(config.get("text_config", config), config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def logits(folder, ids):
    with qwenc.load(folder, wmode="f32", kv="f32") as engine:
        return engine.logits(ids)


@pytest.mark.parametrize("change", [parameters, theta_on_top, scaling_table, all_in_scaling, outside], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_rope_layouts(tmp_path, name, change):
    wanted = golden(name)
    got = logits(copy_with(name, tmp_path / "model", change), wanted["input_ids"])
    assert np.abs(got - wanted["logits"]).max() < 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_sharded(tmp_path, name):
    folder = copy_with(name, tmp_path / "model", parameters)
    whole = folder / "model.safetensors"
    raw = whole.read_bytes()
    with SafetensorsFile(whole) as file:
        infos = dict(file.header.tensors)
    tensors = {n: np.frombuffer(raw, np.uint16, i.nbytes // 2, i.offset).reshape(i.shape) for n, i in infos.items()}
    whole.unlink()
    home = {tensor: f"model-{i % 3 + 1:05}-of-00003.safetensors" for i, tensor in enumerate(sorted(tensors))}
    for shard in set(home.values()):
        write_safetensors(folder / shard, {n: v for n, v in tensors.items() if home[n] == shard})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    wanted = golden(name)
    assert np.abs(logits(folder, wanted["input_ids"]) - wanted["logits"]).max() < 2e-4
