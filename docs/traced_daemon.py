"""Become a daemon that `docs.walks` traces: `python -m docs.traced_daemon COMMAND ENGINE ARGUMENTS...`."""

import sys

from docs.walks import run_traced

if __name__ == "__main__":
    command, engine = sys.argv[1:3]
    del sys.argv[1:3]
    run_traced(command, engine)
