"""`qwenc info MODEL`: shapes, sizes, RoPE, end tokens and template of a checkpoint, without loading its weights."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qwenc.commands.env import table
from qwenc.commands.outcome import show_bytes
from qwenc.commands.params import Command, FileName, json_option, option, quiet_option
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.screen import one_line, write_out
from qwenc.errors import UsageError
from qwenc.plain_json import to_json
from qwenc.resources import EMBEDDED, EMBEDDED_NOTE

if TYPE_CHECKING:
    from qwenc.config.model_config import ModelConfig


@click.command(cls=Command, short_help="Show a model's shapes, sizes, RoPE, end tokens and template.")
@click.argument("argument", metavar="[MODEL]", type=FileName(), required=False)
@option("-m", "--model", type=FileName(), metavar="MODEL", help="The same, spelled as elsewhere (or QWENC_MODEL).")
@json_option("Print one JSON object.")
@option("--offline", is_flag=True, help="Never ask the Hub.")
@quiet_option()
def info(argument: str | None, model: str | None, as_json: bool, offline: bool, quiet: bool) -> None:
    """Show what MODEL is: a checkpoint folder, a packed file or a Hub id; without one, the model that comes with qwenc. Nothing is
    converted."""
    reporter = ScreenReporter(quiet)
    if argument is not None:
        source = click.get_current_context().get_parameter_source("model")
        if source is click.core.ParameterSource.COMMANDLINE and model != argument:
            raise UsageError("name one model: as MODEL or with -m")
        model = argument
    if model is None:
        reporter.note(EMBEDDED_NOTE)
    try:
        record = describe(_open(str(EMBEDDED) if model is None else model, offline, reporter))
    finally:
        reporter.close()
    write_out(to_json(record, indent=2) if as_json else table(_for_people(record)))


@dataclass(frozen=True, slots=True)
class Described:
    """What info needs of a model, packed or not. wmode and file_bytes are None for a folder, which is not packed yet."""

    path: Path
    config: ModelConfig
    config_json: dict
    generation_config: dict
    tokenizer_config: dict
    chat_template: str | None
    tokenizer_json: bytes | None
    wmode: str | None = None
    file_bytes: int | None = None


def describe(model: Described) -> dict[str, Any]:
    """Everything about `model` as JSON values; sizes in bytes. packed_bytes: by every mode that it can run in."""
    from qwenc.attention.cache import bytes_per_token
    from qwenc.checkpoint.layout import matrices, packed_tensors
    from qwenc.checkpoint.model_cache import serves
    from qwenc.settings import KV_TYPES, WMODES
    from qwenc.text.prompt import resolve_eos
    from qwenc.text.template import find_template
    from qwenc.text.tokenizer import Tokenizer

    config = model.config
    tokenizer = None if model.tokenizer_json is None else Tokenizer(model.tokenizer_json, model.tokenizer_config)
    template = find_template(model.chat_template, model.tokenizer_config)
    weights = sum(math.prod((*matrix.stack, matrix.rows, matrix.inputs)) for matrix in matrices(config))
    runs_as = [wmode for wmode in WMODES if model.wmode is None or serves(model.wmode, wmode)]
    packed_bytes = {wmode: sum(spec.nbytes for spec in packed_tensors(config, wmode).values()) for wmode in runs_as}
    return {
        "model": str(model.path),
        "packed": model.wmode,
        "file_bytes": model.file_bytes,
        "model_type": config.model_type,
        "parameters": weights,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tokenizer_size": None if tokenizer is None else tokenizer.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qk_norm": config.qk_norm,
        "moe": None if config.moe is None else asdict(config.moe),
        "vision_skipped": config.has_vision,
        "context": config.max_position_embeddings,
        "rope": asdict(config.rope),
        "packed_bytes": packed_bytes,
        "kv_bytes_per_token": {
            kv: bytes_per_token(kv, config.num_hidden_layers, config.num_key_value_heads, config.padded_head_dim) for kv in KV_TYPES
        },
        "eos_ids": sorted(resolve_eos(model.generation_config, model.config_json, tokenizer)),
        "chat_template": template is not None,
        "thinking_switch": template is not None and "enable_thinking" in template.source,
    }


def _open(name: str, offline: bool, reporter: ScreenReporter) -> Described:
    from qwenc.checkpoint.locate import find
    from qwenc.checkpoint.source import read_source

    found = find(name, offline, reporter)
    if found.is_dir():
        source = read_source(found)
        parsed = {key: json.loads(source.metadata.get(key, "{}")) for key in ("config", "generation_config", "tokenizer_config")}
        return Described(
            path=found,
            config=source.config,
            config_json=parsed["config"],
            generation_config=parsed["generation_config"],
            tokenizer_config=parsed["tokenizer_config"],
            chat_template=source.metadata.get("chat_template"),
            tokenizer_json=source.tokenizer_json,
        )
    from qwenc.checkpoint.packed import open_packed

    packed = open_packed(found)
    shared = {name: getattr(packed, name) for name in Described.__dataclass_fields__}
    return Described(**shared)


def _for_people(record: dict[str, Any]) -> dict[str, Any]:
    """The record with shapes put together, sizes in units, and without what does not apply."""
    rope, moe, context = record["rope"], record["moe"], record["context"]
    weights = record["parameters"]
    kind = f"packed file, {record['packed']}, {show_bytes(record['file_bytes'])}" if record["packed"] else "checkpoint folder"
    layers = f"{record['num_hidden_layers']} x {record['hidden_size']}, FFN {record['intermediate_size']}"
    if moe is not None:
        routed = sum(moe["moe_layers"])
        layers += (
            f", {moe['num_experts']} experts x {moe['moe_intermediate_size']} in {routed} layers, {moe['num_experts_per_tok']} per token"
        )
    heads = f"{record['num_attention_heads']} of {record['head_dim']}, {record['num_key_value_heads']} kv heads"
    scaling = "" if rope["rope_type"] == "default" else f", factor {rope['factor']:g}"
    per_token = record["kv_bytes_per_token"]
    known = record["tokenizer_size"]
    template = "yes, with a thinking switch" if record["thinking_switch"] else record["chat_template"]
    return {
        "model": f"{one_line(record['model'])} ({kind})",
        "architecture": record["model_type"] + (" (text part only)" if record["vision_skipped"] else ""),
        "parameters": f"{weights / 1e9:.3g} billion" if weights >= 1e9 else f"{weights / 1e6:.3g} million",
        "layers": layers,
        "attention": heads + (", q/k norm" if record["qk_norm"] else ""),
        "vocabulary": f"{record['vocab_size']}, {'tied' if record['tie_word_embeddings'] else 'untied'} head, "
        + ("no tokenizer" if known is None else f"tokenizer knows {known}"),
        "context": f"{context} tokens",
        "RoPE": f"{rope['rope_type']}, theta {rope['theta']:g}{scaling}",
        "packed size": {wmode: show_bytes(size) for wmode, size in record["packed_bytes"].items()},
        "KV per token": {kv: f"{size} bytes ({show_bytes(size * context)} for the whole context)" for kv, size in per_token.items()},
        "eos ids": record["eos_ids"],
        "chat template": template,
    }
