"""The embedded store: vbuckets of documents on a log of ready-made DCP frames, on disk or in memory.

The contract is in `base`; `tailrace.store.engine.Engine` keeps it.
"""
