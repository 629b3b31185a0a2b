"""The parts that both daemons share: messages, channels, configuration, and the keeping of a process.

Guarantee: nothing in this package imports torch, vLLM or TRL, so `--help` and `--check` stay instant.
"""

__version__ = "0.3.0"
