"""config.json in, one checked record out: every spelling of transformers 4 and 5, and a clear refusal of what we would compute wrongly."""

from __future__ import annotations

from dataclasses import dataclass

from qwenc.config.keys import Keys
from qwenc.config.rope import RopeConfig, parse_rope
from qwenc.errors import QwencError

# model_type -> (checkpoint family, weight prefix of the text model)
_MODEL_TYPES = {
    "qwen3": ("qwen3", "model."),
    "qwen3_moe": ("qwen3_moe", "model."),
    "qwen3_vl": ("qwen3_vl", "model.language_model."),
    "qwen3_vl_moe": ("qwen3_vl_moe", "model.language_model."),
    "qwen3_vl_text": ("qwen3_vl", "model."),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "model."),
    "llama": ("llama", "model."),
}
# What transformers takes when config.json has no head_dim at all; the others derive it from hidden_size.
_DEFAULT_HEAD_DIM = {"qwen3": 128, "qwen3_vl": 128}
MAX_HEAD_DIM = 256
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts. moe_layers[i] tells whether layer i routes to experts or is a dense MLP."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text model of a checkpoint. Sizes are those of the checkpoint; the padded ones are properties."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    rope: RopeConfig
    max_position_embeddings: int
    moe: MoeConfig | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weight_prefix: str

    @property
    def padded_head_dim(self) -> int:
        """head_dim rounded up to whole row tiles; the contract's D."""
        return round_up(self.head_dim, 16)

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a plain MLP, in order: row i of the `gate_up` and `down` stacks is layer dense_layers[i]."""
        if self.moe is None:
            return tuple(range(self.num_hidden_layers))
        return tuple(i for i, routed in enumerate(self.moe.moe_layers) if not routed)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, in order: row i of the expert stacks is layer moe_layers[i]."""
        if self.moe is None:
            return ()
        return tuple(i for i, routed in enumerate(self.moe.moe_layers) if routed)

    @property
    def has_vision(self) -> bool:
        """Whether the checkpoint it came from also holds a vision tower, which qwenc skips."""
        return self.model_type in ("qwen3_vl", "qwen3_vl_moe")

    @classmethod
    def from_dict(cls, config: object, source: str = "config.json") -> ModelConfig:
        """Reads a parsed config.json. Raises QwencError, starting with `source`, for anything missing, malformed or not implemented."""
        if not isinstance(config, dict):
            raise QwencError(f"{source}: not a JSON object")
        outer = Keys(config, source)
        model_type = outer.string("model_type")
        if model_type not in _MODEL_TYPES:
            raise QwencError(f"{source}: model_type {model_type!r} is not supported (supported: {', '.join(_MODEL_TYPES)})")
        family, prefix = _MODEL_TYPES[model_type]
        text = outer
        if model_type in ("qwen3_vl", "qwen3_vl_moe"):
            text = Keys(outer.table("text_config"), f"{source}: text_config")
        _refuse_unsupported(text, outer)

        layers = text.size("num_hidden_layers", most=MAX_LAYERS)
        heads = text.size("num_attention_heads")
        hidden = text.size("hidden_size")
        kv_heads = text.size("num_key_value_heads", heads)
        if heads % kv_heads:
            raise QwencError(f"{source}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        max_positions = text.size("max_position_embeddings")
        _refuse_sliding_window(text, family, layers, max_positions)
        moe = _parse_moe(text, family, layers)
        all_routed = moe is not None and all(moe.moe_layers)
        return cls(
            model_type=model_type,
            vocab_size=text.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=text.size("intermediate_size", 0) if all_routed else text.size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=_parse_head_dim(text, family, hidden, heads),
            rms_norm_eps=text.number("rms_norm_eps", 1e-6, most=1.0),
            # Of a vision-language checkpoint the outer value is the one that transformers applies.
            tie_word_embeddings=outer.flag("tie_word_embeddings", text.flag("tie_word_embeddings", False)),
            qk_norm=family != "llama",
            rope=parse_rope(text, outer, None if family != "llama" else 10000.0, max_positions),
            max_position_embeddings=max_positions,
            moe=moe,
            bos_token_id=text.optional_id("bos_token_id", outer),
            eos_token_ids=text.id_list("eos_token_id") or outer.id_list("eos_token_id"),
            weight_prefix=prefix,
        )


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def _parse_head_dim(text: Keys, family: str, hidden: int, heads: int) -> int:
    if text.has("head_dim"):
        head_dim = text.size("head_dim")
    elif "head_dim" not in text.values and family in _DEFAULT_HEAD_DIM:
        head_dim = _DEFAULT_HEAD_DIM[family]
    elif hidden % heads:
        raise QwencError(f"{text.source}: no head_dim, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    else:
        head_dim = hidden // heads
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise QwencError(f"{text.source}: head_dim {head_dim} is not supported (even, at most {MAX_HEAD_DIM})")
    return head_dim


def _parse_moe(text: Keys, family: str, layers: int) -> MoeConfig | None:
    if family not in ("qwen3_moe", "qwen3_vl_moe"):
        return None
    num_experts = text.size("num_experts" if text.has("num_experts") else "num_local_experts")
    per_token = text.size("num_experts_per_tok")
    if per_token > num_experts:
        raise QwencError(f"{text.source}: num_experts_per_tok {per_token} is more than the {num_experts} experts")
    step = text.size("decoder_sparse_step", 1)
    mlp_only = frozenset(text.id_list("mlp_only_layers"))
    moe_layers = tuple(i not in mlp_only and (i + 1) % step == 0 for i in range(layers))
    if not any(moe_layers):
        return None
    # A missing key means "do not renormalise" for Qwen3-MoE. Qwen3-VL-MoE renormalises always: transformers never reads the key there.
    renormalise = family == "qwen3_vl_moe" or text.flag("norm_topk_prob", False)
    return MoeConfig(num_experts, per_token, text.size("moe_intermediate_size"), renormalise, moe_layers)


def _refuse_unsupported(text: Keys, outer: Keys) -> None:
    """Refuses, by name, keys whose meaning the forward pass does not apply."""
    activation = text.string("hidden_act", "silu")
    if activation != "silu":
        raise QwencError(f"{text.source}: hidden_act {activation!r} is not supported (only silu)")
    for bias in ("attention_bias", "mlp_bias"):
        if text.flag(bias, False):
            raise QwencError(f"{text.source}: {bias} is true; biases are not supported")
    for keys in (text, outer):
        if keys.has("quantization_config"):
            method = keys.table("quantization_config").get("quant_method", "unknown")
            raise QwencError(f"{keys.source}: already quantised (quant_method {method!r}); use the bf16, f16 or f32 original")


def _refuse_sliding_window(text: Keys, family: str, layers: int, max_positions: int) -> None:
    """Refuses a sliding window that would change a result. A window that covers every position, or that no layer uses, is harmless."""
    layer_types = text.string_list("layer_types")
    other = sorted({kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")})
    if other:
        raise QwencError(f"{text.source}: layer_types {', '.join(map(repr, other))} not supported (only full_attention)")
    window = text.size("sliding_window", 0)
    switched_on = text.flag("use_sliding_window", False) and 0 < window < max_positions
    if "sliding_attention" in layer_types and (switched_on or window == 0):
        raise QwencError(f"{text.source}: layer_types has sliding_attention layers; sliding-window attention is not supported")
    if not switched_on or layer_types or family == "llama":
        return
    # Without layer_types, Qwen3 slides from max_window_layers on, Qwen3-MoE everywhere.
    first = text.size("max_window_layers", 28) if family == "qwen3" else 0
    if first < layers:
        raise QwencError(f"{text.source}: use_sliding_window is true (window {window}); sliding-window attention is not supported")
