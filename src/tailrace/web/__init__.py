"""What a node, a reader and a mirror show over HTTP: the page, JSON, metrics and health."""

from .beside import HttpBeside, HttpFigures, HttpOptions
from .http import connection_handler
from .node import keep_past, node_service
from .past import Past

__all__ = [
    "HttpBeside",
    "HttpFigures",
    "HttpOptions",
    "Past",
    "connection_handler",
    "keep_past",
    "node_service",
]
