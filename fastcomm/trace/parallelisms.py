"""The parallelisms of a job: their names, the groups whose traffic is theirs, their looks.

A further parallelism is a row here. Where it is a dimension of its own in the layout of ranks,
`trace/rank_grid.py` and its size in `options.py` follow. A combination of classes of events is
a byte in `fastcomm_kernels.intervals`: a seventh parallelism needs a wider `Mask`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How a parallelism is drawn: colors, and a pattern for eyes that see few colors.

    `terminal` is a color of rich. `light` and `dark` are the colors of a page of that theme,
    each with the color of text on it. `pattern` is a path of SVG in a tile of 8 x 8, and
    `hatch` the same as background images of CSS.
    """

    terminal: str
    light: tuple[str, str]
    dark: tuple[str, str]
    pattern: str
    hatch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """One parallelism.

    `groups` are patterns of what Megatron-LM calls its process groups (without "_GLOO"), `mesh`
    the names of dimensions of a `DeviceMesh`. `axes` are the dimensions of the layout of dense
    layers whose groups are its own, joined by "+" where they are over several; `expert_axes`
    those of the layout of experts.
    """

    tag: str
    other_name: str | None = None  # in edits
    groups: tuple[str, ...] = ()
    mesh: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    expert_axes: tuple[str, ...] = ()
    look: Look


_LINES = "repeating-linear-gradient({}deg, transparent 0 {}px, var(--pattern) {}px {}px)"


def _lines(*degrees: int, gap: int = 3) -> str:
    return ", ".join(_LINES.format(angle, gap, gap, gap + 1) for angle in degrees)


_WHITE, _BLACK, _NIGHT = "#fff", "#17202a", "#11161c"
_DATA = r"DATA_PARALLEL_GROUP(_WITH_CP|_AG|_WITH_GTP_REMAT)*"

# The order is that of every table.
PARALLELISMS = (
    Parallelism(
        tag="DP",
        other_name="data",
        groups=(
            rf"(EXPERT_)?{_DATA}",
            rf"INT(RA|ER)_PARTIAL_(EXPERT_)?{_DATA}",  # instances of the distributed optimizer
            rf"HIERARCHICAL_(EXPERT_)?{_DATA}_L\d+",  # the same, for experts
            r"(EXPERT_)?GTP_WEIGHT_REMAT_GROUP",  # weights over ranks with different data
            r"WEIGHT_GRADIENT_COMM_GROUP",  # HyperCommGrid: over dp and cp
        ),
        mesh=(
            # torchtitan, transformers, PyTorch's tutorials
            *("dp", "dp_shard", "dp_replicate", "fsdp", "hsdp", "replicate", "shard"),
            # torchtitan, where experts are sharded
            *("dp_shard_mod_ep", "dp_shard_in_ep", "dp_mod_ep", "dp_in_ep", "efsdp"),
            # torchtitan: data loading, and the loss over all ranks with data of their own
            *("batch", "loss_mesh"),
            # Megatron-FSDP
            *("outer_fsdp_dp", "dp_outer", "dp_inner", "expert_dp", "expt_dp"),
            # verl, accelerate; NeMo, Lightning, DeepSpeed
            *("ddp", "infer_dp", "data_parallel"),
            # NeMo Automodel shards the weights of experts over it; OLMo-core, see EXCHANGED
            "ep_shard",
            # OLMo-core
            *("ep_replicate", "replicas", "shards"),
        ),
        # Weights are gathered over dp_shard, gradients reduced over dp_replicate, and with
        # context ranks over both.
        axes=("dp", "dp_shard", "dp_replicate", "dp+cp", "dp_shard+cp"),
        expert_axes=("edp", "edp_shard", "edp_replicate"),
        look=Look(
            terminal="blue",
            light=("#0072b2", _WHITE),
            dark=("#4aa5e3", _NIGHT),
            pattern="M-2 2L2-2M0 8L8 0M6 10L10 6",
            hatch=_lines(-45),
        ),
    ),
    Parallelism(
        tag="TP",
        other_name="tensor",
        groups=(
            r"TENSOR_MODEL_PARALLEL_GROUP",
            r"EXPERT_TENSOR_PARALLEL_GROUP",
            r"TP_BOOTSTRAP_GROUP_MPI",  # Transformer Engine's user buffers
        ),
        mesh=("tp", "etp", "expt_tp", "infer_tp", "tensor_parallel"),
        axes=("tp",),
        expert_axes=("etp",),
        look=Look(
            terminal="red",
            light=("#bd5200", _WHITE),
            dark=("#f28a3c", _NIGHT),
            pattern="M-2 6L2 10M0 0L8 8M6-2L10 2",
            hatch=_lines(45),
        ),
    ),
    Parallelism(
        tag="PP",
        other_name="pipeline",
        groups=(
            r"PIPELINE_MODEL_PARALLEL_GROUP",
            r"(POSITION_)?EMBEDDING_GROUP",  # first and last stage
        ),
        mesh=("pp", "infer_pp", "pipeline_parallel"),
        axes=("pp",),
        look=Look(
            terminal="magenta",
            light=("#aa4499", _WHITE),
            dark=("#d67fc7", _NIGHT),
            pattern="M0 0L8 8M0 8L8 0",
            hatch=_lines(45, -45, gap=4),
        ),
    ),
    Parallelism(
        tag="EP",
        other_name="expert",
        groups=(
            r"EXPERT_MODEL_PARALLEL_GROUP",
            r"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",  # tokens are dispatched here
        ),
        mesh=("ep", "expert_parallel"),
        expert_axes=("ep", "etp+ep"),  # tokens are dispatched over both
        look=Look(
            terminal="yellow",
            light=("#00805c", _WHITE),
            dark=("#35c79b", _NIGHT),
            pattern="M1 2h2M5 6h2",
            hatch="radial-gradient(var(--pattern) 1px, transparent 1.3px); "
            "background-size: 4px 4px",
        ),
    ),
    Parallelism(
        tag="CP",
        other_name="context",
        groups=(
            r"CONTEXT_PARALLEL_GROUP",
            r"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L\d+",
            r"HYBRID_DP_CP_GROUP_\d+",
        ),
        # "sp" is the sequence parallelism of Ulysses.
        mesh=("cp", "sp", "context_parallel", "sequence_parallel"),
        axes=("cp",),
        look=Look(
            terminal="cyan",
            light=("#3fa7dd", _BLACK),
            dark=("#93d3f7", _NIGHT),
            pattern="M0 4h8",
            hatch=_lines(0),
        ),
    ),
    Parallelism(
        tag="OTHER",
        groups=(
            r"MODEL_PARALLEL_GROUP",  # norms and flags over TP and PP, and so the rest
            r"CONTEXT_AND_MODEL_PARALLEL_GROUP",
            r"NON_DP_GROUP",
            r"TENSOR_AND_DATA_PARALLEL_GROUP(_WITH_CP)?",
            r"TENSOR_AND_CONTEXT_PARALLEL_GROUP",
            r"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP(_WITH_EGTP)?",
            r"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
        ),
        look=Look(
            terminal="bright_red",
            light=("#8f6a16", _WHITE),
            dark=("#cfa24a", _NIGHT),
            pattern="M4 0v8",
            hatch=_lines(90),
        ),
    ),
)

TAGS = tuple(row.tag for row in PARALLELISMS)
TAG = {name: number for number, name in enumerate(TAGS)}
LOOKS = {row.tag: row.look for row in PARALLELISMS}
