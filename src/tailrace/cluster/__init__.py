"""Several nodes on one machine: where the vbuckets belong, and the coordinator that puts them there."""
