"""The contract of a mirrored table, kept with a Delta table that has deletion vectors and domain metadata."""
