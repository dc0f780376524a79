"""Test that the questions of the page on SQL have the answers of the other commands."""

import gzip
import math
import re
import shutil
from collections import Counter
from contextlib import ExitStack

import pytest
from builders.places import DOCS, JOBS
from builders.shared_data import shared

import fastcomm
from fastcomm.sql.database import RunDatabase
from fastcomm.sql.options import SqlOptions
from fastcomm.sql.run_tables import RunTables
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write
from fastcomm.trace.schema import KIND

PAGE = (DOCS / "sql.md").read_text("utf-8")
QUESTIONS = dict(re.findall(r"^\*\*(.+?)\*\*\n\n```sql\n(.*?)^```$", PAGE, re.M | re.S))
WORK = [KIND[name] for name in ("kernel", "memcpy", "memset")]
RUNS = ("demo", "recorded", "nsys")


class Answers:
    """What SQL and the other commands say of a run, each computed once."""

    def __init__(self, run, stack):
        self.run = run
        self.database = stack.enter_context(RunDatabase(RunTables(run._traces), SqlOptions()))
        self.metrics = run.metrics()
        self.document = self.metrics.to_dict()
        self.tables = self.metrics.to_arrow()
        self.steps = max(1, len(set(self.tables["iterations"]["iteration"].to_pylist())))

    def query(self, question):
        (statement,) = self.database.statements(QUESTIONS[question])
        return [tuple(row.values()) for row in self.database.query(statement).rows()]

    def rows(self, name, *columns):
        return [tuple(row[key] for key in columns) for row in self.tables[name].to_pylist()]

    def kernels(self, by):
        """Time by a key of `fastcomm kernels`."""
        sums = Counter()
        for row in self.run.kernels(by=by).to_arrow().to_pylist():
            name = None if row["name"] == f"(no {by})" else row["name"]
            sums[name] += row["total_ns"]
        return sorted(sums.items(), key=lambda row: (row[0] is not None, row[0]))

    def by_wait(self, name):
        sums = Counter()
        for rank, ns in self.rows("waits", "rank", name):
            sums[rank] += ns
        return sorted(sums.items())

    def work_by_rank(self):
        events, ns = Counter(), Counter()
        for row in self.run.kernels().by_rank().to_pylist():
            events[row["rank"]] += row["count"]
            ns[row["rank"]] += row["total_ns"]
        return [(rank, events[rank], ns[rank]) for rank in sorted(events)]

    def skews(self):
        count, total = Counter(), Counter()
        for row in self.metrics.across.skew:
            count[row.op, row.tag] += row.count
            total[row.op, row.tag] += row.count * row.skew_mean_ns
        return [(*key, count[key], total[key] / count[key]) for key in sorted(count)]

    def matched(self):
        whole = self.metrics.across.matching
        assert whole.apart == 0
        return [(whole.collectives, whole.messages)]

    def waits_by_tag(self):
        sums = Counter()
        for tag, ns in self.rows("waits", "tag", "wait_ns"):
            sums[tag] += ns * self.steps
        return [max(sums.items(), key=lambda row: row[1])] if sums else []

    def by_stage(self):
        """Mean compute and idle time by place in the groups of the pipeline."""
        pipelines = {group for group, tag in self.rows("groups", "group", "tag") if tag == "PP"}
        stage = {
            rank: place
            for group, ranks in self.rows("group_members", "group", "ranks")
            if group in pipelines
            for place, rank in enumerate(ranks)
        }
        means, sums = self.metrics.rank_means, {}
        compute, idle = (means.ns[name].tolist() for name in ("compute", "idle"))
        for rank, *own in zip(means.ranks.tolist(), compute, idle, strict=True):
            known = [None if math.isnan(ns) else ns for ns in own]
            sums.setdefault(stage.get(rank), []).append(known)
        order = sorted(sums, key=lambda place: (place is None, place))
        return [(place, *map(mean, zip(*sums[place], strict=True))) for place in order]

    def idle_rank(self):
        means = self.metrics.rank_means
        idle = [None if math.isnan(ns) else ns for ns in means.ns["idle"].tolist()]
        rows = zip(means.ranks.tolist(), idle, strict=True)
        return [max(rows, key=lambda row: (row[1] or -1, -row[0]))]

    def late_rank(self):
        rows = [(row.rank, row.caused_ns) for row in self.metrics.across.by_rank]
        return [max(rows, key=lambda row: (row[1], -row[0]))] if rows else [(0, None)]

    def longest_work(self):
        rank0 = self.run.read(0)
        events = rank0.events.to_pylist()
        comm = set(rank0.comm["event"].to_pylist())
        call_of = {}
        for row in events:
            if row["kind"] == KIND["runtime"] and row["correlation"] is not None:
                call_of.setdefault(row["correlation"], row["name"])
        work = [
            (row["name"], row["stop"] - row["start"], call_of[row["correlation"]])
            for number, row in enumerate(events)
            if (number in comm or row["kind"] in WORK) and row["correlation"] in call_of
        ]
        return [max(work, key=lambda row: row[1])] if work else []


def mean(values):
    """The mean of known values; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shares(answers):
    return [
        tuple(
            answers.metrics.idle[cause]
            for cause in ("launch_bound", "synchronization", "data_loading")
        )
    ]


EXPECTED = {
    "Which ranks have a trace, and how large is it?": lambda own: [
        (source.rank, source.path.stat().st_size) for source in own.run._traces.sources
    ],
    "By how much is the clock of each rank ahead?": lambda own: own.rows(
        "clocks", "rank", "offset_ns", "spread_ns"
    ),
    "What is wrong with the run?": lambda own: [
        (one.kind, one.is_symptom, one.text, one.cost_ns, one.confidence)
        for one in own.metrics.findings
    ],
    "Which finding costs the most?": lambda own: sorted(
        own.rows("findings", "text", "cost_ns"), key=lambda row: -(row[1] or -1)
    )[:1],
    "Which ranks does a finding name?": lambda own: sorted(
        (number, rank)
        for number, (ranks,) in enumerate(own.rows("findings", "ranks"), 1)
        for rank in ranks or ()
    ),
    "How long is the mean step?": lambda own: [(own.metrics.iteration.mean_ns,)],
    "How long are the steps of each rank?": lambda own: own.rows(
        "ranks", "rank", "mean_ns", "p99_ns", "max_ns"
    ),
    "How do the pipeline stages compare?": Answers.by_stage,
    "Which five steps take longest?": lambda own: sorted(
        own.rows("iterations", "rank", "iteration", "time_ns"),
        key=lambda row: (-row[2], row[0], row[1]),
    )[:5],
    "What share of the step is compute?": lambda own: [
        (own.metrics.breakdown.exact["compute"],)
    ],
    "How much communication is exposed, by parallelism?": lambda own: sorted(
        (f"breakdown.exact.{name}", share)
        for name, share in own.metrics.breakdown.exact.items()
        if name.startswith("exposed")
    ),
    "How well is communication overlapped by compute?": lambda own: [
        (own.metrics.overlap.average_overlap_ratio,)
    ],
    "Why is the device idle?": shares,
    "Which rank is idle the longest?": Answers.idle_rank,
    "Which rank do the others wait for?": Answers.late_rank,
    "How long does each rank wait, by parallelism?": lambda own: sorted(
        own.rows("waits", "rank", "tag", "wait_ns", "transfer_ns")
    ),
    "How often is each rank the last to arrive?": lambda own: own.by_wait("last"),
    "How many collectives and messages are matched across ranks?": Answers.matched,
    "How large is the arrival skew of each operation?": Answers.skews,
    "Which parallelism loses the most time to waits?": Answers.waits_by_tag,
    "How long does one rank wait in each operation?": lambda own: [
        (rank, ns * own.steps) for rank, ns in own.by_wait("wait_ns")
    ],
    "How many bytes does each rank send, by parallelism?": lambda own: sorted(
        own.rows("bandwidth_by_rank", "rank", "tag", "total_bytes")
    ),
    "How much bandwidth does each parallelism reach?": lambda own: sorted(
        (f"bandwidth.{tag}.avg_bw", row["avg_bw"])
        for tag, row in own.document["bandwidth"].items()
    ),
    "Which kernels take the most time?": lambda own: [
        tuple(row[key] for key in ("name", "count", "total_ns", "share"))
        for row in own.run.kernels().to_arrow()[:10].to_pylist()
    ],
    "How much work does each rank do?": Answers.work_by_rank,
    "What kinds of work take the time?": lambda own: own.kernels("category"),
    "Which operators launch the longest work?": lambda own: own.kernels("operator"),
    "Which of the user's ranges take the time?": lambda own: own.kernels("annotation"),
    "How is the time divided into forward, backward and optimizer?": lambda own: own.kernels(
        "pass"
    ),
    "What was the longest work of rank 0, and which call launched it?": Answers.longest_work,
}


def test_the_page_has_thirty_questions():
    assert len(QUESTIONS) == 30
    assert EXPECTED.keys() == QUESTIONS.keys()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The runs that are asked, each opened when it is first needed."""
    opened = {}

    def answers(name):
        if name not in opened:
            folder = tmp_path_factory.mktemp(name)
            opened[name] = Answers(fastcomm.open(place(name, folder)), stack)
        return opened[name]

    with ExitStack() as stack:
        yield answers


def place(name, folder):
    """The traces of a run: made up, recorded by the project, or real ones of Nsight Systems."""
    if name == "recorded":
        return JOBS / "tp_fsdp-straggler" / "faulty"
    if name == "demo":
        write(Job.of(ranks=8, fault="slow_gpu", steps=2, layers=1, micro_batches=2), folder)
        return folder
    packed = shared("nsys/nccl_nvtx_4rank.sqlite.gz")
    unpacked = folder / "nccl_nvtx_4rank.sqlite"
    with gzip.open(packed) as source, unpacked.open("wb") as target:
        shutil.copyfileobj(source, target)
    return unpacked


@pytest.mark.parametrize("question", EXPECTED)
@pytest.mark.parametrize("name", RUNS)
def test_a_question_has_the_answer_of_the_commands(runs, name, question):
    answers = runs(name)
    rows = answers.query(question)
    expected = EXPECTED[question](answers)
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert list(row) == [
            pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            for value in other
        ]
