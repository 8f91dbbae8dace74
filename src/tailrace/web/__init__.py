"""What a node shows in a browser, and to tools that speak HTTP."""

from .http import respond, serve_http

__all__ = ["respond", "serve_http"]
