"""The process that computes for a server, which ends it if a request is canceled.

It reads requests from stdin, a JSON object a line, and writes to stdout: progress, and the
answer or error of each. It ends with its server, whose end closes stdin, and removes the
temporary directory of the server then, which a killed server cannot.
"""

import atexit
import json
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from fastcomm.errors import FastcommError

_LOG = logging.getLogger("fastcomm")
_GRACE_S = 1.0  # to remove temporary files
INTERNAL = "internal error of fastcomm; the log of the server has the traceback"


def main() -> None:
    """Answer the requests of stdin one at a time.

    Arguments of the command line are the settings, and the temporary directory of the server.
    """
    from fastcomm.process import handle

    settings, scratch = json.loads(sys.argv[1]), Path(sys.argv[2])
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    handle()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    server_ended = threading.Event()
    # Functions that multiprocessing registers later come first, and need the directory.
    atexit.register(_remove_behind, server_ended, scratch)
    threading.Thread(target=_read, args=(requests, scratch, server_ended), daemon=True).start()
    serve(settings, requests, output)


def _remove_behind(server_ended: threading.Event, scratch: Path) -> None:
    """Remove the directory of a server that has ended."""
    if server_ended.is_set():
        shutil.rmtree(scratch, ignore_errors=True)


def _read(
    requests: "queue.SimpleQueue[str]", scratch: Path, server_ended: threading.Event
) -> None:
    """Pass on the lines of stdin; end this process and its workers with the server."""
    for line in sys.stdin:
        requests.put(line)
    server_ended.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def serve(
    settings: Mapping[str, Any], requests: "queue.SimpleQueue[str]", output: TextIO
) -> None:
    """Answer requests forever.

    Parameters
    ----------
    settings
        `folders`, `out` (None writes no pages) and `workers`.
    requests
        Lines with `tool` and `arguments`.
    output
        Gets a line for each report of progress, and for each answer.

    """
    from fastcomm.agents.folders import Folders
    from fastcomm.agents.session import AgentSession
    from fastcomm.preparation import compile_kernels

    def report(done: float, total: float, message: str) -> None:
        _write(output, {"progress": [done, total, message]})

    session = AgentSession(
        folders=Folders.of(settings["folders"]),
        out=None if settings["out"] is None else Path(settings["out"]),
        workers=settings["workers"],
        report=report,
    )
    compile_kernels()
    while True:
        _write(output, _answered(session, json.loads(requests.get())))


def _answered(session: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer to a request, or its error."""
    from fastcomm.agents.tools import TOOLS
    from fastcomm.errors import python_names

    try:
        with python_names():
            tool = TOOLS.get(request["tool"])
            if tool is None:
                return {"error": f"no such tool; there are {', '.join(TOOLS)}"}
            return {"text": tool.call(session, request["arguments"])}
    except FastcommError as error:
        return {"error": str(error)}
    except OSError as error:
        return {"error": f"{error.filename or 'file'}: {error.strerror or error}"}
    except MemoryError:
        return {"error": "out of memory; ask for fewer ranks, or start with fewer workers"}
    except Exception:
        _LOG.exception("a tool failed")
        return {"error": INTERNAL}


def _write(output: TextIO, message: Mapping[str, Any]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()


if __name__ == "__main__":
    main()
