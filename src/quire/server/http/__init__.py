"""HTTP in front of and behind the endpoints; nothing here generates anything.

acceptor              accepts connections round-robin by client address
connections           bounds connections: their number, the time of a request, the time of reading an answer
fair_queue            the order in which the connections' data is handled
client_address        identifies clients by address
origin_check          hosts, origins and proxies of requests without a key
request_log           a request's id, and its line in the log
cancel_on_disconnect  cancels a request whose client has gone
body_limit            the size of a body, and of all together
content_encoding      compressed bodies
bodies                reads a body: authorisation, bytes, JSON, fields
http_versions         HEAD, and answers to HTTP/1.0
sse                   an answer as events
"""
