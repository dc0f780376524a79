"""One call from words to an answer: cluster, tables, calibration, search."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastcomm.cluster import load as load_
from fastcomm.cluster.cluster import Cluster
from fastcomm.errors import ConfigError
from fastcomm.isp import tables as tables_
from fastcomm.isp import words as words_
from fastcomm.isp.calibrated import Calibrated, calibrated
from fastcomm.isp.compat import COMPAT_ALGOS, CompatRules
from fastcomm.isp.question import ALGOS, Question
from fastcomm.isp.result import Found
from fastcomm.isp.tables import AttentionTable, Tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a question is answered with."""

    cluster: Cluster
    attention: AttentionTable | None = None
    calibration: Calibrated | None = None
    compat: CompatRules | None = None
    tables: Tables | None = None


def setting(words: Mapping[str, Any]) -> Setting:
    """Cluster, measured tables and mode, as the words say."""
    cluster = load_.load(words.get("cluster") or "a800")
    gemm = words.get("gemm_table") and tables_.gemm(Path(words["gemm_table"]))
    attention = words.get("attention_table") and tables_.attention(
        Path(words["attention_table"])
    )
    folder = words.get("tables") and Path(words["tables"])
    gpu = "910b" if "910b" in cluster.name.lower() else "a800"
    found = tables_.find(folder, gpu) if folder else None
    if found is None and gemm and attention:
        found = Tables(gemm, attention)
    rules = None
    if words.get("compat"):
        rules = CompatRules(
            variant=words["compat"],
            overlap_wdp=bool(words.get("overlap_wdp")),
            strict_batch=bool(words.get("strict_batch")),
        )
    elif found:
        gemm, attention = found
    said = words.get("calibrate")
    measured = calibrated(str(said), cluster) if said else None
    cluster = measured.cluster if measured else cluster
    return Setting(
        cluster=replace(
            cluster,
            gemm=gemm or cluster.gemm,
            comm_model=words.get("comm_model", cluster.comm_model),
        ),
        attention=attention or None,
        calibration=measured,
        compat=rules,
        tables=found,
    )


def answer(question: Question, using: Setting) -> Found:
    """Search, in the mode that the setting says."""
    if using.compat:
        from fastcomm.isp import compat_search

        algos = COMPAT_ALGOS if question.algos == ALGOS else question.algos
        if "mtp" in algos:
            raise ConfigError("mtp: the original searches isp, msp and fsp")
        asked = replace(question, algos=algos)
        return compat_search.search(asked, using.compat, using.cluster, using.tables)
    from fastcomm.isp.search import search

    return search(question, using.cluster, attention=using.attention)


def find(**words: Any) -> Found:
    """Search from Python: the words of the command line, as in `find(model="7B", ...)`."""
    return answer(words_.asked(words), setting(words))
