"""What goes through a door: frames, columns and errors by name. No I/O."""
