"""The index of a stream's topics: which blocks hold which."""
