"""The end of a trainer's sessions.

Guarantee: a producer that can be heard is told, however slow it is to read: ZeroMQ drops what a peer has not read when its
connection ends, and one that missed the end of the run would wait for this trainer for ever. Whoever is silent is not waited for.
"""

import time
from collections.abc import Callable, Iterable
from typing import Literal

from protocol.transport.channel import ServerChannel
from protocol.wire.messages import Bye, Heartbeat, Hello

FAREWELL_S = 30.0
_LOOK_EVERY_S = 0.2


def say_goodbye(
    channel: ServerChannel,
    peers: Iterable[bytes],
    reason: Literal["finished", "stopping"],
    *,
    silence_s: float,
    beat: Callable[[], None],
    clock: Callable[[], float],
) -> None:
    """Says it to everybody and waits for the same from them, at most `FAREWELL_S`.

    Args:
        silence_s: a producer that said nothing for so long is gone, by `clock`.
        beat: called in every round.
    """
    heard = dict.fromkeys(peers, clock())
    for peer in heard:
        channel.send(peer, Bye(reason))
    deadline = time.monotonic() + FAREWELL_S
    while heard and time.monotonic() < deadline:
        beat()
        for peer, message in channel.poll(_LOOK_EVERY_S):
            if isinstance(message, Bye):
                heard.pop(peer, None)
            elif isinstance(message, Hello | Heartbeat):  # it was away when the others were told, or is back already
                channel.send(peer, Bye(reason))
                if peer in heard:
                    heard[peer] = clock()
        silent_since = clock() - silence_s
        heard = {peer: at for peer, at in heard.items() if at > silent_since}
