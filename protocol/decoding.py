"""What msgspec raises for bytes, and for values, of somebody else.

Guarantee: of JSON and of msgpack these are all. Text that is not UTF-8, and nesting without end, are errors of Python's own.
"""

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# What it raises for values that it cannot write: text with half a character, integers of more than 64 bits, types of others.
UNSENDABLE = (TypeError, ValueError, OverflowError, RecursionError)
