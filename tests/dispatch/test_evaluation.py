"""Test predictions of measured expert all-to-alls, and constants fitted to them."""

import json

import pytest
from click.testing import CliRunner

from fastcomm.cli.main import main
from fastcomm.dispatch.evaluation import evaluate_exchanges

HEAD = "mode,nodes,ranks,hidden,topk,experts,tokens,sms,dispatch_us,combine_us\n"
TOKENS = [512 * number for number in range(1, 9)]


def table(path, factors, tokens=TOKENS):
    """A table whose times are the predicted ones times factors, one per row."""
    rows = [f"normal,1,8,7168,8,256,{count},24,," for count in tokens]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    times = [
        [row.phases[phase].predicted_s * 1e6 * factor for phase in ("dispatch", "combine")]
        for row, factor in zip(evaluate_exchanges(path).rows, factors, strict=True)
    ]
    rows = [f"{row[:-1]}{a:.3f},{b:.3f}" for row, (a, b) in zip(rows, times, strict=True)]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    return str(path)


def evaluated(*words):
    done = CliRunner().invoke(main, ["dispatch", "evaluate", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_fit_is_measured_on_rows_held_out(tmp_path):
    path = table(tmp_path / "slow.csv", [1.3] * len(TOKENS))
    rows = json.loads(evaluated(path, "--calibrate", "--json"))["held_out"]
    assert [row["phase"] for row in rows] == ["dispatch", "combine"]
    for row in rows:
        assert row["rows"] == len(TOKENS) // 2
        assert row["shipped_error"] == pytest.approx(1 - 1 / 1.3, rel=1e-3)
        assert row["fitted_error"] < row["shipped_error"] / 2
    text = evaluated(path, "--calibrate")
    assert "rows held out" in text
    assert "use the shipped ones" not in text


def test_a_fit_that_makes_other_rows_worse_is_warned_of(tmp_path):
    path = table(tmp_path / "uneven.csv", [1.5, 1.0] * (len(TOKENS) // 2))
    text = " ".join(evaluated(path, "--calibrate").split())
    assert "constants fitted to every other row are worse on the rest" in text
    assert "use the shipped ones" in text


def test_too_few_rows_are_not_held_out(tmp_path):
    path = table(tmp_path / "few.csv", [1.1, 1.1], TOKENS[:2])
    assert json.loads(evaluated(path, "--calibrate", "--json"))["held_out"] == []
    assert "n/a on other rows (too few rows" in evaluated(path, "--calibrate")
    assert json.loads(evaluated(path, "--json"))["held_out"] is None


def test_rows_outside_of_the_measurements_are_extrapolated(tmp_path):
    path = tmp_path / "sizes.csv"
    rows = [f"normal,1,8,7168,8,256,{tokens},24,," for tokens in (4096, 1 << 20)]
    path.write_text(HEAD + "\n".join(rows) + "\n")
    measured, beyond = json.loads(evaluated(str(path), "--json"))["rows"]
    assert measured["extrapolated"] is None
    assert beyond["extrapolated"].startswith("1048576 tokens, measured: ")
    text = evaluated(str(path))
    assert "extrapolated: 1 row of deepep: 1048576 tokens" in text
    page = tmp_path / "page.html"
    evaluated(str(path), "--html", str(page))
    assert "What is predicted?" in page.read_text()
