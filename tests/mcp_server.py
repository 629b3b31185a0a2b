"""A small MCP server: `python -m tests.mcp_server [PORT]` listens at this port of the loopback, or on its standard input."""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("rooms", log_level="CRITICAL")
seen: list[str] = []


@server.tool()
def look(at: str) -> str:
    """Looks at a thing."""
    seen.append(at)
    return f"{at} no. {len(seen)}"


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    return [TextContent(type="text", text="a cat"), ImageContent(type="image", data="", mime_type="image/png")]


@server.tool()
def refuse() -> str:
    raise ValueError("no")


@server.tool()
def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "late"


@server.tool()
def die() -> str:
    os._exit(3)


@server.tool()
def process() -> int:
    return os.getpid()


@server.tool()
def variable(name: str) -> str:
    return os.environ.get(name, "none")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        sys.path.insert(0, str(Path.cwd()))
        server.run()
