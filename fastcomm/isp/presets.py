"""Models by name, and models from TOML or Hugging Face configuration files."""

from pathlib import Path
from typing import Any

from fastcomm import files
from fastcomm.errors import ConfigError
from fastcomm.isp.model import VOCAB, Experts, Latent, Model, swiglu_width

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


def of_size(billions: float, vocab: int = VOCAB) -> Model:
    """The InternLM model of that many billions of parameters."""
    if billions not in _SIZES:
        known = ", ".join(f"{size:g}" for size in _SIZES)
        raise ConfigError(f"model size {billions:g}: known are {known} (billions)")
    hidden, heads, layers = _SIZES[billions]
    return Model(
        name=f"internlm-{billions:g}b",
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        layers=layers,
        ffn=swiglu_width(hidden),
        vocab=vocab,
        billions=billions,
    )


def _llama(
    name: str,
    *shape: int,
    head_dim: int = 0,
    latent: Latent | None = None,
    experts: Experts | None = None,
) -> Model:
    hidden, heads, kv_heads, layers, ffn, vocab = shape
    return Model(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        layers=layers,
        ffn=ffn,
        vocab=vocab,
        head_dim=head_dim,
        latent=latent,
        experts=experts,
    )


_MODELS = (
    _llama("llama2-7b", 4096, 32, 32, 32, 11008, 32000),
    _llama("llama2-13b", 5120, 40, 40, 40, 13824, 32000),
    _llama("llama2-70b", 8192, 64, 8, 80, 28672, 32000),
    _llama("llama3-8b", 4096, 32, 8, 32, 14336, 128256),
    _llama("llama3-70b", 8192, 64, 8, 80, 28672, 128256),
    _llama("llama3-405b", 16384, 128, 8, 126, 53248, 128256),
    # Models with experts: config.json of each on Hugging Face, by its maker.
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
    ),
    _llama(  # Qwen/Qwen3-235B-A22B
        *("qwen3-235b-a22b", 4096, 64, 4, 94, 12288, 151936),
        head_dim=128,
        experts=Experts(number=128, top_k=8, ffn=1536),
    ),
    _llama(  # deepseek-ai/DeepSeek-V3, without its module that predicts a second token
        *("deepseek-v3", 7168, 128, 128, 61, 18432, 129280),
        latent=Latent(q_rank=1536, kv_rank=512, nope=128, rope=64, value=128),
        experts=Experts(
            number=256, top_k=8, ffn=2048, shared=2048, dense_layers=3, node_limit=4
        ),
    ),
)
PRESETS = {f"internlm-{size:g}b": of_size(size) for size in _SIZES}
PRESETS |= {model.name: model for model in _MODELS}


def load(said: str | float) -> Model:
    """A model by preset ("internlm-7b"), size (7, "7B"), TOML file or Hugging Face config."""
    text = str(said).lower()
    if text in PRESETS:
        return PRESETS[text]
    try:
        return of_size(float(text.removesuffix("b")))
    except ValueError:
        pass
    path = Path(str(said))
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"model {said!r}: no file, no size, none of {', '.join(PRESETS)}")
    return _checked(_plain(_parsed(path), path), path)


def _parsed(path: Path) -> dict[str, Any]:
    parsed = files.json(path) if path.suffix == ".json" else files.toml(path)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: found {type(parsed).__name__}, wanted a table of keys")
    return parsed


# Each of ours, and how Hugging Face names it.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "layers": ("num_hidden_layers", "n_layer"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
    "head_dim": (),
    "experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "top_k": ("num_experts_per_tok", "moe_topk"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_ffn": ("shared_expert_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "node_limit": ("topk_group",),
    "every": ("decoder_sparse_step", "moe_layer_freq"),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rope": ("qk_rope_head_dim",),
    "value": ("v_head_dim",),
}
_MOST = 1 << 40  # of anything that a model has
_GATED = ("silu", "swish", "swiglu")


def _plain(said: dict[str, Any], path: Path) -> Model:
    if "mlp" in said and said["mlp"] not in {"swiglu", "gelu"}:
        raise ConfigError(f"{path}: mlp: found {said['mlp']!r}, wanted swiglu or gelu")
    gated = said.get("hidden_act", said.get("activation_function", "silu")) in _GATED
    mlp = said.get("mlp", "swiglu" if gated else "gelu")
    hidden, heads = _number(said, "hidden", path), _number(said, "heads", path)
    usual = swiglu_width(hidden) if mlp == "swiglu" else 4 * hidden
    ffn = _number(said, "ffn", path, usual)
    latent = _latent(said, path)
    head_dim = 0 if latent else _number(said, "head_dim", path, 0)
    return Model(
        name=str(said.get("name", said.get("_name_or_path") or path.stem)),
        hidden=hidden,
        heads=heads,
        kv_heads=heads if latent else _number(said, "kv_heads", path, heads),
        layers=_number(said, "layers", path),
        ffn=ffn,
        vocab=_number(said, "vocab", path, VOCAB),
        mlp=mlp,
        head_dim=0 if head_dim * heads == hidden else head_dim,
        latent=latent,
        experts=_experts(said, path, ffn),
        tied=bool(said.get("tied", said.get("tie_word_embeddings", False))),
    )


def _latent(said: dict[str, Any], path: Path) -> Latent | None:
    """Latent attention, where the file has the width of its keys and values."""
    if not any(said.get(name) for name in ("kv_rank", *_NAMES["kv_rank"])):
        return None
    names = ("q_rank", "kv_rank", "nope", "rope", "value")
    return Latent(**{name: _number(said, name, path) for name in names})


def _experts(said: dict[str, Any], path: Path, ffn: int) -> Experts | None:
    """The mixture, where the file has more than one expert."""
    number = _number(said, "experts", path, 0)
    if number < 2:  # noqa: PLR2004 one expert is an MLP
        return None
    if said.get("mlp_only_layers") or _number(said, "every", path, 1) != 1:
        raise ConfigError(
            f"{path}: mlp_only_layers, decoder_sparse_step, moe_layer_freq: wanted experts in "
            "every layer but the first ones (first_k_dense_replace)"
        )
    width = _number(said, "expert_ffn", path, ffn)
    shared = _number(said, "shared_ffn", path, 0)
    return Experts(
        number=number,
        top_k=_number(said, "top_k", path),
        ffn=width,
        shared=shared or width * _number(said, "shared_experts", path, 0),
        dense_layers=_number(said, "dense_layers", path, 0),
        # A single group of experts limits nothing.
        node_limit=_number(said, "node_limit", path, 0) if said.get("n_group") != 1 else 0,
    )


def _number(said: dict[str, Any], key: str, path: Path, usual: int | None = None) -> int:
    names = (key, *_NAMES[key])
    value = next((said[name] for name in names if said.get(name) is not None), usual)
    # Where nothing is usual, or that is at least 1, 0 says nothing that could be meant.
    least = 0 if usual == 0 else 1
    if type(value) is not int or not least <= value <= _MOST:
        raise ConfigError(
            f"{path}: {' or '.join(names)}: found {value!r}, wanted a whole number"
        )
    return value


def _checked(model: Model, path: Path) -> Model:
    if model.hidden % model.heads and not (model.head_dim or model.latent):
        raise ConfigError(
            f"{path}: hidden {model.hidden} is no multiple of {model.heads} heads"
        )
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"{path}: {model.heads} heads are no multiple of {model.kv_heads} kv_heads"
        )
    experts = model.experts
    if experts and experts.top_k > experts.number:
        raise ConfigError(f"{path}: a token has {experts.top_k} of {experts.number} experts")
    if experts and experts.dense_layers >= model.layers:
        raise ConfigError(
            f"{path}: {experts.dense_layers} of {model.layers} layers have no experts: "
            "none is left with them"
        )
    if experts and model.mlp != "swiglu":
        raise ConfigError(f"{path}: mlp: found {model.mlp!r}, wanted swiglu with experts")
    return model
