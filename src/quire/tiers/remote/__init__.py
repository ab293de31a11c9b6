"""Tiers on a server that engines share.

remote_tier      on a Redis server
limited_socket   limits of an exchange; signed, values signed under a secret
"""
