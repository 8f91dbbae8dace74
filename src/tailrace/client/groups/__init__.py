"""Several processes share the vbuckets of a bucket: who has which, and what was saved of it.

record    what a group knows, as one document; who may do what with it is decided here
stores    where the document is kept: a directory, a Redis
member    one process of the group: joins, shows that it lives, takes, saves, hands over
reader    the member and a reading of the client, together
"""
