"""Several nodes on one machine: where the vbuckets are, and who sees to it that they are there."""
