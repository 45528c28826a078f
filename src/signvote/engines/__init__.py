"""What moves the bytes of a vote between machines; each engine is a module or package of its own."""
