"""Test tables of operations: graph, replay and stragglers."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from builders.replay_data import META, TABLE, assert_same, document, needed
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from oracles import replay as oracle

from fastcomm.cli.main import main
from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.stragglers import model as stragglers_model
from fastcomm.stragglers import operations
from fastcomm.stragglers import result as stragglers_result
from fastcomm.stragglers import tables as report
from fastcomm.stragglers.analysis import StragglerResult
from fastcomm.stragglers.model import JobModel
from fastcomm.synthetic.job import TableJob, write_table
from fastcomm_kernels.replay import simulate


@pytest.fixture(scope="module")
def model():
    return JobModel.of(operations.read(TABLE))


@pytest.fixture(scope="module")
def found(model):
    return stragglers_result.stragglers(model)


@needed
def test_the_published_result_is_reproduced(found):
    said = json.loads(json.dumps(report.published(found, operations.meta(META))))
    assert_same(said, document("straggler/result-ST.json"), 1e-6, relative=True)


@needed
def test_the_effects_of_last_stage_and_worst_ranks_are_reproduced(found):
    ms, mw = report.effect(found.last_stage, "Ms"), report.effect(found.worst, "Mw")
    assert_same(ms, document("straggler/ms-ST.json"), 1e-6, relative=True)
    assert_same(mw, document("straggler/mw-ST.json"), 1e-6, relative=True)
    assert found.worst_ranks == (7,)


@needed
def test_the_what_ifs_of_the_notebook_are_reproduced(model, found):
    types = [op.optype for op in model.table.ops]
    for names, ratio in document("straggler/what-if-ST.json")["ratio"].items():
        times = model.measured.copy()
        times[np.isin(types, names.split(", "))] = 0
        changed = model.replay(times).whole.mean()
        assert found.nodelay.whole.mean() / changed == pytest.approx(ratio, rel=1e-6)


def test_a_type_may_end_in_zeros(tmp_path):
    """An array of texts would not know it again."""
    path, _ = write_table(TableJob(dp=2, pp=2, micro_batches=1, steps=2), tmp_path / "job")
    table = pq.read_table(path)
    place = table.column_names.index("optype")
    found = []
    for end in ("x", "\0"):
        names = [each.replace("grad", f"grad{end}") for each in table["optype"].to_pylist()]
        pq.write_table(table.set_column(place, "optype", pa.array(names)), path)
        found.append(stragglers_result.stragglers(JobModel.of(operations.read(path))))
    known, zeros = found
    assert any("\0" in name for name in zeros.ideal_ns)
    assert list(zeros.ideal_ns.values()) == list(known.ideal_ns.values())
    assert zeros.ideal.whole.tolist() == known.ideal.whole.tolist()


@needed
def test_the_graph_equals_the_worked_example(model):
    ops, made = model.table.ops, model.graph
    assert (len(ops), len(made.edges), len(made.groups)) == (106, 165, 34)
    before = {}
    for a, b in made.edges:
        before.setdefault(ops[b].name, set()).add(ops[a].name)
    assert before["forward-compute_0_0"] == {"params-all-gather_0_0"}
    assert before["forward-send_1_0"] == {"forward-compute_1_0", "forward-send_0_0"}
    assert before["backward-recv_0_0"] == {"forward-compute_2_0"}
    assert before["backward-compute_0_0"] == {"backward-recv_0_0", "forward-compute_3_0"}
    scatter = {"params-all-gather_0_0", "embedding-grads-all-reduce_0_0"}
    assert before["grads-reduce-scatter_0_0"] == scatter
    assert before["optimizer_0_0"] == {"optimizer-clip-main-grad_0_0"}


@needed
def test_steps_can_be_selected_and_missing_steps_are_errors(model):
    few = stragglers_result.stragglers(model, steps=[25, 23])
    assert few.chosen == (23, 25)
    assert few.slowdown > 1
    with pytest.raises(FastcommError, match="step 24 is not in the table"):
        stragglers_result.stragglers(model, steps=[24])


def test_below_the_threshold_no_rank_is_reported():
    found = stragglers_result.stragglers(JobModel.of(operations.of_table(job())), threshold=99)
    assert (found.blocking, found.worst, found.workers) == (None, None, None)
    result = StragglerResult(stragglers=found)
    assert result.to_dict()["headline"].startswith("No stragglers: a step takes 1.")
    assert result.to_dict()["slowdown_by_stage"] is None
    report.show(result)


@pytest.mark.parametrize(
    ("is_slow", "culprit"),
    [
        (lambda _, stage: stage == 1, "The last stage slowed the job: if ideal, a step takes"),
        (lambda _, stage: stage == 0, "Stage 0 is slow: alone"),
        (lambda dp, stage: (dp, stage) == (1, 0), "Rank 2 slowed the job: if ideal, a step"),
        (lambda *_: False, "No rank and no stage causes half of the slowdown; "),
    ],
)
def test_the_first_line_names_the_culprit(tmp_path, is_slow, culprit):
    path = tmp_path / "table.parquet"
    pq.write_table(job(is_slow=is_slow), path)
    page = tmp_path / "page.html"
    lines = CliRunner().invoke(main, ["stragglers", str(path), "--html", str(page)]).stdout
    assert lines.startswith(culprit)
    assert f">{culprit}" in page.read_text()


def test_large_launch_delays_are_attributed():
    found = stragglers_result.stragglers(
        JobModel.of(operations.of_table(job(lag=0.02))), threshold=0
    )
    assert found.launch_slowdown > 1.03
    assert found.launch is None or "first-op" in found.launch["optype"].mean
    forced = stragglers_result.stragglers(
        JobModel.of(operations.of_table(job(lag=0.02))), threshold=1.0
    )
    assert forced.launch["dp_rank"].mean.keys() == {"0", "1"}


def test_the_model_agrees_with_the_definition_on_made_up_jobs():
    for chunks, overlap in ((1, False), (1, True), (2, True)):
        table = operations.of_table(job(chunks=chunks, overlap=overlap))
        model = JobModel.of(table)
        got = model.replay(model.measured)
        _, end = oracle.simulated(
            len(table.ops),
            model.graph.edges,
            model.graph.groups,
            model.graph.common,
            model.measured.tolist(),
        )
        for s in range(len(table.steps)):
            ends = [value for (_, _, step), value in end.items() if step == s]
            assert got.whole[s] == pytest.approx(max(ends))


def test_gradients_that_overlap_wait_for_the_backward_of_their_chunk():
    table = operations.of_table(job(overlap=True))
    made = stragglers_model.graph(table)
    names = {(table.ops[a].name, table.ops[b].name) for a, b in made.edges}
    assert ("backward-compute_1_0", "grads-reduce-scatter_0_0") in names
    assert ("grads-reduce-scatter_0_0", "layernorm-grads-all-reduce_0_0") in names
    assert ("separate-grads-all-reduce_0_0", "optimizer-clip-main-grad_0_0") in names


def test_the_ends_of_the_pipeline_send_to_nobody_and_virtual_stages_do():
    table = operations.of_table(job(chunks=2, overlap=False))
    made = stragglers_model.graph(table)
    groups = [{table.ops[i].name for i in members} for members in made.groups]
    # The second stage's first chunk goes on to the first stage's second, and that to nobody.
    assert {"forward-send_0_1", "forward-recv_2_0"} in groups
    assert {"forward-send_2_1"} in groups


@given(st.data())
def test_any_replay_agrees_with_the_definition(data):
    size = data.draw(st.integers(1, 7))
    ranks, steps = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    pairs = [(a, b) for b in range(size) for a in range(b)]
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    # Neighbors meet; with edges that point up, contracting them makes a cycle only by an edge.
    groups, at = [], 0
    while at < size:
        width = data.draw(st.integers(1, 2))
        members = tuple(range(at, min(at + width, size)))
        if width > 1 or data.draw(st.booleans()):
            groups.append(members)
        at += width
    inside = {(a, b) for members in groups for a in members for b in members}
    edges = [edge for edge in edges if edge not in inside]
    common = [data.draw(st.booleans()) for _ in groups]
    builder = stragglers_model._Builder(
        ops=tuple(
            operations.Op(optype="x", seq=i, stage=0, start=i, end=i, mc=0, gmc=0)
            for i in range(size)
        ),
        use_dp=True,
        overlap=False,
        stages=1,
        chunks=1,
        edges=dict.fromkeys(edges),
        groups=groups,
        common=common,
    )
    made = stragglers_model._finished(builder)
    values = st.lists(st.integers(0, 50), min_size=ranks * steps, max_size=ranks * steps)
    time = np.array([data.draw(values) for _ in range(size)], np.float64)
    delay = np.array([data.draw(values) for _ in range(size)], np.float64)
    start, end = simulate(
        made.order, made.before, made.closes, made.members, time, delay, np.int64(ranks)
    )
    shape = size, ranks, steps
    wanted = oracle.simulated(
        size, edges, groups, common, time.reshape(shape).tolist(), delay.reshape(shape).tolist()
    )
    for got, each in zip((start, end), wanted, strict=True):
        for cell, value in each.items():
            assert got.reshape(shape)[cell] == value


def _late_stage(_, stage):
    return stage == 1


def job(*, chunks=1, overlap=False, lag=0.0, drop=None, is_slow=_late_stage):
    """Two data ranks, two stages, two micro-batches; times that fit each other."""
    rows = []
    for step in (3, 5, 9):
        for dp in (0, 1):
            for stage in (0, 1):
                rows += _rank(
                    step, dp, stage, chunks=chunks, overlap=overlap, lag=lag, is_slow=is_slow
                )
    rows = [row for row in rows if drop is None or not drop(row)]
    names = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id")
    names += ("mc", "gmc")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    return pa.table({name: pa.array(list(values)) for name, values in columns.items()})


def _rank(step, dp, stage, *, chunks, overlap, lag, is_slow):
    """Rows of one rank in one step."""
    seq, rows, clock = {}, [], 0.0

    def add(optype, seconds, mc=-1):
        nonlocal clock
        number = seq.setdefault(optype, 0)
        seq[optype] += 1
        clock += lag
        slow = seconds * (1.3 if is_slow(dp, stage) and "compute" in optype else 1.0)
        slow += 0.001 * ((step * 7 + dp * 3 + number) % 5)
        gmc = -1 if mc < 0 else mc * 2 + stage
        rows.append((dp, stage, dp * 2 + stage, step, optype, clock, slow, number, mc, gmc))
        clock += slow

    for mc in range(chunks):
        add("params-all-gather", 0.01, mc)
    for way, order in (("forward", range(chunks)), ("backward", reversed(range(chunks)))):
        for mc in order:
            for _ in range(2):
                if chunks > 1 or stage == (1 if way == "forward" else 0):
                    add(f"{way}-recv", 0.002)
                add(f"{way}-compute", 0.1, mc)
                if chunks > 1 or stage == (0 if way == "forward" else 1):
                    add(f"{way}-send", 0.002)
            if way == "backward" and overlap:
                add("grads-reduce-scatter", 0.02, mc)
    add("gc", 0.0)
    add("layernorm-grads-all-reduce", 0.001)
    add("embedding-grads-all-reduce", 0.01)
    add(
        *(("separate-grads-all-reduce", 0.01) if overlap else ("grads-reduce-scatter", 0.02, 0))
    )
    add("optimizer-clip-main-grad", 0.005)
    add("optimizer", 0.03)
    return rows


def test_steps_that_lack_an_operation_are_left_out_and_named(tmp_path):
    def gone(row):
        return row[3] == 9 and row[0] == 1 and row[4] == "gc"

    pq.write_table(job(drop=gone), tmp_path / "t.parquet")
    read = operations.read(tmp_path / "t.parquet")
    assert (read.steps, read.left_out) == ((3, 5), (9,))
    said = CliRunner().invoke(main, ["stragglers", str(tmp_path / "t.parquet"), "--json"])
    assert "steps 9 are left out" in said.stderr
    assert json.loads(said.stdout)["steps"] == [3, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["stage"]), "missing column stage"),
        (lambda t: t.slice(0, 0), "no rows"),
        (lambda t: timed(t, "duration", "nan", 3, 7), r"column duration: 2 .*nan \(rows 3, 7,"),
        (
            lambda t: timed(t, "duration", "inf", 1),
            r"column duration: 1 .*inf \(rows 1, from 0",
        ),
        (lambda t: timed(t, "duration", -1, 0), r"column duration: 1 .*-1.0 \(rows 0,"),
        (lambda t: timed(t, "duration", 1e30, 0), r"column duration: 1 .*\(rows 0,"),
        (
            lambda t: timed(t, "start_ts", "nan", *range(9)),
            r"rows 0, 1, 2, 3, 4, \.\.\., from 0",
        ),
        (lambda t: timed(t, "duration", 0, *range(len(t))), "are 0; expected seconds"),
        (lambda t: t.set_column(0, "dp_rank", pa.nulls(len(t), pa.int8())), "has nulls"),
        (lambda t: renamed(t, "forward-send", "sideways-send"), "'sideways-send': expected"),
        (lambda t: renamed(t, "optimizer", "finish"), "no operation 'optimizer'"),
        (lambda t: without(t, lambda r: r["dp_rank"] == 0), "no data rank 0"),
        (lambda t: without(t, lambda r: r["dp_rank"] == 1 and r["seq_id"] == 1), "in no step"),
        (
            lambda t: without(t, lambda r: r["stage"] == 1 and "compute" in r["optype"]),
            "stage 1 has no operation forward-compute",
        ),
        (
            lambda t: without(t, lambda r: r["optype"] == "forward-send" and r["seq_id"] == 1),
            "stage 0 has 1 forward-send that reach stage 1, which has 2",
        ),
    ],
)
def test_a_damaged_table_is_explained(tmp_path, change, message):
    path = tmp_path / "t.parquet"
    pq.write_table(change(job()), path)
    with pytest.raises(FastcommError, match=message):
        JobModel.of(operations.read(path))


def timed(table, name, value, *rows):
    """The table with another time in some rows."""
    column = table[name].to_numpy().copy()
    column[list(rows)] = float(value)
    return table.set_column(table.column_names.index(name), name, pa.array(column))


def renamed(table, old, new):
    names = [new if name == old else name for name in table["optype"].to_pylist()]
    return table.set_column(4, "optype", pa.array(names))


def without(table, gone):
    return pa.Table.from_pylist([row for row in table.to_pylist() if not gone(row)])


def test_invalid_tables_and_metadata_are_errors(tmp_path):
    path = tmp_path / "t.parquet"
    path.write_text("no table")
    with pytest.raises(TraceFileError, match=r"t\.parquet"):
        operations.read(path)
    for text, message in (
        ("dp_size: 0", "invalid dp_size 0"),
        ("[", "not YAML"),
        ("3", "expected lines such as dp_size: 4, got '3'"),
    ):
        (tmp_path / "m.yaml").write_text(text)
        with pytest.raises(FastcommError, match=message):
            operations.meta(tmp_path / "m.yaml")


def test_operations_that_wait_for_each_other_are_an_error():
    ops = tuple(
        operations.Op(optype="x", seq=i, stage=0, start=i, end=i, mc=0, gmc=0) for i in (0, 1)
    )
    builder = stragglers_model._Builder(
        ops=ops,
        use_dp=False,
        overlap=False,
        stages=1,
        chunks=1,
        edges={(0, 1): None, (1, 0): None},
    )
    with pytest.raises(FastcommError, match="x_0_0 waits for itself"):
        stragglers_model._finished(builder)


@needed
def test_the_command_prints_and_writes_its_results(tmp_path):
    words = ["stragglers", str(TABLE), "--meta", str(META)]
    more = ["--json", "--output", str(tmp_path)]
    said = json.loads(CliRunner().invoke(main, [*words, *more]).stdout)
    assert said["slowdown"] == pytest.approx(1.178702, abs=1e-6)
    assert said["step_time_mean_ns"]["base"] == pytest.approx(2.214448e9, abs=1e3)
    assert (said["m_s"], said["m_w"]) == pytest.approx((1.219356, 0.031404), abs=1e-6)
    assert json.loads((tmp_path / "stragglers.json").read_text()) == said
    assert {each.stem for each in tmp_path.iterdir()} == {"stragglers", "result", "ms", "mw"}
    text = CliRunner().invoke(main, words).stdout
    assert "slowdown 1.1787" in text
    assert "the slowest rank 7 ideal, 3.1 % of the slowdown disappears" in text


def test_a_csv_table_gives_the_result_of_the_parquet_table(tmp_path):
    path = tmp_path / "table.csv"
    pa_csv.write_csv(job(lag=0.02), path)
    result = stragglers_result.stragglers(JobModel.of(operations.read(path)))
    expected = stragglers_result.stragglers(JobModel.of(operations.of_table(job(lag=0.02))))
    assert result.slowdown == pytest.approx(expected.slowdown, rel=1e-6)
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    with pytest.raises(TraceFileError, match=r"table.csv: the table has no rows"):
        operations.read(path)


def test_of_equal_scores_the_lower_ranks_are_the_worst():
    rank_of = np.array([[3, 2, 1, 0], *(np.arange(4, 32).reshape(-1, 4)).tolist()])
    job = SimpleNamespace(rank_of=rank_of)
    assert stragglers_result._worst(job, np.ones(rank_of.shape)) == (0,)
    scores = np.where(rank_of == 17, 1.5, 1.0)
    assert stragglers_result._worst(job, scores) == (17,)
