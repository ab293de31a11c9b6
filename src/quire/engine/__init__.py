"""The engine: requests in, tokens out. Scheduler, runner, sampling, detokenizer, `LLM` and `AsyncEngine`.

Others may use
    llm, async_engine           `LLM` and `AsyncEngine`
    async_conversation          a conversation that is awaited
    llm_tenants                 the tenants of an `LLM`
    core, driver, engine        what both run on: its parts, its thread, its step
    plan                        what fits, before anything is loaded
    storages                    storage and cache by name
    profile, recompute          where a step's time goes; a disk cache computed again and compared
"""
