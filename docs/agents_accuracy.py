"""Make runs with planted faults and questions about them, and judge the answers of agents.

    python docs/agents_accuracy.py make FOLDER [--seed 1] [--large 1]
    python docs/agents_accuracy.py client FOLDER ANSWERS.json
    python docs/agents_accuracy.py judge FOLDER ANSWERS.json

`make` writes 60 runs below `FOLDER/runs`: made-up jobs of all faults and of none, recorded
jobs, and jobs that hang. `questions.json` has five questions for each, and says how to answer
them. `truth.json` has the right answers: agents must not see it. `client` asks the server as a
script would, by fixed rules, and measures tokens (as answers count them) and time; its
answers show what the tools tell without an agent's judgment. `judge` compares answers of
anybody.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import anyio
from mcp import Client, StdioServerParameters, stdio_client

from fastcomm.agents.answer import tokens_of
from fastcomm.synthetic.catalog import groups
from fastcomm.synthetic.hangs.dumps import drawn_form, write_dumps
from fastcomm.synthetic.hangs.faults import HANG_FAULTS, HEALTHY, planted
from fastcomm.synthetic.job import FAULTS, IDLE_FAULTS, Job
from fastcomm.synthetic.play import steps
from fastcomm.synthetic.traces import write

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "tests" / "jobs" / "recorded"
HANGS = ROOT / "tests" / "data" / "hangs"
COUNT, LARGE_RANKS = 60, 512
_SIZES = (8, 16, 32)
_OF_RANKS, _OF_ALL, _HEALTHY_RUNS = (
    4,
    2,
    4,
)  # runs of each fault of a rank, of all ranks; of none
_CLEAN = ("ddp-straggler", "ddp-sleep", "tp_fsdp-straggler")
_MADE_HANGS, _MADE_HEALTHY = 8, 2
_NAMES = {"slow_gpu": "straggler"}
# Faults of recorded jobs: the accepted causes.
_CAUSES = {
    "straggler": ("straggler",),
    "sleep": ("jittery_host",),
    "loader": ("jittery_host", "data_loading"),
    "gc": ("garbage_collection",),
    "neighbor": ("straggler", "jittery_host"),
    "link": ("slow_link",),
    "stage": ("imbalanced_stage",),
    "experts": ("hot_expert",),
}
_STAGE = {"pp": [2], "pp_dp": [2, 3]}
SLOW = {
    "cause": "What costs the job time in its steps? One of: straggler (a rank computes longer "
    "at the same work), slow_link, jittery_host (a host launches late), imbalanced_stage, "
    "hot_expert; or of all ranks: launch_bound, synchronization, data_loading, "
    "garbage_collection, kernel_gaps; or none, where no fault stands out.",
    "ranks": "Which ranks are at fault? A list; empty where it is no rank, or all of them.",
    "step_ms": "What is the mean step time in ms?",
    "cost_ms": "How many ms does the fault cost in a mean step? 0 without one.",
    "healing_helps": "Would the step be shorter by 1 % or more, if the slowest rank, link or "
    "stage were as fast as its peers? true or false.",
}
HUNG = {
    "hangs": "Does the job hang? true or false.",
    "kind": f"What is wrong? One of: {', '.join(HANG_FAULTS)}; order; none.",
    "ranks": "Which ranks are at fault? A list, empty if none is.",
    "missing": "Of which ranks is there no dump? A list.",
    "ranks_of_job": "How many ranks does the job have?",
}
_STEP_ERROR, _COST_ERROR, _LEAST_COST = 0.03, 0.3, 0.01


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A run, what was planted in it, and the right answers: accepted values by question."""

    source: str
    truth: Mapping[str, Any]
    is_hang: bool = False


def _mean_step_ms(job: Job) -> float:
    return mean(step.ns for step in steps(job, 0)) / 1e6


def made_up(fault: str | None, ranks: int, seed: int, folder: Path) -> Planted:
    """Write a made-up job with a fault (None: without), and return what was planted."""
    random = Random(f"{fault} {ranks} {seed}")
    straggler = None if fault is None else random.randrange(ranks)
    more = {} if fault is None else {"fault": fault}
    job = Job.of(ranks, steps=4, seed=seed, **{**more, "straggler": straggler})
    write(job, folder, workers=os.cpu_count() or 1)
    step = _mean_step_ms(job)
    cost = step - _mean_step_ms(replace(job, straggler=None))
    at_fault: list[int] = []
    if fault in FAULTS:
        at_fault = _at_fault(job)
    name = _NAMES.get(fault or "none", fault or "none")
    truth = {
        "cause": [name],
        "ranks": [at_fault, *_more_ranks(job, at_fault)],
        "step_ms": step,
        "cost_ms": cost,
        "cost_error_ms": max(_COST_ERROR * cost, _LEAST_COST * step),
        "healing_helps": fault in FAULTS and cost >= _LEAST_COST * step,
    }
    return Planted(source=f"made-up, {name}, {ranks} ranks, seed {seed}", truth=truth)


def _at_fault(job: Job) -> list[int]:
    """Return the ranks with the fault of a rank, a link or a stage."""
    rank = job.straggler or 0
    _, _, pp = job.place(rank)
    of_stage = job.tp * job.dp
    if job.fault == "imbalanced_stage":
        return [*range(pp * of_stage, (pp + 1) * of_stage)]
    return [rank]


def _more_ranks(job: Job, ranks: list[int]) -> Iterator[list[int]]:
    """Yield other right answers: the groups that go over a slow link, or two ranks of one."""
    if job.fault != "slow_link" or not ranks:
        return
    [rank] = ranks
    own = groups(job, rank)
    for kind in ("dp", "ep", "edp"):
        yield sorted(own[kind].ranks)
        yield from (sorted([rank, other]) for other in own[kind].ranks if other != rank)


def recorded(name: str, part: str, folder: Path) -> Planted:
    """Copy a recorded job, and return what was planted."""
    shutil.copytree(RECORDED / name / part, folder)
    facts = json.loads((RECORDED / name / "truth.json").read_text("utf-8"))
    pairs = zip(facts["clean_ms"], facts["faulty_ms"], strict=True)
    clean, faulty = min(pairs, key=lambda pair: abs(pair[1] - pair[0] - facts["cost_ms"]))
    is_faulty = part == "faulty"
    of_turns = facts["fault"] == "gc"
    ranks = [] if of_turns else _STAGE.get(facts["kind"], [facts["suspect"]])
    cost = facts["cost_ms"] if is_faulty else 0.0
    truth = {
        "cause": list(_CAUSES[facts["fault"]]) if is_faulty else ["none"],
        "ranks": [ranks if is_faulty else []],
        "step_ms": faulty if is_faulty else clean,
        "cost_ms": cost,
        "cost_error_ms": max(_COST_ERROR * cost, facts["clean_spread_ms"]),
        "healing_helps": is_faulty and not of_turns,
    }
    return Planted(source=f"recorded {name}, {part}", truth=truth)


def made_up_hang(fault: str, seed: int, folder: Path) -> Planted:
    """Write the dumps of a made-up job that hangs, or does not."""
    plan = planted(fault, seed, 64)
    write_dumps(plan, folder, drawn_form(seed), seed)
    truth = {
        "hangs": fault in HANG_FAULTS,
        "kind": sorted({kind for kind, _ in plan.accept}),
        "ranks": [list(ranks) for _, ranks in plan.accept],
        "missing": [list(plan.missing)],
        "ranks_of_job": plan.layout.world,
    }
    return Planted(source=f"made-up hang, {fault}, seed {seed}", truth=truth, is_hang=True)


def recorded_hang(name: str, folder: Path) -> Planted:
    """Copy the dumps of a recorded hang."""
    shutil.copytree(HANGS / name, folder, ignore=shutil.ignore_patterns("truth.json"))
    facts = json.loads((HANGS / name / "truth.json").read_text("utf-8"))
    truth = {
        "hangs": facts["hang"],
        "kind": [one["kind"] for one in facts["accept"]],
        "ranks": [one["culprits"] for one in facts["accept"]],
        "missing": [facts["missing_dumps"]],
        "ranks_of_job": facts["world"],
    }
    return Planted(source=f"recorded hang, {name}", truth=truth, is_hang=True)


def make(folder: Path, seed: int, large: int, count: int = COUNT) -> None:
    """Write runs in an order drawn from a seed, their questions, and the right answers."""
    makers = [*_makers(seed, large)]
    Random(seed).shuffle(makers)
    runs = folder / "runs"
    runs.mkdir(parents=True)
    truths, questions = {}, {}
    for number, (function, arguments) in enumerate(makers[:count], 1):
        name = f"run-{number:02}"
        plan = function(*arguments, runs / name)
        truths[name] = {"source": plan.source, "is_hang": plan.is_hang, **plan.truth}
        questions[name] = HUNG if plan.is_hang else SLOW
    _save(folder / "truth.json", truths)
    form = {"answer_with": {"run-01": {"question": "answer"}}, "questions": questions}
    _save(folder / "questions.json", form)


def _makers(seed: int, large: int) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield functions that write a run, and their arguments without the folder."""
    random = Random(seed)
    of_ranks = [(fault, n) for fault in FAULTS for n in range(_OF_RANKS)]
    of_all = [(fault, n) for fault in IDLE_FAULTS for n in range(_OF_ALL)]
    healthy = [(None, n) for n in range(_HEALTHY_RUNS)]
    for number, (fault, n) in enumerate([*of_ranks, *of_all, *healthy]):
        ranks = LARGE_RANKS if number < large else random.choice(_SIZES)
        yield made_up, (fault, ranks, 100 * seed + n)
    for path in sorted(RECORDED.iterdir()):
        yield recorded, (path.name, "faulty")
    for name in _CLEAN:
        yield recorded, (name, "clean")
    for fault in random.sample(HANG_FAULTS, _MADE_HANGS):
        yield made_up_hang, (fault, seed)
    for fault in HEALTHY[:_MADE_HEALTHY]:
        yield made_up_hang, (fault, seed)
    for path in random.sample(sorted(p for p in HANGS.iterdir() if p.is_dir()), 2):
        yield recorded_hang, (path.name,)


def _save(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def is_right(question: str, answer: Any, truth: Mapping[str, Any]) -> bool:
    """Return whether an answer is right; a missing answer, or one of another type, is not."""
    expected = truth[question]
    if question in {"step_ms", "cost_ms"}:
        if isinstance(answer, bool) or not isinstance(answer, int | float):
            return False
        error = _STEP_ERROR * expected if question == "step_ms" else truth["cost_error_ms"]
        return abs(answer - expected) <= error
    if question in {"ranks", "missing"}:
        return isinstance(answer, list) and sorted(map(str, answer)) in [
            sorted(map(str, ranks)) for ranks in expected
        ]
    if isinstance(expected, list):
        return answer in expected
    return type(answer) is type(expected) and answer == expected


def judge(folder: Path, answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return how many answers are right, in all and by question, and those that are wrong."""
    truths = json.loads((folder / "truth.json").read_text("utf-8"))
    right, asked, wrong = Counter[str](), Counter[str](), []
    for name, truth in truths.items():
        own = answers.get(name)
        own = own if isinstance(own, Mapping) else {}
        for question in HUNG if truth["is_hang"] else SLOW:
            asked[question] += 1
            if is_right(question, own.get(question), truth):
                right[question] += 1
            else:
                wrong.append(
                    {
                        "run": name,
                        "source": truth["source"],
                        "question": question,
                        "answer": own.get(question),
                        "right": truth[question],
                    }
                )
    total = sum(asked.values())
    return {
        "questions": total,
        "right": sum(right.values()),
        "share": sum(right.values()) / total if total else None,
        "by_question": {name: f"{right[name]} of {asked[name]}" for name in asked},
        "wrong": wrong,
    }


_IDLE = {
    "launch_bound": "launch_bound",
    "synchronization": "synchronization",
    "data_loading": "data_loading",
    "python": "garbage_collection",
    "kernel_gaps": "kernel_gaps",
}
_LEAST_IDLE = 0.05  # of the step, to be called the cause
_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


def milliseconds(text: str) -> float:
    """Return the time that a text of an answer begins with, in ms: "2.14 ms, 2.9 %"."""
    number, unit = text.partition(",")[0].split()[:2]
    return float(number.replace(" ", "")) * _MS[unit]


def _ranks(text: str) -> list[int]:
    """Return the ranks of "0-2, 5"; none of "all" or "none"."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


@dataclass(kw_only=True)
class ScriptedClient:
    """Asks the tools by fixed rules, and counts tokens and seconds."""

    client: Client
    tokens: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer of a tool; an error is an answer with `error`."""
        result = await self.client.call_tool(tool, arguments)
        text = getattr(result.content[0], "text", "")
        self.tokens += tokens_of(text + json.dumps(arguments) + tool)
        return {"error": text} if result.is_error else json.loads(text)

    async def answer(self, run: str, *, is_hang: bool) -> dict[str, Any]:
        """Answer the questions about one run, and log what that took."""
        begin, before = time.monotonic(), self.tokens
        own = await (self._hang(run) if is_hang else self._slow(run))
        self.log.append(
            {
                "run": run,
                "tokens": (self.tokens - before) / len(own),
                "seconds": (time.monotonic() - begin) / len(own),
            }
        )
        return own

    async def _hang(self, run: str) -> dict[str, Any]:
        answer = await self.ask("hang", run=run)
        totals = {one["what"]: one for one in answer.get("totals", [])}
        of, _, world = totals["kind"]["rows"].removeprefix("dumps of ").partition(" of ")
        missing = [one["why"] for one in answer.get("unknown", []) if one["what"] == "dumps"]
        return {
            "hangs": totals["hangs"]["value"] == "yes",
            "kind": totals["kind"]["value"],
            "ranks": _ranks(totals["culprits"]["value"]),
            "missing": _ranks(missing[0].removeprefix("none of ranks ")) if missing else [],
            "ranks_of_job": int(world.split()[0]) if of else None,
        }

    async def _slow(self, run: str) -> dict[str, Any]:
        answer = await self.ask("findings", run=run)
        totals = {one["what"]: one["value"] for one in answer["totals"]}
        own = {"cause": "none", "ranks": [], "cost_ms": 0.0, "healing_helps": False}
        own["step_ms"] = step = milliseconds(totals["mean step"])
        causes = [
            one
            for one in answer.get("items", [])
            if one["is"] == "cause" and one["confidence"] != "low"
        ]
        if causes:
            return own | self._of_cause(causes[0], step)
        idle = await self.ask("idle_causes", run=run)
        by_cause = {row[0]: row[1] for row in reversed(idle["rows"])}  # the largest name
        for one in idle["totals"][1:]:
            is_other = one["what"] == "python" and "gc" not in by_cause.get("python", "")
            if one["what"] not in _IDLE or is_other:
                continue
            if milliseconds(one["value"]) >= _LEAST_IDLE * step:
                cost = milliseconds(one["value"])
                return own | {"cause": _IDLE[one["what"]], "cost_ms": cost}
        return own

    @staticmethod
    def _of_cause(cause: Mapping[str, Any], step: float) -> dict[str, Any]:
        """Return the answers that a finding gives."""
        is_of_turns = cause["kind"] == "pauses"
        cost = milliseconds(cause["cost_per_step"])
        return {
            "cause": "garbage_collection" if is_of_turns else cause["kind"],
            "ranks": [] if is_of_turns else _ranks(cause["ranks"]),
            "cost_ms": cost,
            "healing_helps": not is_of_turns and cost >= _LEAST_COST * step,
        }


async def answers_of_client(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the answers of the scripted client, and what each run took."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    words = ["-P", "-m", "fastcomm", "mcp", str(folder / "runs"), "--workers", "2"]
    homes = ("HOME", "XDG_CACHE_HOME")  # without them the server compiles its kernels anew
    environment = {"PYTHONPATH": path, **{n: os.environ[n] for n in homes if n in os.environ}}
    server = StdioServerParameters(command=sys.executable, args=words, env=environment)
    questions = json.loads((folder / "questions.json").read_text("utf-8"))["questions"]
    async with Client(stdio_client(server)) as client:
        script = ScriptedClient(client=client)
        await script.ask("list_runs", limit=100)
        answers = {
            name: await script.answer(f"runs/{name}", is_hang="hangs" in own)
            for name, own in questions.items()
        }
    return answers, script.log


def main() -> None:
    """Run a command of this script."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("make", "client", "judge"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name == "make":
            command.add_argument("--seed", type=int, default=1)
            command.add_argument("--large", type=int, default=1, help="runs of 512 ranks")
            command.add_argument("--count", type=int, default=COUNT)
        else:
            command.add_argument("answers", type=Path)
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder, options.seed, options.large, options.count)
        return
    if options.command == "client":
        answers, log = anyio.run(answers_of_client, options.folder)
        _save(options.answers, answers)
        slowest = max(log, key=lambda one: one["seconds"])
        longest = max(log, key=lambda one: one["tokens"])
        sys.stdout.write(f"slowest: {slowest}\nlongest: {longest}\n")
    verdict = judge(options.folder, json.loads(options.answers.read_text("utf-8")))
    sys.stdout.write(json.dumps(verdict, indent=1) + "\n")


if __name__ == "__main__":
    main()
