"""Several copies of a server behind one address, on Ray Serve, which starts, routes to, replaces and counts them.

See docs/scale.md. What is here is what Ray cannot know: which prompts begin alike, what a client is told whose copy was
lost, whether an engine still moves, and one page of metrics for all. Nothing outside of this package imports Ray.
"""
