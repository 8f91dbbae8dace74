"""UPR, drafts A and B: older messages on DCP's streams."""
