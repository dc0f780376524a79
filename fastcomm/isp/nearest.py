"""Where a search finds nothing: what kept all out, and the nearest that would work."""

from collections.abc import Iterable

from fastcomm.cluster.quantities import format_gib
from fastcomm.isp.question import Question


def nearest(
    question: Question,
    rejected: dict[str, int],
    least_memory: float | None,
    unsuited: tuple[int, ...],
) -> str:
    """One sentence, by what a search has counted."""
    if least_memory is not None:
        need = format_gib(least_memory)
        return f"nothing fits: the least memory that any strategy needs is {need}"
    if unsuited:
        unit = min(unsuited) * question.seq_len
        near = max(unit, round(question.batch.most / unit) * unit)
        return (
            f"no strategy: global batch {question.batch.most} is no multiple of "
            f"data-parallel degree x sequence length for any of them; {near} would be"
        )
    if rejected.get("schedule"):
        return (
            "no strategy: each has fewer micro-batches than pipeline stages; a smaller pp, a "
            "larger global batch or --any-schedule would work"
        )
    fell = [f"{count} by {reason}" for reason, count in rejected.items() if count]
    return f"no strategy: rejected {', '.join(fell)}" if fell else _degrees(question)


def _degrees(question: Question) -> str:
    """Which degree that was asked for divides nothing that it has to."""
    layers = {question.model.layers}
    stages = [pp for pp in question.pp or (1,) if question.model.layers % pp == 0]
    wholes = {
        "pp": (question.pp, set(question.world_sizes)),
        "sp": (question.sp, _over(question.world_sizes, question.pp)),
        "ep": (question.ep, _over(question.world_sizes, question.pp)),
        "interleave": (question.interleave, _over(layers, stages)),
    }
    for name, (asked, whole) in wholes.items():
        if asked and not any(each % degree == 0 for each in whole for degree in asked):
            most = max(whole, default=1)
            near = max(n for n in range(1, min(asked) + 1) if most % n == 0)
            parts = " or ".join(str(each) for each in sorted(whole)) or "one layer"
            return (
                f"no strategy: {name} {', '.join(map(str, asked))} does not divide {parts} "
                f"({_WHOLES[name]}); the nearest below is {near}"
            )
    return "no strategy: no pp, sp, ep and interleave divide the GPUs and layers together"


_WHOLES = {
    "pp": "GPUs",
    "sp": "GPUs of a stage",
    "ep": "GPUs of a stage",
    "interleave": "layers of a stage",
}


def _over(wholes: Iterable[int], parts: Iterable[int] | None) -> set[int]:
    return {each // part for each in wholes for part in parts or (1,) if each % part == 0}
