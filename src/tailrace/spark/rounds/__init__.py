"""The mirror: rounds of plain Spark jobs that keep tables equal to a bucket.

A loop on the driver (`mirror`) asks the bucket for its seqnos and branches (`bucket`), decides what each
vbucket needs (`planning`), has executors stream it straight into files of the tables (`task`), and commits
their answers. `jobs` is the only module that uses Spark.
"""
