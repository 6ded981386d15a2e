"""The rules of growth: stages, actions, slots, alpha, gates, legality, and one step of them all."""
