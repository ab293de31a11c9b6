"""The OpenAI API on Quire's memory: `quire serve`.

settings   what a config file and flags say    tenants    whose keys are whose
schemas/   bodies of requests and answers       errors     an error as an answer
http/      what HTTP asks for: connections, bodies, who is let in, ids and the log, events
forms/     the forms of answers: calls, thoughts, schemas
service    requests into the engine, outputs back, bounded
admission  how many of them there may be        off_loop   work that the event loop does not wait for
messages   a chat's messages as a prompt        logprobs   log probabilities in OpenAI's shapes
completions, chat, conversations, models, admin, metrics   one router each
app        all of it as an ASGI application     run        uvicorn, signals, draining

Others may use
    app, run            the ASGI application; the process that serves it
    settings, tenants   what a config file says; whose keys are whose
"""
