"""Sessions in the server: a name that requests carry.

session_name      the name of a request's session
request_session   the session's part of a request: its commands, its turn, its end
session_commands  commands for a session's content        session_routes   the same as routes
session_turns     the newest turns of each session
next_turn         a session's next prompt, computed ahead
"""
