"""The transformer that is trained, as numbers: attention, MLP or experts, vocabulary."""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

VOCAB = 103168


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of SwiGLU experts in place of the MLP, in every layer but the first ones."""

    number: int
    # Experts of a token.
    top_k: int
    # Width of one.
    ffn: int
    # Width of those that every token visits, all together.
    shared: int = 0
    # The first layers keep the MLP.
    dense_layers: int = 0
    # A token's experts lie on so many nodes at most; 0: on any.
    node_limit: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Latent attention: all from short vectors. Ranks are theirs, other widths a head's."""

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one kind of layer is made of, apart from its routed experts."""

    # Elements of each weight matrix, and how many have this size.
    matrices: tuple[tuple[float, int], ...]
    parameters: float
    # Elements a token that the MLP or the experts keep, in multiples of hidden.
    wide: float
    experts: Experts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The shape of a decoder: `kinds` of layers, the usual one first."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    layers: int
    ffn: int
    vocab: int = VOCAB
    mlp: str = "swiglu"
    # Of the original's table: 0 for any other model.
    billions: float = 0
    # Width of a head where it is not hidden / heads.
    head_dim: int = 0
    latent: Latent | None = None
    experts: Experts | None = None
    # Whether embedding and head are one matrix.
    tied: bool = False

    @property
    def group(self) -> float:
        """Key and value heads as a share of the heads."""
        return self.kv_heads / self.heads

    @property
    def breadth(self) -> float:
        """Mean width of queries and values, all heads, in multiples of hidden."""
        if self.latent:
            each = (self.latent.nope + self.latent.rope + self.latent.value) / 2
            return self.heads * each / self.hidden
        return self.heads * self.head_dim / self.hidden if self.head_dim else 1.0

    @property
    def rotary(self) -> int:
        """Width that positions turn, of a head."""
        if self.latent:
            return self.latent.rope
        return self.head_dim or self.hidden // self.heads

    @property
    def attention(self) -> tuple[tuple[float, int], ...]:
        """Elements of each matrix around attention, and how many have this size."""
        if self.latent is None:
            square = float(self.hidden) ** 2 * self.breadth
            return ((1 + 2 * self.group) * square, 1), (square, 1)
        h, a, cut = float(self.hidden), self.heads, self.latent
        return (
            (h * cut.q_rank, 1),
            (float(cut.q_rank) * a * (cut.nope + cut.rope), 1),
            (h * (cut.kv_rank + cut.rope), 1),
            (float(cut.kv_rank) * a * (cut.nope + cut.value), 1),
            (float(a) * cut.value * h, 1),
        )

    @property
    def matrices(self) -> tuple[tuple[float, int], ...]:
        """The same of a layer without experts."""
        mlp = (float(self.hidden) * self.ffn, 3 if self.mlp == "swiglu" else 2)
        return (*self.attention, mlp)

    @property
    def layer_parameters(self) -> float:
        """Parameters of such a layer, its norms included for SwiGLU as the original counts."""
        norms = 2 * self.hidden if self.mlp == "swiglu" else 0
        return norms + sum(elements * count for elements, count in self.matrices)

    @property
    def expert_parameters(self) -> float:
        """Parameters of the routed experts of a layer."""
        experts = self.experts
        return 3.0 * self.hidden * experts.ffn * experts.number if experts else 0.0

    @property
    def kinds(self) -> tuple[Layer, ...]:
        """The usual layer; then the one without experts, where the first layers have none."""
        return _kinds(self)

    def counts(self, place: int, pp: int) -> tuple[int, ...]:
        """Layers of each kind on a stage; the last stages hold one more."""
        least, longer = divmod(self.layers, pp)
        first = place * least + max(0, place - (pp - longer))
        mine = least + int(place >= pp - longer)
        dense = self.experts.dense_layers if self.experts else 0
        plain = min(max(dense - first, 0), mine)
        return (mine - plain, plain)[: len(self.kinds)]

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> float:
        """Parameters of the whole model."""
        return self._of_all(self.expert_parameters)

    @property
    def active(self) -> float:
        """Parameters that a token meets."""
        experts = self.experts
        return self._of_all(
            self.expert_parameters * experts.top_k / experts.number if experts else 0.0
        )

    def _of_all(self, experts: float) -> float:
        layers = sum(
            count * (kind.parameters + (experts if kind.experts else 0.0))
            for kind, count in zip(self.kinds, self.counts(0, 1), strict=True)
        )
        return (1 if self.tied else 2) * self.embedding + layers + self.hidden

    @property
    def wide(self) -> float:
        """Elements a token that the MLP keeps for the backward, in multiples of hidden."""
        if self.mlp != "swiglu":
            return 16.0 * self.ffn / (4 * self.hidden)
        usual = self.ffn == swiglu_width(self.hidden)
        return 64 / 3 if usual else 8 * self.ffn / self.hidden

    def flops(self, seq_len: int, passes: int = 3) -> float:
        """FLOPs a token: 3 passes are the model's, 4 those with recomputation."""
        attention = 4.0 * seq_len * self.hidden * self.breadth
        layers = sum(
            passes * count * (2 * self._linear(kind) + attention)
            for kind, count in zip(self.kinds, self.counts(0, 1), strict=True)
        )
        return layers + 6.0 * self.embedding

    def _linear(self, kind: Layer) -> float:
        """Elements of a layer that a token is multiplied with."""
        if experts := kind.experts:
            routed = self.expert_parameters * experts.top_k / experts.number
            return sum(elements * count for elements, count in kind.matrices) + routed
        # A usual width counts as 8/3 of hidden, unrounded, as everyone's MFU does.
        mlp = 8.0 * self.hidden**2 if self.wide in {64 / 3, 16.0} else 0.0
        mlp = mlp or self.matrices[-1][0] * self.matrices[-1][1]
        return sum(elements * count for elements, count in self.attention) + mlp


@lru_cache(maxsize=64)
def _kinds(model: Model) -> tuple[Layer, ...]:
    plain = Layer(matrices=model.matrices, parameters=model.layer_parameters, wide=model.wide)
    if model.experts is None:
        return (plain,)
    usual = _with_experts(model, model.experts)
    return (usual, plain) if model.experts.dense_layers else (usual,)


def _with_experts(model: Model, experts: Experts) -> Layer:
    h = float(model.hidden)
    shared = ((h * experts.shared, 3),) if experts.shared else ()
    matrices = (*model.attention, (h * experts.number, 1), *shared)
    # A copy of a token: gathered, three widths, and its output before the weighted sum.
    copies = experts.top_k * (4 + 8 * experts.ffn / h)
    return Layer(
        matrices=matrices,
        parameters=2 * h + sum(elements * count for elements, count in matrices),
        wide=8 * experts.shared / h + copies,
        experts=experts,
    )


def swiglu_width(hidden: int) -> int:
    """Width of a SwiGLU MLP as InternLM rounds it."""
    return 256 * ceil(int(hidden * 8 / 3) / 256)
