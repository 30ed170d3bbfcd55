"""Streams: messages by topic, kept in order and delivered to subscriptions."""
