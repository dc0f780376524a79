"""Which hangs are recorded: the planted fault of each job, and the answers that are right.

Seeds vary shapes of the mesh, ranks, steps, calls, and which files are left beside the dumps.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import programs

_SHAPES = ((2, 2), (2, 3), (3, 2), (2, 4), (4, 2))
_LINES = ((4, 1), (5, 1), (6, 1))  # shapes of jobs with data parallelism alone
_LEAST_STEP, _MOST_STEP = 3, 6  # in which a fault is planted
_ORDER = ("order", "mismatch_op", "mismatch_size")
_HALTS = ("sleep", "lock", "pipe")
_FORMS = ("rank_N.json", "rank_N.pickle", "comm_lib_trace_rank_N", "_dump_N", "rank_N.both")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A job with its planted fault. `culprits` are the ranks that the fault is planted in."""

    name: str
    workload: str
    seed: int
    shape: tuple[int, int]
    planted: str = "nothing"
    fault: str = ""
    culprits: tuple[int, ...] = ()
    step: int = 0  # in which the fault happens
    place: str = ""  # of a step, at which a rank halts
    how: str = ""  # a rank halts, or ends its loop
    calls: tuple[str, ...] = ()  # that the fault changes
    change: Mapping[str, Any] = field(default_factory=dict)
    members: tuple[int, ...] = ()  # of a group that is made in the step of the fault
    accept: tuple[tuple[str, tuple[int, ...]], ...] = (("none", ()),)
    moment: str = "still"  # of the dump: still, running, beside, late, finished
    steps: int = 9
    timeout_s: int = 0  # of all groups; 0: longer than the job
    entries: int = 2000  # that a recorder keeps
    form: str = _FORMS[0]  # names and formats of the dumps
    lost: tuple[int, ...] = ()  # ranks whose dump is lost
    has_stacks: bool = False
    has_logs: bool = False
    has_hook: bool = False
    slowness: int = 1  # of what a rank does beside its calls
    checkpoint_step: int = 0  # in which a thread begins a checkpoint, with a group of its own

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.shape[0] * self.shape[1]

    def truth(self) -> dict[str, Any]:
        """Return what was planted, and what is right to answer."""
        accept = [{"kind": kind, "culprits": [*ranks]} for kind, ranks in self.accept]
        hang = self.accept[0][0] != "none"
        left_out = ("accept", "name", "culprits", "change", "calls")
        more = {key: value for key, value in asdict(self).items() if key not in left_out}
        first = accept[0]
        return {"hang": hang, **first, "accept": accept, "world": self.world, **more}


def plans(seed: int) -> list[Plan]:
    """Return the jobs of a seed."""
    made = []
    for name in PLANS:
        rng = random.Random(f"{name} {seed}")
        kind, _, workload = name.partition("-")
        workload, _, _ = workload.partition("-")
        base = _base(name, workload, seed, rng)
        made.append(_KINDS[kind](base, rng))
    return made


def _base(name: str, workload: str, seed: int, rng: random.Random) -> Plan:
    wide = programs.DIMENSIONS[workload][1]
    return Plan(
        name=f"{name}-{seed}",
        workload=workload,
        seed=rng.randrange(1 << 30),
        shape=rng.choice(_SHAPES if wide else _LINES),
        step=rng.randint(_LEAST_STEP, _MOST_STEP),
        form=rng.choice(_FORMS),
        has_stacks=rng.random() < 0.4,
        has_logs=rng.random() < 0.6,
    )


def _accept(kinds: Iterable[str], *ranks: Sequence[int]) -> tuple[Any, ...]:
    """Return all pairs of some kinds and sets of ranks."""
    sets = dict.fromkeys(tuple(sorted({*one})) for one in ranks if one)
    return tuple((kind, one) for one in sets for kind in kinds)


def _own_calls(plan: Plan, rank: int = 0) -> list[programs.Call]:
    return programs.calls(plan.workload, plan.shape, rank, plan.seed)


def _places(plan: Plan) -> list[str]:
    """Return the places of a step at which a rank can halt."""
    own = [f"before {call.name}" for call in _own_calls(plan) if not call.peer]
    return own or ["before_forward", "before_backward", "after_backward"]


def _stuck(plan: Plan, rng: random.Random) -> Plan:
    """A rank, or two, never go on in the code of the job."""
    count = 2 if "two" in plan.name else 1
    ranks = rng.sample(range(plan.world), count)
    place = rng.choice(_places(plan))
    if count > 1 and plan.workload in ("sub", "moe"):
        place = "before loss_reduce"
    how = rng.choice(_HALTS)
    return replace(
        plan, fault="halt", culprits=tuple(sorted(ranks)), place=place, how=how,
        accept=_accept(["not_arrived"], ranks),
        planted=f"ranks {sorted(ranks)} never return from {how!r} at {place!r}",
    )  # fmt: skip


def _loading(plan: Plan, rng: random.Random) -> Plan:
    stuck = _stuck(plan, rng)
    return replace(
        stuck, place="data", how="queue", planted=f"rank {stuck.culprits[0]} waits for data"
    )


def _dead(plan: Plan, rng: random.Random) -> Plan:
    stuck = _stuck(plan, rng)
    place = stuck.place
    if rng.random() < 0.5:
        place = place.replace("before ", "after ").replace("before_forward", "after_backward")
    return replace(
        stuck, how="kill", place=place, accept=_accept(["missing_rank"], stuck.culprits),
        planted=f"rank {stuck.culprits[0]} is killed at {place!r}",
    )  # fmt: skip


def _frozen(plan: Plan, rng: random.Random) -> Plan:
    stuck = _stuck(plan, rng)
    return replace(
        stuck, how="stop", accept=_accept(["missing_rank", "not_arrived"], stuck.culprits),
        planted=f"rank {stuck.culprits[0]} is stopped (SIGSTOP) at {stuck.place!r}",
    )  # fmt: skip


def _expired(plan: Plan, rng: random.Random) -> Plan:
    return replace(_stuck(plan, rng), timeout_s=3)


def _overflow(plan: Plan, rng: random.Random) -> Plan:
    return replace(_stuck(plan, rng), entries=12)


def _lost(plan: Plan, rng: random.Random) -> Plan:
    stuck = _stuck(plan, rng)
    others = [rank for rank in range(plan.world) if rank not in stuck.culprits]
    return replace(stuck, lost=(rng.choice(others),))


def _listed(plan: Plan, rng: random.Random, fault: str, names: Sequence[str]) -> Plan:
    """A rank leaves out, adds or swaps calls once."""
    rank = rng.randrange(plan.world)
    return replace(
        plan, fault=fault, culprits=(rank,), calls=tuple(names), accept=_accept(_ORDER, [rank]),
        planted=f"rank {rank}: {fault} of {', '.join(names)}",
    )  # fmt: skip


def _skip(plan: Plan, rng: random.Random) -> Plan:
    names = [call.name for call in _own_calls(plan) if call.op in programs.FOR_ALL]
    return _listed(plan, rng, "skip", [rng.choice(names)])


def _extra(plan: Plan, rng: random.Random) -> Plan:
    if not (own := _own_calls(plan)):
        return replace(
            _listed(plan, rng, "world_gather", ["all_gather"]), place="before_forward"
        )
    names = [call.name for call in own if call.op in programs.FOR_ALL]
    return _listed(plan, rng, "extra", [rng.choice(names)])


def _swap(plan: Plan, rng: random.Random) -> Plan:
    """Two calls of one group."""
    pairs = {"sub": ("tp_gather", "tp_reduce"), "moe": ("dense_grads", "loss_reduce")}
    return _listed(plan, rng, "swap", pairs[plan.workload])


def _swap_groups(plan: Plan, rng: random.Random) -> Plan:
    """Calls of two groups that share more than one rank: else nothing would hang."""
    pairs = {
        "sub": [("ep_gather", "loss_reduce"), ("grad_reduce", "loss_reduce")],
        "moe": [("expert_grads", "dense_grads"), ("combine", "dense_grads")],
    }
    return _listed(plan, rng, "swap", rng.choice(pairs[plan.workload]))


def _caught(plan: Plan, rng: random.Random) -> Plan:
    rank = rng.randrange(plan.world)
    names = [call.name for call in _own_calls(plan) if call.group != "world"][1:]
    place = f"before {rng.choice(names)}"
    return replace(
        plan, fault="caught", culprits=(rank,), place=place,
        accept=_accept((*_ORDER, "not_arrived"), [rank]),
        planted=f"rank {rank} catches an error at {place!r} and goes on with the next batch",
    )  # fmt: skip


def _no_sync(plan: Plan, rng: random.Random) -> Plan:
    return replace(_listed(plan, rng, "no_sync", []), planted="one rank runs under no_sync()")


def _argument(plan: Plan, rng: random.Random, kind: str, name: str, **change: Any) -> Plan:
    rank = rng.randrange(plan.world)
    return replace(
        plan, fault="change", culprits=(rank,), calls=(name,), change=change,
        accept=_accept([kind], [rank]), has_logs=True,
        planted=f"rank {rank} calls {name} with {change}",
    )  # fmt: skip


def _op(plan: Plan, rng: random.Random) -> Plan:
    name = rng.choice(("grad_reduce", "tp_reduce"))
    op = rng.choice(("broadcast", "all_to_all", "barrier"))
    return _argument(plan, rng, "mismatch_op", name, op=op)


def _size(plan: Plan, rng: random.Random) -> Plan:
    name = rng.choice(("grad_reduce", "tp_reduce", "tp_gather", "ep_gather"))
    sizes = {call.name: call.size for call in _own_calls(plan)}
    return _argument(plan, rng, "mismatch_size", name, size=rng.choice((1, 2000)) + sizes[name])


def _dtype(plan: Plan, rng: random.Random) -> Plan:
    name = rng.choice(("grad_reduce", "tp_reduce", "tp_gather"))
    return _argument(
        plan, rng, "mismatch_dtype", name, dtype=rng.choice(("float64", "float16"))
    )


def _root(plan: Plan, rng: random.Random) -> Plan:
    """A rank takes itself for the root."""
    op = plan.name.split("-")[2]
    call = next(call for call in _own_calls(plan) if call.op == op)
    members = rng.choice(programs.groups(plan.workload, plan.shape)[call.group])
    place = rng.randrange(1, len(members))
    rank, root = members[place], members[0]
    planted = f"rank {rank} calls {call.name} with itself as root, the others with rank {root}"
    kinds = ("mismatch_root", "stalled")
    return replace(
        plan, fault="change", culprits=(rank,), calls=(call.name,), change={"root": place},
        members=tuple(members), accept=_accept(kinds, [rank], [root, rank]),
        planted=planted,
    )  # fmt: skip


def _message(plan: Plan, rng: random.Random) -> Plan:
    """A rank leaves out a message of the forward pass."""
    is_send = plan.name.startswith("no_send")
    stages = plan.shape[1]
    column = rng.choice(programs.groups(plan.workload, plan.shape)["pp"])
    stage = rng.randrange(stages - 1) if is_send else rng.randrange(1, stages)
    rank, peer = column[stage], column[stage + (1 if is_send else -1)]
    name = "send_forward" if is_send else "recv_forward"
    kinds = ("p2p_unmatched", "p2p_order")
    return replace(
        plan, fault="skip", culprits=(rank,), calls=(name,), has_stacks=True,
        has_hook=rng.random() < 0.5,
        accept=_accept(kinds, [rank], [peer], [rank, peer], column),
        planted=f"rank {rank} leaves out {name}, which rank {peer} waits for",
    )  # fmt: skip


def _circle(plan: Plan, rng: random.Random) -> Plan:
    shape = (rng.choice((4, 6)), 1)
    ranks = [*range(shape[0])]
    accept = _accept(("p2p_order", "p2p_unmatched"), ranks, ranks[::2], ranks[1::2])
    return replace(
        plan, shape=shape, fault="sends_first", culprits=tuple(ranks), accept=accept,
        has_stacks=True, has_hook=rng.random() < 0.5, planted="every rank sends first",
    )  # fmt: skip


def _creation(plan: Plan, rng: random.Random) -> Plan:
    """All ranks make a group, except one of its members."""
    members = sorted(rng.sample(range(plan.world), rng.randint(2, plan.world - 1)))
    rank = rng.choice(members)
    makers = [one for one in members if one != rank]
    others = [one for one in range(plan.world) if one != rank]
    kinds = ("group_creation", "not_arrived", "order")
    return replace(
        plan, fault="creation", culprits=(rank,), members=tuple(members), has_stacks=True,
        accept=_accept(kinds, [rank], makers, others),
        planted=f"rank {rank} does not call new_group({members}), the others do",
    )  # fmt: skip


def _uneven(plan: Plan, rng: random.Random) -> Plan:
    rank = rng.randrange(plan.world)
    how = rng.choice(("gone", "barrier"))
    return replace(
        plan, fault="uneven", culprits=(rank,), how=how,
        accept=_accept(("not_arrived", *_ORDER), [rank]),
        planted=f"rank {rank} has {plan.step} batches, the others {plan.steps}; then {how}",
    )  # fmt: skip


def _teardown(plan: Plan, rng: random.Random) -> Plan:
    rank = rng.randrange(plan.world)
    return replace(
        plan, fault="teardown", culprits=(rank,),
        accept=_accept(("order", "not_arrived"), [rank]),
        planted=f"rank {rank} calls one more all_reduce while the others destroy their groups",
    )  # fmt: skip


def _running(plan: Plan, _rng: random.Random) -> Plan:
    return replace(plan, moment="running", step=8, steps=10_000)


def _running_lost(plan: Plan, rng: random.Random) -> Plan:
    return replace(_running(plan, rng), lost=(rng.randrange(plan.world),))


def _finished(plan: Plan, _rng: random.Random) -> Plan:
    return replace(plan, moment="finished")


def _straggler(plan: Plan, rng: random.Random) -> Plan:
    rank = rng.randrange(plan.world)
    return replace(
        _running(plan, rng), fault="straggler", culprits=(rank,), place="data",
        planted=f"rank {rank} is 0.3 s late in every step",
    )  # fmt: skip


def _late(plan: Plan, rng: random.Random) -> Plan:
    rank = rng.randrange(plan.world)
    return replace(
        plan, moment="late", steps=10_000, fault="late", culprits=(rank,), place="data",
        planted=f"rank {rank} is 4 s late once; a second dump shows that the job goes on",
    )  # fmt: skip


def _checkpoint(plan: Plan, _rng: random.Random) -> Plan:
    return replace(
        plan, moment="beside", steps=100_000, step=8, checkpoint_step=2, slowness=10,
        planted="a thread writes a checkpoint, which takes longer than many steps",
    )  # fmt: skip


def _beside(plan: Plan, rng: random.Random) -> Plan:
    """A rank is stuck, or dead, while threads write a checkpoint."""
    halted = (_dead if plan.name.startswith("dead") else _stuck)(plan, rng)
    step = rng.randint(20, 60)
    planted = f"{halted.planted}, while threads write a checkpoint"
    return replace(
        halted, step=step, steps=2 * step, checkpoint_step=2, slowness=10, planted=planted
    )


_KINDS: dict[str, Callable[[Plan, random.Random], Plan]] = {
    "stuck": _stuck,
    "two_stuck": _stuck,
    "loading": _loading,
    "dead": _dead,
    "frozen": _frozen,
    "expired": _expired,
    "overflow": _overflow,
    "lost": _lost,
    "skip": _skip,
    "extra": _extra,
    "swap": _swap,
    "swap_groups": _swap_groups,
    "caught": _caught,
    "no_sync": _no_sync,
    "op": _op,
    "size": _size,
    "dtype": _dtype,
    "root": _root,
    "no_send": _message,
    "no_recv": _message,
    "circle": _circle,
    "creation": _creation,
    "uneven": _uneven,
    "teardown": _teardown,
    "late": _late,
    "checkpoint": _checkpoint,
    "stuck_beside": _beside,
    "dead_beside": _beside,
    "running": _running,
    "running_lost": _running_lost,
    "finished": _finished,
    "straggler": _straggler,
}
PLANS = (
    *("stuck-sub", "stuck-moe", "stuck-ddp", "stuck-fsdp", "stuck-tpdp", "stuck-pipeline"),
    *("two_stuck-sub", "loading-sub", "loading-ddp", "loading-fsdp", "loading-tpdp"),
    *("expired-sub", "expired-moe", "overflow-sub", "overflow-moe", "lost-sub"),
    *("dead-sub", "dead-moe", "dead-ddp", "dead-fsdp", "frozen-sub", "frozen-ddp"),
    *("skip-sub", "skip-moe", "no_sync-ddp", "extra-sub", "extra-moe", "extra-tpdp"),
    *("extra-fsdp", "swap-sub", "swap-moe", "swap_groups-sub", "swap_groups-moe"),
    *("caught-sub", "caught-moe", "op-sub", "size-sub", "dtype-sub"),
    *("root-sub-broadcast", "root-sub-scatter", "root-sub-gather"),
    *("no_send-pipeline", "no_recv-pipeline", "circle-ring", "creation-sub"),
    *("uneven-sub", "uneven-ddp", "uneven-fsdp", "teardown-sub"),
    *("running-sub", "running-moe", "running-fsdp", "running-tpdp", "running-pipeline"),
    *("running_lost-moe", "finished-moe", "finished-ddp", "finished-tpdp"),
    *("straggler-sub", "straggler-ddp", "late-sub", "late-fsdp"),
    *("checkpoint-sub", "checkpoint-moe", "checkpoint-ddp"),
    *("stuck_beside-sub", "stuck_beside-moe", "stuck_beside-ddp", "dead_beside-sub"),
)
