"""The soak: real daemons under a mixed load for hours, and whether anything of theirs grows that should not."""
