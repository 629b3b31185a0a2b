"""How messages travel: ZeroMQ sockets and bounds on what peers can make them keep.

Guarantee: Nothing that a peer sends, or does not send, ends a socket's owner or lets it grow without a bound. Both daemons
enter through `channel`, `zeromq_server` and `zeromq_client`.
"""
