"""Host memory of other engines as a tier: each engine gives the values of its host tier to its peers.

peer_server   gives values over TCP or a Unix socket
peer_tier     asks peers; peer_store: one of them, as a store
peer_wire     the messages between the two
"""
