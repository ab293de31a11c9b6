"""The OpenAI API on Quire's memory: `quire serve`.

settings        a config file and flags               api_keys         API keys and their tenants
schemas/        bodies of requests and answers        api_errors       an error as an answer
http/           connections, bodies, origins, ids, the log, events
outputs/        output formats: tool calls, reasoning, schemas
service         requests into the engine, outputs back, bounded
api_admission   how many requests may be open         threads          work outside the event loop
messages        a chat's messages as a prompt         logprobs         log probabilities in OpenAI's shapes
live_page/      the live page, its events, the comparison of storages
completions, chat, conversations, models, admin, metrics   one router each
app             the ASGI application                  run              uvicorn, signals, draining

Others may use
    app, run             the ASGI application; the process that serves it
    settings, api_keys   a config file's content; API keys and their tenants
"""
