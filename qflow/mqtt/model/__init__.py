"""What sessions, subscriptions and messages are, without any I/O."""
