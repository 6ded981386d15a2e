"""Changes to the modules of a user's model: which are possible, making them, and taking them back."""
