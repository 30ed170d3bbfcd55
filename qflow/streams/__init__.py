"""Streams: topics, and what is chosen by them."""
