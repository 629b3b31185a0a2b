"""Runs the command as `python -m slipstream`."""

from slipstream.cli import main

main()
