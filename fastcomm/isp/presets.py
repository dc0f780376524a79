"""Models by name: shapes as their authors published them."""

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
