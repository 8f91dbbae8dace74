"""``tailrace doctor``: everything that can be wrong between here and a bucket, and what to do about it."""
