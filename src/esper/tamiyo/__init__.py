"""The controller: observations, masks, policy, and scripted controllers."""
