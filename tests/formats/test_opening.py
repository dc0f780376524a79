"""Test which files and ranks belong to a run."""

import json

import pytest
from builders import kineto_text as k
from builders.commands import invoke
from builders.opened import open_run, read_here

from fastcomm.errors import FastcommError, TraceFileError
from fastcomm.formats import opening
from fastcomm.formats.config import Config
from fastcomm.metrics.computation import compute_metrics
from fastcomm.trace.rank_grid import Parallel

STEP = [k.mark("ProfilerStep#0", 0, 100), k.all_reduce(10, 5)]


def ranks(*paths, **options):
    return open_run(*paths, config=Config(**options)).ranks


def test_a_run_is_a_directory_files_or_a_glob(tmp_path):
    paths = [k.write(tmp_path / f"t{r}.json", STEP, rank=r, world=2) for r in range(2)]
    assert ranks(tmp_path) == ranks(*paths) == ranks(str(tmp_path / "*.json")) == (0, 1)
    assert ranks(paths[1]) == (1,)


def test_the_rank_comes_from_the_file_or_else_from_its_name(tmp_path):
    k.write(tmp_path / "rank7.json", STEP, rank=2, world=4)
    k.write(tmp_path / "kineto_trace_3.json.gz", STEP, rank="?", world=4)
    assert ranks(tmp_path) == (2, 3)


def test_the_rank_after_a_list_of_groups_is_found(tmp_path):
    info = {"pg_config": [{"pg_name": "0", "ranks": [0, 1]}], "rank": 1, "world_size": 2}
    k.write(tmp_path / "a.json", STEP, distributedInfo=info)
    k.write(tmp_path / "b.json", STEP, distributedInfo={**info, "rank": 0})
    assert ranks(tmp_path) == (0, 1)


def test_an_unknown_rank_is_an_error_that_lists_the_rules(tmp_path):
    for name in ("a.json", "b.json"):
        k.write(tmp_path / name, STEP, distributedInfo={})
    with pytest.raises(
        TraceFileError, match=r"a\.json: cannot determine the rank.*rankN.*kineto_trace_N"
    ):
        open_run(tmp_path)


def test_the_rank_of_a_single_file_may_follow_its_events(tmp_path):
    path = tmp_path / "on_demand.json"
    events = ", ".join(json.dumps(event) for event in STEP)
    info = '"distributedInfo": {"rank": 3, "world_size": 8, "ranks": "[0, 1]"}'
    path.write_text(f'{{"schemaVersion": 1, "traceEvents": [{events}], {info}}}')
    assert compute_metrics(open_run(path)).ranks == (3,)


def test_two_files_of_one_rank_are_both_named(tmp_path):
    for name in ("a.json", "b.json"):
        k.write(tmp_path / name, STEP, rank=1, world=2)
    with pytest.raises(TraceFileError, match=r"two files of rank 1: .*a\.json and .*b\.json"):
        open_run(tmp_path)


def test_files_that_contradict_each_other_about_the_world_are_an_error(tmp_path):
    k.write(tmp_path / "a.json", STEP, rank=0, world=2)
    k.write(tmp_path / "b.json", STEP, rank=1, world=4)
    with pytest.raises(
        TraceFileError, match=r"world size: 2 \(.*a\.json\) and 4 \(.*b\.json\)"
    ):
        open_run(tmp_path)


@pytest.mark.parametrize("command", ["metrics", "info --all", "ingest"])
def test_world_sizes_behind_the_events_that_contradict_each_other_are_an_error(
    tmp_path, command
):
    folder = tmp_path / "run"
    folder.mkdir()
    for rank, world in enumerate((4, 8)):
        document = k.document(STEP, rank=rank, world=world)
        document["distributedInfo"] = document.pop("distributedInfo")
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    words = command.split()
    words += ["-o", tmp_path / "store"] if command == "ingest" else []
    error = invoke(words[0], folder, *words[1:], code=1).stderr
    assert "contradict each other about the world size: 4 (rank 0) and 8 (rank 1)" in error


def test_a_rank_beyond_the_world_is_an_error(tmp_path):
    k.write(tmp_path / "a.json", STEP, rank=4, world=4)
    k.write(tmp_path / "b.json", STEP, rank=0, world=4)
    with pytest.raises(TraceFileError, match=r"/a\.json: rank 4 of a world of 4"):
        open_run(tmp_path)


def test_missing_ranks_are_a_warning_that_names_them(tmp_path):
    for rank in (0, 4):
        k.write(tmp_path / f"{rank}.json", STEP, rank=rank, world=8)
    run = open_run(tmp_path)
    assert run.warnings == ("6 of 8 ranks have no trace here: 1-3, 5-7",)


def test_other_files_of_a_directory_are_named_and_not_read(tmp_path):
    k.write(tmp_path / "rank0.json", STEP)
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "torch_et_0.json").write_text('{"nodes": []}')
    run = open_run(tmp_path)
    assert run.ranks == (0,)
    assert run.warnings == (f"no traces, not read in {tmp_path}: package.json",)


def test_a_directory_without_traces_is_an_error(tmp_path):
    with pytest.raises(FastcommError, match=r"no trace; expected PyTorch profiler \(Kineto\)"):
        open_run(tmp_path)
    with pytest.raises(FastcommError, match="nowhere: no such file or directory"):
        open_run("nowhere")


def test_a_grid_that_contradicts_the_world_is_an_error(tmp_path):
    k.write(tmp_path / "rank0.json", STEP, world=8)
    with pytest.raises(FastcommError, match=r"parallelism: .*3"):
        open_run(tmp_path, config=Config(parallel=Parallel(tp=3)))


def test_a_workload_card_lays_out_the_ranks(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    event = k.all_reduce(10, 5, Process_Group_Ranks="[0, 1]")
    k.write(folder / "kineto_trace_0.json", [k.mark("ProfilerStep#0", 0, 100), event], world=4)
    (folder / "run.yaml").write_text(
        "Model-executor:\n  framework: {name: megatron}\n"
        "  model_plan_parallelization: {tp: 2, pp: 1, dp_shard: 2, cp: 1}\n"
    )
    found = compute_metrics(open_run(folder))
    assert set(found.volume) == {"TP"}
    without = compute_metrics(read_here(opening.open_run(folder, use_card=False)))
    assert set(without.volume) == {"OTHER"}


def test_a_run_can_be_limited_to_ranks(tmp_path):
    for rank in range(3):
        k.write(tmp_path / f"{rank}.json", STEP, rank=rank, world=3)
    run = open_run(tmp_path)
    assert run.only([2, 0]).ranks == (0, 2)
    with pytest.raises(FastcommError, match="rank 7: not in the run; its ranks: 0-2"):
        run.only([7])
