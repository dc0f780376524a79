"""The parallelism that a framework's description of a process group stands for, as data.

PyTorch writes descriptions into traces since release 2.4 (`group_desc` of `new_group`). A
dimension of a `DeviceMesh` is described as ``mesh_<name>``; an unnamed one as ``mesh_dim_<n>``,
which says nothing, as does ``undefined``.
"""

import re
from functools import lru_cache

# Descriptions whose group is the world: DP where gradients cross all of it.
WORLD = ("default_pg", "mesh_default")
# Descriptions that say nothing.
SILENT = re.compile(r"undefined|mesh_dim_\d+|")

_DATA = r"DATA_PARALLEL_GROUP(_WITH_CP|_AG|_WITH_GTP_REMAT)*"

# Descriptions of Megatron-LM without "_GLOO", as a pattern of the whole text, and their tags.
DESCRIPTIONS = (
    (r"TENSOR_MODEL_PARALLEL_GROUP", "TP"),
    (r"EXPERT_TENSOR_PARALLEL_GROUP", "TP"),
    (r"TP_BOOTSTRAP_GROUP_MPI", "TP"),  # Transformer Engine's user buffers
    (rf"(EXPERT_)?{_DATA}", "DP"),
    (rf"INT(RA|ER)_PARTIAL_(EXPERT_)?{_DATA}", "DP"),  # instances of the distributed optimizer
    (rf"HIERARCHICAL_(EXPERT_)?{_DATA}_L\d+", "DP"),  # the same, for experts
    (r"(EXPERT_)?GTP_WEIGHT_REMAT_GROUP", "DP"),  # weights over ranks with different data
    (r"WEIGHT_GRADIENT_COMM_GROUP", "DP"),  # HyperCommGrid: over dp and cp
    (r"PIPELINE_MODEL_PARALLEL_GROUP", "PP"),
    (r"(POSITION_)?EMBEDDING_GROUP", "PP"),  # first and last stage
    (r"CONTEXT_PARALLEL_GROUP", "CP"),
    (r"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L\d+", "CP"),
    (r"HYBRID_DP_CP_GROUP_\d+", "CP"),
    (r"EXPERT_MODEL_PARALLEL_GROUP", "EP"),
    (r"EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EP"),  # tokens are dispatched here
    (r"MODEL_PARALLEL_GROUP", "OTHER"),  # norms and flags over TP and PP, and so the rest
    (r"CONTEXT_AND_MODEL_PARALLEL_GROUP", "OTHER"),
    (r"NON_DP_GROUP", "OTHER"),
    (r"TENSOR_AND_DATA_PARALLEL_GROUP(_WITH_CP)?", "OTHER"),
    (r"TENSOR_AND_CONTEXT_PARALLEL_GROUP", "OTHER"),
    (r"EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP(_WITH_EGTP)?", "OTHER"),
    (r"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", "OTHER"),
)

# Dimensions of a DeviceMesh; a description is "mesh_" and these joined by "_".
MESH = {
    # torchtitan, transformers, PyTorch's tutorials
    "dp": "DP",
    "dp_shard": "DP",
    "dp_replicate": "DP",
    "fsdp": "DP",
    "hsdp": "DP",
    "replicate": "DP",
    "shard": "DP",
    "tp": "TP",
    "pp": "PP",
    "cp": "CP",
    "ep": "EP",
    # torchtitan, where experts are sharded
    "dp_shard_mod_ep": "DP",
    "dp_shard_in_ep": "DP",
    "dp_mod_ep": "DP",
    "dp_in_ep": "DP",
    "efsdp": "DP",
    "etp": "TP",
    # torchtitan: data loading, and the loss over all ranks with data of their own
    "batch": "DP",
    "loss_mesh": "DP",
    # Megatron-FSDP
    "outer_fsdp_dp": "DP",
    "dp_outer": "DP",
    "dp_inner": "DP",
    "expert_dp": "DP",
    "expt_dp": "DP",
    "expt_tp": "TP",
    # verl, accelerate
    "ddp": "DP",
    "infer_dp": "DP",
    "infer_tp": "TP",
    "infer_pp": "PP",
    "sp": "CP",  # sequence parallelism of Ulysses
    # NeMo, Lightning, DeepSpeed
    "data_parallel": "DP",
    "tensor_parallel": "TP",
    "pipeline_parallel": "PP",
    "context_parallel": "CP",
    "sequence_parallel": "CP",
    "expert_parallel": "EP",
    # NeMo Automodel shards the weights of experts over it; OLMo-core, see EXCHANGED
    "ep_shard": "DP",
    # OLMo-core
    "ep_replicate": "DP",
    "replicas": "DP",
    "shards": "DP",
}
# OLMo-core gives this name to the dimension of the experts: with all-to-alls it is EP.
EXCHANGED = ("ep_shard",)


@lru_cache(maxsize=4096)
def tag_of_description(description: str, exchanges: bool = False) -> str | None:
    """Return the tag that a framework's description stands for; None where it says nothing.

    Parameters
    ----------
    description
        Of the process group. The world (`WORLD`) says nothing without a grid.
    exchanges
        Whether the group does all-to-alls, which decides where two frameworks use one name.

    """
    text = description.replace("_GLOO", "")
    for pattern, tag in DESCRIPTIONS:
        if re.fullmatch(pattern, text):
            return tag
    dimensions = text.removeprefix("mesh_")
    if exchanges and dimensions in EXCHANGED:
        return "EP"
    if text.startswith("mesh_") or dimensions in MESH:
        return _tag_of_mesh(dimensions)
    return None


_MESH_NAMES = "|".join(sorted(MESH, key=len, reverse=True))


def _tag_of_mesh(dimensions: str) -> str | None:
    """Return the common tag of joined dimensions, DP for dp with cp, else OTHER."""
    if not re.fullmatch(rf"({_MESH_NAMES})(_({_MESH_NAMES}))*", dimensions):
        return None
    if dimensions in MESH:
        return MESH[dimensions]
    tags = {MESH[name] for name in re.findall(rf"({_MESH_NAMES})(?:_|$)", dimensions)}
    if tags == {"DP", "CP"}:
        return "DP"
    return tags.pop() if len(tags) == 1 else "OTHER"
