"""The node: sessions over the store, sans-IO, and the asyncio pump around them.

`node.Node` is the server without sockets, `session.Session` one connection of it; `aio.Server` gives them
sockets, threads and a clock. A simulation runs many nodes in one process without `aio`.
"""
