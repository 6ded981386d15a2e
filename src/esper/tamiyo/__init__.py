"""The controller: it looks, masks and decides."""
