"""A cluster whose replicas are killed and stopped at random while clients ask; every answer against one engine's.

    python tests/support/cluster_soak.py [--seconds 300] [--seed N] [--apart]

Bursts of requests, with pauses in which the number of replicas returns to one. Half of the requests stream, most have a
seed, the others are greedy. --apart: prompts are computed by a prefill replica, which is killed too. A line of JSON at
the end; status 1 for a wrong token, text or end, for an answer that did not end, and for one that ended with an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from support.ray_process import RayProcess, free_port

from quire import LLM, SamplingParams

_CLIENTS = 6
_BURST_S = 40.0
_PAUSE_S = 15.0
_HANG_S = 6
_STOPPED_S = 2.0 * _HANG_S  # then it is killed
_ANSWER_S = 300.0


class Soak:
    """seed: of requests and faults."""

    def __init__(self, url: str, ray: RayProcess, seed: int, seconds: float) -> None:
        self._url, self._ray, self._seed = url, ray, seed
        self._ends_at = time.monotonic() + seconds
        self._engine = LLM(kv_memory="64MiB")
        self._lock = threading.Lock()  # of the engine, its answers and the counts
        self._wanted: dict[tuple[str, int, int | None], dict[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._is_pause = threading.Event()

    def run(self) -> None:
        threads = [threading.Thread(target=self._ask_all, args=(number,)) for number in range(_CLIENTS)]
        threads.append(threading.Thread(target=self._disturb))
        for thread in threads:
            thread.start()
        while time.monotonic() < self._ends_at:
            self._wait(_BURST_S)
            self._is_pause.set()
            self._wait(_PAUSE_S)
            self._is_pause.clear()
        for thread in threads:
            thread.join(2 * _ANSWER_S)
            if thread.is_alive():
                self.faults.append("a request did not end")
        self._engine.close()

    def _wait(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._ends_at - time.monotonic())))

    # -- requests ----------------------------------------------------------------------------------------

    def _ask_all(self, number: int) -> None:
        chance = random.Random(f"{self._seed} {number}")
        while time.monotonic() < self._ends_at:
            if self._is_pause.is_set():
                time.sleep(0.1)
                continue
            name = f"work_{chance.randrange(40)}"
            prompt = f"def {name}(first, second):\n    return first + second\n" * chance.choice((1, 4, 12))
            length, seed = chance.choice((16, 64, 300)), chance.choice((None, chance.randrange(5)))
            stream = chance.random() < 0.5
            try:
                found = self._ask(prompt, length, seed, stream)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                found = {"error": repr(error)}
            wanted = self._answer(prompt, length, seed)
            with self._lock:
                self.counts["streams" if stream else "answers"] += 1
                if found != wanted:
                    self.counts["lost" if "error" in found else "wrong"] += 1
                    asked = f"{name} max_tokens={length} seed={seed} stream={stream}"
                    self.faults.append(f"{asked}: {found.get('error') or (found, wanted)}")

    def _ask(self, prompt: str, length: int, seed: int | None, stream: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": length,
            "return_token_ids": True,
            "stream": stream,
        }
        body |= {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
        url = f"{self._url}/v1/completions"
        if not stream:
            answer = httpx.post(url, json=body, timeout=_ANSWER_S).json()
            if "error" in answer:
                return {"error": answer["error"]}
            choices = answer["choices"]
        else:
            choices = []
            with httpx.stream("POST", url, json=body, timeout=_ANSWER_S) as answer:
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return {"error": event["error"]}
                    choices += event["choices"]
        return {
            "token_ids": [token for choice in choices for token in choice["token_ids"]],
            "text": "".join(choice["text"] for choice in choices),
            "end": choices[-1]["finish_reason"],
        }

    def _answer(self, prompt: str, length: int, seed: int | None) -> dict[str, Any]:
        """One engine's."""
        with self._lock:
            key = (prompt, length, seed)
            if key not in self._wanted:
                params = SamplingParams(
                    max_tokens=length, temperature=0.0 if seed is None else 1.0, seed=seed
                )
                [made] = self._engine.generate([prompt], params)[0].outputs
                self._wanted[key] = {
                    "token_ids": made.token_ids, "text": made.text, "end": made.finish_reason,
                }  # fmt: skip
            return self._wanted[key]

    # -- faults ------------------------------------------------------------------------------------------

    def _disturb(self) -> None:
        chance = random.Random(f"{self._seed} faults")
        while time.monotonic() < self._ends_at:
            self._wait(chance.uniform(2.0, 12.0))
            replicas = self._ray.replicas("engine", "prefill")
            if not replicas:
                continue
            pid, is_stopped = chance.choice(replicas), chance.random() < 0.3 and len(replicas) > 1
            try:
                if is_stopped:
                    os.kill(pid, signal.SIGSTOP)
                    time.sleep(_STOPPED_S)
                os.kill(pid, signal.SIGKILL)
                self.counts["stopped" if is_stopped else "killed"] += 1
            except ProcessLookupError:
                pass


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--seconds", type=float, default=300.0)
    arguments.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    arguments.add_argument("--apart", action="store_true")
    given = arguments.parse_args()
    port = free_port()
    number = "--max-replicas 3 --target-requests 2 --scale-up-seconds 0.1 --scale-down-seconds 2"
    if given.apart:
        number = "--prefill-replicas 1 --decode-replicas 2 --prefill-min-tokens 64 --host-cache 64MiB"
    words = f"cluster serve {number} --cpus 0.5 --kv-memory 64MiB --hang-seconds {_HANG_S} --port {port}"
    with tempfile.TemporaryDirectory() as folder:
        ray = RayProcess(Path(folder), sys.executable, "-m", "quire", *words.split())
        try:
            ray.wait_for(f"http://127.0.0.1:{port}")
            soak = Soak(f"http://127.0.0.1:{port}", ray, given.seed, given.seconds)
            soak.run()
            names = ("continued_streams", "broken_streams", "retries", "prefills")
            page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=_ANSWER_S).text
        finally:
            ray.end()
    counts: dict[str, float] = dict(soak.counts)
    for line in page.splitlines():
        for name in names:
            if line.startswith(f"quire:router_{name}_total"):
                counts[line.split(" ")[0].removeprefix("quire:router_")] = float(line.split(" ")[1])
    print(json.dumps({"part": "cluster", "seed": given.seed, "seconds": given.seconds, **counts}))
    for fault in soak.faults[:20]:
        print(fault, file=sys.stderr)
    return int(bool(soak.faults))


if __name__ == "__main__":
    sys.exit(main())
