"""Test messages of commands, and options from settings."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fastcomm.cli.main import COMMANDS, main
from fastcomm.synthetic.job import Job
from fastcomm.synthetic.traces import write

JOB = Job.of(2, steps=2, layers=1, micro_batches=1)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    write(JOB, folder)
    (folder / "notes.txt").write_text("no trace")
    return folder


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    """A settings file of the test's own, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "fastcomm" / "settings.toml"


def written(settings, text):
    settings.parent.mkdir()
    settings.write_text(text)


def call(*words, **more):
    return CliRunner().invoke(main, [*map(str, words)], **more)


def test_quiet_prints_only_results_and_errors(traces, tmp_path):
    words = ("ingest", traces, "-o", tmp_path / "store")
    assert "2 ranks" in call(*words).stderr
    silent = call(*words, "-q")
    assert (silent.exit_code, silent.stderr) == (0, "")
    bad = call("metrics", tmp_path / "absent", "--quiet")
    assert bad.exit_code == 2
    assert bad.stderr.startswith("Error: ")
    assert "2 ranks" in call(*words).stderr, "the next call talks again"


def test_verbose_logs_timings_and_tracebacks(traces, tmp_path):
    said = call("metrics", traces, "--verbose", "--json")
    assert json.loads(said.stdout)["ranks"] == [0, 1]
    assert "s  2 ranks read by 1 processes" in said.stderr
    assert "Traceback" in call("metrics", tmp_path / "absent", "-v").stderr
    assert "Traceback" not in call("metrics", tmp_path / "absent").stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_quiet_and_verbose(name):
    command = main.get_command(None, name)
    inner = [(name, sub) for sub in getattr(command, "commands", ())] or [(name,)]
    for words in inner:
        text = call(*words, "--help-all").stdout
        assert "--quiet" in text
        assert "--verbose" in text


def test_command_line_environment_and_file_have_this_precedence(traces, settings):
    written(settings, '[metrics]\nlink-bandwidth = "100GB/s"\n')

    def link(*words, **more):
        done = call("metrics", traces, "--json", *words, **more)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)["link_bandwidth"]

    environment = {"FASTCOMM_METRICS_LINK_BANDWIDTH": "200GB/s"}
    assert link() == 100e9
    assert link(env=environment) == 200e9
    assert link("--link-bandwidth", "300GB/s", env=environment) == 300e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[metrics]\nlink-bandwith = 1",
            "no option 'link-bandwith'; did you mean 'link-bandwidth'?",
        ),
        ("metrics = 1", "metrics is no table; begin it with [metrics]"),
        ("[metrics", "settings.toml"),
        ("[dispatch]\nsimulat = 1", "no table simulat: expected one of"),
    ],
)
def test_an_invalid_setting_is_an_error_with_file_and_key(settings, text, message):
    written(settings, text)
    name = "dispatch" if "dispatch" in text else "metrics"
    done = call(name, *(["simulate"] if name == "dispatch" else []), "somewhere")
    assert done.exit_code == 2
    assert message in done.stderr
    assert str(settings) in done.stderr


def test_a_named_settings_file_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTCOMM_SETTINGS", str(tmp_path / "absent.toml"))
    done = call("metrics", "somewhere")
    assert done.exit_code == 2
    assert "FASTCOMM_SETTINGS names it" in done.stderr


def test_settings_apply_to_subcommands(settings, tmp_path):
    written(settings, "[dispatch.generate]\nnum-nodes = 2\niter-num = 1\nseq-len = 64\n")
    done = call("dispatch", "generate", "-o", tmp_path / "load")
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "load").glob("*.parquet"))) == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_of_the_shell(shell):
    done = call("completion", shell)
    assert done.exit_code == 0
    assert "_FASTCOMM_COMPLETE" in done.stdout


def test_help_loads_no_heavy_modules():
    code = (
        "import sys\nfrom fastcomm.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'numba', 'pyarrow', 'rich', 'tomllib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
