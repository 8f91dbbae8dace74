"""A mirrored table: rows, and in the same commit the position of every vbucket.

`contract` defines what a table is, `store` where its files are; `delta` keeps the contract with a Delta
table. Nothing here depends on Spark.
"""
