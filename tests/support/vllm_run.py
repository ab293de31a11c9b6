"""Requests through a real vLLM with or without the connector: a JSON object on stdin, a line of JSON on stdout.

Runs under vLLM's own Python; the only script of the tests that imports vllm. Given: model, options (of the connector,
or null), role, engine (more keywords of `LLM`), batches (of requests: prompt, max_tokens, salt). A line for each batch:
for each request its tokens and the prompt tokens that were in a cache. It goes on until stdin ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    given = json.loads(sys.stdin.readline())
    transfer: dict[str, Any] = {}
    if given["options"] is not None:
        transfer["kv_transfer_config"] = KVTransferConfig(
            kv_connector="QuireConnector",
            kv_connector_module_path="quire.connect.vllm",
            kv_role=given.get("role", "kv_both"),
            kv_connector_extra_config=given["options"],
        )
    llm = LLM(model=given["model"], enforce_eager=True, seed=0, **given["engine"], **transfer)
    for batch in given["batches"]:
        prompts = [
            {"prompt_token_ids": one["prompt"], **({"cache_salt": one["salt"]} if one.get("salt") else {})}
            for one in batch
        ]
        params = [
            SamplingParams(temperature=0, max_tokens=one["max_tokens"], ignore_eos=True) for one in batch
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        answers = [[list(one.outputs[0].token_ids), one.num_cached_tokens] for one in outputs]
        print("RESULT " + json.dumps({"answers": answers}), flush=True)
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
