"""The OpenAI API on Quire's memory: `quire serve`.

settings   what a config file and flags say    tenants    whose keys are whose
schemas/   bodies of requests and answers       errors     an error as an answer
service    requests into the engine, outputs back, bounded
completions, chat, models, metrics              one router each
front_door who is let in without a key          requests    ids and the log
content_encoding, http_versions, body_limit     what HTTP asks for
app        all of it as an ASGI application     run        uvicorn, signals, draining

Others may use
    app, run            the ASGI application; the process that serves it
    settings, tenants   what a config file says; whose keys are whose
"""
