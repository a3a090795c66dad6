"""Plain steps of each family of models: how near they come to reading every weight once at the speed of memory."""
