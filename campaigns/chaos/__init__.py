"""Both daemons under SIGKILL and SIGSTOP: nothing accepted is lost, nothing is trained twice, and the journal can be
trained again bit for bit. `python -m campaigns.chaos --help`."""
