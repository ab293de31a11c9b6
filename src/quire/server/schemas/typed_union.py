"""`OfTypes`: a union of objects that their field `type` tells apart, as OpenAI's items, parts and tools.

    Part = Annotated[InputText | OutputText, OfTypes({"input_image": "images are not supported"})]

A type that the server does not support is refused with the reason, at `type`; an unknown one with the known types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, field_validator, model_validator
from pydantic_core import PydanticCustomError, core_schema

__all__ = ["OfTypes"]


def _tag(name: str) -> str:
    """Of an error's place; no field has such a name."""
    return f"type {name}"


_REFUSED = _tag("refused")


class OfTypes:
    """Marks a union of models whose field `type` has a default.

    refused: the reason and what to do, by type. default: gives the type of an object without one.
    """

    def __init__(
        self,
        refused: Mapping[str, str] | None = None,
        default: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> None:
        self._refused = refused or {}
        self._default = default

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        models = {model.model_fields["type"].default: model for model in get_args(source) or (source,)}
        known = ", ".join(models)

        class RefusedType(BaseModel):
            model_config = ConfigDict(extra="ignore")

            type: Any

            @model_validator(mode="before")
            @classmethod
            def _require_object(cls, value: Any) -> Any:
                if not isinstance(value, dict):
                    raise PydanticCustomError("object_type", "expected an object")
                return value

            @field_validator("type")
            @classmethod
            def _refuse(cls, value: Any) -> Any:
                raise PydanticCustomError("unserved", "{message}", {"message": refusal(value)})

        def refusal(value: Any) -> str:
            reason = self._refused.get(value) if isinstance(value, str) else None
            expected = f"expected {'' if len(models) == 1 else 'one of '}{known}"
            return expected if reason is None else f"{expected}: {reason}"

        def tag_of(value: Any) -> str:
            if not isinstance(value, dict):
                found = getattr(value, "type", None)
            else:
                found = value.get("type")
                if found is None and self._default is not None:
                    found = self._default(value)
            return _tag(found) if isinstance(found, str) and found in models else _REFUSED

        choices: dict[str, Any] = {
            _tag(name): handler.generate_schema(model) for name, model in models.items()
        }
        choices[_REFUSED] = handler.generate_schema(RefusedType)
        return core_schema.tagged_union_schema(choices, tag_of)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """The description of the known types alone."""
        choices = {name: choice for name, choice in schema["choices"].items() if name != _REFUSED}
        return handler({**schema, "choices": choices})
