"""Compiling ahead: everything that a first run would compile, with the model or with one that exists in memory only."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from qwenc.checkpoint.layout import packed_tensors
from qwenc.checkpoint.packed import Packed
from qwenc.checkpoint.packed_writer import NUMPY_DTYPES
from qwenc.config.model_config import ModelConfig
from qwenc.engine import Engine, load
from qwenc.errors import QwencError
from qwenc.report import SILENT, Reporter
from qwenc.settings import WMODES, Settings

_SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
    "vocab_size": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
_DENSE = {"model_type": "qwen3", **_SMALL}
_MOE = {"model_type": "qwen3_moe", **_SMALL, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}


def warm_up(model: str | None, moe: bool, settings: dict[str, Any], reporter: Reporter = SILENT) -> tuple[float, bool]:
    """Compile for `model`, or (None) for any dense model, or any with experts. Returns (seconds, whether anything was compiled).

    Raises QwencError where the kernels cannot be kept, UsageError for a setting out of range.
    """
    from qwenc.kernels.jit import CAN_KEEP, compiling

    if not CAN_KEEP:
        raise QwencError("compiled kernels cannot be kept: the cache folder cannot be written (QWENC_CACHE names another)")
    began = time.perf_counter()
    compiled: list[bool] = []
    with compiling(lambda: compiled.append(True)):
        checked = Settings.from_dict(settings)
        engine = _small_engine(moe, checked, reporter) if model is None else load(model, reporter=reporter, **settings)
        with engine:
            if model is None:
                _convert_something(engine.wmode)
            for _ in engine.generate([1, 2], max_tokens=1, ignore_eos=True):
                pass
    return time.perf_counter() - began, bool(compiled)


def _small_engine(moe: bool, settings: Settings, reporter: Reporter) -> Engine:
    """Kernels are compiled for the types of what they get, not for its sizes: a few zeros of the right types serve every model."""
    wmode = settings.wmode or WMODES[0]
    config_json = _MOE if moe else _DENSE
    config = ModelConfig.from_dict(config_json)
    tensors = {name: np.zeros(spec.shape, NUMPY_DTYPES[spec.dtype]) for name, spec in packed_tensors(config, wmode).items()}
    for tensor in tensors.values():
        tensor.flags.writeable = False  # as those of a mapped file, which is part of their type
    nothing = np.empty(0, np.uint8)
    packed = Packed(Path("warmup"), {}, config, config_json, {}, {}, None, wmode, tensors, 0, nothing)
    return Engine(packed, settings, reporter)


def _convert_something(wmode: str) -> None:
    """What a checkpoint folder needs before it runs."""
    from qwenc.checkpoint.quantise import pack_q4, pack_q8

    rows = np.ones((16, 32), np.float32)
    if wmode in ("q4", "dual"):
        pack_q4(rows)
    if wmode in ("q8", "dual"):
        pack_q8(rows)
