"""`/v1/messages`: Anthropic's Messages API on the chat messages that the other endpoints use.

messages_bodies.py     bodies of requests
messages_prompt.py     a body as a chat request: its messages, tools, choice and format
messages_answer.py     answers and events
messages_errors.py     errors in Anthropic's form
messages_routes.py     the routes
"""
