"""How messages travel: ZeroMQ sockets and the bounds of who may connect.

Guarantee: Nothing that a peer sends, or does not send, ends a socket's owner or lets it grow without a bound. Both daemons
enter through `channel` and `zeromq`.
"""
