"""`slipstream journal`: looks at a journal, checks it, exports it, backs it up.

Guarantee: A journal of any release is read, also while its trainer writes it. Its command line enters, and `slipstream/view`
reads the content of groups here.
"""
