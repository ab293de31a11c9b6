"""`Part`: what every body, and every part of one, is made from. What a wrong one costs is bounded here."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler

__all__ = ["Part"]


def _end_at_first_error(schema: Any) -> None:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    for part in parts:
        _end_at_first_error(part)


class Part(BaseModel):
    """A list's first wrong item is the last one looked at: an error for each took gigabytes and half a minute."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _end_at_first_error(schema)
        return schema
