"""`StrictBody`: the base of every body and of its parts. It bounds the cost of a wrong one."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator

__all__ = ["GeneratingBody", "StrictBody"]


def _end_at_first_error(schema: Any) -> None:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    for part in parts:
        _end_at_first_error(part)


class StrictBody(BaseModel):
    """A body or a part of one. An unknown field is refused unless it is null.

    A list's first wrong item ends its validation: an error for each item took gigabytes and half a minute.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _end_at_first_error(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict) or None not in data.values():
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in data.items() if value is not None or name in names}


class GeneratingBody(StrictBody):
    """A body whose request generates: it is read only if the request's tenant has a place."""
