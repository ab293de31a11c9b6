"""What HTTP asks for, before and behind the endpoints; nothing here generates anything.

connections         how many there are, how long each may take for what it sends and reads
turns               whose data is handled next
client_address      whose requests are whose, by address
front_door          who is let in without a key: hosts, origins, proxies
requests            the id of a request, and its line in the log
body_limit          how large a body may be, and all together
content_encoding    packed bodies
bodies              how a body is read: who asks, then its bytes, then JSON, then its fields
http_versions       HEAD, and answers to HTTP/1.0
sse                 an answer as events
"""
