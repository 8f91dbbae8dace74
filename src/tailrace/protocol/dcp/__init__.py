"""DCP, and what the older dialects build on: reader, producer, replica, takeover."""
