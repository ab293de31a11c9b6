"""A tool server for coding agents (MCP over stdin and stdout): `nothing` takes no arguments, `echo` returns a value.

It imports only the standard library, so that any Python runs it: python agents_tools.py
"""

from __future__ import annotations

import json
import sys
from typing import Any

NOTHING = "nothing was asked"
TOOLS = [
    {
        "name": "nothing",
        "description": "Takes no arguments.",
        "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
    },
    {
        "name": "echo",
        "description": "Says its value back, as JSON.",
        "inputSchema": {
            "type": "object",
            "properties": {"value": {"type": "object"}, "times": {"type": ["integer", "null"]}},
            "required": ["value"],
        },
    },
]


def said(value: Any) -> str:
    """What `echo` says of a value."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """None: a method that this server has not."""
    if method == "initialize":
        return {
            "protocolVersion": params.get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "quire", "version": "1"},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        arguments = params.get("arguments") or {}
        text = NOTHING if params["name"] == "nothing" else said(arguments.get("value"))
        return {"content": [{"type": "text", "text": text}]}
    return None


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" not in asked:
            continue  # a notification
        found = result(asked["method"], asked.get("params") or {})
        answer = (
            {"error": {"code": -32601, "message": asked["method"]}} if found is None else {"result": found}
        )
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
