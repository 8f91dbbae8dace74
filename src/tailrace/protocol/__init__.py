"""Sans-IO state machines: bytes in, events out; time comes in as ``now``.

What all dialects share is here; a folder per family has the rest, under the same names: *reader* (a client
that receives), *producer* (the node's sending side), *replica* (the node's receiving side), *takeover*. The
shared modules import no family, `dcp` imports neither of the others; `upr` and `tap` build on `dcp`.
"""
