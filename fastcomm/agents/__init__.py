"""Agents: an MCP server over runs, its tools, and the text that teaches how to use them."""
