"""Test reports, which only nsys can read: it exports them once, if there is one."""

import logging
import os

import pytest
from builders.commands import invoke, quoted
from builders.nsys_report import SMALL

from fastcomm.errors import FastcommError
from fastcomm.formats.nsys import report as nsys_report
from fastcomm.formats.opening import open_run
from fastcomm.synthetic.nsys.export import write_nsys

# Says how it was called, and copies what stands beside it to the output.
NSYS = """#!/bin/sh
printf '%s ' "$@" >> {log}
echo >> {log}
{first}
for word in "$@"; do
  case $word in --output=*) cp {export} "${{word#--output=}}";; esac
done
"""


@pytest.fixture
def export(tmp_path):
    (path,) = write_nsys(SMALL, tmp_path / "exports", ranks=(0, 1), per_report=2)
    return path


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "reports" / "node 3.nsys-rep"
    path.parent.mkdir()
    path.write_bytes(b"binary")
    return path


@pytest.fixture
def install(tmp_path, export, monkeypatch):
    """Put an nsys on the path; `first` is what it does first. Returns the file of its calls."""

    def install(first="", folder=tmp_path / "bin"):
        log = tmp_path / "calls"
        folder.mkdir(exist_ok=True)
        program = folder / "nsys"
        words = {"log": quoted(log), "export": quoted(export)}
        program.write_text(NSYS.format(first=first, **words))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return log

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return install


def test_a_report_is_exported_once_and_read(install, report, export, caplog):
    log = install()
    caplog.set_level(logging.INFO)
    assert open_run(report).ranks == (0, 1)
    assert invoke("metrics", report, "--json").output
    (call,) = log.read_text().splitlines()
    assert call.startswith("export --type=sqlite --force-overwrite=true --include-blobs=true")
    assert call.endswith(f"{report} ")
    (record,) = [each for each in caplog.records if "exporting it" in each.message]
    assert f"{report}: exporting it with" in record.message
    # As the export itself.
    found, expected = (
        invoke("kernels", path, "--json", "--full-names").stdout for path in (report, export)
    )
    assert found.replace("node 3", "nsys_0") == expected.replace("node 3", "nsys_0")


def test_a_report_that_changed_is_exported_again(install, report):
    log = install()
    open_run(report.parent)
    report.write_bytes(b"another")
    open_run(report.parent)
    assert len(log.read_text().splitlines()) == 2


def test_a_report_of_another_size_is_exported_again_whatever_its_time(install, report):
    log = install()
    open_run(report.parent)
    moment = report.stat().st_mtime_ns
    report.write_bytes(b"a longer one")
    os.utime(report, ns=(moment, moment))
    open_run(report.parent)
    assert len(log.read_text().splitlines()) == 2


def test_an_nsys_that_does_not_know_blobs_exports_json(install, report):
    log = install('case "$*" in *blobs*) echo "unrecognized option" >&2; exit 1;; esac')
    assert open_run(report).ranks == (0, 1)
    assert "--include-json=true" in log.read_text().splitlines()[1]


def test_a_report_that_nsys_cannot_read_is_an_error_with_its_words(install, report, tmp_path):
    install('echo "The report is damaged." >&2; exit 3')
    with pytest.raises(FastcommError, match=r"exit code 3: The report is damaged\."):
        open_run(report)
    assert not list((tmp_path / "cache").rglob("*.sqlite"))


def test_a_program_that_does_not_start_is_an_error(install, report, tmp_path):
    install()
    (tmp_path / "bin" / "nsys").write_bytes(b"\x7fELF")
    with pytest.raises(FastcommError, match="bin/nsys: "):
        open_run(report)


def test_reports_beside_their_exports_or_other_traces_are_not_exported(install, report, export):
    log = install()
    export.with_suffix(".nsys-rep").write_bytes(b"binary")
    assert open_run(export.parent).ranks == (0, 1)
    assert not log.exists()


@pytest.mark.parametrize("place", ["working directory", "no cache", "no report"])
def test_without_a_safe_program_and_a_cache_the_error_has_the_command(
    install, report, tmp_path, monkeypatch, place
):
    log = install()
    if place == "working directory":
        monkeypatch.chdir(tmp_path)
    elif place == "no cache":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    else:
        report.unlink()
        assert nsys_report.exported(report) is None
        return
    with pytest.raises(FastcommError, match="nsys export --type=sqlite"):
        open_run(report)
    assert not log.exists()
