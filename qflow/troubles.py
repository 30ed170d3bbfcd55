"""Parts of maintenance that `qflow.doctor` knows by their names in `troubles`, for they are more than that."""

SPOOL_THERE = "whether the spool is there"
"""Its directory, or its log, was removed while it is open."""
LOG_TAKES = "whether the log takes what comes"
"""It failed, and is to be opened again."""
