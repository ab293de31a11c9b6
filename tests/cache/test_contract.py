"""One contract, one signature: caches have those of the protocols, and both block managers the same ones.

The native manager's are read from its stub, which `scripts/stubs` generates from the bindings.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

import quire
from quire.baselines.row import Row
from quire.baselines.row_cache import RowCache
from quire.cache.cache import Cache, Sequence
from quire.cache.manager import block_manager
from quire.cache.manager.block_manager import PythonBlockManager
from quire.cache.protocol import CacheSequence, KVCache, PrefixKVCache
from quire.cache.states.state_cache import StateCache

STUB = Path(quire.__file__).with_name("_native.pyi")

PROPERTY = "property"

# The stub's names for types, and those of the Python manager.
SAME_TYPES = {
    "EventArrays": "dict[str, Any]",
    "Int32Array": "NDArray[int32]",
    "Int64Array": "NDArray[int64]",
    "PythonStepPlan": "StepPlan",
    "SequenceOf": "list",
    "Sequence": "list",
    "TreeArrays": "dict[str, Any]",
}


# Signatures


def public(members: dict[str, Any]) -> dict[str, Any]:
    """Methods and properties by name."""
    return {
        name: member
        for name, member in members.items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property))
    }


def is_unwritten(member: Any) -> bool:
    """Whether the body of a protocol's member is `...` alone."""
    function = member.fget if isinstance(member, property) else member
    node = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return ast.unparse(node.body[-1]) == "..."


def shape(member: Any) -> Any:
    """Names, order, kinds and defaults of a call's parameters."""
    if isinstance(member, property):
        return PROPERTY
    return [(one.name, one.kind, one.default) for one in inspect.signature(member).parameters.values()]


def contract_of(protocol: type) -> dict[str, Any]:
    """Its calls, those of the protocols it extends included."""
    bases = [base for base in reversed(protocol.__mro__) if getattr(base, "_is_protocol", False)]
    return {name: member for base in bases for name, member in public(vars(base)).items()}


def breaches(made: type, protocol: type) -> Iterator[str]:
    """What of the protocol a class lacks, or has otherwise."""
    for name, expected in contract_of(protocol).items():
        member = inspect.getattr_static(made, name, None)
        if member is None:
            yield f"{name}: lacks"
        elif member is expected:
            if is_unwritten(member):
                yield f"{name}: not written"
        elif shape(member) != shape(expected):
            yield f"{name}: expected {shape(expected)}, got {shape(member)}"
        elif not inspect.getdoc(getattr(made, name)):
            yield f"{name}: no text"


@pytest.mark.parametrize(
    ("made", "protocol"),
    [
        (Cache, PrefixKVCache),
        (StateCache, PrefixKVCache),
        (RowCache, KVCache),
        (Sequence, CacheSequence),
        (Row, CacheSequence),
    ],
)
def test_a_cache_has_the_calls_of_the_contract(made: type, protocol: type) -> None:
    assert not list(breaches(made, protocol))


def test_a_breach_of_the_contract_is_seen() -> None:
    class Contract(Protocol):
        def commit(self, sequence: int, num_tokens: int) -> None: ...
        def fork(self, sequence: int) -> int: ...
        def margin(self, share: float = 0.5) -> int: ...
        def reset(self) -> None:
            """Forget everything."""
            ...

        @property
        def num_events(self) -> int: ...

        def num_blocks(self) -> int:
            """Blocks."""
            return 1

    class Wrong(Contract):
        def commit(self, num_tokens: int, sequence: int) -> None:  # type: ignore[override]
            """In another order."""

        def margin(self, share: float = 0.25) -> int:
            """With another default."""
            return 0

        def num_events(self) -> int:  # type: ignore[override]
            """A call, no property."""
            return 0

        def reset(self) -> None:
            """As the contract has it."""

    found = {breach.split(":")[0]: breach for breach in breaches(Wrong, Contract)}
    assert set(found) == {"commit", "fork", "margin", "num_events"}
    assert found["fork"] == "fork: not written"
    assert set(breaches(object, Contract)) == {f"{name}: lacks" for name in contract_of(Contract)}


# Block managers


def plain_type(node: ast.expr | None) -> str:
    """An annotation in one spelling: no shapes, no module names, one name for lists that are given."""
    if node is None:
        return "None"

    class Plain(ast.NodeTransformer):
        def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
            return self.visit_Name(ast.Name(node.attr))

        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.parse(SAME_TYPES.get(node.id, node.id), mode="eval").body

        def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
            self.generic_visit(node)
            if isinstance(node.value, ast.Name) and node.value.id == "Annotated":
                assert isinstance(node.slice, ast.Tuple)
                return node.slice.elts[0]
            return node

    return ast.unparse(Plain().visit(node))


def plain_default(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def calls_in(text: str, class_name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Calls of a class in the text of a module: of each its parameters with types and defaults, and its answer.

    names: constants that defaults may name."""
    body = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == class_name).body
    calls: dict[str, Any] = {}
    for node in body:
        if not isinstance(node, ast.FunctionDef) or (node.name.startswith("_") and node.name != "__init__"):
            continue
        if any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list):
            calls[node.name] = (PROPERTY, plain_type(node.returns))
            continue
        defaults = [plain_default(eval(ast.unparse(one), dict(names))) for one in node.args.defaults]
        given = node.args.args[1:]
        first = len(given) - len(defaults)
        parameters = [
            (one.arg, plain_type(one.annotation), *defaults[max(0, at - first) : max(0, at - first + 1)])
            for at, one in enumerate(given)
        ]
        calls[node.name] = (parameters, plain_type(node.returns))
    return calls


def python_calls() -> dict[str, Any]:
    calls = calls_in(
        Path(block_manager.__file__).read_text(), PythonBlockManager.__name__, vars(block_manager)
    )
    plain = PythonBlockManager([("full", 0)], 1, 1, True, 0, False, 1).most_blocks
    return calls | {"most_blocks": (PROPERTY, type(plain).__name__)}


def test_both_block_managers_have_the_same_calls() -> None:
    assert calls_in(STUB.read_text(), "BlockManager", {}) == python_calls()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("sequence: int, position: int", "position: int, sequence: int"),
        ("self, sequence: int, position: int", "self, sequence: int, at: int"),
        ("cache_priority: int = 1", "cache_priority: int = 2"),
        ("def fork(self, sequence: int) -> int", "def fork(self, sequence: int) -> None"),
        ("def num_tokens(self, sequence: int)", "def num_tokens(self, sequence: float)"),
        ("def withdraw(", "def withdrawn("),
        ("    @property\n    def num_events", "    def num_events"),
    ],
)
def test_a_difference_of_the_stub_is_seen(right: str, wrong: str) -> None:
    stub = STUB.read_text()
    assert right in stub
    assert calls_in(stub.replace(right, wrong), "BlockManager", {}) != python_calls()


def test_the_common_spelling_of_an_array_keeps_its_element_type() -> None:
    given = ast.parse("Annotated[NDArray[numpy.int64], dict(shape=(None,))]", mode="eval").body
    assert plain_type(given) == plain_type(ast.parse("Int64Array", mode="eval").body) == "NDArray[int64]"
    assert plain_type(ast.parse("Int32Array", mode="eval").body) != plain_type(given)
