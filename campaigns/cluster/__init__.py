"""A run under Ray, on several nodes of this machine, whose daemons, ranks and nodes are killed."""
