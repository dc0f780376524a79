"""Test the formats of measured loads of experts, and of placements."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

from fastcomm.dispatch.expert_files import read_loads, read_placements
from fastcomm.errors import ConfigError

LOADS = np.random.default_rng(1).integers(1, 99, (3, 2, 4)).astype(float)


def rows(loads, *, with_steps=True):
    step, layer, expert = np.indices(loads.shape).reshape(3, -1)
    columns = {"layer": layer, "expert": expert, "tokens": loads.ravel()}
    return pa.table({"step": step, **columns} if with_steps else columns)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_have_a_row_per_step_layer_and_expert(tmp_path, suffix):
    path = tmp_path / f"loads.{suffix}"
    write = pq.write_table if suffix == "parquet" else pa_csv.write_csv
    write(rows(LOADS), path)
    assert (read_loads(path, 2, 4) == LOADS).all()
    write(rows(LOADS[:1], with_steps=False), path)
    assert (read_loads(path, 2, 4) == LOADS[:1]).all()


def test_rows_in_any_order_are_added_and_steps_need_not_be_consecutive(tmp_path):
    path = tmp_path / "loads.csv"
    path.write_text("expert,tokens,step,layer\n3,1,90,0\n0,2,10,0\n0,3,10,0\n")
    loads = read_loads(path, 1, 4)
    assert loads.tolist() == [[[5, 0, 0, 0]], [[0, 0, 0, 1]]]


def test_a_header_may_have_spaces(tmp_path):
    path = tmp_path / "loads.csv"
    path.write_text("layer, expert, tokens\n0, 0, 5\n0, 1, 2\n")
    assert read_loads(path, 1, 2).tolist() == [[[5, 2]]]


def test_the_counts_of_sglang_are_loads(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps({"logical_count": LOADS.tolist(), "rank": 0}))
    assert (read_loads(path, 2, 4) == LOADS).all()
    path.write_text(json.dumps({"logical_count": LOADS[0].tolist()}))
    assert (read_loads(path, 2, 4) == LOADS[:1]).all()
    path.write_text(json.dumps(LOADS[0].tolist()))
    assert (read_loads(path, 2, 4) == LOADS[:1]).all()


def test_dense_layers_and_empty_steps_are_left_out(tmp_path):
    path = tmp_path / "counts.json"
    whole = np.zeros((4, 3, 4))
    whole[:3, 1:] = LOADS
    path.write_text(json.dumps({"logical_count": whole.tolist()}))
    assert (read_loads(path, 2, 4) == LOADS).all()


def test_a_text_has_a_line_per_layer(tmp_path):
    path = tmp_path / "load.txt"
    path.write_text("9 1 1 1\n1,2,3,4\n")
    assert read_loads(path, 2, 4).tolist() == [[[9, 1, 1, 1], [1, 2, 3, 4]]]


VLLM = "INFO 01-01 [eplb_state.py:1] EPLB step: 20 for model x: avg_tokens=2.00, max_tokens=3, "


@pytest.mark.parametrize(("name", "text", "error"), [
    ("a.txt", "1 2 x", "the file may have only numbers"),
    ("a.txt", "1 2 3", "3 numbers are not a line for each of 2 layers"),
    ("a.txt", "", "0 numbers"),
    ("a.txt", "1 2 3 4 5 6", "loads of 3 experts, but a layer has 4"),
    ("a.txt", "1 2 3 4 5 6 7 nan", "no number up to"),
    ("a.txt", "1 2 3 4 5 6 7 -1", "a load is below 0"),
    ("a.txt", "0 0 0 0 0 0 0 0", "no expert has a token"),
    ("serve.log", VLLM + "balancedness=0.9", "vLLM's log has the balance of ranks"),
    ("other.log", "INFO rank 0: balancedness=0.9", "from its expert_load_pass"),
    ("a.csv", "layer,expert\n0,1\n", "no column tokens"),
    ("a.csv", "layer,expert,tokens\n", "no rows"),
    ("a.csv", "\n", "no column layer, expert, tokens"),
    ("a.csv", "layer,expert,tokens\n0,0,5\n0,1,-3\n", "row 2: tokens is -3; expected a number"),
    ("a.csv", "layer,expert,tokens\n0,1,1\n0,x,1\n", "row 2: expert is x; expected a number"),
    ("a.csv", "layer,expert,tokens\n0,1,1\n0,2,\n", "row 2: tokens is nothing; expected a"),
    ("a.csv", "layer,expert,tokens, tokens\n0,1,1,2\n", "column tokens is there twice"),
    ("a.csv", "layer,expert,tokens\n0,1.5,1\n", "column expert: expected whole numbers"),
    ("a.csv", "layer,expert,tokens\n0,-1,1\n", "column expert: expected whole numbers"),
    ("a.csv", "layer,expert,tokens\n0,nan,1\n", "column expert: expected whole numbers"),
    ("a.csv", "layer,expert,tokens\n0,1\n", "row 1: tokens is nothing"),
    ("a.csv", "layer,expert,tokens\n1000000,16000000,1\n", "are too many"),
    ("a.csv", "layer,expert,tokens\n0,3,1\n", "1 of them with tokens"),
    ("a.json", "{}", "no key logical_count"),
    ("a.json", '{"logical_count": [[1, 2], [3]]}', "not lists of equally many numbers"),
    ("a.json", '{"logical_count": [1, 2]}', "has shape"),
    ("a.json", '{"logical_count": "x"}', "not lists of"),
    ("a.json", '{"logical_count": [["1", "2"]]}', "expected numbers"),
    ("a.json", '{"logical_count": [[true, false]]}', "expected numbers"),
    ("a.json", '{"logical_count": [[1' + "0" * 400 + "]]}", "not lists of"),
    ("a.json", "{", "not JSON"),
    ("a.pt", "x", "may run code when they are read"),
    ("a.parquet", "x", "a.parquet"),
])  # fmt: skip
def test_files_without_loads_are_errors(tmp_path, name, text, error):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_loads(path, 2, 4)


def test_experts_without_rows_have_no_tokens(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("layer,expert,tokens\n0,1,5\n1,0,7\n")
    assert read_loads(path, 2, 4).tolist() == [[[0, 5, 0, 0], [7, 0, 0, 0]]]


def test_columns_of_other_types_are_errors(tmp_path):
    path = tmp_path / "loads.parquet"
    table = rows(LOADS, with_steps=False)
    pq.write_table(table.set_column(0, "layer", pa.array([[1]] * len(table))), path)
    with pytest.raises(ConfigError, match=r"loads\.parquet"):
        read_loads(path, 2, 4)
    pq.write_table(table.set_column(0, "layer", pa.nulls(len(table))), path)
    with pytest.raises(ConfigError, match="row 1: layer is nothing"):
        read_loads(path, 2, 4)


@pytest.mark.parametrize(("text", "error"), [
    ("[]", "no layers with physical_to_logical"),
    ('{"layers": [3]}', "0 layers, but the workload has 1"),
    ('{"layers": [{"physical_to_logical": [0, 1]}]}', "2 replicas; expected all 8 experts"),
    ('{"physical_to_logical_map": [[0,1,2,3,4,5,6,"a"]]}', "is not an expert"),
    ('{"physical_to_logical_map": [[0,1,2,3,4,5,6,8]]}', "8 is not an expert"),
    ('{"physical_to_logical_map": 7}', "no layers"),
    ("{", "not JSON"),
])  # fmt: skip
def test_a_file_without_placements_is_an_error(tmp_path, text, error):
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=error):
        read_placements(path, 1, 8, 4)


def test_the_maps_of_sglang_are_placements(tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[1, 0, 3, 2, 5, 4, 7, 6]]}))
    (placement,) = read_placements(path, 1, 8, 4)
    assert placement.logical.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
