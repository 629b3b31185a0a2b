"""Who may talk to whom: CURVE keys, the file of authorized keys, secrets of users.

Guarantee: A secret is read only from a place that nobody else can read, and no message or log line quotes one. The transport,
the sections of the configuration and the daemons may enter.
"""
