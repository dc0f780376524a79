"""Test `fastcomm isp` with measured tables and calibration."""

import json

import pytest
from builders.isp_commands import ASKED, call
from click.testing import CliRunner

from fastcomm.cli.main import main


def test_a_table_of_measured_communication_replaces_the_links_of_a_cluster(tmp_path):
    table = tmp_path / "hccl.csv"
    rows = [f"all_to_all,8,{size},{1e-4 + size / 20e9}" for size in (1 << 20, 1 << 24, 1 << 28)]
    table.write_text("\n".join(["op,ngpu,bytes,lat_s", *rows]))
    asked = ("--cluster", "ascend910b", "--json")
    asked = (*("--model", "7B", "--world-size", "8", "--seq-len", "4Ki"), *asked)
    asked = (*asked, "--global-batch", "1Mi", "--algorithms", "isp", "--sp-sizes", "8")
    before, after = (
        json.loads(call(*asked, *more)) for more in ((), ("--calibrate", str(table)))
    )
    assert "communication was not" in before["notes"][0]
    costs = [document["best"][0]["sp_comm_cost_ns"] for document in (before, after)]
    assert costs[1] > 2 * costs[0]


def test_calibration_prints_the_deviation_of_its_fits(tmp_path):
    rows = [
        f"{op},{ranks},{volume},{35e-6 + volume / 1e11}"
        for op in ("all_gather", "all_reduce", "all2all", "broadcast", "reduce_scatter")
        for ranks in (2, 8, 16)
        for volume in (1e6, 1e7, 1e8, 1e9)
    ]
    path = tmp_path / "messages.csv"
    path.write_text("\n".join(["op,ngpu,bytes,lat_s", *rows]))
    text = call(*ASKED, "--calibrate", str(path), "--sensitivity")
    assert "median error" in text
    assert "links between nodes x2" in text
    found = json.loads(call(*ASKED, "--calibrate", str(path), "--json"))
    assert len(found["calibration"]) == 15


def test_several_world_sizes_are_ranked_each_and_a_note_says_what_was_not_measured():
    text = call(*ASKED[:2], "--world-size", "8,16", *ASKED[4:], "--cluster", "h100")
    assert "by GPUs" in text
    assert "on 8 to 16 H100-SXM" in text
    assert "links between nodes and backward attention are not measured" in " ".join(
        text.split()
    )


def test_measured_tables_replace_the_curves(isp_data):
    plain = json.loads(call(*ASKED, "--json"))
    folder = json.loads(call(*ASKED, "--json", "--compat-tables", str(isp_data)))
    files = json.loads(
        call(
            *(*ASKED, "--json", "--gemm-table", str(isp_data / "linear_a800.csv")),
            *("--attention-table", str(isp_data / "fa_a800.csv")),
        )
    )
    assert folder["best"] == files["best"]
    assert folder["best"][0]["tokens_per_s_per_gpu"] == pytest.approx(
        plain["best"][0]["tokens_per_s_per_gpu"], rel=0.05
    )
    assert folder["best"][0]["tokens_per_s_per_gpu"] != plain["best"][0]["tokens_per_s_per_gpu"]


@pytest.mark.parametrize("cluster", ["h100", "b200"])
def test_measured_tables_of_another_gpu_are_not_used(isp_data, cluster):
    words = ["isp", *ASKED, "--cluster", cluster, "--compat-tables", str(isp_data)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert f"{isp_data / f'linear_{cluster}.csv'}: no such file" in done.stderr


def test_measured_tables_apply_to_sweeps_and_what_ifs(isp_data):
    table = ("--attention-table", str(isp_data / "fa_a800.csv"))
    asked = (*ASKED[:4], "--seq-len", "4Ki,8Ki", *ASKED[6:])
    cells = [json.loads(call(*asked, *more, "--json"))["cells"] for more in ((), table)]
    assert (
        cells[0][1]["best"]["tokens_per_s_per_gpu"]
        != cells[1][1]["best"]["tokens_per_s_per_gpu"]
    )
    alone = json.loads(call(*ASKED, *table, "--json", "--sensitivity"))
    assert (
        cells[1][0]["best"]["tokens_per_s_per_gpu"] == alone["best"][0]["tokens_per_s_per_gpu"]
    )
    assert all(change["gain"] >= 0 for change in alone["sensitivity"])
