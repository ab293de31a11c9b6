"""The engine: requests in, tokens out. Scheduler, runner, sampling, detokenizer, `LLM` and `AsyncEngine`.

Others may use
    llm, async_engine           `LLM` and `AsyncEngine`
    async_conversation          a conversation for asyncio
    llm_tenants                 the tenants of an `LLM`
    core, driver, engine        the parts, the thread and the step loop of both
    serving_plan                what fits, before anything is loaded
    open_storage                storage and cache by name
    profile                     times of a step's parts
"""
