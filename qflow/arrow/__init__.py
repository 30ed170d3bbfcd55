"""Streams as Arrow record batches, and back: what Spark, beside a log, and other hosts, at a door, both need."""
