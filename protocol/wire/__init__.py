"""The messages of the two daemons, as bytes.

Guarantee: A message is either whole and within its bounds or refused with a reason. Every room but
`protocol.runtime` may enter; it knows no socket.
"""
