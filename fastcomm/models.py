"""Transformer models: their shapes, and models by name, from files and from tables.

Sizes are numbers of elements. A matrix is given as its elements and the number of matrices of
that size.

Tables are CSV files as people and spreadsheets write them: fields are separated by commas,
semicolons or tabs; the text is UTF-8, or UTF-16 with a byte order mark. Names of columns are
compared in lower case, without spaces around them.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

from fastcomm import files
from fastcomm.checks import shortened
from fastcomm.errors import ConfigError
from fastcomm.units import parse_quantity

VOCAB = 103168
# Hidden size, heads, layers by billions of parameters.
_SIZES = {
    0.25: (1280, 10, 10),
    1.3: (2048, 16, 24),
    7: (4096, 32, 32),
    13: (5120, 40, 40),
    20: (5120, 40, 60),
    30: (6144, 48, 60),
    65: (8192, 64, 80),
    104: (10240, 80, 82),
}
_SHAPE = ("hidden", "heads", "kv_heads", "layers", "ffn", "vocab")
# Keys of fastcomm, and their names in configurations of Hugging Face.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "layers": ("num_hidden_layers", "n_layer"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "head_dim": (),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk", "experts_per_token"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "node_limit": ("topk_group",),
    "groups": ("n_group",),
    "every": ("decoder_sparse_step", "moe_layer_freq"),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
    "mtp_layers": ("num_nextn_predict_layers",),
    "window": ("sliding_window",),
}
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")
# Keys of shapes that no price has, and the values, or parts of a list, that change nothing.
_UNPRICED: dict[str, tuple[object, ...]] = {
    "attn_type_list": (1,),
    "attn_layer_indices": (),
    "attn_layer_offset": (),
    "attn_layer_period": (1,),
    "block_types": ("attention",),
    "cross_attention_layers": (),
    "expert_layer_offset": (0,),
    "expert_layer_period": (1,),
    "full_attention_interval": (1,),
    "hybrid_override_pattern": (),
    "index_topk": (),  # sparse attention
    "interleave_moe_layer_step": (1,),
    "intermediate_size_mlp": (),  # beside a shared expert in every layer
    "is_encoder_decoder": (),
    "layer_types": _ATTENTION,
    "layers_block_type": ("attention",),
    "linear_attn_config": (),
    "multi_query": (),
    "parallel_attn_mlp_res": (),
    "shared_intermediate_size": (),
}
_UNPRICED_ATTENTION = re.compile(r"(linear_num|linear_key|linear_value|mamba|ssm|rwkv|lru)_")
# Keys of experts: numbers above 1, or lists, change the shape unless `_NAMES` has the key.
_OF_EXPERTS = re.compile(r"experts|^moe_(k|layer|num|every)|_moe_layer|^(ffn|moe)_config$")
_MOST = 1 << 40  # largest number in a configuration
_MOST_LAYERS = 1 << 14
# Families of Hugging Face whose layers are those priced here, by `model_type` without "_".
_FAMILIES = frozenset(
    (
        *("llama", "mistral", "mixtral", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "gptoss"),
        *("deepseek", "deepseekv2", "deepseekv3", "kimik2", "glm4moe", "internlm", "internlm2"),
        *("internlm3", "olmo2", "olmoe", "phi3", "phimoe", "granite", "yi", "gpt2"),
    )
)
_TIED = "gpt2"  # whose configuration leaves out that embedding and head are one matrix
# Part of a configuration of models that also read images or sound.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_GATED = ("silu", "swish", "swiglu")
_LARGEST = 64 << 20  # bytes of a table
_MOST_ROWS = 100_000
_DELIMITERS = ",;\t"
# Models whose experts have biases and clamps, and whose attention has sinks; and models that
# normalize queries and keys.
_GPT_OSS, _QWEN3 = "gpt-oss", "qwen3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of SwiGLU experts that replaces the MLP in every layer but the first ones."""

    number: int
    top_k: int  # experts of a token
    ffn: int  # width of an expert
    shared: int = 0  # total width of the experts that every token visits
    dense_layers: int = 0  # first layers, which have an MLP instead
    node_limit: int = 0  # most groups that the experts of a token may lie in; 0 is no limit
    groups: int = 0  # of experts, of which a token takes `node_limit`; 0 is one per node
    has_bias: bool = False  # biases of the products, and a clamped gated unit, as in GPT-OSS

    def gate(self, nodes: int) -> tuple[int, int]:
        """Return the groups of experts, and how many a token uses; (1, 1) is no limit."""
        groups = self.groups or nodes
        limited = min(groups, self.node_limit or groups)
        return (1, 1) if limited == groups else (groups, limited)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: ranks of the projections, and widths of a head."""

    q_rank: int  # 0 if queries are not compressed
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights and activations of one kind of layer, without its routed experts."""

    matrices: tuple[tuple[float, int], ...]
    parameters: float
    # Elements per token that the MLP or the experts save for the backward pass, over `hidden`.
    wide: float
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Shape of a decoder model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    ffn: int
    vocab: int = VOCAB
    mlp: str = "swiglu"
    billions: float = 0  # size of an InternLM preset, 0 for any other model
    head_dim: int = 0  # width of a head; 0 is hidden / heads
    latent: Latent | None = None
    experts: Experts | None = None
    tied: bool = False  # whether embedding and head are one matrix
    mtp_layers: int = 0  # layers that predict a second token; only plans count them
    window: int = 0  # tokens of a sliding window on every second layer; as `mtp_layers`
    has_sinks: bool = False  # a learned sink a head in attention, as in GPT-OSS
    has_qk_norm: bool = False  # norms of queries and keys
    has_learned_positions: bool = False  # instead of rotary ones, as in GPT-2

    def __hash__(self) -> int:
        """Return the hash of the name: caches are asked for the shape of one model often."""
        return hash(self.name)

    @property
    def group(self) -> float:
        """Key and value heads as a share of the heads."""
        return self.kv_heads / self.heads

    @property
    def breadth(self) -> float:
        """Mean width of queries and values over all heads, in multiples of hidden."""
        if self.latent:
            head = (self.latent.nope + self.latent.rope + self.latent.value) / 2
            return self.heads * head / self.hidden
        return self.heads * self.head_dim / self.hidden if self.head_dim else 1.0

    @property
    def rotary(self) -> int:
        """Width of a head that rotary embeddings apply to."""
        if self.latent:
            return self.latent.rope
        return self.head_dim or self.hidden // self.heads

    @property
    def attention(self) -> tuple[tuple[float, int], ...]:
        """Matrices around attention."""
        if self.latent is None:
            square = float(self.hidden) ** 2 * self.breadth
            return ((1 + 2 * self.group) * square, 1), (square, 1)
        h, a, latent = float(self.hidden), self.heads, self.latent
        return (
            (h * latent.q_rank, 1),
            ((latent.q_rank or h) * a * (latent.nope + latent.rope), 1),
            (h * (latent.kv_rank + latent.rope), 1),
            (float(latent.kv_rank) * a * (latent.nope + latent.value), 1),
            (float(a) * latent.value * h, 1),
        )

    @property
    def matrices(self) -> tuple[tuple[float, int], ...]:
        """Matrices of a layer without experts."""
        mlp = (float(self.hidden) * self.ffn, 3 if self.mlp == "swiglu" else 2)
        return (*self.attention, mlp)

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer without experts; only SwiGLU layers count their norms."""
        norms = 2 * self.hidden if self.mlp == "swiglu" else 0
        return norms + sum(elements * count for elements, count in self.matrices)

    @property
    def expert_parameters(self) -> float:
        """Parameters of the routed experts of a layer."""
        experts = self.experts
        return 3.0 * self.hidden * experts.ffn * experts.number if experts else 0.0

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """Kinds of layers: the usual one, then the dense one of a model with experts."""
        return _kinds(self)

    def counts(self, place: int, pp: int) -> tuple[int, ...]:
        """Return the layers of each kind on pipeline stage `place` of `pp`.

        If `pp` does not divide the layers, the last stages have one layer more.
        """
        least, longer = divmod(self.layers, pp)
        first = place * least + max(0, place - (pp - longer))
        total = least + int(place >= pp - longer)
        dense_layers = self.experts.dense_layers if self.experts else 0
        dense = min(max(dense_layers - first, 0), total)
        return (total - dense, dense)[: len(self.kinds)]

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, or of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """Parameters of the model."""
        return self._total(self.expert_parameters)

    @property
    def active(self) -> float:
        """Parameters that a token uses."""
        experts = self.experts
        return self._total(
            self.expert_parameters * experts.top_k / experts.number if experts else 0.0
        )

    def _total(self, experts: float) -> float:
        """Return the parameters of the model if a layer has `experts` parameters of experts."""
        layers = sum(
            count * (kind.parameters + (experts if kind.experts else 0.0))
            for kind, count in zip(self.kinds, self.counts(0, 1), strict=True)
        )
        return (1 if self.tied else 2) * self.embedding + layers + self.hidden

    @property
    def wide(self) -> float:
        """Elements per token that the MLP saves for the backward pass, over hidden."""
        if self.mlp != "swiglu":
            return 16.0 * self.ffn / (4 * self.hidden)
        usual = self.ffn == swiglu_width(self.hidden)
        return 64 / 3 if usual else 8 * self.ffn / self.hidden

    def flops(self, seq_len: int, passes: int = 3) -> float:
        """Return the FLOPs per token.

        `passes` is 3 for forward and backward (MFU), and 4 with full recompute (HFU).
        """
        attention = 4.0 * seq_len * self.hidden * self.breadth
        layers = sum(
            passes * count * (2 * self._linear(kind) + attention)
            for kind, count in zip(self.kinds, self.counts(0, 1), strict=True)
        )
        return layers + 6.0 * self.embedding

    def _linear(self, kind: Layer) -> float:
        """Return the elements of weight matrices of a layer that a token is multiplied with."""
        if experts := kind.experts:
            routed = self.expert_parameters * experts.top_k / experts.number
            return sum(elements * count for elements, count in kind.matrices) + routed
        # The usual width counts as 8/3 of hidden without rounding, as is common for MFU.
        mlp = 8.0 * self.hidden**2 if self.wide in {64 / 3, 16.0} else 0.0
        mlp = mlp or self.matrices[-1][0] * self.matrices[-1][1]
        return sum(elements * count for elements, count in self.attention) + mlp


@lru_cache(maxsize=64)
def _kinds(model: Model) -> tuple[Layer, ...]:
    """Return the kinds of layers: the usual one, then one without experts if there are any."""
    plain = Layer(matrices=model.matrices, parameters=model.layer_parameters, wide=model.wide)
    if model.experts is None:
        return (plain,)
    usual = _with_experts(model, model.experts)
    return (usual, plain) if model.experts.dense_layers else (usual,)


def _with_experts(model: Model, experts: Experts) -> Layer:
    """Return the layer with experts; it counts the parameters outside routed experts."""
    h = float(model.hidden)
    shared = ((h * experts.shared, 3),) if experts.shared else ()
    matrices = (*model.attention, (h * experts.number, 1), *shared)
    # Per copy of a token: its input, three expert widths, and its output before the sum.
    copies = experts.top_k * (4 + 8 * experts.ffn / h)
    return Layer(
        matrices=matrices,
        parameters=2 * h + sum(elements * count for elements, count in matrices),
        wide=8 * experts.shared / h + copies,
        experts=experts,
    )


def swiglu_width(hidden: int) -> int:
    """Return the width of a SwiGLU MLP as InternLM rounds it."""
    return 256 * ceil(int(hidden * 8 / 3) / 256)


def internlm(billions: float, vocab: int = VOCAB) -> Model:
    """Return the InternLM model of that many billions of parameters, or raise ConfigError."""
    if billions not in _SIZES:
        sizes = ", ".join(f"{size:g}" for size in _SIZES)
        raise ConfigError(f"unknown model size {billions:g}: expected {sizes} (billions)")
    hidden, heads, layers = _SIZES[billions]
    shape = (hidden, heads, heads, layers, swiglu_width(hidden), vocab)
    return _llama(f"internlm-{billions:g}b", *shape, billions=billions)


def _llama(name: str, *shape: int, **parts: Any) -> Model:
    """Return a model with SwiGLU; `shape` is in the order of `_SHAPE`, `parts` other fields."""
    return Model(name=name, **parts, **dict[str, Any](zip(_SHAPE, shape, strict=True)))


_MODELS = (
    _llama("llama2-7b", 4096, 32, 32, 32, 11008, 32000),
    _llama("llama2-13b", 5120, 40, 40, 40, 13824, 32000),
    _llama("llama2-70b", 8192, 64, 8, 80, 28672, 32000),
    _llama("llama3-8b", 4096, 32, 8, 32, 14336, 128256),
    _llama("llama3-70b", 8192, 64, 8, 80, 28672, 128256),
    _llama("llama3-405b", 16384, 128, 8, 126, 53248, 128256),
    # Models with experts: from their config.json on Hugging Face.
    _llama(  # mistralai/Mixtral-8x7B-v0.1
        *("mixtral-8x7b", 4096, 32, 8, 32, 14336, 32000),
        experts=Experts(number=8, top_k=2, ffn=14336),
    ),
    _llama(  # mistralai/Mixtral-8x22B-v0.1
        *("mixtral-8x22b", 6144, 48, 8, 56, 16384, 32768),
        experts=Experts(number=8, top_k=2, ffn=16384),
    ),
    _llama(  # Qwen/Qwen3-30B-A3B
        *("qwen3-30b-a3b", 2048, 32, 4, 48, 6144, 151936),
        head_dim=128,
        experts=Experts(number=128, top_k=8, ffn=768),
        has_qk_norm=True,
    ),
    _llama(  # Qwen/Qwen3-235B-A22B
        *("qwen3-235b-a22b", 4096, 64, 4, 94, 12288, 151936),
        head_dim=128,
        experts=Experts(number=128, top_k=8, ffn=1536),
        has_qk_norm=True,
    ),
    _llama(  # deepseek-ai/DeepSeek-V3, without its multi-token prediction module
        *("deepseek-v3", 7168, 128, 128, 61, 18432, 129280),
        latent=Latent(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128),
        experts=Experts(
            number=256, top_k=8, ffn=2048, shared=2048, dense_layers=3, node_limit=4, groups=8
        ),
        has_qk_norm=True,
    ),
)
PRESETS = {f"internlm-{size:g}b": internlm(size) for size in _SIZES}


PRESETS |= {model.name: model for model in _MODELS}


def load(name: str | float) -> Model:
    """Load a model by preset, size, TOML file or Hugging Face configuration.

    Parameters
    ----------
    name
        A preset ("internlm-7b"), billions of parameters (7 or "7B"), a TOML file, a
        config.json, or a folder with one.

    Raises
    ------
    ConfigError
        If there is no such model, or a key of the file is missing or invalid.

    """
    text = str(name).lower()
    if text in PRESETS:
        return PRESETS[text]
    try:
        return internlm(float(text.removesuffix("b")))
    except ValueError:
        pass
    path = Path(str(name))
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f"unknown model {name!r}: expected a file, a size such as 7B, or one of "
            f"{', '.join(PRESETS)}"
        )
    return checked(_model(_parsed(path), path), path)


def _parsed(path: Path) -> dict[str, Any]:
    """Parse a JSON or TOML file, which must be a table of keys."""
    parsed = files.json(path) if path.suffix == ".json" else files.toml(path)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: expected a table of keys, not {type(parsed).__name__}")
    return parsed


def _model(config: dict[str, Any], path: Path) -> Model:
    """Return the model of a configuration, in the keys of fastcomm or Hugging Face."""
    _check_family(config, path)
    _check_window(config, path)
    _check_keys(config, path)
    if "mlp" in config and config["mlp"] not in {"swiglu", "gelu"}:
        raise ConfigError(f"{path}: invalid mlp {config['mlp']!r}: expected swiglu or gelu")
    gated = config.get("hidden_act", config.get("activation_function", "silu")) in _GATED
    mlp = config.get("mlp", "swiglu" if gated else "gelu")
    hidden, heads = _number(config, "hidden", path), _number(config, "heads", path)
    default_ffn = swiglu_width(hidden) if mlp == "swiglu" else 4 * hidden
    ffn = _number(config, "ffn", path, default_ffn)
    latent, family = _latent(config, path), _family(config)
    head_dim = 0 if latent else _number(config, "head_dim", path, 0)
    return Model(
        name=str(config.get("name", config.get("_name_or_path") or path.stem)),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else _number(config, "kv_heads", path, heads),
        layers=_number(config, "layers", path, most=_MOST_LAYERS),
        ffn=ffn,
        vocab=_number(config, "vocab", path, VOCAB),
        mlp=mlp,
        head_dim=0 if head_dim * heads == hidden else head_dim,
        latent=latent,
        experts=_experts(config, path, ffn),
        tied=bool(config.get("tied", config.get("tie_word_embeddings", family == _TIED))),
        mtp_layers=_number(config, "mtp_layers", path, 0),
        window=_number(config, "window", path, 0) if _alternates(config) else 0,
        has_sinks=config.get("model_type") == "gpt_oss",
        has_qk_norm=latent is not None or _normalizes(config),
        has_learned_positions=family == _TIED,
    )


def _family(config: dict[str, Any]) -> str:
    """Return the family of a configuration of Hugging Face, as in `_FAMILIES`; may be empty."""
    text = config.get("model_type")
    if not text:
        classes = config.get("architectures")
        text = classes[0] if isinstance(classes, list) and classes else ""
    return re.sub(r"_|-|forcausallm$|lmheadmodel$", "", str(text).lower())


def _check_family(config: dict[str, Any], path: Path) -> None:
    """Raise `ConfigError` for a family whose layers are not those priced here."""
    sizes = ("hidden", *_NAMES["hidden"])
    nested = next((name for name in _NESTED if isinstance(config.get(name), dict)), None)
    if nested and not any(config.get(name) is not None for name in sizes):
        raise ConfigError(
            f"{path}: the language model is nested in {nested}, beside parts that have no "
            f"price: save the value of {nested} as a file of its own"
        )
    family = _family(config)
    if family and family not in _FAMILIES:
        text = config.get("model_type") or config["architectures"][0]
        raise ConfigError(
            f"{path}: the layers of {shortened(text)} are not understood; if they are those of "
            "a Llama, leave out model_type and architectures"
        )


def _check_window(config: dict[str, Any], path: Path) -> None:
    """Raise `ConfigError` for a window of other layers than every second one."""
    window, longest = config.get(_NAMES["window"][0]), config.get("max_position_embeddings")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return
    is_longer = isinstance(longest, int) and window >= longest
    if window < 1 or is_longer or _alternates(config):
        return
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds and "sliding_attention" not in kinds:
        return
    raise ConfigError(
        f"{path}: a sliding_window of {window} tokens is priced on every second layer alone "
        "(layer_types); set it to null for full attention, as in shorter sequences"
    )


def _check_keys(config: dict[str, Any], path: Path) -> None:
    """Raise `ConfigError` for a key that makes layers or experts differ from those priced."""
    usual = {name for key, names in _NAMES.items() for name in (key, *names)}
    # An error that names the keys that are understood follows for these.
    usual |= {"mlp_only_layers"}
    for key, value in config.items():
        if value and key not in usual and _is_unpriced(key, value):
            raise ConfigError(
                f"{path}: {key} {shortened(value)} is not understood: layers and experts "
                "could not be priced as they are"
            )


def _is_unpriced(key: str, value: object) -> bool:
    """Return whether a key that is not read changes layers or experts by its value."""
    if key in _UNPRICED:
        parts = value if isinstance(value, list) else [value]
        return any(part not in _UNPRICED[key] for part in parts)
    if _UNPRICED_ATTENTION.match(key):
        return True
    is_shared = "shared" in key and "expert" in key
    if not (is_shared or _OF_EXPERTS.search(key)):
        return False
    if isinstance(value, bool) or not isinstance(value, int | float):
        return isinstance(value, list | dict)
    return value > (0 if is_shared else 1)


def _alternates(config: dict[str, Any]) -> bool:
    """Whether every second layer has a window, as the only use of one that is priced."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return bool(kinds) and 2 * kinds.count("sliding_attention") == len(kinds)
    return config.get("model_type") == "gpt_oss" or "window" in config


def _normalizes(config: dict[str, Any]) -> bool:
    """Whether a configuration has norms of queries and keys."""
    is_qwen3 = str(config.get("model_type", "")).startswith(_QWEN3)
    return is_qwen3 or config.get("use_qk_norm") is True or config.get("qk_norm") is True


def _latent(config: dict[str, Any], path: Path) -> Latent | None:
    """Return latent attention, if the file has the rank of its keys and values."""
    if not any(config.get(name) for name in ("kv_rank", *_NAMES["kv_rank"])):
        return None
    queries = ("q_rank", *_NAMES["q_rank"])
    # Null compresses no queries; a file without the key is incomplete.
    least = 0 if any(name in config for name in queries) else None
    ranks = {"q_rank": _number(config, "q_rank", path, least)}
    names = ("kv_rank", "nope", "rope", "value")
    return Latent(**ranks, **{name: _number(config, name, path) for name in names})


def _experts(config: dict[str, Any], path: Path, ffn: int) -> Experts | None:
    """Return the mixture of experts, if the file has more than one expert."""
    number = _number(config, "experts", path, 0)
    _check_number_of_experts(config, path)
    if number < 2:  # noqa: PLR2004 one expert is an MLP
        return None
    if config.get("mlp_only_layers") or _number(config, "every", path, 1) != 1:
        raise ConfigError(
            f"{path}: mlp_only_layers, decoder_sparse_step or moe_layer_freq: only the first "
            "layers may have no experts (first_k_dense_replace)"
        )
    width = _number(config, "expert_ffn", path, ffn)
    shared = _number(config, "shared_ffn", path, 0)
    is_single = config.get("n_group") == 1
    groups = 0 if is_single else _number(config, "groups", path, 0)
    node_limit = 0 if is_single else _number(config, "node_limit", path, 0)
    if groups and (node_limit > groups or number % groups):
        raise ConfigError(
            f"{path}: {number} experts in n_group {groups}, of which topk_group is "
            f"{node_limit}: expected n_group to divide the experts, and at most as many of a "
            "token"
        )
    return Experts(
        number=number,
        top_k=_number(config, "top_k", path),
        ffn=width,
        shared=shared or width * _number(config, "shared_experts", path, 0),
        dense_layers=_number(config, "dense_layers", path, 0),
        # A single group of experts limits nothing.
        node_limit=node_limit,
        groups=groups,
        has_bias=config.get("model_type") == "gpt_oss",
    )


def _check_number_of_experts(config: dict[str, Any], path: Path) -> None:
    """Raise `ConfigError` for keys of experts in a file that does not have their number."""
    names = ("experts", *_NAMES["experts"])
    if any(config.get(name) is not None for name in names):
        return
    others = [name for key in ("top_k", "expert_ffn") for name in (key, *_NAMES[key])]
    if own := [name for name in others if config.get(name)]:
        raise ConfigError(
            f"{path}: {own[0]} {shortened(config[own[0]])} without the number of experts: add "
            f"{' or '.join(names)}, 0 for a model without"
        )


def _number(
    config: dict[str, Any],
    key: str,
    path: Path,
    default: int | None = None,
    most: int = _MOST,
) -> int:
    """Return the number under a key or one of its Hugging Face names."""
    names = (key, *_NAMES[key])
    value = next((config[name] for name in names if config.get(name) is not None), default)
    # 0 is valid only if it is the default.
    least = 0 if default == 0 else 1
    if type(value) is not int or not least <= value <= most:
        expected = "a whole number"
        if type(value) is int:
            expected += f" from {least} to {most}"
        raise ConfigError(
            f"{path}: invalid {' or '.join(names)} {shortened(value)}: expected {expected}"
        )
    return value


def checked(model: Model, path: Path | str) -> Model:
    """Return the model of a file; raise ConfigError if its sizes contradict each other."""
    heads, layers, experts = model.heads, model.layers, model.experts
    problem = ""
    if model.hidden % heads and not (model.head_dim or model.latent):
        problem = f"hidden {model.hidden} is not a multiple of {heads} heads"
    elif heads % model.kv_heads:
        problem = f"{heads} heads are not a multiple of {model.kv_heads} kv_heads"
    elif experts and experts.top_k > experts.number:
        problem = f"top_k is {experts.top_k}, but there are {experts.number} experts"
    elif experts and experts.dense_layers >= layers:
        problem = f"dense_layers is {experts.dense_layers}, but there are {layers} layers; at "
        problem += "least one needs experts"
    elif experts and model.mlp != "swiglu":
        problem = f"invalid mlp {model.mlp!r}: a model with experts needs swiglu"
    if problem:
        raise ConfigError(f"{path}: {problem}")
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table: the line where it ends, its values by column, and what is wrong."""

    line: int
    values: Mapping[str, str]
    problem: str = ""


def read_table(path: Path, required: tuple[str, ...]) -> list[TableRow]:
    """Return the rows of a CSV file with a header; empty rows are left out.

    Raises
    ------
    ConfigError
        If a required column is missing, a column is repeated, or there is no row.

    """
    text = files.text(path, _LARGEST)
    first = text.lstrip().partition("\n")[0]
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        lines = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}") from error
    if len(lines) < 2:  # noqa: PLR2004 the header and a run
        raise ConfigError(f"{path}: no rows; expected a header and one row a line")
    if len(lines) > _MOST_ROWS:
        raise ConfigError(f"{path}: more than {_MOST_ROWS} rows")
    names = [_column(name) for name in lines[0][1]]
    _check_columns(path, names, required)
    return list(_rows(names, lines[1:]))


def _column(name: str) -> str:
    """Return the name of a column as this package writes it."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def _check_columns(path: Path, names: list[str], required: tuple[str, ...]) -> None:
    """Raise `ConfigError` if a column is missing or repeated."""
    if missing := [name for name in required if name not in names]:
        raise ConfigError(
            f"{path}: missing column {', '.join(missing)}; needed are {', '.join(required)}; "
            f"found {shortened(', '.join(names))}"
        )
    if repeated := sorted({name for name in names if name and names.count(name) > 1}):
        raise ConfigError(f"{path}: repeated column {', '.join(repeated)}")


def _rows(names: list[str], lines: list[tuple[int, list[str]]]) -> Iterator[TableRow]:
    for line, fields in lines:
        values = {name: field.strip() for name, field in zip(names, fields, strict=False)}
        problem = ""
        if len(fields) != len(names):
            problem = f"expected {len(names)} fields, as the header has, found {len(fields)}"
        yield TableRow(line=line, values=values, problem=problem)


def load_models(path: Path) -> dict[str, Model]:
    """Return the models of a table by name.

    Raises
    ------
    ConfigError
        If a column is missing, a number is invalid, or a model is repeated.

    """
    rows = read_table(path, ("name", "layers", "hidden", "heads", "ffn", "vocab"))
    models: dict[str, Model] = {}
    for row in rows:
        where = f"{path}, line {row.line}"
        if row.problem:
            raise ConfigError(f"{where}: {row.problem}")
        name = row.values["name"]
        if name in models:
            raise ConfigError(f"{where}: model {shortened(name)} is repeated")
        model = f"{where}: {shortened(name)}"
        models[name] = checked(_model_of_row(row.values, model), model)
    return models


def _model_of_row(row: Mapping[str, str], where: str) -> Model:
    def number(name: str, default: int = 0) -> int:
        text = row.get(name, "")
        return parse_quantity(text, f"{where}: {name}") if text not in {"", "0"} else default

    hidden, heads = number("hidden", 1), number("heads", 1)
    width = number("head_dim")
    latent = experts = None
    preset = getattr(PRESETS.get(row["name"].lower()), "experts", None)
    if number("kv_lora"):
        names = {"q_rank": "q_lora", "kv_rank": "kv_lora", "nope": "qk_nope"}
        names |= {"rope": "qk_rope", "value": "v_dim"}
        ranks = {part: number(name, int(part != "q_rank")) for part, name in names.items()}
        latent = Latent(**ranks)
    if number("experts"):
        experts = Experts(
            number=number("experts"),
            top_k=number("topk", 1),
            ffn=number("expert_ffn", number("ffn", 1)),
            shared=number("shared_ffn"),
            dense_layers=number("dense_layers"),
            node_limit=number("node_limit", preset.node_limit if preset else 0),
            groups=preset.groups if preset else 0,
            has_bias=row["name"].lower().startswith(_GPT_OSS),
        )
    window = row.get("sliding_window", "").partition(" ")[0]
    shape = {"kv_heads": heads, "layers": 1, "ffn": 4 * hidden, "vocab": VOCAB, "mtp_layers": 0}
    return Model(
        name=row["name"],
        hidden=hidden,
        heads=heads,
        mlp="swiglu" if row.get("mlp", "swiglu") in {"swiglu", "geglu", ""} else "gelu",
        head_dim=0 if latent or width * heads == hidden else width,
        latent=latent,
        experts=experts,
        tied=row.get("tied", "") in {"1", "true", "yes"},
        window=int(window) if window.isdecimal() else 0,
        has_sinks=row["name"].lower().startswith(_GPT_OSS),
        has_qk_norm=latent is not None or row["name"].lower().startswith(_QWEN3),
        has_learned_positions=False,
        **{name: number(name, default) for name, default in shape.items()},
    )
