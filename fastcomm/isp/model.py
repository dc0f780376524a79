"""The transformer that is trained: by name, by size, by a TOML file or a `config.json`."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from fastcomm import inputs
from fastcomm.errors import ConfigError

_VOCAB = 103168
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of a decoder; every layer is the same."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    ffn: int
    vocab: int = _VOCAB
    mlp: str = "swiglu"
    # Of the original's table: 0 for any other model.
    billions: float = 0

    @property
    def group(self) -> float:
        """Key and value heads as a share of the heads."""
        return self.kv_heads / self.heads

    @property
    def matrices(self) -> tuple[tuple[float, int], ...]:
        """Elements of each weight matrix of a layer, and how many have this size."""
        square = float(self.hidden) ** 2
        mlp = (float(self.hidden) * self.ffn, 3 if self.mlp == "swiglu" else 2)
        return ((1 + 2 * self.group) * square, 1), (square, 1), mlp

    @property
    def layer_parameters(self) -> float:
        """Parameters of a layer, its norms included for SwiGLU as the original counts."""
        norms = 2 * self.hidden if self.mlp == "swiglu" else 0
        return norms + sum(elements * count for elements, count in self.matrices)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """Parameters of the whole model."""
        return 2 * self.embedding + self.layers * self.layer_parameters + self.hidden

    @property
    def wide(self) -> float:
        """Elements a token that the MLP keeps for the backward, in multiples of hidden."""
        if self.mlp != "swiglu":
            return 16.0 * self.ffn / (4 * self.hidden)
        usual = self.ffn == swiglu_width(self.hidden)
        return 64 / 3 if usual else 8 * self.ffn / self.hidden

    def flops(self, seq_len: int, passes: int = 3) -> float:
        """FLOPs a token: 3 passes are the model's, 4 those with recomputation."""
        # A usual width counts as 8/3 of hidden, unrounded, as everyone's MFU does.
        mlp = 8.0 * self.hidden**2 if self.wide in {64 / 3, 16.0} else 0.0
        mlp = mlp or self.matrices[2][0] * self.matrices[2][1]
        linear = 2 * (self.matrices[0][0] + self.matrices[1][0] + mlp)
        attention = 4.0 * seq_len * self.hidden
        return passes * self.layers * (linear + attention) + 6.0 * self.embedding


def swiglu_width(hidden: int) -> int:
    """Width of a SwiGLU MLP as InternLM rounds it."""
    return 256 * ceil(int(hidden * 8 / 3) / 256)


def of_size(billions: float, vocab: int = _VOCAB) -> Model:
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


def _llama(name: str, *shape: int) -> Model:
    hidden, heads, kv_heads, layers, ffn, vocab = shape
    return Model(
        name=name,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        layers=layers,
        ffn=ffn,
        vocab=vocab,
    )


PRESETS = {
    **{f"internlm-{size:g}b": of_size(size) for size in _SIZES},
    "llama2-7b": _llama("llama2-7b", 4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": _llama("llama2-13b", 5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": _llama("llama2-70b", 8192, 64, 8, 80, 28672, 32000),
    "llama3-8b": _llama("llama3-8b", 4096, 32, 8, 32, 14336, 128256),
    "llama3-70b": _llama("llama3-70b", 8192, 64, 8, 80, 28672, 128256),
    "llama3-405b": _llama("llama3-405b", 16384, 128, 8, 126, 53248, 128256),
}


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
    parsed = inputs.json(path) if path.suffix == ".json" else inputs.toml(path)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path}: found {type(parsed).__name__}, wanted a table of keys")
    return _checked(_plain(parsed, path), path)


# Each of ours, and how Hugging Face names it.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "layers": ("num_hidden_layers", "n_layer"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocab": ("vocab_size",),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_GATED = ("silu", "swish", "swiglu")


def _plain(said: dict[str, Any], path: Path) -> Model:
    if experts := [key for key in _EXPERTS if said.get(key)]:
        raise ConfigError(f"{path}: {experts[0]}: models with experts are not searched yet")
    if "mlp" in said and said["mlp"] not in {"swiglu", "gelu"}:
        raise ConfigError(f"{path}: mlp: found {said['mlp']!r}, wanted swiglu or gelu")
    gated = said.get("hidden_act", said.get("activation_function", "silu")) in _GATED
    mlp = said.get("mlp", "swiglu" if gated else "gelu")
    hidden, heads = _number(said, "hidden", path), _number(said, "heads", path)
    usual = swiglu_width(hidden) if mlp == "swiglu" else 4 * hidden
    return Model(
        name=str(said.get("name", said.get("_name_or_path") or path.stem)),
        hidden=hidden,
        heads=heads,
        kv_heads=_number(said, "kv_heads", path, heads),
        layers=_number(said, "layers", path),
        ffn=_number(said, "ffn", path, usual),
        vocab=_number(said, "vocab", path, _VOCAB),
        mlp=mlp,
    )


def _number(said: dict[str, Any], key: str, path: Path, usual: int | None = None) -> int:
    names = (key, *_NAMES[key])
    value = next((said[name] for name in names if said.get(name) is not None), usual)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{path}: {' or '.join(names)}: found {value!r}, wanted a whole number"
        )
    return value


def _checked(model: Model, path: Path) -> Model:
    if model.hidden % model.heads:
        raise ConfigError(
            f"{path}: hidden {model.hidden} is no multiple of {model.heads} heads"
        )
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"{path}: {model.heads} heads are no multiple of {model.kv_heads} kv_heads"
        )
    return model
