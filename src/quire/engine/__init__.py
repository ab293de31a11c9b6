"""The engine: requests in, tokens out. Scheduler, runner, sampling, detokenizer, `LLM` and `AsyncEngine`.

Others may use
    llm, async_engine           `LLM` and `AsyncEngine`
    async_conversation          a conversation for asyncio
    prompt_explanation          why a prompt is cached no further
    engine_view                 the state of an engine between two steps, to show it
    driver, engine              the thread and the step loop of both
    engine_parts                the parts of the step loop
    serving_plan                what fits, before anything is loaded
    scored_prompt               the scores of a prompt
    open_storage                storage and cache by name
    profile                     times of a step's parts
"""
