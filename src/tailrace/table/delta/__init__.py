"""A mirrored table as a Delta table with deletion vectors and domain metadata; see `contract`."""
