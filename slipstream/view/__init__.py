"""`slipstream view`: a run in the browser, with the texts that its policies wrote.

Guarantee: It reads what the run left on the disk and what its daemons answer, and never writes to the run. What a completion
says is shown as text and nothing else. Nothing but its command line enters.
"""
