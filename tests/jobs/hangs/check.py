"""Compare what `fastcomm.diagnose_hang` says of recorded jobs with what was planted.

    python tests/jobs/hangs/check.py FOLDER

Reads `analyzer.json` in FOLDER, too, if `analyzer.py` has written it. Exits 1 if fewer than
95 % of the hangs are right, or if a job without a hang is blamed.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import fastcomm

_LEAST_SHARE = 0.95
_ANALYZERS = {
    "as_written": "PyTorch's analyzer",
    "with_members": "the same, told the members of groups",
}


def judge(folder: Path) -> dict[str, Any]:
    """Return the truth of a case, the verdict, and whether it is right."""
    truth = json.loads((folder / "truth.json").read_text())
    begin = time.perf_counter()
    hang = fastcomm.diagnose_hang(folder / "dumps")
    answer = {"kind": hang.kind, "culprits": [*hang.culprits]}
    return {
        "name": folder.name,
        "truth": truth,
        "answer": answer,
        "confidence": hang.confidence,
        "seconds": time.perf_counter() - begin,
        "is_right": hang.hang == truth["hang"] and answer in truth["accept"],
    }


def _table(cases: Iterable[Mapping[str, Any]], analyzed: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table: right answers by kind, blamed jobs for those without."""
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        by_kind.setdefault(case["truth"]["kind"], []).append(case)
    hangs = [case for case in cases if case["truth"]["hang"]]
    healthy = by_kind.pop("none", [])
    columns = [*_ANALYZERS] if analyzed else []
    lines = [
        _row("planted", "jobs", "fastcomm", *(_ANALYZERS[key] for key in columns)),
        _row(*["---"] * (3 + len(columns))),
    ]
    for kind, own in [*sorted(by_kind.items()), ("all hangs", hangs)]:
        right = [sum(case["is_right"] for case in own)]
        right += [sum(_is_right(case, analyzed, key) for case in own) for key in columns]
        lines.append(_row(kind, len(own), *right))
    blamed = [sum(case["answer"]["kind"] != "none" for case in healthy)]
    blamed += [sum(bool(_blamed(case, analyzed, key)) for case in healthy) for key in columns]
    return [*lines, _row("no hang: blamed", len(healthy), *blamed)]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _blamed(case: Mapping[str, Any], analyzed: Mapping[str, Any], key: str) -> list[int]:
    """Return the ranks that another analyzer blames first; none where it fails."""
    return analyzed.get(case["name"], {}).get(key, {}).get("culprits") or []


def _is_right(case: Mapping[str, Any], analyzed: Mapping[str, Any], key: str) -> bool:
    """Return whether another analyzer, which has no kinds, blames a right set of ranks."""
    blamed = _blamed(case, analyzed, key)
    return any(blamed == one["culprits"] for one in case["truth"]["accept"])


def main() -> None:
    """Judge all cases of a folder."""
    folder = Path(sys.argv[1])
    cases = [judge(path.parent) for path in sorted(folder.glob("*/truth.json"))]
    analyzed = {}
    if (folder / "analyzer.json").exists():
        analyzed = json.loads((folder / "analyzer.json").read_text())
    for case in cases:
        if not case["is_right"]:
            truth = case["truth"]
            print(f"wrong: {folder / case['name']}: {truth['planted']}")
            print(f"       {case['answer']}, confidence {case['confidence']}")
            print(f"       right are {truth['accept']}")
    print("\n".join(_table(cases, analyzed)))
    for key in _ANALYZERS if analyzed else ():
        failed = [name for name, one in analyzed.items() if "error" in one[key]]
        print(f"{_ANALYZERS[key]}: fails on {len(failed)} of {len(analyzed)} jobs")
    hangs = [case for case in cases if case["truth"]["hang"]]
    share = sum(case["is_right"] for case in hangs) / max(1, len(hangs))
    blamed = [
        case["name"] for case in cases if not case["truth"]["hang"] and not case["is_right"]
    ]
    print(f"{share:.1%} of {len(hangs)} hangs right; blamed without a hang: {blamed or 'none'}")
    sys.exit(share < _LEAST_SHARE or bool(blamed))


if __name__ == "__main__":
    main()
