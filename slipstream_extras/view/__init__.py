"""`slipstream view`: a run in the browser, with the texts that its policies wrote.

Guarantee: It reads files of the run and answers of its daemons, and never writes to the run. The text of a completion is shown
as text and nothing else. Nothing but its command line enters.
"""
