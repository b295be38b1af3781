"""The options that become an engine's Settings: the same for every command that runs a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import click

from qwenc.commands.params import FileName, WholeNumber, option, option_name
from qwenc.errors import UsageError
from qwenc.settings import KV_TYPES, SPARSE_SCORES, WMODES, Settings

LLAMA_KV = {("q8_0", "q8_0"): "q8", ("q8_0", "q4_0"): "k8v4", ("q4_0", "q4_0"): "q4", ("f32", "f32"): "f32"}
KV_OPTIONS = ("kv", "kv_q4", "cache_type_k", "cache_type_v")
LLAMA_TYPES = ("q8_0", "q4_0", "f32", "f16", "bf16", "q4_1", "q5_0", "q5_1", "iq4_nl")

_OPTIONS = (
    option("--wmode", type=click.Choice(WMODES), help="Weights. Default: dual (q8 in prefill, q4 in decode); of a packed file its own."),
    option("--kv", type=click.Choice(KV_TYPES), default=None, help="KV cache.  [default: q8]"),
    option("--kv-q4", is_flag=True, help="The same as --kv q4."),
    option("-ctk", "--cache-type-k", type=click.Choice(LLAMA_TYPES), help="Keys, as llama.cpp spells it; with -ctv."),
    option("-ctv", "--cache-type-v", type=click.Choice(LLAMA_TYPES), help="Values, as llama.cpp spells it; with -ctk."),
    option("-t", "--threads", type=WholeNumber(1), metavar="N", help="Compute threads. Default: the fast cores, at most 4."),
    option("--cpus", metavar="LIST", help="Run on these CPUs, one thread on each: 4-7 or 0,2. Default: the fast ones."),
    option("--pin/--no-pin", default=True, show_default=True, help="Keep each thread on a core of its own."),
    option("--prefill-batch", type=WholeNumber(1), default=256, show_default=True, metavar="N", help="Prompt tokens computed at once."),
    option("--mmap/--no-mmap", default=True, show_default=True, help="Use the weights in the mapped file, or read them into own memory."),
    option("--offline", is_flag=True, help="Never ask the Hub."),
    option("--prompt-cache", type=FileName(), metavar="PATH", help="Save the state of the prompt in this file; restore what it shares."),
    option("--disk-kv", type=FileName(), metavar="DIR", help="Keep the states of long prompts in this folder, and restore from them."),
    option("--disk-kv-gb", type=float, default=8.0, show_default=True, metavar="GB", help="Most that --disk-kv takes; the oldest go."),
    # long contexts
    option("--sparse-attn", is_flag=True, help="Attend to the likeliest blocks of a long context only."),
    option("--sparse-k", type=WholeNumber(1), default=32, show_default=True, metavar="K", help="Blocks kept per KV head."),
    option("--sparse-block", type=WholeNumber(1), default=32, show_default=True, metavar="N", help="Tokens per block."),
    option(
        "--sparse-score",
        type=click.Choice(SPARSE_SCORES),
        default="scan",
        show_default=True,
        help="What ranks the blocks: every key at 2 bits, a summary of each block, sampled keys, or (for studies) every key in full.",
    ),
    option("--sparse-probe", type=WholeNumber(1), default=8, show_default=True, metavar="N", help="Sampled keys per block, for probe."),
    option("--sparse-ratio", type=float, default=0.0, show_default=True, metavar="R", help="Keep at least this share of the blocks."),
    option("--sparse-mass", type=float, default=0.0, metavar="P", help="Keep more blocks, up to 4·K, until they hold this share."),
    option("--sparse-min-ctx", type=WholeNumber(0), metavar="N", help="Decode is exact below N tokens. Default: where sparse pays."),
    option("--sparse-pf-min-ctx", type=WholeNumber(0), metavar="N", help="Prefill is exact below N tokens. Default: where sparse pays."),
    option(
        "--sparse-pf-k",
        type=WholeNumber(1),
        metavar="K",
        help="Blocks kept in prefill.  [default: --sparse-k, and up to twice as many of a long context]",
    ),
    option("--sparse-pf-group", type=WholeNumber(1), metavar="N", help="Prompt tokens that share one choice of blocks.  [default: 64]"),
)


def engine_options(function: Callable) -> Callable:
    for add in reversed(_OPTIONS):
        function = add(function)
    return function


def engine_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of qwenc.load out of parsed options. Raises UsageError, in the words of the command line."""
    settings = {field.name: values[field.name] for field in fields(Settings) if field.name in values}
    settings["kv"] = kv_type(values)
    try:
        Settings.from_dict(settings)
    except UsageError as error:
        named, _, rest = str(error).partition(" ")
        raise UsageError(f"{option_name(named) if named in settings else named} {rest}") from None
    return settings


def kv_type(values: Mapping[str, Any]) -> str:
    """The one KV type that --kv, --kv-q4 and llama.cpp's pair of options ask for. What is typed wins over variables."""
    context = click.get_current_context(silent=True)
    typed = {name for name in KV_OPTIONS if context and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE}
    values = {name: values[name] if name in typed or not typed else None for name in KV_OPTIONS}
    k, v = values["cache_type_k"], values["cache_type_v"]
    asked = [values["kv"]] if values["kv"] else []
    if values["kv_q4"]:
        asked.append("q4")
    if k or v:
        pair = (k or "f16", v or "f16")  # llama.cpp's own default
        if pair not in LLAMA_KV:
            known = ", ".join(f"-ctk {a} -ctv {b}" for a, b in LLAMA_KV)
            default = "" if k and v else " (f16 is what llama.cpp takes for the one that is not given)"
            raise UsageError(f"there is no KV cache of -ctk {pair[0]} -ctv {pair[1]} here{default}; there are: {known}")
        asked.append(LLAMA_KV[pair])
    if len(set(asked)) > 1:
        raise UsageError(f"--kv, --kv-q4 and -ctk/-ctv ask for different KV caches: {', '.join(dict.fromkeys(asked))}")
    return asked[0] if asked else KV_TYPES[0]
