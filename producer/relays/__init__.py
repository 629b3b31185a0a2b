"""How producers share policies: the cache of a host, relays between hosts, and when a source is left for the next one.

Guarantee: Nobody here has to be trusted. What is handed over has the sha256 that the trainer announced, and whoever dies, lies or
is slow costs a bounded time, after which the trainer itself is asked. The link, the startup and the assembly may enter.
"""
