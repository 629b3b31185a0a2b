"""What makes a process a service: command line, logs, metrics, health, systemd, bounded HTTP ports.

Guarantee: No client of a port and no reader of a log can stop or grow the daemon. The daemons, their serving parts and the
tools may enter.
"""
