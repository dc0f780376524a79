"""Test `fastcomm isp`."""

import json

import pyarrow.parquet as pq
import pytest
from builders.isp_commands import ASKED, call
from builders.places import SCHEMAS
from jsonschema import Draft202012Validator

from fastcomm.compat.isp import of_config
from fastcomm.errors import ConfigError
from fastcomm.isp import problem, search
from fastcomm.isp.analysis import search_strategies
from fastcomm.isp.calibration import setting
from fastcomm.isp.result import with_units

SCHEMA = Draft202012Validator(json.loads((SCHEMAS / "isp.json").read_text()))
RECORD = [
    "pp",
    "sp",
    "wp_size",
    "zp_size",
    "seq_len",
    "micro_bsz",
    "micro_num",
    "algo_type",
    "activation_ckpt",
    "world_size",
    "g_bsz",
    "tgs",
    "total_latency",
    "fwd_bwd_cost",
    "all_fwd_bwd_cost",
    "overlap_latency",
    "comp_wp",
    "comp_attn",
    "pp_comm_cost",
    "zp_comm_cost",
    "wp_comm_cost",
    "sp_comm_cost",
    "wdp_comm_cost",
    "total_mm_cost",
    "os_mm_cost",
    "p_g_mm_cost",
    "mem_pool_mm",
    "rotary_emb_sincos_cache_mm",
    "pp_p2p_buffer",
    "activation",
    "blocks_activation",
    "norm_activation",
    "head_input_activation",
    "head_output_activation",
    "block_output_activation",
    "backward_mem_peak",
    "modelsize",
]
MORE = [
    "p_para",
    "p_grads",
    "p_os",
    "head",
    "elementwise",
    "optimizer",
    "grad_sync",
    "param_sync",
    "bubble",
    "p2p",
    "mfu",
    "hfu",
    "step_peak",
    "extrapolated",
    "ep",
    "interleave",
]


def test_the_table_names_the_fastest_of_each_algorithm():
    text = call(*ASKED)
    for word in ("candidates", "fastest", "algorithm", "where a step goes", "ISP", "MTP"):
        assert word in text


def test_json_has_the_keys_of_a_record(tmp_path):
    found = json.loads(call(*ASKED, "--json", "--output", str(tmp_path), "--sensitivity"))
    assert set(with_units(dict.fromkeys([*RECORD, *MORE], 1))) <= set(found["best"][0])
    assert len(found["best"]) == 6
    assert found["candidates"] == found["feasible"] + sum(found["rejected"].values())
    rates = [record["tokens_per_s_per_gpu"] for record in found["best"]]
    assert rates == sorted(rates, reverse=True)
    assert set(found["best_by_algo"]) == {"isp", "msp", "fsp", "mtp"}
    assert set(found["chosen"]) == {
        *("algo_type", "seq_len", "micro_num", "micro_bsz", "pp_size"),
        *("tp_size", "wp_size", "zp_size", "activation_ckpt"),
    }
    assert all(change["gain"] >= 0 for change in found["sensitivity"])
    table = pq.read_table(tmp_path / "strategies.parquet")
    assert table.num_rows == found["feasible"]
    assert table["tokens_per_s_per_gpu"][0].as_py() == rates[0]
    assert json.loads((tmp_path / "isp.json").read_text())["best"] == found["best"]
    assert (tmp_path / "strategies.csv").read_text().startswith('"algo_type"')


def test_compat_prints_the_record_of_the_original(isp_data):
    found = json.loads(
        call(
            *("--model", "7B", "--world-size", "64", "--seq-len", "4096"),
            *("--global-batch", "4Mi", "--memory", "80GiB", "--compat", "isp-2025"),
            *("--compat-tables", str(isp_data), "--strict-batch", "--overlap-wdp", "--json"),
        )
    )
    assert set(found["best"][0]) == set(RECORD)
    assert (found["candidates"], found["feasible"]) == (28202, 4216)
    assert found["candidates"] == found["feasible"] + sum(found["rejected"].values())


def test_a_configuration_of_the_original_can_be_searched(tmp_path):
    path = tmp_path / "config.json"
    said = {
        "world_size_max": 16,
        "world_size_min": 8,
        "global_bsz": 1 << 20,
        "sequence_length": 4096,
        "model_size": 7,
        "use_strict_bsz": True,
        "mem_threshold": 80 * 2**30,
    }
    path.write_text(json.dumps(said))
    found = json.loads(call("--compat-config", str(path), "--json"))
    assert set(found["best_by_world"]) == {"8", "16"}
    assert json.loads(call("--compat-config", str(path), "--json", "--world-size", "16"))[
        "feasible"
    ]
    path.write_text(json.dumps(said | {"sequence": 1}))
    assert "unknown key 'sequence'" in call("--compat-config", str(path), code=2)


def test_fixed_micro_batches_and_batch_ranges_can_be_searched():
    fixed = of_config(
        {
            "world_size_max": 8,
            "sequence_length": 4096,
            "model_size": 7,
            "use_fixed_micro_bsz": 1,
            "fixed_micro_bsz": 1,
            "fixed_micro_num": 4,
        }
    )
    found = search.search(problem.problem_of(fixed), setting(fixed).cluster)
    assert set(found.columns["micro_num"]) == {4}
    ranged = search_strategies(
        model="7B",
        world_size=8,
        seq_len=4096,
        global_batch_min="512Ki",
        global_batch_max="600Ki",
    )
    batches = set(ranged.columns["g_bsz"])
    assert min(batches) >= 512 << 10
    assert max(batches) <= 600 << 10
    assert len(batches) > 1


def test_several_lengths_make_a_sweep(tmp_path):
    asked = [*ASKED[:2], "--world-size", "8,16", "--seq-len", "4Ki,12Ki", *ASKED[6:]]
    text = call(*asked, "--output", str(tmp_path))
    assert "n/a 12288 on 8: global batch 1048576 is not a" in text
    table = pq.read_table(tmp_path / "sweep.parquet").to_pylist()
    assert next(row["scaling"] for row in table if row["seq_len"] == 4096) == 1.0
    assert len(json.loads(call(*asked, "--json"))["cells"]) == 4


def test_the_scaling_factor_of_a_sweep_is_the_time_of_one_gpu_over_n_times_that_of_n():
    tiny = ("--model", "0.25B", "--seq-len", "2Ki,4Ki", "--global-batch", "256Ki")
    asked = (*tiny, "--cluster", "h100", "--json", "--world-size")
    cells = json.loads(call(*asked, "1,4"))["cells"][:2]
    one, four = (cell["best"]["total_latency_ns"] for cell in cells)
    assert [cell["scaling_factor"] for cell in cells] == [1, pytest.approx(one / (4 * four))]
    without_one = json.loads(call(*asked, "2,4"))["cells"][:2]
    assert [cell["scaling_factor"] for cell in without_one] == [None, None]
    assert without_one[0]["scaling"] == 1


@pytest.mark.parametrize("algo", ["isp", "msp", "fsp", "mtp", "dsp"])
def test_one_strategy_is_explained_term_by_term(algo):
    text = call(*ASKED, "--algorithms", algo, "--explain", "2")
    for word in ("step", "GEMM", "gradients", "optimizer states", "On two GPUs"):
        assert word in text


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (
            ("--algorithms", "isp", "--sp-sizes", "4"),
            "--context-parallel-size 4 --cp-comm-type a2a",
        ),
        (("--algorithms", "msp", "--sp-sizes", "4"), "--tensor-model-parallel-size 4"),
        (("--pp-sizes", "2"), "--pipeline-model-parallel-size 2"),
        (("--no-flash", "--micro-bsz", "1"), "--micro-batch-size 1"),
    ],
)
def test_the_best_strategy_is_printed_as_trainer_arguments(options, wanted):
    assert wanted in call(*ASKED, *options, "--trainer-args", "megatron")
    assert "parallel = dict(" in call(*ASKED, *options, "--trainer-args", "internevo")


_ONE = ("--pp-sizes", "1", "--sp-sizes", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "3GiB"), "no strategy fits into memory: the smallest needs"),
        (("--sp-sizes", "3"), "the nearest smaller degree is 2"),
        (("--global-batch", "5000"), "try 4096 or 8192"),
        (("--cluster", "h100", "--global-batch", "512"), "global batch 512 is not a multiple"),
        (("--trainer", "megatron"), "No such option '--trainer'"),
        (("--launch", "megatron"), "No such option '--launch'"),
        (("--global-batch", "4096", *_ONE), "try 65536"),
        (("--model", "gpt-x"), "or one of internlm-0.25b"),
        (("--model", "8"), "expected 0.25, 1.3"),
        (("--cluster", "v100"), "no such file, and not one of a100"),
        (("--world-size", "9-15"), "it has no multiple of 8"),
        (("--world-size", "8-"), "expected a whole number above 0"),
        (("--memory", "70"), "invalid memory '70': 70 bytes; add a unit, as in 70GiB"),
        (("--memory", "lots"), "expected a whole number above 0"),
        (("--algorithms", "isp,dsp"), "search it alone"),
        (("--algorithms", "xyz"), "expected isp"),
        (("--global-batch-max", "1Mi"), "one number or a range"),
        (("--explain", "999999"), "the number of feasible strategies"),
        (("--explain", "1", "--top", "3"), "--top has no effect with --explain"),
        (("--imbalance", "2"), "internlm-7b has no experts; leave --imbalance out"),
        (("--seq-len", "4Ki,8Ki", "--top", "3"), "--top: no effect with several --seq-len"),
        (("--calibrate", "/nowhere"), "no such file or folder"),
        (("--pp-sizes", "64"), "has only 32 layers"),
        (("--compat", "isp-2025", "--sp-sizes", "1"), "--sp-sizes: no effect with --compat"),
    ],
)
def test_an_impossible_search_is_an_error_with_a_suggestion(options, message):
    code = 1 if options in (("--memory", "3GiB"), ("--global-batch", "4096", *_ONE)) else 2
    asked = dict(zip(ASKED[::2], ASKED[1::2], strict=True))
    kept = [word for pair in asked.items() if pair[0] not in options for word in pair]
    assert message in " ".join(call(*kept, *options, code=code).split())


def test_a_missing_option_is_named():
    said = call("--model", "7B", code=2)
    assert "missing --world-size, --seq-len, --global-batch" in said
    assert "for example: --world-size 64 --seq-len 8Ki --global-batch 4Mi" in said
    with pytest.raises(ConfigError, match="missing global_batch"):
        search_strategies(model="7B", world_size=8, seq_len=4096)


def test_options_change_the_documented_quantities():
    plain = search_strategies(
        model="7B",
        world_size=64,
        seq_len=4096,
        global_batch="1Mi",
        pp_sizes="4",
        sp_sizes="2",
        interleave=1,
    )
    other = {
        name: search_strategies(
            model="7B",
            world_size=64,
            seq_len=4096,
            global_batch="1Mi",
            pp_sizes="4",
            sp_sizes="2",
            **{"interleave": 1, name: value},
        )
        for name, value in {
            "overlap_grad": True,
            "grad_sync": "reduce_scatter",
            "param_sync": "all_gather",
            "interleave": 2,
            "overlap_weights": "per_op",
        }.items()
    }
    best = plain.best(1)[0]["tgs"]
    for name in ("overlap_grad", "param_sync", "interleave"):
        assert other[name].best(1)[0]["tgs"] >= best, name
    assert other["interleave"].best(1)[0]["tgs"] > best
    assert len({found.best(1)[0]["tgs"] for found in other.values()} | {best}) > 3


def test_a_minimum_without_a_maximum_names_both_options():
    text = call(*ASKED[:-2], "--global-batch-min", "4Mi", code=2)
    assert "--global-batch-min: a range needs a maximum; add --global-batch-max" in text


def test_a_strategy_of_the_original_is_explained_and_launched():
    asked = (*ASKED, "--compat", "isp-2024", "--algorithms", "isp", "--strict-batch")
    assert "reduction of gradients" in call(*asked, "--explain", "1")
    assert "weight=dict(size=" in call(*asked, "--trainer-args", "internevo")
    assert "by formulas" in call(*asked)
    mtp = [word.replace("isp", "mtp") if word == "isp" else word for word in asked]
    assert "mtp: the original" in call(*mtp, code=2)


def test_trainer_arguments_contain_the_shards_of_the_best_strategy():
    asked = (*ASKED, "--algorithms", "msp")
    best = json.loads(call(*asked, "--json"))["best"][0]
    text = call(*asked, "--trainer-args", "internevo")
    assert f"zero1=dict(size={best['p_os']}, fsdp={best['p_para'] > 1})" in text
    assert f"micro_num={best['micro_num']}," in text


def test_a_search_of_excessive_size_is_refused(monkeypatch):
    monkeypatch.setattr("fastcomm.isp.search.MOST", 1000)
    assert "more than 1000 candidates" in call(*ASKED, code=2)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    assert "file" in call(*ASKED, "--output", str(tmp_path / "file" / "below"), code=1)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("{", "config.json"),
        ("[]", "expected a JSON object"),
        ('{"use_strict_bsz": 1, "use_fixed_micro_bsz": 1}', "excludes use_fixed_micro_bsz"),
        (
            '{"config": {"seq_len": 4096}, "max_world_size": 8, "model_size": 7}',
            "missing --global-batch",
        ),
    ],
)
def test_a_configuration_that_is_wrong_is_an_error(tmp_path, said, message):
    path = tmp_path / "config.json"
    path.write_text(said)
    assert message in " ".join(call("--compat-config", str(path), code=2).split())


def test_the_json_has_the_explanation_and_the_arguments_of_the_trainer():
    document = json.loads(call(*ASKED, "--explain", "2", "--json"))
    SCHEMA.validate(document)
    explanation = document["explanation"]
    assert explanation["place"] == 2
    whole, *parts = explanation["time"]
    assert whole["time_ns"] == pytest.approx(document["best"][1]["total_latency_ns"])
    assert sum(part["time_ns"] for part in parts if part["level"] == 1) == pytest.approx(
        whole["time_ns"]
    )
    whole, *parts = explanation["memory"]
    assert sum(part["bytes"] for part in parts) == pytest.approx(whole["bytes"])
    document = json.loads(call(*ASKED, "--trainer-args", "megatron", "--json"))
    SCHEMA.validate(document)
    assert "--num-layers 32" in document["trainer_args"]


def test_virtual_stages_that_fit_no_strategy_are_noted():
    words = ("--model", "7B", "--world-size", "32", "--global-batch", "1Mi", "--json")
    words = (*words, "--pp-sizes", "4", "--interleave", "2,32")
    (note,) = json.loads(call(*words, "--seq-len", "4Ki"))["notes"]
    assert note.startswith("--interleave 32 fits no strategy: ")
    assert json.loads(call(*words, "--seq-len", "4Ki,8Ki"))["notes"] == [note]
    assert json.loads(call(*words[:-1], "2", "--seq-len", "4Ki"))["notes"] == []


def test_top_is_the_number_of_strategies_in_the_json():
    words = ("--model", "7B", "--world-size", "8", "--global-batch", "1Mi", "--json")
    found = json.loads(call(*words, "--seq-len", "4Ki", "--top", "2"))
    assert len(found["best"]) == 2
