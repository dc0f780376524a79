"""Commands in processes of their own that start at once: forks of one that has imported all."""

import json
import os
import socket
import subprocess
import sys
import tempfile

from builders.places import ROOT

# Each fork ends as a program of Python does, after the last line.
_PROGRAM = """
import json, os, resource, socket, sys
from click.testing import CliRunner
from fastcomm.__main__ import main
from fastcomm.cli.main import main as command
for words in json.loads(sys.argv[2]):
    CliRunner().invoke(command, words)
connection = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, files, *_ = socket.recv_fds(connection, 1 << 16, 2)
    if not request:
        sys.exit()
    child = os.fork()
    if not child:
        break
    for file in files:
        os.close(file)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.send(json.dumps(code).encode())
connection.close()
for file, place in zip(files, (1, 2)):
    os.dup2(file, place)
    os.close(file)
call = json.loads(request)
os.chdir(call["folder"])
if call["limit"]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (call["limit"], call["limit"]))
sys.argv = ["fastcomm", *call["words"]]
main()
"""


class ForkServer:
    """A process of Python, started with further environment, that forks to run commands.

    It runs the commands of `first` once, so that what they import is there.
    """

    def __init__(self, first, **environment):
        own, other = socket.socketpair()
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(other.fileno()), json.dumps(first)],
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        other.close()
        self.connection = own

    def run(self, words, folder, stdout, limit=None):
        """The exit code of a command, and what it writes to stderr; stdout is a file.

        It cannot make a file longer than `limit` bytes.
        """
        call = {"words": [*map(str, words)], "folder": str(folder), "limit": limit}
        with tempfile.TemporaryFile() as stderr:
            files = [stdout.fileno(), stderr.fileno()]
            socket.send_fds(self.connection, [json.dumps(call).encode()], files)
            code = json.loads(self.connection.recv(100))
            stderr.seek(0)
            return code, stderr.read().decode()

    def close(self):
        self.connection.close()
        self.process.wait()
