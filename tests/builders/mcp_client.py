"""Ask a server of `fastcomm mcp` over stdio, with the client of the official SDK."""

import json
import os
import sys
from contextlib import asynccontextmanager

from builders.places import ROOT
from mcp import Client, StdioServerParameters, stdio_client


def parameters(*words):
    """How the client starts a server with these arguments."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    home = {name: os.environ[name] for name in ("HOME", "XDG_CACHE_HOME") if name in os.environ}
    return StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "fastcomm", "mcp", *map(str, words)],
        env={"PYTHONPATH": path, **home},
    )


@asynccontextmanager
async def server(*words):
    """A client of a new server."""
    async with Client(stdio_client(parameters(*words))) as client:
        yield client


async def ask(client, tool, **arguments):
    """The answer of a tool as an object."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    return json.loads(result.content[0].text)


async def refused(client, tool, **arguments):
    """The error of a tool, one line."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert "\n" not in result.content[0].text
    return result.content[0].text


def total(answer, what):
    """The value of one total."""
    return next(one["value"] for one in answer["totals"] if one["what"] == what)
