"""The commands, a small module each. What is slow to import is imported inside the function that needs it."""
