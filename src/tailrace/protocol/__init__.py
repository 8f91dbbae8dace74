"""Sans-IO state machines: bytes in, events out; time comes in as ``now``."""
