"""The calculator as an MCP server, which an environment starts by this command: `python mcp_server.py`."""

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="WARNING")


@server.tool()
def multiply(a: int, b: int) -> int:
    """Multiplies two numbers."""
    return a * b


if __name__ == "__main__":
    server.run()
