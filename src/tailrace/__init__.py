"""Tailrace carries a document store's change stream into Spark, and keeps it true."""

__version__ = "0.1.0"
