"""`quire top`: the live page of a running server, in a terminal."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.errors import ArgumentError, QuireError
from quire.secret_text import is_readable_by_all, key_lines, key_of_environment

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["frame", "top"]

_TIMEOUT_S = 30.0  # between two events; the server sends one every 5 s at least
_KEY_VARIABLE = "QUIRE_API_KEY"
_MAX_ID_LENGTH = 36  # characters: a UUID
_NUM_SESSIONS = 3
_STATES = (  # name, its letter (readable without colours), its colour
    ("held", "H", "yellow"),
    ("in_flight", "F", "magenta"),
    ("pinned", "P", "green"),
    ("cached", "C", "blue"),
    ("free", "·", "bright_black"),
)


def top(
    url: Annotated[
        str, typer.Argument(metavar="[URL]", help="The server's address.")
    ] = "http://127.0.0.1:8000",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help=f"File with the key on its first line; the environment variable {_KEY_VARIABLE} if not given.",
        ),
    ] = None,
) -> None:
    """Shows a running server's blocks, sequences, speed and memory."""
    from rich.console import Console

    events = _events(_checked_url(url), _key(api_key))
    console = Console()
    state: dict[str, Any] = {}
    if once:
        for event in events:
            state |= event
            # The first event has no rates yet: a rate needs two snapshots.
            if event["kind"] == "update":
                break
        console.print(frame(state, console.width, 24))
        return
    if not sys.stdout.isatty():
        raise ArgumentError("expected a terminal, got a file or pipe; give --once")
    from rich.live import Live

    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            for event in events:
                state |= event
                live.update(frame(state, console.width, max(3, console.height - 6)), refresh=True)
    except KeyboardInterrupt:  # the way to leave
        return
    raise QuireError("the server has stopped")


# -- drawing -----------------------------------------------------------------------------------------------


def frame(state: dict[str, Any], width: int, height: int) -> RenderableType:
    """A frame of `width` columns; the map and the sequences share `height` lines."""
    from rich.console import Group
    from rich.text import Text

    counts, rates, memory = state["counts"], state["rates"], state["memory"]
    head = Text.assemble(
        ("quire top", "bold"),
        f"  {state['model']}  ",
        f"{_number(rates['generated_per_s'])} tokens/s  ",
        f"first token {_seconds(rates['first_token_s'])}  ",
        f"hit rate {_percent(rates['hit_rate'])}  ",
        f"running {counts['num_running']}, waiting {counts['num_waiting']}  ",
        f"preempted {counts['num_preemptions']}, evicted {counts['evicted_blocks']}",
    )
    num_sequences = len(state.get("sequences", ()))
    height = max(1, height - len(state.get("sessions", ())[:_NUM_SESSIONS]))
    map_lines = max(1, height - min(num_sequences + 3, height // 2)) if "sequences" in state else height
    parts: list[RenderableType] = [
        head,
        _bar(counts, width),
        _states(counts, state["block"]),
        _map(state["map"], width, map_lines),
    ]
    if "state_slots" in counts:
        parts.insert(3, Text(_recurrent_states(counts)))
    if "num_drafts" in counts:
        parts.append(Text(_drafts(counts)))
    parts.append(_memory(memory))
    if state.get("sessions"):
        parts.append(_newest_turns(state["sessions"][:_NUM_SESSIONS]))
    if "sequences" in state:
        parts.append(_sequences(state, max(1, height - map_lines - 2)))
    else:
        parts.append(Text("sequences and tenants are shown to the administrator", "dim"))
    return Group(*parts)


def _bar(counts: dict[str, int], width: int) -> RenderableType:
    from rich.text import Text

    bar, end, total = Text(), 0, 0
    for name, letter, colour in _STATES:
        total += counts[name]
        stop = round(width * total / max(1, counts["num_blocks"]))
        bar.append(letter * (stop - end), colour)
        end = stop
    return bar


def _states(counts: dict[str, int], block_name: str) -> RenderableType:
    from rich.text import Text

    line = Text(f"{counts['num_blocks']:,} {block_name}s: ")
    for name, letter, colour in _STATES:
        line.append(f"{letter} ", colour)
        line.append(f"{name} {counts[name]:,}  ")
    line.append("(small letters: less than half in use)", "dim")
    return line


def _recurrent_states(counts: dict[str, int]) -> str:
    """A line for a model with state layers."""
    checkpoints, free = counts["checkpoints"], counts["free_state_slots"]
    drafts = counts.get("draft_slots", 0)
    return (
        f"{counts['state_slots']:,} states: {counts['state_slots'] - checkpoints - free - drafts:,} of sequences, "
        f"{checkpoints:,} checkpoints, {free:,} free{f', {drafts:,} for drafts' * bool(drafts)}; "
        f"{counts['evicted_checkpoints']:,} checkpoints evicted; "
        f"{counts.get('short_hits', 0):,} hits ended early for lack of a state; "
        f"{counts.get('slots_from_blocks', 0):,} states made of blocks, {counts.get('slots_to_blocks', 0):,} became "
        "blocks"
    )


def _drafts(counts: dict[str, Any]) -> str:
    """A line for an engine with speculation."""
    num_steps = counts["num_drafts"]
    places = ", ".join(
        _percent(accepted / num_steps if num_steps else None)
        for accepted in counts["num_accepted_by_position"]
    )
    return (
        f"{counts['num_accepted_tokens']:,} of {counts['num_draft_tokens']:,} drafts accepted; with drafts "
        f"{_tokens_per_step(counts)} tokens a step; accepted by place: {places}"
    )


def _map(cells: dict[str, Any], width: int, lines: int) -> RenderableType:
    """The server's cells, merged to fit: a character's letter and colour show the most frequent state of the blocks in
    use; a small letter shows that less than half are in use."""
    import base64

    import numpy as np
    from rich.text import Text

    shares = np.frombuffer(base64.b64decode(cells["cells"]), np.uint8).reshape(-1, 4).astype(float) / 255
    per_character = max(1, -(-len(shares) // (width * lines)))
    text = Text()
    for at, start in enumerate(range(0, len(shares), per_character)):
        if at and at % width == 0:
            text.append("\n")
        cached, held, in_flight, pinned = shares[start : start + per_character].mean(axis=0)
        used = min(1.0, cached + held + in_flight + pinned)
        if not used:
            text.append(*_STATES[-1][1:])
            continue
        largest = max(range(4), key=(held, in_flight, pinned, cached).__getitem__)
        _, letter, colour = _STATES[largest]
        text.append(letter if used >= 0.5 else letter.lower(), colour)
    return text


def _memory(memory: dict[str, Any]) -> RenderableType:
    from rich.text import Text

    from quire.sizes import format_size

    tiers = "".join(f"  {tier['name']} {format_size(max(0, tier['bytes']))}" for tier in memory["tiers"])
    return Text(
        f"memory {format_size(memory['used'])} in use, {format_size(memory['cached'])} cached of "
        f"{format_size(memory['total'])}{tiers}"
    )


def _sequences(state: dict[str, Any], lines: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, expand=True, pad_edge=False)
    for name in ("sequence", "tenant"):
        table.add_column(name, no_wrap=True)
    for name in ("tokens", "computed", "cached", "blocks", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("block table", no_wrap=True, overflow="ellipsis", ratio=1)
    shown = state["sequences"][:lines]
    for sequence in shown:
        runs = ", ".join(str(a) if n == 1 else f"{a}-{a + n - 1}" for a, n in sequence["runs"])
        table.add_row(
            # Names come from clients: text, never markup.
            Text(_clipped(_plain(sequence["id"]))),
            Text(_plain(sequence["tenant"])[:16]),
            str(sequence["tokens"]),
            str(sequence["computed"]),
            str(sequence["cached"]),
            str(sequence["blocks"]),
            f"{sequence['age']:.1f} s",
            Text(runs),
        )
    return table


def _newest_turns(sessions: list[dict[str, Any]]) -> RenderableType:
    """A line for each session: its newest turn."""
    from rich.text import Text

    lines = []
    for row in sessions:
        turn = row["turns"][-1]
        hit = sum(turn["found"].values()) - turn["prepared"]
        lines.append(
            f"session {_clipped(_plain(row['session']))}, turn {row['num_turns']:,}: {hit:,} hit, "
            f"{turn['prepared']:,} prepared, {turn['computed']:,} computed"
            + ("" if turn["cause"] in (None, "complete") else f" ({turn['cause']})")
        )
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def _plain(text: str) -> str:
    """The text without control characters of terminals."""
    return "".join(c if c.isprintable() else "�" for c in text)


def _clipped(name: str) -> str:
    return name if len(name) <= _MAX_ID_LENGTH else f"{name[: _MAX_ID_LENGTH - 1]}\u2026"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


def _tokens_per_step(counts: dict[str, Any]) -> str:
    """Mean tokens of a sequence in a step with drafts, from the counts of drafts."""
    num_steps = counts["num_drafts"]
    return f"{1 + counts['num_accepted_tokens'] / num_steps:.2f}" if num_steps else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


# -- the server --------------------------------------------------------------------------------------------


def _checked_url(url: str) -> str:
    if "://" not in url:
        url = f"http://{url}"
    if not url.startswith(("http://", "https://")):
        raise ArgumentError(f"expected an address as http://HOST:PORT, got {url!r}")
    return url.rstrip("/")


def _key(file: str | None) -> str | None:
    """The key of a file or of the environment. *raises:* ArgumentError, which never shows the key."""
    if file is None:
        return key_of_environment(_KEY_VARIABLE)
    key = key_lines(file)[0]
    if is_readable_by_all(file):
        print(f"quire: every user of this machine can read {file}, which has a key in it", file=sys.stderr)
    return key


def _events(url: str, key: str | None) -> Iterator[dict[str, Any]]:
    """The server's events. *raises:* QuireError in one line: no server, a wrong key, another program."""
    address = f"{url}/window/events"
    try:
        request = urllib.request.Request(
            address, headers={} if key is None else {"Authorization": f"Bearer {key}"}
        )
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise QuireError(f"no server answers at {url}: {reason}; start one with `quire serve`") from error
    with response:
        if not response.headers.get_content_type() == "text/event-stream":
            raise QuireError(f"expected a Quire server at {url}, got another program")
        try:
            for line in response:
                if line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise QuireError(event["error"]["message"])
                    yield event
        except (OSError, ValueError) as error:
            raise QuireError(f"the connection to {url} is lost: {error}") from error


def _refusal(url: str, error: urllib.error.HTTPError) -> QuireError:
    if error.code in (401, 403):
        return QuireError(
            f"the server at {url} asks for a key that it accepts; give --api-key FILE or set {_KEY_VARIABLE}"
        )
    if error.code == 404:
        return QuireError(f"expected a Quire server at {url}, got another program (status 404)")
    try:
        message = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        message = error.reason
    return QuireError(f"the server at {url} refused: {message} (status {error.code})")
