"""What msgspec raises for bytes that somebody else wrote.

Guarantee: of JSON and of msgpack these are all. Text that is not UTF-8, and nesting without end, are errors of Python's own.
"""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
