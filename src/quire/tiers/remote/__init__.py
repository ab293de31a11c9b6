"""Tiers in stores that engines share: a server, or a folder of several machines.

remote_tier      the tier, written once over any store: checks, circuit breakers, counts
store_protocol   the contract of a store; stores: by the scheme of a URL; store_url: the URL's options
redis_store      on a Redis or Valkey server
s3_store         in a bucket of S3 or of a server with its protocol; limited_http: its requests within an exchange
folder_store     in a folder of several machines; folder_sweep: its cap; folder_files: its system calls
record           a value with its checksum, as bytes
limited_socket   limits of an exchange; timed_calls: calls that may hang; signed: values signed under a secret
"""
