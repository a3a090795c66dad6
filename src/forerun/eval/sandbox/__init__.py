"""Running code that a model wrote: a process of its own, behind walls, for a few seconds."""
