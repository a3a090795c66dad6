"""What a step of a few tokens costs on a CPU, before and after, and how far it is from what the hardware allows."""
