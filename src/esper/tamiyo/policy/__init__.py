"""What Tamiyo sees, what it may do, and the network that chooses."""
