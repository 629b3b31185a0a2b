"""The keeping of a process: files, children, logs, metrics, health, HTTP ports.

Guarantee: No reader or client can stop or grow the process, a file is whole whenever it is read, and no child outlives the
daemon. Everyone may enter; the room knows nothing else of Slipstream but its errors.
"""
