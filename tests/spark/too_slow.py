"""Spark gives a Python process that it starts ten seconds to connect back, and has no setting for that.

A busy machine may need longer. That has nothing to do with what is tested, so there are a few more starts for
this one error, and for no other.
"""

from __future__ import annotations

__all__ = ["PATIENT", "PYTHON_WAS_TOO_SLOW", "STARTS"]

PYTHON_WAS_TOO_SLOW = "Python worker failed to connect back"
"""What Spark says then."""

STARTS = 3

PATIENT = {"spark.python.authenticate.socketTimeout": "120s"}
"""For all other connections between Spark and Python it can be set; it would be 15 seconds."""
