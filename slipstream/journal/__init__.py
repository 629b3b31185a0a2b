"""`slipstream journal` shows, checks, exports and backs up a journal.

Guarantee: A journal of any release is read, also while its trainer writes it. Its command line enters, and
`slipstream_extras/view` reads the content of groups here.
"""
