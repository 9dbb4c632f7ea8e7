"""The stage fp8: eight bits an element, and what has to be done that attention survives it."""
