"""The engine: requests in, tokens out. Scheduler, runner, sampling, detokenizer, `LLM` and `AsyncEngine`."""
