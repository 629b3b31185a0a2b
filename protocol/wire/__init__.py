"""The messages of the two daemons, as bytes.

Guarantee: A message is either whole and within its bounds or refused with a reason; a peer of this schema or of the one
before is understood. Everything but `protocol.runtime` and `protocol.runtime` may enter; it knows no socket.
"""
