"""What both daemons agree on: messages, codec, channels, configuration and versions.

Guarantee: nothing in this package imports torch, vLLM or TRL, so `--help` and `--check` stay instant.
"""

__version__ = "0.2.0"
