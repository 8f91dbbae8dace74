"""Changes of a bucket in a notebook; a cell begins with ``# %%`` (VS Code, Jupyter with Jupytext, Spyder)."""

# %% Where the bucket is; `tailrace serve --memory` and `tailrace load couchbase://127.0.0.1` make one
import os

import tailrace.spark as ts

NODE = os.environ.get("NODE", "couchbase://127.0.0.1/default")
spark = ts.session("notebook")

# %% All changes, as a table
changes = spark.read.format("tailrace").option("connectionString", NODE).load()
changes.groupBy("op").count().show()

# %% Documents as columns
people = ts.typed(changes.where("op = 'mutation'"), ts.infer_schema(changes))
people.printSchema()

# %% Where the newest ones are
changes.groupBy("vbucket").agg({"seqno": "max"}).orderBy("vbucket").show(4)
