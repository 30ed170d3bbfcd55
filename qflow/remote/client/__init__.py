"""The callers' side of the door: requests and replies, a link that matches them, and what threads and tasks call."""
