"""`quire cache`: what a disk cache's folder holds; to check it, make it smaller, or remove it. And kept weights."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import open_llm
from quire.config import EngineConfig
from quire.errors import ArgumentError
from quire.sizes import format_size, parse_size

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.recompute import Compared

__all__ = ["cache"]

cache = typer.Typer(
    name="cache",
    help="A disk cache's folder: list it, verify it, make it smaller, remove it. Kept weights: list and remove them.",
    rich_markup_mode=None,
)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder given as disk cache.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@cache.command("ls")
def list_folder(folder: Folder, as_json: AsJson = False) -> None:
    """Lists what is stored, by model and namespace."""
    from quire.sessions.snapshot_files import SnapshotFiles, count_snapshots
    from quire.tiers.disk import DiskTier

    tier = DiskTier(folder, None)
    try:
        roots, use, cap = tier.roots(), tier.use(), tier.max_bytes()
        num_snapshots, snapshot_bytes = count_snapshots(tier.path), SnapshotFiles(tier.path).num_bytes()
    finally:
        tier.close()
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(tier.path),
                    "max_bytes": cap,
                    "bytes_on_disk": use.total + snapshot_bytes,
                    "bytes": {
                        "slabs": use.slabs,
                        "values": use.values,
                        "index": use.index,
                        "set_aside": use.set_aside,
                        "snapshots": snapshot_bytes,
                    },
                    "snapshots": num_snapshots,
                    "roots": [
                        {
                            "root": root.root.hex(),
                            "description": root.description,
                            "segments": root.num_values,
                            "tokens": root.num_tokens,
                            "bytes": root.num_bytes,
                            "made_at": root.made_at,
                            "used_at": root.used_at,
                            "owners": list(root.owners),
                        }
                        for root in roots
                    ],
                }
            )
        )
        return
    if roots:
        _print_roots(roots)
    print(
        f"{sum(root.num_values for root in roots)} segments of {len(roots)} models and namespaces, "
        f"{num_snapshots} snapshots, {format_size(use.total + snapshot_bytes)} on disk of {format_size(cap)}"
    )


def _print_roots(roots: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("root", "model", "segments", "tokens", "bytes", "first made", "last used", "owner")
    now = time.time()
    for root in roots:
        table.add_row(
            root.root.hex()[:12],
            root.description or "-",
            str(root.num_values),
            str(root.num_tokens),
            format_size(root.num_bytes),
            _age(now - root.made_at),
            _age(now - root.used_at),
            ", ".join(owner for owner in root.owners if owner) or "-",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _age(seconds: float) -> str:
    """Before now; a clock that went back makes it now."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit} ago"
    return f"{max(0, int(seconds))} s ago"


@cache.command()
@options.engine_flags("model", "dtype", "kv_memory", "backend", "revision", "trust_remote_code")
def verify(
    folder: Folder,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    recompute: Annotated[
        int | None,
        typer.Option(
            "--recompute", metavar="N", min=1, help="Also compute N segments again and compare every bit."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Which segments are computed again.")] = 0,
    as_json: AsJson = False,
    **engine: Any,
) -> int:
    """Reads every value and compares its checksum; status 1 where one is damaged, or not what the model computes."""
    from quire.tiers.disk import DiskTier
    from quire.tiers.disk_folder import find_damage

    if recompute is None and (given := [*engine, *(["seed"] if seed else [])]):
        alone = ", ".join(options.flag(name) for name in given)
        raise ArgumentError(f"expected --recompute N with {alone}: checksums need no model")
    tier = DiskTier(folder, None)
    num_values = num_bytes = num_removed = 0
    damaged = []
    compared: list[Compared] | None = None
    try:
        tier.check()
        for damage in find_damage(tier):
            num_values += 1
            if damage is None:
                continue
            damaged.append(damage)
            num_bytes += damage.entry.num_bytes
            if repair:
                tier.evict(damage.entry.key)
                num_removed += 1
        if recompute is not None:
            from quire.engine.recompute import compare_sample

            def open_one(block_size: int) -> LLM:
                # An engine with a tier names its world.
                return open_llm(EngineConfig(**engine, block_size=block_size, host_cache="1MiB"))

            compared = list(compare_sample(tier, open_one, recompute, seed=seed))
    finally:
        tier.close()
    if as_json:
        entries = [
            {
                "key": damage.entry.key.hex(),
                "root": damage.entry.info.root.hex(),
                "start": damage.entry.info.start,
                "bytes": damage.entry.num_bytes,
                "reason": damage.reason,
            }
            for damage in damaged
        ]
        report: dict[str, Any] = {"segments": num_values, "damaged": entries, "removed": num_removed}
        if compared is not None:
            report["recomputed"] = _recomputed_json(compared)
        print(json.dumps(report))
    else:
        for damage in damaged:
            entry = damage.entry
            print(
                f"{entry.key.hex()[:12]} of root {entry.info.root.hex()[:12]}, tokens {entry.info.start} to "
                f"{entry.info.start + entry.num_tokens - 1}: {damage.reason}"
            )
        print(
            f"{num_values} segments, {len(damaged)} damaged ({format_size(num_bytes)})"
            + (f", {num_removed} removed" if repair else "")
        )
        if compared is not None:
            _print_recomputed(compared)
    differs = compared is not None and any(one.difference for one in compared)
    return 1 if damaged or differs else 0


def _recomputed_json(compared: list[Compared]) -> dict[str, Any]:
    reasons = Counter(one.reason for one in compared if one.reason)
    return {
        "equal": sum(not one.reason and not one.difference for one in compared),
        "different": [
            {
                "key": one.entry.key.hex(),
                "start": one.entry.info.start,
                "layer": one.layer,
                "token": one.token,
                "difference": one.difference,
            }
            for one in compared
            if one.difference
        ],
        "not_comparable": dict(reasons),
    }


def _print_recomputed(compared: list[Compared]) -> None:
    found = _recomputed_json(compared)
    for one in found["different"]:
        where = f": layer {one['layer']}, first at token {one['token']}" if one["layer"] >= 0 else ""
        print(f"{one['key'][:12]}, tokens from {one['start']} on{where}: {one['difference']}")
    for reason, count in found["not_comparable"].items():
        print(f"{count} not comparable: {reason}")
    print(f"{found['equal'] + len(found['different'])} computed again, {len(found['different'])} different")


@cache.command()
def prune(
    folder: Folder,
    to: Annotated[str, typer.Option("--to", metavar="SIZE", help='What it may take: "2GiB".')],
) -> None:
    """Removes what was used longest ago until the folder takes at most SIZE, 4 MiB of it for the index's log.

    Snapshots count in SIZE, and stay.
    """
    from quire.sessions.snapshot_files import SnapshotFiles
    from quire.tiers.disk import DiskTier

    to_bytes = parse_size(to, where="--to")
    tier = DiskTier(folder, None)
    try:
        tier.count_beside(SnapshotFiles(tier.path).num_bytes())
        before = tier.use().total
        removed = tier.prune(to_bytes)
        after, left = tier.use().total, tier.stats().num_values
    finally:
        tier.close()
    print(
        f"{removed} segments removed, {left} left; {format_size(before)} on disk before, {format_size(after)} now"
    )


@cache.command()
def rm(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Removes the disk cache in DIR: index, slab files and snapshots, and nothing else that is there."""
    from quire.tiers.disk_folder import remove_folder

    if not yes:
        if not sys.stdin.isatty():
            raise ArgumentError("expected --yes, or a terminal to ask on: nothing was removed")
        from quire.sessions.snapshot_files import count_snapshots

        num = count_snapshots(Path(folder).expanduser())
        typer.confirm(f"Remove the disk cache in {folder}, with {num} snapshots?", abort=True, err=True)
    print(f"{format_size(remove_folder(folder))} removed")


@cache.command()
def weights(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="[DIR]", help="The folder given as packed weights; the user's cache if not given."
        ),
    ] = "auto",
    clear: Annotated[bool, typer.Option("--clear", help="Remove them; engines that use them go on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the packed weights kept for later starts, the one used last first; --clear removes them."""
    from quire.saved_folder import SavedFolder, sources_of

    kept = SavedFolder.existing(folder)
    files = sorted(kept.files(), key=lambda file: -file.used_at)
    found = [(file, *sources_of(file.path)) for file in files if file.is_whole]
    if clear:
        kept.clear()
    if as_json:
        entries = [
            {
                "name": file.path.name,
                "bytes": file.num_bytes,
                "used_at": file.used_at,
                "sources": sources,
                "layouts": layouts,
            }
            for file, sources, layouts in found
        ]
        print(json.dumps({"path": str(kept.path), "files": entries, "removed": clear}))
        return
    now = time.time()
    for file, sources, layouts in found:
        what = f"{', '.join(layouts)} of {os.path.commonpath(sources)}" if sources else "what proofs found"
        print(f"{format_size(file.num_bytes):>10}  used {_age(now - file.used_at)}  {what}")
    total = format_size(sum(file.num_bytes for file, _, _ in found))
    print(f"{len(found)} files, {total} in {kept.path}" + (", removed" if clear else ""))
