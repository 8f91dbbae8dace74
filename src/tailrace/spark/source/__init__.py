"""The Spark data source ``tailrace``: batch and streaming reads of a bucket's changes. Light to import."""
