"""What all doors to the network share: users and their logins, and the run of doors in one process until a signal."""
