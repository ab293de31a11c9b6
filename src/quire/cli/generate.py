"""`quire generate`: answers prompts; streams a single answer, shows a progress bar for several."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options
from quire.cli.opening import open_llm
from quire.config import EngineConfig
from quire.errors import ArgumentError, PromptError
from quire.sizes import format_size

if TYPE_CHECKING:
    from quire.scheduler.request import RequestOutput

__all__ = ["generate"]


def read_prompts(source: str) -> list[str]:
    """Prompts of a file, or of standard input for `-`.

    One prompt a line; blank lines are skipped. A line of a `.jsonl` file is a JSON string or an object with a
    `prompt`.
    """
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"expected a readable UTF-8 file of prompts, got {source}: {error}") from error
    lines = [line for line in text.splitlines() if line.strip()]
    if not source.endswith(".jsonl"):
        return lines
    return [prompt_of_json(line, f"{source}, prompt {number}") for number, line in enumerate(lines, start=1)]


def prompt_of_json(line: str, where: str) -> str:
    try:
        value: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ArgumentError(
            f"expected a JSON string or object at {where}, got {line[:60]!r}: {error}"
        ) from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ArgumentError(f'expected a JSON string or {{"prompt": "..."}} at {where}, got {line[:60]!r}')
    return prompt


def as_json(results: list[RequestOutput], stats: dict[str, Any]) -> str:
    """The object that `--json` prints."""
    outputs = [
        {
            "prompt": result.prompt,
            "prompt_token_ids": list(result.prompt_token_ids),
            "text": output.text,
            "token_ids": list(output.token_ids),
            "finish_reason": output.finish_reason,
            **({} if output.score is None else {"score": output.score}),
            "num_cached_tokens": result.num_cached_tokens,
            "num_tier_tokens": result.num_tier_tokens,
        }
        for result in results
        for output in result.outputs
    ]
    return json.dumps({"outputs": outputs, "stats": stats}, ensure_ascii=False)


def checked_results(results: list[RequestOutput]) -> list[RequestOutput]:
    """The results. *raises:* the first error among them: a command that answers half of its prompts has failed."""
    for result in results:
        if result.error is not None:
            raise result.error
    return results


def figures(stats: dict[str, Any]) -> dict[str, str]:
    """The ten figures that `--stats` prints, and those of drafts and of `verify_hits` if the engine has them.

    Speeds are the engine's: all requests of a step together.
    """

    def speed(name: str) -> str:
        return f"{stats[name]:.1f} tokens/s" if stats[name] else "-"

    verified = ", ".join(
        f"{count} {name.replace('_', ' ')}" for name, count in stats.get("verified_hits", {}).items() if count
    )
    drafts: dict[str, str] = {}
    if "num_drafts" in stats:
        num_steps, accepted = stats["num_drafts"], stats["num_accepted_tokens"]
        places = ", ".join(map(str, stats["num_accepted_by_position"]))
        drafts["drafts accepted"] = f"{accepted} of {stats['num_draft_tokens']}; by place {places}"
        drafts["tokens a step with drafts"] = f"{1 + accepted / num_steps:.2f}" if num_steps else "-"
    with_content = stats["held"] + stats["in_flight"] + stats["pinned"] + stats["cached"]
    return {
        "prompt tokens": str(stats["num_prompt_tokens"]),
        "of them from the cache": f"{stats['num_cached_tokens']} ({stats['hit_rate']:.0%})",
        "generated tokens": str(stats["num_generated_tokens"]),
        "time to first token, mean": f"{stats['time_to_first_token_s']:.3f} s",
        "prefill": speed("prefill_tokens_per_second"),
        "decode": speed("decode_tokens_per_second"),
        "KV memory at most": f"{format_size(stats['kv_peak_bytes'])} of {format_size(stats['kv_memory_bytes'])}",
        "blocks with content": f"{with_content} of {stats['num_blocks']}",
        "blocks evicted": str(stats["evicted_blocks"]),
        "preemptions": str(stats["num_preemptions"]),
        **drafts,
        **({"hits verified": verified} if verified else {}),
    }


def print_stats(stats: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in figures(stats).items():
        table.add_row(name, value)
    Console(stderr=True).print(table)


@options.engine_flags()
def generate(
    prompt: Annotated[list[str] | None, typer.Argument(metavar="[PROMPT]...", help="The prompts.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts", metavar="FILE", help="More prompts, one a line (or .jsonl); - is standard input."
        ),
    ] = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = None,
    early_stopping: options.EarlyStopping = None,
    as_json_object: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
    ] = False,
    show_stats: Annotated[
        bool,
        typer.Option("--stats", help="Print ten figures of the cache and the engine; --json prints all."),
    ] = False,
    profile_trace: Annotated[
        str | None,
        typer.Option(
            "--profile-trace", metavar="FILE", help="Profile, and write a Chrome trace for Perfetto."
        ),
    ] = None,
    **engine: Any,
) -> None:
    """Continues each PROMPT with a model."""
    texts = list(prompt or []) + (read_prompts(prompts) if prompts is not None else [])
    if not texts:
        raise PromptError(
            "expected at least one prompt, got none; give one as argument, or a file with --prompts FILE"
        )
    if any(not text for text in texts):
        raise PromptError("expected every prompt to have text, got an empty one")
    options.refuse_models(prompt or (), engine)
    if profile_trace is not None:
        engine["profile"] = True
    config = EngineConfig(**engine)

    from quire.engine.profile import check_trace_path  # imported late: bad options do not wait for torch
    from quire.sampling.params import SamplingParams

    if profile_trace is not None:
        check_trace_path(profile_trace)
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping={"true": True, "false": False}.get(early_stopping, early_stopping),  # type: ignore[arg-type]
    )

    with open_llm(config) as llm:
        print(f"quire: {llm.capacity}", file=sys.stderr)
        if as_json_object:
            results = checked_results(llm.generate(texts, params))
            print(as_json(results, llm.stats()))
        elif len(texts) == 1:
            stream = llm.stream(texts[0], params)
            print(texts[0], end="", flush=True)
            for delta in stream:
                print(delta, end="", flush=True)
            print()
        else:
            for result in checked_results(llm.generate(texts, params, progress=sys.stderr.isatty())):
                print(f"{result.prompt}{result.outputs[0].text}\n")
        if show_stats and not as_json_object:
            print_stats(llm.stats())
        if llm.profile is not None:
            print(llm.profile.table(), file=sys.stderr)
            if profile_trace is not None:
                llm.profile.write_trace(profile_trace)
