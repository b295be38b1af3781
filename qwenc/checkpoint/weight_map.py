"""Which tensors of a checkpoint make up each matrix of the packed file: every checkpoint quirk is in this file.

config.json is not trusted: a size that it states is compared with the shapes in the headers before anything of that size is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from qwenc.checkpoint.layout import TILE, Matrix, matrices
from qwenc.checkpoint.safetensors_file import WEIGHT_DTYPES
from qwenc.checkpoint.shards import Shards
from qwenc.config.model_config import ModelConfig, round_up
from qwenc.errors import QwencError
from qwenc.report import Reporter

# Tried in this order after the prefix of the architecture.
_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "language_model.", "")
_VISION_PREFIXES = ("model.visual.", "visual.")
_LM_HEADS = ("lm_head.weight", "language_model.lm_head.weight")


@dataclass(frozen=True, slots=True)
class Part:
    """A matrix [count, inputs] of the checkpoint: a tensor, or expert `expert` of a fused one, stored transposed or not."""

    name: str
    count: int
    expert: int | None = None
    transposed: bool = False

    def rows(self, shards: Shards, start: int, stop: int) -> np.ndarray:
        """float32 [stop - start, inputs]."""
        if self.expert is None:
            return shards.rows(self.name, start, stop)
        matrix = shards.rows(self.name, self.expert, self.expert + 1)[0]
        return (matrix.T if self.transposed else matrix)[start:stop]


@dataclass(frozen=True, slots=True)
class Gather:
    """How a packed matrix is put together from `Part`s laid one below the other.

    row_map[i]: the row of the parts that becomes packed row i, −1 for padding. column_map[j]: the same for columns.
    parts[s]: the parts of stack entry s, in memory order.
    """

    matrix: Matrix
    row_map: np.ndarray
    column_map: np.ndarray
    parts: tuple[tuple[Part, ...], ...]

    def read(self, shards: Shards, entry: int, tile: int, stop: int) -> np.ndarray:
        """Row tiles tile…stop of stack entry `entry`: float32 [16·n, K], padding included."""
        wanted = self.row_map[tile * TILE : stop * TILE]
        out = np.zeros((len(wanted), len(self.column_map)), np.float32)
        columns = np.flatnonzero(self.column_map >= 0)
        whole = len(columns) == 0 or np.array_equal(self.column_map[: len(columns)], np.arange(len(columns)))
        first = 0
        for part in self.parts[entry]:
            targets = np.flatnonzero((wanted >= first) & (wanted < first + part.count))
            if len(targets):
                rows = wanted[targets] - first
                low = int(rows.min())
                values = part.rows(shards, low, int(rows.max()) + 1)
                if whole:
                    out[targets, : len(columns)] = values[rows - low]
                else:
                    out[np.ix_(targets, columns)] = values[np.ix_(rows - low, self.column_map[columns])]
            first += part.count
        return out


class WeightMap:
    """Names and checks every tensor that the model needs. Raises QwencError naming the first that is missing or has a wrong shape."""

    def __init__(self, config: ModelConfig, shards: Shards, reporter: Reporter) -> None:
        self._config = config
        self._shards = shards
        self._used: set[str] = set()
        self._prefix = self._find_prefix()
        self.plain = self._plain()  # first: the norms vouch for hidden_size, the router for num_experts
        self.gathers = tuple(self._gather(matrix) for matrix in matrices(config))
        self._report_unused(reporter)

    def _find_prefix(self) -> str:
        for prefix in (self._config.weight_prefix, *_PREFIXES):
            if f"{prefix}embed_tokens.weight" in self._shards:
                return prefix
        raise QwencError(f"{self._shards.folder}: the checkpoint has no tensor {self._config.weight_prefix}embed_tokens.weight")

    def _plain(self) -> dict[str, tuple[str, ...]]:
        """Packed name -> the checkpoint tensors that are stacked in it."""
        config = self._config
        hidden, head = (config.hidden_size,), (config.head_dim,)
        layers = range(config.num_hidden_layers)
        plain = {
            "input_norm": self._layer_tensors(layers, "input_layernorm.weight", hidden),
            "post_norm": self._layer_tensors(layers, "post_attention_layernorm.weight", hidden),
            "final_norm": (self._expect(f"{self._prefix}norm.weight", hidden),),
        }
        if config.qk_norm:
            plain["q_norm"] = self._layer_tensors(layers, "self_attn.q_norm.weight", head)
            plain["k_norm"] = self._layer_tensors(layers, "self_attn.k_norm.weight", head)
        if config.moe is not None:
            shape = (config.moe.num_experts, config.hidden_size)
            plain["router"] = self._layer_tensors(config.moe_layers, "mlp.gate.weight", shape)
        return plain

    def _gather(self, matrix: Matrix) -> Gather:
        config = self._config
        hidden, head_dim, padded_dim = config.hidden_size, config.head_dim, config.padded_head_dim
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        columns = np.arange(hidden)
        parts: list[tuple[Part, ...]]
        if matrix.name in ("embed", "lm_head"):
            name = f"{self._prefix}embed_tokens.weight" if matrix.name == "embed" else self._lm_head_name()
            parts = [(self._part(name, config.vocab_size, hidden),)]
            rows = np.arange(config.vocab_size)
        elif matrix.name == "qkv":
            sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
            parts = [
                tuple(self._part(self._layer(i, f"self_attn.{x}_proj.weight"), size, hidden) for x, size in sizes.items())
                for i in range(config.num_hidden_layers)
            ]
            rows = _spread(heads + 2 * kv_heads, head_dim, padded_dim)
        elif matrix.name == "o":
            names = [self._layer(i, "self_attn.o_proj.weight") for i in range(config.num_hidden_layers)]
            parts = [(self._part(name, hidden, heads * head_dim),) for name in names]
            rows, columns = np.arange(hidden), _spread(heads, head_dim, padded_dim)
        elif matrix.name == "gate_up":
            parts = [self._gate_up(self._layer(i, "mlp."), config.intermediate_size) for i in config.dense_layers]
            rows = _interleave(config.intermediate_size)
        elif matrix.name == "down":
            parts = [(self._part(self._layer(i, "mlp.down_proj.weight"), hidden, config.intermediate_size),) for i in config.dense_layers]
            rows, columns = np.arange(hidden), np.arange(config.intermediate_size)
        else:
            assert config.moe is not None
            width = config.moe.moe_intermediate_size
            parts = [part for i in config.moe_layers for part in self._experts(i, matrix.name, width)]
            if matrix.name == "expert_gate_up":
                rows = _interleave(width)
            else:
                rows, columns = np.arange(hidden), np.arange(width)
        return Gather(matrix, _padded(rows, matrix.tiles * TILE), _padded(columns, matrix.padded_inputs), tuple(parts))

    def _experts(self, layer: int, name: str, width: int) -> list[tuple[Part, ...]]:
        """The parts of each expert of a layer: stored one by one, or fused in one tensor."""
        assert self._config.moe is not None
        count, hidden = self._config.moe.num_experts, self._config.hidden_size
        fused = self._layer(layer, "mlp.experts.gate_up_proj")
        if fused in self._shards:
            down = self._layer(layer, "mlp.experts.down_proj")
            transposed = self._fused_transposed(fused, down, count, width)
            tensor, rows = (fused, 2 * width) if name == "expert_gate_up" else (down, hidden)
            return [(Part(tensor, rows, expert, transposed),) for expert in range(count)]
        prefixes = (self._layer(layer, f"mlp.experts.{expert}.") for expert in range(count))  # not a list: the first missing one ends it
        if name == "expert_gate_up":
            return [self._gate_up(prefix, width) for prefix in prefixes]
        return [(self._part(f"{prefix}down_proj.weight", hidden, width),) for prefix in prefixes]

    def _fused_transposed(self, gate_up: str, down: str, count: int, width: int) -> bool:
        """Whether fused experts are [E, H, 2I] and [E, I, H] (transformers 4), not [E, 2I, H] and [E, H, I] (5).

        One of the two shapes may read both ways (H = 2I, or H = I), never both: together they decide.
        """
        hidden = self._config.hidden_size
        shapes = (self._shape(gate_up), self._shape(down))
        if shapes == ((count, 2 * width, hidden), (count, hidden, width)):
            return False
        if shapes == ((count, hidden, 2 * width), (count, width, hidden)):
            return True
        expected = f"{[count, 2 * width, hidden]} and {[count, hidden, width]}, or the last two axes swapped in both"
        raise QwencError(f"{self._shards.folder}: {gate_up} is {list(shapes[0])} and {down} {list(shapes[1])}, expected {expected}")

    def _gate_up(self, prefix: str, width: int) -> tuple[Part, ...]:
        return tuple(self._part(f"{prefix}{x}_proj.weight", width, self._config.hidden_size) for x in ("gate", "up"))

    def _lm_head_name(self) -> str:
        return next((name for name in _LM_HEADS if name in self._shards), _LM_HEADS[0])

    def _layer(self, index: int, name: str) -> str:
        return f"{self._prefix}layers.{index}.{name}"

    def _layer_tensors(self, layers: Iterable[int], name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self._expect(self._layer(i, name), shape) for i in layers)

    def _part(self, name: str, rows: int, inputs: int) -> Part:
        return Part(self._expect(name, (rows, inputs)), rows)

    def _expect(self, name: str, shape: tuple[int, ...]) -> str:
        found = self._shape(name)
        if found != shape:
            raise QwencError(f"{self._shards.path_of(name)}: {name} has shape {list(found)}, but config.json implies {list(shape)}")
        return name

    def _shape(self, name: str) -> tuple[int, ...]:
        info = self._shards.info(name)
        if info.dtype not in WEIGHT_DTYPES:
            raise QwencError(f"{self._shards.path_of(name)}: {name} is {info.dtype}; only {', '.join(WEIGHT_DTYPES)} weights are supported")
        self._used.add(name)
        return info.shape

    def _report_unused(self, reporter: Reporter) -> None:
        unused = [name for name in self._shards.names() if name not in self._used]
        vision = [name for name in unused if name.startswith(_VISION_PREFIXES)]
        if vision:
            reporter.note(f"skipping the vision part ({len(vision)} tensors): qwenc runs the text model only")
        other = [name for name in unused if not name.startswith(_VISION_PREFIXES) and not _is_harmless(name)]
        if other:
            reporter.note(f"ignoring {len(other)} tensors that the model does not use ({other[0]}{', …' if len(other) > 1 else ''})")


def _is_harmless(name: str) -> bool:
    """Tensors that may lie beside a model without meaning anything: the head of a tied model, old rotary buffers."""
    return name in _LM_HEADS or name.endswith("rotary_emb.inv_freq")


def _spread(heads: int, head_dim: int, padded_dim: int) -> np.ndarray:
    """heads·padded_dim positions: head by head, head_dim entries and then −1."""
    spread = np.full((heads, padded_dim), -1)
    spread[:, :head_dim] = np.arange(heads * head_dim).reshape(heads, head_dim)
    return spread.reshape(-1)


def _interleave(width: int) -> np.ndarray:
    """Gate rows 0…width and up rows width…2·width, tile by tile in turn, each padded to whole tiles."""
    padded = round_up(width, TILE)
    gate = _padded(np.arange(width), padded).reshape(-1, 1, TILE)
    up = _padded(np.arange(width, 2 * width), padded).reshape(-1, 1, TILE)
    return np.concatenate([gate, up], axis=1).reshape(-1)


def _padded(indices: np.ndarray, length: int) -> np.ndarray:
    return np.concatenate([indices, np.full(length - len(indices), -1)])
