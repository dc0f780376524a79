"""The MCP server on stdin and stdout: it lists the tools, and has a worker compute answers.

The worker is a process in a group of its own. A canceled request ends it with all that it
started, and the next request gets a new one. Requests of a client are answered one at a time.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server

from fastcomm.agents.answer import shown
from fastcomm.agents.guide import instructions
from fastcomm.agents.tools import TOOLS
from fastcomm.process import SIGNALS, remove_all, safe_children, temporary_folder
from fastcomm.version import __version__

_GRACE_S = 0.4  # from SIGTERM to SIGKILL
_MOST_LINE = 1 << 20  # bytes of an answer
_MOST_ERROR = 2000  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What a server may read, where it writes pages, and with how many processes it reads."""

    folders: tuple[Path, ...]
    out: Path | None = None
    workers: int = 1

    def text(self) -> str:
        """Return the settings as JSON, for a worker."""
        document = {
            "folders": [str(path) for path in self.folders],
            "out": None if self.out is None else str(self.out),
            "workers": self.workers,
        }
        return json.dumps(document)


class WorkerDiedError(Exception):
    """The worker has ended without an answer."""


@dataclass(kw_only=True)
class Worker:
    """The process that computes, started when it is needed, in the directory `scratch`."""

    settings: ServerSettings
    scratch: Path
    _process: Process | None = None
    _lines: BufferedByteReceiveStream | None = None
    _turn: anyio.Lock = field(default_factory=anyio.Lock)

    async def start(self) -> None:
        """Start the process unless it runs, so that its imports are done before a request."""
        if self._process is not None and self._process.returncode is None:
            return
        module = [sys.executable, "-P", "-m", "fastcomm.agents.worker"]
        command = [*module, self.settings.text(), str(self.scratch)]
        # A directory without files, so that no name of an argument is one.
        folder = self.scratch / "empty"
        folder.mkdir(exist_ok=True)
        self._process = await anyio.open_process(
            command, stderr=None, cwd=folder, env=self._environment(), start_new_session=True
        )
        assert self._process.stdout is not None
        self._lines = BufferedByteReceiveStream(self._process.stdout)

    def _environment(self) -> dict[str, str]:
        """Return the environment of the process, in which no path is relative."""
        with safe_children():
            values = {**os.environ, "TMPDIR": str(self.scratch)}
        if python_path := values.get("PYTHONPATH"):
            entries = filter(None, python_path.split(os.pathsep))
            values["PYTHONPATH"] = os.pathsep.join(
                str(Path(entry).absolute()) for entry in entries
            )
        return values

    async def ask(
        self, tool: str, arguments: Mapping[str, Any], context: ServerRequestContext[Any]
    ) -> dict[str, Any]:
        """Return the message of the worker on a request; pass on progress meanwhile.

        Raises `WorkerDiedError` if the worker ends.
        """
        async with self._turn:
            await self.start()
            try:
                return await self._exchange({"tool": tool, "arguments": arguments}, context)
            except (anyio.BrokenResourceError, anyio.IncompleteRead, anyio.EndOfStream):
                await self.stop()
                raise WorkerDiedError from None
            except BaseException:  # canceled: its work ends, too
                await self.stop()
                raise

    async def _exchange(
        self, request: Mapping[str, Any], context: ServerRequestContext[Any]
    ) -> dict[str, Any]:
        process, lines = self._process, self._lines
        assert process is not None
        assert process.stdin is not None
        assert lines is not None
        await process.stdin.send(json.dumps(request).encode() + b"\n")
        while True:
            line = await lines.receive_until(b"\n", _MOST_LINE)
            message: dict[str, Any] = json.loads(line)
            if "progress" not in message:
                return message
            await context.session.report_progress(*message["progress"])

    async def stop(self) -> None:
        """End the process and all that it started, within a second."""
        process, self._process = self._process, None
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                process.terminate()
            with anyio.move_on_after(_GRACE_S):
                await process.wait()
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            await process.aclose()


def server_of(worker: Worker) -> Server[Any]:
    """Return the server whose tools a worker computes."""

    async def list_tools(
        _context: ServerRequestContext[Any], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=listed_tools())

    async def call_tool(
        context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        try:
            message = await worker.ask(params.name, params.arguments or {}, context)
        except WorkerDiedError:
            message = {"error": "the worker ended, as when memory runs out; ask for less"}
        is_error = "error" in message
        text = shown(message["error"], _MOST_ERROR) if is_error else message["text"]
        content = types.TextContent(type="text", text=text)
        return types.CallToolResult(content=[content], is_error=is_error)

    return Server(
        "fastcomm",
        version=__version__,
        instructions=instructions(),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def listed_tools() -> list[types.Tool]:
    """Return the tools as the protocol lists them."""
    return [
        types.Tool(
            name=tool.name,
            description=tool.text,
            input_schema=tool.schema(),
            annotations=types.ToolAnnotations(
                read_only_hint=not tool.writes,
                destructive_hint=False,
                idempotent_hint=True,
                open_world_hint=False,
            ),
        )
        for tool in TOOLS.values()
    ]


def serve(settings: ServerSettings) -> None:
    """Serve one client on stdin and stdout until it closes them."""
    with temporary_folder() as scratch:
        anyio.run(_serve, settings, scratch)


async def _serve(settings: ServerSettings, scratch: Path) -> None:
    worker = Worker(settings=settings, scratch=scratch)
    server = server_of(worker)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_end_by_signal, worker)
            async with stdio_server() as (reads, writes):
                await worker.start()
                await server.run(reads, writes, server.create_initialization_options())
            tasks.cancel_scope.cancel()
    finally:
        await worker.stop()


async def _end_by_signal(worker: Worker) -> None:
    """End this process at Ctrl-C or SIGTERM, with its worker and temporary files.

    A thread waits for stdin, and nothing else would interrupt that.
    """
    with anyio.open_signal_receiver(*SIGNALS) as signals:
        async for number in signals:
            await worker.stop()
            remove_all()
            os._exit(128 + number)
