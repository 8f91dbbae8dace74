"""What a node, a reader and a mirror show over HTTP: the page, JSON, metrics and health."""

from .beside import HttpBeside, HttpFigures, HttpOptions
from .http import connection_handler
from .node import node_service

__all__ = ["HttpBeside", "HttpFigures", "HttpOptions", "connection_handler", "node_service"]
