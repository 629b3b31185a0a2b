"""Carries messages: ZeroMQ sockets, the keys that may connect, and bounds on the memory that peers can occupy.

Guarantee: Nothing that a peer sends, or does not send, ends a socket's owner or lets it grow without a bound. With keys, only the
owner of an authorized key is heard. Both daemons enter through `channel`, `server` and `client`.
"""
