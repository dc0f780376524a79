"""Golden files of the original search: names, problems, rows."""

import csv
import gzip
import re

from fastcomm import models
from fastcomm.compat.isp import OriginalRules
from fastcomm.isp.problem import MicroBatchRule, SearchProblem

GOLDEN = {
    "s25_strict_wdp1_7B_w64_s4096": 28202,
    "s25_strict_wdp0_7B_w64_s131072": 8082,
    "s25_approx_wdp1_7B_w64_s16384": 2070,
    "s24_strict_wdp0_7B_w64_s4096": 28202,
    "s25_strict_wdp1_13B_w64_s32768": 9996,
}
_NAME = re.compile(r"s(2[45])_(\w+)_wdp([01])_(\d+)B_w(\d+)_s(\d+)")


def ask(size, world, seq_len, tokens=4 << 20):
    return SearchProblem(
        model=models.internlm(size),
        world_sizes=(world,),
        seq_len=seq_len,
        batch=MicroBatchRule(least=tokens, most=tokens),
        memory=80 * 2**30,
        algos=("isp", "msp", "fsp"),
    )


def asked(name):
    year, rule, wdp, size, world, seq_len = _NAME.fullmatch(name).groups()
    rules = OriginalRules(
        variant=f"isp-20{year}", strict_batch=rule == "strict", overlap_wdp=wdp == "1"
    )
    return ask(int(size), int(world), int(seq_len)), rules


def golden_rows(folder, name):
    with gzip.open(folder / "golden" / f"{name}.csv.gz", "rt") as file:
        return list(csv.DictReader(file))
