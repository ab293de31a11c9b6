"""`quire cache`: lists, verifies, shrinks and removes a disk cache's folder; lists and removes saved weights.

`ls`, `verify` and `rm` take a shared store's URL too; `prune` refuses it, for a store evicts by itself.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.cache_store import age_text, clear_store, is_store, list_store, verify_store
from quire.errors import ArgumentError
from quire.sizes import format_size, parse_size

__all__ = ["cache"]

cache = typer.Typer(
    name="cache",
    help="Disk caches and saved weights: list, verify, shrink, remove.",
    rich_markup_mode=None,
)

Folder = Annotated[
    str,
    typer.Argument(metavar="DIR", help="The folder given as disk cache, or the URL given as remote cache."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@cache.command("ls")
def list_folder(folder: Folder, as_json: AsJson = False) -> None:
    """Lists the stored segments by model and namespace; of a shared store their number, bytes and age."""
    if is_store(folder):
        list_store(folder, as_json=as_json)
        return
    from quire.sessions.snapshot_files import SnapshotFiles, count_snapshots
    from quire.tiers.disk.disk_tier import DiskTier

    tier = DiskTier(folder, None)
    try:
        roots, use, cap = tier.roots(), tier.usage(), tier.max_bytes()
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
            age_text(now - root.made_at),
            age_text(now - root.used_at),
            ", ".join(owner for owner in root.owners if owner) or "-",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@cache.command()
def verify(
    folder: Folder,
    repair: Annotated[bool, typer.Option("--repair", help="Remove damaged values.")] = False,
    as_json: AsJson = False,
) -> int:
    """Reads every value and compares its checksum. Status 1: a value is damaged."""
    if is_store(folder):
        return verify_store(folder, repair=repair, as_json=as_json)
    from quire.tiers.disk.disk_folder import find_damage
    from quire.tiers.disk.disk_tier import DiskTier

    tier = DiskTier(folder, None)
    num_values = num_bytes = num_removed = 0
    damaged = []
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
        print(json.dumps({"segments": num_values, "damaged": entries, "removed": num_removed}))
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
    return 1 if damaged else 0


@cache.command()
def prune(
    folder: Folder,
    to: Annotated[str, typer.Option("--to", metavar="SIZE", help='Size of the folder afterwards: "2GiB".')],
) -> None:
    """Removes the least recently used segments until the folder takes at most SIZE, of which 4 MiB are the index's
    log.

    Snapshots count in SIZE and are not removed.
    """
    if is_store(folder):
        raise ArgumentError(
            "expected a folder of a disk cache, got the URL of a shared store, which evicts by itself - in `DIR`; set "
            "its own limit: maxmemory of a server, size= of a folder's URL, a lifecycle rule of a bucket"
        )
    from quire.sessions.snapshot_files import SnapshotFiles
    from quire.tiers.disk.disk_tier import DiskTier

    to_bytes = parse_size(to, where="--to")
    tier = DiskTier(folder, None)
    try:
        tier.count_other_files(SnapshotFiles(tier.path).num_bytes())
        before = tier.usage().total
        removed = tier.prune(to_bytes)
        after, left = tier.usage().total, tier.stats().num_values
    finally:
        tier.close()
    print(
        f"{removed} segments removed, {left} left; {format_size(before)} on disk before, {format_size(after)} now"
    )


@cache.command()
def rm(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Removes the disk cache in DIR: index, slab files and snapshots. Other files there stay. Of a shared store all
    values are removed, those of running engines too."""
    from quire.tiers.disk.disk_folder import remove_folder

    if not yes and not sys.stdin.isatty():
        raise ArgumentError("expected --yes, or a terminal to ask on: nothing was removed")
    if is_store(folder):
        clear_store(folder, yes=yes)
        return
    if not yes:
        from quire.sessions.snapshot_files import count_snapshots

        num = count_snapshots(Path(folder).expanduser())
        typer.confirm(f"Remove the disk cache in {folder}, with {num} snapshots?", abort=True, err=True)
    print(f"{format_size(remove_folder(folder))} removed")


@cache.command()
def weights(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="[DIR]", help="The folder of --packed-weights; the user's cache if not given."
        ),
    ] = "auto",
    clear: Annotated[bool, typer.Option("--clear", help="Remove them; running engines go on.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the saved packed weights, last used first; --clear removes them."""
    from quire.saved_folder import SavedFolder, sources_of

    saved = SavedFolder.existing(folder)
    files = sorted(saved.files(), key=lambda file: -file.used_at)
    entries = [(file, *sources_of(file.path)) for file in files if file.is_whole]
    if clear:
        saved.clear()
    if as_json:
        rows = [
            {
                "name": file.path.name,
                "bytes": file.num_bytes,
                "used_at": file.used_at,
                "sources": sources,
                "layouts": layouts,
            }
            for file, sources, layouts in entries
        ]
        print(json.dumps({"path": str(saved.path), "files": rows, "removed": clear}))
        return
    now = time.time()
    for file, sources, layouts in entries:
        content = f"{', '.join(layouts)} of {os.path.commonpath(sources)}" if sources else "results of proofs"
        print(f"{format_size(file.num_bytes):>10}  used {age_text(now - file.used_at)}  {content}")
    total = format_size(sum(file.num_bytes for file, _, _ in entries))
    print(f"{len(entries)} files, {total} in {saved.path}" + (", removed" if clear else ""))
