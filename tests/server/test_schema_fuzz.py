"""Requests generated from the server's OpenAPI schema, valid and invalid: every answer matches the schema, never a
5xx."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.at_length import at_length

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)


def run(
    url: str,
    num_cases: int,
    *,
    derandomize: bool,
    paths: tuple[str, ...] = (),
    modes: tuple[GenerationMode, ...] = tuple(GenerationMode),
) -> int:
    """At least so many cases, spread over the operations (of these paths, or all), valid and not; returns how many."""
    found = schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations()
    operations = [each.ok() for each in found]
    operations = [operation for operation in operations if not paths or operation.path in paths]
    num_sent = 0
    # Only those with a body have much to get wrong: the others are soon all there is.
    num_with_body = sum(operation.method == "post" for operation in operations)
    for operation in operations:
        num_examples = -(-num_cases // (2 * num_with_body)) if operation.method == "post" else 5
        for mode in modes:

            @settings(
                max_examples=num_examples,
                deadline=None,
                derandomize=derandomize,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: schemathesis.Case) -> None:
                nonlocal num_sent
                num_sent += 1
                case.call_and_validate(checks=CHECKS, timeout=30)

            try:
                send()
            except Exception as error:
                if type(error).__name__ != "Unsatisfiable":  # nothing of this operation can be wrong
                    raise
    return num_sent


def test_every_answer_is_in_the_schema(small_server) -> None:
    """Some valid cases; the rest takes its time to be made up."""
    modes = (GenerationMode.POSITIVE,)
    paths = ("/tokenize", "/admin/pins", "/metrics", "/v1/sessions/{session}/cache")
    assert run(small_server[0], 60, derandomize=True, paths=paths, modes=modes) >= 20


@pytest.mark.ci
@pytest.mark.parametrize("small_llm", ["off", "suffix"], indirect=True)
def test_every_answer_is_in_the_schema_at_length(small_server) -> None:
    num_cases = at_length(6400)
    assert run(small_server[0], num_cases, derandomize=settings().derandomize) >= num_cases * 3 // 4
