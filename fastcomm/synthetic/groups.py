"""Process groups as Megatron makes them: who is in one, what it is called, which tag it has."""

from dataclasses import dataclass

from fastcomm.synthetic.job import Job

# In the order in which they are made; the world comes first and is "0".
DESCRIPTIONS = {
    "dp": "DATA_PARALLEL_GROUP",
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "edp": "EXPERT_DATA_PARALLEL_GROUP",
}
TAGS = {"dp": "DP", "tp": "TP", "pp": "PP", "ep": "EP", "edp": "DP", "world": "OTHER"}


@dataclass(frozen=True, slots=True)
class Group:
    """One process group of which a rank is a member."""

    tag: str
    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many ranks are in it."""
        return len(self.ranks)


def groups(job: Job, rank: int) -> dict[str, Group]:
    """The groups this rank is in, by kind."""
    world = Group("OTHER", "0", "default_pg", tuple(range(job.ranks)))
    found = {"world": world}
    made = 1
    for kind, description in DESCRIPTIONS.items():
        first, stride, size, index = _progression(job, rank, kind)
        members = tuple(range(first, first + stride * size, stride))
        found[kind] = Group(TAGS[kind], str(made + index), description, members)
        made += job.ranks // size
    return found


def group_count(job: Job) -> int:
    """How many groups the whole job has, the world among them."""
    sizes = (job.dp, job.tp, job.pp, job.ep, job.expert_data)
    return 1 + sum(job.ranks // size for size in sizes)


def _progression(job: Job, rank: int, kind: str) -> tuple[int, int, int, int]:
    """First rank, stride and size of the rank's group of a kind, and its number in the kind."""
    tp, dp, pp = job.place(rank)
    stage = pp * job.tp * job.dp
    block, place = divmod(dp, job.ep)
    if kind == "tp":
        return rank - tp, 1, job.tp, rank // job.tp
    if kind == "pp":
        return rank - stage, job.tp * job.dp, job.pp, rank - stage
    if kind == "dp":
        return stage + tp, job.tp, job.dp, pp * job.tp + tp
    if kind == "ep":
        number = (pp * job.expert_data + block) * job.tp + tp
        return stage + tp + job.tp * job.ep * block, job.tp, job.ep, number
    number = (pp * job.ep + place) * job.tp + tp
    return stage + tp + job.tp * place, job.tp * job.ep, job.expert_data, number
