"""Shapes of transformer models: attention, MLP or experts, vocabulary.

Sizes are numbers of elements. A matrix is given as its elements and the number of matrices of
that size.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

VOCAB = 103168


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of SwiGLU experts that replaces the MLP in every layer but the first ones."""

    number: int
    top_k: int  # experts of a token
    ffn: int  # width of an expert
    shared: int = 0  # total width of the experts that every token visits
    dense_layers: int = 0  # first layers, which have an MLP instead
    node_limit: int = 0  # most nodes that the experts of a token may lie on; 0 is no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention: ranks of the projections, and widths of a head."""

    q_rank: int
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
    mtp_layers: int = 0  # layers that predict a second token; only fixed strategies count them
    window: int = 0  # tokens of a sliding window on every second layer; as `mtp_layers`

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
            (float(latent.q_rank) * a * (latent.nope + latent.rope), 1),
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
