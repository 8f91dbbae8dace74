"""TAP: one stream per connection, with its own acknowledgements and checkpoints."""
