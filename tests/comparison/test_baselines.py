"""Test named baselines, and the action that comments a comparison on a pull request."""

import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
import yaml
from builders.commands import invoke
from builders.places import ROOT

from fastcomm.comparison.baselines import FOLDER, baseline_path, load_baseline
from fastcomm.errors import ConfigError, FastcommError
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

ACTION = ROOT / ".github" / "actions" / "compare" / "action.yml"
_SMALL = {"steps": 3, "layers": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a healthy run, its baseline, and a run with a straggler."""
    folder = tmp_path_factory.mktemp("runs")
    write(Job.of(4, straggler=None, **_SMALL), folder / "monday")
    write(Job.of(4, straggler=2, **_SMALL), folder / "tuesday")
    invoke("baseline", "save", "good", folder / "monday")
    return folder


def test_a_baseline_is_the_metrics_of_the_run_beside_it(runs):
    path = runs / FOLDER / "good.json"
    saved = json.loads(path.read_text("utf-8"))
    assert saved == json.loads(invoke("metrics", str(runs / "monday"), "--json").stdout)
    assert [own.name for own in path.parent.iterdir()] == ["good.json"]
    assert load_baseline("good", runs / "tuesday") == saved


def test_metrics_and_compare_name_the_cause_that_is_new(runs):
    run = str(runs / "tuesday")
    measured = invoke("metrics", run, "--baseline", "good")
    assert "Against the baseline good:" in measured.stdout
    assert "New: Rank 2 is a straggler" in measured.stdout
    compared = invoke("compare", run, "--baseline", "good")
    assert "New: Rank 2 is a straggler" in compared.stdout
    by_path = invoke("compare", str(runs / FOLDER / "good.json"), run)
    assert compared.stdout == by_path.stdout
    words = ("compare", run, "--baseline", "good", "--fail-if", "iteration.mean_ns > +1%")
    invoke(*words, code=4)


def test_a_baseline_is_replaced_whole_or_not_at_all(runs, tmp_path, monkeypatch):
    run = tmp_path / "run"
    write(Job.of(2, **_SMALL), run)
    invoke("baseline", "save", "one", run)
    before = (tmp_path / FOLDER / "one.json").read_bytes()
    monkeypatch.setattr("fastcomm.comparison.baselines.json_text", _broken)
    invoke("baseline", "save", "one", run, code=1)
    assert (tmp_path / FOLDER / "one.json").read_bytes() == before
    assert len([*(tmp_path / FOLDER).iterdir()]) == 1


def _broken(_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "-o", "a\nb", "x" * 101, "a b"])
def test_names_that_are_no_safe_file_names_are_refused(runs, name):
    with pytest.raises(ConfigError, match="expected letters"):
        baseline_path(name, runs / "monday")


def test_what_is_wrong_is_one_line(runs):
    run = str(runs / "tuesday")
    absent = invoke("metrics", run, "--baseline", "bad", code=1)
    assert "no such baseline; there are: good." in absent.stderr
    invoke("compare", run, run, "--baseline", "good", code=2)
    assert "Missing argument 'AFTER'" in invoke("compare", run, code=2).stderr
    with pytest.raises(ConfigError, match="is a URL"):
        baseline_path("good", "memory://bucket/run")
    (runs / FOLDER / "odd.json").write_text("[1]")
    with pytest.raises(FastcommError, match="no metrics of fastcomm"):
        load_baseline("odd", run)
    (runs / FOLDER / "odd.json").unlink()


def test_a_baseline_beside_a_file_is_no_trace(tmp_path):
    write(Job.of(2, **_SMALL), tmp_path)
    [first, *_] = sorted(tmp_path.glob("rank0*"))
    invoke("baseline", "save", "one", first)
    done = invoke("metrics", str(tmp_path), "--json")
    assert json.loads(done.stdout)["ranks"] == [0, 1]


GH = """\
    #!/bin/bash
    printf '%s\\n' "$*" >> "$LOG"
    case "$1 $2" in
      "api --paginate") cat "$EARLIER" ;;
      "pr comment") cat "${@: -1}" > "$LOG.body" ;;
    esac
"""


class Action:
    """The action, whose steps run here with scripts in the place of `gh` and `fastcomm`."""

    def __init__(self, folder):
        """Make the scripts, and an environment as on a runner."""
        self.folder, tools = folder, folder / "bin"
        tools.mkdir()
        scripts = {
            "gh": textwrap.dedent(GH),
            "fastcomm": f'#!/bin/bash\nexec "{sys.executable}" -P -m fastcomm "$@"\n',
        }
        for name, text in scripts.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        for name in ("output", "summary", "earlier"):
            (folder / name).touch()
        self.environment = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]),
            "RUNNER_TEMP": str(folder),
            "GITHUB_OUTPUT": str(folder / "output"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary"),
            "GITHUB_REPOSITORY": "someone/job",
            "LOG": str(folder / "log"),
            "EARLIER": str(folder / "earlier"),
        }

    def run(self, **inputs):
        """Run all steps as GitHub does, and return the exit code of the last."""
        action = yaml.safe_load(ACTION.read_text("utf-8"))
        defaults = {name: about.get("default", "") for name, about in action["inputs"].items()}
        values = {f"inputs.{name}": value for name, value in {**defaults, **inputs}.items()}
        code = 0
        for step in action["runs"]["steps"]:
            for line in (self.folder / "output").read_text().splitlines():
                name, _, value = line.partition("=")
                values[f"steps.compare.outputs.{name}"] = value
            if "if" in step and not values["inputs.pull-request"]:
                continue
            own = {
                name: re.sub(r"\$\{\{ *(\S+) *\}\}", lambda m: values[m[1]], text)
                for name, text in step.get("env", {}).items()
            }
            assert "${{" not in step["run"]  # a text of a user would become a script
            code = subprocess.run(
                ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
                env={**self.environment, **own},
                cwd=self.folder,
                check=False,
            ).returncode
            if code:
                return code
        return code

    def calls(self):
        """The calls of `gh`, a line each."""
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []


def test_the_action_comments_and_fails_if_a_condition_holds(runs, tmp_path):
    action = Action(tmp_path)
    conditions = "iteration.mean_ns > +1%\noverlap.average_overlap_ratio < 0%\n"
    code = action.run(
        **{
            "baseline": "good",
            "after": str(runs / "tuesday"),
            "fail-if": conditions,
            "requirement": "",
            "pull-request": "12",
            "token": "secret",
        }
    )
    assert code == 4
    assert action.calls()[-1].startswith("pr comment 12 --repo someone/job --body-file ")
    body = (tmp_path / "log.body").read_text()
    assert body.startswith("<!-- fastcomm compare -->\n")
    assert "New: Rank 2 is a straggler" in body
    assert "FAIL iteration.mean_ns > +1%" in body
    assert (tmp_path / "summary").read_text() == body


def test_the_action_replaces_its_earlier_comment(runs, tmp_path):
    action = Action(tmp_path)
    (tmp_path / "earlier").write_text("77\n")
    inputs = {"before": str(runs / "monday"), "after": str(runs / "monday")}
    more = {"requirement": "", "pull-request": "12", "token": ""}
    assert action.run(**inputs, **more) == 0
    assert action.calls()[-1].startswith(
        "api --method PATCH repos/someone/job/issues/comments/77 -F body=@"
    )


def test_the_action_takes_texts_as_texts(tmp_path):
    action = Action(tmp_path)
    evil = f'$(touch "{tmp_path}/evil")`touch {tmp_path}/evil`; --help'
    inputs = {"before": evil, "after": evil, "requirement": "", "pull-request": "", "token": ""}
    assert action.run(**inputs) != 0
    assert not (tmp_path / "evil").exists()
    assert action.calls() == []
    assert "Error" in (tmp_path / "summary").read_text()
