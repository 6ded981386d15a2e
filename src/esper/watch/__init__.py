"""The page that shows run folders while they are written, and the small server behind it."""
