"""Memory: who may use how much of it, and the list of messages. Nothing here touches a disk."""
