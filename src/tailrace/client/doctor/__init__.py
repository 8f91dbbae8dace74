"""``tailrace doctor``: everything that can be wrong between here and a bucket, each with the way out."""
