"""`qflow demo`: a year of flights through a small queue, with a kill in the middle."""
